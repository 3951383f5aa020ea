"""The command that lists what can be run."""

from __future__ import annotations

from rich.table import Table

from ldpfl import api
from ldpfl.api.listing import Shipped
from ldpfl.report.console import terminal


def recipes() -> None:
    """List the recipes that "ldpfl run" knows."""
    console = terminal()
    console.print(_table("recipes", api.recipes()))
    console.print(_table("sweeps (ldpfl sweep NAME)", api.sweeps()))


def _table(title: str, listed: tuple[Shipped, ...]) -> Table:
    """Return the table of recipes or sweeps, with a line on each."""
    table = Table(title=title, title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it runs")
    for item in listed:
        table.add_row(item.name + (" (default)" if item.name == api.DEFAULT else ""), item.about)
    return table
