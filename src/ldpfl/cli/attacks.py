"""Commands that attack what a run published."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ldpfl.attacks import GanConfig
from ldpfl.attacks.compare import AttackedRun, Comparison, check_runs, compared
from ldpfl.attacks.on_run import Attacker, AttackImages, AttackPlan, RunAttack, attack_folder, make_folder
from ldpfl.cli.commands import Group
from ldpfl.cli.interrupts import Interrupts
from ldpfl.cli.linkage import linkage
from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.files import write_text
from ldpfl.report.attacks import attack_table, comparison_table
from ldpfl.report.images import draw_image_grid, draw_side_by_side
from ldpfl.report.terminal import terminal
from ldpfl.server import RoundMetrics

_SIDE_BY_SIDE = "side-by-side.png"
_COMPARISON = "comparison.json"
_SHOWN = 64

app = typer.Typer(cls=Group, no_args_is_help=True, help="Attack what is published or sent, to see what protection is worth.")


@app.callback()
def _attack() -> None:
    """Attack what is published or sent, to see what protection is worth."""


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
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder of data sets; else the Hugging Face hub")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Reconstruct a class that client 0 does not hold, from a run's model and from the same run without protection.

    Several runs are attacked each in its own folder, and compared: runs that differ only in their seed are one line of the table.

    Start it again to go on where it was stopped: finished parts are kept.
    """
    plan = AttackPlan(label, images, tuple(range(seed, seed + seeds)), GanConfig(steps=steps))
    folders = [RunFolder(run) for run in runs]
    session = _Session(data_dir, choose_device(device), terminal(stderr=True), lines=not as_json)
    if len(folders) == 1:
        target = out or attack_folder(folders[0], label)
        result, _ = session.attack(folders[0], plan, target)
        _show(result.to_dict(), attack_table(result), f"pictures of the first seed: {target / _SIDE_BY_SIDE}", as_json=as_json)
        return
    if out is None:
        raise ConfigError("several runs need --out, the folder of their comparison")
    comparison = _compare(session, folders, plan, out)
    text = f"comparison: {out / _COMPARISON}; first run of each line: {out / _SIDE_BY_SIDE}"
    _show(comparison.to_dict(), comparison_table(comparison), text, as_json=as_json)


def _compare(session: _Session, folders: list[RunFolder], plan: AttackPlan, out: Path) -> Comparison:
    check_runs(folders, plan)
    make_folder(out)
    attacked: list[AttackedRun] = []
    pictures: dict[Path, AttackImages] = {}
    for number, folder in enumerate(folders, start=1):
        session.console.print(Text(f"{number}/{len(folders)}: {folder.path}"), soft_wrap=True)
        result, drawn = session.attack(folder, plan, attack_folder(folder, plan.label))
        pictures[folder.path] = _few(drawn)
        attacked.append(AttackedRun(folder.path, folder.config(), result))
    comparison = compared(attacked)
    write_text(out / _COMPARISON, json.dumps(comparison.to_dict(), indent=2) + "\n")
    draw_side_by_side(out / _SIDE_BY_SIDE, _panels(comparison, pictures))
    return comparison


def _few(pictures: AttackImages) -> AttackImages:
    """Return as many as a panel shows, so that those of many runs need little memory."""
    protected = None if pictures.protected is None else pictures.protected[:_SHOWN].clone()
    return AttackImages(pictures.real[:_SHOWN].clone(), protected, pictures.unprotected[:_SHOWN].clone())


def _panels(comparison: Comparison, pictures: dict[Path, AttackImages]) -> list[tuple[str, Tensor]]:
    """Return real images, then for each line of attacks those of its first run; the unprotected models come before the others."""
    attacks = sorted((line for line in comparison.lines if line.accuracies), key=lambda line: line.row.kind == "protected")
    shown = [(line.name, pictures[line.runs[0]], line.row.kind) for line in attacks]
    panels = [(name, found.unprotected if kind == "unprotected" else found.protected) for name, found, kind in shown]
    return [(f"real, label {comparison.label}", shown[0][1].real), *((name, images) for name, images in panels if images is not None)]


def _show(figures: dict[str, Any], table: Table, hint: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = terminal()
    console.print(table)
    console.print(Text(hint), soft_wrap=True)


@dataclass(frozen=True)
class _Session:
    """Attacks run after run, with bars for each."""

    data_dir: Path | None
    device: torch.device
    console: Console
    lines: bool

    def attack(self, folder: RunFolder, plan: AttackPlan, target: Path) -> tuple[RunAttack, AttackImages]:
        """Attack one run and draw its pictures."""
        with Interrupts() as interrupts, _Bars(self.console, interrupts, lines=self.lines) as bars:
            result, pictures = Attacker(self.data_dir, self.device, bars, bars.phase).run(folder, plan, target)
        _draw(target, pictures, result)
        return result, pictures


def _draw(out: Path, pictures: AttackImages, result: RunAttack) -> None:
    panels = [(f"real, label {result.label}", "real", pictures.real), ("unprotected", "unprotected", pictures.unprotected)]
    if pictures.protected is not None:
        panels.append((f"protected, {result.mechanism}", "protected", pictures.protected))
    for _, name, images in panels:
        draw_image_grid(out / f"{name}.png", images)
    draw_side_by_side(out / _SIDE_BY_SIDE, [(heading, images) for heading, _, images in panels])


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

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self._label, self._rounds, self._round = "the same run without protection", rounds, len(done)

    def clients_done(self, done: int, total: int) -> None:
        self.phase(self._label, self._round + 0.999 * done / total, self._rounds)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._round = metrics.round
        self.phase(self._label, metrics.round, self._rounds)

    def warn(self, message: str) -> None:
        self._console.print(Text(message, style="yellow"), soft_wrap=True)
