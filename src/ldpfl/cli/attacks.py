"""Commands that attack what a run published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl.api.attacking import COMPARISON, SIDE_BY_SIDE, AttackPlan, Comparison, GanConfig, attack_runs
from ldpfl.cli.commands import Group
from ldpfl.cli.interrupts import Interrupts
from ldpfl.cli.linkage import linkage
from ldpfl.cli.options import DataDirOption
from ldpfl.report.attacks import attack_table, comparison_table
from ldpfl.report.console import terminal
from ldpfl.report.progress import ProgressDisplay

app = typer.Typer(cls=Group, no_args_is_help=True, help="Attack published models or sent reports, to measure how well they are protected.")


app.command()(linkage)


@app.command()
def gan(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished simulations.")],
    label: Annotated[int | None, typer.Option(help="Class to reconstruct.", show_default="the run's data.private_label")] = None,
    images: Annotated[int, typer.Option(help="Most images in each set that is compared.")] = 500,
    steps: Annotated[int, typer.Option(help="Training steps of the attack.")] = GanConfig.steps,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the attack.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted up from the first.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for pictures and figures; for several runs, of the comparison.", show_default="RUN/attacks/gan-LABEL"),
    ] = None,
    data_dir: DataDirOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Reconstruct a class that client 0 does not hold, from a run's model and from the same run without protection.

    Several runs are attacked each in its own folder, and compared: runs that differ only in their seed are one line of the table.

    Start it again to go on where it was stopped: finished parts are kept.
    """
    plan = AttackPlan(label, images, tuple(range(seed, seed + seeds)), GanConfig(steps=steps))
    with Interrupts() as interrupts, ProgressDisplay(terminal(stderr=True), lines=not as_json, check=interrupts.check) as display:
        result = attack_runs(runs, plan, out=out, data_dir=data_dir, device=device, progress=display)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    console, pictures = terminal(), result.folder / SIDE_BY_SIDE
    if isinstance(result.found, Comparison):
        console.print(comparison_table(result.found))
        hint = f"comparison: {result.folder / COMPARISON}; first run of each line: {pictures}"
    else:
        console.print(attack_table(result.found))
        hint = f"pictures of the first seed: {pictures}"
    console.print(Text(hint), soft_wrap=True)
