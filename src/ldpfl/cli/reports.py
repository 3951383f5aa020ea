"""The command that makes a page about runs, a sweep or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl import api
from ldpfl.errors import ConfigError
from ldpfl.report.console import terminal

_OWNERS_PAGE, _PUBLIC_PAGE = "report.html", "report-public.html"


def report(
    what: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, finished or not; the folder of a sweep; or a plan's JSON."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default=f"{_OWNERS_PAGE} in the folder, or here; {_PUBLIC_PAGE} for --public")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Leave out of a run's page what its guarantee does not cover.")] = False,
) -> None:
    """Write a self-contained HTML report on runs, a sweep or a plan: accuracy, privacy, plots."""
    if public and out is not None and out.resolve() in [(folder / _OWNERS_PAGE).resolve() for folder in what]:
        raise ConfigError(
            f"--out {out} is the file to which ldpfl run writes the full page, with figures that are not protected, so the next run would "
            f"overwrite the public page: give another --out, or leave out --out to write {_PUBLIC_PAGE}"
        )
    name = _PUBLIC_PAGE if public else _OWNERS_PAGE
    file = out or (what[0] / name if len(what) == 1 and what[0].is_dir() else Path(name))
    with terminal(stderr=True).status("accounting ..."):
        page = api.page(what, file, public=public)
    terminal().print(Text(f"{file}: {page.size / 1000:,.0f} kB, {page.kind}, to look at in a browser"), soft_wrap=True)
