"""Read tables from CSV and Parquet files, folders of these, and data frames. Each row's place is kept for error messages."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from ldpfl.data.cells import (
    MISSING_WORDS,
    READERS,
    Kind,
    are_codes,
    can_parse,
    describe_ambiguity,
    majority_kind,
    means_no_value,
    numeric_words,
)
from ldpfl.data.folders import check_one_split, visible_files
from ldpfl.errors import DataError, shown
from ldpfl.util.suggestions import did_you_mean, did_you_mean_file

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".tsv", ".parquet")
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")
_NUMBER_WITH_COMMA = re.compile(r"(?:[<>≤≥]=?\s*|=[<>]\s*)?[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
"""A whole number, or one with a decimal comma, with a sign such as ``<`` before it if it is a limit."""
_CLEAR_DECIMAL_COMMA = re.compile(r"[+-]?(0,\d+|[\d.]+,(\d{1,2}|\d{4,}))")
_POINT_FOR_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
_STATED_DELIMITER = re.compile(r'"?sep=([,;\t|])"? *', re.IGNORECASE)
"""Matches the line with which Excel begins a CSV file to state its delimiter."""

_DELIMITERS = ",;\t|"

_HEADER_HINT = "(is its first line a header?)"
"""End of a message that may not show the names of columns."""

Column = NDArray[Any]
"""Cells (N,) of a column: float64 with NaN for an empty cell, or texts with "" for an empty cell."""

_BOOLEANS = {"true": 1.0, "false": 0.0}
"""Cells that are numbers in a column of numbers: a CSV file has these words where a Parquet file or a frame has booleans."""


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length.

    Attributes:
        columns: cells of each column, by name. Numbers are float64, all else is text. Columns of a CSV file are text until they are
            read as numbers.
        where: returns the place of a row, for error messages.
        digest: hash that identifies the content.
        missing: texts, in lower case, that mean "no value". An empty cell has no value either.
        names_shown: whether messages may name columns that the settings do not name. In a file without a header, the first record is
            read as the names, so they are private.
        remedy: what a message advises for a cell that cannot be read.
        in_several_files: whether the rows are from several files of a folder.
        long_numbers: exact cells of the columns of whole numbers that float64 cannot hold, with NaN for an empty cell. They are used
            where a number is a name, such as a patient's.
        rounded: for columns that have any, which cells were floats that are too long to hold every whole number exactly.
        index: names of the levels of a data frame's index, which is no column.
        unclear: columns of numbers whose points may stand for thousands, as their file seems to have decimal commas.
    """

    columns: Mapping[str, Column]
    where: Callable[[int], str]
    digest: str
    missing: Collection[str] = MISSING_WORDS
    names_shown: bool = True
    remedy: str = (
        "correct the cell; if the column holds codes or words, name it in data.words and not in data.bounds; or list its words for a "
        "missing value in data.missing_words"
    )
    in_several_files: bool = False
    long_numbers: Mapping[str, Column] = field(default_factory=dict)
    rounded: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    index: Collection[str] = ()
    unclear: Collection[str] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str, setting: str, if_several: str = "") -> Column:
        """Return the column ``name``, which the setting ``setting`` names.

        Args:
            if_several: what a message advises in addition if ``name`` is several columns with commas between them.

        Raises:
            DataError: the table has no such column.
        """
        if name not in self.columns and not self.names_shown:
            raise DataError(f"the table has no column {shown(name)}, which {setting} names {_HEADER_HINT}")
        if name not in self.columns:
            hint = did_you_mean(name, self.columns)
            if name in self.index:
                hint = "it is the data frame's index, so give frame.reset_index()"
            names = list(map(str.strip, name.split(",")))
            if self.columns.keys() >= set(names):
                listed = ", ".join(json.dumps(part, ensure_ascii=False) for part in names)
                hint = f"for several columns give a list, --set '{setting}=[{listed}]'{if_several}"
            by_file = _CLIENT_BY_FILE.format(name=name) if self.in_several_files and setting in _CLIENT_SETTINGS else ""
            raise DataError(f"{setting} names {shown(name)}, but there is no such column: {hint}{by_file}")
        return self.columns[name]

    def with_missing(self, words: Collection[str]) -> Table:
        """Return the same table, in which ``words`` mean "no value"."""
        return replace(self, missing=frozenset(normalize("NFC", word.strip().lower()) for word in words))

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Return the table of these ``rows``. Error messages still give their places in the whole table."""
        columns, long_numbers = ({name: column[rows] for name, column in cells.items()} for cells in (self.columns, self.long_numbers))
        rounded = {name: cells[rows] for name, cells in self.rounded.items()}
        return replace(self, columns=columns, where=lambda row: self.where(int(rows[row])), long_numbers=long_numbers, rounded=rounded)

    def exact_cells(self, name: str) -> Column:
        """Return the cells of the column ``name``, with all digits of whole numbers that a float64 would round."""
        return self.long_numbers.get(name, self.columns[name])

    def numbers(self, name: str, *, kind: Kind = "numbers", strict: bool = True) -> NDArray[np.float64]:
        """Return a column as numbers, or its dates as day numbers, with NaN for an empty cell.

        Args:
            strict: whether a cell that cannot be read is an error; else it becomes NaN.

        Raises:
            DataError: a cell is not a number, or not a date. The message names its place.
        """
        column = self.columns[name]
        if strict and kind == "numbers":
            self.check_points(name)
        if column.dtype != np.float64:
            numbers = np.array([self._number(name, row, text, kind, strict=strict) for row, text in enumerate(column)], dtype=np.float64)
        elif kind == "numbers":
            numbers = column
        else:
            self._check_all_missing(name, column, strict=strict)
            numbers = np.full(len(column), np.nan)
        # A word for "no value" may be a number, such as 999. It was read as a number above.
        missing_numbers = numeric_words(self.missing) if kind == "numbers" else []
        return np.where(np.isin(numbers, missing_numbers), np.nan, numbers) if missing_numbers else numbers

    def _check_all_missing(self, name: str, column: Column, *, strict: bool) -> None:
        """Raise a :class:`DataError` if a column of numbers that is read as dates holds any number."""
        present = np.flatnonzero(~np.isnan(column))
        if strict and present.size:
            raise DataError(f"{self.where(int(present[0]))}: the column {name!r} holds a number, expected an ISO date (YEAR-MONTH-DAY)")

    def _number(self, name: str, row: int, text: str, kind: Kind, *, strict: bool) -> float:
        """Return the number, or day number, in the cell ``text``; NaN if it is empty, or if it cannot be read and ``strict`` is false."""
        if self.is_absent(text):
            return np.nan
        if kind == "numbers" and (boolean := _BOOLEANS.get(text.strip().lower())) is not None:
            return boolean
        try:
            value = READERS[kind](text)
        except ValueError:
            if not strict:
                return np.nan
            expected = "a number" if kind == "numbers" else "an ISO date (YEAR-MONTH-DAY)"
            if np.isnan(self.numbers(name, kind=kind, strict=False)).all():
                raise DataError(f"{self.where(row)}: no value in the column {name!r} is {expected}; {self.remedy}") from None
            place = f"{self.where(row)}: the value in the column {name!r}"
            raise DataError(f"{place} is not {expected}, unlike others in this column; {self.remedy}") from None
        if np.isfinite(value):
            return value
        if strict:
            raise DataError(f"{self.where(row)}: the value in the column {name!r} is infinite or NaN, expected a finite number")
        return np.nan

    def is_absent(self, text: str) -> bool:
        """Return whether the cell ``text`` means "no value"."""
        return means_no_value(text, self.missing)

    def is_numeric(self, name: str) -> bool:
        """Return whether most values in the column ``name`` are plain numbers. A limit such as ``<0.5`` is not one, nor is a code."""
        column = self.columns[name]
        if column.dtype == np.float64:
            return True
        present = self._cells_with_value(column)
        return bool(present) and 2 * sum(can_parse(float, text) for text in present) > len(present) and not are_codes(present)

    def kind(self, name: str) -> Kind:
        """Return whether most values in the column ``name`` are numbers, dates or words.

        Raises:
            DataError: most values can be read in two ways.
        """
        column = self.columns[name]
        if column.dtype == np.float64:
            return "numbers"
        present = self._cells_with_value(column)
        kind = majority_kind(present)
        if kind == "words" and (problem := describe_ambiguity(present)):
            raise DataError(f"the column {name!r} holds {problem}; or list it in data.words to use it as words")
        return kind

    def check_points(self, name: str) -> None:
        """Raise a :class:`DataError` if points in the numbers of the column ``name`` may stand for thousands."""
        if name in self.unclear:
            raise DataError(
                f"the column {name!r} holds numbers with a point before three digits, as in 1.234, which may stand for thousands or be a "
                "decimal point: write no point for thousands, and decimal commas as elsewhere in such files"
            )

    def is_text(self, name: str) -> bool:
        """Return whether most values in the column ``name`` are texts of several words."""
        column = self.columns[name]
        present = [] if column.dtype == np.float64 else self._cells_with_value(column)
        return 2 * sum(len(text.split()) >= _WORDS_OF_A_TEXT for text in present) > len(present)

    def _cells_with_value(self, column: Column) -> list[str]:
        """Return the cells of a ``column`` of texts that have a value."""
        return [text for text in column if not self.is_absent(text)]


_CLIENT_SETTINGS = ("data.client", "--client")
_CLIENT_BY_FILE = (
    ". If each file of the folder is a client, add a column with the file's name, in Python: pandas.concat(pandas.read_csv(file, dtype=str)"
    ".assign(**{{{name!r}: file.stem}}) for file in pathlib.Path('FOLDER').glob('*.csv')).to_csv('all.csv', index=False)"
)
"""What a message advises if the client's column is missing and the rows are from several files."""

_WORDS_OF_A_TEXT = 5
"""Number of words from which on a cell is a text, and not the name of a category."""


def read_table(path: Path, only: Collection[str] | None = None, *, names_shown: bool = True) -> Table:
    """Read a CSV or Parquet file, or all such files in a folder, in the order of their names.

    Args:
        only: columns to read, if the table has them. Then no cell is an error: a cell that cannot be read, such as an infinity, counts as
            missing, and so does a whole row of too many cells. None reads all columns strictly.
        names_shown: whether messages may name columns of the file. False at nodes, where a file without a header would reveal a record.

    Raises:
        DataError: there is no file, a file cannot be read, or the files have different columns. The message names the file and line.
    """
    files = _table_files(path)
    tables = []
    for file in files:
        read = _read_parquet if file.suffix.lower() == ".parquet" else _read_csv
        tables.append(read(file, only, names_shown))
    for file, other in zip(files[1:], tables[1:], strict=True):
        if list(other.columns) != list(tables[0].columns):
            difference = ", ".join(sorted(set(other.columns) ^ set(tables[0].columns))) or "in another order"
            differing = f" ({difference})" if names_shown else f" {_HEADER_HINT}"
            raise DataError(f"{file} and {files[0]} have different columns{differing}: give all files the same columns, in one order")
    table = tables[0] if len(tables) == 1 else _join_tables(tables)
    if not len(table):
        raise DataError(f"{path} has columns but no rows: add rows, or name another file")
    return table


def _table_files(path: Path) -> list[Path]:
    """Return the table files at ``path``, or raise a :class:`DataError` if there are none."""
    if path.is_dir():
        files = [file for file in visible_files(path) if file.suffix.lower() in SUFFIXES]
        if not files:
            raise DataError(f"{path} contains no table: expected a file whose name ends in {', '.join(SUFFIXES)}")
        check_one_split((file.relative_to(path) for file in files), path)
        return files
    if path.suffix.lower() in _SPREADSHEETS:
        raise DataError(
            f"{path} is a spreadsheet, which ldpfl cannot read: save its sheet as CSV (UTF-8), or pass a data frame from Python "
            "(pandas.read_excel)"
        )
    if not path.is_file():
        names = [file.name for file in path.parent.glob("*") if file.suffix in SUFFIXES] if path.parent.is_dir() else []
        raise DataError(f"there is no file {path}{did_you_mean_file(path.name, names)}")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} is not a table that ldpfl can read: expected a name that ends in {', '.join(SUFFIXES)}")
    return [path]


def _read_csv(path: Path, only: Collection[str] | None, names_shown: bool) -> Table:
    """Read a CSV file, whose first line decides the delimiter. Strict if ``only`` is None, else what cannot be read counts as missing.

    Messages may name columns of the file if ``names_shown``, see :func:`read_table`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    text = _decode_csv(path, data, strict=only is None)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may be as long as the file
    first_line = text.lstrip("\r\n").partition("\n")[0].partition("\r")[0]  # lines of old systems end in a carriage return alone
    stated = _STATED_DELIMITER.fullmatch(first_line)
    text = text.replace(first_line, "", 1) if stated else text  # the line stays, empty, so that lines keep their numbers
    delimiter = stated[1] if stated else max(_DELIMITERS, key=first_line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, cells, lines = _read_rows(path, reader, names_shown, strict=only is None)
    columns = {name: np.array([row[place] for row in cells], dtype=object) for place, name in enumerate(header)}
    unclear: tuple[str, ...] = ()
    if delimiter != ",":  # then a comma within a cell may be a decimal comma
        if only is None:  # a node refuses nothing because of its cells, which are private
            unclear = _unclear_columns(columns, delimiter)
        columns = {name: _with_decimal_points(column, always=only is not None) for name, column in columns.items()}
    where = partial(_line_place, path, np.array(lines, dtype=np.int64))
    return Table(columns, where, hashlib.sha256(data).hexdigest(), names_shown=names_shown, unclear=unclear)


def _decode_csv(path: Path, data: bytes, *, strict: bool) -> str:
    """Return the text of a CSV file. If it is not ``strict``, each byte that is no UTF-8 is replaced by a mark, and is no error."""
    try:
        text = data.decode("utf-8-sig", errors="strict" if strict else "replace")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "cp1252"
        raise DataError(
            f"{path}, line {line}: not UTF-8 text; save the file as UTF-8 (in Excel: CSV UTF-8). In Python, if its encoding is {encoding}: "
            f"from pathlib import Path; Path({path.stem + '-utf8.csv'!r}).write_text(Path({str(path)!r}).read_text({encoding!r}), 'utf-8')"
        ) from None
    if "\0" in text and strict:
        raise DataError(f"{path} is not a CSV file, because it contains zero bytes: save the table as CSV (UTF-8)")
    return text


def _with_decimal_points(column: Column, *, always: bool) -> Column:
    """Replace decimal commas by points in a column whose cells are mostly numbers. Any other column is returned unchanged.

    A cell that is not a number is left unchanged, to be refused later.

    Args:
        always: whether to convert every number, whatever most cells are. A node does so, since the majority of its cells is private.
    """
    present = [text for text in column if not means_no_value(text, MISSING_WORDS)]
    numbers = sum(bool(_NUMBER_WITH_COMMA.fullmatch(text.strip())) for text in present)
    if 2 * numbers <= len(present) and not always:
        return column
    return np.array([text.replace(",", ".") if _NUMBER_WITH_COMMA.fullmatch(text.strip()) else text for text in column], dtype=object)


def _unclear_columns(columns: Mapping[str, Column], delimiter: str) -> tuple[str, ...]:
    """Return the names of the ``columns``, as written, whose points may stand for thousands. ``delimiter`` separates the file's cells.

    They may where the file has decimal commas, or Excel's delimiter of countries that write these, and no clear decimal point.
    """
    has_commas = any(map(_has_decimal_comma, columns.values()))
    if not has_commas and (delimiter != ";" or any(map(_has_decimal_point, columns.values()))):
        return ()
    return tuple(name for name, column in columns.items() if _may_have_thousands(column))


def _may_have_thousands(column: Column) -> bool:
    """Return whether the points of a ``column`` of numbers may stand for thousands: there are some, each before three digits."""
    present = [text.strip() for text in column if not means_no_value(text, MISSING_WORDS)]
    with_point = [text for text in present if "." in text]
    return bool(with_point) and all(map(_POINT_FOR_THOUSANDS.fullmatch, with_point))


def _has_decimal_comma(column: Column) -> bool:
    """Return whether some cells of ``column`` are numbers with a comma that cannot stand for thousands."""
    return any("," in text and _CLEAR_DECIMAL_COMMA.fullmatch(text.strip()) for text in column)


def _has_decimal_point(column: Column) -> bool:
    """Return whether most cells of ``column`` are numbers, some of them with a point that cannot stand for thousands."""
    present = [text.strip() for text in column if not means_no_value(text, MISSING_WORDS)]
    numbers = [text for text in present if can_parse(float, text)]
    return 2 * len(numbers) > len(present) and any("." in text and not _POINT_FOR_THOUSANDS.fullmatch(text) for text in numbers)


def _read_rows(path: Path, reader: Any, names_shown: bool, *, strict: bool) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header, the cells of each row, and the number of each row's last line in the file ``path``.

    Args:
        reader: yields the rows of the file, the header first, as :func:`csv.reader` does.
        names_shown: whether error messages may quote names of the header.
        strict: whether a row with another number of cells than the header is an error; else all its cells become empty.
    """
    header: list[str] = []
    cells: list[list[str]] = []
    lines: list[int] = []
    try:
        for row in reader:
            if not row and len(header) != 1:  # in a table of one column, an empty line is an empty cell
                continue
            if not header:
                header = [name.strip() for name in row]
                _check_header(path, header, names_shown)
                continue
            row = row or [""]
            fits = len(row) == len(header)
            if strict and not fits:
                raise DataError(f"{path}, line {reader.line_num}: {len(row)} cells, but the header has {len(header)}: correct the line")
            cells.append(row if fits else [""] * len(header))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num} cannot be read as CSV ({error}): correct the line, or save the table again as CSV in UTF-8"
        ) from None
    if not header:
        raise DataError(f"{path} is empty: expected a header and rows")
    return header, cells, lines


def _check_header(path: Path, header: Sequence[str], names_shown: bool) -> None:
    """Raise a :class:`DataError` if a column has no name, or two have the same, which the message shows only if ``names_shown``."""
    if "" in header:
        remedy = "name it, or leave it out. (pandas writes such a column of row numbers: save with to_csv(index=False))"
        raise DataError(f"{path}: column number {header.index('') + 1} has no name; {remedy}")
    duplicates = [name for name, times in Counter(header).items() if times > 1]
    if duplicates:
        name = repr(duplicates[0]) if names_shown else f"the same {_HEADER_HINT}"
        raise DataError(f"{path}: two columns are called {name}: rename one, or leave it out")


def _line_place(path: Path, lines: NDArray[np.int64], row: int) -> str:
    """Return the place of a ``row`` of a CSV file, for messages. ``lines`` (N,) holds the line of each row."""
    return f"{path}, line {lines[row]}"


def _read_parquet(path: Path, only: Collection[str] | None, names_shown: bool) -> Table:
    """Read a Parquet file: all columns strictly if ``only`` is None, else these, and a cell that cannot be read counts as missing."""
    from ldpfl.data.parquet import read_parquet  # slow to import

    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    frame = read_parquet(path, data, only, names_shown=names_shown)
    where = partial(_row_place, str(path))
    return _table_of_frame(frame, where, hashlib.sha256(data).hexdigest(), strict=only is None, names_shown=names_shown)


def _row_place(origin: str, row: int) -> str:
    """Return the place of a ``row``, counted from 1, in the file or data frame ``origin``, for messages."""
    return f"{origin}, row {row + 1}"


def table_from_frame(frame: pandas.DataFrame, origin: str = "the data frame") -> Table:
    """Return a data frame as a table. Messages call it ``origin``.

    Raises:
        DataError: ``frame`` is not a data frame, has no row, or has a column that holds anything but numbers, truth values or texts.
    """
    import pandas

    if not isinstance(frame, pandas.DataFrame):
        raise DataError(f"{origin} must be a pandas data frame, or the path of a file or folder of tables, got a {type(frame).__name__}")
    table = _table_of_frame(frame, partial(_row_place, origin), "")
    if not len(frame):
        raise DataError(f"there are no rows in {origin}, only columns: add rows")
    digest = hashlib.sha256()
    for name, column in table.columns.items():
        digest.update(name.encode(errors="surrogatepass"))
        digest.update(column.tobytes() if column.dtype == np.float64 else "\0".join(column).encode(errors="surrogatepass"))
        digest.update("\0".join(map(str, table.long_numbers.get(name, ()))).encode())  # the digits that float64 rounded above
    return replace(table, digest=digest.hexdigest(), index=[str(name) for name in frame.index.names if name is not None])


def _table_of_frame(
    frame: pandas.DataFrame, where: Callable[[int], str], digest: str, *, strict: bool = True, names_shown: bool = True
) -> Table:
    """Return a data frame as a table. ``where`` returns a row's place, such as "a.parquet, row 1"; ``digest`` identifies the content.

    Args:
        strict: whether a cell of an unsupported type is an error; else it becomes empty.
        names_shown: whether error messages may quote names of columns.
    """
    origin = where(0).rpartition(",")[0]  # the place of a row without the row
    if not frame.columns.size:
        raise DataError(f"there are no columns in {origin}: add some")
    names = [str(name) for name in frame.columns]
    duplicates = [name for name, times in Counter(names).items() if times > 1]
    if duplicates:
        fault = f"are called {duplicates[0]!r}" if names_shown else "have the same name"
        raise DataError(f"two columns {fault} in {origin}: rename one, or leave it out")
    labels = [f"the column {name!r}" if names_shown else f"column number {place}" for place, name in enumerate(names, start=1)]
    columns = {name: _column_of_series(frame.iloc[:, place], labels[place], where, strict=strict) for place, name in enumerate(names)}
    long_numbers = {name: cells for place, name in enumerate(names) if (cells := _long_numbers(frame.iloc[:, place])) is not None}
    rounded = {name: cells for place, name in enumerate(names) if (cells := _rounded_floats(frame.iloc[:, place])).any()}
    return Table(columns, where, digest, names_shown=names_shown, long_numbers=long_numbers, rounded=rounded)


def _rounded_floats(series: Any) -> NDArray[np.bool_]:
    """Return a mask of the cells of a pandas series that a float may have rounded: from 2^53 on, or 2^24 (float32) or 2^11 (float16)."""
    from pandas.api import types

    if types.is_float_dtype(series):
        max_exact = _MAX_EXACT_BY_BYTES.get(series.dtype.itemsize, MAX_EXACT)
        return np.asarray(np.abs(series.to_numpy(dtype=np.float64, na_value=np.nan)) >= max_exact)
    if types.is_numeric_dtype(series) or types.is_bool_dtype(series):
        return np.zeros(len(series), dtype=np.bool_)
    # Any other series holds Python objects. Floats may be among them.
    return np.array([isinstance(cell, float) and abs(cell) >= MAX_EXACT for cell in series.to_numpy(dtype=object)], dtype=np.bool_)


def _long_numbers(series: Any) -> Column | None:
    """Return the exact cells of a pandas series of whole numbers, with NaN for an empty one; None if float64 holds all of them exactly."""
    from pandas.api import types

    if not types.is_integer_dtype(series) or not ((series > MAX_EXACT) | (series < -MAX_EXACT)).any():
        return None
    return np.asarray(series.to_numpy(dtype=object, na_value=np.nan))


MAX_EXACT = 2**53
"""Number up to which float64 holds every whole number exactly."""

_MAX_EXACT_BY_BYTES = {4: 2**24, 2: 2**11}
"""Number up to which a float of 4 or 2 bytes holds every whole number exactly."""


def _column_of_series(series: Any, label: str, where: Callable[[int], str], *, strict: bool) -> Column:
    """Return a pandas series as a column. A cell of an unsupported type, or infinity, is an error if ``strict``, else empty.

    Messages call the column ``label``, and a row by its place, which ``where`` returns.
    """
    from pandas.api import types

    if types.is_bool_dtype(series) or types.is_numeric_dtype(series):
        if types.is_complex_dtype(series):
            raise DataError(f"{label} holds complex numbers, expected real ones: give real and imaginary parts as two columns")
        numbers: Column = series.to_numpy(dtype=np.float64, na_value=np.nan)
        if not strict:
            return np.where(np.isinf(numbers), np.nan, numbers)
        infinite = np.flatnonzero(np.isinf(numbers))
        if infinite.size:
            raise DataError(f"{where(int(infinite[0]))}: the value in {label} is infinite, expected a finite number")
        return np.asarray(numbers)
    return np.array(list(_series_texts(series, label, where, strict=strict)), dtype=object)


def _series_texts(series: Any, label: str, where: Callable[[int], str], *, strict: bool) -> Iterator[str]:
    """Yield the cells of a pandas series as text: "" for a missing value, and for one of an unsupported type unless ``strict``."""
    values, is_missing = series.to_numpy(dtype=object), series.isna().to_numpy()
    for row, (value, missing) in enumerate(zip(values, is_missing, strict=True)):
        supported = isinstance(value, str | int | float | bool | np.bool_ | np.integer | np.floating | Decimal | date)
        if not missing and not supported and strict:
            kind = type(value).__name__
            raise DataError(f"{where(row)}: {label} holds values of the type {kind}, expected numbers or words: convert them")
        yield "" if missing or not supported else cell_text(value)


def cell_text(value: Any) -> str:
    """Return the value of a cell as text. Whole numbers are written with all digits and no point, others as Python writes floats.

    So a number up to 2^53 becomes the same text whether or not pandas has turned its column into floats.
    """
    if isinstance(value, date):  # midnight is written as a day without a time
        return value.isoformat().removesuffix("T00:00:00")
    if isinstance(value, str):
        return value
    with suppress(OverflowError, ValueError):  # infinity and NaN are no whole numbers
        if value == int(value):
            return str(int(value))
    return repr(float(value))


def _join_tables(parts: Sequence[Table]) -> Table:
    """Return the rows of all ``parts`` as one table. Error messages still name each row's own file."""
    ends = np.cumsum([len(part) for part in parts])  # the row after the last one of each part

    def where(row: int) -> str:
        part_index = int(np.searchsorted(ends, row, side="right"))
        row_in_part = row - int(ends[part_index - 1]) if part_index else row
        return parts[part_index].where(row_in_part)

    columns: dict[str, Column] = {}
    long_numbers: dict[str, Column] = {}
    for name in parts[0].columns:
        exact_cells = np.concatenate([part.exact_cells(name) for part in parts])
        if len({part.columns[name].dtype for part in parts}) > 1:  # numbers in some files, texts in others
            columns[name] = np.array(["" if cell != cell else cell_text(cell) for cell in exact_cells], dtype=object)  # "" for NaN
            continue
        columns[name] = np.concatenate([part.columns[name] for part in parts])
        if any(name in part.long_numbers for part in parts):
            long_numbers[name] = exact_cells
    rounded = {
        name: np.concatenate([part.rounded.get(name, np.zeros(len(part), dtype=np.bool_)) for part in parts])
        for name in {name for part in parts for name in part.rounded}
    }
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    names_shown, unclear = parts[0].names_shown, {name for part in parts for name in part.unclear}
    return Table(
        columns, where, digest, names_shown=names_shown, in_several_files=True, long_numbers=long_numbers, rounded=rounded, unclear=unclear
    )
