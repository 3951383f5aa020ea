"""Epsilon of a trial for a tuning at a target epsilon, by the law of the number of trials; what a law tries; what adding up would leave.

python benchmarks/tuning.py [--epsilon 2] [--trials 10] [--settings 10] [--best 3]
"""

from __future__ import annotations

import argparse
from math import sqrt
from typing import get_args

from rich.console import Console
from rich.table import Table

from ldpfl.privacy.accountants.best_of_trials import Law, TrialCount, trial_mu
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon, gaussian_mu

DELTA = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--trials", type=float, default=10.0)
    parser.add_argument("--settings", type=int, default=10)
    parser.add_argument("--best", type=int, default=3)
    chosen = parser.parse_args()
    table = Table("law", "a trial", "all trials, at most", "only one trial", f"one of the best {chosen.best} is tried")
    for law in get_args(Law):
        count = TrialCount.of(chosen.trials, law=law)
        mu, missed = trial_mu(chosen.epsilon, count, DELTA), 1 - chosen.best / chosen.settings
        none = sum(weight * missed**number for number, weight in enumerate(count.weights, start=1)) / sum(count.weights)
        most = gaussian_epsilon(mu * sqrt(count.limit), DELTA)
        single = count.weights[0] / sum(count.weights)
        table.add_row(law, f"{gaussian_epsilon(mu, DELTA):.3f}", f"{count.limit} have {most:.1f}", f"{single:.0%}", f"{1 - none:.0%}")
    alone = gaussian_epsilon(gaussian_mu(chosen.epsilon, DELTA) / sqrt(chosen.settings), DELTA)
    table.add_row("each setting once, added up", f"{alone:.3f}", f"{chosen.settings} have {chosen.epsilon:.1f}", "0%", "100%")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
