"""Make a table or figure of a paper again."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import ldpfl
from ldpfl.api.arguments import Settings, checked
from ldpfl.api.configuring import setting_texts
from ldpfl.api.results import ReproductionResult
from ldpfl.api.running import displayed, runner_for
from ldpfl.api.sweeping import sweep
from ldpfl.attacks.gan import GanConfig
from ldpfl.attacks.on_run import Attacker, AttackPlan
from ldpfl.attacks.on_sweep import attack_sweep, distances_of
from ldpfl.errors import ConfigError, LdpflError
from ldpfl.experiments.reproduction import ReproducedRow, SizeName, load_reproduction, reproduced_rows
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, load_sweep
from ldpfl.experiments.sweep_run import open_folder, stored_sweep
from ldpfl.report.progress import ProgressDisplay
from ldpfl.report.reproduction import draw_reproduction, tidy, to_csv
from ldpfl.simulation.workers import cores
from ldpfl.util.files import to_json, write_text
from ldpfl.util.number_format import format_duration

TABLE, PLOT, ABOUT = "table.csv", "plot.svg", "about.json"
"""Files in the folder of a reproduced table or figure, beside its runs."""


@checked
def reproduce(
    name: str,
    *,
    size: SizeName = "desk",
    settings: Settings = (),
    folder: str | Path | None = None,
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    train: bool = True,
    progress: bool | ProgressDisplay = True,
) -> ReproductionResult:
    """Run the experiments of a paper's table or figure. Return our figures beside the paper's, and the proved bounds.

        ldpfl.reproduce("ldp-fl/fig5", folder="runs/fig5").to_dataframe()

    Args:
        name: name of the table or figure, such as ``ldp-fl/table1``.
        size: ``desk`` takes minutes to hours on two cores; ``paper`` has as many data, clients and rounds as the paper.
        settings: changes of every run, by dotted key.
        folder: folder for the runs, ``table.csv``, ``plot.svg`` and ``about.json``. Runs that are finished there are not run again.
        data_dir: as for :func:`run`.
        jobs: number of runs that train at once; by default the number of cores.
        train: whether to run anything; if false, the table has only the runs that are finished.
        progress: as for :func:`run`.

    Raises:
        ConfigError: there is no such table or figure, it is not made at this size, or a setting does not fit.
        LdpflError: as for :func:`run`.
        KeyboardInterrupt: training was interrupted. The files about the finished runs are written before.
    """
    reproduction = load_reproduction(name).model_copy(update={"changed": ", ".join(setting_texts(settings))})
    at_size = reproduction.at_size(name, size)
    config, overrides = load_sweep(at_size.sweep), [*at_size.settings, *setting_texts(settings)]
    # None: the table shows no distances of an attack.
    plan = AttackPlan(images=at_size.images, gan=GanConfig(steps=at_size.steps)) if reproduction.shows == "distance" else None
    if folder is None:
        with TemporaryDirectory() as temporary:
            # Without a folder, the runs are made in a temporary one, which the returned result must not name.
            result = reproduce(
                name, size=size, settings=settings, folder=temporary, data_dir=data_dir, jobs=jobs, train=train, progress=progress
            )
            return ReproductionResult(name, size, reproduction, config, result.rows, folder=None)
    if any(cell.config.data.brought for cell in cells(config, overrides, resolve=False)):
        raise ConfigError(
            f"the settings given for {name} would replace the paper's data, but a reproduction needs that data: for your own data "
            "use ldpfl.sweep"
        )
    out = Path(folder)
    try:
        if train:
            workers = cores() if jobs is None else jobs
            with displayed(progress) as display:
                made = sweep(config, settings=overrides, folder=out, data_dir=data_dir, device="cpu", jobs=workers, progress=display)
                if made.failed:
                    raise LdpflError(f"{made.failed[0]}; the other runs are finished: rerun the same command to try this one again")
                if plan is not None:
                    _attack(config, overrides, out, data_dir, plan, display)
        else:
            open_folder(config, overrides, out)
    finally:  # finished runs are written even if another run failed or was interrupted
        stored = stored_sweep(out)
        # The folder may hold another sweep, to which nothing must be written.
        if stored is not None and (stored[0].model_dump(), stored[1]) == (config.model_dump(), overrides):
            result = ReproductionResult(name, size, reproduction, config, tuple(_finished_rows(config, overrides, out, plan)), out)
            _write(result, overrides, setting_texts(settings))
    return result


def _attack(
    config: SweepConfig, overrides: list[str], out: Path, data_dir: str | Path | None, plan: AttackPlan, display: ProgressDisplay
) -> None:
    """Attack each finished run of the sweep that was not attacked yet."""
    runner = runner_for(data_dir, "cpu", display)
    attacker = Attacker(runner.data_dir, runner.device, display, display.phase)
    attack_sweep(cells(config, overrides), out, attacker, plan, AttackTitles(display).begins)


class AttackTitles:
    """Printer of a title for each attack, with the time left, which is estimated by the mean duration of the earlier attacks."""

    def __init__(self, display: ProgressDisplay, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._started_at: float | None = None

    def begins(self, number: int, total: int, cell: Cell) -> None:
        """Show that the attack with this ``number``, from 1 to ``total``, begins."""
        now, done = self._clock(), number - 1
        if self._started_at is None:
            self._started_at = now
        time_left = f", about {format_duration((now - self._started_at) / done * (total - done))} left" if done else ""
        self._display.next_run(f"attack {number}/{total}: {cell}{time_left}")


def _finished_rows(config: SweepConfig, overrides: list[str], out: Path, plan: AttackPlan | None) -> list[ReproducedRow]:
    """Return the table's rows, with the figures of the runs that are finished. With a ``plan`` they are distances of the attacks."""
    if plan is None:
        return reproduced_rows(config, overrides, out)
    return reproduced_rows(config, overrides, out, lambda folder: distances_of(folder, plan) or ())  # (): the run was not attacked yet


def _write(result: ReproductionResult, overrides: list[str], user_settings: list[str]) -> None:
    """Write the table, the plot, and a description of how they were made."""
    reproduction, out = result.reproduction, result.folder
    assert out is not None  # noqa: S101  # for mypy: only a result with a folder is written
    write_text(out / TABLE, to_csv(tidy(reproduction, result.sweep, result.rows)))
    draw_reproduction(out / PLOT, reproduction, result.sweep, result.rows)
    write_text(out / ABOUT, to_json(_about_json(result, overrides, user_settings), indent=2) + "\n")


def _about_json(result: ReproductionResult, overrides: list[str], user_settings: list[str]) -> dict[str, Any]:
    """Return the content of ``about.json``: the source, the command, the settings, seeds and versions."""
    reproduction, config = result.reproduction, result.sweep
    changes = "".join(f" --set {shlex.quote(setting)}" for setting in user_settings)
    return {
        "name": result.name,
        "size": result.size,
        "source": reproduction.source,
        "differs": reproduction.differs,
        "command": f"ldpfl reproduce {result.name} --size {result.size}{changes}",
        "recipe": config.recipe,
        "sweep": config.name,
        "settings": overrides,
        "seeds": config.each_seed,
        "commit": _commit(),
        "versions": {"ldpfl": ldpfl.__version__, "torch": torch.__version__},
    }


def _commit() -> str | None:
    """Return the git commit of this code, with ``+`` if the code was changed since; None if it is not in a checkout."""
    here = str(Path(ldpfl.__file__).parent)
    if not (Path(here).parents[1] / ".git").exists():  # an installed package may lie within somebody else's checkout
        return None
    try:
        head = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "-C", here, "status", "--porcelain", "."], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")
