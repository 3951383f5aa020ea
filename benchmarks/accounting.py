"""Time and tightness of the shuffled accountant: attained and certified epsilon of whole runs, one core.

    taskset -c 0 python benchmarks/accounting.py [--largest] [--vectors]

``--largest`` adds the settings with 1e7 and 1e8 clients, which take about half a minute together. ``--vectors`` is about whole vectors with
Gaussian noise instead of bits.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from math import sqrt

from rich.console import Console
from rich.table import Table

from ldpfl.privacy.accountants.gaussian import gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import shuffled_losses
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, attained_epsilon, certified_epsilon
from ldpfl.privacy.accountants.shuffled_gaussian import Vectors, shuffled_gaussian_attained, shuffled_gaussian_epsilon
from ldpfl.util.number_format import number

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
    parser.add_argument("--vectors", action="store_true")
    chosen = parser.parse_args()
    Console(width=140).print(vectors_table() if chosen.vectors else bits_table(SETTINGS + (LARGEST if chosen.largest else ())))


def bits_table(settings: tuple[ShuffledRounds, ...]) -> Table:
    """Return a table of the epsilons of runs that send bits."""
    table = Table(title=f"central epsilon of a whole run, delta {DELTA:g}, ideal shuffler")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for setting in settings:
        shuffled_losses.cache_clear()
        began = time.perf_counter()
        upper, adaptive = certified_epsilon([setting], DELTA)
        attained = attained_epsilon([setting], DELTA)
        seconds = time.perf_counter() - began
        table.add_row(
            f"{setting.clients:,}",
            f"{setting.epsilon0:g}",
            f"{setting.reports:,} x {setting.rounds}",
            number(composed_epsilon(setting.epsilon0, setting.releases, DELTA)),
            f"{attained:.7g}",
            f"{upper:.7g}",
            f"{adaptive:.7g}",
            f"{upper / attained - 1:.2%}",
            f"{adaptive / attained - 1:.2%}",
            f"{seconds:.1f}",
        )
    return table


def vectors_table() -> Table:
    """Return a table of the epsilons of runs in which each client sends a whole vector with Gaussian noise in each round."""
    table = Table(title=f"epsilon of a whole run of whole vectors with Gaussian noise, delta {DELTA:g}")
    for heading in ("epsilon of a round", "rounds", "clients", "trusting nobody", "behind a shuffler", "attained", "seconds"):
        table.add_column(heading, justify="right")
    for epsilon, rounds, clients in product((1.0, 4.0, 8.0), (1, 10), (100, 2000, 60_000)):
        vectors = [Vectors(gaussian_mu(epsilon, DELTA), clients, rounds)]
        local = gaussian_epsilon(vectors[0].mu * sqrt(rounds), DELTA)
        began = time.perf_counter()
        certified = shuffled_gaussian_epsilon(vectors, DELTA, local)
        seconds = time.perf_counter() - began
        attained = gaussian_epsilon(shuffled_gaussian_attained(vectors), DELTA)
        figures = (f"{epsilon:g}", f"{rounds}", f"{clients:,}", number(local), f"{certified:.4g}", f"{attained:.4g}", f"{seconds:.1f}")
        table.add_row(*figures)
    return table


if __name__ == "__main__":
    main()
