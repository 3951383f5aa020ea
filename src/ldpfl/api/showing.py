"""Read the folder of a run or a sweep: its result, or its progress so far."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ldpfl.data.loading import is_bundled
from ldpfl.errors import printable
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.figures import as_released, metric_before_data
from ldpfl.experiments.run_folder import TRIAL, Kind, RunFolder
from ldpfl.experiments.sweep_config import SweepConfig, cells
from ldpfl.experiments.sweep_run import stored_runs, stored_sweep
from ldpfl.privacy.accounting import account
from ldpfl.report.methods import methods
from ldpfl.util.user_code import GIVEN


@dataclass(frozen=True)
class FinishedRun:
    """A run that has a result.

    Attributes:
        folder: the run's folder.
        result: content of ``result.json``, with privacy figures computed from the ledger.
        flower: kind of the run on Flower, in words; empty for a simulation.
        methods: a paragraph for a paper or an ethics board. Empty for a trial of a tuning, because the tuning costs more than one trial.
    """

    folder: Path
    result: dict[str, Any]
    flower: str
    methods: str


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that has no result.

    Attributes:
        folder: the run's folder.
        name: its name.
        kind: kind of the run, in words: a simulation, or a kind of app on Flower.
        on_flower: whether it runs on Flower.
        own_app: whether a user wrote its app. Then only the app knows whether the run is finished.
        done, rounds: number of finished rounds, and number of rounds in its config.
        stopped: reason why the run was given up; None if it was not.
        score: name and value of the score after the last round; None if no round was measured.
        released: whether there is a ledger.
        device: device that the run began on, if another one would be chosen now; else ``auto``.
        handed_over: whether its data were Python objects, which have no name.
        looked_up: name of the data set if it is looked for on the hub unless a data folder is given; else None.
    """

    folder: Path
    name: str
    kind: str
    on_flower: bool
    own_app: bool
    done: int
    rounds: int
    stopped: str | None
    score: tuple[str, float] | None
    released: bool
    device: str
    handed_over: bool
    looked_up: str | None


@dataclass(frozen=True)
class StoredSweep:
    """A sweep in its folder.

    Attributes:
        folder: the sweep's folder.
        name: its name.
        runs: total number of runs.
        done, stopped: number of runs that are finished, and number that were given up.
        first: folder of its first run; None if no run has begun.
    """

    folder: Path
    name: str
    runs: int
    done: int
    stopped: int
    first: Path | None


def show(folder: str | Path) -> FinishedRun | UnfinishedRun | StoredSweep:
    """Return the result or the progress of a run or a sweep.

    Code and files that the folder names are neither run nor opened, because the folder may be somebody else's.

    Raises:
        ConfigError: the folder holds neither a run nor a sweep.
        DataError: a file is damaged.
    """
    path = Path(folder)
    stored = stored_sweep(path)
    if stored is not None:
        return _stored_sweep(path, *stored)
    run_folder = RunFolder(path)
    run_config, kind, result = run_folder.config(), run_folder.kind(), run_folder.result()
    if result is None:
        return _unfinished_run(run_folder, run_config, kind)
    ledger = run_folder.ledger()
    statement = account(ledger, run_config.privacy.delta)
    if run_folder.is_trial:
        statement = replace(statement, warnings=(TRIAL, *statement.warnings))
    result = as_released(result, ledger, statement)
    paragraph = "" if run_folder.is_trial else methods(run_config, result, ledger, statement, kind)
    return FinishedRun(path, result, str(kind) if kind.on_flower else "", paragraph)


def resume_sweep_command(folder: Path) -> str:
    """Return the command that resumes the sweep in ``folder``, made printable because somebody else may have named the folder."""
    return printable(f"ldpfl sweep --resume --out {shlex.quote(str(folder))}")


def _stored_sweep(path: Path, config: SweepConfig, overrides: list[str]) -> StoredSweep:
    """Return how far the sweep in the folder ``path`` has come."""
    count = len({cell.folder_name for cell in cells(config, overrides, resolve=False)})  # cells with equal settings share a run
    paths = sorted({run.path for _, run in stored_runs(config, overrides, path)})
    runs = [RunFolder(run_path) for run_path in paths if run_path.is_dir()]
    done = sum(run.result() is not None for run in runs)
    stopped = sum(run.stopped() is not None for run in runs)
    return StoredSweep(path, config.name, runs=count, done=done, stopped=stopped, first=runs[0].path if runs else None)


def _unfinished_run(run_folder: RunFolder, config: RunConfig, kind: Kind) -> UnfinishedRun:
    """Return the progress of a run without a result."""
    stopped, last = run_folder.stopped(), run_folder.checkpoint()
    score = last.history[-1].score if last is not None and last.history else nan
    # An origin ends in "on DEVICE" or "on DEVICE, compiled". A run resumes only on the kind of device that it began on.
    first_device = last.origin.rpartition(" on ")[2].partition(",")[0] if last else ""
    is_from_hub = not (config.data.brought or is_bundled(config.data.name))
    return UnfinishedRun(
        folder=run_folder.path,
        name=config.name,
        kind=str(kind),
        on_flower=kind.on_flower,
        own_app=kind is Kind.OWN_APP,
        done=last.state.round if last else 0,
        rounds=config.training.rounds,
        stopped=stopped,
        score=(metric_before_data(config, kind), score) if isfinite(score) else None,
        released=run_folder.ledger_path.exists(),
        device=first_device if first_device in ("cpu", "cuda") and first_device != choose_device("auto").type else "auto",
        handed_over=config.data.name == GIVEN and not config.data.path,
        looked_up=config.data.name if is_from_hub else None,
    )
