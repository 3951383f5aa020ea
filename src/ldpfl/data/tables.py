"""Tables as people have them: CSV and Parquet files, folders of these, data frames. Read whole, and with the place of each row."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.cells import MISSING_WORDS, READERS, Kind, kind_of, no_value, numbers_among, reads, unclear
from ldpfl.data.folders import check_one_split, visible_files
from ldpfl.errors import DataError, shown
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".tsv", ".parquet")
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")
_NUMBER_WITH_COMMA = re.compile(r"(?:[<>≤≥]=?\s*|=[<>]\s*)?[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
_DELIMITERS = ",;\t|"

_HEADER = "(is its first line a header?)"

Column = NDArray[Any]
"""(N,) float64 with NaN where nothing stands, or texts with "" there."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length.

    Attributes:
        columns: by name; numbers are float64, all else is text. What a CSV file holds is text until a reader wants numbers.
        where: tells the place of a row, for error messages.
        digest: identifies the content.
        missing: texts, in lower case, that stand for no value; an empty cell has none either.
        names_shown: whether messages may name columns that nobody asked for. Of a file without a header, the names are a record.
    """

    columns: Mapping[str, Column]
    where: Callable[[int], str]
    digest: str
    missing: Collection[str] = MISSING_WORDS
    names_shown: bool = True

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str, setting: str) -> Column:
        """Return a column; ``setting`` is what named it.

        Raises:
            DataError: there is none of this name.
        """
        if name not in self.columns and not self.names_shown:
            raise DataError(f"the table has no column {shown(name)}, which {setting} names {_HEADER}")
        if name not in self.columns:
            parts = list(map(str.strip, name.split(",")))
            listed = ", ".join(json.dumps(part, ensure_ascii=False) for part in parts)
            meant = f"for several columns give a list, --set '{setting}=[{listed}]'" if self.columns.keys() >= set(parts) else ""
            raise DataError(f"{setting} names no column {shown(name)}: {meant or did_you_mean(name, self.columns)}")
        return self.columns[name]

    def with_missing(self, words: Collection[str]) -> Table:
        """Return the same table, in which these words stand for no value."""
        return replace(self, missing=frozenset(word.strip().lower() for word in words))

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Return the ``rows`` at these places alone, in errors with the places that they have in the whole table."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, columns=columns, where=lambda row: self.where(int(rows[row])))

    def numbers(self, name: str, *, kind: Kind = "numbers", strict: bool = True) -> NDArray[np.float64]:
        """Return a column as numbers, or its dates as days, NaN where nothing stands; if not ``strict``, also where something else does.

        Raises:
            DataError: something else than a number, or a date, stands in it; its place is named.
        """
        column = self.columns[name]
        if column.dtype != np.float64:
            found = np.array([self._number(name, row, text, kind, strict=strict) for row, text in enumerate(column)], dtype=np.float64)
        elif kind == "numbers":
            found = column
        else:
            self._check_no_number(name, column, strict=strict)
            found = np.full(len(column), np.nan)
        gaps = numbers_among(self.missing) if kind == "numbers" else []
        return np.where(np.isin(found, gaps), np.nan, found) if gaps else found

    def _check_no_number(self, name: str, column: Column, *, strict: bool) -> None:
        there = np.flatnonzero(~np.isnan(column))
        if strict and there.size:
            raise DataError(f"{self.where(int(there[0]))}: what stands in the column {name!r} is a number, and an ISO date is expected")

    def _number(self, name: str, row: int, text: str, kind: Kind, *, strict: bool) -> float:
        if self.is_absent(text):
            return np.nan
        try:
            value = READERS[kind](text)
        except ValueError:
            if not strict:
                return np.nan
            remedy = f"mend it, or name what may stand there in data.categories.{name}, or what stands for no value in data.missing_words"
            expected = "number, as others there are" if kind == "numbers" else "ISO date (YEAR-MONTH-DAY), as others there are"
            raise DataError(f"{self.where(row)}: what stands in the column {name!r} is no {expected}; {remedy}") from None
        if not np.isfinite(value) and not strict:
            return np.nan
        if not np.isfinite(value):
            raise DataError(f"{self.where(row)}: what stands in the column {name!r} is infinite or NaN, and a finite number is expected")
        return value

    def is_absent(self, text: str) -> bool:
        """Tell whether a cell stands for no value."""
        return no_value(text, self.missing)

    def is_numeric(self, name: str) -> bool:
        """Tell whether most of what stands in a column are numbers, none of them a limit such as ``<0.5``."""
        column = self.columns[name]
        if column.dtype == np.float64:
            return True
        present = self._present(column)
        return bool(present) and 2 * sum(reads(float, text) for text in present) > len(present)

    def kind(self, name: str) -> Kind:
        """Return what most of what stands in a column is.

        Raises:
            DataError: most of it can be read in two ways.
        """
        column = self.columns[name]
        if column.dtype == np.float64:
            return "numbers"
        present = self._present(column)
        found = kind_of(present)
        if found == "words" and (said := unclear(present)):
            raise DataError(f"the column {name!r} holds {said}; or name it in data.words, to take it as words")
        return found

    def _present(self, column: Column) -> list[str]:
        return [text for text in column if not self.is_absent(text)]


def read_table(path: Path, only: Collection[str] | None = None, *, names_shown: bool = True) -> Table:
    """Read a CSV or Parquet file, or all those in a folder, in the order of their names.

    With ``only`` these columns are read, as far as they are there, and nothing that stands in a row is an error: what cannot be read,
    such as an infinity, a date, or a row of too many cells, is without a value. Without ``names_shown`` no message names a column that
    was found, now or later: for readers at nodes.

    Raises:
        DataError: there is none, one cannot be read, or they have different columns; the file is named, and the line where there is one.
    """
    files = _files(path)
    parts = [(_parquet if file.suffix.lower() == ".parquet" else _csv)(file, only, names_shown) for file in files]
    for file, part in zip(files[1:], parts[1:], strict=True):
        if list(part.columns) != list(parts[0].columns):
            odd = ", ".join(sorted(set(part.columns) ^ set(parts[0].columns))) or "in another order"
            raise DataError(f"{file} and {files[0]} have different columns{f': {odd}' if names_shown else f' {_HEADER}'}")
    table = parts[0] if len(parts) == 1 else _joined(parts)
    if not len(table):
        raise DataError(f"there is no row in {path}, only columns")
    return table


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [file for file in visible_files(path) if file.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"there is no file of a table in {path}: expected {', '.join(SUFFIXES)}")
        check_one_split((file.relative_to(path) for file in files), path)
        return files
    if path.suffix.lower() in _SPREADSHEETS:
        raise DataError(
            f"{path} is a spreadsheet, which is not read: save its sheet as CSV (UTF-8), or hand over a data frame from Python "
            "(pandas.read_excel)"
        )
    if not path.is_file():
        beside = [file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES] if path.parent.is_dir() else []
        raise DataError(f"there is no file {path}" + (f": {did_you_mean(path.name, beside)}" if beside else ""))
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} is no table that can be read: expected {', '.join(SUFFIXES)}")
    return [path]


def _csv(path: Path, only: Collection[str] | None, names_shown: bool) -> Table:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig", errors="strict" if only is None else "replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text and only is None:
        raise DataError(f"{path} is no CSV file: it holds bytes of zero")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may be as long as the file
    first = text.lstrip("\r\n").partition("\n")[0].partition("\r")[0]  # lines of old systems end in that alone
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, cells, lines = _rows(path, reader, names_shown, strict=only is None)
    columns = {name: np.array([row[place] for row in cells], dtype=object) for place, name in enumerate(header)}
    if delimiter != ",":
        columns = {name: _with_points(column, always=only is not None) for name, column in columns.items()}
    where = partial(_line_of, path, np.array(lines, dtype=np.int64))
    return Table(columns, where, hashlib.sha256(data).hexdigest(), names_shown=names_shown)


def _with_points(column: Column, *, always: bool) -> Column:
    """Return a column most of whose cells are numbers, some with decimal commas, with points in their place; any other as it is.

    What one cell holds decides about no other: among numbers, what is none is left as it is, to be refused.
    """
    present = [text for text in column if not no_value(text, MISSING_WORDS)]
    numbers = sum(bool(_NUMBER_WITH_COMMA.fullmatch(text.strip())) for text in present)
    if 2 * numbers <= len(present) and not always:  # where even the majority is not public, each cell is taken by itself
        return column
    return np.array([text.replace(",", ".") if _NUMBER_WITH_COMMA.fullmatch(text.strip()) else text for text in column], dtype=object)


def _rows(path: Path, reader: Any, names_shown: bool, *, strict: bool) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header, the rows, and the line that each row ends in."""
    header: list[str] = []
    cells: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if not row and len(header) != 1:  # of a single column, nothing is a cell without a value
                continue
            if not header:
                header = [name.strip() for name in row]
                _check_header(path, header, names_shown)
                continue
            row = row or [""]
            fits = len(row) == len(header)
            if strict and not fits:
                raise DataError(f"{path}, line {reader.line_num}: {len(row)} cells, and the header has {len(header)}")
            cells.append(row if fits else [""] * len(header))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from None
    if not header:
        raise DataError(f"{path} is empty")
    return header, cells, lines


def _check_header(path: Path, header: Sequence[str], names_shown: bool) -> None:
    if "" in header:
        raise DataError(f"{path}: the {header.index('') + 1}. column has no name")
    twice = [name for name, times in Counter(header).items() if times > 1]
    if twice:
        raise DataError(f"{path}: two columns are called {repr(twice[0]) if names_shown else f'the same {_HEADER}'}")


def _line_of(path: Path, lines: NDArray[np.int64], row: int) -> str:
    return f"{path}, line {lines[row]}"


def _parquet(path: Path, only: Collection[str] | None, names_shown: bool) -> Table:
    from ldpfl.data.parquet import read_parquet  # slow to import

    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    frame = read_parquet(path, data, only, names_shown=names_shown)
    where = partial(_row_of, str(path))
    return _of_frame(frame, where, hashlib.sha256(data).hexdigest(), strict=only is None, names_shown=names_shown)


def _row_of(origin: str, row: int) -> str:
    return f"{origin}, row {row + 1}"


def table_of(frame: pandas.DataFrame, origin: str = "the data frame") -> Table:
    """Return a data frame as a table; ``origin`` is named in errors.

    Raises:
        DataError: it is none, has no row, or a column of something else than numbers, truth values or texts.
    """
    import pandas

    if not isinstance(frame, pandas.DataFrame):
        raise DataError(f"{origin} are to be a data frame, or a file or folder of tables; got a {type(frame).__name__}")
    table = _of_frame(frame, partial(_row_of, origin), "")
    if not len(frame):
        raise DataError(f"there is no row in {origin}, only columns")
    digest = hashlib.sha256()
    for name, column in table.columns.items():
        digest.update(name.encode(errors="surrogatepass"))
        digest.update(column.tobytes() if column.dtype == np.float64 else "\0".join(column).encode(errors="surrogatepass"))
    return Table(table.columns, table.where, digest.hexdigest())


def _of_frame(frame: pandas.DataFrame, where: Callable[[int], str], digest: str, *, strict: bool = True, names_shown: bool = True) -> Table:
    if not frame.columns.size:
        raise DataError(f"there is no column in {where(0).rpartition(',')[0]}")
    names = [str(name) for name in frame.columns]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        said = f"are called {twice[0]!r}" if names_shown else "have the same name"
        raise DataError(f"two columns {said}")
    called = [f"the column {name!r}" if names_shown else f"the {place}. column" for place, name in enumerate(names, start=1)]
    columns = {name: _plain(frame.iloc[:, place], called[place], where, strict=strict) for place, name in enumerate(names)}
    return Table(columns, where, digest, names_shown=names_shown)


def _plain(series: Any, called: str, where: Callable[[int], str], *, strict: bool) -> Column:
    from pandas.api import types

    if types.is_bool_dtype(series) or types.is_numeric_dtype(series):
        if types.is_complex_dtype(series):
            raise DataError(f"{called} holds complex numbers: give their parts")
        numbers: Column = series.to_numpy(dtype=np.float64, na_value=np.nan)
        if not strict:
            return np.where(np.isinf(numbers), np.nan, numbers)
        infinite = np.flatnonzero(np.isinf(numbers))
        if infinite.size:
            raise DataError(f"{where(int(infinite[0]))}: what stands in {called} is infinite, and a finite number is expected")
        return np.asarray(numbers)
    return np.array(list(_texts(series, called, where, strict=strict)), dtype=object)


def _texts(series: Any, called: str, where: Callable[[int], str], *, strict: bool) -> Iterator[str]:
    values, absent = series.to_numpy(dtype=object), series.isna().to_numpy()
    for row, (value, missing) in enumerate(zip(values, absent, strict=True)):
        known = isinstance(value, str | int | float | bool | np.bool_ | np.integer | np.floating | Decimal | date)
        if not missing and not known and strict:
            kind = type(value).__name__
            raise DataError(f"{where(row)}: {called} holds values of the type {kind}: turn them into numbers or words")
        yield "" if missing or not known else as_text(value)


def as_text(value: Any) -> str:
    """Return what stands in a cell as text: numbers as Python writes floats, so that the same ones come back; whole ones without a point.

    A number is the same text whatever else stands in its column, of which pandas makes floats where all are numbers.
    """
    if isinstance(value, date):  # a day is written as one, also where it is a moment's
        return value.isoformat().removesuffix("T00:00:00")
    if isinstance(value, str):
        return value
    try:
        return repr(float(value) + 0.0).removesuffix(".0")  # the sum makes 0 of -0, which is the same number
    except OverflowError:  # a whole number beyond all floats
        return str(value)


def _joined(parts: Sequence[Table]) -> Table:
    stops = np.cumsum([len(part) for part in parts])

    def where(row: int) -> str:
        place = int(np.searchsorted(stops, row, side="right"))
        return parts[place].where(row - int(stops[place - 1]) if place else row)

    columns = {name: _concatenated([part.columns[name] for part in parts]) for name in parts[0].columns}
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    return Table(columns, where, digest, names_shown=parts[0].names_shown)


def _concatenated(columns: Sequence[Column]) -> Column:
    if len({column.dtype for column in columns}) == 1:
        return np.concatenate(columns)
    return np.concatenate([column if column.dtype == object else _written(column) for column in columns])


def _written(numbers: Column) -> Column:
    return np.array(["" if np.isnan(value) else as_text(value) for value in numbers], dtype=object)
