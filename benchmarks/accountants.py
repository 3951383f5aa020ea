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


def gaussian(noise: float, rounds: int) -> list[Case]:
    """Noise of ``noise`` times the sensitivity in each round; known in closed form."""
    event = dp_accounting.GaussianDpEvent(noise)

    def opendp() -> float:
        dp: Any = __import__("opendp.prelude").prelude
        dp.enable_features("contrib", "floating-point")
        space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=1), dp.l2_distance(T=float)
        one = dp.m.make_gaussian(*space, scale=noise)
        all_rounds = dp.c.make_zCDP_to_approxDP(dp.c.make_composition([one] * rounds))
        return float(all_rounds.map(1.0).epsilon(DELTA))

    return [
        ("ldpfl (exact)", lambda: gaussian_epsilon(sqrt(rounds) / noise, DELTA)),
        ("dp-accounting, PLD", lambda: with_events(PLDAccountant(), event, rounds)),
        ("dp-accounting, RDP", lambda: with_events(RdpAccountant(), event, rounds)),
        ("prv_accountant", lambda: prv("GaussianMechanism", rounds, noise_multiplier=noise)),
        ("OpenDP, zCDP", opendp),
    ]


def poisson(noise: float, rate: float, rounds: int) -> list[Case]:
    """The same on a sample, each record in it with the probability ``rate``."""
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))

    def opacus(kind: str, **precision: float) -> float:
        accountants: Any = __import__("opacus.accountants").accountants
        accountant = getattr(accountants, kind)()
        accountant.history = [(noise, rate, rounds)]
        return float(accountant.get_epsilon(DELTA, **precision))

    return [
        ("ldpfl (by dp-accounting, PLD)", lambda: added_epsilon([(2 / noise, rate, rounds)], DELTA)),
        ("ldpfl, the record replaced", lambda: sampled_epsilon([(2 / noise, rate, rounds)], DELTA)),
        ("dp-accounting, PLD, replaced", lambda: with_events(PLDAccountant(NeighboringRelation.REPLACE_ONE), event, rounds)),
        ("dp-accounting, RDP", lambda: with_events(RdpAccountant(), event, rounds)),
        ("Opacus, PRV", lambda: opacus("PRVAccountant", eps_error=1e-3)),
        ("Opacus, RDP", lambda: opacus("RDPAccountant")),
        ("prv_accountant", lambda: prv("PoissonSubsampledGaussianMechanism", rounds, noise_multiplier=noise, sampling_probability=rate)),
    ]


def pure(epsilon: float, reports: int) -> list[Case]:
    """Any pure reports, of which randomised response is the worst; known in closed form."""
    parameters = common.DifferentialPrivacyParameters(epsilon)

    def pld() -> float:
        one = privacy_loss_distribution.from_privacy_parameters(parameters, value_discretization_interval=1e-4)
        return float(one.self_compose(reports).get_epsilon_for_delta(DELTA))

    return [
        ("ldpfl (exact)", lambda: composed_epsilon(epsilon, reports, DELTA)),
        ("dp-accounting, PLD", pld),
        ("prv_accountant", lambda: prv("PureDPMechanism", reports, eps=epsilon)),
        ("OpenDP, sum", lambda: epsilon * reports),
    ]


def with_events(accountant: Any, event: Any, rounds: int) -> float:
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(DELTA))


def prv(name: str, times: int, **parameters: float) -> float:
    """Return the upper bound of prv_accountant, to about 1e-3."""
    library: Any = __import__("prv_accountant")
    variable = getattr(library.privacy_random_variables, name)(**parameters)
    accountant = library.PRVAccountant(prvs=variable, max_self_compositions=times, eps_error=1e-3, delta_error=DELTA * 1e-3)
    return float(accountant.compute_epsilon(delta=DELTA, num_self_compositions=times)[2])


def main() -> None:
    settings = {
        "Gaussian, sigma 10, 100 rounds": gaussian(10.0, 100),
        "Gaussian, sigma 1, 1,000 rounds": gaussian(1.0, 1000),
        "Poisson 0.01, sigma 1, 1,000 rounds": poisson(1.0, 0.01, 1000),
        "Poisson 0.1, sigma 2, 100 rounds": poisson(2.0, 0.1, 100),
        "1,000 pure reports of 0.1": pure(0.1, 1000),
        "10 pure reports of 1": pure(1.0, 10),
    }
    print(f"{'release':36} {'accountant':30} {'epsilon':>12} {'seconds':>13}")
    for release, cases in settings.items():
        for number, (name, epsilon) in enumerate(cases):
            found, seconds = measured(epsilon)
            print(f"{release if number == 0 else '':36} {name:30} {found:>12} {seconds:>13}", flush=True)


def measured(epsilon: Callable[[], float]) -> tuple[str, str]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = f"{epsilon():,.4f}"
        except ImportError:
            return "-", "not installed"
        except Exception as error:  # what a library does with such a case is what this is about
            found = type(error).__name__
    return found, f"{time.perf_counter() - began:.2f}"


if __name__ == "__main__":
    main()
