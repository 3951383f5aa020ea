"""What becomes of a table's columns: numbers, words and texts, as a model takes them. Each rule is public, or is said to be none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import Kind
from ldpfl.data.identifiers import note_on, whose
from ldpfl.data.inputs import Inputs
from ldpfl.data.persons import names_of
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, as_text
from ldpfl.data.tokens import check_vocabulary, tokens_of
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, DataError
from ldpfl.tasks import Targets
from ldpfl.util.suggestions import nearest

BYTES = 257
"""Tokens of a language model: the bytes, from 1 on, and 0 for the beginning of a text."""

_LONG_WORD = 100
"""Characters: a text is cut after so many for each word that is kept of it."""


@dataclass(frozen=True, eq=False)
class Features:
    """Columns (N, F) of a table, those of them that are numbers on a scale of their own, and what each column was taken as."""

    values: NDArray[np.float32]
    unscaled: tuple[Unscaled, ...]
    said: str


def said_of_all(table: Table, config: DataConfig) -> tuple[DataConfig, tuple[str, ...]]:
    """Return ``config`` with a word about each column that is used, and notes on those left out.

    What is not said is what most of the cells in ``table`` are.
    """
    names, notes = _inputs(table, config)
    kinds = {name: _kind(table, name, config) for name in names}
    target = config.target_names[0]
    said = config.model_copy(
        update={
            "columns": names,
            "words": [name for name in names if kinds[name] == "words" and name not in config.categories],
            "dates": [name for name in names if kinds[name] == "dates"],
            "numbers": [name for name in names if kinds[name] == "numbers" and name not in config.bounds],
            "bounds": {name: own for name, own in config.bounds.items() if name in (*names, target)},
            "categories": {name: own for name, own in config.categories.items() if name in names},
        }
    )
    return said, notes


def _inputs(train: Table, config: DataConfig) -> tuple[list[str], tuple[str, ...]]:
    apart = {*config.target_names, config.client, config.person}
    if config.client in config.target_names:
        raise ConfigError(f"data.client and data.target both name {config.client!r}: clients are public, so the target would be public too")
    named = {setting: getattr(config, setting) for setting in ("columns", "numbers", "words", "dates", "bounds", "categories")}
    for setting, names in named.items():
        for name in names:
            train.column(name, f"data.{setting}")
    said = {name for names in named.values() for name in names}
    names = list(config.columns) or [name for name in train.columns if name not in apart]
    for name in names:
        if name in apart:
            raise ConfigError(f"data.columns names {name!r}, which is the target, the client or the person: it cannot be an input too")
    left_out = [name for name in names if name not in said and whose(name)]
    names = [name for name in names if name not in left_out]
    note = note_on(left_out, person=config.person, client=config.client)
    if not names:
        why = f" ({note})" if left_out else ""
        raise DataError(f"the table has no column beside the target's and the client's: there is nothing to predict from{why}")
    return names, (note,) if left_out else ()


def _kind(train: Table, name: str, config: DataConfig) -> Kind:
    said: dict[str, Kind] = {"numbers": "numbers", "dates": "dates", "bounds": "numbers", "words": "words", "categories": "words"}
    if name in config.dates:
        said["bounds"] = "dates"
    kinds = {setting: kind for setting, kind in said.items() if name in getattr(config, setting)}
    if len(set(kinds.values())) > 1:
        first, *_, last = kinds
        raise ConfigError(f"data.{first} and data.{last} both name {name!r}: it holds numbers, dates or words")
    if kinds:
        return next(iter(kinds.values()))
    return train.kind(name)


def words_of(table: Table, name: str, *, numeric: bool = False, values: Collection[str] = ()) -> list[str]:
    """Return a column as words, "" where nothing stands; ``numeric`` ones that are the same number are the same word.

    Those among ``values`` are words also where they usually stand for no value.
    """
    column = table.columns[name]
    if column.dtype == np.float64 or (numeric and table.is_numeric(name)):
        column = column if column.dtype == np.float64 and values else table.numbers(name)
        return ["" if np.isnan(value) else as_text(value) for value in column]
    return ["" if table.is_absent(text) and text.strip() not in values else text.strip() for text in column]


def persons_in(table: Table, config: DataConfig) -> list[str]:
    """Return the name of the person of each row, "" where nobody is named.

    Names are brought to one Unicode form (NFC): the same letter may come as one character or as two. What stands for no name is fixed: if
    settings could say so, whoever chooses them would choose who is left out.

    Raises:
        ConfigError: the column has another part already.
        DataError: there is no such column.
    """
    if config.person in (config.client, config.text, *config.target_names):
        raise ConfigError(
            f"data.person names {config.person!r}, which is the client, the target or the text: name the column that tells persons apart"
        )
    table.column(config.person, "data.person")
    return names_of(words_of(replace(table, missing=()), config.person))


def same_word(word: str) -> str:
    """Return ``word`` as it is wherever it comes from: of truth values and long numbers, data frames and Parquet files make floats."""
    if word.isdecimal() and _DIGITS < len(word) <= _MOST_DIGITS:
        return as_text(int(word))
    return {"true": "1", "false": "0"}.get(word.lower(), word)


_DIGITS = 15
"""Of a whole number beyond which a float has another."""

_MOST_DIGITS = 309
"""Of a whole number that a float can be; what is longer is a text wherever it comes from."""


def width_of(config: DataConfig) -> int:
    """Return how many inputs come of a row, by the settings alone: as many as :func:`features_of` or :func:`texts_of` gives."""
    if config.text:
        return config.length
    hashed, number = set(config.words), 2 if config.missing == "indicator" else 1
    return sum(
        len(config.categories[name]) if name in config.categories else config.buckets if name in hashed else number
        for name in config.columns
    )


def features_of(table: Table, config: DataConfig) -> Features:
    """Return the inputs of ``table``; which columns there are, and of what kind each is, ``config`` says."""
    parts: list[NDArray[np.float32]] = []
    unscaled: list[Unscaled] = []
    kinds: dict[str, list[str]] = {}
    width = 0
    for name in config.columns:
        if name not in table.columns:
            meant = nearest(name, set(table.columns).difference(config.columns))
            hint = f"it takes {', '.join(config.columns)}" if meant is None else f"did you mean {meant!r}?"
            raise DataError(f"there is no column {name!r}, which the model takes: {hint}")
        if name in config.words or name in config.categories:
            part, kind = _one_hot(table, name, config), "words, by data.categories" if name in config.categories else "words, hashed"
        else:
            bounds = bounds_of(config, name)
            kind = "dates" if name in config.dates else "numbers"
            kind += "" if bounds is None else ", by data.bounds"
            unscaled.append(Unscaled(name, width, bounds))
            part = _number_columns(table, name, config)
        parts.append(part)
        kinds.setdefault(kind, []).append(name)
        width += part.shape[1]
    said = "; ".join(f"{kind}: {', '.join(own)}" for kind, own in sorted(kinds.items()))
    rules = [rule for kind, rule in _RULES.items() if any(own.startswith(kind) for own in kinds)]
    return Features(np.concatenate(parts, axis=1), tuple(unscaled), f"columns were taken as {'. '.join([said, *rules])}")


_RULES = {
    "numbers": "A number beyond a limit, such as <0.5 or >200, counts as the limit",
    "dates": "A date counts as its days since 1970-01-01",
}
"""Rules that hold for any table, and are told whether or not it holds such cells: whether it does is private."""


def _number_columns(table: Table, name: str, config: DataConfig) -> NDArray[np.float32]:
    """Return a column (N, 1) as it stands, gaps too, or (N, 2) with what tells of its gaps."""
    values = table.numbers(name, kind="dates" if name in config.dates else "numbers")
    absent = np.isnan(values)
    if config.missing == "refuse" and absent.any():
        raise DataError(f"{table.where(int(np.flatnonzero(absent)[0]))}: the column {name!r} has no value, and data.missing is 'refuse'")
    columns = [values, absent.astype(np.float64)] if config.missing == "indicator" else [values]
    with np.errstate(over="ignore"):  # one cell beyond all float32 becomes infinity, and no log is to tell of it
        return np.stack(columns, axis=1).astype(np.float32)


def bounds_of(config: DataConfig, name: str) -> tuple[float, float] | None:
    """Return the least and the largest value that the public knows of a column; None where it knows none.

    Raises:
        ConfigError: they are no interval.
    """
    if name not in config.bounds:
        return None
    low, high = config.bounds[name]
    if not 0 < high - low < inf:
        raise ConfigError(f"data.bounds.{name} are the least and the largest value, got {low:g} and {high:g}")
    return low, high


def _one_hot(table: Table, name: str, config: DataConfig) -> NDArray[np.float32]:
    known = config.categories.get(name)
    words = [same_word(word) for word in words_of(table, name, values=known or ())]
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
            raise DataError(
                f"{table.where(row)}: what stands in the column {name!r} is not among data.categories.{name}, which are {', '.join(known)}"
            )
    return [known[word] if word else None for word in words]


@lru_cache(maxsize=1 << 16)
def _place(word: str, places: int) -> int:
    """Return where a word is hashed to: the same on every machine, and nothing that depends on other words."""
    return int.from_bytes(hashlib.sha256(word.encode(errors="surrogatepass")).digest()[:8]) % places


def with_text(table: Table, config: DataConfig) -> DataConfig:
    """Return ``config`` with the column of texts named, where a pretrained model reads them and one column alone can hold them.

    Raises:
        ConfigError: several can.
    """
    if config.text or not config.tokenizer:
        return config
    apart = {*config.target_names, config.client, config.person} if config.target else {config.client, config.person}
    names = [name for name in table.columns if name not in apart]
    if len(names) != 1:
        raise ConfigError(f"data.text (--text) has to name the column that holds the texts: there are {', '.join(names[:8]) or 'none'}")
    return config.model_copy(update={"text": names[0]})


def texts_of(table: Table, config: DataConfig, targets: Targets) -> Inputs:
    """Return the texts of ``table`` as tokens (N, length) int64: words hashed, or bytes for a language model; or those of a tokenizer.

    Raises:
        ConfigError: inputs are named beside the texts.
        DataError: the column is missing, or holds numbers.
    """
    if config.columns:
        raise ConfigError("data.text makes texts of the inputs: leave data.columns out")
    texts = table.column(config.text, "data.text")
    if texts.dtype == np.float64:
        raise DataError(f"the column {config.text!r} holds numbers, and data.text says that it holds texts")
    if config.tokenizer:
        check_vocabulary(config.tokenizer, config.tokenizer_digest)
        return tokens_of(texts.tolist(), config.tokenizer, config.length)
    if targets == "tokens":
        return bytes_of(texts, config.length)[:, :-1]
    found = torch.zeros(len(texts), config.length, dtype=torch.int64)
    for row, text in enumerate(texts):
        # Cut before it is looked through: how long that takes is not to tell of one long text among others.
        words = re.findall(r"\w+", text[: _LONG_WORD * config.length].lower())[: config.length]
        found[row, : len(words)] = torch.tensor([1 + _place(word, config.vocabulary - 1) for word in words], dtype=torch.int64)
    return found


def bytes_of(texts: NDArray[np.object_], length: int) -> Tensor:
    """Return texts as tokens (N, ``length`` + 1): 0, then each byte and 1, then 0 to the end."""
    found = torch.zeros(len(texts), length + 1, dtype=torch.int64)
    for row, text in enumerate(texts):
        own = torch.tensor(list(text.encode(errors="surrogatepass")[:length]), dtype=torch.int64)
        found[row, 1 : 1 + len(own)] = own + 1
    return found


def drawn_inputs(config: DataConfig, rows: int, generator: torch.Generator) -> Tensor:
    """Return drawn ``rows`` (N, F) that are nobody's, as :func:`features_of` makes them and once their numbers are scaled.

    Numbers are standard normal, and each word of a column is as frequent as any other.
    """
    parts: list[Tensor] = []
    for name in config.columns:
        if name in config.words or name in config.categories:
            places = len(config.categories[name]) if name in config.categories else config.buckets
            parts.append(torch.nn.functional.one_hot(torch.randint(places, (rows,), generator=generator), places).float())
        else:
            parts.append(torch.randn(rows, 1, generator=generator))
            if config.missing == "indicator":
                parts.append(torch.zeros(rows, 1))
    return torch.cat(parts, dim=1)
