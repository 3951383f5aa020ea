"""The three one-dimensional laws: closed forms, densities, the sampler as an inverse distribution function, z-tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ldpfl import ConfigError, SeededStreams
from ldpfl.mechanisms.scalar_noise import HYBRID_THRESHOLD, HybridLaw, LaplaceLaw, PiecewiseLaw, ScalarLaw
from ldpfl.randomness import uniform

DRAWS = 200_000
LAWS = (LaplaceLaw, PiecewiseLaw, HybridLaw)
POINTS = (-1.0, -0.5, 0.0, 0.3, 1.0)
HALVES = [i / 20 for i in range(-20, 21)]

TABLE = [  # epsilon, A, Laplace variance, PM bound, PM variance at t = 0 and at 1, HM variance (None: that of one bit)
    (0.5, 4.082988, 32.0, 8.041623, 17.701757, 21.222569, None),
    (1.0, 2.163953, 8.0, 4.082988, 3.682103, 5.223597, 4.288992),
    (2.0, 1.313035, 2.0, 2.163953, 0.645588, 1.227565, 1.042336),
    (4.0, 1.037315, 0.5, 1.313035, 0.084836, 0.241354, 0.218979),
    (8.0, 1.000671, 0.125, 1.037315, 0.006683, 0.025341, 0.024901),
    (10.0, 1.000091, 0.08, 1.013567, 0.002323, 0.009106, 0.009046),
]


def draws(law: ScalarLaw, t: float, seed: int, count: int = DRAWS) -> Tensor:
    uniforms = uniform(SeededStreams.for_clients(seed, 0, [0]), 0, law.draws * count).view(count, law.draws).unbind(1)
    return law.sample(torch.full((count,), t, dtype=torch.float64), uniforms)


def worst(law: ScalarLaw) -> float:
    return law.offset + max(0.0, law.slope)


def one_bit(epsilon: float) -> float:
    return 1 / math.tanh(epsilon / 2) ** 2


def crossing(difference: Callable[[float], float], low: float, high: float) -> float:
    assert difference(low) > 0 > difference(high)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if difference(middle) > 0 else (low, middle)
    return low


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "gain", "laplace", "bound", "at_zero", "at_one", "hybrid"), TABLE)
def test_closed_forms_equal_the_table(
    epsilon: float, gain: float, laplace: float, bound: float, at_zero: float, at_one: float, hybrid: float | None
) -> None:
    piecewise, mixed = PiecewiseLaw(epsilon), HybridLaw(epsilon)
    assert LaplaceLaw(epsilon).offset == pytest.approx(laplace)
    assert LaplaceLaw(epsilon).slope == 0
    assert piecewise.bound == pytest.approx(bound, abs=6e-7)
    assert piecewise.offset == pytest.approx(at_zero, abs=6e-7)
    assert piecewise.offset + piecewise.slope == pytest.approx(at_one, abs=6e-7)
    assert mixed.gain == pytest.approx(gain, abs=6e-7)
    assert mixed.offset == pytest.approx(gain**2 if hybrid is None else hybrid, rel=1e-6, abs=6e-7)
    assert mixed.slope == (-1 if hybrid is None else 0)


@pytest.mark.parametrize("epsilon", [0.7, 1.0, 4.0, 10.0])
def test_variances_equal_the_papers_expressions(epsilon: float) -> None:
    s, power = math.exp(epsilon / 2), math.exp(epsilon)
    law = PiecewiseLaw(epsilon)
    for t in POINTS:
        assert law.offset + law.slope * t**2 == pytest.approx(t**2 / (s - 1) + (s + 3) / (3 * (s - 1) ** 2), rel=1e-12)
    assert worst(law) == pytest.approx(4 * s / (3 * (s - 1) ** 2), rel=1e-12)
    expected = (s + 3) / (3 * s * (s - 1)) + (power + 1) ** 2 / (s * (power - 1) ** 2)
    assert HybridLaw(epsilon).offset == pytest.approx(expected, rel=1e-12)
    assert HybridLaw(epsilon).slope == 0


def test_hybrid_starts_to_mix_where_both_worst_cases_meet() -> None:
    assert pytest.approx(0.609352, abs=5e-7) == HYBRID_THRESHOLD
    below, above = HybridLaw(HYBRID_THRESHOLD), HybridLaw(math.nextafter(HYBRID_THRESHOLD, 1))
    assert (below.piecewise_share, below.slope) == (0, -1)
    assert (above.piecewise_share > 0, above.slope) == (True, 0)
    assert worst(below) == pytest.approx(worst(above), rel=1e-9)
    # On either side the other choice would be worse.
    for epsilon, sign in ((0.55, 1), (0.65, -1)):
        share = -math.expm1(-epsilon / 2)
        mixed = share * PiecewiseLaw(epsilon).offset + (1 - share) * one_bit(epsilon)
        assert sign * (mixed - one_bit(epsilon)) > 0


def test_piecewise_beats_one_bit_in_the_worst_case_from_1_28978_on() -> None:
    found = crossing(lambda epsilon: worst(PiecewiseLaw(epsilon)) - one_bit(epsilon), 0.5, 3.0)
    assert found == pytest.approx(1.28978, abs=5e-6)


@pytest.mark.parametrize("epsilon", [0.3, 0.62, 1.0, 3.0, 10.0, 30.0])
def test_hybrid_is_never_worse_than_its_parts_in_the_worst_case(epsilon: float) -> None:
    assert worst(HybridLaw(epsilon)) <= min(worst(PiecewiseLaw(epsilon)), one_bit(epsilon)) * (1 + 1e-12)


# --- densities --------------------------------------------------------------------------------------------------------


def pieces(law: PiecewiseLaw, t: float) -> list[tuple[float, float, float]]:
    """Return (from, to, density) of the three pieces, from the paper's own expressions and the density in their middles."""
    s, bound = math.exp(law.epsilon / 2), law.bound
    left = (bound + 1) / 2 * t - (bound - 1) / 2
    ends = [-bound, left, left + bound - 1, bound]
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(ends)], dtype=torch.float64)
    found = law.density(middles, t).tolist()
    height = (math.exp(law.epsilon) - s) / (2 * s + 2)
    # A piece of no length has no middle of its own.
    outer = height / math.exp(law.epsilon)
    for place, expected in enumerate((outer, height, outer)):
        if ends[place + 1] - ends[place] > 1e-9:
            assert found[place] == pytest.approx(expected, rel=1e-9)
    return [(a, b, f) for (a, b), f in zip(pairwise(ends), (outer, height, outer), strict=True)]


@pytest.mark.parametrize("epsilon", [0.001, 0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("t", POINTS)
def test_piecewise_density_integrates_to_one_with_the_right_moments(epsilon: float, t: float) -> None:
    law = PiecewiseLaw(epsilon)
    mass, mean, square = (sum(f * (b**n - a**n) / n for a, b, f in pieces(law, t)) for n in (1, 2, 3))
    assert mass == pytest.approx(1, rel=1e-9)
    assert mean == pytest.approx(t, abs=1e-8 * law.bound)
    assert square - t**2 == pytest.approx(law.offset + law.slope * t**2, rel=1e-6)
    beyond = torch.tensor([-1.01, 1.01], dtype=torch.float64) * law.bound
    assert law.density(beyond, t).tolist() == [0, 0]


def loss(law: ScalarLaw, grid: Tensor) -> float:
    """Return the largest log ratio of the densities on ``grid`` over all pairs of inputs."""
    logs = torch.stack([law.density(grid, t).log() for t in HALVES])
    return float((logs.amax(0) - logs.amin(0)).max())


@pytest.mark.parametrize("epsilon", [0.001, 0.5, 1.0, 4.0, 10.0, 100.0])
def test_the_densities_of_any_two_inputs_differ_by_e_to_epsilon_and_no_more(epsilon: float) -> None:
    wide = torch.linspace(-5, 5, 20_001, dtype=torch.float64)
    assert loss(LaplaceLaw(epsilon), wide) == pytest.approx(epsilon, abs=1e-9)
    law = PiecewiseLaw(epsilon)
    inside = torch.cat([torch.linspace(-1, 1, 20_001, dtype=torch.float64) * law.bound * (1 - 1e-12), torch.tensor(HALVES)])
    assert loss(law, inside) == pytest.approx(epsilon, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.001, 0.5, 0.7, 1.0, 4.0, 10.0])
def test_hybrid_keeps_epsilon_in_both_parts(epsilon: float) -> None:
    law = HybridLaw(epsilon)
    plus = law.plus(torch.tensor(HALVES, dtype=torch.float64))
    for part in (plus, 1 - plus):
        assert float((part.amax() / part.amin()).log()) == pytest.approx(epsilon, abs=1e-9)
    inside = torch.linspace(-1, 1, 20_001, dtype=torch.float64) * PiecewiseLaw(epsilon).bound * (1 - 1e-12)
    if law.piecewise_share:
        assert loss(law, inside) == pytest.approx(epsilon, abs=1e-9)
        assert torch.equal(law.density(inside, 0.3), law.piecewise_share * PiecewiseLaw(epsilon).density(inside, 0.3))
    else:
        assert not law.density(inside, 0.3).any()


# --- the sampler ------------------------------------------------------------------------------------------------------

LEVELS = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000


@pytest.mark.parametrize("epsilon", [0.001, 0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("t", POINTS)
def test_piecewise_samples_are_the_quantiles_of_the_density(epsilon: float, t: float) -> None:
    law = PiecewiseLaw(epsilon)
    found = law.sample(torch.full_like(LEVELS, t), [LEVELS])
    below = sum(f * (found.clamp(min(a, b), max(a, b)) - a) for a, b, f in pieces(law, t))
    torch.testing.assert_close(below, LEVELS, rtol=0, atol=1e-8)


@pytest.mark.parametrize("epsilon", [0.001, 1.0, 10.0])
def test_laplace_samples_are_the_quantiles_of_the_density(epsilon: float) -> None:
    noise = LaplaceLaw(epsilon).sample(torch.full_like(LEVELS, 0.3), [LEVELS]) - 0.3
    tail = 0.5 * torch.exp(-noise.abs() * epsilon / 2)
    torch.testing.assert_close(torch.where(noise < 0, tail, 1 - tail), LEVELS, rtol=0, atol=1e-9)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
def test_hybrid_takes_one_part_or_the_other(epsilon: float) -> None:
    law, t = HybridLaw(epsilon), torch.full_like(LEVELS, 0.3)
    share = law.piecewise_share
    bits = law.sample(t, [torch.full_like(LEVELS, share + 1e-6), LEVELS])
    plus = LEVELS.lt(0.5 + 0.3 / (2 * law.gain))
    assert torch.equal(bits, (2 * plus.double() - 1) * law.gain)
    if share:
        mixed = law.sample(t, [torch.full_like(LEVELS, share - 1e-6), LEVELS])
        assert torch.equal(mixed, PiecewiseLaw(epsilon).sample(t, [LEVELS]))


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 10.0])
@pytest.mark.parametrize("kind", LAWS)
def test_draws_are_unbiased_with_the_stated_variance(kind: type[ScalarLaw], epsilon: float) -> None:
    """120 comparisons with |z| < 4 over all cases: a false alarm once in 130 seeds; the seed is fixed.

    The squares' own spread comes from the sample; none of the laws has a tail so heavy that 200,000 draws misjudge it.
    """
    law = kind(epsilon)
    for place, t in enumerate(POINTS):
        found, variance = draws(law, t, seed=40 + place), law.offset + law.slope * t**2
        assert abs(float(found.mean()) - t) < 4 * math.sqrt(variance / DRAWS)
        squares = (found - t) ** 2
        # One bit at the centre has constant squares, which leaves only rounding.
        assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(DRAWS) + 1e-9 * variance


@pytest.mark.parametrize("kind", LAWS)
def test_a_tiny_epsilon_is_still_unbiased(kind: type[ScalarLaw]) -> None:
    """Three laws, mean and variance, |z| < 4: a false alarm once in 2,600 seeds; the seed is fixed."""
    law = kind(1e-3)
    found, variance = draws(law, 0.5, seed=3), law.offset + law.slope * 0.25
    assert abs(float(found.mean()) - 0.5) < 4 * math.sqrt(variance / DRAWS)
    squares = (found - 0.5) ** 2
    assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(DRAWS) + 1e-9 * variance


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 36.0, 73.0, 100.0, 700.0, 1500.0, 1e308])
@pytest.mark.parametrize("kind", LAWS)
def test_no_epsilon_overflows(kind: type[ScalarLaw], epsilon: float) -> None:
    law = kind(epsilon)
    assert all(math.isfinite(figure) for figure in (law.offset, law.slope))
    largest = {LaplaceLaw: 1 + 74 / epsilon, PiecewiseLaw: PiecewiseLaw(epsilon).bound, HybridLaw: PiecewiseLaw(epsilon).bound}[kind]
    for t in POINTS:
        # The ends of (0, 1) too, to which rounding may bring a uniform number.
        uniforms = torch.cat([torch.tensor([0.0, 2.0**-54, 1 - 2.0**-53, 1.0], dtype=torch.float64), LEVELS])
        found = law.sample(torch.full_like(uniforms, t), [uniforms] * law.draws)
        assert bool((found.abs() <= largest * (1 + 1e-12)).all())
        if epsilon >= 700:  # no noise is left
            assert float((found[4:] - t).abs().median()) < 0.03 or kind is HybridLaw


@pytest.mark.parametrize("kind", LAWS)
def test_sampling_leaves_its_inputs_alone(kind: type[ScalarLaw]) -> None:
    law, t = kind(2.0), torch.linspace(-1, 1, 2000, dtype=torch.float64)
    uniforms = [LEVELS.clone() for _ in range(law.draws)]
    law.sample(t, uniforms)
    assert torch.equal(t, torch.linspace(-1, 1, 2000, dtype=torch.float64))
    assert all(torch.equal(used, LEVELS) for used in uniforms)


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, -math.inf, "1", None, True, 1e-10, 5e-324, 10**400])
@pytest.mark.parametrize("kind", LAWS)
def test_an_unusable_epsilon_is_refused(kind: type[ScalarLaw], epsilon: Any) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        kind(epsilon)
