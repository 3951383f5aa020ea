"""Time and tightness of the shuffled accountant: attained and certified epsilon of whole runs, one core.

    taskset -c 0 python benchmarks/accounting.py [--largest]

``--largest`` adds the settings with 1e7 and 1e8 clients, which take about half a minute together.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.table import Table

from ldpfl.number_format import number
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled import shuffled_losses
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, shuffled_epsilon

DELTA = 1e-5

_HEADINGS = (
    "clients",
    "epsilon a bit",
    "bits x rounds",
    "local",
    "attained",
    "certified",
    "adaptive",
    "gap",
    "adaptive gap",
    "seconds",
)

SETTINGS = (
    ShuffledRounds(1.0, 100, 21_840, 1),
    ShuffledRounds(1.0, 100, 21_840, 10),
    ShuffledRounds(4.0, 200, 21_840, 15),
    ShuffledRounds(10.0, 500, 307_498, 15),
    ShuffledRounds(0.1, 60_000, 21_840, 10),
    ShuffledRounds(1.0, 278_000, 21_840, 10),
)
LARGEST = (ShuffledRounds(1.0, 10**7, 10**8, 10), ShuffledRounds(1.0, 10**8, 10**9, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", action="store_true")
    settings = SETTINGS + (LARGEST if parser.parse_args().largest else ())
    table = Table(title=f"central epsilon of a whole run, delta {DELTA:g}, ideal shuffler")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for setting in settings:
        shuffled_losses.cache_clear()
        began = time.perf_counter()
        found = shuffled_epsilon([setting], DELTA)
        seconds = time.perf_counter() - began
        table.add_row(
            f"{setting.clients:,}",
            f"{setting.epsilon0:g}",
            f"{setting.reports:,} x {setting.rounds}",
            number(composed_epsilon(setting.epsilon0, setting.releases, DELTA)),
            f"{found.lower:.7g}",
            f"{found.upper:.7g}",
            f"{found.adaptive:.7g}",
            f"{found.upper / found.lower - 1:.2%}",
            f"{found.adaptive / found.lower - 1:.2%}",
            f"{seconds:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
