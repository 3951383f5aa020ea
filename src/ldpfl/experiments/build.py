"""Turn a config into the objects of a simulation."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import ceil, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl import models, tasks
from ldpfl.data import Dataset, Samples, partition
from ldpfl.data.encoder import Encoder
from ldpfl.data.holding_out import TEST_SHARE, scored_part, split_off_validation, with_tenth_as_test
from ldpfl.data.leaks import leak_note
from ldpfl.data.partition import LABEL_BLIND, partition_by_code, partition_by_name
from ldpfl.data.persons import Names, Persons
from ldpfl.data.samples import TOKENS, Division, tensors_by_name
from ldpfl.data.scaling import STAGES, scaled_by_bounds, scaled_like_run
from ldpfl.data.settings import DataConfig
from ldpfl.data.tokens import padding_token_number
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, listed_names
from ldpfl.experiments.config import LOWEST_PROBABILITY, ClippingConfig, ModelConfig, RangesConfig, RunConfig
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.emphasis import emphasis_of
from ldpfl.experiments.personal import initial_personal_layers, split_layers, task_of_all_layers, weights_of_layers, with_personal_layers
from ldpfl.experiments.record_sums import (
    config_for_evaluation,
    evaluation_vector_layout,
    is_evaluated,
    least_squares_solver,
    split_for_evaluation,
)
from ldpfl.experiments.start_warnings import start_warnings
from ldpfl.experiments.table_rules import choose_automatic_settings
from ldpfl.experiments.trainers import RunSize, compiled_if_worthwhile, identifying_text, is_compiled, trainer_after_trial
from ldpfl.mechanisms import Facts, Mechanism, Training, built, payload_bits
from ldpfl.mechanisms.base import record_clip_of, record_rate_of
from ldpfl.mechanisms.dp_fedavg import DpFedAvgSettings
from ldpfl.mechanisms.dp_sgd import DpSgdSettings, on_users_code, require_dp_sgd
from ldpfl.mechanisms.ranges import LayerRanges, NormQuantile, RangeRule, range_rule
from ldpfl.models import adapters, pretrained
from ldpfl.models.dense import Parallel
from ldpfl.models.layout import ParameterLayout
from ldpfl.models.mending import mended
from ldpfl.privacy import Ledger
from ldpfl.privacy.authors import released
from ldpfl.server import Checkpoint, check_log_size, initial_checkpoint
from ldpfl.simulation import Federation, LocalTask, Trainer
from ldpfl.simulation.evaluating_records import ClientEvaluation
from ldpfl.simulation.evaluating_whole_clients import ClientScores, WholeClientEvaluation
from ldpfl.simulation.federation import Evaluation, LocalWork, Participation, Stopping
from ldpfl.simulation.measuring import Measuring, measuring_ledger
from ldpfl.simulation.record_sums import ranges_of
from ldpfl.tasks import Targets, absent_targets
from ldpfl.util.randomness import Purpose, require_secret, stream
from ldpfl.util.suggestions import did_you_mean
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import is_code, is_pretrained

_LOG = logging.getLogger(__name__)

MAX_CLIPPED_SHARE = 0.1
"""Share of a layer's weights outside their range above which a warning is given."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device for the name ``auto``, ``cpu``, ``cuda``, or ``cuda:1`` for one of several. None means ``auto``.

    Raises:
        ConfigError: the name is unknown, or PyTorch does not find that CUDA device.
    """
    name = "auto" if device is None else str(device)
    device_type, _, number = name.partition(":")
    if device_type == "mps":
        raise ConfigError(f"the device {name} does not support float64, which clipping needs: choose the device cpu")
    if device_type not in ("auto", "cpu", "cuda") or (":" in name and not (device_type == "cuda" and number.isdecimal())):
        raise ConfigError(f"unknown device {name!r}: known: auto, cpu, cuda, cuda:0 and so on")
    if device_type == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(f"the device is {name}, but PyTorch finds {torch.cuda.device_count()} CUDA devices: choose the device cpu")
    if number:
        return torch.device(name)
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


_THREADED_PROCESSES: set[int] = set()
"""Ids of processes in which PyTorch may have started several threads. A forked process inherits the ids of those it was forked from."""


@contextmanager
def with_torch_defaults() -> Iterator[None]:
    """Enable gradients, and make float32 and the CPU PyTorch's defaults, whatever the caller has set.

    PyTorch's default type belongs to the whole process. If several threads use this context at once, float32 may remain the default.
    A process that was forked from one that has trained uses one thread: PyTorch's threads do not survive the fork, and the process would
    wait for them forever.
    """
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    if _THREADED_PROCESSES and os.getpid() not in _THREADED_PROCESSES:
        torch.set_num_threads(1)
    elif torch.get_num_threads() > 1:
        _THREADED_PROCESSES.add(os.getpid())
    try:
        with (
            torch.inference_mode(mode=False),  # enables gradients within no_grad as well
            nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype_before)


@with_torch_defaults()
def build(
    config: RunConfig,
    data: Dataset,
    device: torch.device,
    caller_module: nn.Module | None = None,
    warn: Warn = _LOG.warning,
    secret: int | None = None,
    measured: Encoder | None = None,
) -> tuple[Federation, Checkpoint]:
    """Return the federation that ``config`` describes on ``data``, and its state before the first round.

    Args:
        caller_module: a model that the caller passes instead of naming it in ``config``.
        warn: function that is called with warnings, for example on settings that make a run slow.
        secret: seed of the noise if ``config.secret_noise`` is set. Without it, the federation cannot draw noise.
        measured: encoding of a run that has measured a table's columns. If it is None, the columns are measured here, which draws noise.

    Raises:
        ConfigError: the config is inconsistent or does not fit the data or the model; or noise is needed and ``secret`` is None.
        PrivacyError: the model cannot be trained privately.
    """
    if config.secret_noise and not config.data.brought:
        raise ConfigError(
            f"secret_noise is only for your own data, and {config.data.name!r} is built in: leave it out; the seed determines the noise "
            "here"
        )
    # The model, and the ranges that its values are clipped to.
    data, validation = _split_validation(config, data)
    module = model_of(config, Description.of(data), caller_module)
    check_texts(module, data)
    layout, personal = split_layers(config, module)
    weights = weights_of_layers(module, layout)
    ranges = initial_ranges(config, layout, weights)
    # The records, or persons, of each client: those to train on, and those that are held back for evaluation.
    persons = persons_of(config, data)
    division = divide_over_clients(config, data, persons)
    # A mechanism that clips no record gradients protects whole clients. Persons do not matter then: each client gets its persons' rows.
    if persons is not None and record_clip_of(mechanism_of(config, ranges)) is None:
        division, persons = Division.of([rows for rows, _counts in map(persons.all_rows_of, division)]), None
    solver = least_squares_solver(config, Description.of(data))
    division, held_back = (division, None) if config.evaluation.share == 0 else split_for_evaluation(config, division, persons, data)
    # The mechanism, which may measure a table's columns. Settings that are "auto" follow from these.
    mechanism = mechanism_of(config, ranges if solver is None else solver.ranges, division.sizes.tolist())
    data, ledger = _scale_columns(config, data, division, mechanism, secret, persons, measured)
    if held_back is not None:
        data = _with_unclipped_targets(data, held_back, persons)
    emphasis = emphasis_of(config, data.outputs, data.shares)
    start = choose_automatic_settings(
        config, Description.of(data), module, layout, weights, mechanism, len(division), data.shares, emphasis
    )
    config, weights = start.config, start.weights
    if range_note := _range_warning(config, layout, weights, ranges):
        warn(range_note)
    warnings = tuple(start_warnings(config, data, division))
    data = data.with_notes(*warnings)
    for line in warnings if config.mechanism.protects else ():  # a baseline would repeat the warnings of its private run
        warn(line)
    local = LocalTask(
        module=module.to(device),
        layout=layout,
        data=data.train.to(device),
        mean=data.mean,
        std=data.std,
        optimiser=config.training.make_client_optimiser(),
        clip_norm=None if config.training.clip_norm == "off" else config.training.clip_norm,
        task=tasks.create(config.task.name, data.outputs, scale=data.unit, emphasis=emphasis),
        precision=config.training.precision,
    )
    # Clients train all layers, also the personal ones, which they never send.
    all_layers_task, all_weights = task_of_all_layers(local, weights, personal)
    noise_seed = secret_seed(config, data, secret)
    participation_seed = noise_seed
    if config.data.brought and noise_seed is not None:
        participation_seed = _participation_seed(noise_seed, module, weights, division)
    federation = Federation(
        seed=config.seed,
        secret_seed=noise_seed,
        coin_seed=participation_seed,
        own_data=config.data.brought,
        users_code=bool(config.users_code),
        task=local,
        trainer=with_personal_layers(
            trainer_after_trial(config, all_layers_task, mechanism, all_weights, data, warn, persons), layout, personal, module
        ),
        samples=division,
        evaluation=_evaluation(config, data, held_back, device),
        mechanism=mechanism,
        perturbed=config.mechanism.perturbed,
        rule=range_rule_of(config),
        optimiser=config.training.make_server_optimiser(count_measured_weights(config, layout), weights),
        participation=Participation(
            fraction=config.clients.fraction,
            self_sampling=lowest_join_probability(config),
            once_over=config.training.rounds if config.clients.once else None,
            channel=config.shuffling.channel,
            colluding=config.shuffling.colluding,
        ),
        work=LocalWork(config.training.epochs, config.training.batch_size, full_weight=_records_for_full_weight(config, mechanism)),
        measured=len(ledger.events),
        notes=(*data.notes, *leak_note(data.leaks, data.encoder)),
        encoder=data.encoder,
        stopping=None if validation is None else Stopping(validation.to(device), config.training.patience),
        persons=persons,
        head=solver,
        judged=None if held_back is None or not is_evaluated(config) else _client_evaluation(config, data, held_back, persons),
    )
    federation = replace(federation, trainer=_fastest_trainer(config, federation, weights, data, warn))
    payload_bits(federation.mechanism, ranges)  # raises if the mechanism does not fit the layers
    check_log_size(layout.names, released(federation.mechanism, ranges), config.training.rounds)  # raises if the log would be too large
    checkpoint = initial_checkpoint(weights, ranges, _origin(data, module, device, federation.trainer), ledger)
    return federation, replace(checkpoint, personal=initial_personal_layers(federation.trainer, len(division)))


def _with_unclipped_targets(data: Dataset, held_back: Division, persons: Persons | None) -> Dataset:
    """Return ``data`` in which the ``held_back`` rows, or persons, have unclipped targets.

    Targets are clipped for training. Clipped targets in an evaluation would hide how wrong a model is.
    """
    if data.unclipped is None:
        return data
    rows = np.unique(np.concatenate(list(held_back)))  # or persons
    if persons is not None:
        rows, _counts = persons.all_rows_of(rows)
    places, targets = torch.from_numpy(rows), data.train.targets.clone()
    targets[places] = data.unclipped[places]
    return replace(data, train=replace(data.train, targets=targets), unclipped=None)


def _evaluation(config: RunConfig, data: Dataset, held_back: Division | None, device: torch.device) -> Evaluation:
    """Return the samples that models are evaluated on: the test samples, or the records ``held_back`` by the clients.

    Raises:
        ConfigError: models are to be evaluated at clients, but clients hold back no records; or the config names persons, whose rows
            could be both held back and trained on.
    """
    threshold = _flagging_threshold(config, data)
    if config.data.evaluate_on != "clients":
        return Evaluation(data.test.to(device), data.test_persons, data.test_clients, data.client_names, threshold)
    if held_back is None:
        raise ConfigError("data.evaluate_on is 'clients', but clients hold back no records: set evaluation.share, such as 0.2")
    if config.data.person:
        raise ConfigError(
            "data.evaluate_on = 'clients' does not work with data.person: set data.evaluate_on to 'test', or leave data.person out"
        )
    clients_of_samples = np.repeat(np.arange(len(held_back)), held_back.sizes)
    samples = data.train.take(torch.from_numpy(np.concatenate(list(held_back)))).to(device)
    return Evaluation(samples, None, clients_of_samples, data.client_names, threshold, at_clients=True)


def _client_evaluation(config: RunConfig, data: Dataset, units: Division, persons: Persons | None) -> ClientEvaluation:
    """Return the evaluation at clients, on the ``units``: the records, or persons, that each client holds back.

    With a mechanism for whole clients, each client sends one noisy vector of figures. With ``dp-sgd``, it sends the noisy sum of one such
    vector for each record.
    """
    vectors = evaluation_vector_layout(config, data.outputs, data.encoder)
    if isinstance(vectors, ClientScores):  # the layout for a mechanism that protects whole clients
        if not config.data.at_nodes and not units.sizes.all():  # a node on Flower without such records sends noise alone
            raise ConfigError(
                f"with evaluation.share = {config.evaluation.share:g} some client holds back no record, but an evaluation that protects "
                "whole clients needs a record of each: set a larger evaluation.share, or fewer clients"
            )
        mechanism = mechanism_of(config_for_evaluation(config), vectors.ranges)
        return WholeClientEvaluation(units, vectors, mechanism, config.training.rounds, config.evaluation.every)
    sizes = np.maximum(units.sizes, 1).tolist()  # a mechanism is for at least one record, and some client may hold back none
    evaluation_config = config_for_evaluation(config, records=config.evaluation.records)
    mechanism = require_dp_sgd(mechanism_of(evaluation_config, vectors.ranges, sizes))
    return ClientEvaluation(units, vectors, mechanism, config.training.rounds, config.evaluation.every, persons)


def _fastest_trainer(config: RunConfig, federation: Federation, weights: Tensor, data: Dataset, warn: Warn) -> Trainer:
    """Return the fastest trainer for the federation's clients: its own trainer, or the compiled form of it."""
    # Share of the rounds in which a client takes part.
    rounds_share = 1 / config.training.rounds if federation.participation.once_over is not None else federation.participation.fraction
    sizes, batch_size, epochs = federation.samples.sizes, federation.batch_width, config.training.epochs
    # All samples in all local steps of the run, counted with repetition.
    samples = int(config.training.rounds * rounds_share * epochs * record_rate_of(federation.mechanism) * int(sizes.sum()))
    fewest_steps, most_steps = (max(1, ceil(int(size) / batch_size) * epochs) for size in (sizes.min(), sizes.max()))
    return compiled_if_worthwhile(
        config, federation.trainer, weights, data, RunSize(samples, width=batch_size, steps=(fewest_steps, most_steps)), warn
    )


def _flagging_threshold(config: RunConfig, data: Dataset) -> float | None:
    """Return the predicted risk from which test rows count as flagged, or None if ``task.threshold`` is off.

    Raises:
        ConfigError: a threshold is set, but the task is not a classification of two classes.
    """
    threshold = config.task.threshold
    if threshold == "off":
        return None
    if config.task.name != "classification" or data.outputs != 2:
        raise ConfigError(f"task.threshold = {threshold:g} works only in a classification of two classes: leave task.threshold out")
    return threshold


def _origin(data: Dataset, module: nn.Module, device: torch.device, trainer: Trainer) -> str:
    """Return a text that identifies the data, the frozen base and the device of a run. With another origin, a run cannot be resumed."""
    digest = adapters.base_digest(module)
    base_note = f" of base {digest[:16]}" if digest else ""
    compiled_note = ", compiled" if is_compiled(trainer) else ""
    return f"{data.name} {data.fingerprint}{_division_digest(data)}{base_note} on {device.type}{compiled_note}"


def _division_digest(data: Dataset) -> str:
    """Return a digest of the samples' clients and files for the run's origin; "" for a table, whose fingerprint covers them."""
    arrays = [array.tobytes() for array in (data.clients, data.identities) if array is not None]
    if not arrays or data.encoder is not None:
        return ""
    return f" of {hashlib.sha256(b''.join(arrays)).hexdigest()[:16]}"


def _range_warning(config: RunConfig, layout: ParameterLayout, weights: Tensor, ranges: LayerRanges) -> str:
    """Return a warning on layers many of whose public initial ``weights`` (d,) lie outside their ranges; "" if there are none.

    It is "" too if clients send updates or gradients, or if the mechanism clips to no ranges or adds no noise.
    """
    if config.mechanism.perturbed != "weights" or not (config.mechanism.uses_ranges and config.mechanism.protects):
        return ""
    center, radius = ranges.expand()
    is_outside = (weights - center).abs() > radius
    shares = {name: float(is_outside[layer].float().mean()) for name, layer in layout.slices.items()}
    affected_layers = ", ".join(f"{share:.0%} of {name}" for name, share in shares.items() if share > MAX_CLIPPED_SHARE)
    if not affected_layers:
        return ""
    advice = "set mechanism.perturbed to 'update', or ranges.radius to 'initial'"
    return f"before the first round, {affected_layers} of the initial model lies outside the range that weights are clipped to: {advice}"


@with_torch_defaults()
def model_of(config: RunConfig, data: Description, caller_module: nn.Module | None = None) -> nn.Module:
    """Return the initial model of ``config`` for data with the description ``data``. ``caller_module`` is a model that a caller passes.

    Raises:
        ConfigError: the model is unknown, or does not fit the data.
    """
    return _initial_model(config, data, caller_module)


def _initial_model(config: RunConfig, data: Description, caller_module: nn.Module | None = None) -> nn.Module:
    """Return the same as :func:`model_of`, but on PyTorch's default device. :func:`count_weights` sets a device without memory."""
    targets = tasks.create(config.task.name, data.outputs).targets
    return make_module(config.model, data, targets, seed=_model_seed(config.seed), caller_module=caller_module)


def check_texts(module: nn.Module, data: Dataset) -> None:
    """Raise if samples of ``data`` are texts, and their tokens do not fit a pretrained ``module``. Other models and samples pass.

    Raises:
        ConfigError: the texts are too long, or the tokenizer belongs to another model.
    """
    tokens, vocabulary = tensors_by_name(data.train.inputs).get(TOKENS), data.tokens(TOKENS)
    if tokens is not None and vocabulary is not None:
        pretrained.check_tokens(module, vocabulary, tokens.shape[1])
    if data.encoder is not None and (tokenizer := data.encoder.data.tokenizer):
        pretrained.check_padding(module, padding_token_number(tokenizer), tokenizer)


def make_module(
    model: ModelConfig, data: Description, targets: Targets, *, seed: int = 0, caller_module: nn.Module | None = None
) -> nn.Module:
    """Return the initial module that ``model`` names, for data with the description ``data``.

    ``seed`` determines the weights, and has at most 64 bits. For ordered classes and survival, the outputs of a built-in model are one
    score plus an offset for each output (proportional odds). ``caller_module`` is a model that a caller passes.

    Raises:
        ConfigError: there is no such model, or its frozen weights are not those that ``model.base`` names.
    """
    is_image = data.shape is not None and len(data.shape) > 1
    if is_pretrained(model.name):  # ``mended`` sets its dropout to 0
        made = pretrained.make(model.name, targets, data.outputs, images=is_image, seed=seed, adapter=model.adapter_settings)
        module, _changes = mended(made)
        adapters.check_base(module, model.base)
        return module
    is_parallel = targets in tasks.PARALLEL and model.name in models.names()
    module = models.create(
        model.name,
        data.shape,
        1 if is_parallel else data.outputs,
        seed=seed,
        options=model.options,
        vocabulary=data.vocabulary,
        by_place=targets == "tokens",
        given=caller_module,
    )
    module = Parallel(module, data.outputs) if is_parallel else module
    if model.adapter != "none":
        module = adapters.adapted(module, model.adapter_settings, targets, images=is_image, seed=seed)
    if model.mend:
        module, _changes = mended(module)
    return module


def count_weights(config: RunConfig, data: Description) -> int:
    """Return the number of weights of the built-in model of ``config``. They are not allocated, since they may not fit into memory."""
    with torch.device("meta"):  # parameters have shapes here, but no values
        return sum(parameter.numel() for parameter in _initial_model(config, data).parameters())


def persons_of(config: RunConfig, data: Dataset) -> Persons | None:
    """Return which train samples of ``data`` belong to which person; None if ``config`` names no person column.

    The same name at two clients is two persons.

    Raises:
        ConfigError: ``config`` names a person column, and ``data`` does not name the persons of its samples.
    """
    if not config.data.person:
        return None
    if data.persons is None:
        raise ConfigError(
            f"data.person is {config.data.person!r}, but the data have no such column: give a table that has this column, "
            "or leave data.person out"
        )
    has_answer = ~absent_targets(data.train.targets).numpy()  # rows without a target do not count
    return Persons.of(data.persons.tolist(), config.data.person_rows, clients=data.clients, answered=has_answer)


def divide_over_clients(config: RunConfig, data: Dataset, persons: Persons | None = None) -> Division:
    """Return each client's train samples, or its persons if ``persons`` is given.

    At nodes, every client has all rows that it sees. Otherwise the clients that the data name decide, else the names of files or persons.
    All other samples are divided as ``data.partition`` says.

    Raises:
        ConfigError: the settings do not fit the data, or a client would get nothing.
    """
    settings, count = config.data, len(data.train if persons is None else persons)
    if settings.at_nodes:  # each node has its own table
        return Division.shared(np.arange(count), config.clients.count)
    if data.clients is not None:
        # The client of each sample, or of each person's first row: all rows of a person are at one client.
        client_numbers = data.clients if persons is None else data.clients[persons.rows[persons.first]]
        division = _divide_by_client_numbers(config, client_numbers)
        return division if data.identities is None else _in_order_of_names(division, data.identities)
    if data.identities is not None:
        return _divide_files(settings, data.identities, config.clients.count)
    if persons is not None and data.persons is not None:
        return _divide_persons(config, data.persons[persons.rows[persons.first]])
    if is_code(settings.partition):
        return partition_by_code(settings.partition, count, config.clients.count, config.seed)
    are_classes = data.train.targets.dim() == 1 and data.train.targets.dtype == torch.int64
    if settings.by_label and not are_classes:
        raise ConfigError(
            f"data.partition = {settings.partition!r} divides by classes, and these targets are not classes: set it to 'iid' or 'quantity'"
        )
    return partition(
        data.train.targets.numpy() if are_classes else np.zeros(count, dtype=np.int64),  # zeros: the other schemes ignore labels
        config.clients.count,
        stream(config.seed, Purpose.PARTITION),
        scheme=settings.partition,  # type: ignore[arg-type]  # whatever is not code is a scheme
        alpha=settings.alpha,
        labels_per_client=settings.labels_per_client,
        isolated=settings.isolated,
    )


def _divide_by_client_numbers(config: RunConfig, client_numbers: NDArray[np.int64]) -> Division:
    """Assign each sample, or person, to the client whose number ``client_numbers`` (n,) states."""
    if config.data.by_label or config.data.partition != "iid":
        raise ConfigError("data.client already assigns each row to a client: leave data.partition and data.private_label out")
    clients = int(client_numbers.max()) + 1
    division = Division.by_owner(client_numbers, clients)
    if clients != config.clients.count:
        raise ConfigError(f"clients.count is {config.clients.count}, but the data name {clients} clients: leave clients.count out")
    if not division.sizes.all():
        raise ConfigError(
            "data.evaluate_on = 'holdout' sets aside all rows of some client, so that this client cannot train: set data.evaluate_on "
            "to 'test'"
        )
    return division


def _divide_persons(config: RunConfig, names: Names) -> Division:
    """Assign each person to a client by the person's name, so that no person affects another's client."""
    data, generator = config.data, stream(config.seed, Purpose.PARTITION)
    if data.private_label != "none":
        raise ConfigError(
            "data.private_label is set, but a person's rows stay together, whatever their labels: leave data.private_label out"
        )
    return partition_by_name(names, config.clients.count, config.seed, generator, scheme=data.partition, alpha=data.alpha)


def _divide_files(settings: DataConfig, identities: NDArray[np.uint64], count: int) -> Division:
    """Assign each file to one of ``count`` clients by the file's name, so that no file affects another's client.

    ``identities`` are numbers that follow from the files' names. ``settings`` is the section ``[data]`` of the config.
    """
    if settings.by_label or settings.partition != "iid":
        raise ConfigError(
            "data.partition and data.private_label cannot be used here, because each file is assigned to a client by the file's name: "
            "leave both out, or add a column with each file's client to metadata.csv, and set data.client to the column's name"
        )
    # The remainder of an identity by TEST_SHARE decides whether its file is for testing. The quotient, which is independent, decides about
    # the client.
    clients_of_files = identities // np.uint64(TEST_SHARE) % np.uint64(count)
    division = Division.by_owner(clients_of_files.astype(np.int64), count)
    if not division.sizes.all():
        fewer = min(count, len(identities))  # lowered until every client gets a file
        while np.unique(identities // np.uint64(TEST_SHARE) % np.uint64(fewer)).size < fewer:
            fewer = fewer * 9 // 10
        raise ConfigError(
            f"each of {len(identities):,} files is assigned to one of {count} clients by the file's name, and some client gets none: set "
            f"clients.count to {fewer:,} (--set clients.count={fewer})"
        )
    return _in_order_of_names(division, identities)


def _in_order_of_names(division: Division, identities: NDArray[np.uint64]) -> Division:
    """Return ``division`` with each client's files in an order that depends on file names alone.

    Files come sorted by class. If they stayed in that order, the class of one file would affect the positions of others.
    """
    return Division.of([part[np.argsort(identities[part], kind="stable")] for part in division])


def _scale_columns(
    config: RunConfig,
    data: Dataset,
    division: Division,
    mechanism: Mechanism,
    secret: int | None,
    persons: Persons | None,
    measured: Encoder | None,
) -> tuple[Dataset, Ledger]:
    """Return ``data`` with all columns of its table scaled, and the ledger of the noisy histograms that were released for that.

    Args:
        division: rows of each client, or its persons if ``persons`` is given.
        mechanism: mechanism of the training rounds.
        secret: seed of the noise if ``config.secret_noise`` is set.
        measured: encoding of a run that has measured the columns; None measures them here.
    """
    if data.is_scaled:
        return data, Ledger()
    if config.data.at_nodes:  # nodes measure in separate rounds, which the server charges; until then bounds scale the columns
        return (scaled_by_bounds(data) if measured is None else scaled_like_run(data, measured)), Ledger()
    if not measures_columns(config, data.unscaled, mechanism):
        return scaled_by_bounds(data), Ledger()
    shuffling = config.shuffling
    # None, for a run that protects nothing, measures exactly.
    histogram_mechanism = (
        require_dp_sgd(measuring_mechanism(config, mechanism, division.sizes.tolist())) if record_clip_of(mechanism) is not None else None
    )
    if measured is not None:
        return scaled_like_run(data, measured), measuring_ledger(histogram_mechanism, len(division), shuffling.channel, shuffling.colluding)
    seed = require_secret(secret_seed(config, data, secret))
    # For each client, its rows; and for each row, the number of its person's rows, so that all persons weigh the same.
    rows_with_counts = [(part, np.ones_like(part)) if persons is None else persons.all_rows_of(part) for part in division]
    rows, counts = zip(*rows_with_counts, strict=True)
    return Measuring(seed, histogram_mechanism, shuffling.channel, shuffling.colluding).scaled(data, rows, counts)


def measuring_mechanism(config: RunConfig, mechanism: Mechanism, sizes: Sequence[int] = (1,)) -> Mechanism:
    """Return the mechanism for the histograms of columns: ``mechanism`` with the noise that gives them their share of the run's budget.

    ``sizes`` are the numbers of records of the clients, or of persons if persons are protected.

    Let the run have T rounds and M histograms, all with Gaussian noise, and let f be the factor on the histograms' noise. Rounds that are
    mu-GDP (Gaussian differential privacy) and histograms that are (mu / f)-GDP are sqrt(T + M / f^2) mu-GDP together. The function
    :func:`config_for_measuring` solves this for f.
    """
    changed = config_for_measuring(config)
    return mechanism if changed is config else mechanism_of(changed, ranges_of(1), sizes)


def config_for_measuring(config: RunConfig) -> RunConfig:
    """Return ``config`` with the mechanism for one of the ``STAGES`` histograms; ``config`` itself if their noise is that of a round."""
    # Notation of measuring_mechanism. M histograms have the share s of the squared mu if M / f^2 = s / (1 - s) T. Solved for f, this is
    # f = sqrt(M (1 - s) / (T s)).
    share, rounds = config.privacy.measuring_share, config.training.rounds - config.training.extended
    settings = config.mechanism.for_measuring(sqrt(STAGES * (1 - share) / (rounds * share)))
    if settings is config.mechanism:
        return config
    # The clipping norm of a histogram is fixed: adaptive clipping (clipping.target_quantile) is for training.
    return config.model_copy(update={"mechanism": settings, "clipping": ClippingConfig()})


def secret_seed(config: RunConfig, data: Dataset, secret: int | None) -> int | None:
    """Return the seed of all secret randomness: the noise, and who takes part if participation is secret.

    It is None if the config says that a secret determines the noise, and ``secret`` is None.

    With a user's own data, the seed depends on the data and on all settings that affect training. So two different runs never share
    random numbers. If two runs on the same records did, their joint privacy cost could exceed the sum of their guarantees. A run with
    added rounds counts as the same run.
    """
    if not config.data.brought:
        return config.seed
    if config.secret_noise and secret is None:
        return None
    training = config.training.model_copy(update={"rounds": config.training.rounds - config.training.extended, "extended": 0})
    without_added_rounds = config.model_copy(update={"training": training})
    # Settings that do not affect training, and the paths of the data. The features themselves are among the samples that follow.
    excluded_settings: Any = {
        "name": True,
        "description": True,
        "secret_noise": True,
        "privacy": {"target_epsilon", "original_target"},
        "data": {"path", "test_path", "features_digest"},
        "task": {"threshold"},
    }
    digest = hashlib.sha256(without_added_rounds.model_dump_json(exclude=excluded_settings).encode())
    if config.secret_noise:
        digest.update(f"{secret}".encode())
    for content in data.train.content():
        digest.update(content)
    if data.persons is not None:
        digest.update("\0".join(data.persons).encode(errors="surrogatepass"))
    return int.from_bytes(digest.digest())


def _participation_seed(secret: int, module: nn.Module, weights: Tensor, division: Division) -> int:
    """Return the seed of secret participation on a user's own data. It differs for each model and each division of the data.

    Noise depends on the values that it hides, so two models with one seed never share noise. Participation is drawn before there are any
    values. A config does not describe a model that was passed from Python or lies in a file, so the model's initial weights and its code
    go into the seed.
    """
    digest = hashlib.sha256(f"{secret} {identifying_text(module)}".encode())
    digest.update(weights.numpy().tobytes())
    digest.update(division.sizes.tobytes() + division.starts.tobytes() + division.places.tobytes())
    return int.from_bytes(digest.digest())


def measures_columns(config: RunConfig, unscaled: Sequence[Unscaled], mechanism: Mechanism) -> bool:
    """Return whether the ``unscaled`` columns of a table are measured before the first round. If not, they are scaled by their bounds.

    Raises:
        ConfigError: the columns cannot be measured, since the mechanism does not protect all records in each round, and some column has
            no bounds.
    """
    if not unscaled:
        return False
    if config.data.scaling == "bounds":
        reason = "data.scaling is 'bounds'"
    elif config.mechanism.protects and record_clip_of(mechanism) is None:  # without noise, columns are measured exactly
        reason = f"mechanism {mechanism.name!r} cannot measure columns, because it does not protect records"
    elif record_rate_of(mechanism) != 1 or config.clients.once:
        reason = "columns are measured on all records at once, but here not all take part in a round"
    else:
        return True
    # Columns of classes need no bounds.
    unbounded = [column.name for column in unscaled if column.bounds is None and not column.classes]
    if unbounded:
        raise ConfigError(f"no data.bounds for {listed_names(unbounded, 5)}, and {reason}: give data.bounds for each column of numbers")
    return False


def lowest_join_probability(config: RunConfig) -> float | None:
    """Return the lowest probability with which a client joins a round by random check-in; None if the server chooses.

    Raises:
        ConfigError: ``clients.self_sampling`` is combined with ``clients.fraction`` or ``clients.once``.
    """
    probability = LOWEST_PROBABILITY[config.clients.self_sampling]
    if config.clients.once and (probability is not None or config.clients.fraction != 1):
        raise ConfigError("clients.once already assigns each client to one round: leave clients.self_sampling and clients.fraction out")
    if probability is not None and config.clients.fraction != 1:
        raise ConfigError(
            "clients.self_sampling lets clients choose their rounds, and clients.fraction lets the server choose: leave one of them out"
        )
    return probability


def count_measured_weights(config: RunConfig, layout: ParameterLayout) -> int:
    """Return how many weights, at the start of the vector, are measured as a mean in the first round instead of being trained.

    In the model ``CENTERED`` these are the weights of the first layer. Other models have none.
    """
    return layout.sizes[0] if config.model.name == models.CENTERED else 0


def mechanism_of(config: RunConfig, ranges: LayerRanges, sizes: Sequence[int] = (1,)) -> Mechanism:
    """Return the mechanism that ``config`` names, for values with these clipping ``ranges``.

    ``sizes`` are the numbers of records of the clients, or of persons if persons are protected. The default, one client of one record,
    stands for unknown numbers.

    Raises:
        ConfigError: a setting is out of range, or does not fit the others.
    """
    settings, training = config.mechanism, config.training
    if not settings.uses_ranges and (config.ranges.center != 0 or config.ranges.rule != "fixed"):
        raise ConfigError(f"mechanism {settings.name!r} clips by norm and uses no ranges: leave ranges.center and ranges.rule out")
    if config.clipping.is_adaptive:
        _check_adaptive_clipping(config)
    clip_norm = None if training.clip_norm == "off" else training.clip_norm
    local = Training(training.learning_rate, training.epochs, training.batch_size, clip_norm, training.make_client_optimiser().is_plain)
    facts = Facts(
        ranges=ranges,
        rounds=training.rounds,
        smallest=min(sizes),
        training=local,
        records=sum(sizes) / len(sizes),
        summed=config.shuffling.channel == "secure-sum",
        part="person" if config.data.person else "record",
        clients=_max_summed_clients(config),
        adaptive=config.clipping.is_adaptive,
    )
    mechanism = built(settings, facts)
    if record_clip_of(mechanism) is not None and config.data.by_label:
        raise ConfigError(
            f"mechanism {mechanism.name!r} protects single records, but when data are divided by their labels one record affects the "
            f"client of others: set data.partition to {' or '.join(sorted(LABEL_BLIND))}, and leave data.private_label out"
        )
    return on_users_code(mechanism) if config.users_code else mechanism


def _check_adaptive_clipping(config: RunConfig) -> None:
    """Raise if the clipping norm cannot change from round to round.

    Raises:
        ConfigError: the mechanism or the method clips no gradients or updates to a norm; or the server's learning rate or weight decay is
            "auto", which is computed for one norm.
    """
    prefix = f"clipping.target_quantile is {config.clipping.target_quantile}, and"
    if not isinstance(config.mechanism, DpSgdSettings | DpFedAvgSettings):
        raise ConfigError(
            f"{prefix} mechanism {config.mechanism.name!r} has no clipping norm that could be adapted: set mechanism.name to 'dp-sgd' or "
            "'dp-fedavg', or clipping.target_quantile to 'off'"
        )
    if config.training.method != "gradient":
        raise ConfigError(
            f"{prefix} training.method = {config.training.method!r} clips no gradients: set clipping.target_quantile to 'off', or "
            "training.method to 'gradient'"
        )
    for key in ("server_learning_rate", "server_weight_decay"):
        if getattr(config.training, key) == "auto":
            raise ConfigError(f"{prefix} training.{key} is 'auto', which is computed for one fixed norm: give training.{key} a number")


def range_rule_of(config: RunConfig) -> RangeRule | NormQuantile:
    """Return the rule by which the server chooses the next ranges, or the next clipping norm."""
    quantile = config.clipping.target_quantile
    if quantile == "off":
        return range_rule(config.ranges.rule, floor=config.ranges.floor)
    return NormQuantile(quantile, config.clipping.learning_rate, _first_clip_norm(config))


def _first_clip_norm(config: RunConfig) -> float:
    """Return the clipping norm of the first round.

    Raises:
        ConfigError: the mechanism has no clipping norm that can be adapted, or the norm is still "auto".
    """
    _check_adaptive_clipping(config)
    norm = getattr(config.mechanism, "clip_norm", "auto")
    if norm == "auto":
        raise ConfigError("mechanism.clip_norm = 'auto' works only in a run, whose model and data decide it: here give a number")
    return float(norm)


def _max_summed_clients(config: RunConfig) -> int:
    """Return the maximum number of clients whose reports a secure sum adds up in a round. A mechanism for sums is built for this number.

    Raises:
        ConfigError: ``shuffling.max_clients`` is below the number of clients, or all clients are assumed to collude.
    """
    max_clients, count = config.shuffling.max_clients, config.clients.count
    if 0 < max_clients < count:
        raise ConfigError(
            f"shuffling.max_clients is {max_clients:,}, but up to {count:,} clients take part: set it to {count} or more, or leave it out"
        )
    if config.shuffling.colluding >= count:
        raise ConfigError(
            f"shuffling.colluding is {config.shuffling.colluding:,} of {count:,} clients, but at least one client has to be honest: "
            "set it lower"
        )
    return max_clients or count


def _split_validation(config: RunConfig, data: Dataset) -> tuple[Dataset, Samples | None]:
    """Return ``data`` with its final test samples, and the validation samples, by which training stops early.

    The second value is None if the config sets no validation samples aside.

    With ``data.evaluate_on = "holdout"``, a tenth of the training samples replaces the test samples.

    Raises:
        ConfigError: only one of ``training.patience`` and ``data.validation`` is set.
    """
    if (config.data.validation > 0) != (config.training.patience > 0):
        raise ConfigError(
            "only one of training.patience and data.validation is set, but training.patience stops by the loss on the validation rows: set "
            "both, or neither"
        )
    with_test = with_tenth_as_test(data, config.seed) if config.data.evaluate_on == "holdout" else data
    return split_off_validation(with_test, config.data.validation, scored_part(config.data.evaluate_on))


def _model_seed(seed: int) -> int:
    """Return the seed of the initial model. It follows from the run's ``seed``, and has 63 bits, as PyTorch's seeds may have."""
    return int(stream(seed, Purpose.MODEL).integers(2**63))


def _records_for_full_weight(config: RunConfig, mechanism: Mechanism) -> int | None:
    """Return the number of records from which a client gets full weight; None if all clients weigh the same.

    Raises:
        ConfigError: ``clients.full_weight`` is set, but clients send weights rather than updates, or the mechanism weighs by records.
    """
    if config.clients.full_weight == "off":
        return None
    if record_clip_of(mechanism) is not None:
        raise ConfigError(
            f"clients.full_weight has no effect in mechanism {mechanism.name!r}, where all records count the same: leave it out"
        )
    if config.mechanism.perturbed == "weights":
        raise ConfigError("clients.full_weight scales updates, and this run does not send updates: set mechanism.perturbed to 'update'")
    return config.clients.full_weight


def initial_ranges(config: RunConfig, layout: ParameterLayout, weights: Tensor) -> LayerRanges:
    """Return the clipping ranges of the first round. ``weights`` is the public initial model."""
    if config.clipping.is_adaptive:  # the radius of the ranges then stands for the clipping norm
        return LayerRanges(0.0, _first_clip_norm(config), layout.sizes)
    ranges = config.ranges
    if ranges.radius == "initial":
        _check_radius_initial(config)
        return LayerRanges.covering(weights, layout.sizes, margin=ranges.margin, floor=ranges.floor)
    return LayerRanges(_per_layer("center", ranges.center, layout), _per_layer("radius", ranges.radius, layout), layout.sizes)


def _check_radius_initial(config: RunConfig) -> None:
    """Raise a :class:`ConfigError` if other settings do not fit ``ranges.radius = "initial"``."""
    if config.mechanism.perturbed == "update":
        raise ConfigError(
            "ranges.radius = 'initial' is a range of weights, but mechanism.perturbed is 'update': set ranges.radius to a number"
        )
    if config.ranges.center != RangesConfig().center:
        raise ConfigError("ranges.radius = 'initial' sets the center as well: leave ranges.center out")


def _per_layer(key: str, value: float | Mapping[str, float], layout: ParameterLayout) -> Tensor:
    """Return the setting ``ranges.key`` for each layer (L,): the same ``value`` for all, or the value under the layer's name.

    Raise a :class:`ConfigError` if ``value`` names a layer that the model does not have, or lacks one that it has.
    """
    if not isinstance(value, Mapping):
        return torch.full((len(layout.names),), float(value), dtype=torch.float64)
    for name in value:
        if name not in layout.names:
            raise ConfigError(f"ranges.{key} names {name!r}, but the model has no such layer: {did_you_mean(name, layout.names)}")
    missing = [name for name in layout.names if name not in value]
    if missing:
        raise ConfigError(f"ranges.{key} lacks the layers {', '.join(missing)}: give a number for each layer")
    return torch.tensor([value[name] for name in layout.names], dtype=torch.float64)
