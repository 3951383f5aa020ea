"""Tables for narrow terminals: less important columns are left out first, then each row becomes a list of its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_MIN_NAME_WIDTH = 24
"""Minimum width, in characters, to which a column of names is folded."""

_BETWEEN_COLUMNS = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: heading of the column.
        cells: a text for each row.
        is_name: whether the column identifies rows. Such a column is aligned left, and folded if the terminal is narrow.
        dropped: step at which the column is left out if the terminal is narrow, the lowest step first; 0 if it is never left out.
    """

    title: str
    cells: Sequence[str]
    is_name: bool = False
    dropped: int = 0

    @property
    def width(self) -> int:
        """Minimum width at which the column is readable. Long names are folded; all other texts stand on one line."""
        longest = max(map(cell_len, [self.title, *self.cells]))
        return min(longest, max(_MIN_NAME_WIDTH, cell_len(self.title))) if self.is_name else longest


@dataclass(frozen=True)
class FittedTable:
    """A table for a terminal of any width.

    Attributes:
        title, caption: texts above and below the table.
        columns: columns from left to right, each with the same number of cells.
    """

    title: str
    columns: Sequence[Column]
    caption: str = ""

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(self.columns[0].cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the first selection of columns that fits the terminal, or else all rows as lists."""
        for columns in self._column_selections():
            if sum(column.width + _BETWEEN_COLUMNS for column in columns) + 1 <= options.max_width:  # 1 for the frame
                yield self._as_table(columns)
                return
        yield from self._as_records()

    def _column_selections(self) -> Iterator[list[Column]]:
        """Yield selections of columns to try: all columns, then without the first step of ``dropped`` columns, and so on."""
        for step in sorted({column.dropped for column in self.columns} | {0}):
            yield [column for column in self.columns if column.dropped == 0 or column.dropped > step]

    def _as_table(self, columns: Sequence[Column]) -> Table:
        """Return a table of the given columns; its caption names those that have no room."""
        left_out = [column.title for column in self.columns if column not in columns]
        notes = [f"no room for: {', '.join(left_out)}"] if left_out else []
        table = Table(title=Text(self.title), title_justify="left", caption_justify="left")
        table.caption = Text("\n".join(filter(None, [*notes, self.caption]))) if notes or self.caption else None
        for column in columns:
            if column.is_name:
                table.add_column(Text(column.title), overflow="fold", min_width=column.width)
            else:
                table.add_column(Text(column.title), justify="right", no_wrap=True)
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*map(Text, row))
        return table

    def _as_records(self) -> Iterator[Text]:
        """Yield each row as a heading of its names, and one line for each figure."""
        yield Text(self.title, style="italic")
        names = [column for column in self.columns if column.is_name]
        figures = [column for column in self.columns if not column.is_name]
        for row in range(self.row_count):
            row_name = ", ".join(f"{column.title} {column.cells[row]}" for column in names)
            yield Text(row_name, style="bold", overflow="fold")
            for column in figures:
                yield Text(f"  {column.title}: {column.cells[row]}", overflow="fold")
        if self.caption:
            yield Text(self.caption)
