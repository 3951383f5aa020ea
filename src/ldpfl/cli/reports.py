"""The command that makes a page about runs, a sweep or a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl.cli.runs import sweep_command
from ldpfl.errors import ConfigError
from ldpfl.experiments.sweep_run import stored_sweep
from ldpfl.files import check_suffix, write_text
from ldpfl.report.page import page
from ldpfl.report.plan_page import plan_page
from ldpfl.report.sweep_page import sweep_page
from ldpfl.report.terminal import terminal

_OWN, _PUBLIC = "report.html", "report-public.html"
_FOR_THE_OWNER = "a page for its owner alone, with what the guarantee does not cover"
_TO_HAND_ON = "a public page, without what the guarantee does not cover"


def report(
    what: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, of one that goes on as far as it has come; a sweep's; or a plan's JSON."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write.", show_default=f"{_OWN} in the folder, or here; {_PUBLIC} for --public")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Leave out of a run's page what its guarantee does not cover.")] = False,
) -> None:
    """Write one HTML file about runs, a sweep or a plan: how good, what is protected, in pictures. It needs no network and no script."""
    if public and out is not None and out.resolve() in [(folder / _OWN).resolve() for folder in what]:
        raise ConfigError(
            f"--public to {out}: that is the page for the run's owner, which ldpfl run writes again whenever it ends; give --out another "
            f"name, or leave it out for {_PUBLIC}"
        )
    if out is not None:
        check_suffix(out, "a page in HTML", ".html", ".htm")
    name = _PUBLIC if public else _OWN
    place = out or (what[0] / name if len(what) == 1 and what[0].is_dir() else Path(name))
    with terminal(stderr=True).status("accounting ..."):
        text, kind = _page(what, public=public)
    write_text(place, text)
    terminal().print(Text(f"{place}: {len(text.encode()) / 1000:,.0f} kB, {kind}, to look at in a browser"), soft_wrap=True)


def _page(what: list[Path], *, public: bool) -> tuple[str, str]:
    """Return a page, and which kind of page it is, in words."""
    sweeps = [(path, stored) for path in what if path.is_dir() and (stored := stored_sweep(path)) is not None]
    plans = [path for path in what if path.suffix == ".json" and path.is_file()]
    if not sweeps and not plans:
        return page(what, public=public), _TO_HAND_ON if public else _FOR_THE_OWNER
    if public:
        raise ConfigError("--public is for runs: a sweep's page compares scores, and a plan's has no figure of any data")
    if len(what) > 1:
        raise ConfigError("several runs have a page together; a sweep, or a plan, has one of its own: give it alone")
    if plans:
        return plan_page(plans[0]), "the page of a plan, without a figure of any data"
    folder, (sweep, overrides) = sweeps[0]
    return sweep_page(folder, sweep, overrides, sweep_command(folder)), _FOR_THE_OWNER
