"""Run a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ldpfl.api.arguments import Settings, checked
from ldpfl.api.configuring import overrides_by_key, setting_texts, settings_and_objects
from ldpfl.api.results import SweepResult
from ldpfl.api.running import displayed, runner_for
from ldpfl.errors import ConfigError, WriteError, error_without_data
from ldpfl.experiments.runner import Runner
from ldpfl.experiments.shipped import OWN
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, load_sweep, parse_axis, sweep_of
from ldpfl.experiments.sweep_parallel import rounds_done, run_in_parallel
from ldpfl.experiments.sweep_run import run_sweep, stored_sweep
from ldpfl.report.noise_plot import draw_noise
from ldpfl.report.plots import draw_sweep
from ldpfl.report.progress import ProgressDisplay
from ldpfl.server import RoundMetrics

SCORE_PLOT, NOISE_PLOT = "score.svg", "noise.svg"
"""Plots in a sweep's folder."""


@checked
def sweep(
    what: str | Path | SweepConfig | None = None,
    *,
    settings: Settings = (),
    folder: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str | torch.device | None = "auto",
    jobs: int = 1,
    progress: bool | ProgressDisplay = True,
    data: object = None,
    model: str | nn.Module | None = None,
    axes: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    name: str | None = None,
    **overrides: Any,
) -> SweepResult:
    """Run a recipe's variants over settings and seeds, and return a row for each. Runs that are finished in ``folder`` are not repeated.

        ldpfl.sweep(data=frame, target="outcome", client="hospital", axes={"privacy.target_epsilon": [1, 2, 4]}, seeds=3)

    Args:
        what: a sweep's name, a file (``*.toml``), or a sweep; None with ``data``, which are swept by the recipe ``own``.
        settings: changes of every run, by dotted key.
        folder: folder for the runs, ``rows.json`` and plots; without it, nothing is kept.
        resume: continue the sweep in ``folder``. Data and a model that are objects have to be given again.
        data_dir: as for :func:`run`.
        device: as for :func:`run`.
        jobs: number of runs that train at once, each in its own process on one thread; on a CPU.
        progress: as for :func:`run`.
        data: your data, as for :func:`run`.
        model: your model, as for :func:`run`.
        axes: with ``data``: by dotted key, the values of each setting that is compared. Every combination is run.
        seeds: with ``data``: number of runs of each combination, whose noise is secret; or the seed of each run.
        name: with ``data``: name of the sweep; by default it is made of the data and the compared settings.
        overrides: with ``data``: changes of every run by the last word of the key, as for :func:`run`, such as ``target``.

    Raises:
        ConfigError: there is no such sweep or setting, or a setting does not fit. Nothing was trained.
        LdpflError: as for :func:`run`, if all runs failed. Otherwise the errors are in ``failed`` of the result.
    """
    if [what is not None, data is not None and not resume, resume].count(True) != 1:
        raise ConfigError("give sweep exactly one of these: the name or file of a sweep, data, or resume with a sweep's folder")
    if resume and isinstance(data, str | Path):
        raise ConfigError("data is given with resume, but the sweep reads its data from the file that it began with: leave data out")
    model_given = model is not None and not (resume and isinstance(model, nn.Module))  # a sweep stores no module, so resume needs it
    is_given = {"axes": bool(axes), "seeds": seeds is not None, "name": name is not None, "model": model_given}
    only_with_data = [argument for argument in is_given if is_given[argument]] + list(overrides)
    if only_with_data and (what is not None or resume):
        raise ConfigError(
            f"{', '.join(only_with_data)} works only with data, because a sweep that is named, given as a file or resumed sets its "
            f"axes, seeds and model itself: leave out {' and '.join(only_with_data)}, or give data instead of a sweep"
        )
    data_settings, caller_objects = settings_and_objects(data, model)
    changes = setting_texts(settings)
    # `seeds_given`: the user chose each seed, from which the noise then follows; see `_with_secret_noise`.
    if resume:
        config, changes = _sweep_to_resume(folder, changes)
        seeds_given = True  # the stored settings have secret_noise=true if it was needed
    elif what is None:
        all_changes = [*setting_texts(data_settings), *setting_texts(overrides_by_key(sweep, overrides, OWN)), *changes]
        config, changes = sweep_of(OWN, all_changes, axes or {}, 1 if seeds is None else seeds, name), []
        seeds_given = not isinstance(config.seeds, int)  # a number of seeds leaves their choice to the sweep
    else:
        config = what if isinstance(what, SweepConfig) else load_sweep(str(what))
        is_built_in = not isinstance(what, SweepConfig) and not str(what).endswith(".toml")
        seeds_given = not isinstance(config.seeds, int) and not is_built_in  # everybody knows the seeds of a built-in sweep
    config = _with_secret_noise(config, changes, seeds_given=seeds_given)
    if jobs > 1 and (caller_objects.data is not None or caller_objects.module is not None):
        raise ConfigError(f"jobs is {jobs}, but parallel runs read data and model from files: give files instead of objects, or jobs=1")
    with displayed(progress) as display:
        runner = runner_for(data_dir, device, display, caller_objects)
        if jobs > 1 and runner.device.type != "cpu":
            raise ConfigError(f"jobs is {jobs}, but several runs at once work only on a CPU, not on {device}: set jobs to 1")
        if folder is not None:
            return _run_and_draw(config, changes, Path(folder), runner, jobs, display)
        with TemporaryDirectory() as temporary:
            return replace(_run_and_draw(config, changes, Path(temporary), runner, jobs, display), folder=None)


def sweep_config(
    name: str | None = None, *, changes: Sequence[str] = (), axes: Sequence[str] = (), seeds: int = 1, called: str | None = None
) -> SweepConfig:
    """Return the sweep called ``name``. Without a name, return a sweep over the user's data, by the recipe ``own`` with ``changes``.

    Args:
        axes: settings that are compared, as ``key=value,value``.
        seeds: number of runs of each combination.
        called: name of the sweep over the user's data.

    Raises:
        ConfigError: there is no such sweep, a change does not fit, or an axis is named twice.
    """
    if name is not None:
        return load_sweep(name)
    values_by_key: dict[str, list[Any]] = {}
    for key, values in [parse_axis(text) for text in axes]:
        if key in values_by_key:
            raise ConfigError(f"--axis names {key} twice: give all of its values in one --axis, as in KEY=VALUE,VALUE")
        values_by_key[key] = values
    return sweep_of(OWN, changes, values_by_key, seeds, called)


def _sweep_to_resume(folder: str | Path | None, changes: Sequence[str]) -> tuple[SweepConfig, list[str]]:
    """Return the sweep that was begun in ``folder``, and its overrides. Raise a ConfigError if there is none, or if it is to change."""
    if folder is None:
        raise ConfigError("resume=True needs the argument folder, which is not given: give the folder of the sweep to resume")
    if changes:
        raise ConfigError("resume uses the settings that the sweep began with: leave settings (--set) out")
    sweep = stored_sweep(Path(folder))
    if sweep is None:
        raise ConfigError(f"{folder} contains no sweep: give the folder of a sweep, as ldpfl sweep wrote it")
    return sweep


def _run_and_draw(config: SweepConfig, overrides: list[str], out: Path, runner: Runner, jobs: int, display: ProgressDisplay) -> SweepResult:
    """Run the sweep in the folder ``out`` and draw its plots. If a plot fails, only warn."""
    watched = WatchedRuns(display, runner.data_dir, jobs, lambda number, total, cell: f"{number}/{total}: {cell}")
    rows, curves, together = run_sweep(config, overrides, replace(runner, observer=watched), out, watched.begins, watched.planned)
    watched.ended()
    for name, draw in ((SCORE_PLOT, partial(draw_sweep, rows=rows)), (NOISE_PLOT, partial(draw_noise, curves=curves))):
        try:
            draw(out / name, config)
        except WriteError:
            raise
        except Exception as error:  # a failed plot must not lose the rows, which took long to train
            display.warn(f"the plot {name} was not drawn: {error_without_data(error)}")
    return SweepResult(config, tuple(rows), tuple(curves), out, together)


class WatchedRuns:
    """An observer that shows the progress of each run, and of all runs of a sweep or a tuning. With several jobs, it also starts the runs.

    Args:
        data_dir: folder with data sets, for the runs that it starts; None for the hub.
        jobs: number of runs that train at once.
        title_of: function from a run's number, the number of runs and its cell to the text that announces the run.
    """

    def __init__(self, display: ProgressDisplay, data_dir: Path | None, jobs: int, title_of: Callable[[int, int, Cell], str]) -> None:
        self._display, self._data_dir, self._jobs, self._title_of = display, data_dir, jobs, title_of
        self.clients_done, self.warn = display.clients_done, display.warn
        self._rounds: dict[str, int] = {}  # by the run's folder name: its number of rounds
        self._rounds_done: dict[str, int] = {}  # by folder name, too
        self._finished: set[str] = set()
        self._current: str | None = None  # folder name of the run that began last

    def planned(self, planned_cells: Sequence[Cell], out: Path) -> None:
        """Run the planned runs in parallel if there are several ``jobs``. Then note how far each planned run is, from its folder."""
        if self._jobs > 1:
            run_in_parallel(planned_cells, out, self._data_dir, self._jobs, self._display.runs_progress)
        self._rounds = {cell.folder_name: cell.config.training.rounds for cell in planned_cells}
        self._rounds_done = {cell.folder_name: rounds_done(cell, out) for cell in planned_cells}
        self._finished = {cell.folder_name for cell in planned_cells if cell.folder(out).is_over}

    def begins(self, number: int, total: int, cell: Cell) -> None:
        """Show that the run ``cell`` begins, the ``number``-th of ``total``, and count the one before it as finished."""
        if self._jobs == 1:  # parallel runs are finished already, and only their results are read
            self._display.next_run(self._title_of(number, total, cell))
        self.ended()
        self._current = cell.folder_name

    def ended(self) -> None:
        """Count the run that began last as finished, with all its rounds, even if it stopped earlier."""
        if self._current is not None:
            self._rounds_done[self._current] = self._rounds[self._current]
            self._finished.add(self._current)
        self._show()

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self._display.started(label, rounds, done, metric)

    def round_done(self, metrics: RoundMetrics) -> None:
        """Show a finished round, also in the count of all runs' rounds."""
        self._display.round_done(metrics)
        if self._current is not None:
            self._rounds_done[self._current] = metrics.round
        self._show()

    def _show(self) -> None:
        """Show how many of all rounds and of all runs are finished."""
        self._display.runs_progress(sum(self._rounds_done.values()), sum(self._rounds.values()), len(self._finished), len(self._rounds))


def _with_secret_noise(config: SweepConfig, overrides: Sequence[str], *, seeds_given: bool) -> SweepConfig:
    """Return the sweep with secret noise if its data are the user's own and the user gave no seeds.

    A seed that the sweep chose can be guessed. Without a secret it would determine the noise, and whoever knows it could remove the noise.
    """
    if (
        seeds_given
        or "secret_noise=true" in config.settings
        or not any(cell.config.data.brought for cell in cells(config, overrides, resolve=False))
    ):
        return config
    return config.model_copy(update={"settings": [*config.settings, "secret_noise=true"]})
