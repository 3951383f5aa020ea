"""Commands that attack what a run published."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from ldpfl.attacks import GanConfig
from ldpfl.attacks.on_run import Attacker, Pictures, Plan, RunAttack
from ldpfl.cli.interrupts import Interrupts
from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.attacks import attack_table
from ldpfl.report.images import draw_image_grid, draw_side_by_side
from ldpfl.simulation import RoundMetrics

app = typer.Typer(no_args_is_help=True, help="Attack what a run published, to see what its protection is worth.")


@app.callback()
def _attack() -> None:
    """Attack what a run published, to see what its protection is worth."""


@app.command()
def gan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished simulation.")],
    label: Annotated[int | None, typer.Option(help="Class to reconstruct.", show_default="the run's data.private_label")] = None,
    images: Annotated[int, typer.Option(help="Most images in each set that is compared.")] = 500,
    steps: Annotated[int, typer.Option(help="Training steps of the attack.")] = GanConfig.steps,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the attack.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, counted up from the first.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for pictures and figures.", show_default="RUN/attacks/gan-LABEL")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder with data sets; else the hub.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print attack.json instead of a table.")] = False,
) -> None:
    """Reconstruct a class that client 0 does not hold, from a run's model and from the same run without protection.

    Start it again to go on where it was stopped: finished parts are kept.
    """
    folder = RunFolder(run)
    wanted = folder.config().data.private_label if label is None else label
    target = out or run / "attacks" / f"gan-{wanted}"
    plan = Plan(label, images, tuple(range(seed, seed + seeds)), GanConfig(steps=steps))
    with Interrupts() as interrupts, _Bars(Console(stderr=True), interrupts, lines=not as_json) as bars:
        result, pictures = Attacker(data_dir, choose_device(device), bars, bars.phase).run(folder, plan, target)
    _draw(target, pictures, result)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    console = Console()
    console.print(attack_table(result))
    console.print(Text(f"pictures of the first seed: {target / 'side-by-side.png'}"), soft_wrap=True)


def _draw(out: Path, pictures: Pictures, result: RunAttack) -> None:
    panels = [(f"real, label {result.label}", "real", pictures.real), ("unprotected", "unprotected", pictures.unprotected)]
    if pictures.protected is not None:
        panels.append((f"protected, {result.mechanism}", "protected", pictures.protected))
    for _, name, images in panels:
        draw_image_grid(out / f"{name}.png", images)
    draw_side_by_side(out / "side-by-side.png", [(heading, images) for heading, _, images in panels])


class _Bars:
    """A bar for each phase of an attack; where output is no terminal, a line when a phase is over, or nothing."""

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

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...]) -> None:
        self._label, self._rounds, self._round = "the same run without protection", rounds, len(done)

    def clients_done(self, done: int, total: int) -> None:
        self.phase(self._label, self._round + 0.999 * done / total, self._rounds)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._round = metrics.round
        self.phase(self._label, metrics.round, self._rounds)

    def warn(self, message: str) -> None:
        self._console.print(Text(message, style="yellow"), soft_wrap=True)
