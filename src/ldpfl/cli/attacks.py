"""Commands that attack what a run published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from ldpfl.api import RoundMetrics
from ldpfl.api.attacking import COMPARISON, SIDE_BY_SIDE, AttackPlan, Comparison, GanConfig, attack_runs
from ldpfl.cli.commands import Group
from ldpfl.cli.interrupts import Interrupts
from ldpfl.cli.linkage import linkage
from ldpfl.cli.options import DataDirOption
from ldpfl.report.attacks import attack_table, comparison_table
from ldpfl.report.terminal import terminal

app = typer.Typer(cls=Group, no_args_is_help=True, help="Attack published models or sent reports, to measure how well they are protected.")


@app.callback()
def _attack() -> None:
    """Attack published models or sent reports, to measure how well they are protected."""


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
    errors = terminal(stderr=True)

    def print_title(number: int, run: Path) -> None:
        errors.print(Text(f"{number}/{len(runs)}: {run}"), soft_wrap=True)

    watch = partial(_watched, errors, lines=not as_json)
    result = attack_runs(runs, plan, watch=watch, begins=print_title, out=out, data_dir=data_dir, device=device)
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


@contextmanager
def _watched(console: Console, *, lines: bool) -> Iterator[_Bars]:
    """Draw bars for the attack on one run; an interrupt ends it."""
    with Interrupts() as interrupts, _Bars(console, interrupts, lines=lines) as bars:
        yield bars


class _Bars:
    """Progress of an attack: in a terminal a bar for each phase, elsewhere a line at the end of each phase, or nothing."""

    def __init__(self, console: Console, interrupts: Interrupts, *, lines: bool) -> None:
        self._console, self._interrupts = console, interrupts
        self._lines = lines and not console.is_terminal
        self._progress = Progress(console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._label, self._rounds, self._round = "", 0, 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def phase(self, name: str, done: float, total: int) -> None:
        """Show how far the phase ``name`` is."""
        self._interrupts.check()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done)
        if self._lines and done == total:
            self._console.print(f"{name}: done")

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        """Begin the phase in which the same run is trained without protection."""
        self._label, self._rounds, self._round = "the same run without protection", rounds, len(done)

    def clients_done(self, done: int, total: int) -> None:
        self.phase(self._label, self._round + 0.999 * done / total, self._rounds)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._round = metrics.round
        self.phase(self._label, metrics.round, self._rounds)

    def warn(self, message: str) -> None:
        self._console.print(Text(message, style="yellow"), soft_wrap=True)
