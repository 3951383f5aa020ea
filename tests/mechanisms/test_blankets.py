"""What a mechanism says that its reports have in common: no report is rarer than so much of a common law."""

from __future__ import annotations

from itertools import product
from math import exp, log

import numpy as np
import pytest
import torch
from scalar_densities import density, plus_probability

from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.duchi_vector import DuchiVector
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.privunit_law import direction_law
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.scalar import Hybrid, Laplace, Piecewise
from ldpfl.mechanisms.scalar_noise import HybridLaw, LaplaceLaw, PiecewiseLaw
from ldpfl.privacy import PureRelease

INPUTS = (-1.0, -0.4, 0.0, 0.7, 1.0)
EPSILONS = (1e-6, 0.3, 1.0, 4.0, 8.0)
SLACK = 1e-6
"""Of densities that are written without regard to a lattice of 2^20 points a unit or more."""


def ranges(dimension: int) -> LayerRanges:
    return LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (dimension,))


def blanket(mechanism: Mechanism, dimension: int = 4) -> float:
    release = mechanism.release(ranges(dimension))
    assert isinstance(release, PureRelease)
    assert release.blanket is not None
    return release.blanket


def assert_between(densities: torch.Tensor, share: float, epsilon: float) -> None:
    """``densities`` are relative to the common law; both ends are reached, or it could be said better."""
    assert float(densities.min()) == pytest.approx(share, rel=SLACK)
    assert float(densities.max()) == pytest.approx(share * exp(epsilon), rel=SLACK)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_laplace_noise_has_that_in_common_which_begins_in_the_middle(epsilon: float) -> None:
    law = LaplaceLaw(epsilon)
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    assert_between(torch.stack([density(law, x, t) / density(law, x, 0.0) for t in INPUTS]), blanket(Laplace(epsilon)), epsilon)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_piecewise_and_hybrid_reports_have_a_uniform_part(epsilon: float) -> None:
    law, both = PiecewiseLaw(epsilon), HybridLaw(epsilon)
    x = torch.linspace(-law.bound, law.bound, 4001, dtype=torch.float64)
    uniform = 1 / (2 * law.bound)
    share = blanket(Piecewise(epsilon))
    assert_between(torch.stack([density(law, x, t) / uniform for t in INPUTS]), share, epsilon)
    # Of a hybrid's common law, as much lies in each part as in the report that is rarest there.
    bit = 2 / (1 + exp(epsilon))
    mixed = both.piecewise_share * share + (1 - both.piecewise_share) * bit
    assert blanket(Hybrid(epsilon)) == pytest.approx(mixed, rel=SLACK)
    if both.piecewise_share:
        in_part = torch.stack([density(both, x, t) for t in INPUTS]) / (both.piecewise_share * share / mixed * uniform)
        assert_between(in_part, mixed, epsilon)
    bits_share = 1 - both.piecewise_share
    plus = plus_probability(both, torch.tensor(INPUTS, dtype=torch.float64))
    bits = plus * bits_share / (bits_share * bit / mixed / 2)
    assert_between(bits, mixed, epsilon)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_sampled_weights_have_the_product_in_common(epsilon: float) -> None:
    assert blanket(Laplace(epsilon, 2)) == pytest.approx(blanket(Laplace(epsilon / 2)) ** 2, rel=1e-12)


@pytest.mark.parametrize("dimension", [1, 2, 3, 4])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_sign_vectors_have_all_corners_in_common(dimension: int, epsilon: float) -> None:
    """Corners on the right side are sent e^epsilon times as often as each of the others: see test_duchi_vector for that."""
    odds = exp(DuchiVector(epsilon).epsilon_realised)
    corners = list(product((-1, 1), repeat=dimension))
    weights = np.array([odds if sum(corner) > 0 else 1.0 for corner in corners])  # for the input of ones; by symmetry for all
    assert_between(torch.from_numpy(weights / weights.sum() * len(corners)), blanket(DuchiVector(epsilon), dimension), log(odds))


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 8.0, 20.0])
def test_noisy_directions_have_noise_in_all_directions_in_common(epsilon: float) -> None:
    law = direction_law(epsilon)
    q = exp(law.log_q)
    share = blanket(PrivUnitG(epsilon, 1.0))
    assert_between(torch.tensor([law.p / q, (1 - law.p) / (1 - q)], dtype=torch.float64), share, epsilon)
    bit = 2 / (1 + exp(Duchi(epsilon / 2).epsilon_realised))
    assert blanket(PrivUnitG(epsilon, 1.0, 0.5)) == pytest.approx(blanket(PrivUnitG(epsilon / 2, 1.0)) * bit, rel=1e-9)


@pytest.mark.parametrize("mechanism", [Laplace(31.0), Piecewise(80.0), Hybrid(60.0), DuchiVector(40.0), PrivUnitG(40.0, 1.0)])
def test_what_no_crowd_hides_has_no_blanket(mechanism: Mechanism) -> None:
    release = mechanism.release(ranges(4))
    assert isinstance(release, PureRelease)
    assert release.blanket is None
