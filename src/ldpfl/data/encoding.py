"""From a table to a data set: what becomes of numbers, words, texts and targets. Each rule is public, or is said to be none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.encoder import Encoder
from ldpfl.data.partition import held_out
from ldpfl.data.samples import Dataset, Samples
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, as_text, is_absent, read_table, table_of
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import NO_TOKEN, Targets

if TYPE_CHECKING:
    import pandas

TEST_SHARE = 5
"""One in so many rows is a test row, where none are given."""

MOST_CLASSES = 1000
"""What has more is no classification."""
_LONG_WORD = 100
"""Characters: a text is cut after so many for each word that is kept of it."""
_MOST_NUMBERS = 20
"""Different numbers beyond which a target is none of classes."""
_BYTES = 257
"""Tokens of a language model: the bytes, from 1 on, and 0 for the beginning of a text."""


@dataclass(frozen=True, eq=False)
class _Features:
    """Columns (N, F) of a table, the numbers and names of those that are still on their own scale, and what became of which."""

    values: NDArray[np.float32]
    unscaled: tuple[int, ...]
    names: tuple[str, ...]
    said: str


def dataset_of(name: str, table: Table, test: Table | None, config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set that ``config`` makes of ``table``.

    Which column is one of numbers and which one of words is taken from what most of its cells are, or from the settings. Words
    are hashed, or numbered by ``categories``; numbers are brought to [-1, 1] by ``bounds``, or stay as they are, to be measured. Rows of
    ``test`` go through the same rules; without any, a fifth of the rows are test rows, by their places alone, so that no row's content
    decides about another.

    Raises:
        ConfigError: settings that do not fit each other.
        DataError: a column or a value does not fit; the file and line are named.
    """
    tables = [table] if test is None else [table, test]
    is_test = held_out(len(table), TEST_SHARE) if test is None else np.zeros(len(table), dtype=bool)
    if test is None and not is_test.any():
        raise DataError(f"{name} has {len(table)} rows, too few to keep a fifth of them to measure on: give data.test_path")
    learnt, outputs, notes, classes = _targets(tables, config, targets)
    unscaled: tuple[int, ...] = ()
    unscaled_names: tuple[str, ...] = ()
    said = config
    if config.text:
        inputs = [_texts(one, config, targets) for one in tables]
    else:
        said = _said_of_all(table, config)
        features = [_features(one, said) for one in tables]
        inputs, unscaled = [torch.from_numpy(own.values) for own in features], features[0].unscaled
        unscaled_names, notes = features[0].names, (features[0].said, *notes)
    made = [Samples(own, target) for own, target in zip(inputs, learnt, strict=True)]
    train, held = (made[0].take(torch.from_numpy(~is_test)), made[0].take(torch.from_numpy(is_test))) if test is None else made
    target_unscaled = targets == "number" and not _bounds(config, _target_names(config)[0])
    if target_unscaled:
        unscaled_names += (f"{_target_names(config)[0]}, the target",)
    digest = hashlib.sha256("".join([*(one.digest for one in tables), config.model_dump_json()]).encode()).hexdigest()[:16]
    vocabulary = None if not config.text else _BYTES if targets == "tokens" else config.vocabulary
    return Dataset(
        name,
        train,
        held,
        outputs,
        (),
        (),
        digest,
        clients=_clients(table, config, ~is_test),
        vocabulary=vocabulary,
        unscaled=unscaled,
        unscaled_names=unscaled_names,
        target_unscaled=target_unscaled,
        unit=_unit(config, targets),
        notes=tuple(map(printable, notes)),  # names of columns and classes are in them
        encoder=_encoder(said, targets, classes, unscaled, inputs[0].shape[1], outputs),
    )


def encoded(encoder: Encoder, rows: pandas.DataFrame | str | Path) -> Tensor:
    """Return what a model takes (N, ...) for ``rows``: a data frame, or a file or folder; the target's column need not be there.

    Raises:
        DataError: a column is missing, or a value does not fit; its place is named.
    """
    table = read_table(Path(rows)) if isinstance(rows, str | Path) else table_of(rows, "the rows")
    if encoder.data.text:
        return _texts(table, encoder.data, encoder.targets)
    return encoder.scaled(torch.from_numpy(_features(table, encoder.data).values))


def _encoder(
    config: DataConfig, targets: Targets, classes: tuple[str, ...], unscaled: tuple[int, ...], width: int, outputs: int
) -> Encoder | None:
    if targets == "tokens":
        return None
    bounds = _bounds(config, _target_names(config)[0]) if targets == "number" else None
    center, spread = ((bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2) if bounds else (0.0, 1.0)
    return Encoder(
        data=config.model_copy(update={"client": "", "path": "", "test_path": ""}),
        targets=targets,
        classes=classes,
        unscaled=unscaled,
        target_center=center,
        target_spread=spread,
        width=width,
        outputs=outputs,
    )


def _said_of_all(table: Table, config: DataConfig) -> DataConfig:
    """Return ``config`` with a word about each column that is used: what is not said is what most of the cells in ``table`` are."""
    names = _inputs(table, config)
    of_words = {name for name in names if _is_of_words(table, name, config)}
    target = _target_names(config)[0]
    return config.model_copy(
        update={
            "columns": names,
            "words": [name for name in names if name in of_words and name not in config.categories],
            "numbers": [name for name in names if name not in of_words and name not in config.bounds],
            "bounds": {name: own for name, own in config.bounds.items() if name in (*names, target)},
            "categories": {name: own for name, own in config.categories.items() if name in names},
        }
    )


def _target_names(config: DataConfig) -> tuple[str, ...]:
    if config.text and not config.target:
        return (config.text,)
    if not config.target:
        raise ConfigError("data.target has to name the column that is to be predicted")
    return (config.target,) if isinstance(config.target, str) else tuple(config.target)


class _Told(NamedTuple):
    """The targets of each table, how many outputs a model needs for them, what the guarantee assumes of them, and the names of classes."""

    values: list[Tensor]
    outputs: int
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def _targets(tables: Sequence[Table], config: DataConfig, targets: Targets) -> _Told:
    names = _target_names(config)
    for table in tables:
        for name in names:
            table.column(name, "data.target")
    if targets != "classes" and len(names) > 1:
        raise ConfigError(
            f"data.target names {len(names)} columns, and this task tells one; for several labels set task.name to 'multilabel'"
        )
    if targets == "classes" and len(names) < 2:
        raise ConfigError("a task of several labels needs two columns or more in data.target; for one, take classification")
    if targets == "tokens":
        return _Told([_tokens_to_tell(table, config) for table in tables], _BYTES)
    if targets == "number":
        return _Told([_numbers_to_tell(table, names[0], config) for table in tables], 1)
    if targets == "classes":
        return _Told([torch.stack([_label(table, name) for name in names], dim=1) for table in tables], len(names))
    return _classes_to_tell(tables, names[0], config)


def _numbers_to_tell(table: Table, name: str, config: DataConfig) -> Tensor:
    values = table.numbers(name)
    _require_all(table, name, np.isnan(values))
    bounds = _bounds(config, name)
    return torch.from_numpy((values if bounds is None else _within(values, bounds)).astype(np.float32))


def _label(table: Table, name: str) -> Tensor:
    values = table.numbers(name)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if wrong.size:
        raise DataError(f"{table.where(int(wrong[0]))}: the label {name!r} must be 0 or 1")
    return torch.from_numpy(values.astype(np.float32))


def _classes_to_tell(tables: Sequence[Table], name: str, config: DataConfig) -> _Told:
    numeric = all(table.is_numeric(name) for table in tables) and not config.classes
    words = [words_of(table, name, numeric=numeric) for table in tables]
    for table, own in zip(tables, words, strict=True):
        _require_all(table, name, np.array([not word for word in own]))
    known = list(config.classes) or _found_classes(tables[0], name, words[0])
    numbers = {word: place for place, word in enumerate(known)}
    found = []
    for table, own in zip(tables, words, strict=True):
        for row, word in enumerate(own):
            if word not in numbers:
                raise DataError(f"{table.where(row)}: the class {word[:40]!r} of {name!r} is not among {', '.join(known[:10])}")
        found.append(torch.tensor([numbers[word] for word in own]))
    notes = () if config.classes else (_CLASSES_SEEN.format(name=name, some=", ".join(known[:5])),)
    return _Told(found, len(known), notes, tuple(known))


_CLASSES_SEEN = (
    "the classes of {name!r} ({some}) were taken from the data, as if they were public: "
    "where it is a secret that one occurs, name them in data.classes"
)


def _found_classes(table: Table, name: str, words: Sequence[str]) -> list[str]:
    known = sorted(set(words), key=_natural)
    if len(known) > MOST_CLASSES or (len(known) > _MOST_NUMBERS and table.is_numeric(name)):
        raise DataError(f"the target {name!r} has {len(known):,} different values: to estimate a number, set task.name to 'regression'")
    if len(known) == 1:
        raise DataError(f"the target {name!r} is {known[0]!r} in every row: there is nothing to tell apart")
    return known


def _natural(word: str) -> tuple[int, float, str]:
    """Sort numbers as numbers, and before words."""
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def _require_all(table: Table, name: str, absent: NDArray[np.bool_]) -> None:
    if absent.any():
        where = table.where(int(np.flatnonzero(absent)[0]))
        raise DataError(f"{where}: the target {name!r} has no value (NA, None and the like are none); leave such rows out")


def words_of(table: Table, name: str, *, numeric: bool = False) -> list[str]:
    """Return a column as words, "" where nothing stands; ``numeric`` ones that are the same number are the same word."""
    column = table.columns[name]
    if column.dtype == np.float64 or (numeric and table.is_numeric(name)):
        column = table.numbers(name)
        return ["" if np.isnan(value) else as_text(value) for value in column]
    return ["" if is_absent(text) else text.strip() for text in column]


def same_word(word: str) -> str:
    """Return ``word`` as it is wherever it comes from: of truth values and long numbers, data frames and Parquet files make floats."""
    if word.isdecimal() and len(word) > _DIGITS:
        return as_text(int(word))
    return {"true": "1", "false": "0"}.get(word.lower(), word)


_DIGITS = 15
"""Of a whole number beyond which a float has another."""


def _features(table: Table, config: DataConfig) -> _Features:
    """Return the inputs of ``table``; which columns there are, and of what kind each is, ``config`` says."""
    parts: list[NDArray[np.float32]] = []
    unscaled: dict[int, str] = {}
    kinds: dict[str, list[str]] = {}
    width = 0
    for name in config.columns:
        table.column(name, "the training rows")
        if name in config.words or name in config.categories:
            part, kind = _one_hot(table, name, config), "words, by data.categories" if name in config.categories else "words, hashed"
        else:
            values = table.numbers(name)
            bounds = _bounds(config, name)
            kind = "numbers, measured" if bounds is None else "numbers, by data.bounds"
            if bounds is None:
                unscaled[width] = name
            part = _numbers(table, name, values if bounds is None else _within(values, bounds), config, centered=bounds is not None)
        parts.append(part)
        kinds.setdefault(kind, []).append(name)
        width += part.shape[1]
    said = "; ".join(f"{kind}: {', '.join(own)}" for kind, own in sorted(kinds.items()))
    return _Features(np.concatenate(parts, axis=1), tuple(unscaled), tuple(unscaled.values()), f"columns were taken as {said}")


def _is_of_words(train: Table, name: str, config: DataConfig) -> bool:
    said = [kind for kind in ("numbers", "bounds", "words", "categories") if name in getattr(config, kind)]
    of_words = [kind in ("words", "categories") for kind in said]
    if len(set(of_words)) > 1:
        raise ConfigError(f"data.{said[0]} and data.{said[-1]} both name {name!r}: it holds numbers, or words")
    return any(of_words) if said else not train.is_numeric(name)


def _inputs(train: Table, config: DataConfig) -> list[str]:
    apart = {*_target_names(config), config.client}
    if config.client in _target_names(config):
        raise ConfigError(
            f"data.client and data.target both name {config.client!r}: who the clients are is public, and so would be what is told"
        )
    for setting, names in (
        ("columns", config.columns),
        ("numbers", config.numbers),
        ("words", config.words),
        ("bounds", config.bounds),
        ("categories", config.categories),
    ):
        for name in names:
            train.column(name, f"data.{setting}")
    names = list(config.columns) or [name for name in train.columns if name not in apart]
    for name in names:
        if name in apart:
            raise ConfigError(f"data.columns names {name!r}, which is the target or the client: nothing is to be told from it")
    if not names:
        raise DataError("the table has no column beside the target's and the client's: there is nothing to tell it from")
    return names


def _numbers(table: Table, name: str, values: NDArray[np.float64], config: DataConfig, *, centered: bool) -> NDArray[np.float32]:
    absent = np.isnan(values)
    if config.missing == "refuse" and absent.any():
        raise DataError(f"{table.where(int(np.flatnonzero(absent)[0]))}: the column {name!r} has no value, and data.missing is 'refuse'")
    own = np.where(absent, 0.0, values) if centered else values  # what is measured first keeps its gaps until it is scaled
    columns = [own, absent.astype(np.float64)] if config.missing == "indicator" else [own]
    return np.stack(columns, axis=1).astype(np.float32)


def _bounds(config: DataConfig, name: str) -> tuple[float, float] | None:
    if name not in config.bounds:
        return None
    low, high = config.bounds[name]
    if not 0 < high - low < inf:
        raise ConfigError(f"data.bounds.{name} are the least and the largest value, got {low:g} and {high:g}")
    return low, high


def _within(values: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.float64]:
    """Return what lies within ``bounds`` in [-1, 1], and what lies beyond at its ends."""
    low, high = bounds
    scaled: NDArray[np.float64] = np.clip((values - low) / (high - low) * 2 - 1, -1, 1)
    return scaled


def _unit(config: DataConfig, targets: Targets) -> float:
    bounds = _bounds(config, _target_names(config)[0]) if targets == "number" else None
    return 1.0 if bounds is None else (bounds[1] - bounds[0]) / 2


def _one_hot(table: Table, name: str, config: DataConfig) -> NDArray[np.float32]:
    words, known = [same_word(word) for word in words_of(table, name)], config.categories.get(name)
    if known is None:
        places = [_place(f"{name}\0{word}", config.buckets) if word else None for word in words]
    else:
        places = _listed(table, name, words, {same_word(word): place for place, word in enumerate(known)})
    found = np.zeros((len(words), config.buckets if known is None else len(known)), dtype=np.float32)
    for row, place in enumerate(places):
        if place is not None:
            found[row, place] = 1.0
    return found


def _listed(table: Table, name: str, words: Sequence[str], known: Mapping[str, int]) -> list[int | None]:
    for row, word in enumerate(words):
        if word and word not in known:
            raise DataError(f"{table.where(row)}: {word[:40]!r} is not among data.categories.{name}, which are {', '.join(known)}")
    return [known[word] if word else None for word in words]


@lru_cache(maxsize=1 << 16)
def _place(word: str, places: int) -> int:
    """Return where a word is hashed to: the same on every machine, and nothing that depends on other words."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8]) % places


def _texts(table: Table, config: DataConfig, targets: Targets) -> Tensor:
    if config.columns:
        raise ConfigError("data.text makes texts of the inputs: leave data.columns out")
    texts = table.column(config.text, "data.text")
    if texts.dtype == np.float64:
        raise DataError(f"the column {config.text!r} holds numbers, and data.text says that it holds texts")
    if targets == "tokens":
        return _bytes(texts, config.length)[:, :-1]
    found = torch.zeros(len(texts), config.length, dtype=torch.int64)
    for row, text in enumerate(texts):
        # Cut before it is looked through: how long that takes is not to tell of one long text among others.
        words = re.findall(r"\w+", text[: _LONG_WORD * config.length].lower())[: config.length]
        found[row, : len(words)] = torch.tensor([1 + _place(word, config.vocabulary - 1) for word in words], dtype=torch.int64)
    return found


def _bytes(texts: NDArray[np.object_], length: int) -> Tensor:
    """Return texts as tokens (N, ``length`` + 1): 0, then each byte and 1, then 0 to the end."""
    found = torch.zeros(len(texts), length + 1, dtype=torch.int64)
    for row, text in enumerate(texts):
        own = torch.tensor(list(text.encode()[:length]), dtype=torch.int64)
        found[row, 1 : 1 + len(own)] = own + 1
    return found


def _tokens_to_tell(table: Table, config: DataConfig) -> Tensor:
    if not config.text:
        raise ConfigError("a language model is trained on texts: name their column in data.text")
    following = _bytes(table.column(config.text, "data.text"), config.length)[:, 1:]
    return torch.where(following == 0, NO_TOKEN, following)


def _clients(table: Table, config: DataConfig, kept: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    """Return the client of each kept row, numbered in the order of their names."""
    if not config.client:
        return None
    table.column(config.client, "data.client")
    words = np.array(words_of(table, config.client), dtype=object)
    absent = np.flatnonzero(words == "")
    if absent.size:
        raise DataError(f"{table.where(int(absent[0]))}: the client's column {config.client!r} has no value")
    return np.unique(words[kept].astype(str), return_inverse=True)[1].astype(np.int64)
