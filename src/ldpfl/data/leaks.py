"""Notice input columns that give the target away, such as a copy of it or a column that is filled in after the outcome.

This looks at private cells, so only a simulation on the user's own rows calls it, and its note is not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.columns import words_of
from ldpfl.data.encoder import Encoder
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.errors import printable
from ldpfl.tasks import Targets

LEAK = "columns may give the target away"
"""Start of the note on such columns. The note reveals a property of private rows."""

_MAX_ROWS = 20_000
"""Number of rows that are looked at, at even distances. More rows would take seconds."""

_MAX_WORDS = 1000
"""Number of different cells of a column up to which each of them may stand for a class."""

_MIN_ROWS = 10
"""Number of rows of another class than the commonest one from which on a column can be told to predict them."""

_MAX_ERRORS = 0.02
"""Share of wrong predictions, relative to the rows outside the commonest class, up to which a column predicts classes."""

_MIN_AUROC = 0.999
_MIN_CORRELATION = 0.9999
"""Correlation of numbers, or of their ranks, from which on one of them gives the other away."""

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]


def leaks_in(table: Table, config: DataConfig, targets: Targets) -> dict[str, bool]:
    """Return the input columns of ``table`` that predict a target nearly without error, with whether they do so without a scale.

    Words need no scale, and neither does it where a number is missing. ``config`` has the kind of each column filled in.
    """
    if config.text or targets == "tokens":
        return {}
    table = table.take(np.unique(np.linspace(0, len(table) - 1, min(len(table), _MAX_ROWS)).astype(np.int64)))
    return dict(_leaks(table, config, targets))


def leak_note(leaks: Mapping[str, bool], encoder: Encoder | None) -> tuple[str, ...]:
    """Return a note on the columns ``leaks``, which give the target away; empty if the model reads none of them.

    ``encoder`` is that of the scaled rows. It tells which columns the noise of measuring hid: the model does not read their numbers.
    """
    found = [printable(name) for name, unscaled in leaks.items() if unscaled or encoder is None or name not in encoder.hidden]
    if not found:
        return ()
    each, such = ("predicts", "such a column is") if len(found) == 1 else ("each predict", "such columns are")
    return (
        f"{LEAK}: {', '.join(found)} {each} it nearly without error, alone. Where {such} known only after the outcome, leave "
        f"{'it' if len(found) == 1 else 'them'} out (data.columns names the columns to use): a model that needs "
        f"{'it' if len(found) == 1 else 'them'} is of no use for new rows",
    )


def _leaks(table: Table, config: DataConfig, targets: Targets) -> Iterator[tuple[str, bool]]:
    targets_as_numbers = [table.numbers(name) for name in _names_of_numbers(config, targets)]
    targets_as_classes = [_classes(words_of(table, name, values=config.classes)) for name in _names_of_classes(config, targets)]
    for name in config.columns:
        cells = _classes(words_of(table, name, values=config.categories.get(name, ())))
        told = any(_tells(cells, classes) for classes in targets_as_classes)
        unscaled = True
        if name not in config.words and name not in config.categories:
            values = table.numbers(name, kind="dates" if name in config.dates else "numbers", strict=False)
            told |= any(_orders(values, classes) for classes in targets_as_classes)
            told |= any(_moves_with(values, numbers) for numbers in targets_as_numbers)
            gaps = np.isnan(values).astype(np.int64)
            unscaled = config.missing == "indicator" and any(_tells(gaps, classes) for classes in targets_as_classes)
        if told:
            yield name, unscaled


def _names_of_numbers(config: DataConfig, targets: Targets) -> Sequence[str]:
    return config.target_names[:1] if targets in ("number", "count", "survival") else ()


def _names_of_classes(config: DataConfig, targets: Targets) -> Sequence[str]:
    if targets == "survival":
        return config.target_names[1:]
    return config.target_names if targets in ("class", "classes", "ordered") else ()


def _classes(words: Sequence[str]) -> Classes:
    return np.unique(np.array(words, dtype=str), return_inverse=True)[1].astype(np.int64)


def _tells(cells: Classes, classes: Classes) -> bool:
    """Return whether the class that most rows with a cell have, in every other row, predicts the classes of the remaining rows."""
    if cells.max() >= _MAX_WORDS:
        return False
    counts = np.zeros((cells.max() + 1, classes.max() + 1), dtype=np.int64)
    np.add.at(counts, (cells[::2], classes[::2]), 1)
    commonest = counts.sum(axis=0).argmax()
    predicted = np.where(counts.any(axis=1), counts.argmax(axis=1), commonest)[cells[1::2]]
    others = int((classes[1::2] != commonest).sum())
    return others >= _MIN_ROWS and int((predicted != classes[1::2]).sum()) <= _MAX_ERRORS * others


def _orders(values: Floats, classes: Classes) -> bool:
    """Return whether ``values`` (n,), NaN where missing, separate two ``classes`` (n,): by AUROC in either direction."""
    from scipy.stats import rankdata  # slow to import

    events = classes == 1
    count, others = int(events.sum()), int((~events).sum())
    if classes.max() != 1 or min(count, others) < _MIN_ROWS:
        return False
    ranks = rankdata(np.nan_to_num(values, nan=-np.inf))
    auroc = (ranks[events].sum() - count * (count + 1) / 2) / (count * others)
    return bool(max(auroc, 1 - auroc) >= _MIN_AUROC)


def _moves_with(values: Floats, target: Floats) -> bool:
    """Return whether ``values`` (n,), NaN where missing, or their ranks, are correlated with the ``target`` (n,) nearly perfectly."""
    from scipy.stats import rankdata  # slow to import

    known = np.isfinite(values) & np.isfinite(target)
    values, target = values[known], target[known]
    if len(values) < _MIN_ROWS or not np.ptp(values) or not np.ptp(target):
        return False
    pairs = ((values, target), (rankdata(values), rankdata(target)))
    return any(abs(float(np.corrcoef(*pair)[0, 1])) >= _MIN_CORRELATION for pair in pairs)
