"""Turn a config into the objects of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from ldpfl import models
from ldpfl.data import Dataset, Samples, partition
from ldpfl.data.partition import LABEL_BLIND
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import LOWEST_PROBABILITY, RangesConfig, RunConfig
from ldpfl.layout import ParameterLayout
from ldpfl.mechanisms import Facts, Mechanism, Training, built
from ldpfl.randomness import Purpose, stream
from ldpfl.ranges import LayerRanges, range_rule
from ldpfl.server import Checkpoint, initial_checkpoint
from ldpfl.simulation import BatchSchedule, Federation, GradientTrainer, LocalTask, RecordGradientTrainer, Trainer, VectorizedTrainer
from ldpfl.suggestions import did_you_mean

_HOLDOUT = 0.1


def choose_device(name: str) -> torch.device:
    """Return the device called ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: CUDA is asked for and not there, or the name is unknown.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: known: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("CUDA was asked for, but PyTorch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build(config: RunConfig, task: Dataset, device: torch.device) -> tuple[Federation, Checkpoint]:
    """Return the federation that ``config`` describes on the data of ``task``, and its state before the first round.

    Raises:
        ConfigError, PrivacyError: what is wrong with the config or the model.
    """
    train, evaluation = _evaluation_split(config, task)
    module = models.create(config.model.name, task.shape, task.classes, seed=_model_seed(config.seed), options=config.model.options)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    parts = partition(
        train.labels.numpy(),
        config.clients.count,
        stream(config.seed, Purpose.PARTITION),
        scheme=config.data.partition,
        alpha=config.data.alpha,
        labels_per_client=config.data.labels_per_client,
        isolated=config.data.isolated,
    )
    local = LocalTask(
        module.to(device),
        layout,
        train.to(device),
        task.mean,
        task.std,
        config.training.learning_rate,
        config.training.momentum,
        None if config.training.clip_norm == "off" else config.training.clip_norm,
    )
    ranges = initial_ranges(config, layout, weights)
    mechanism = mechanism_of(config, ranges, [own.size for own in parts])
    federation = Federation(
        seed=config.seed,
        task=local,
        trainer=trainer_of(config, local, mechanism),
        samples=parts,
        evaluation=evaluation.to(device),
        mechanism=mechanism,
        perturbed=config.mechanism.perturbed,
        rule=range_rule(config.ranges.rule, floor=config.ranges.floor),
        optimiser=config.training.optimiser(measured_weights(config, layout)),
        fraction=config.clients.fraction,
        epochs=config.training.epochs,
        batch_size=config.training.batch_size,
        channel=config.shuffling.channel,
        self_sampling=self_sampling_of(config),
        once_over=config.training.rounds if config.clients.once else None,
    )
    _try_model(config, local, mechanism, weights, task.classes)
    origin = f"{task.name} {task.fingerprint} on {device.type}"
    federation.mechanism.payload_bits(ranges)  # says so if the mechanism does not fit the layers
    return federation, initial_checkpoint(weights, ranges, origin)


def self_sampling_of(config: RunConfig) -> float | None:
    """Return the lowest probability with which a client joins a round, if clients decide for themselves.

    Raises:
        ConfigError: the server is to draw a part of the clients as well.
    """
    self_sampling = LOWEST_PROBABILITY[config.clients.self_sampling]
    if config.clients.once and (self_sampling is not None or config.clients.fraction != 1):
        raise ConfigError("clients.once gives each client its only round: leave clients.self_sampling and clients.fraction out")
    if self_sampling is not None and config.clients.fraction != 1:
        raise ConfigError("clients.self_sampling lets clients decide, and clients.fraction the server: leave one of them out")
    return self_sampling


def measured_weights(config: RunConfig, layout: ParameterLayout) -> int:
    """Return how many weights the model measures in the first round, and does not train; they are its first ones."""
    return layout.sizes[0] if config.model.name == models.CENTERED else 0


def trainer_of(config: RunConfig, local: LocalTask, mechanism: Mechanism) -> Trainer:
    """Return what turns a broadcast into what clients put into ``mechanism``.

    Raises:
        ConfigError: the mechanism bounds each record's gradient, and something else than gradients is asked for.
    """
    if config.model.name == models.CENTERED and config.mechanism.perturbed != "gradient":
        raise ConfigError(
            f"model {models.CENTERED!r} measures its center in the place of a gradient: set mechanism.perturbed to 'gradient'"
        )
    clip = mechanism.record_clip
    if config.mechanism.perturbed != "gradient":
        if clip is not None:
            raise ConfigError(f"mechanism {mechanism.name!r} bounds each record's gradient: mechanism.perturbed must be 'gradient'")
        return VectorizedTrainer(local)
    if local.momentum or local.clip_norm is not None:
        raise ConfigError("a gradient is taken once a round, at the broadcast weights: leave training.momentum and training.clip_norm out")
    return GradientTrainer(local) if clip is None else RecordGradientTrainer(local, clip)


def mechanism_of(config: RunConfig, ranges: LayerRanges, sizes: Sequence[int] = (1,)) -> Mechanism:
    """Return the mechanism that ``config`` names.

    ``sizes`` are those of the clients' data sets.

    Raises:
        ConfigError: a setting is out of range, or does not fit the others.
    """
    settings, training = config.mechanism, config.training
    if not settings.uses_ranges and (config.ranges.center != 0 or config.ranges.rule != "fixed"):
        raise ConfigError(f"mechanism {settings.name!r} clips by norm and uses no ranges: leave ranges.center and ranges.rule out")
    clip_norm = None if training.clip_norm == "off" else training.clip_norm
    local = Training(training.learning_rate, training.epochs, training.batch_size, clip_norm)
    facts = Facts(ranges, training.rounds, min(sizes), local, sum(sizes) / len(sizes), config.shuffling.channel == "secure-sum")
    mechanism = built(settings, facts)
    if mechanism.record_clip is not None and config.data.by_label:
        raise ConfigError(
            f"mechanism {mechanism.name!r} protects single records, and where data are divided by their labels one record decides where "
            f"others go: set data.partition to {' or '.join(sorted(LABEL_BLIND))}, and leave data.private_label out"
        )
    return mechanism


def _try_model(config: RunConfig, local: LocalTask, mechanism: Mechanism, weights: Tensor, classes: int) -> None:
    """Train two clients for a step on blank images, so that a model that does not fit is refused before a run begins."""
    blank = Samples(torch.zeros_like(local.images.inputs[:2]), torch.zeros_like(local.images.labels[:2]))
    schedule = BatchSchedule(torch.tensor([[[0, 1]], [[1, 0]]]), torch.ones(2, 1, 2)).to(blank.inputs.device)
    try:
        logits = functional_call(local.module, local.layout.unflatten(weights.to(blank.inputs.device)), (local.normalised(blank.inputs),))
        fits = tuple(logits.shape) == (2, classes)
        trainer_of(config, replace(local, images=blank), mechanism).train(weights, schedule)
    except Exception as error:  # it is the user's code, on blank images: no private value is in the message
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"model {config.model.name!r} cannot be trained on {config.data.name}: {type(error).__name__}: {reason}"
        ) from error
    if not fits:
        raise ConfigError(f"model {config.model.name!r} gives {tuple(logits.shape)} for two images, expected (2, {classes})")


def _model_seed(seed: int) -> int:
    return int(stream(seed, Purpose.MODEL).integers(2**63))


def _evaluation_split(config: RunConfig, task: Dataset) -> tuple[Samples, Samples]:
    if config.data.evaluate_on == "test":
        return task.train, task.test
    order = torch.from_numpy(stream(config.seed, Purpose.HOLDOUT).permutation(len(task.train)).astype(np.int64))
    held_out = int(len(task.train) * _HOLDOUT)
    return task.train.take(order[held_out:]), task.train.take(order[:held_out])


def initial_ranges(config: RunConfig, layout: ParameterLayout, weights: Tensor) -> LayerRanges:
    """Return the ranges of the first round; ``weights`` is the public initial model."""
    ranges = config.ranges
    if ranges.radius == "initial":
        _check_initial(config)
        return LayerRanges.covering(weights, layout.sizes, margin=ranges.margin, floor=ranges.floor)
    return LayerRanges(_per_layer("center", ranges.center, layout), _per_layer("radius", ranges.radius, layout), layout.sizes)


def _check_initial(config: RunConfig) -> None:
    if config.mechanism.perturbed == "update":
        raise ConfigError("ranges.radius = 'initial' covers weights, but mechanism.perturbed is 'update': give a number")
    if config.ranges.center != RangesConfig().center:
        raise ConfigError("ranges.radius = 'initial' sets the center as well: leave ranges.center out")


def _per_layer(key: str, value: float | Mapping[str, float], layout: ParameterLayout) -> Tensor:
    if not isinstance(value, Mapping):
        return torch.full((len(layout.names),), float(value), dtype=torch.float64)
    for name in value:
        if name not in layout.names:
            raise ConfigError(f"ranges.{key} names no layer {name!r}: {did_you_mean(name, layout.names)}")
    missing = [name for name in layout.names if name not in value]
    if missing:
        raise ConfigError(f"ranges.{key} lacks the layers {', '.join(missing)}")
    return torch.tensor([value[name] for name in layout.names], dtype=torch.float64)
