"""Parquet files, cell by cell: what cannot be read of one row decides about no other."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.errors import DataError

if TYPE_CHECKING:
    import pandas

_MOST_CELLS = 10**8
"""Of a file, which may be small and hold very many: some gigabytes of memory."""


def read_parquet(path: Path, data: bytes, only: Collection[str] | None, *, names_shown: bool = True) -> pandas.DataFrame:
    """Return the file ``path``, which holds ``data``; with ``only`` these columns, in which whatever has no value that is known is None.

    Without ``names_shown`` no message names a column: of a file that was made of one without a header, the names are a record.

    Raises:
        DataError: it is no such file, or holds too much.
    """
    import pandas
    import pyarrow
    from pyarrow import parquet

    try:
        holds = parquet.read_metadata(io.BytesIO(data))
        if holds.num_rows * holds.num_columns > _MOST_CELLS:
            raise DataError(f"{path} has {holds.num_rows:,} rows of {holds.num_columns:,} columns, more than {_MOST_CELLS:,} cells")
        schema = parquet.read_schema(io.BytesIO(data))
        # Texts that are equal stay one: a small file may hold very many times the same long one.
        texts = [field.name for field in schema if pyarrow.types.is_string(field.type)]
        if only is None:
            return parquet.read_table(io.BytesIO(data), read_dictionary=texts).to_pandas()
        named = [field for field in schema if field.name in only]
        if len({field.name for field in named}) < len(named):
            raise DataError(f"{path}: two columns have the same name")
        flat = [field.name for field in named if not pyarrow.types.is_nested(field.type)]
        table = parquet.read_table(io.BytesIO(data), read_dictionary=[name for name in texts if name in flat], columns=flat)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if not names_shown:  # nor does the error that this one follows from, which may name one
            raise DataError(f"{path} cannot be read as Parquet ({type(error).__name__})") from None
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    columns = {field.name: _cells(table.column(field.name)) if field.name in flat else [None] * holds.num_rows for field in named}
    return pandas.DataFrame(
        {name: pandas.Series(cells, dtype="object" if isinstance(cells, list) else None) for name, cells in columns.items()}
    )


def _cells(column: Any) -> Any:
    """Return the cells of a chunked array: numbers as an array, all else as a list, with None for what cannot be read."""
    from pyarrow import types

    if types.is_integer(column.type) or types.is_floating(column.type):
        return column.to_numpy()
    return [cell for chunk in column.chunks for cell in _of_chunk(chunk)]


def _of_chunk(chunk: Any) -> list[Any]:
    import pyarrow

    if pyarrow.types.is_dictionary(chunk.type):
        words = _of_chunk(chunk.dictionary)
        return [None if place is None else words[place] for place in chunk.indices.to_pylist()]
    if pyarrow.types.is_string(chunk.type) or pyarrow.types.is_large_string(chunk.type):  # as bytes, which need not be text
        chunk = chunk.cast(pyarrow.binary() if pyarrow.types.is_string(chunk.type) else pyarrow.large_binary())
    return [_read(cell) for cell in chunk]


def _read(cell: Any) -> Any:
    try:
        value = cell.as_py()
    except Exception:  # a day beyond the year 9999, and what else a file may hold
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else value
