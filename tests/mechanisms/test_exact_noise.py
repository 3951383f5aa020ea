"""Noise on a lattice: how exact floating point is, what decides at the boundaries between points, and the laws that come out."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ldpfl import SeededStreams
from ldpfl.mechanisms import privunit_law
from ldpfl.mechanisms.exact_noise import LAPLACE, NORMAL, Law, draw_integers_below, draw_rounded_noise, largest_probability
from ldpfl.mechanisms.privunit_law import direction_law, randomised_directions

ONE = range(1)
LAWS = pytest.mark.parametrize("law", [NORMAL, LAPLACE], ids=["normal", "laplace"])


class Scripted:
    """A source that gives 64-bit ``numbers`` first, then ones or zeros, and counts what was asked for."""

    def __init__(self, *numbers: int, then: int = 0) -> None:
        self._words = [word for number in numbers for word in (number & (2**32 - 1), number >> 32)]
        self._then, self.asked = then, 0

    def int32(self, row: int, count: int) -> Tensor:
        self.asked += count
        taken, self._words = self._words[:count], self._words[count:]
        return torch.from_numpy(np.array(taken + [self._then] * (count - len(taken)), dtype=np.uint32).view(np.int32))


def tail_of(law: Law, size: Any) -> Any:
    """The probability of exceeding ``size``, from mpmath's own laws."""
    return mpmath.exp(-size) / 2 if law is LAPLACE else mpmath.ncdf(-size)


@LAWS
def test_floating_point_errs_by_a_small_part_of_what_is_allowed(law: Law) -> None:
    """2,000 tails from 2^-60 to 1/2, on all branches of the approximation, and those next to 1/2; a sixteenth of the allowance is seen."""
    generator = np.random.default_rng(1)
    levels = np.concatenate([2.0 ** -generator.uniform(1, 60, 1500), generator.uniform(1e-3, 0.5, 400), 0.5 - 2.0 ** -np.arange(2, 52)])
    sizes = law.size_of_tail(levels)
    with mpmath.workprec(200):
        for level, size in zip(levels.tolist(), sizes.tolist(), strict=True):
            # By how much the tails differ, over the density, is by how much the size is wrong.
            density = mpmath.npdf(size) if law is NORMAL else mpmath.exp(-mpmath.mpf(size)) / 2
            wrong = abs(tail_of(law, mpmath.mpf(size)) - mpmath.mpf(level)) / density
            assert wrong <= law.relative_error * (size + 1) / 16


@pytest.mark.thorough_except("laplace")
@LAWS
def test_the_quick_size_errs_by_a_small_part_of_what_is_allowed(law: Law) -> None:
    """2,000 tails from 2^-12 to 1/2; a quarter of the allowance is seen. Those that are smaller are not decided by it."""
    generator = np.random.default_rng(3)
    levels = np.concatenate([2.0 ** -generator.uniform(1, 12, 1500), 0.5 - 2.0 ** -generator.uniform(2, 60, 500)])
    bits = (2.0**64 * levels).astype(np.uint64)
    sizes = law.fast_size_unit * law.fast_size(bits.astype(np.float64))
    with mpmath.workprec(200):
        for first, size in zip(bits.tolist(), sizes.tolist(), strict=True):
            density = mpmath.npdf(size) if law is NORMAL else mpmath.exp(-mpmath.mpf(size)) / 2
            for further in (0, 1):
                wrong = abs(tail_of(law, mpmath.mpf(size)) - mpmath.mpf(first + further) / 2**64) / density
                assert wrong <= law.fast_size_error / 4
        assert tail_of(law, law.fast_size_limit) >= 2.0**-12


@LAWS
def test_a_size_does_not_depend_on_its_place_among_others(law: Law) -> None:
    """Else a client might need more bits in one company than in another, and draw others from then on."""
    tails = np.random.default_rng(2).random(1003) / 2
    whole = law.size_of_tail(tails)
    for start, stop in ((1, 1003), (3, 1000), (5, 6), (501, 518)):
        assert np.array_equal(law.size_of_tail(tails[start:stop].copy()), whole[start:stop])
    assert np.array_equal(law.size_of_tail(tails[:1000].reshape(8, 125)).ravel(), whole[:1000])


@pytest.mark.thorough_except("0.3-laplace", "8589934592.0-laplace")
@LAWS
@pytest.mark.parametrize("steps", [0.3, 1.0, 1000.0, 2.0**20, 2.0**33])
def test_at_a_boundary_more_bits_decide(law: Law, steps: float) -> None:
    """The tail that begins there belongs to one point or the next, by bits beyond the 64th."""
    for point in sorted({1, 2, 3, round(steps), round(2.5 * steps), round(5.1 * steps)} - {0}):
        with mpmath.workprec(400):
            # Exactly half a step below ``point``: a tail at most as large means it or a larger one.
            boundary = tail_of(law, (mpmath.mpf(point) - 0.5) / steps)
            first = int(mpmath.floor(boundary * 2**64))
            second = int(mpmath.floor(boundary * 2**128)) % 2**64
        if boundary < 2.0**-50:
            continue
        for sign in (0, 1):
            word = first + (sign << 63)
            found = {
                more: int(draw_rounded_noise(law, steps, Scripted(word, more), ONE, 1)[0, 0])
                for more in (0, max(0, second - 1), second + 1, 2**64 - 1)
            }
            expected = {more: point if more < second else point - 1 for more in found}
            assert found == {more: -value if sign else value for more, value in expected.items()}
            for off, expected_point in ((-1, point), (1, point - 1)):
                assert abs(int(draw_rounded_noise(law, steps, Scripted(word + off), ONE, 1)[0, 0])) in {
                    expected_point,
                    expected_point - off,
                }
        if steps <= 1000:  # where a tail's last bit is less than a point
            assert int(draw_rounded_noise(law, steps, Scripted(first - 1), ONE, 1)[0, 0]) == point
            assert int(draw_rounded_noise(law, steps, Scripted(first + 1), ONE, 1)[0, 0]) == point - 1


@LAWS
def test_the_smallest_tails_are_decided_by_as_many_bits_as_it_takes(law: Law) -> None:
    source = Scripted(0, 0, 1)
    found = int(draw_rounded_noise(law, 4.0, source, ONE, 1)[0, 0])
    with mpmath.workprec(500):
        least, most = mpmath.mpf(1) / 2**192, mpmath.mpf(2) / 2**192
        assert tail_of(law, (mpmath.mpf(found) - 0.5) / 4) >= least
        assert tail_of(law, (mpmath.mpf(found) + 0.5) / 4) <= most
    assert source.asked >= 6


@LAWS
@pytest.mark.parametrize("steps", [0.4, 2.0, 7.0])
def test_points_have_the_probabilities_of_rounded_real_noise(law: Law, steps: float) -> None:
    """Six chi-squared tests of 300,000 draws, p > 1e-4; the seed is fixed."""
    found = draw_rounded_noise(law, steps, SeededStreams.for_clients(3, 0, [0]), ONE, 300_000)[0]
    real = stats.norm if law is NORMAL else stats.laplace
    points = np.arange(-40, 41)
    chances = real.cdf((points + 0.5) / steps) - real.cdf((points - 0.5) / steps)
    seen = np.array([(found == point).sum() for point in points])
    usual = chances * found.size > 10
    counts = np.append(seen[usual], found.size - seen[usual].sum())
    expected = np.append(chances[usual], 1 - chances[usual].sum()) * found.size
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_how_many_values_are_drawn_at_once_does_not_matter_if_they_fill_whole_blocks() -> None:
    whole = draw_rounded_noise(NORMAL, 2.0**20, SeededStreams.for_clients(3, 0, [0]), ONE, 1000)[0]
    source = SeededStreams.for_clients(3, 0, [0])
    assert np.array_equal(whole, np.concatenate([draw_rounded_noise(NORMAL, 2.0**20, source, ONE, count)[0] for count in (2, 398, 600)]))


@pytest.mark.parametrize("steps", [0.0, -1.0, 2.0**34 + 2**10, float("inf"), float("nan")])
def test_steps_that_floating_point_cannot_tell_apart_are_refused(steps: float) -> None:
    with pytest.raises(ValueError, match=r"^steps is .*: expected"):
        draw_rounded_noise(NORMAL, steps, Scripted(), ONE, 1)[0]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000, 2**31 - 1, 2**31])
def test_integers_below_a_limit_are_those_of_a_real_number(limit: int) -> None:
    """floor(limit * U), also where the first 64 bits of U do not say it."""
    generator = np.random.default_rng(2)
    numbers = [0, 2**64 - 1, *(int(n) for n in generator.integers(0, 2**64, 200, dtype=np.uint64))]
    numbers += [(place << 64) // limit + off for place in {1 % limit, limit // 2, limit - 1} for off in (0, 1)]
    for number in numbers:
        for more in (0, 2**64 - 1):
            expected = (((number << 64) + more) * limit) >> 128
            assert draw_integers_below(np.array([[float(limit)]]), Scripted(number, more), ONE)[0, 0] == expected
    found = draw_integers_below(np.full((1, 60_000), float(min(limit, 7))), SeededStreams.for_clients(4, 0, [0]), ONE)[0]
    assert limit == 1 or stats.chisquare(np.bincount(found.astype(np.int64), minlength=min(limit, 7))).pvalue > 1e-4


@pytest.mark.parametrize("odds", [1e-18, 1e-9, 0.3, 1.0, 1.5, 1e9, 1e18, 1e30])
def test_the_largest_probability_keeps_the_odds_and_no_larger_one_does(odds: float) -> None:
    found = largest_probability(lambda context: context.mpf(odds))
    with mpmath.workprec(300):
        assert mpmath.mpf(found) / (2**64 - found) <= odds
        assert found >= 2**64 - 2 or mpmath.mpf(found + 2) / (2**64 - found - 2) > odds


# --- directions -----------------------------------------------------------------------------------------------------------


def exactly(draws: privunit_law._Draws) -> list[int]:
    return [int(point) for point in draws._exact_points(0, np.arange(draws.noise_words.shape[1]))]


@pytest.mark.thorough_except("300.0", "4.0")
@pytest.mark.parametrize("epsilon", [0.5, 4.0, 20.0, 300.0])
def test_points_of_a_direction_are_those_of_many_more_digits(epsilon: float) -> None:
    """Whenever floating point decides, exact arithmetic agrees; and floating point's values lie within their stated errors."""
    law, generator = direction_law(epsilon), np.random.default_rng(3)
    for trial in range(15):
        u = generator.standard_normal(6) * 10.0 ** generator.uniform(-6, 6)
        draws = privunit_law._Draws.of(law, u[None] / np.linalg.norm(u), SeededStreams.for_clients(trial, 0, [0]), ONE)
        values, errors = draws._estimate()
        assert float(errors.max()) < 1e-8
        assert draws.points().tolist() == [exactly(draws)]
        assert np.abs(values * privunit_law.STEPS - exactly(draws)).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("word", [0, 2**63, 2**64 - 1])
def test_a_direction_is_also_drawn_from_the_rarest_bits(word: int) -> None:
    """There floating point has no estimate, and exact arithmetic decides all of it."""
    law, u = direction_law(2.0), np.array([[0.6, 0.8]])
    found = randomised_directions(law, u, Scripted(0, word, word, 2**62, then=7), ONE)
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= law.bound(2)


@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("distance", [24, 21, 18.01, 17.9, 10])
def test_a_share_of_almost_all_of_its_side_is_as_exact(epsilon: float, distance: float) -> None:
    """Next to 1 a float64 has few digits of what is left of a share: there floating point must not decide."""
    law, u = direction_law(epsilon), np.array([[1.0, 0.0]])
    with mpmath.workprec(200):
        for step in range(8):
            word = 2**64 - int(2 ** (64 - distance)) - step * 12_345
            below_gamma, words = np.array([False]), np.array([[2**62, 2**61]])
            draws = privunit_law._Draws(law, u, below_gamma, np.array([word], dtype=np.uint64), words, Scripted(), ONE)
            share = (mpmath.mpf(word) + 0.5) / 2**64
            below_all = (1 - share) * (1 - mpmath.ncdf(-law.gamma))
            alpha = mpmath.findroot(
                lambda size, p=below_all: mpmath.log(mpmath.ncdf(size) / p),
                mpmath.mpf(float(law.alpha(below_gamma, np.array([float(share)]))[0])),
            )
            values, errors = draws._estimate()
            assert not np.isfinite(errors[0, 0]) or abs(values[0, 0] - alpha) < errors[0, 0] / 4
            assert draws.points()[0, 0] == mpmath.floor(alpha * privunit_law.STEPS + 0.5)
