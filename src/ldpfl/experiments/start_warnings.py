"""Warnings about a run before its first round.

They depend on settings and numbers of rows, which are public. The notes on the scale of inputs, on clients with rows of one class, and on
outcomes of test rows depend on private rows as well. Only a simulation prints these three, and they are not published.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ldpfl.data import Dataset
from ldpfl.data.holding_out import HOLDOUT_SHARE, TEST_SHARE, scored_part
from ldpfl.data.persons import normalise_text
from ldpfl.data.samples import Division
from ldpfl.errors import printable
from ldpfl.experiments.config import ClientsConfig, RunConfig
from ldpfl.experiments.dataset import target_kind_of
from ldpfl.experiments.planning.evaluation_noise import server_sees_senders
from ldpfl.experiments.quality import MIN_EVENTS, MIN_SITE_ROWS
from ldpfl.mechanisms.dp_sgd import DpSgdSettings
from ldpfl.util.number_format import counted

SCALE = "the inputs may be on a wrong scale"
"""Start of the note on inputs that are far from mean 0 and standard deviation 1. The note reveals a property of private rows."""

SIMILAR = "two clients have similar names,"
"""Start of the warning about clients that may be one."""

SINGLE_CLASS = "clients have rows of one class each"
"""Start of the note on clients whose rows all have the same class. The note reveals a property of private rows."""

FEW_OUTCOMES = "the test set says little about some outcomes"
"""Start of the note on outcomes that no test row has, or too few; it says "holdout set" if scores are of such rows.

The note reveals a property of private rows."""

_MAX_RMS, _MIN_RMS = 4.0, 0.25
"""A warning is given if the root mean square of the inputs lies outside these bounds. About 1 is expected."""

_MAX_RECORDS_RATIO = 2.0
"""A warning is given if the stated and the true number of records of a client differ by more than this factor."""


def start_warnings(config: RunConfig, data: Dataset, division: Division) -> Iterator[str]:
    """Yield warnings about a run on ``data``, divided over clients as ``division``. None of them stops the run."""
    if not config.data.at_nodes:  # nobody but each node knows its rows
        yield from _made_up_clients_warnings(config, data, division)
        yield from _stated_records_warnings(config, division)
        yield from _few_rows_warnings(config, data)
        yield from _test_outcome_warnings(config, data)
        yield from _scale_warnings(config, data)
        yield from _one_class_warnings(config, data, division)
        yield from _similar_clients_warnings(data)


def _made_up_clients_warnings(config: RunConfig, data: Dataset, division: Division) -> Iterator[str]:
    """Yield a warning if a user's own data name no clients, and ``clients.count`` has its default. Then that number means nothing.

    The saved config of a run does not tell whether the user gave the default. So the default counts as not given.
    """
    count = config.clients.count
    if not config.data.brought or data.clients is not None or count != ClientsConfig().count or not config.mechanism.protects:
        return
    unit = "persons" if config.data.person else "rows"
    noise = ""
    if isinstance(config.mechanism, DpSgdSettings) and server_sees_senders(config.shuffling.channel):
        noise = " Each client adds noise of its own, so many small clients learn far less than few large ones."
    is_table = bool(config.data.target or config.data.text)
    advice = "Name the column of the real clients (--client, data.client), or set" if is_table else "Set"
    yield (
        f"the data name no clients, so their {unit} were dealt to {count:,} made-up clients of {division.sizes.mean():,.4g} {unit} on "
        f"average.{noise} {advice} clients.count to their real number (1 if one place holds all {unit})"
    )


def _similar_clients_warnings(data: Dataset) -> Iterator[str]:
    """Yield a warning if two clients' names differ only in case or in how a number is written. One client with two names counts as two."""
    first_of: dict[str, str] = {}
    for name in data.client_names:
        other = first_of.setdefault(normalise_text(name).casefold(), name)
        if other != name:
            yield (
                f"{SIMILAR} {other!r} and {name!r}: if they are one client, it is protected less than stated, and so is a person with rows "
                "under both names; write the name in one way"
            )
            return


def _stated_records_warnings(config: RunConfig, division: Division) -> Iterator[str]:
    """Yield a warning if ``mechanism.records``, the stated mean number of records of a client, is far from the true one.

    Sums of gradients are divided by the stated number, so each mean gradient is off by the ratio of the two.
    """
    stated = config.mechanism.records if isinstance(config.mechanism, DpSgdSettings) else 0
    true = float(division.sizes.mean())
    if stated and not 1 / _MAX_RECORDS_RATIO <= true / stated <= _MAX_RECORDS_RATIO:
        effect = "training may diverge" if true > stated else "the model hardly moves"
        unit = "persons" if config.data.person else "records"
        yield (
            f"mechanism.records says {stated:,} {unit} a client, and clients have {true:,.4g} on average: each step is "
            f"{true / stated:.3g} times as long as the learning rate says, so {effect}; "
            f"set mechanism.records to {max(1, round(true)):,}, or in a simulation to 0"
        )


def _few_rows_warnings(config: RunConfig, data: Dataset) -> Iterator[str]:
    """Yield a warning if a user's own data have too few test rows for metrics with intervals."""
    rows = len(data.test)
    if config.data.brought and rows < MIN_SITE_ROWS:
        part = scored_part(config.data.evaluate_on)
        if part == "holdout":
            needed = f"{round(MIN_SITE_ROWS / HOLDOUT_SHARE)} rows besides the test rows"
        elif config.data.test_path:
            needed = "a data.test_path with as many"
        else:  # without a file of test rows, one row in TEST_SHARE is a test row
            needed = f"{TEST_SHARE * MIN_SITE_ROWS} rows in all, or a data.test_path"
        yield (
            f"{len(data.train):,} rows to train on and {rows:,} to measure on are too few: figures of a model say something from "
            f"{MIN_SITE_ROWS} {part} rows on, and intervals need 10 of each class; give {needed}"
        )


def _test_outcome_warnings(config: RunConfig, data: Dataset) -> Iterator[str]:
    """Yield a warning if a user's own test rows all have one outcome, or too few rows have one of several outcomes."""
    rows, settings = len(data.test), config.data
    if not settings.brought or settings.evaluate_on == "clients" or rows < MIN_SITE_ROWS:  # few rows have a warning of their own
        return
    counts = _count_outcomes(config, data)
    few = [name for name, count in counts.items() if count < MIN_EVENTS]
    if not few:
        return
    noun = "row" if data.test_persons is None else "person"
    unit = f"{noun}s"
    found = ", ".join(f"{counted(counts[name], noun)} with {printable(name)}" for name in few[:_MAX_NAMED])
    more = f" and {len(few) - _MAX_NAMED:,} more outcomes" if len(few) > _MAX_NAMED else ""
    part = scored_part(settings.evaluate_on)
    if part == "holdout":
        needed = f"some {round(MIN_EVENTS / HOLDOUT_SHARE)} {unit} of each outcome besides the test rows: a tenth of them are holdout rows"
    else:
        source = "in data.test_path" if settings.test_path else "by a file of test rows (data.test_path)"
        needed = f"at least {MIN_EVENTS} {unit} of each outcome {source}"
    yield (
        f"{FEW_OUTCOMES.replace('test', part)}, which are missing or rare among its {rows:,} rows ({found}{more}). Figures that compare "
        f"these with others, or average over all, are unsure or have no value. Give {needed}"
    )


def _count_outcomes(config: RunConfig, data: Dataset) -> dict[str, int]:
    """Return the number of test rows (or persons, if the data name them) with each outcome that figures need, by the outcome's name."""
    targets, kind = data.test.targets.cpu(), target_kind_of(config)
    names = data.classes if data.encoder is None else data.encoder.classes
    if kind in ("class", "ordered") and targets.dim() == 1:
        class_count = data.outputs + (kind == "ordered")  # ordered classes have one output less
        masks = {f"the class {names[c] if c < len(names) else c!r}": targets == c for c in range(class_count)}
    elif kind == "classes" and targets.dim() == 2:
        labels = names if len(names) == targets.shape[1] else config.data.target_names if config.data.target else ()
        columns = [labels[place] if place < len(labels) else str(place) for place in range(targets.shape[1])]
        masks = {f"the label {name!r}": targets[:, place] > 0 for place, name in enumerate(columns)}
        masks |= {f"no label {name!r}": targets[:, place] == 0 for place, name in enumerate(columns)}
    elif kind == "survival":
        masks = {"the event": targets[:, -1] > 0}  # the last column is the event
    elif kind in ("number", "count") and targets.dim() == 1:
        is_commonest = targets == targets.mode().values
        masks = {"another value than the commonest": ~is_commonest}
    else:
        masks = {}
    if data.test_persons is None:
        return {name: int(mask.sum()) for name, mask in masks.items()}
    return {name: len(set(data.test_persons[mask.numpy()].tolist())) for name, mask in masks.items()}


_MAX_NAMED = 5
"""Maximum number of outcomes that the warning on test rows names."""


def _scale_warnings(config: RunConfig, data: Dataset) -> Iterator[str]:
    """Yield a warning if a user's own images or arrays are not on the scale that models, clipping and "auto" settings expect.

    Inputs in bytes are rescaled before training, so only bytes of 0 and 1 are a problem.
    """
    inputs = data.train.inputs
    if not config.data.brought or data.encoder is not None or not isinstance(inputs, Tensor):
        return
    if not inputs.is_floating_point():
        if inputs.dtype == torch.uint8 and int(inputs.max()) <= 1:
            yield (
                f"{SCALE}: all pixels are 0 or 1, and images of bytes are read as 0 to 255, so that the model sees hardly any contrast; "
                "multiply them by 255"
            )
        return
    low, high, rms = float(inputs.min()), float(inputs.max()), float(inputs.double().square().mean().sqrt())
    is_image = inputs.dim() > 2
    is_unit_range = is_image and low >= 0 and high <= 1  # pixels divided by 255: even if their rms fits, their mean is far from 0
    if _MIN_RMS <= rms <= _MAX_RMS and not is_unit_range:
        return
    advice = "give images as bytes (uint8) from 0 to 255, which are scaled here, or " if is_image else ""
    yield (
        f"{SCALE}: they lie between {low:.3g} and {high:.3g}, but decimal numbers are not rescaled, and steps suit inputs of mean 0 and "
        f"spread 1; {advice}subtract a mean and divide by a spread that the public knows"
    )


def _one_class_warnings(config: RunConfig, data: Dataset, division: Division) -> Iterator[str]:
    """Yield a warning if nearly all clients have rows of a single class, because the user's column of clients or partition follows it.

    Sorted rows that are divided in blocks have this fault. At each border between two classes, one client may have rows of both. ldpfl's
    own ``iid`` and ``quantity`` draw rows at random, whatever their order, and persons are dealt out by their names.
    """
    targets, settings = data.train.targets, config.data
    # A partition by labels is meant to give such clients, and a partition of persons cannot follow the rows' order.
    is_harmless = settings.by_label or (data.clients is None and settings.person)
    if not settings.brought or is_harmless or targets.dim() != 1 or targets.dtype != torch.int64:
        return
    parts = division if data.clients is None else Division.by_owner(data.clients, int(data.clients.max()) + 1)
    if len(parts) < 2 or parts.sizes.mean() < _MIN_MEAN_ROWS or not parts.sizes.all():
        return
    classes, starts = targets.numpy()[np.concatenate(list(parts))], np.cumsum(parts.sizes) - parts.sizes
    lowest = np.minimum.reduceat(classes, starts)  # for each client, as is the maximum
    has_one_class = lowest == np.maximum.reduceat(classes, starts)
    borders = np.unique(classes).size - 1  # between the classes, if rows are sorted by class
    # Sorted rows leave at most one client with two classes at each border, and every class has a client of its own.
    looks_sorted = (~has_one_class).sum() <= borders and np.unique(lowest[has_one_class]).size > borders
    if not looks_sorted:
        return
    cause, remedy = f"as data.partition {settings.partition!r} divides them", "set data.partition to 'iid', which draws rows at random"
    if data.clients is not None:
        name = f"the column {settings.client!r} names" if settings.client else "the data name"
        cause, remedy = f"as {name} the clients", "name a column of clients that does not follow the target (--client, data.client)"
    target = f"the target {settings.target_names[0]!r}" if settings.target else "the target"
    effect = "" if config.mechanism.perturbed == "gradient" else " A client that trains by itself learns its own class alone."
    yield (
        f"{SINGLE_CLASS}, {cause}: a row's client is public, so whoever knows it knows {target} too, which no epsilon covers.{effect} "
        f"{remedy[0].upper()}{remedy[1:]}"
    )


_MIN_MEAN_ROWS = 5.0
"""Minimum mean number of rows of a client for the warning that clients have one class each. With fewer rows it may be by chance."""
