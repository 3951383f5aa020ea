"""The same releases through other accountants: epsilon for delta 1e-5, and time, one core.

    pip install prv_accountant opendp opacus
    python benchmarks/accountants.py

A library that is not installed, or has no accountant for a kind of release, gets a dash. A record is added or removed, except where the
accountant's name says that it is replaced.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant, common, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accountants.poisson import added_epsilon, sampled_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_epsilon

DELTA = 1e-5
Case = tuple[str, Callable[[], float]]


def gaussian_cases(noise: float, rounds: int) -> list[Case]:
    """Return accountants of Gaussian noise, ``noise`` times the sensitivity in each round. The epsilon is known in closed form."""
    event = dp_accounting.GaussianDpEvent(noise)

    def opendp() -> float:
        dp: Any = __import__("opendp.prelude").prelude
        dp.enable_features("contrib", "floating-point")
        space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=1), dp.l2_distance(T=float)
        one_round = dp.m.make_gaussian(*space, scale=noise)
        all_rounds = dp.c.make_zCDP_to_approxDP(dp.c.make_composition([one_round] * rounds))
        return float(all_rounds.map(1.0).epsilon(DELTA))

    return [
        ("ldpfl (exact)", lambda: gaussian_epsilon(sqrt(rounds) / noise, DELTA)),
        ("dp-accounting, PLD", lambda: epsilon_of_rounds(PLDAccountant(), event, rounds)),
        ("dp-accounting, RDP", lambda: epsilon_of_rounds(RdpAccountant(), event, rounds)),
        ("prv_accountant", lambda: prv_epsilon("GaussianMechanism", rounds, noise_multiplier=noise)),
        ("OpenDP, zCDP", opendp),
    ]


def poisson_cases(noise: float, rate: float, rounds: int) -> list[Case]:
    """Return accountants of Gaussian noise on a sample, of which each record is a part with the probability ``rate`` in each round."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))

    def opacus(kind: str, **precision: float) -> float:
        accountants: Any = __import__("opacus.accountants").accountants
        accountant = getattr(accountants, kind)()
        accountant.history = [(noise, rate, rounds)]
        return float(accountant.get_epsilon(DELTA, **precision))

    return [
        ("ldpfl (by dp-accounting, PLD)", lambda: added_epsilon([(2 / noise, rate, rounds)], DELTA)),
        ("ldpfl, the record replaced", lambda: sampled_epsilon([(2 / noise, rate, rounds)], DELTA)),
        ("dp-accounting, PLD, replaced", lambda: epsilon_of_rounds(PLDAccountant(NeighboringRelation.REPLACE_ONE), event, rounds)),
        ("dp-accounting, RDP", lambda: epsilon_of_rounds(RdpAccountant(), event, rounds)),
        ("Opacus, PRV", lambda: opacus("PRVAccountant", eps_error=1e-3)),
        ("Opacus, RDP", lambda: opacus("RDPAccountant")),
        (
            "prv_accountant",
            lambda: prv_epsilon("PoissonSubsampledGaussianMechanism", rounds, noise_multiplier=noise, sampling_probability=rate),
        ),
    ]


def pure_cases(epsilon: float, reports: int) -> list[Case]:
    """Return accountants of pure reports. Randomised response has the largest epsilon of all, which is known in closed form."""
    parameters = common.DifferentialPrivacyParameters(epsilon)

    def pld_epsilon() -> float:
        one_report = privacy_loss_distribution.from_privacy_parameters(parameters, value_discretization_interval=1e-4)
        return float(one_report.self_compose(reports).get_epsilon_for_delta(DELTA))

    return [
        ("ldpfl (exact)", lambda: composed_epsilon(epsilon, reports, DELTA)),
        ("dp-accounting, PLD", pld_epsilon),
        ("prv_accountant", lambda: prv_epsilon("PureDPMechanism", reports, eps=epsilon)),
        ("OpenDP, sum", lambda: epsilon * reports),
    ]


def epsilon_of_rounds(accountant: Any, event: Any, rounds: int) -> float:
    """Return the epsilon of ``rounds`` equal events by an ``accountant`` of dp-accounting."""
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(DELTA))


def prv_epsilon(name: str, times: int, **parameters: float) -> float:
    """Return the upper bound on epsilon by prv_accountant, to about 1e-3."""
    library: Any = __import__("prv_accountant")
    variable = getattr(library.privacy_random_variables, name)(**parameters)
    accountant = library.PRVAccountant(prvs=variable, max_self_compositions=times, eps_error=1e-3, delta_error=DELTA * 1e-3)
    return float(accountant.compute_epsilon(delta=DELTA, num_self_compositions=times)[2])


def main() -> None:
    settings = {
        "Gaussian, sigma 10, 100 rounds": gaussian_cases(10.0, 100),
        "Gaussian, sigma 1, 1,000 rounds": gaussian_cases(1.0, 1000),
        "Poisson 0.01, sigma 1, 1,000 rounds": poisson_cases(1.0, 0.01, 1000),
        "Poisson 0.1, sigma 2, 100 rounds": poisson_cases(2.0, 0.1, 100),
        "1,000 pure reports of 0.1": pure_cases(0.1, 1000),
        "10 pure reports of 1": pure_cases(1.0, 10),
    }
    print(f"{'release':36} {'accountant':30} {'epsilon':>12} {'seconds':>13}")
    for release, cases in settings.items():
        for number, (name, epsilon) in enumerate(cases):
            found, seconds = epsilon_and_seconds(epsilon)
            print(f"{release if number == 0 else '':36} {name:30} {found:>12} {seconds:>13}", flush=True)


def epsilon_and_seconds(compute: Callable[[], float]) -> tuple[str, str]:
    """Return the epsilon that ``compute`` returns and its seconds, as text; the name of the error if it fails."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            text = f"{compute():,.4f}"
        except ImportError:
            return "-", "not installed"
        except Exception as error:  # how a library fails is a result as well
            text = type(error).__name__
    return text, f"{time.perf_counter() - began:.2f}"


if __name__ == "__main__":
    main()
