"""The command that makes a table or figure of a paper again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ldpfl import api
from ldpfl.cli.interrupts import INTERRUPTED, Interrupts
from ldpfl.cli.options import DataDirOption
from ldpfl.report.console import print_json, terminal
from ldpfl.report.progress import ProgressDisplay


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Such as ldp-fl/table1.", show_default="list them")] = None,
    size: Annotated[str, typer.Option(help="desk: minutes to hours on two cores; paper: as the paper has it.")] = "desk",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Its folder.", show_default="runs/reproduce-NAME-SIZE")] = None,
    data_dir: DataDirOption = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once, each on one thread.", show_default="cores")] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Run what is missing, or show what is finished.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Reproduce a paper's table or figure: our figures, the paper's, and the proved bounds. Rerun the same command to resume."""
    console, errors = terminal(), terminal(stderr=True)
    if name is None:
        console.print(_reproductions_table())
        return
    folder = out or Path("runs") / f"reproduce-{name.replace('/', '-')}-{size}"
    try:
        with Interrupts() as interrupts, ProgressDisplay(errors, lines=False, check=interrupts.check) as display:
            result = api.reproduce(
                name,
                size=size,  # type: ignore[arg-type]  # the function refuses other words
                settings=set_ or [],
                folder=folder,
                data_dir=data_dir,
                jobs=jobs,
                train=train,
                progress=display,
            )
    except KeyboardInterrupt:
        errors.print(Text(f"interrupted; finished runs are kept in {folder}: start the same command again to resume"), soft_wrap=True)
        raise SystemExit(INTERRUPTED) from None
    if as_json:
        print_json(result.to_dict())
        return
    console.print(result)
    console.print(Text(f"table, plot and their description: {folder}"), soft_wrap=True)


def _reproductions_table() -> Table:
    """Return the table of the papers' tables and figures that can be made again."""
    table = Table(title="tables and figures (ldpfl reproduce NAME)", title_justify="left")
    for heading in ("name", "what it shows", "sizes"):
        table.add_column(heading, no_wrap=heading == "name")
    for reproduction in api.reproductions():
        table.add_row(reproduction.name, Text(reproduction.about), ", ".join(reproduction.sizes))
    return table
