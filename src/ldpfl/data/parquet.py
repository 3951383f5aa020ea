"""Read Parquet files cell by cell, so that an unreadable cell affects no other row."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.errors import DataError

if TYPE_CHECKING:
    import pandas

_MAX_CELLS = 10**8
"""Maximum number of cells in a file, some gigabytes of memory. A small compressed file may hold very many cells."""


def read_parquet(path: Path, data: bytes, only: Collection[str] | None, *, names_shown: bool = True) -> pandas.DataFrame:
    """Return the table in ``data``, the bytes of the Parquet file at ``path``.

    Args:
        only: columns to read, in which cells that cannot be read become None; None reads all columns and raises for such cells.
        names_shown: whether messages may name columns. In a file made from a CSV file without a header, the names are a private record.

    Raises:
        DataError: the file cannot be read, or has too many cells.
    """
    import pandas
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(io.BytesIO(data))
        if metadata.num_rows * metadata.num_columns > _MAX_CELLS:
            size = f"{metadata.num_rows:,} rows of {metadata.num_columns:,} columns"
            raise DataError(f"{path} has {size}, more than {_MAX_CELLS:,} cells: split it, or leave columns out")
        schema = parquet.read_schema(io.BytesIO(data))
        # As dictionaries, equal texts share memory: a small file may hold the same long text very many times.
        text_columns = [field.name for field in schema if pyarrow.types.is_string(field.type)]
        if only is None:
            return _to_pandas(parquet.read_table(io.BytesIO(data), read_dictionary=text_columns))
        fields = [field for field in schema if field.name in only]
        if len({field.name for field in fields}) < len(fields):
            raise DataError(f"{path}: two columns have the same name: rename one, or leave it out")
        flat = [field.name for field in fields if not pyarrow.types.is_nested(field.type)]
        table = parquet.read_table(io.BytesIO(data), read_dictionary=[name for name in text_columns if name in flat], columns=flat)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if not names_shown:  # "from None" hides the library's error, which may name a column
            raise DataError(f"{path} cannot be read as Parquet ({type(error).__name__})") from None
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    # No cell of a nested column can be read. Lists become columns of objects, since pandas would guess one type from all cells.
    columns = {field.name: _cells(table.column(field.name)) if field.name in flat else [None] * metadata.num_rows for field in fields}
    return pandas.DataFrame(
        {name: pandas.Series(cells, dtype="object" if isinstance(cells, list) else None) for name, cells in columns.items()}
    )


def _to_pandas(arrow: Any) -> Any:
    """Return an Arrow table, or column, in pandas. Whole numbers of 64 bits stay exact even if cells are missing."""
    import pandas
    import pyarrow

    exact_types = {pyarrow.int64(): pandas.Int64Dtype(), pyarrow.uint64(): pandas.UInt64Dtype()}
    return arrow.to_pandas(types_mapper=exact_types.get)


def _cells(column: Any) -> Any:
    """Return the cells of a chunked array: numbers as a series, other types as a list with None for cells that cannot be read."""
    from pyarrow import types

    if types.is_integer(column.type) or types.is_floating(column.type):
        return _to_pandas(column)
    return [cell for chunk in column.chunks for cell in _chunk_cells(chunk)]


def _chunk_cells(chunk: Any) -> list[Any]:
    """Return the cells of one Arrow array as Python values, None for cells that cannot be read."""
    import pyarrow

    if pyarrow.types.is_dictionary(chunk.type):
        words = _chunk_cells(chunk.dictionary)
        return [None if index is None else words[index] for index in chunk.indices.to_pylist()]
    if pyarrow.types.is_string(chunk.type) or pyarrow.types.is_large_string(chunk.type):  # read as bytes, which may be invalid UTF-8
        chunk = chunk.cast(pyarrow.binary() if pyarrow.types.is_string(chunk.type) else pyarrow.large_binary())
    return [_cell_value(cell) for cell in chunk]


def _cell_value(cell: Any) -> Any:
    """Return the Python value of one Arrow cell, or None if it has none."""
    try:
        value = cell.as_py()
    except Exception:  # for example a day beyond the year 9999
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else value
