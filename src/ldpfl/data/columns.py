"""Turn a table's columns of numbers, words and texts into a model's inputs.

Each rule is public. Where a rule was taken from the data instead, a note of the data set says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf
from unicodedata import normalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.cells import Kind, are_codes
from ldpfl.data.identifiers import identifier_kind, identifier_note, note_on_possible_sites
from ldpfl.data.persons import normalise_names, written_number
from ldpfl.data.samples import Inputs
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import MAX_EXACT, Table, cell_text
from ldpfl.data.tokens import check_vocabulary, tokenize
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, DataError, listed_names
from ldpfl.tasks import Targets
from ldpfl.util.suggestions import nearest

BYTES = 257
"""Number of tokens of a language model without a tokenizer: the 256 bytes, plus 0 for the beginning of a text."""

_CHARACTERS_PER_WORD = 100
"""Characters of a text that are read for each word that is kept. The limit keeps the run time from revealing one long text."""


@dataclass(frozen=True, eq=False)
class Features:
    """The input matrix of a table.

    Attributes:
        values: (N, F), one or more columns for each column of the table.
        unscaled: the columns of numbers, which are not scaled yet.
        note: how each column was read.
    """

    values: NDArray[np.float32]
    unscaled: tuple[Unscaled, ...]
    note: str


def resolve_column_kinds(table: Table, config: DataConfig) -> tuple[DataConfig, tuple[str, ...]]:
    """Return ``config`` with the kind of each input column filled in, and notes on columns that are left out or hold texts.

    A column whose kind the settings leave open gets the kind of most of its cells in ``table``.
    """
    names, notes = _input_columns(table, config)
    kinds = {name: _kind(table, name, config) for name in names}
    texts = [name for name in names if kinds[name] == "words" and name not in {*config.words, *config.categories} and table.is_text(name)]
    target = config.target_names[0]
    resolved = config.model_copy(
        update={
            "columns": names,
            "words": [name for name in names if kinds[name] == "words" and name not in config.categories],
            "dates": [name for name in names if kinds[name] == "dates"],
            "numbers": [name for name in names if kinds[name] == "numbers" and name not in config.bounds],
            "bounds": {name: bounds for name, bounds in config.bounds.items() if name in (*names, target)},  # a number may be the target
            "categories": {name: words for name, words in config.categories.items() if name in names},
        }
    )
    text_note = (_NOTE_ON_TEXTS.format(names=listed_names(texts), name=texts[0]),) if texts else ()
    return resolved, (*notes, *text_note)


_NOTE_ON_TEXTS = (
    "most cells of {names} are texts of several words. In a table each different text is a separate category, so almost nothing can be "
    "learnt from it. To train a model of texts on this column alone, set --text {name} --model embedding-bag; for larger models see "
    "docs/transformers.md. Otherwise leave the column out: list the columns to use in data.columns"
)


def _input_columns(train: Table, config: DataConfig) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the input columns, a note on columns that are left out as identifiers, and one on columns that name sites.

    Raises:
        ConfigError: a setting names a column twice, or one that cannot be an input.
        DataError: a named column is missing, or no input column is left.
    """
    reserved = {*config.target_names, config.client, config.person}
    if config.client in config.target_names:
        raise ConfigError(
            f"data.client and data.target both name {config.client!r}, but the client of a row is public and its target is not: name "
            "another column in one of them"
        )
    configured = check_configured_columns(train, config)
    names = list(config.columns) or [name for name in train.columns if name not in reserved]
    for name in names:
        if name in reserved:
            raise ConfigError(
                f"data.columns names {name!r}, which is the target, the client or the person and cannot be an input: remove it from "
                "data.columns"
            )
    left_out = [name for name in names if name not in configured and identifier_kind(name)]
    names = [name for name in names if name not in left_out]
    # Where a client is set, the note suggests no column for it. At nodes, each node is a client, so any text serves.
    known_client = config.client or (config.name if config.at_nodes else "")
    note = identifier_note(left_out, person=config.person, client=known_client) if left_out else ""
    if not names:
        why = f" ({note})" if note else ""
        raise DataError(
            f"the table has no input columns, only those of the target, the client and the person{why}: add columns to predict from"
        )
    possible_sites = [name for name in names if name not in configured]
    site_note = "" if config.client else note_on_possible_sites(possible_sites, at_nodes=config.at_nodes)
    return names, tuple(filter(None, (note, site_note)))


def _kind(train: Table, name: str, config: DataConfig) -> Kind:
    """Return whether the column ``name`` holds numbers, dates or words: by the settings, or else by most of its cells in ``train``.

    Raises:
        ConfigError: two settings give the column different kinds.
    """
    kind_by_setting: dict[str, Kind] = {
        "numbers": "numbers",
        "dates": "dates",
        "bounds": "numbers",
        "words": "words",
        "categories": "words",
    }
    if name in config.dates:
        kind_by_setting["bounds"] = "dates"
    kinds = {setting: kind for setting, kind in kind_by_setting.items() if name in getattr(config, setting)}
    if len(set(kinds.values())) > 1:
        first, *_, last = kinds
        raise ConfigError(f"data.{first} and data.{last} both name {name!r}, but a column is of one kind only: remove it from one of them")
    if kinds:
        return next(iter(kinds.values()))
    return train.kind(name)


def column_words(table: Table, name: str, *, numeric: bool = False, values: Collection[str] = ()) -> list[str]:
    """Return the cells of the column ``name`` as words in one Unicode form (NFC), with "" for an empty cell.
    Args:
        numeric: whether cells that are the same number become the same word, such as 1 and 1.0.
        values: words that are values even if they usually mean "no value", such as a class that is called "none".
    """
    column = table.columns[name]
    if column.dtype == np.float64 or (numeric and table.is_numeric(name)):
        # Table.numbers reads a number that means "no value", such as 999, as NaN. Numbers among ``values`` must stay, so it is not called.
        numbers = column if column.dtype == np.float64 and values else table.numbers(name)
        pairs = zip(numbers, table.exact_cells(name), strict=True)
        return ["" if np.isnan(number) else _number_as_word(number, cell) for number, cell in pairs]
    words = [normalize("NFC", text.strip()) for text in column]
    return ["" if table.is_absent(word) and word not in values else word for word in words]


def _number_as_word(number: float, cell: object) -> str:
    """Return a ``number`` as a word, with the digits of its ``cell`` if this is a whole number. A float cannot hold a long one exactly."""
    if isinstance(cell, str):
        return str(int(cell)) if re.fullmatch(r"\s*[+-]?\d+\s*", cell) else cell_text(number)
    return cell_text(cell)


def check_exact_names(table: Table, name: str, setting: str) -> None:
    """Raise a :class:`DataError` if cells of the column ``name`` may have been rounded, so that different names may have become equal.

    Whole numbers of 2^53 or more are rounded where they were stored as floats, in this table or before they were written as text. The
    message names ``setting``, which names the column.
    """
    column = table.columns[name]
    if name in table.rounded:  # the reader of the table marked the cells
        rounded = np.flatnonzero(table.rounded[name])
    elif column.dtype == np.float64 and name not in table.long_numbers:
        rounded = np.flatnonzero(np.abs(column) >= MAX_EXACT)  # 2^53 + 1 is rounded to 2^53
    else:
        rounded = np.flatnonzero([isinstance(cell, str) and _is_text_of_rounded_float(cell) for cell in column])
    if rounded.size:
        raise DataError(
            f"{table.where(int(rounded[0]))}: the column {name!r}, which {setting} names, holds floats of 2^53 or more, which may be "
            "rounded (float32: from 2^24 on; also texts such as 1.23457E+11), so different names may have become equal: give the column "
            f"as texts or whole numbers (in pandas, read it with dtype={{{name!r}: str}})"
        )


def _is_text_of_rounded_float(text: str) -> bool:
    """Return whether ``text`` is a float that a program may have rounded.

    That is a float of 2^53 or more, such as 9007199254740992.0 or 1.1010519491231E17, or one from 1e11 on that has fewer digits than its
    whole number, such as 1.23457E+11, as Excel and others write long numbers.
    """
    word = text.strip()
    number = None if word.lstrip("+-").isdecimal() else written_number(word)  # a whole number was written with all its digits
    if number is None:
        return False
    has_fewer_digits = len(number.as_tuple().digits) <= number.adjusted()
    return abs(number) >= MAX_EXACT or (abs(number) >= _SHORTENED_FROM and has_fewer_digits)


_SHORTENED_FROM = 10**11
"""Excel shortens whole numbers from 1e11 on."""


def check_configured_columns(table: Table, config: DataConfig) -> set[str]:
    """Return the input columns that ``config`` names. Raise a :class:`DataError` if ``table`` lacks one of them."""
    names_by_setting = {setting: getattr(config, setting) for setting in ("columns", "numbers", "words", "dates", "bounds", "categories")}
    for setting, names in names_by_setting.items():
        for name in names:
            table.column(name, f"data.{setting}")  # raises if there is no such column
    return {name for names in names_by_setting.values() for name in names}


def person_names(table: Table, config: DataConfig) -> list[str]:
    """Return the name of each row's person, with "" for a row that names nobody.

    Names are normalised to one Unicode form (NFC), since the same letter may be one character or two. The words that mean "no name" are
    fixed: a server that could set them could choose which persons are left out.

    Raises:
        ConfigError: the person's column is also the client, the target or the text.
        DataError: the table has no such column.
    """
    if config.person in (config.client, config.text, *config.target_names):
        raise ConfigError(
            f"data.person names {config.person!r}, which is also the client, the target or the text: name another column in data.person"
        )
    table.column(config.person, "data.person")  # raises if there is no such column
    if not config.at_nodes:  # there, an error would reveal that such a cell exists
        check_exact_names(table, config.person, "data.person")
        table.check_points(config.person)
    # missing=() switches the words of data.missing_words off. The fixed words apply in normalise_names.
    return normalise_names(column_words(replace(table, missing=()), config.person))


def canonical_word(word: str) -> str:
    """Return ``word`` in the form that it has after a round trip through a data frame or a Parquet file.

    These turn truth values into numbers, so the same word would differ between a CSV and a Parquet file.
    """
    return {"true": "1", "false": "0"}.get(word.lower(), word)


def input_width(config: DataConfig) -> int:
    """Return the number of inputs for each row, from the settings alone. :func:`read_features` and :func:`read_texts` return as many."""
    if config.text:
        return config.length
    return sum(_column_widths(config))


def _column_widths(config: DataConfig) -> Iterator[int]:
    """Yield the number of inputs of each column."""
    hashed_columns = set(config.words)
    for name in config.columns:
        if name in config.categories:
            yield len(config.categories[name])
        elif name in hashed_columns:
            yield config.buckets
        else:  # the number, and perhaps whether it is missing
            yield 2 if config.missing == "indicator" else 1


def read_features(table: Table, config: DataConfig) -> Features:
    """Return the input matrix of ``table``. ``config`` names the columns and their kinds, see :func:`resolve_column_kinds`.

    Raises:
        DataError: a column is missing, or one of its cells does not fit.
    """
    parts: list[NDArray[np.float32]] = []
    unscaled: list[Unscaled] = []
    columns_by_kind: dict[str, list[str]] = {}
    place = 0  # of the next input
    for name in config.columns:
        if name not in table.columns:
            similar = nearest(name, set(table.columns).difference(config.columns))
            hint = f"it needs {listed_names(config.columns)}" if similar is None else f"did you mean {similar!r}?"
            raise DataError(f"the table has no column {name!r}, which the model needs: {hint}")
        if name in config.words or name in config.categories:
            part = _one_hot(table, name, config)
            kind = "words, by data.categories" if name in config.categories else "words, hashed"
        else:
            bounds = public_bounds(config, name)
            kind = "dates" if name in config.dates else "numbers"
            kind += "" if bounds is None else ", by data.bounds"
            unscaled.append(Unscaled(name, place, bounds))
            part = _number_columns(table, name, config)
        parts.append(part)
        columns_by_kind.setdefault(kind, []).append(name)
        place += part.shape[1]
    listed = "; ".join(f"{kind}: {listed_names(names)}" for kind, names in sorted(columns_by_kind.items()))
    # A kind such as "numbers, by data.bounds" follows the rule of "numbers".
    rules = [rule for kind, rule in _READING_RULES.items() if any(present.startswith(kind) for present in columns_by_kind)]
    return Features(np.concatenate(parts, axis=1), tuple(unscaled), f"columns were taken as {'. '.join([listed, *rules])}")


_READING_RULES = {
    "numbers": "A number beyond a limit, such as <0.5 or >200, counts as the limit. Codes in digits, such as those of wards, count as "
    "quantities unless data.words names them",
    "dates": "A date counts as its days since 1970-01-01",
}
"""Rules for each kind of column. The note states them whether or not such cells occur, since whether they occur is private."""


def _number_columns(table: Table, name: str, config: DataConfig) -> NDArray[np.float32]:
    """Return the column ``name`` as (N, 1) with NaN for a missing value, or as (N, 2) with an indicator of missing values."""
    values = table.numbers(name, kind="dates" if name in config.dates else "numbers")
    absent = np.isnan(values)
    if config.missing == "refuse" and absent.any():
        where = table.where(int(np.flatnonzero(absent)[0]))
        raise DataError(f"{where}: the column {name!r} has no value: fill it in, or set data.missing to another value than 'refuse'")
    columns = [values, absent.astype(np.float64)] if config.missing == "indicator" else [values]
    with np.errstate(over="ignore"):  # a value beyond float32 becomes infinity; a warning would reveal that one exists
        return np.stack(columns, axis=1).astype(np.float32)


def public_bounds(config: DataConfig, name: str) -> tuple[float, float] | None:
    """Return the public bounds of the column ``name``, or None if ``data.bounds`` has none.

    Raises:
        ConfigError: the lower bound is not below the upper one.
    """
    if name not in config.bounds:
        return None
    low, high = config.bounds[name]
    if not 0 < high - low < inf:  # inf: the difference of huge bounds overflows
        remedy = "exchange them" if low > high else "fill in its publicly known bounds"
        raise ConfigError(f"data.bounds.{name} is [{low:g}, {high:g}], expected the smallest value first, then the largest: {remedy}")
    return low, high


def _one_hot(table: Table, name: str, config: DataConfig) -> NDArray[np.float32]:
    """Return a column of words as a one-hot matrix: by its categories, or by hashes where it has none. A missing value is all zeros."""
    categories = config.categories.get(name)
    if not config.at_nodes:  # there, an error would reveal that such a cell exists
        check_exact_names(table, name, "data.words" if categories is None else "data.categories")
    words = [canonical_word(word) for word in column_words(table, name, values=categories or ())]
    if categories is None:
        # The column's name is hashed too. So two words that share a bucket in one column need not share a bucket in another column.
        indices = [_hash_bucket(f"{name}\0{word}", config.buckets) if word else None for word in words]
    else:
        indices = _category_indices(table, name, words, {canonical_word(word): index for index, word in enumerate(categories)})
    encoded = np.zeros((len(words), config.buckets if categories is None else len(categories)), dtype=np.float32)
    for row, index in enumerate(indices):
        if index is not None:
            encoded[row, index] = 1.0
    return encoded


def _category_indices(table: Table, name: str, words: Sequence[str], index_of: Mapping[str, int]) -> list[int | None]:
    """Return the index of each word among the categories of the column ``name``, or None for an empty cell.

    Raises:
        DataError: a word is not a category. The message names the row and not the word, which is private.
    """
    for row, word in enumerate(words):
        if word and word not in index_of:
            hint = _HINT_ON_ZEROS if are_codes(index_of) else ""
            raise DataError(
                f"{table.where(row)}: the value in the column {name!r} is not in data.categories.{name}, expected one of "
                f"{', '.join(index_of)}, or an empty cell{hint}"
            )
    return [index_of[word] if word else None for word in words]


_HINT_ON_ZEROS = " (a spreadsheet, or pandas without dtype=str, drops the zeros at the beginning of codes: export the column as text)"
"""Hint on a value that is not among categories of which some begin with 0. It depends on the categories alone, which are public."""


@lru_cache(maxsize=1 << 16)
def _hash_bucket(word: str, buckets: int) -> int:
    """Return the bucket of ``word``, from 0 to ``buckets`` - 1. It is the same on every machine and does not depend on other words."""
    return int.from_bytes(hashlib.sha256(word.encode(errors="surrogatepass")).digest()[:8]) % buckets


def resolve_text_column(table: Table, config: DataConfig) -> DataConfig:
    """Return ``config`` with ``data.text`` filled in, if it uses a tokenizer and only one column of ``table`` can hold the texts.

    It can be any column that ``data.columns`` names, or else any that is not the target, the client or the person.

    Raises:
        ConfigError: no column or several columns could hold the texts.
    """
    if config.text or not config.tokenizer:
        return config
    reserved = {*config.target_names, config.client, config.person} if config.target else {config.client, config.person}
    names = list(config.columns) or [name for name in table.columns if name not in reserved]
    if len(names) != 1:
        raise ConfigError(
            f"data.text (--text) is not set: name the column that holds the texts; possible columns: {listed_names(names, 8) or 'none'}"
        )
    return config.model_copy(update={"text": names[0], "columns": []})


def read_texts(table: Table, config: DataConfig, targets: Targets) -> Inputs:
    """Return the texts of ``table`` as tokens (N, length) int64.

    The tokens are those of ``data.tokenizer`` if there is one, bytes for a language model, and else hashed words.

    Raises:
        ConfigError: ``data.columns`` names inputs in addition to the texts.
        DataError: the column is missing, or holds numbers.
    """
    if config.columns:
        raise ConfigError("data.text and data.columns are both set, but a model of texts reads only data.text: leave data.columns out")
    texts = table.column(config.text, "data.text")
    if texts.dtype == np.float64:
        raise DataError(f"data.text names the column {config.text!r}, which holds numbers: name a column of texts")
    if config.tokenizer:
        check_vocabulary(config.tokenizer, config.tokenizer_digest)
        return tokenize(texts.tolist(), config.tokenizer, config.length)
    if targets == "tokens":
        return texts_as_bytes(texts, config.length)[:, :-1]  # the last byte is only a target
    tokens = torch.zeros(len(texts), config.length, dtype=torch.int64)
    for row, text in enumerate(texts):
        words = re.findall(r"\w+", text[: _CHARACTERS_PER_WORD * config.length].lower())[: config.length]
        # Token 0 is padding, so the words share the others.
        tokens[row, : len(words)] = torch.tensor([1 + _hash_bucket(word, config.vocabulary - 1) for word in words], dtype=torch.int64)
    return tokens


def texts_as_bytes(texts: NDArray[np.object_], length: int) -> Tensor:
    """Return texts as tokens (N, ``length`` + 1): a 0 for the start, then each byte plus 1, then zeros as padding."""
    tokens = torch.zeros(len(texts), length + 1, dtype=torch.int64)
    for row, text in enumerate(texts):
        text_bytes = torch.tensor(list(text.encode(errors="surrogatepass")[:length]), dtype=torch.int64)
        tokens[row, 1 : 1 + len(text_bytes)] = text_bytes + 1
    return tokens


def hashed_inputs(config: DataConfig) -> tuple[slice, ...]:
    """Return where the inputs of each column of hashed words lie among a table's inputs. Most of them are 0 in all rows."""
    stops, hashed_columns = [*accumulate(_column_widths(config))], {*config.words} - {*config.categories}
    places = zip(config.columns, [0, *stops], stops, strict=False)  # a column begins where the one before it ends
    return tuple(slice(start, stop) for name, start, stop in places if name in hashed_columns)


def draw_synthetic_inputs(config: DataConfig, rows: int, generator: torch.Generator) -> Tensor:
    """Draw synthetic inputs (``rows``, F) of the same layout as scaled :func:`read_features`. They depend on no data.

    Numbers are standard normal, and the words of a column are equally frequent.
    """
    parts: list[Tensor] = []
    for name in config.columns:
        if name in config.words or name in config.categories:
            width = len(config.categories[name]) if name in config.categories else config.buckets
            parts.append(torch.nn.functional.one_hot(torch.randint(width, (rows,), generator=generator), width).float())
        else:
            parts.append(torch.randn(rows, 1, generator=generator))
            if config.missing == "indicator":
                parts.append(torch.zeros(rows, 1))  # the indicator: no synthetic value is missing
    return torch.cat(parts, dim=1)
