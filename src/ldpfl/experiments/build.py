"""Turn a config into the objects of a simulation."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl import models, tasks
from ldpfl.data import Dataset, Samples, partition
from ldpfl.data.division import Division
from ldpfl.data.encoder import Encoder
from ldpfl.data.holding_out import TEST_SHARE, with_validation, without_a_tenth
from ldpfl.data.inputs import TOKENS, by_name
from ldpfl.data.partition import LABEL_BLIND, partition_by_code, partition_by_name
from ldpfl.data.persons import Names, Persons
from ldpfl.data.scaling import STAGES, by_bounds, scaled_as
from ldpfl.data.settings import DataConfig
from ldpfl.data.tokens import padding_of
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import LOWEST_PROBABILITY, ModelConfig, RangesConfig, RunConfig
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.record_sums import divided_for_evaluation, for_evaluation, head_of, is_evaluated, scores_of_records
from ldpfl.experiments.start_warnings import start_warnings
from ldpfl.experiments.table_rules import start_on_table
from ldpfl.experiments.trainers import RunSize, is_compiled, quickest, told_of, tried
from ldpfl.mechanisms import Facts, Mechanism, Training, built, payload_bits
from ldpfl.mechanisms.dp_sgd import of_records
from ldpfl.mechanisms.hooks import record_clip_of, record_rate_of
from ldpfl.mechanisms.ranges import LayerRanges, range_rule
from ldpfl.mechanisms.settings import Part
from ldpfl.models import adapters, pretrained
from ldpfl.models.dense import Parallel
from ldpfl.models.layout import ParameterLayout
from ldpfl.models.mending import mended
from ldpfl.privacy import Ledger
from ldpfl.privacy.authors import released
from ldpfl.server import Checkpoint, check_log_size, initial_checkpoint
from ldpfl.simulation import (
    Federation,
    LocalTask,
    Trainer,
)
from ldpfl.simulation.evaluating import ClientEvaluation
from ldpfl.simulation.federation import Evaluation, LocalWork, Participation, Stopping
from ldpfl.simulation.measuring import Measuring, charged
from ldpfl.simulation.record_sums import ranges_of
from ldpfl.tasks import Targets, without_answer
from ldpfl.util.randomness import Purpose, known, stream
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import is_code, is_pretrained

_LOG = logging.getLogger(__name__)

MUCH_CLAMPED = 0.1
"""Share of a layer outside its range that is worth a word."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device called ``auto``, ``cpu``, ``cuda``, or ``cuda:1`` for one of several; None is ``auto``.

    Raises:
        ConfigError: CUDA is asked for and not there, or the name is unknown.
    """
    name = "auto" if device is None else str(device)
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (":" in name and not (kind == "cuda" and number.isdecimal())):
        raise ConfigError(f"unknown device {name!r}: known: auto, cpu, cuda, cuda:0 and so on")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{name} was asked for, and PyTorch finds {torch.cuda.device_count()} CUDA devices; choose the device cpu")
    if number:
        return torch.device(name)
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


_TRAINED_BY: set[int] = set()
"""Processes, this one and those that it was forked from, in which PyTorch may have begun to work by several threads."""


@contextmanager
def as_usual() -> Iterator[None]:
    """Let PyTorch take gradients, and make numbers in float32 on the CPU, whatever a caller has set.

    The default type is the process's: of several threads that run under another one, the last to end may leave float32 behind.
    A process that was forked from one that has trained works by one thread: PyTorch's threads are not in it, and it would wait for them.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    if _TRAINED_BY and os.getpid() not in _TRAINED_BY:
        torch.set_num_threads(1)
    elif torch.get_num_threads() > 1:
        _TRAINED_BY.add(os.getpid())
    try:
        with (
            torch.inference_mode(mode=False),  # which takes gradients within no_grad as well
            nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


@as_usual()
def build(
    config: RunConfig,
    task: Dataset,
    device: torch.device,
    given: nn.Module | None = None,
    warn: Warn = _LOG.warning,
    secret: int | None = None,
    measured: Encoder | None = None,
) -> tuple[Federation, Checkpoint]:
    """Return the federation that ``config`` describes on the data of ``task``, and its state before the first round.

    Args:
        given: the model, where a caller hands it over.
        warn: called with what makes a run slow.
        secret: what noise follows from if ``config.secret_noise`` is set. Without the secret, a federation is built that draws no noise.
        measured: how a table's columns were scaled, of a run that measured them; else they are measured here, which draws noise.

    Raises:
        ConfigError, PrivacyError: what is wrong with the config or the model; or noise is needed here, and the secret is not known.
    """
    if config.secret_noise and not config.data.brought:
        raise ConfigError("secret_noise is set, and the data are no data of yours: leave it out; the noise here follows from seed")
    task, validation = _divided(config, task)
    module = model_of(config, Description.of(task), given)
    _check_texts(module, task)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: p.detach() for name, p in module.named_parameters() if p.requires_grad})
    ranges = initial_ranges(config, layout, weights)
    persons = persons_of(config, task)
    parts = divided(config, task, persons)
    if persons is not None and record_clip_of(mechanism_of(config, ranges)) is None:  # it protects the client, or nobody
        parts, persons = Division.of([persons.rows_of(own)[0] for own in parts]), None
    head = head_of(config, Description.of(task))
    parts, judging = (parts, None) if config.evaluation.share == 0 else divided_for_evaluation(config, parts, persons, task)
    mechanism = mechanism_of(config, ranges if head is None else head.ranges, parts.sizes.tolist())
    task, ledger = _scaled(config, task, parts, mechanism, secret, persons, measured)
    start = start_on_table(config, Description.of(task), module, layout, weights, mechanism, len(parts), task.shares)
    config, weights = start.config, start.weights
    if outside := _outside(config, layout, weights, ranges):
        warn(outside)
    task = task.noted(*(said := tuple(start_warnings(config, task, parts))))
    for line in said if config.mechanism.protects else ():  # not once more of a baseline
        warn(line)
    local = LocalTask(
        module.to(device),
        layout,
        task.train.to(device),
        task.mean,
        task.std,
        config.training.at_client(),
        None if config.training.clip_norm == "off" else config.training.clip_norm,
        tasks.create(config.task.name, task.outputs, scale=task.unit),
        config.training.precision,
    )
    noise_seed = secret_seed(config, task, secret)
    federation = Federation(
        seed=config.seed,
        secret_seed=noise_seed,
        coin_seed=_coin_seed(noise_seed, module, weights, parts) if config.data.brought and noise_seed is not None else noise_seed,
        own_data=config.data.brought,
        task=local,
        trainer=tried(config, local, mechanism, weights, task, warn, persons),
        samples=parts,
        evaluation=Evaluation(task.test.to(device), task.test_persons, task.test_clients, task.client_names, _threshold(config, task)),
        mechanism=mechanism,
        perturbed=config.mechanism.perturbed,
        rule=range_rule(config.ranges.rule, floor=config.ranges.floor),
        optimiser=config.training.at_server(measured_weights(config, layout), weights),
        participation=Participation(
            config.clients.fraction,
            self_sampling_of(config),
            config.training.rounds if config.clients.once else None,
            config.shuffling.channel,
            config.shuffling.colluding,
        ),
        work=LocalWork(config.training.epochs, config.training.batch_size, _full_weight(config, mechanism)),
        measured=len(ledger.events),
        notes=task.notes,
        encoder=task.encoder,
        stopping=None if validation is None else Stopping(validation.to(device), config.training.patience),
        persons=persons,
        head=head,
        judged=None if judging is None or not is_evaluated(config) else _judged(config, task, judging, persons),
    )
    federation = replace(federation, trainer=_quickest(config, federation, weights, warn))
    compiled = ", compiled" if is_compiled(federation.trainer) else ""
    digest = adapters.base_digest(module)
    base = f" of base {digest[:16]}" if digest else ""
    origin = f"{task.name} {task.fingerprint}{_division(task)}{base} on {device.type}{compiled}"
    payload_bits(federation.mechanism, ranges)  # says so if the mechanism does not fit the layers
    check_log_size(layout.names, released(federation.mechanism, ranges), config.training.rounds)
    return federation, initial_checkpoint(weights, ranges, origin, ledger)


def _judged(config: RunConfig, task: Dataset, units: Division, persons: Persons | None) -> ClientEvaluation:
    """Return what clients measure on the ``units`` that they hold back."""
    vectors = scores_of_records(config, task.outputs)
    mechanism = of_records(
        mechanism_of(
            for_evaluation(config, records=config.evaluation.records), ranges_of(vectors.size), np.maximum(units.sizes, 1).tolist()
        )
    )
    return ClientEvaluation(units, vectors, mechanism, config.training.rounds, config.evaluation.every, persons)


def _quickest(config: RunConfig, federation: Federation, weights: Tensor, warn: Warn) -> Trainer:
    """Return what trains the federation's clients quickest: its trainer, or that compiled."""
    joined = 1 / config.training.rounds if federation.participation.once_over is not None else federation.participation.fraction
    sizes, width, epochs = federation.samples.sizes, federation.batch_width, config.training.epochs
    samples = int(config.training.rounds * joined * epochs * record_rate_of(federation.mechanism) * int(sizes.sum()))
    fewest, most = (max(1, -(-int(size) // width) * epochs) for size in (sizes.min(), sizes.max()))
    return quickest(config, federation.trainer, weights, RunSize(samples, width, (fewest, most)), warn)


def _threshold(config: RunConfig, task: Dataset) -> float | None:
    """Return the further risk from which on test rows count as flagged.

    Raises:
        ConfigError: there is one, and the task is none of two classes.
    """
    threshold = config.task.threshold
    if threshold == "off":
        return None
    if config.task.name != "classification" or task.outputs != 2:
        raise ConfigError(f"task.threshold = {threshold:g} is for two classes, and this task tells something else: leave it out")
    return threshold


def _division(task: Dataset) -> str:
    """Return what tells whose the samples are, where that is not in the fingerprint, as of a table it is."""
    known = [of.tobytes() for of in (task.clients, task.identities) if of is not None]
    if not known or task.encoder is not None:
        return ""
    return f" of {hashlib.sha256(b''.join(known)).hexdigest()[:16]}"


def _outside(config: RunConfig, layout: ParameterLayout, weights: Tensor, ranges: LayerRanges) -> str:
    """Return what to say of layers whose public initial weights lie outside their ranges; nothing where others are sent than weights."""
    if config.mechanism.perturbed != "weights" or not (config.mechanism.uses_ranges and config.mechanism.protects):
        return ""
    center, radius = ranges.expand()
    beyond = (weights - center).abs() > radius
    shares = {name: float(beyond[own].float().mean()) for name, own in layout.slices.items()}
    found = ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if share > MUCH_CLAMPED)
    if not found:
        return ""
    advice = "set mechanism.perturbed to 'update', or ranges.radius to 'initial'"
    return f"before the first round, {found} of the initial model lies outside the range that weights are clamped to: {advice}"


@as_usual()
def model_of(config: RunConfig, data: Description, given: nn.Module | None = None) -> nn.Module:
    """Return the model of ``config`` for data that are ``described``, as training begins with it; ``given`` is a caller's own.

    Raises:
        ConfigError: the model is unknown, or does not fit the data.
    """
    return _model_of(config, data, given)


def _model_of(config: RunConfig, data: Description, given: nn.Module | None = None) -> nn.Module:
    targets = tasks.create(config.task.name, data.outputs).targets
    return made_of(config.model, data, targets, seed=_model_seed(config.seed), given=given)


def _check_texts(module: nn.Module, task: Dataset) -> None:
    """Return if a pretrained ``module`` takes the tokens of ``task``, where its samples are texts.

    Raises:
        ConfigError: the texts are too long, or the tokenizer is that of another model.
    """
    texts, known = by_name(task.train.inputs).get(TOKENS), task.tokens(TOKENS)
    if texts is not None and known is not None:
        pretrained.check_tokens(module, known, texts.shape[1])
    if task.encoder is not None and (tokenizer := task.encoder.data.tokenizer):
        pretrained.check_padding(module, padding_of(tokenizer), tokenizer)


def made_of(model: ModelConfig, data: Description, targets: Targets, *, seed: int = 0, given: nn.Module | None = None) -> nn.Module:
    """Return the module that ``model`` names for data that are ``described``, with one score for targets that are parallel.

    ``seed`` decides its weights, and has at most 64 bits.

    Raises:
        ConfigError: there is no such model, or its frozen weights are not those that ``model.base`` names.
    """
    images = data.shape is not None and len(data.shape) > 1
    if is_pretrained(model.name):
        made = mended(pretrained.make(model.name, targets, data.outputs, images=images, seed=seed, adapter=model.adapted))[0]
        adapters.check_base(made, model.base)
        return made
    parallel = targets in tasks.PARALLEL and model.name in models.names()
    made = models.create(
        model.name,
        data.shape,
        1 if parallel else data.outputs,
        seed=seed,
        options=model.options,
        vocabulary=data.vocabulary,
        by_place=targets == "tokens",
        given=given,
    )
    made = Parallel(made, data.outputs) if parallel else made
    if model.adapter != "none":
        made = adapters.adapted(made, model.adapted, targets, images=images, seed=seed)
    return mended(made)[0] if model.mend else made


def size_of(config: RunConfig, data: Description) -> int:
    """Return how many weights the built-in model of ``config`` has; it is not made, so that it may be as large as it likes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _model_of(config, data).parameters())


def persons_of(config: RunConfig, task: Dataset) -> Persons | None:
    """Return who has which train samples of ``task``, a person for each client that has some of a name's; None if none are named.

    Raises:
        ConfigError: ``config`` names persons, for which mechanisms are then built, and ``task`` does not say whose its samples are.
    """
    if not config.data.person:
        return None
    if task.persons is None:
        raise ConfigError(
            f"data.person is {config.data.person!r}, and the data do not say whose their rows are: give a table that has this column, or "
            "leave data.person out"
        )
    answered = ~without_answer(task.train.targets).numpy()
    return Persons.of(task.persons.tolist(), config.data.person_rows, clients=task.clients, answered=answered)


def divided(config: RunConfig, task: Dataset, persons: Persons | None = None) -> Division:
    """Return the train samples of each client, or its ``persons``: as the data say, or else as ``config`` divides them.

    Raises:
        ConfigError: they cannot be divided so.
    """
    own, count = config.data, len(task.train if persons is None else persons)
    if own.at_nodes:  # each node knows its own rows, and nobody those of others
        return Division.shared(np.arange(count), config.clients.count)
    if task.clients is not None:
        if own.by_label or own.partition != "iid":
            raise ConfigError("data.client says whose each row is: leave data.partition and data.private_label out")
        owners = task.clients if persons is None else task.clients[persons.rows[persons.first]]
        clients = int(owners.max()) + 1
        parts = Division.by_owner(owners, clients)
        if clients != config.clients.count:
            raise ConfigError(f"the data name {clients} clients, and clients.count is {config.clients.count}: leave that out")
        if not parts.sizes.all():
            raise ConfigError("a client has all its rows among those that are held out: leave data.evaluate_on at 'test'")
        return parts if task.identities is None else _in_order_of_names(parts, task.identities)
    if task.identities is not None:
        return _by_identity(own, task.identities, config.clients.count)
    if persons is not None and task.persons is not None:
        return _by_person(config, task.persons[persons.rows[persons.first]])
    if is_code(own.partition):
        return partition_by_code(own.partition, count, config.clients.count, config.seed)
    classes = task.train.targets.dim() == 1 and task.train.targets.dtype == torch.int64
    if own.by_label and not classes:
        raise ConfigError(f"data.partition = {own.partition!r} divides by classes, and these targets are none: take iid or quantity")
    return partition(
        task.train.targets.numpy() if classes else np.zeros(count, dtype=np.int64),
        config.clients.count,
        stream(config.seed, Purpose.PARTITION),
        scheme=own.partition,  # type: ignore[arg-type]  # what is no code is a scheme
        alpha=own.alpha,
        labels_per_client=own.labels_per_client,
        isolated=own.isolated,
    )


def _by_person(config: RunConfig, names: Names) -> Division:
    """Deal persons out by the name of each of them, so that none decides where another goes."""
    own, generator = config.data, stream(config.seed, Purpose.PARTITION)
    if own.private_label != "none":
        raise ConfigError("persons are dealt out whole, whatever the labels of their rows: leave data.private_label out")
    return partition_by_name(names, config.clients.count, config.seed, generator, scheme=own.partition, alpha=own.alpha)


def _by_identity(own: DataConfig, identities: NDArray[np.uint64], count: int) -> Division:
    """Deal samples out by what each of them is called, so that none decides where another goes."""
    if own.by_label or own.partition != "iid":
        raise ConfigError("files are dealt out by their names: leave data.partition and data.private_label out, or give data.client")
    drawn = identities // np.uint64(TEST_SHARE) % np.uint64(count)
    parts = Division.by_owner(drawn.astype(np.int64), count)
    if not parts.sizes.all():
        raise ConfigError(f"of {len(identities):,} files, dealt out by their names to {count} clients, one client has none: take fewer")
    return _in_order_of_names(parts, identities)


def _in_order_of_names(parts: Division, identities: NDArray[np.uint64]) -> Division:
    """Return ``parts`` in an order that file names alone decide. Files lie in folders by class, and no class may move others' places."""
    return Division.of([own[np.argsort(identities[own], kind="stable")] for own in parts])


def _scaled(
    config: RunConfig,
    task: Dataset,
    parts: Division,
    mechanism: Mechanism,
    secret: int | None,
    persons: Persons | None,
    measured: Encoder | None,
) -> tuple[Dataset, Ledger]:
    """Return ``task`` with all its columns scaled, and what was released to do so."""
    if task.is_scaled:
        return task, Ledger()
    if config.data.at_nodes:  # measured by rounds of their own, which the server charges; by bounds until then
        return (by_bounds(task) if measured is None else scaled_as(task, measured)), Ledger()
    if not measures(config, task.unscaled, mechanism):
        return by_bounds(task), Ledger()
    through = config.shuffling
    counting = of_records(measuring_mechanism(config, mechanism, parts.sizes.tolist())) if record_clip_of(mechanism) is not None else None
    if measured is not None:
        return scaled_as(task, measured), charged(counting, len(parts), through.channel, through.colluding)
    seed = known(secret_seed(config, task, secret))
    weighed = [(own, np.ones_like(own)) if persons is None else persons.rows_of(own) for own in parts]
    return Measuring(seed, counting, through.channel, through.colluding).scaled(task, *zip(*weighed, strict=True))


def measuring_mechanism(config: RunConfig, mechanism: Mechanism, sizes: Sequence[int] = (1,)) -> Mechanism:
    """Return what protects the histograms of columns: ``mechanism`` with noise by which they take their share of the run's budget.

    With Gaussian noise, T rounds of mu each and M histograms of mu / f each cost sqrt(T + M / f^2) mu together.
    """
    changed = for_measuring(config)
    return mechanism if changed is config else mechanism_of(changed, ranges_of(1), sizes)


def for_measuring(config: RunConfig) -> RunConfig:
    """Return ``config`` with the noise of one stage of histograms as its mechanism; itself where that needs no other noise."""
    share, rounds = config.privacy.measuring_share, config.training.rounds - config.training.extended
    settings = config.mechanism.for_measuring(sqrt(STAGES * (1 - share) / (rounds * share)))
    return config if settings is config.mechanism else config.model_copy(update={"mechanism": settings})


def secret_seed(config: RunConfig, task: Dataset, secret: int | None) -> int | None:
    """Return the seed of what has to stay unknown: noise, and who takes part where that is a secret. None if ``secret`` is not known.

    With a user's own data it is that of no other run on other rows or with other settings, as far as they are told: two runs in which the
    same records took part by the same coins would cost more together than their guarantees add up to. A run that is extended is the
    same run.
    """
    if not config.data.brought:
        return config.seed
    if config.secret_noise and secret is None:
        return None
    training = config.training.model_copy(update={"rounds": config.training.rounds - config.training.extended, "extended": 0})
    same = config.model_copy(update={"training": training})
    # Not what is no setting of training; and wherever the rows lie.
    untold: Any = {
        "name": True,
        "description": True,
        "secret_noise": True,
        "privacy": {"target_epsilon"},
        "data": {"path", "test_path"},
        "task": {"threshold"},
    }
    digest = hashlib.sha256(same.model_dump_json(exclude=untold).encode())
    if config.secret_noise:
        digest.update(f"{secret}".encode())
    for content in task.train.content():
        digest.update(content)
    if task.persons is not None:
        digest.update("\0".join(task.persons).encode(errors="surrogatepass"))
    return int.from_bytes(digest.digest())


def _coin_seed(secret: int, module: nn.Module, weights: Tensor, parts: Division) -> int:
    """Return the seed of who takes part where that is a secret, with a user's own data: ``secret``, and that of no other model or division.

    Noise follows from what it hides, so that two models of one seed share none. Who takes part is drawn before there is anything to hide:
    what a config does not tell of a model that was handed over, or lies in a file, is told by how it begins and by what it consists of.
    """
    digest = hashlib.sha256(f"{secret} {told_of(module)}".encode())
    digest.update(weights.numpy().tobytes())
    digest.update(parts.sizes.tobytes() + parts.starts.tobytes() + parts.places.tobytes())
    return int.from_bytes(digest.digest())


def measures(config: RunConfig, unscaled: Sequence[Unscaled], mechanism: Mechanism) -> bool:
    """Whether the ``unscaled`` columns of a table are measured before the first round of this run; if not, they are scaled by their bounds.

    Raises:
        ConfigError: some have no bounds, and the mechanism does not protect records, or not all of them in each round.
    """
    if not unscaled:
        return False
    if config.data.scaling == "bounds":
        why = "data.scaling is 'bounds'"
    elif config.mechanism.protects and record_clip_of(mechanism) is None:
        why = f"columns are measured by mechanisms that protect records, and {mechanism.name!r} is none"
    elif record_rate_of(mechanism) != 1 or config.clients.once:
        why = "columns are measured over all records of all clients, and here not all take part"
    else:
        return True
    without = [column.name for column in unscaled if column.bounds is None and not column.classes]
    if without:
        raise ConfigError(f"{', '.join(without[:5])} has no data.bounds, and {why}: give data.bounds for each column of numbers")
    return False


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


def mechanism_of(config: RunConfig, ranges: LayerRanges, sizes: Sequence[int] = (1,)) -> Mechanism:
    """Return the mechanism that ``config`` names.

    ``sizes`` are those of the clients' data sets, in persons where these are protected.

    Raises:
        ConfigError: a setting is out of range, or does not fit the others.
    """
    settings, training = config.mechanism, config.training
    if not settings.uses_ranges and (config.ranges.center != 0 or config.ranges.rule != "fixed"):
        raise ConfigError(f"mechanism {settings.name!r} clips by norm and uses no ranges: leave ranges.center and ranges.rule out")
    clip_norm = None if training.clip_norm == "off" else training.clip_norm
    local = Training(training.learning_rate, training.epochs, training.batch_size, clip_norm, training.at_client().is_plain)
    part: Part = "person" if config.data.person else "record"
    summed, clients = config.shuffling.channel == "secure-sum", _summed_clients(config)
    facts = Facts(ranges, training.rounds, min(sizes), local, sum(sizes) / len(sizes), summed, part, clients)
    mechanism = built(settings, facts)
    if record_clip_of(mechanism) is not None and config.data.by_label:
        raise ConfigError(
            f"mechanism {mechanism.name!r} protects single records, and where data are divided by their labels one record decides where "
            f"others go: set data.partition to {' or '.join(sorted(LABEL_BLIND))}, and leave data.private_label out"
        )
    return mechanism


def _summed_clients(config: RunConfig) -> int:
    """Return the most clients whose reports are added up in a round, which mechanisms of sums are built for.

    Raises:
        ConfigError: fewer are said than may take part, or none is relied on.
    """
    said, count = config.shuffling.max_clients, config.clients.count
    if 0 < said < count:
        raise ConfigError(
            f"shuffling.max_clients is {said:,}, and up to {count:,} clients take part: set it to {count} or more, or leave it out"
        )
    if config.shuffling.colluding >= count:
        raise ConfigError(f"shuffling.colluding is {config.shuffling.colluding:,} of {count:,} clients: some client has to be honest")
    return said or count


def _divided(config: RunConfig, task: Dataset) -> tuple[Dataset, Samples | None]:
    """Return ``task`` with what is measured on, and what says when to stop."""
    if (config.data.validation > 0) != (config.training.patience > 0):
        raise ConfigError("training.patience stops by data.validation, a share of the test rows: give both, or neither")
    measured = task if config.data.evaluate_on == "test" else without_a_tenth(task, config.seed)
    return with_validation(measured, config.data.validation)


def _model_seed(seed: int) -> int:
    return int(stream(seed, Purpose.MODEL).integers(2**63))


def _full_weight(config: RunConfig, mechanism: Mechanism) -> int | None:
    """Return the records from which on a client counts in full, if not all count the same.

    Raises:
        ConfigError: clients send no change that could be scaled, or records count anyway.
    """
    if config.clients.full_weight == "off":
        return None
    if record_clip_of(mechanism) is not None:
        raise ConfigError(f"clients.full_weight is not for mechanism {mechanism.name!r}, in which every record counts the same already")
    if config.mechanism.perturbed == "weights":
        raise ConfigError("clients.full_weight scales the change that a client sends: set mechanism.perturbed to 'update'")
    return config.clients.full_weight


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
