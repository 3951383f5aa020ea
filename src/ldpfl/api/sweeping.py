"""Run a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ldpfl.api.arguments import checked
from ldpfl.api.configuring import Settings, listed
from ldpfl.api.results import SweepResult
from ldpfl.api.running import displayed, runner_for
from ldpfl.errors import ConfigError, WriteError, in_short
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, load_sweep
from ldpfl.experiments.sweep_parallel import run_ahead
from ldpfl.experiments.sweep_run import run_sweep
from ldpfl.report.noise_plot import draw_noise
from ldpfl.report.plots import draw_sweep
from ldpfl.report.progress import ProgressDisplay

SCORE_PLOT, NOISE_PLOT = "score.svg", "noise.svg"
"""Plots in a sweep's folder."""


@checked
def sweep(
    what: str | Path | SweepConfig,
    *,
    settings: Settings = (),
    folder: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
    jobs: int = 1,
    progress: bool | ProgressDisplay = True,
) -> SweepResult:
    """Run a recipe's variants over settings and seeds, and return a row for each; what is finished in ``folder`` is not run again.

    Args:
        what: a sweep's name, a file (``*.toml``), or a sweep.
        settings: changes of every run, by dotted key.
        folder: where to keep the runs, ``rows.json`` and plots; without one nothing stays.
        data_dir: as for :func:`run`.
        device: as for :func:`run`.
        jobs: how many runs go on at once, each in a process of its own on one thread; on a CPU.
        progress: as for :func:`run`.

    Raises:
        ConfigError: no such sweep or setting, or one that does not fit; found before anything is trained.
        LdpflError: as for :func:`run`.
    """
    config, overrides = what if isinstance(what, SweepConfig) else load_sweep(str(what)), listed(settings)
    shipped = not isinstance(what, SweepConfig) and not str(what).endswith(".toml")
    config = _with_secret_noise(config, overrides, said="seeds" in config.model_fields_set and not shipped)
    if folder is None:
        with TemporaryDirectory() as temporary:
            return replace(_sweep(config, overrides, Path(temporary), data_dir, device, jobs, progress), folder=None)
    return _sweep(config, overrides, Path(folder), data_dir, device, jobs, progress)


def _sweep(
    config: SweepConfig,
    overrides: list[str],
    out: Path,
    data_dir: str | Path | None,
    device: str | torch.device | None,
    jobs: int,
    progress: bool | ProgressDisplay,
) -> SweepResult:
    with displayed(progress) as display:
        runner = runner_for(data_dir, device, display)
        if jobs > 1 and runner.device.type != "cpu":
            raise ConfigError(f"several runs at once are for a CPU, not for {device}: leave jobs at 1")

        def ahead(some: Sequence[Cell], out: Path) -> None:
            if jobs > 1:
                run_ahead(some, out, runner.data_dir, jobs, display.several)

        def title(number: int, of: int, cell: Cell) -> None:
            if jobs == 1:
                display.next_run(f"{number}/{of}: {cell}")

        rows, curves = run_sweep(config, overrides, runner, out, title, ahead)
        for name, draw in ((SCORE_PLOT, partial(draw_sweep, rows=rows)), (NOISE_PLOT, partial(draw_noise, curves=curves))):
            try:
                draw(out / name, config)
            except WriteError:
                raise
            except Exception as error:  # the rows are worth more than a picture of them
                display.warn(f"no {name}: {in_short(error)}")
    return SweepResult(config, tuple(rows), tuple(curves), out)


def _with_secret_noise(config: SweepConfig, overrides: Sequence[str], *, said: bool) -> SweepConfig:
    """Return the sweep with noise that follows from none of its seeds, if it is over a user's own data and the user ``said`` no seeds."""
    if (
        said
        or "secret_noise=true" in config.settings
        or not any(cell.config.data.brought for cell in cells(config, overrides, settle=False))
    ):
        return config
    return config.model_copy(update={"settings": [*config.settings, "secret_noise=true"]})
