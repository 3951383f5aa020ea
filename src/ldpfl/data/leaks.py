"""Notice faults of a table that its cells show: columns that give the target away, several rows of a person, missing values.

A column that gives the target away is, for example, a copy of it or filled in after the outcome. All of this looks at private cells, so
only a simulation on the user's own rows calls it, and its notes are not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.columns import column_words
from ldpfl.data.encoder import Encoder
from ldpfl.data.identifiers import identifier_kind
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table
from ldpfl.errors import listed_names
from ldpfl.tasks import Targets

LEAK = "columns may give the target away"
"""Start of the note on columns that predict the target nearly without error. The note reveals a property of private rows."""
REPEATED_PERSONS = "rows of one person are both in training and in the test"
"""Start of the note on an identifier column with several rows of a person. The note reveals a property of private rows."""
COPIES = "test rows are copies of training rows"
"""Start of the note on rows that are in the training table and in the test table. The note reveals a property of private rows."""
EMPTY = "columns without any value"
"""Start of the note on empty input columns. The note reveals a property of private rows."""
GAPS = "columns with missing values"
"""Start of the note on input columns in which some cells have no value. The note reveals a property of private rows."""
COLLISIONS = "columns have many words for the number of data.buckets"
"""Start of the note on columns of words that share hash buckets. The note reveals a property of private rows."""
_MIN_COPIED, _MIN_DISTINCT = 0.1, 0.9
"""Minimum share of test rows that are copies for a note, and of training rows that differ. With fewer, rows are equal by chance."""
_MAX_NAMED = 8
"""Maximum number of columns that the note on missing values names."""
_MAX_ROWS = 20_000
"""Number of rows that are looked at, at even distances. More rows would take seconds."""
_MAX_DISTINCT_CELLS = 1000
"""Maximum number of different cells of a column that is tested. With more, nearly each row has a cell of its own."""
_MIN_ROWS = 10
"""Minimum number of rows outside the commonest class. With fewer, a column may predict them by chance."""
_MAX_ERROR_SHARE = 0.02
"""Maximum number of wrong predictions of a column that predicts classes, as a share of the rows outside the commonest class."""
_MIN_AUROC = 0.999
"""Minimum area under the ROC curve of numbers that give two classes away."""
_MIN_CORRELATION = 0.9999
"""Minimum correlation, of numbers or of their ranks, of a column that gives a numeric target away."""

Floats = NDArray[np.float64]
Classes = NDArray[np.int64]


def find_leaks(table: Table, config: DataConfig, targets: Targets) -> dict[str, bool]:
    """Return the input columns of ``table`` that predict a target nearly without error, by name.

    A value is True if the column gives the target away even where noise hides the scale of its numbers, so that a model cannot use them.
    That holds for a column of words, and if the gaps of a column predict the target and ``data.missing`` gives them an indicator.
    ``config`` has the kind of each column filled in.
    """
    if config.text or targets == "tokens":
        return {}
    table = table.take(np.unique(np.linspace(0, len(table) - 1, min(len(table), _MAX_ROWS)).astype(np.int64)))
    return dict(_leaks(table, config, targets))


def leak_note(leaks: Mapping[str, bool], encoder: Encoder | None) -> tuple[str, ...]:
    """Return a note on the columns ``leaks``, which give the target away; empty if the model reads none of them.

    ``leaks`` comes from :func:`find_leaks`. ``encoder`` is the encoder of the scaled rows. It knows the columns whose scale noise has
    hidden. The model does not read their numbers.
    """
    names = [name for name, without_scale in leaks.items() if without_scale or encoder is None or name not in encoder.hidden_columns]
    if not names:
        return ()
    predict, such_are, them = ("predicts", "such a column is", "it") if len(names) == 1 else ("each predict", "such columns are", "them")
    return (
        f"{LEAK}: {listed_names(names)} {predict} it nearly without error, alone. Where {such_are} known only after the outcome, leave "
        f"{them} out (data.columns names the columns to use): a model that needs {them} is of no use for new rows",
    )


def notes_on_cells(table: Table, config: DataConfig) -> Iterator[str]:
    """Yield notes on columns of persons with repeated values, if ``data.person`` is not set, and on missing values and words of inputs.

    ``config`` has the kind of each column filled in.
    """
    targets = config.target_names if config.target else ()  # a language model has none
    used = {*targets, *config.columns, config.client, config.text}
    for name in table.columns:
        if not config.person and name not in used and identifier_kind(name) == "person":
            persons = [word for word in column_words(table, name) if word]
            if len(set(persons)) < len(persons):
                yield (
                    f"{REPEATED_PERSONS}, and are not protected together: {len(persons):,} rows have {len(set(persons)):,} different "
                    f"values of {name}. So scores and intervals are too good, and one row is protected, not one person. Where a value "
                    f"means a person, set --person {name} (data.person)"
                )
    words_of = {name: column_words(table, name, values=config.categories.get(name, ())) for name in config.columns}
    shares = {name: words.count("") / len(table) for name, words in words_of.items()}
    empty = [name for name, share in shares.items() if share == 1]
    if empty:
        yield (
            f"{EMPTY}: {listed_names(empty)}. Their inputs are the same for all rows; leave them out (data.columns names the columns to "
            "use)"
        )
    gaps = sorted((name for name, share in shares.items() if 0 < share < 1), key=lambda name: -shares[name])
    if gaps:
        named = ", ".join(f"{listed_names([name])} ({shares[name]:.1%})" for name in gaps[:_MAX_NAMED])
        more = f" and {len(gaps) - _MAX_NAMED:,} more" if len(gaps) > _MAX_NAMED else ""
        yield f"{GAPS}: {named}{more}. data.missing says how a missing number is treated ({config.missing}); a missing word is no word"
    different = {name: len({*words_of[name]} - {""}) for name in config.words if name in words_of and name not in config.categories}
    crowded = [f"{listed_names([name])} ({count:,} words)" for name, count in different.items() if count > config.buckets / 2]
    if crowded:
        yield (
            f"{COLLISIONS}, which is {config.buckets:,}: {', '.join(crowded[:_MAX_NAMED])}. Words in one bucket are one word to the model: "
            "list the words that matter in data.categories, replace rare ones by a common word, or set data.buckets higher"
        )


def note_on_copies(train: Table, test: Table, config: DataConfig) -> tuple[str, ...]:
    """Return a note on rows of ``test`` that are equal to rows of ``train`` in all columns that are used; empty if there are hardly any.

    ``config`` has the kind of each column filled in.
    """
    targets = config.target_names if config.target else ()  # a language model has none
    used = [name for name in dict.fromkeys((*config.columns, config.text, *targets)) if name in train.columns and name in test.columns]
    known, tested = (list(zip(*(column_words(table, name, numeric=True) for name in used), strict=True)) for table in (train, test))
    distinct = set(known)
    copies = sum(row in distinct for row in tested)
    if copies < _MIN_COPIED * len(tested) or len(distinct) < _MIN_DISTINCT * len(known):
        return ()
    return (
        f"{COPIES}: {copies:,} of {len(tested):,} rows of data.test_path have the same values as rows of data.path in all columns that are "
        "used. So scores on test rows are too good: take such rows out of one of the two files",
    )


def _leaks(table: Table, config: DataConfig, targets: Targets) -> Iterator[tuple[str, bool]]:
    """Yield each input column of ``table`` that predicts a target, and whether it does so without a scale, see :func:`find_leaks`."""
    targets_as_numbers = [table.numbers(name) for name in _numeric_targets(config, targets)]
    targets_as_classes = [_as_numbers(column_words(table, name, values=config.classes)) for name in _class_targets(config, targets)]
    for name in config.columns:
        words = column_words(table, name, values=config.categories.get(name, ()))
        cells, gaps = _as_numbers(words), np.array([not word for word in words], dtype=np.int64)
        gaps_predict = any(_predicts(gaps, classes) for classes in targets_as_classes)
        predicts = gaps_predict or any(_predicts(cells, classes) for classes in targets_as_classes)
        without_scale = True  # the inputs of a column of words have no scale
        if name not in config.words and name not in config.categories:
            values = table.numbers(name, kind="dates" if name in config.dates else "numbers", strict=False)
            predicts |= any(_separates_two_classes(values, classes) for classes in targets_as_classes)
            predicts |= any(_is_correlated(values, numbers) for numbers in targets_as_numbers)
            without_scale = config.missing == "indicator" and gaps_predict
        if predicts:
            yield name, without_scale


def _numeric_targets(config: DataConfig, targets: Targets) -> Sequence[str]:
    """Return the names of the target columns that hold numbers. For survival, it is the time."""
    return config.target_names[:1] if targets in ("number", "count", "survival") else ()


def _class_targets(config: DataConfig, targets: Targets) -> Sequence[str]:
    """Return the names of the target columns that hold classes. For survival, it is the event."""
    if targets == "survival":
        return config.target_names[1:]
    return config.target_names if targets in ("class", "classes", "ordered") else ()


def _as_numbers(words: Sequence[str]) -> Classes:
    """Return a number for each of ``words``, equal for equal words."""
    _, numbers = np.unique(np.array(words, dtype=str), return_inverse=True)
    return numbers.astype(np.int64)


def _predicts(cells: Classes, classes: Classes) -> bool:
    """Return whether the ``cells`` (n,) of a column predict the ``classes`` (n,) of a target nearly without error. Both are numbers from 0.

    The rows with even indices are learnt from, the others predicted. A cell predicts the commonest class of the rows with this cell. A
    cell that did not occur predicts the commonest class of all.
    """
    if cells.max() >= _MAX_DISTINCT_CELLS:
        return False
    counts = np.zeros((cells.max() + 1, classes.max() + 1), dtype=np.int64)
    np.add.at(counts, (cells[::2], classes[::2]), 1)
    commonest = counts.sum(axis=0).argmax()
    predicted = np.where(counts.any(axis=1), counts.argmax(axis=1), commonest)[cells[1::2]]
    outside_commonest = int((classes[1::2] != commonest).sum())
    errors = int((predicted != classes[1::2]).sum())
    # Errors are compared with those of always predicting the commonest class, which are few if that class is frequent.
    return outside_commonest >= _MIN_ROWS and errors <= _MAX_ERROR_SHARE * outside_commonest


def _separates_two_classes(values: Floats, classes: Classes) -> bool:
    """Return whether ``values`` (n,), NaN where missing, separate two ``classes`` (n,): nearly all values of one class are higher."""
    from scipy.stats import rankdata  # slow to import

    is_one = classes == 1
    ones, zeros = int(is_one.sum()), int((~is_one).sum())
    if classes.max() != 1 or min(ones, zeros) < _MIN_ROWS:
        return False
    ranks = rankdata(np.nan_to_num(values, nan=-np.inf))  # missing values rank lowest
    auroc = (ranks[is_one].sum() - ones * (ones + 1) / 2) / (ones * zeros)  # by the statistic of Mann and Whitney
    return bool(max(auroc, 1 - auroc) >= _MIN_AUROC)


def _is_correlated(values: Floats, target: Floats) -> bool:
    """Return whether ``values`` (n,), NaN where missing, or their ranks, are correlated with the ``target`` (n,) nearly perfectly."""
    from scipy.stats import rankdata  # slow to import

    in_both = np.isfinite(values) & np.isfinite(target)
    values, target = values[in_both], target[in_both]
    if len(values) < _MIN_ROWS or not np.ptp(values) or not np.ptp(target):
        return False
    pairs = ((values, target), (rankdata(values), rankdata(target)))
    return any(abs(float(np.corrcoef(*pair)[0, 1])) >= _MIN_CORRELATION for pair in pairs)
