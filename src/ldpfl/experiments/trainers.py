"""What trains a run's clients, and the trial of its model before anything is trained."""

from __future__ import annotations

import pickle
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ldpfl import models
from ldpfl.data import Dataset, Samples
from ldpfl.data.loading import Warn
from ldpfl.errors import ConfigError, PrivacyError, first_line
from ldpfl.experiments.config import RunConfig
from ldpfl.mechanisms import Mechanism
from ldpfl.simulation import BatchSchedule, GradientTrainer, LocalTask, LoopTrainer, RecordGradientTrainer, Trainer, VectorizedTrainer
from ldpfl.simulation.local_optimiser import LocalOptimiser
from ldpfl.tasks import Task


def trainer_of(config: RunConfig, local: LocalTask, mechanism: Mechanism, *, at_once: bool = True) -> Trainer:
    """Return what turns a broadcast into what clients put into ``mechanism``, many clients ``at_once`` or one after another.

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
        return VectorizedTrainer(local) if at_once else LoopTrainer(local)
    if local.optimiser != LocalOptimiser(local.optimiser.learning_rate, rounds=local.optimiser.rounds) or local.clip_norm is not None:
        raise ConfigError("a gradient is taken once a round, at the broadcast weights: leave the client's optimiser and its clip_norm out")
    return GradientTrainer(local, at_once) if clip is None else RecordGradientTrainer(local, clip, at_once)


def tried(config: RunConfig, local: LocalTask, mechanism: Mechanism, weights: Tensor, data: Dataset, warn: Warn) -> Trainer:
    """Return the trainer, after it has trained two clients for a step on made-up samples: what does not fit is refused before a run.

    A model that has no form for many clients at once is trained client by client. One that keeps something of what it saw is
    refused: a record would change what comes of others.

    Raises:
        ConfigError: the model does not fit the data, or fails.
        PrivacyError: it keeps something of what it saw.
    """
    trial = replace(local, data=_made_up(local.data, data.vocabulary))
    schedule = BatchSchedule(torch.tensor([[[0, 1]], [[1, 0]]]), torch.ones(2, 1, 2)).to(local.data.device)
    model, where = config.model.name, config.data.path or config.data.name
    before = _kept(local.module)
    try:
        inputs, targets = trial.batch(torch.arange(2))
        found = functional_call(local.module, local.layout.unflatten(weights.to(inputs.device)), (inputs,))
        fits = _fits(local.task, found, targets, data.outputs)
        try:
            trainer_of(config, trial, mechanism).train(weights, schedule)
            at_once = True
        except RuntimeError as error:
            trainer_of(config, trial, mechanism, at_once=False).train(weights, schedule)
            at_once = False
            warn(f"model {model!r} cannot be trained for many clients at once ({first_line(error)}): one after another, which is slower")
    except Exception as error:  # it is the user's code, on made-up samples: no private value is in the message
        raise ConfigError(f"model {model!r} cannot be trained on {where}: {type(error).__name__}: {first_line(error)}") from error
    if fits:
        raise ConfigError(f"model {model!r} gives {tuple(found.shape)} for two samples, expected {fits}")
    changed = [name for name, value in _kept(local.module).items() if before.get(name) != value]
    if changed:
        raise PrivacyError(
            f"model {model!r} changed {', '.join(changed)} while it ran: it keeps something of the samples that it saw, "
            "and no mechanism randomises that; let forward change nothing"
        )
    return trainer_of(config, local, mechanism, at_once=at_once)


def _made_up(samples: Samples, vocabulary: int | None) -> Samples:
    """Return two samples that are like the others in shape and type alone."""
    generator, shape = torch.Generator().manual_seed(0), (2, *samples.inputs.shape[1:])
    if samples.inputs.is_floating_point():
        inputs = torch.randn(shape, generator=generator, dtype=samples.inputs.dtype)
    else:
        inputs = torch.randint(vocabulary or 256, shape, generator=generator).to(samples.inputs.dtype)
    targets = torch.zeros(2, *samples.targets.shape[1:], dtype=samples.targets.dtype)
    return Samples(inputs, targets).to(samples.device)


def _kept(module: nn.Module) -> dict[str, object]:
    """Return all that ``module`` keeps beside its parameters, by name, in a form that can be compared."""
    found: dict[str, object] = {}
    for prefix, part in module.named_modules():
        apart = _PARTS | _VIEWS if isinstance(part, nn.RNNBase) else _PARTS
        own = {**{key: value for key, value in part.__dict__.items() if key not in apart}, **part._buffers}
        for key, value in own.items():
            try:
                found[f"{prefix}.{key}".lstrip(".")] = pickle.dumps(value)
            except Exception:  # a function of one's own, or a tensor that has not come to be: as it is called
                found[f"{prefix}.{key}".lstrip(".")] = repr(value)
    return found


_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
_VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Of PyTorch's recurrent modules: their parameters once more."""


def _fits(task: Task, found: object, targets: Tensor, outputs: int) -> str:
    """Return what a model's outputs for two samples should look like, if they do not."""
    if not isinstance(found, Tensor):
        raise ConfigError(f"it gives a {type(found).__name__}, expected a tensor")
    wanted: tuple[int, ...] = (2, outputs)
    if task.targets == "tokens":
        wanted = (*targets.shape, outputs)
    if tuple(found.shape) == wanted or (task.targets == "number" and tuple(found.shape) == (2,)):
        return ""
    return str(wanted)
