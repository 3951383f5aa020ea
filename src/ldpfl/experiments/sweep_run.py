"""Run a sweep in its folder, a run after the other; what is finished is not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ldpfl
from ldpfl.errors import ConfigError, DataError, PrivacyError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.run_folder import SWEEP, RunFolder
from ldpfl.experiments.runner import Runner
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, check_cells
from ldpfl.experiments.sweep_rows import Curve, Row, curves, rows
from ldpfl.files import make_folder, read_text, to_json, write_text
from ldpfl.privacy import Ledger
from ldpfl.privacy.statement import account

_OVERRIDES = "overrides"

OnRun = Callable[[int, int, Cell], None]
"""Called with (number of a run, from 1; how many there are; the run) when it begins."""


Ahead = Callable[[Sequence[Cell], Path], None]
"""Brings some runs to their end before they are run one by one, in any way it likes."""


def run_sweep(
    sweep: SweepConfig,
    overrides: Sequence[str],
    runner: Runner,
    out: Path,
    on_run: OnRun = lambda number, of, cell: None,
    ahead: Ahead = lambda cells, out: None,
) -> tuple[list[Row], list[Curve]]:
    """Run what is not finished yet of ``sweep``, with ``overrides`` of every run, in ``out``; the rows are written down after each run.

    Raises:
        ConfigError: a run's settings do not fit together, which is found before any begins; or ``out`` holds another sweep.
        DataError: a run's files are damaged.
        WriteError: ``out`` cannot be written; what is finished is kept.
    """
    todo = cells(sweep, overrides)
    check_cells(todo)
    open_folder(sweep, overrides, out, secret=any(cell.config.data.brought for cell in todo))
    ahead(todo, out)
    results: list[tuple[Cell, dict[str, Any]]] = []
    for number, cell in enumerate(todo, start=1):
        on_run(number, len(todo), cell)
        results.append((cell, run_cell(cell, runner, out)))
        write_text(out / "rows.json", to_json([row.to_dict() for row in rows(results)], indent=2) + "\n")
    return rows(results), curves(results, out)


def run_cell(cell: Cell, runner: Runner, out: Path) -> dict[str, Any]:
    """Run one cell in its own folder under ``out``, or go on with it, or read its result if it is finished.

    A run that could not be finished because a client's values must not leave gives ``stopped``, the reason, and the bytes, time
    and privacy of its finished rounds, if there are any.

    Raises:
        ConfigError: a finished run in the folder comes from another version.
    """
    folder, known = cell.folder(out), finished(cell, out)
    if known is not None:
        if "stopped" not in known:
            _check_same_version(known["versions"], folder)
        return known
    try:
        return runner.run(cell.config, folder, resume=True, baseline=False).figures
    except PrivacyError as error:  # training went to NaN, for instance: that is a result of this setting
        write_text(folder.stopped_path, str(error))
        return {"stopped": str(error), **_figures_until_stopped(cell, folder)}


def finished(cell: Cell, out: Path) -> dict[str, Any] | None:
    """Return what :func:`run_cell` returns of a cell that was run; None of one that is still to be run, or to be gone on with.

    Raises:
        DataError: a run's files are damaged.
    """
    folder = cell.folder(out)
    result = folder.result()
    if result is not None:
        return result
    stopped = folder.stopped()
    return None if stopped is None else {"stopped": stopped, **_figures_until_stopped(cell, folder)}


def open_folder(sweep: SweepConfig, overrides: Sequence[str], out: Path, *, secret: bool = False) -> None:
    """Make ``out`` ready for ``sweep`` with ``overrides``, both of which are written down there; for this user alone if it is ``secret``.

    Raises:
        ConfigError: it holds a run, another sweep, or the same one with other overrides.
        WriteError: it cannot be written.
    """
    path, text = out / SWEEP, json.dumps({**sweep.model_dump(), _OVERRIDES: list(overrides)}, indent=1)
    if RunFolder(out).config_path.exists():
        raise ConfigError(f"{out} holds a run: choose another folder")
    if secret:  # before anything stands in it: the seeds that the noise on somebody's own rows follows from
        make_folder(out, 0o700)
        out.chmod(0o700)
    if not path.exists():
        make_folder(out)
        write_text(path, text)
    elif path.read_bytes() != text.encode():
        raise ConfigError(f"{out} holds another sweep, or this one with other settings: choose another folder")


def stored_sweep(out: Path) -> tuple[SweepConfig, list[str]] | None:
    """Return the sweep that :func:`open_folder` wrote down in ``out``, and its overrides; None if there is none.

    Raises:
        DataError: what stands there is damaged.
    """
    path = out / SWEEP
    if not path.exists():
        return None
    try:
        tree = json.loads(read_text(path))
        overrides = [str(override) for override in tree.pop(_OVERRIDES)]
        return SweepConfig.model_validate(tree), overrides
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}; remove it, and start the sweep again") from error


def stored_results(sweep: SweepConfig, overrides: Sequence[str], out: Path) -> list[tuple[Cell, dict[str, Any]]]:
    """Return what is finished in ``out``, which may be somebody else's: nothing that its configs name is opened or run.

    What each run guarantees is computed from its ledger; what its file says beside it is not repeated.

    Raises:
        DataError: a run's files are damaged.
    """
    folders = [RunFolder(path) for path in sorted((out / "runs").glob("*")) if path.is_dir()]
    runs = {_as_written(config): (config, folder) for folder in folders for config in [folder.config()]}
    results = []
    for cell in cells(sweep, overrides, settle=False):
        config, folder = runs.get(_as_written(cell.config), (cell.config, cell.folder(out)))
        found = finished(own := replace(cell, config=config), out)
        if found is not None:
            ledger = folder.ledger() if folder.ledger_path.exists() else Ledger()
            results.append((own, {**found, "privacy": account(ledger, config.privacy.delta).to_dict()}))
    return results


def _as_written(config: RunConfig) -> str:
    """Return a config without what its data and its target decide, see :func:`ldpfl.experiments.calibration.settled`."""
    if config.privacy.target_epsilon != "off":
        config = config.model_copy(update={"mechanism": config.mechanism.at_strength(1.0)})
    if config.data.brought:
        config = config.model_copy(update={"clients": config.clients.model_copy(update={"count": 1})})
    return config.to_toml()


def _check_same_version(versions: dict[str, str], folder: RunFolder) -> None:
    for name, ours in (("ldpfl", ldpfl.__version__), ("torch", torch.__version__)):
        if versions.get(name) != ours:
            raise ConfigError(f"{folder.path} was run with {name} {versions.get(name)}, this is {ours}: choose another folder")


def _figures_until_stopped(cell: Cell, folder: RunFolder) -> dict[str, Any]:
    checkpoint = folder.checkpoint()
    if checkpoint is None or not checkpoint.history:
        return {}
    return {
        "uplink_bytes_per_client_round": max(metrics.uplink_bytes_per_client for metrics in checkpoint.history),
        "seconds": sum(metrics.seconds for metrics in checkpoint.history),
        "privacy": account(checkpoint.ledger, cell.config.privacy.delta).to_dict(),
    }
