"""How many planted faults `ldpfl audit` finds, and how often it suspects what is sound.

    python benchmarks/audit.py [--sound 200] [--trials 100000]

The faults are those of the tests (``tests/auditing/planted_faults.py``). The ``--sound`` audits are of sound mechanisms in turn, each
with a seed of its own. Each audit takes ``--trials``, but no more than `ldpfl audit` takes by itself (up to 1,000,000).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ldpfl import mechanisms
from ldpfl.auditing import audit_mechanism
from ldpfl.auditing.audit import default_trials

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "auditing"))

SOUND = ("duchi", "laplace", "piecewise", "hybrid", "harmony", "duchi-vector", "rotated-sign")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sound", type=int, default=200)
    parser.add_argument("--trials", type=int, default=100_000)
    chosen = parser.parse_args()
    console = Console(width=140)
    console.print(planted_faults_table(chosen.trials))
    alarms, longest = count_false_alarms(chosen.sound, chosen.trials)
    console.print(f"sound mechanisms: {alarms} false alarms in {chosen.sound} audits; the longest took {longest:.0f} s")


def planted_faults_table(most_trials: int) -> Table:
    """Return a table of the checks that found each planted fault, and of the seconds that they took on one core."""
    from planted_faults import FAULTS  # of the tests

    table = Table("fault", "found by", "trials", "seconds of a core", title="planted faults")
    faults_found = 0
    for name, fault in track(FAULTS.items(), "faults"):
        trials, began = min(most_trials, default_trials(fault.mechanism)), time.process_time()
        failed = audit_mechanism(fault.mechanism, trials=trials, seed=1).failures
        seconds = time.process_time() - began
        faults_found += bool(failed)
        found_by = ", ".join(dict.fromkeys(check.name.split(" at ")[0].split(",")[0] for check in failed)) or "NOT FOUND"
        table.add_row(name, found_by, f"{trials:,}", f"{seconds:.1f}")
    table.caption = f"{faults_found} of {len(FAULTS)} found"
    return table


def count_false_alarms(audits: int, trials: int) -> tuple[int, float]:
    """Return how many of ``audits`` audits of sound mechanisms failed, and the seconds that the longest took on one core."""
    alarms, longest = 0, 0.0
    for seed in track(range(audits), "sound mechanisms"):
        mechanism = mechanisms.with_defaults(SOUND[seed % len(SOUND)], 1.0)
        began = time.process_time()
        alarms += not audit_mechanism(mechanism, trials=min(trials, default_trials(mechanism)), seed=seed).passed
        longest = max(longest, time.process_time() - began)
    return alarms, longest


if __name__ == "__main__":
    main()
