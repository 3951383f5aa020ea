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
    options = parser.parse_args()
    table = Table("law", "a trial", "all trials, at most", "only one trial", f"one of the best {options.best} is tried")
    for law in get_args(Law):
        count = TrialCount.of(options.trials, law=law)
        mu, miss_probability = trial_mu(options.epsilon, count, DELTA), 1 - options.best / options.settings
        none_of_best = sum(weight * miss_probability**number for number, weight in enumerate(count.weights, start=1)) / sum(count.weights)
        all_trials_epsilon = gaussian_epsilon(mu * sqrt(count.limit), DELTA)
        one_trial_probability = count.weights[0] / sum(count.weights)
        table.add_row(
            law,
            f"{gaussian_epsilon(mu, DELTA):.3f}",
            f"{count.limit} have {all_trials_epsilon:.1f}",
            f"{one_trial_probability:.0%}",
            f"{1 - none_of_best:.0%}",
        )
    epsilon_of_setting = gaussian_epsilon(gaussian_mu(options.epsilon, DELTA) / sqrt(options.settings), DELTA)
    table.add_row(
        "each setting once, added up", f"{epsilon_of_setting:.3f}", f"{options.settings} have {options.epsilon:.1f}", "0%", "100%"
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
