"""Run a sweep in its folder, one run after the other. Finished runs are not run again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ldpfl
from ldpfl.data.holding_out import scored_part
from ldpfl.errors import ConfigError, DataError, LdpflError, PrivacyError, WriteError
from ldpfl.experiments.figures import as_released
from ldpfl.experiments.other_folders import SWEEP
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.runner import Runner
from ldpfl.experiments.secret_seed import shared_seed_warnings
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, check_cells, define_same_runs
from ldpfl.experiments.sweep_rows import Curve, JointGuarantee, Row, curves, rows
from ldpfl.privacy.accounting import account, account_together
from ldpfl.util.files import from_json, make_folder, read_text, to_json, write_text

_OVERRIDES = "overrides"

_RUNS = "runs.json"
"""File in a sweep's folder that lists the folder of each cell. Folder names depend on the data, and a report must not open the data."""

OnRun = Callable[[int, int, Cell], None]
"""Called at the start of each run with its number from 1, the number of all runs, and the run."""

Ahead = Callable[[Sequence[Cell], Path], None]
"""Called before runs are run one by one. It may finish some of them, for example in parallel."""


def run_sweep(
    sweep: SweepConfig,
    overrides: Sequence[str],
    runner: Runner,
    out: Path,
    on_run: OnRun = lambda number, runs, cell: None,
    ahead: Ahead = lambda cells, out: None,
) -> tuple[list[Row], list[Curve], JointGuarantee | None]:
    """Run all unfinished runs of ``sweep``, with ``overrides`` for every run, in the folder ``out``. Rows are saved after each run.

    An error of one run does not end the sweep, for example if the noise of one setting hides the target. The error is in the row of this
    setting, under ``failed``, and the run is tried again when the sweep is resumed.

    Raises:
        ConfigError: a run's settings do not fit together, which is checked before any run starts; or ``out`` holds another sweep, or runs
            of other rows.
        DataError: a run's files are damaged.
        WriteError: ``out`` cannot be written. Finished runs are kept.
        LdpflError: all runs failed. This is the error of the first one.
    """
    planned = cells(sweep, overrides, caller_objects=runner.caller_objects)
    check_cells(planned, runner.caller_objects)
    open_folder(sweep, overrides, out, secret=any(cell.config.data.brought for cell in planned))
    write_text(out / _RUNS, to_json([cell.folder_name for cell in planned]))
    for cell in planned:  # files that are damaged, or of another version or run, end the whole sweep, before any run starts
        _check_if_over(cell, cell.folder(out))
    # Folders of runs that an earlier call began.
    begun = {cell.folder_name for cell in planned if cell.folder(out).config_path.exists()}
    ahead(planned, out)
    results: list[tuple[Cell, dict[str, Any]]] = []
    errors: list[LdpflError] = []
    for number, cell in enumerate(planned, start=1):
        on_run(number, len(planned), cell)
        try:
            results.append((cell, run_cell(cell, runner, out)))
        except LdpflError as error:
            # Other errors concern one run. A full disk, or rows that have changed since a run began, concern the other runs too.
            if isinstance(error, WriteError) or (isinstance(error, ConfigError) and cell.folder_name in begun):
                raise
            errors.append(error)
            results.append((cell, {"failed": f"{cell}: {error}"}))
            runner.observer.warn(f"failed: {cell}: {error}")
        write_text(out / "rows.json", to_json([row.to_dict() for row in rows(results)], indent=2) + "\n")
    if len(errors) == len(planned):
        raise errors[0]
    return rows(results), curves(results, out), joint_guarantee((cell, cell.folder(out)) for cell in planned)


def run_cell(cell: Cell, runner: Runner, out: Path) -> dict[str, Any]:
    """Run or resume one cell in its own folder under ``out``, and return its figures. A finished cell is only read.

    If a run ends with a :class:`ldpfl.errors.PrivacyError`, for example because training diverged, the figures have the reason under
    ``stopped``. If rounds were finished, their bytes, time and privacy are figures as well.

    Raises:
        ConfigError: a finished run in the folder is of another config or version, or of other rows.
        LdpflError: the run fails in another way.
    """
    folder = cell.folder(out)
    _check_if_over(cell, folder)
    # A user's own rows may have changed since the run was finished. Only the runner can check that, so it gets the finished run too.
    if not cell.config.data.brought or folder.stopped() is not None:
        result = _finished_result_in(folder, cell)
        if result is not None:
            return result
    try:
        return runner.run(cell.config, folder, resume=True, baseline=False).figures
    except PrivacyError as error:  # for example, training diverged to NaN, which is a result of this setting
        write_text(folder.stopped_path, str(error))
        return {"stopped": str(error), **_figures_until_stopped(cell, folder)}


def finished_result(cell: Cell, out: Path) -> dict[str, Any] | None:
    """Return the result of :func:`run_cell` for a cell that was run before; None for a cell that is not finished.

    Raises:
        ConfigError: the folder holds a run of another config.
        DataError: a run's files are damaged.
    """
    folder = cell.folder(out)
    _check_config_if_over(cell, folder)
    return _finished_result_in(folder, cell)


def _check_if_over(cell: Cell, folder: RunFolder) -> None:
    """Raise a :class:`ConfigError` if the run in ``folder`` is over, but is not of this config, or not of this ldpfl and PyTorch."""
    _check_config_if_over(cell, folder)
    result = folder.result()
    if result is not None:
        _check_same_version(result["versions"], folder)


def _check_config_if_over(cell: Cell, folder: RunFolder) -> None:
    """Raise a :class:`ConfigError` if the run in ``folder`` is over, but its config is not that of ``cell``."""
    # A run may be stopped before its config is written. Then there is nothing to compare.
    if folder.result_path.exists() or (folder.stopped_path.exists() and folder.config_path.exists()):
        folder.check(cell.config, resume=True)


def _finished_result_in(folder: RunFolder, cell: Cell) -> dict[str, Any] | None:
    """Return the result of the run of ``cell`` in ``folder``, or the figures until a sweep stopped it early; None if it is not over.

    The guarantee is computed from the run's ledger, since the guarantee in its result file is not trusted.
    """
    result = folder.result()
    if result is not None:
        ledger = folder.ledger()
        return as_released(result, ledger, account(ledger, cell.config.privacy.delta))
    stopped = folder.stopped()
    return None if stopped is None else {"stopped": stopped, **_figures_until_stopped(cell, folder)}


def open_folder(sweep: SweepConfig, overrides: Sequence[str], out: Path, *, secret: bool = False) -> None:
    """Prepare the folder ``out`` for ``sweep`` with ``overrides``, and save both there. If ``secret``, only this user can read the folder.

    Raises:
        ConfigError: ``out`` holds a run, another sweep, or the same sweep with other overrides.
        WriteError: ``out`` cannot be written.
    """
    path, text = out / SWEEP, json.dumps({**sweep.model_dump(), _OVERRIDES: list(overrides)}, indent=1)
    if RunFolder(out).config_path.exists():
        raise ConfigError(f"{out} holds a run: choose another folder")
    if secret:  # before any file is written, since the runs' folders will hold the seeds of the noise on a user's own rows
        make_folder(out, 0o700)
        out.chmod(0o700)
    if not path.exists():
        make_folder(out)
        write_text(path, text)
    elif (stored := stored_sweep(out)) is None or not define_same_runs(*stored, sweep, overrides):
        raise ConfigError(f"{out} holds another sweep, or this one with other settings: choose another folder")


def stored_sweep(out: Path) -> tuple[SweepConfig, list[str]] | None:
    """Return the sweep that :func:`open_folder` saved in ``out``, and its overrides; None if there is none.

    Raises:
        DataError: the saved sweep is damaged.
    """
    path = out / SWEEP
    if not path.exists():
        return None
    try:
        tree = json.loads(read_text(path))
        overrides = [str(override) for override in tree.pop(_OVERRIDES)]
        return SweepConfig.model_validate(tree), overrides
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged: {getattr(error, 'strerror', None) or type(error).__name__}; remove it, and start the sweep again"
        ) from error


def joint_guarantee(runs: Iterable[tuple[Cell, RunFolder]]) -> JointGuarantee | None:
    """Return the joint guarantee of all runs over a user's own data; None without such runs. Each run is a release on the same rows.

    Raises:
        DataError: a ledger is damaged or missing.
    """
    runs_on_user_data = {folder.path: (cell, folder) for cell, folder in runs if cell.config.data.brought and folder.has_released()}
    if not runs_on_user_data:
        return None
    # The largest delta, because a statement has one delta for all runs.
    delta = max(cell.config.privacy.delta for cell, _ in runs_on_user_data.values())
    statement = account_together([folder.ledger() for _, folder in runs_on_user_data.values()], delta)
    warnings = shared_seed_warnings(cell.config for cell, _ in runs_on_user_data.values())
    part = scored_part(*(cell.config.data.evaluate_on for cell, _ in runs_on_user_data.values()))
    return JointGuarantee(len(runs_on_user_data), replace(statement, warnings=(*statement.warnings, *warnings)), part)


def stored_runs(sweep: SweepConfig, overrides: Sequence[str], out: Path) -> list[tuple[Cell, RunFolder]]:
    """Return all runs of ``sweep``, also those that have not started, and their folders in ``out``.

    The folder may be somebody else's. So no file or code that its configs name is opened or run.

    Raises:
        DataError: the list of the runs' folders is damaged.
    """
    planned = cells(sweep, overrides, resolve=False)
    path = out / _RUNS
    try:
        # A sweep without the list has started no run. A folder "none" never exists, so each run counts as not started.
        names = from_json(read_text(path)) if path.exists() else ["none"] * len(planned)
        if len(names) != len(planned) or not all(re.fullmatch("[0-9a-z]+", name) for name in names):
            raise ValueError("each must be the name of a folder, without '/' or '..'")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is damaged: {getattr(error, 'strerror', None) or type(error).__name__}; remove it, and start the sweep again"
        ) from error
    folders = [RunFolder(out / "runs" / name) for name in names]
    return [
        (_with_stored_config(cell, folder, sweep) if folder.config_path.exists() else cell, folder)
        for cell, folder in zip(planned, folders, strict=True)
    ]


def _with_stored_config(cell: Cell, folder: RunFolder, sweep: SweepConfig) -> Cell:
    """Return ``cell`` with the config of its run in ``folder``, in which the sweep's values "auto" are filled in.

    Raises:
        DataError: a setting that the sweep varies differs: the folder is that of another run.
    """
    stored = folder.config()
    ours, theirs = cell.config.by_key(), stored.by_key()
    other = [key for key in sweep.axes if ours.get(key) not in (theirs.get(key), "auto")]
    if other:
        key = other[0]
        raise DataError(
            f"{folder.path} has {key} = {theirs.get(key)!r}, and the sweep lists it as the run with {ours.get(key)!r}: restore the sweep's "
            "folder from a backup, or start the sweep in a new one"
        )
    return replace(cell, config=stored)


def stored_results(runs: Sequence[tuple[Cell, RunFolder]]) -> list[tuple[Cell, dict[str, Any]]]:
    """Return the results of the finished ``runs``, see :func:`stored_runs`.

    Raises:
        DataError: a run's files are damaged.
    """
    results = ((cell, _finished_result_in(folder, cell)) for cell, folder in runs)
    return [(cell, result) for cell, result in results if result is not None]


def _check_same_version(versions: dict[str, str], folder: RunFolder) -> None:
    """Raise a :class:`ConfigError` if the ``versions`` that made the finished run in ``folder`` are not those of this ldpfl and PyTorch."""
    for name, current in (("ldpfl", ldpfl.__version__), ("torch", torch.__version__)):
        if versions.get(name) != current:
            raise ConfigError(
                f"{folder.path} was run with {name} {versions.get(name)}, but this is {name} {current}: choose another folder for the sweep"
            )


def _figures_until_stopped(cell: Cell, folder: RunFolder) -> dict[str, Any]:
    """Return the bytes, time and privacy of the finished rounds of a run that was stopped early; an empty dict if there are none."""
    checkpoint = folder.checkpoint()
    if checkpoint is None or not checkpoint.history:
        return {}
    return {
        "uplink_bytes_per_client_round": max(metrics.uplink_bytes_per_client for metrics in checkpoint.history),
        "seconds": sum(metrics.seconds for metrics in checkpoint.history),
        "privacy": account(folder.ledger(), cell.config.privacy.delta).to_dict(),
    }
