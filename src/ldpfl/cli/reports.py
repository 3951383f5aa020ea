"""The command that makes a page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl.files import write_text
from ldpfl.report.page import page
from ldpfl.report.terminal import terminal


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs; of one that goes on, as far as it has come.")],
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html in the run's folder, or here")] = None,
) -> None:
    """Write one HTML file about runs: how good, what is protected, curves, layers, config. It needs no network and no script."""
    place = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with terminal(stderr=True).status("accounting ..."):
        text = page(runs)
    write_text(place, text)
    terminal().print(Text(f"{place}: {len(text.encode()) / 1000:,.0f} kB, to look at in a browser"), soft_wrap=True)
