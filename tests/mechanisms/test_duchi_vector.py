"""Duchi's randomiser for whole vectors: exactness by enumeration, unbiasedness by z-tests, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from grids import each
from ldpfl import ConfigError, LayerRanges, PrivacyError, SecureSource, SeededStreams
from ldpfl.auditing import audit_mechanism
from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import guarantee_of
from ldpfl.mechanisms.duchi import Duchi, thresholds
from ldpfl.mechanisms.duchi_vector import DuchiVector, VectorBitReports, central_binomial
from ldpfl.privacy import PureRelease
from ldpfl.util.randomness import COORDINATE_BLOCK

Floats = NDArray[np.float64]

WORDS = 1 << 32
EPSILONS = (0.1, 1.0, 4.0)


def box(center: Sequence[float], radius: Sequence[float], sizes: Sequence[int]) -> LayerRanges:
    return LayerRanges(torch.tensor(center, dtype=torch.float64), torch.tensor(radius, dtype=torch.float64), tuple(sizes))


def unit_box(dimension: int) -> LayerRanges:
    return box([0.0], [1.0], [dimension])


def corners(dimension: int) -> NDArray[np.int64]:
    """All sign vectors, (2^d, d)."""
    return np.array(list(product((-1, 1), repeat=dimension)), dtype=np.int64)


def signs_of(reports: VectorBitReports) -> NDArray[np.int64]:
    return 2 * reports.unpack().astype(np.int64) - 1


# --- the law, from the paper's binomials ------------------------------------------------------------------------------


def chosen_side(dimension: int) -> int:
    """C_d: sign vectors x with <x, v> > 0."""
    return (1 << (dimension - 1)) - (0 if dimension % 2 else math.comb(dimension, dimension // 2) // 2)


def margin(dimension: int) -> int:
    """S_d: the sum of x_j v_j over those vectors."""
    return math.comb(dimension - 1, (dimension - 1) // 2 if dimension % 2 else dimension // 2)


def amplitude(dimension: int, growth: Fraction) -> Fraction:
    """B, with ``growth`` for e^epsilon."""
    return ((1 << dimension) + chosen_side(dimension) * (growth - 1)) / (margin(dimension) * (growth - 1))


def law(dimension: int, epsilon: float) -> Floats:
    """Probabilities (v, x) by methods 3.3: up with e^eps C / N, then uniform on the open half-space or on its complement."""
    lead = corners(dimension) @ corners(dimension).T
    size = chosen_side(dimension)
    up = math.exp(epsilon) * size / (2**dimension + size * math.expm1(epsilon))
    return np.asarray(np.where(lead > 0, up / size, (1 - up) / (2**dimension - size)))


def closed_law(dimension: int, up: float) -> Floats:
    """The same with <x, v> >= 0 for up and <= 0 for down, as printed: half of the vectors where v agrees in half of the places."""
    lead = corners(dimension) @ corners(dimension).T
    above, below = lead >= 0, lead <= 0
    return np.asarray(up * above / above.sum(axis=1, keepdims=True) + (1 - up) * below / below.sum(axis=1, keepdims=True))


def budget(probabilities: Floats) -> float:
    return math.log(float((probabilities.max(axis=0) / probabilities.min(axis=0)).max()))


def bias(probabilities: Floats, amplitude: float) -> float:
    points = corners(int(math.log2(len(probabilities))))
    return float(np.abs(amplitude * probabilities @ points - points).max())


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("dimension", range(1, 7))
def test_open_half_space_spends_epsilon_and_is_unbiased(dimension: int, epsilon: float) -> None:
    probabilities = law(dimension, epsilon)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-12)
    assert budget(probabilities) == pytest.approx(epsilon, abs=1e-9)
    exact = float(amplitude(dimension, Fraction(math.exp(epsilon))))
    assert bias(probabilities, exact) < 1e-9
    assert DuchiVector(epsilon).gain(dimension) == pytest.approx(exact, rel=1e-7)  # 32-bit thresholds in place of e^epsilon


@pytest.mark.parametrize("dimension", [2, 4, 6])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_the_papers_closed_half_space_costs_more_and_is_biased(dimension: int, epsilon: float) -> None:
    growth = math.exp(epsilon)
    scale = float(amplitude(dimension, Fraction(growth)))
    original = closed_law(dimension, growth / (1 + growth))
    assert budget(original) == pytest.approx(math.log(1 + growth), abs=1e-9)
    assert bias(original, scale) > 0.02
    size = chosen_side(dimension)
    redefined = closed_law(dimension, growth * size / (2**dimension + size * (growth - 1)))  # equation (8)
    assert abs(budget(redefined) - epsilon) > 0.01  # more for small epsilon, less for large
    assert bias(redefined, scale) > 0.02


def test_the_papers_closed_half_space_has_the_reported_figures() -> None:
    """Methods 3.3 gives 0.44 and 6.3: the bias at |t| = 0.9. It grows with |t|, to 0.487 and 7.0."""
    original = closed_law(2, math.e / (1 + math.e))
    worst = bias(original, float(amplitude(2, Fraction(math.e))))
    assert worst == pytest.approx(0.487, abs=5e-4)
    assert 0.9 * worst == pytest.approx(0.44, abs=0.005)
    assert budget(original) == pytest.approx(1.313, abs=5e-4)
    growth = math.exp(0.1)
    assert budget(closed_law(2, growth / (1 + growth))) == pytest.approx(0.744, abs=5e-4)
    redefined = closed_law(2, growth / (4 + growth - 1))
    assert budget(redefined) == pytest.approx(1.31, abs=0.005)
    worst = bias(redefined, float(amplitude(2, Fraction(growth))))
    assert worst == pytest.approx(7.005, abs=5e-3)
    assert 0.9 * worst == pytest.approx(6.3, abs=0.01)


# --- the amplitude ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (1, 2.163953),
        (2, 3.327907),
        (3, 4.327907),
        (4, 4.770542),
        (5, 5.770542),
        (6, 5.924651),
        (10, 7.793208),
        (11, 8.793208),
        (100, 26.189021),
        (101, 27.189021),
    ],
)
def test_gain_equals_the_oracles_at_epsilon_1(dimension: int, expected: float) -> None:
    assert DuchiVector(1.0).gain(dimension) == pytest.approx(expected, abs=1e-6)


@each("epsilon", [0.1, 1.0, 10.0, 50.0])
@each("dimension", [*range(1, 12), 100, 101, 1023, 1024, 1025, 1026, 1027, 5000])
def test_gain_is_the_papers_formula_at_the_realised_odds(dimension: int, epsilon: float) -> None:
    lo, hi = thresholds(epsilon)
    assert DuchiVector(epsilon).gain(dimension) == pytest.approx(float(amplitude(dimension, Fraction(hi, lo))), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 514, 2000, 20_000])
def test_central_binomial_is_exact_on_both_branches(n: int) -> None:
    assert central_binomial(n) == pytest.approx(math.comb(2 * n, n) / 4**n, rel=1e-14)


def test_central_binomial_agrees_with_log_gamma_far_out() -> None:
    for n in (10**5, 10**6, 5 * 10**6):  # log-gamma itself is good to about 1e-8 there
        assert central_binomial(n) == pytest.approx(math.exp(math.lgamma(n + 0.5) - math.lgamma(n + 1)) / math.sqrt(math.pi), rel=1e-7)


@pytest.mark.parametrize("dimension", [10**5, 10**5 + 1, 10**7])
def test_gain_grows_like_the_root_of_the_dimension(dimension: int) -> None:
    assert DuchiVector(1.0).gain(dimension) == pytest.approx(2.163953 * math.sqrt(math.pi * dimension / 2), rel=2e-3)


# --- what the encoder does, exactly ------------------------------------------------------------------------------------


class Words:
    """A random source that hands out prepared words and counts them."""

    def __init__(self, words: Tensor) -> None:
        self._words = words.to(torch.int32)
        self.used = np.zeros(len(words), dtype=np.int64)

    def int32(self, row: int, count: int) -> Tensor:
        start = int(self.used[row])
        self.used[row] += count
        return self._words[row, start : start + count].clone()


def signed(unsigned: NDArray[np.int64]) -> NDArray[np.int64]:
    return unsigned - WORDS // 2


def exact_law(mechanism: DuchiVector, dimension: int) -> NDArray[np.object_]:
    """Return how many (first word, coin) pairs lead from each v to each x, by asking the encoder at every change.

    A tie is accepted for some coins only; a second try with the vector v itself takes its place, which is seen in the
    words used and left out.
    """
    lo, hi = thresholds(mechanism.epsilon)
    points = corners(dimension)
    probes = np.array([0, 2 * lo - 1, 2 * lo, hi - 1, hi, WORDS - 1])
    count = len(points)
    v, x, coin = (grid.ravel() for grid in np.meshgrid(np.arange(count), np.arange(count), np.arange(len(probes)), indexing="ij"))
    as_word = (points > 0) @ (1 << np.arange(dimension))
    rounding = np.random.default_rng(0).integers(-(2**31), 2**31, (len(v), dimension))  # the ends round surely
    words = np.column_stack([rounding, as_word[x], signed(probes[coin]), as_word[v], np.zeros_like(v)])
    source = Words(torch.from_numpy(words))
    reports = mechanism.encode(torch.from_numpy(points[v]).float(), unit_box(dimension), source)
    answer = (signs_of(reports) > 0) @ (1 << np.arange(dimension))
    index = np.argsort(as_word)[answer]
    accepted = source.used == dimension + 2
    masses = np.zeros((count, count), dtype=object)
    for start in range(0, len(v), len(probes)):
        ways = range(start, start + len(probes))
        found = [int(index[way]) if accepted[way] else -1 for way in ways]
        # Only one threshold matters for a pair: where a tie is refused, or where the other side begins.
        tie = -1 in found
        edge = 2 * lo if tie else hi
        low = {one for one, probe in zip(found, probes, strict=True) if probe < edge}
        high = {one for one, probe in zip(found, probes, strict=True) if probe >= edge}
        assert len(low) == len(high) == 1
        for target, mass in ((low.pop(), edge), (high.pop(), WORDS - edge)):
            if target >= 0:
                masses[v[start], target] += mass
    return masses


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("dimension", range(1, 7))
@pytest.mark.slow
@pytest.mark.thorough_for("5-0.1", "5-1.0", "5-4.0", "5-30.0", "6-0.1", "6-1.0", "6-4.0", "6-30.0")
def test_the_encoders_law_is_exact_in_integers(dimension: int, epsilon: float) -> None:
    """The ratio of any two probabilities is hi / lo, which thresholds keep below e^epsilon, and the estimate is unbiased."""
    mechanism, (lo, hi) = DuchiVector(epsilon), thresholds(epsilon)
    masses, points = exact_law(mechanism, dimension), corners(dimension)
    lead = points @ points.T
    assert np.array_equal(masses, np.where(lead > 0, 2 * hi, 2 * lo))
    total = int(masses[0].sum())
    assert all(int(row.sum()) == total for row in masses)  # so normalising changes no ratio
    scale = amplitude(dimension, Fraction(hi, lo))
    for v, row in zip(points, masses, strict=True):
        for place in range(dimension):
            mean = sum(Fraction(int(mass), total) * int(x) for mass, x in zip(row, points[:, place], strict=True))
            assert scale * mean == int(v[place])


def test_rounding_is_exact_at_the_ends_and_clamps_beyond() -> None:
    """+ with probability (1 + t) / 2: the number of words below 2^31 t."""
    ranges = box([0.5], [0.25], [1])
    mechanism = DuchiVector(4.0)
    for value, threshold in ((0.75, WORDS), (9.0, WORDS), (0.25, 0), (-9.0, 0), (0.5, WORDS // 2), (0.5625, 5 * WORDS // 8)):
        for word in {0, max(0, threshold - 1), min(threshold, WORDS - 1), WORDS - 1}:
            source = Words(torch.tensor([[word - WORDS // 2, 1, -WORDS // 2]]))  # x = +, and the coin says: as v
            reports = mechanism.encode(torch.tensor([[value]]), ranges, source)
            assert bool(reports.unpack()[0][0]) == (word < threshold), (value, word)


def test_values_beyond_the_range_are_reported_like_its_ends() -> None:
    ranges = box([0.5, -1.0], [0.25, 0.125], [40, 31])  # float32 holds these ends exactly
    values = 10 * torch.randn(5, 71, generator=torch.Generator().manual_seed(0))
    values[0, :4] = torch.tensor([3e38, -3e38, 1e6, -1e6])
    center, radius = ranges.expand()
    clamped = values.double().clamp(center - radius, center + radius).float()
    first, second = (DuchiVector(2.0).encode(each, ranges, SeededStreams.for_clients(1, 1, range(5))) for each in (values, clamped))
    np.testing.assert_array_equal(first.packed, second.packed)


class Stuck:
    """A broken source: of two weights always one right, one wrong, and a coin that accepts nothing."""

    def int32(self, row: int, count: int) -> Tensor:
        return torch.tensor([1, 2**31 - 1], dtype=torch.int32) if count == 2 else torch.zeros(count, dtype=torch.int32)


def test_a_source_that_never_settles_is_reported() -> None:
    class Source(Stuck):
        calls = 0

        def int32(self, row: int, count: int) -> Tensor:
            self.calls += 1
            return torch.zeros(2, dtype=torch.int32) if self.calls == 1 else super().int32(row, count)

    with pytest.raises(PrivacyError, match="nothing was sent"):
        DuchiVector(1.0).encode(torch.ones(1, 2), unit_box(2), Source())


# --- what it draws -----------------------------------------------------------------------------------------------------


def rounding_law(point: Floats) -> Floats:
    """Probabilities (2^d,) of v for t = ``point``."""
    return np.asarray(np.prod((1 + corners(len(point)) * point) / 2, axis=1))


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("dimension", range(1, 7))
@pytest.mark.slow
@pytest.mark.thorough_for("6-4.0", "1-4.0", "4-0.5", "5-0.5", "2-0.5", "2-4.0", "1-0.5", "3-0.5", "4-4.0", "5-4.0")
def test_draws_follow_the_law(dimension: int, epsilon: float) -> None:
    """Chi-square over all sign vectors, and so over agreement counts and places alike; 12 tests at 1e-4, the seed is fixed."""
    point = np.array([0.9, -0.5, 0.0, 1.0, -1.0, 0.3])[:dimension]
    values = torch.from_numpy(point).float().expand(4_000, dimension).contiguous()
    reports = DuchiVector(epsilon).encode(values, unit_box(dimension), torch.Generator().manual_seed(dimension))
    seen = np.bincount((reports.packed[:, 0]).astype(np.int64), minlength=2**dimension)
    expected = rounding_law(point.astype(np.float32).astype(np.float64)) @ law(dimension, epsilon)
    as_byte = (corners(dimension) > 0) @ (1 << np.arange(dimension))
    assert stats.chisquare(seen[as_byte], 4_000 * expected).pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.thorough_for("64-5000")
@pytest.mark.parametrize(("dimension", "clients"), [(64, 5_000), (1001, 2_000), (30_000, 200), (1_000_001, 10)])
def test_agreement_counts_have_the_right_moments_in_any_dimension(dimension: int, clients: int) -> None:
    """<x, v> has mean d / B; its square, d 2^d (g + 1) / (2 N). Eight comparisons with |z| < 4, seed fixed."""
    mechanism = DuchiVector(1.0)
    v = np.where(np.random.default_rng(3).random(dimension) < 0.5, -1.0, 1.0)
    values = torch.from_numpy(v).float().expand(clients, dimension)
    reports = mechanism.encode(values, unit_box(dimension), torch.Generator().manual_seed(5))
    lead = (2.0 * reports.unpack() - 1) @ v
    even = central_binomial(dimension // 2) if dimension % 2 == 0 else 0.0
    growth = math.exp(1.0)
    square = dimension * (growth + 1) / (2 + (1 - even) * (growth - 1))  # 2^d (g + 1) / (2 N), divided through by 2^d
    for sample, expected in ((lead, dimension / mechanism.gain(dimension)), (lead**2, square)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / math.sqrt(clients)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimension", "epsilon", "clients"),
    [(5, 4.0, 5_000), (5, 4.0, 15_000), (1, 1.0, 5_000), (2, 0.5, 5_000), (64, 2.0, 5_000), (1001, 8.0, 5_000)],
)
@pytest.mark.thorough_for("5-4.0-15000", "1-1.0-5000", "2-0.5-5000", "64-2.0-5000", "1001-8.0-5000")
def test_estimates_are_unbiased_with_the_stated_variance(dimension: int, epsilon: float, clients: int) -> None:
    """42 comparisons with |z| < 4 and six chi-squares at 1e-4 on either side: one false alarm in 260 seeds; the seed is fixed."""
    mechanism = DuchiVector(epsilon)
    ranges = box([0.5], [0.25], [dimension])
    values = 0.5 + 0.25 * torch.linspace(-1.2, 1.1, dimension) if dimension > 1 else torch.tensor([0.6])
    reports = mechanism.encode(values.expand(clients, dimension), ranges, torch.Generator().manual_seed(dimension))
    inside = values.double().clamp(0.25, 0.75)
    variances = mechanism.noise(ranges).variance(values[None].double())[0]
    scale = 0.25 * mechanism.gain(dimension)
    for place in sorted({0, 1, dimension // 3, dimension // 2, dimension - 1} & set(range(dimension))):
        bits = (reports.packed[:, place // 8] >> (place % 8)) & 1
        draws = 0.5 + scale * (2.0 * bits - 1)
        expected, variance = float(inside[place]), float(variances[place])
        assert abs(draws.mean() - expected) < 4 * math.sqrt(variance / clients)
        squares = (draws - expected) ** 2
        assert abs(squares.mean() - variance) < 4 * squares.std() / math.sqrt(clients) + 1e-6 * variance
    mean = mechanism.aggregate([reports], ranges).double()
    statistic = float(((mean - inside) ** 2 / (variances / clients)).sum())
    assert 1e-4 < stats.chi2.cdf(statistic, dimension) < 1 - 1e-4  # weights of a vector hardly depend on each other


def test_variance_takes_the_clamped_value() -> None:
    ranges = box([0.5], [0.25], [5])
    variance = DuchiVector(1.0).noise(ranges).variance(torch.tensor([[0.5, 0.25, 0.75, 0.6, 9.0]]))
    assert variance.dtype == torch.float32
    expected = [(0.25 * 5.770542) ** 2 - offset**2 for offset in (0.0, 0.25, 0.25, 0.1, 0.25)]
    assert variance[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert DuchiVector(1.0).noise(ranges).largest_std(16).tolist() == pytest.approx([0.25 * 5.770542 / 4], rel=1e-6)


@pytest.mark.slow
def test_mean_variance_is_unbiased_when_clients_agree() -> None:
    clients, dimension, mechanism = 6, 7, DuchiVector(2.0)
    ranges = box([0.5], [0.25], [dimension])
    values = torch.linspace(0.2, 0.7, dimension).expand(clients, dimension)
    source = torch.Generator().manual_seed(4)
    means = [mechanism.aggregate([mechanism.encode(values, ranges, source)], ranges) for _ in range(400)]
    estimates = torch.stack([mechanism.noise(ranges).mean_variance(mean, clients) for mean in means]).double()
    truth = mechanism.noise(ranges).variance(values[:1].double())[0] / clients
    z = (estimates.mean(0) - truth) / (estimates.std(0) / math.sqrt(len(means)))
    assert float(z.abs().max()) < 4  # seven comparisons, seed fixed


def test_mean_variance_of_a_single_report_is_the_upper_bound() -> None:
    mechanism, ranges = DuchiVector(1.0), box([0.0, 3.0], [0.1, 1e-6], [50, 50])
    reports = mechanism.encode(torch.zeros(1, 100), ranges, SeededStreams.for_clients(0, 0, [0]))
    estimate = mechanism.noise(ranges).mean_variance(mechanism.aggregate([reports], ranges), 1)
    assert estimate.tolist() == pytest.approx([(0.1 * 26.189021) ** 2] * 50 + [(1e-6 * 26.189021) ** 2] * 50, rel=1e-6)


def test_one_weight_costs_what_duchi_does() -> None:
    assert DuchiVector(1.3).gain(1) == pytest.approx(Duchi(1.3).gain, rel=1e-15)


# --- streams, batches, aggregation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 7, 8, 9, 31, 32, 33, 64, COORDINATE_BLOCK - 1, COORDINATE_BLOCK, 2 * COORDINATE_BLOCK + 13])
def test_a_clients_report_does_not_depend_on_its_batch(dimension: int) -> None:
    ranges, mechanism = unit_box(dimension), DuchiVector(1.0)
    values = torch.empty(3, dimension).uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    together = mechanism.encode(values, ranges, SeededStreams.for_clients(7, 2, range(3)))
    alone = [mechanism.encode(values[row : row + 1], ranges, SeededStreams.for_clients(7, 2, [row])) for row in range(3)]
    np.testing.assert_array_equal(together.packed, np.concatenate([report.packed for report in alone]))
    spare = -dimension % 8
    assert spare == 0 or not (together.packed[:, -1] >> (8 - spare)).any()


@pytest.mark.parametrize("source", [SecureSource(), torch.Generator().manual_seed(0)])
def test_other_sources_give_both_bits(source: Any) -> None:
    reports = DuchiVector(1.0).encode(torch.zeros(2, 4000), unit_box(4000), source)
    ones = reports.unpack().sum(axis=1, dtype=np.int64)
    assert np.all(np.abs(ones - 2000) < 8 * math.sqrt(1000))  # 8 standard deviations: 2e-15 in the unseeded case
    assert not np.array_equal(reports.packed[0], reports.packed[1])


def test_mixing_keeps_rows_together_and_puts_them_in_any_order() -> None:
    rows = np.arange(4, dtype=np.uint8)[:, None]
    batches = [VectorBitReports(rows[:3], 2), VectorBitReports(rows[3:], 2)]
    generator = np.random.default_rng(0)
    orders = [tuple(VectorBitReports.mix(batches, generator).packed[:, 0].tolist()) for _ in range(4800)]
    seen = {order: orders.count(order) for order in set(orders)}
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


# --- the wire, what is refused, what is stated ---------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x00\x00\x00", b"\x00\x02"])
def test_malformed_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        DuchiVector(1.0).read([payload], unit_box(9))


@pytest.mark.parametrize("epsilon", [0, 0.0, -1.0, math.nan, math.inf, 1e-12, True, "1", None])
def test_an_unusable_epsilon_is_refused(epsilon: Any) -> None:
    with pytest.raises(ConfigError):
        DuchiVector(epsilon)


def test_guarantee_and_release_count_the_vector_once() -> None:
    mechanism, ranges = DuchiVector(1.5), box([0.0, 0.0], [1.0, 1.0], [3, 4])
    guarantee = guarantee_of(mechanism, ranges)
    assert (guarantee.epsilon, guarantee.delta, guarantee.unit, guarantee.units_per_round) == (1.5, 0.0, "vector", 1)
    assert (guarantee.trust_model, guarantee.status, guarantee.scope) == ("local", "proved", "round")
    assert guarantee.assumptions
    assert replace(mechanism.release(ranges), blanket=None) == PureRelease("duchi-vector", 1.5, 1, "vector")


@pytest.mark.parametrize(("epsilon", "told"), [(1.0, False), (15.0, False), (40.0, True)])
def test_a_budget_beyond_the_bits_is_told_as_a_caveat(epsilon: float, told: bool) -> None:
    assert len(DuchiVector(epsilon).properties.caveats) == told
    assert DuchiVector(epsilon).epsilon_realised <= epsilon


@pytest.mark.slow
@pytest.mark.thorough
def test_audit_finds_nothing_and_comes_close() -> None:
    audit = audit_mechanism(DuchiVector(4.0), trials=5_000, seed=1)
    assert audit.passed, audit.verdict
    assert audit.epsilon_lower > 0.8 * 4.0  # 3.3 to 3.5, by eight seeds
