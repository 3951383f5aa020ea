"""Run several runs at once, each with ``ldpfl run`` in its own process with one thread. Finished runs are not run again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ldpfl.experiments.sweep_config import Cell
from ldpfl.util import supervisor
from ldpfl.util.files import make_folder, write_text, writing

_POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the runs' progress."""

_GRACE_S = 5.0
"""Seconds that a run has for ending by itself after it is told to stop. Then it is killed."""

OnRounds = Callable[[int, int, int, int], None]
"""Called regularly with (rounds done, all rounds, runs done, all runs)."""


def rounds_done(cell: Cell, out: Path) -> int:
    """Return the number of finished rounds of ``cell`` in the sweep's folder ``out``. A run that was stopped early counts as finished."""
    folder, rounds = cell.folder(out), cell.config.training.rounds
    if folder.is_over:
        return rounds
    with suppress(OSError):
        return min(rounds, folder.metrics_path.read_bytes().count(b"\n"))
    return 0


def run_in_parallel(cells: Sequence[Cell], out: Path, data_dir: Path | None, jobs: int, on_rounds: OnRounds) -> None:
    """Run the unfinished runs of ``cells`` in the sweep's folder ``out``, ``jobs`` at once. Errors of a run are not raised here.

    The caller runs all cells one by one afterwards. It finds them finished, or meets the error that stopped them. If this function is
    interrupted, it ends its processes, and finished rounds are kept.
    """
    # Cells with equal configs share a folder, so their run is made once.
    runs = list({cell.folder_name: cell for cell in cells}.values())
    waiting = [cell for cell in runs if not cell.folder(out).is_over]
    running: list[subprocess.Popen[bytes]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start_process(waiting.pop(0), out, data_dir))
            running = [process for process in running if not _has_ended(process)]
            on_rounds(
                sum(rounds_done(cell, out) for cell in runs),
                sum(cell.config.training.rounds for cell in runs),
                sum(cell.folder(out).is_over for cell in runs),
                len(runs),
            )
            time.sleep(_POLL_INTERVAL_S)
    finally:
        _stop_all(running)


def _start_process(cell: Cell, out: Path, data_dir: Path | None) -> subprocess.Popen[bytes]:
    """Start ``ldpfl run`` for the run ``cell`` of the sweep in ``out``, or resume it, under a supervisor that ends it with this process."""
    make_folder(out / "configs", 0o700)
    config = out / "configs" / f"{cell.folder_name}.toml"
    write_text(config, cell.config.to_toml())
    has_started = cell.folder(out).config_path.exists()
    source = ["--resume"] if has_started else [str(config)]
    # -P, as in the console script: modules in the current folder are not imported.
    command = [sys.executable, "-P", "-m", "ldpfl", "run", *source, "--out", str(cell.folder(out).path)]
    command += ["--no-baseline", "--no-report", "--json", "--device", "cpu"]
    data = [] if data_dir is None else ["--data-dir", str(data_dir)]
    log_file = config.with_suffix(".log")
    with writing(out):
        log_file.unlink(missing_ok=True)  # a link in a stranger's folder could point to a file of this user, which would be overwritten
    with writing(out), log_file.open("xb") as log:
        return subprocess.Popen(
            [sys.executable, "-I", supervisor.__file__, str(_GRACE_S), *command, *data],
            stdin=subprocess.PIPE,  # the run ends when this pipe closes, however this process ends
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for this process alone
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether ``process`` has ended. If it has, close our end of its pipe."""
    if process.poll() is None:
        return False
    if process.stdin is not None:
        process.stdin.close()
    return True


def _stop_all(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the pipes of all ``running`` processes, which makes them stop, and wait until they have ended."""
    for process in running:  # first close all pipes, so that the processes stop at the same time
        if process.stdin is not None:
            process.stdin.close()
    for process in running:
        process.wait()
