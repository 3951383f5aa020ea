"""What one waits for a plan, an account or a page: whole processes on one core, the fastest of some.

python benchmarks/starting.py [--times 3]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from ldpfl.privacy import BinaryRelease, Ledger, RoundEvent
from ldpfl.privacy.events import OURS

COMMANDS = {
    "--version": "--version",
    "plan --help": "plan --help",
    "plan, forwards": "plan --epsilon 1 --clients 1000",
    "plan, 100,000 clients": "plan --epsilon 1 --clients 100000",
    "plan, clients for a target": "plan --epsilon 1 --target-central 4",
    "plan, epsilon for a target": "plan --clients 10000 --target-central 4",
    "ledger of one file": "ledger ledger.json",
    "verify": "verify certificate.json",
    "page of a plan": "report plan.json --out plan.html",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    times = parser.parse_args().times
    table = Table(title="whole processes", title_justify="left")
    for heading in ("command", "seconds", "seconds of the processor"):
        table.add_column(heading, justify="left" if heading == "command" else "right")
    with TemporaryDirectory() as folder:
        release = BinaryRelease("duchi", 1.0, 100, author=OURS)
        Ledger().charge(RoundEvent(1, release, 1000, 1000, 1)).save(Path(folder, "ledger.json"))
        run_command(folder, "certify ledger.json")
        Path(folder, "plan.json").write_text(run_command(folder, "plan --epsilon 1 --clients 1000 --json")[0])
        for name, command in COMMANDS.items():
            times_of_runs = [run_command(folder, command)[1:] for _ in range(times)]
            wall, busy = (min(column) for column in zip(*times_of_runs, strict=True))
            table.add_row(name, f"{wall:.2f}", f"{busy:.2f}")
    Console().print(table)


def run_command(folder: str, command: str) -> tuple[str, float, float]:
    """Run ``ldpfl command``. Return its output, its seconds by the clock, and its seconds of processor time."""
    processor_before, start = children_processor_s(), time.perf_counter()
    finished = subprocess.run(
        [sys.executable, "-m", "ldpfl", *command.split()],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise SystemExit(f"ldpfl {command}: {finished.stderr or finished.stdout}")
    seconds = time.perf_counter() - start
    return finished.stdout, seconds, children_processor_s() - processor_before


def children_processor_s() -> float:
    """Return the processor time of all ended child processes, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
