"""The command that lists what can be run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources.abc import Traversable

from rich.table import Table

from ldpfl.experiments.shipped import DEFAULT, description, recipe_files, recipe_names, sweep_files, sweep_names
from ldpfl.report.terminal import terminal


def recipes() -> None:
    """List the recipes that "ldpfl run" knows."""
    console = terminal()
    console.print(_table("recipes", recipe_names(), recipe_files()))
    console.print(_table("sweeps (ldpfl sweep NAME)", sweep_names(), sweep_files()))


def _table(title: str, names: tuple[str, ...], files: Mapping[str, Traversable]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("what it runs")
    for name in names:
        table.add_row(name + (" (default)" if name == DEFAULT else ""), description(files[name]))
    return table
