"""Laplace, piecewise and hybrid on every weight and on k of d: moments, privacy by enumeration, batches, refusals, audit."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scalar_densities import density, plus_probability
from torch import Tensor

from grids import each
from ldpfl import ConfigError, LayerRanges, PrivacyError, ProtocolError, SecureSource, SeededStreams
from ldpfl.auditing import audit_mechanism
from ldpfl.mechanisms import guarantee_of, payload_bits, privatize
from ldpfl.mechanisms.base import read_valid
from ldpfl.mechanisms.reports.dense import DenseReports
from ldpfl.mechanisms.reports.sampled import SampledReports
from ldpfl.mechanisms.scalar import Coordinates, Hybrid, Laplace, Piecewise, ScalarMechanism
from ldpfl.mechanisms.scalar_noise import HYBRID_THRESHOLD, HybridLaw, ScalarLaw
from ldpfl.privacy import PureRelease
from ldpfl.privacy.guarantee import Unit
from ldpfl.util.randomness import COORDINATE_BLOCK

KINDS = (Laplace, Piecewise, Hybrid)
DRAWS = 200_000


def box(center: Sequence[float], radius: Sequence[float], sizes: Sequence[int]) -> LayerRanges:
    return LayerRanges(torch.tensor(center, dtype=torch.float64), torch.tensor(radius, dtype=torch.float64), tuple(sizes))


def seeded(clients: int, seed: int = 1) -> SeededStreams:
    return SeededStreams.for_clients(seed, 0, range(clients))


def same(first: DenseReports | SampledReports, second: DenseReports | SampledReports) -> bool:
    return list(first.payloads()) == list(second.payloads())


def few(mechanism: ScalarMechanism, values: Tensor, ranges: LayerRanges, source: SeededStreams | torch.Generator) -> SampledReports:
    reports = mechanism.encode(values, ranges, source)
    assert isinstance(reports, SampledReports)
    return reports


# --- estimates --------------------------------------------------------------------------------------------------------

CENTER, RADIUS = 0.5, 0.25
POINTS = (0.25, 0.75, 0.5, 0.5625, -2.0, 7.0)  # ends, centre, inside, beyond both ends
INSIDE = (0.25, 0.75, 0.5, 0.5625, 0.25, 0.75)


@pytest.mark.parametrize("epsilon", [0.5, 4.0])
@pytest.mark.parametrize("kind", KINDS)
def test_estimates_are_unbiased_with_the_stated_variance(kind: type[ScalarMechanism], epsilon: float) -> None:
    """72 comparisons with |z| < 4: a false alarm once in 220 seeds; the seed is fixed."""
    mechanism, ranges = kind(epsilon), box([CENTER] * len(POINTS), [RADIUS] * len(POINTS), [DRAWS] * len(POINTS))
    values = torch.tensor(POINTS).repeat_interleave(DRAWS)[None]
    decoded = privatize(mechanism, values, ranges, seeded(1, 20)).double().reshape(len(POINTS), DRAWS)
    variances = mechanism.noise(ranges).variance(values).double().reshape(len(POINTS), DRAWS)[:, 0].tolist()
    for inside, variance, found in zip(INSIDE, variances, decoded, strict=True):
        assert abs(float(found.mean()) - inside) < 4 * math.sqrt(variance / DRAWS)
        squares = (found - inside) ** 2
        assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(DRAWS) + 1e-5 * variance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "epsilon", "coordinates", "clients"),
    [
        (Piecewise, 4.0, 2, 10_000),
        (Hybrid, 4.0, 2, 10_000),
        (Piecewise, 8.0, "auto", 4_000),
        (Hybrid, 1.0, 2, 1_500),
        (Hybrid, 1.0, 2, 4_000),
        (Laplace, 1.0, 2, 4_000),
        (Laplace, 8.0, "auto", 1_000),
        (Laplace, 8.0, "auto", 4_000),
    ],
)
@pytest.mark.thorough_for(
    "Piecewise-4.0-2-10000",
    "Hybrid-4.0-2-10000",
    "Piecewise-8.0-auto-4000",
    "Hybrid-1.0-2-4000",
    "Laplace-1.0-2-4000",
    "Laplace-8.0-auto-4000",
)
def test_sampled_estimates_are_unbiased_with_the_stated_variance(
    kind: type[ScalarMechanism], epsilon: float, coordinates: Any, clients: int
) -> None:
    """96 comparisons with |z| < 4: a false alarm once in 160 seeds; the seed is fixed. The squares' spread is the sample's."""
    mechanism, ranges = kind(epsilon, coordinates), box([CENTER, 0.5], [RADIUS, 0.25], [2, 4])
    values = torch.tensor(POINTS).expand(clients, -1)
    reports = few(mechanism, values, ranges, torch.Generator().manual_seed(4))
    decoded = mechanism.decode(reports, ranges).double()
    variances = mechanism.noise(ranges).variance(values[:1])[0].double().tolist()
    for inside, variance, found in zip(INSIDE, variances, decoded.T, strict=True):
        assert abs(float(found.mean()) - inside) < 4 * math.sqrt(variance / clients)
        squares = (found - inside) ** 2
        assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(clients) + 1e-5 * variance
    # A weight that is not sampled decodes to the center.
    missed = torch.ones_like(decoded, dtype=torch.bool).scatter_(1, torch.from_numpy(reports.index), False)
    assert int(missed.sum()) == clients * (6 - reports.coordinates)
    assert bool((decoded[missed] == CENTER).all())


@pytest.mark.parametrize("epsilon", [1.0, 5.0, 10.0])
def test_sampled_variance_follows_the_papers_expression(epsilon: float) -> None:
    d, k = 12, max(1, math.floor(epsilon / 2.5))
    s = math.exp(epsilon / (2 * k))
    ranges, t = box([0.5], [0.25], [d]), torch.linspace(-1, 1, d)
    found = Piecewise(epsilon, "auto").noise(ranges).variance((0.5 + 0.25 * t)[None])[0].double() / 0.25**2
    expected = d * (s + 3) / (3 * k * (s - 1) ** 2) + (d * s / (k * (s - 1)) - 1) * t.double() ** 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    stated = float(Piecewise(epsilon, "auto").noise(ranges).largest_std(9)[0])
    assert stated == pytest.approx(0.25 * math.sqrt(float(expected.max()) / 9), rel=1e-6)


@each("coordinates", [None, 1, 3, "auto"])
@each("epsilon", [0.5, 1.0, 10.0])
@each("kind", KINDS)
def test_noise_std_is_the_worst_case_of_the_variance(kind: type[ScalarMechanism], epsilon: float, coordinates: Any) -> None:
    mechanism, ranges = kind(epsilon, coordinates), box([0.0, 1.0], [1.0, 0.25], [21, 21])
    t = torch.linspace(-1, 1, 21)
    variances = mechanism.noise(ranges).variance(torch.cat([t, 1 + t / 4])[None])[0].double().reshape(2, 21)
    assert mechanism.noise(ranges).largest_std(16).tolist() == pytest.approx((variances.amax(1) / 16).sqrt().tolist(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 5])
@pytest.mark.parametrize(("epsilon", "coordinates"), [(0.5, None), (4.0, None), (4.0, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough_for("Laplace-4.0-2-1", "Piecewise-4.0-2-1", "Hybrid-4.0-2-5", "Piecewise-4.0-2-5", "Laplace-4.0-2-5")
def test_mean_variance_is_unbiased_when_clients_agree(
    kind: type[ScalarMechanism], epsilon: float, coordinates: int | None, clients: int
) -> None:
    """54 comparisons with |z| < 4 at most: a false alarm once in 290 seeds; the seed is fixed.

    One bit a client and weight (hybrid at 0.5) has no sample variance: there the upper bound has to do.
    """
    mechanism = kind(epsilon, coordinates)
    # With k of d the weights of a client are not independent, so there many small groups of clients are the trials.
    groups, d = (1, 20_000) if coordinates is None else (150 if clients == 1 else 500, 6)
    ranges, source = box([0.5], [0.25], [d]), seeded(clients * groups, 9)
    for value in (0.5, 0.6, 0.75):
        values = torch.full((clients * groups, d), value)
        means = privatize(mechanism, values, ranges, source).double().reshape(groups, clients, d).mean(1).float()
        found = torch.stack([mechanism.noise(ranges).mean_variance(mean, clients) for mean in means]).double()
        found = found[0] if groups == 1 else found.mean(1)
        truth = float(mechanism.noise(ranges).variance(values[:1])[0, 0]) / clients
        if kind is Hybrid and epsilon == 0.5 and clients == 1:
            assert bool((found >= truth).all())
        else:
            assert abs(float(found.mean()) - truth) < 4 * float(found.std()) / math.sqrt(found.numel()) + 1e-5 * truth


def test_mean_variance_is_off_by_the_clients_spread_as_documented() -> None:
    """|z| < 4, seed fixed: a false alarm once in 16,000 seeds."""
    mechanism, ranges, size = Piecewise(2.0), box([0.0], [1.0], [DRAWS]), 4
    held = torch.tensor([-0.9, -0.9, 0.9, 0.9])
    reports = mechanism.encode(held[:, None].expand(size, DRAWS), ranges, seeded(size))
    estimates = mechanism.noise(ranges).mean_variance(mechanism.aggregate([reports], ranges), size).double()
    truth = float(mechanism.noise(box([0.0], [1.0], [1])).variance(held[:, None]).double().sum()) / size**2
    slope = 1 / (math.e - 1)
    expected = truth - slope * 0.9**2 / (size + slope)
    assert abs(float(estimates.mean()) - expected) < 4 * float(estimates.std()) / math.sqrt(DRAWS)


@pytest.mark.parametrize("coordinates", [None, 1, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_mean_variance_is_never_negative(kind: type[ScalarMechanism], coordinates: Any) -> None:
    ranges = box([0.0, 3.0], [0.1, 1e-6], [50, 50])
    for epsilon in (0.5, 2.0, 10.0):
        mechanism = kind(epsilon, coordinates)
        for clients in (1, 2, 3):
            reports = mechanism.encode(torch.zeros(clients, 100), ranges, seeded(clients))
            estimate = mechanism.noise(ranges).mean_variance(mechanism.aggregate([reports], ranges), clients)
            assert estimate.dtype == torch.float32
            assert bool(torch.isfinite(estimate).all())
            assert bool((estimate >= 0).all())


# --- privacy ----------------------------------------------------------------------------------------------------------


def log_likelihoods(law: ScalarLaw, t: float) -> Tensor:
    """Logarithms of the density on a grid of reports, and of the probabilities of the two bits that hybrid may send."""
    densities = density(law, torch.tensor([-1.5, -1.0, -0.99, 0.0, 0.5, 1.0, 1.2, 1.5], dtype=torch.float64), t)
    if not isinstance(law, HybridLaw):
        return densities.log()
    plus = plus_probability(law, torch.tensor([t], dtype=torch.float64))
    return torch.cat([densities, (1 - law.piecewise_share) * plus, (1 - law.piecewise_share) * (1 - plus)]).log()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("epsilon", "k"), [(0.5, 1), (2.0, 2), (6.0, 2), (3.0, 3)])
def test_k_of_d_keeps_epsilon_for_the_whole_vector(kind: type[ScalarMechanism], epsilon: float, k: int) -> None:
    """Enumerate all pairs of inputs on a grid of 3^3 points, all sets of weights and a grid of reports."""
    law = kind(epsilon, k).law_for(box([0.0], [1.0], [3]))
    assert law.epsilon == epsilon / k
    logs = {t: log_likelihoods(law, t) for t in (-1.0, 0.0, 1.0)}
    worst = 0.0
    for chosen in combinations(range(3), k):  # drawn without looking at the input: the same factor for all
        outcomes = torch.stack(
            [sum((logs[held[j]].reshape([-1 if i == j else 1 for i in chosen]) for j in chosen), torch.zeros(())).flatten()
             for held in product((-1.0, 0.0, 1.0), repeat=3)]
        )  # fmt: skip
        possible = outcomes[:, torch.isfinite(outcomes).all(0)]
        assert possible.shape[1] == torch.isfinite(outcomes).any(0).sum(), "a report that only some inputs lead to"
        worst = max(worst, float((possible.amax(0) - possible.amin(0)).max()))
    assert worst == pytest.approx(epsilon, abs=1e-9)


def test_which_weights_are_sampled_does_not_depend_on_the_values() -> None:
    ranges, mechanism = box([0.0], [1.0], [40]), Hybrid(7.5, "auto")
    index = [few(mechanism, torch.full((5, 40), value), ranges, seeded(5)).index for value in (-1.0, 0.3, 1e9)]
    for other in index[1:]:
        np.testing.assert_array_equal(other, index[0])


@pytest.mark.parametrize("coordinates", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_outside_the_box_report_like_the_clamped_ones(kind: type[ScalarMechanism], coordinates: int | None) -> None:
    ranges, mechanism = box([0.5, -1.0], [0.25, 2.0], [50, 50]), kind(2.0, coordinates)
    values = torch.empty(60, 100).uniform_(-9, 9, generator=torch.Generator().manual_seed(1))
    values[0, :3] = torch.tensor([3e38, -3e38, 1e-45])
    center, radius = ranges.expand()
    clamped = values.clamp((center - radius).float(), (center + radius).float())
    assert not torch.equal(values, clamped)
    assert same(mechanism.encode(values, ranges, seeded(60)), mechanism.encode(clamped, ranges, seeded(60)))


@pytest.mark.parametrize("mechanism", [Laplace(1.0), Piecewise(1.0), Hybrid(1.0), Hybrid(0.5), Piecewise(8.0)])
@pytest.mark.slow
@pytest.mark.thorough
def test_the_audit_finds_nothing(mechanism: ScalarMechanism) -> None:
    audit = audit_mechanism(mechanism, trials=100_000, seed=1)
    assert audit.passed, audit.verdict
    assert audit.epsilon_lower > 0.85 * mechanism.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("mechanism", "trials"), [(Piecewise(4.0, 2), 1000), (Laplace(3.0, "auto"), 1000), (Hybrid(6.0, "auto"), 1000)])
@pytest.mark.thorough
def test_the_audit_finds_nothing_in_k_of_d(mechanism: ScalarMechanism, trials: int) -> None:
    audit = audit_mechanism(mechanism, trials=trials, seed=1)
    assert audit.passed, audit.verdict
    assert audit.epsilon_lower > 0.45 * mechanism.epsilon


# --- batches, aggregates and memory -----------------------------------------------------------------------------------

RAGGED = (COORDINATE_BLOCK - 3, 7, COORDINATE_BLOCK, 1, 4242)


@pytest.mark.parametrize("coordinates", [None, 4, 1001])
@pytest.mark.parametrize("kind", KINDS)
def test_reports_do_not_depend_on_batching_or_order(kind: type[ScalarMechanism], coordinates: int | None) -> None:
    ranges, mechanism = box([0.0, 0.3, -0.2, 5.0, 0.0], [0.1, 1.0, 0.05, 2.0, 0.7], RAGGED), kind(5.0, coordinates)
    values = torch.randn(5, sum(RAGGED), generator=torch.Generator().manual_seed(11)) * 0.2
    clients = [3, 1, 40, 7, 1000]
    together = list(mechanism.encode(values, ranges, SeededStreams.for_clients(1, 6, clients)).payloads())
    for rows in ([0], [4], [4, 3, 2, 1, 0], [2, 0]):
        streams = SeededStreams.for_clients(1, 6, [clients[row] for row in rows])
        assert list(mechanism.encode(values[rows], ranges, streams).payloads()) == [together[row] for row in rows]


@pytest.mark.parametrize("mechanism", [Piecewise(1.0), Piecewise(5.0, 2)])
def test_aggregate_never_builds_the_dense_matrix(mechanism: ScalarMechanism) -> None:
    clients, dimension = 100, 5000
    ranges = box([0.0], [1.0], [dimension])
    reports = mechanism.encode(torch.zeros(clients, dimension), ranges, seeded(clients))
    tracemalloc.start()
    try:
        mechanism.aggregate([reports], ranges)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * dimension + 40 * clients


@pytest.mark.parametrize("source", [SecureSource(), torch.Generator().manual_seed(0)])
@pytest.mark.parametrize("coordinates", [None, 3])
def test_other_sources_serve_too(source: Any, coordinates: int | None) -> None:
    mechanism, ranges = Laplace(2.0, coordinates), box([0.0], [1.0], [400])
    reports = mechanism.encode(torch.zeros(2, 400), ranges, source)
    assert len(set(reports.payloads())) == 2


# --- how many weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "dimension", "k"),
    [(0.1, 9, 1), (2.4, 9, 1), (5.0, 9, 2), (7.49, 9, 2), (10.0, 9, 4), (100.0, 9, 9), (1e308, 2, 2), (1.0, 1, 1)],
)
def test_auto_takes_one_weight_for_each_2_5_of_epsilon(epsilon: float, dimension: int, k: int) -> None:
    ranges, mechanism = box([0.0], [1.0], [dimension]), Piecewise(epsilon, "auto")
    assert mechanism.sample_count(ranges) == k
    assert mechanism.law_for(ranges).epsilon == epsilon / k
    assert few(mechanism, torch.zeros(1, dimension), ranges, seeded(1)).index.shape == (1, k)


@each("coordinates", [0, -1, True, 1.0, 1.5, "all", "", [], math.nan])
@each("kind", KINDS)
def test_coordinates_that_are_no_count_are_refused(kind: type[ScalarMechanism], coordinates: Any) -> None:
    with pytest.raises(ConfigError, match="coordinates"):
        kind(1.0, coordinates)


@each("epsilon", [0, -1.0, math.nan, math.inf, "1", None, True, 1e-10])
@each("coordinates", [None, 1, "auto"])
def test_an_unusable_epsilon_is_refused(epsilon: Any, coordinates: Any) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        Laplace(epsilon, coordinates)


@pytest.mark.parametrize("coordinates", [2 * 10**9, 10**330])
def test_a_budget_that_vanishes_in_its_shares_is_refused(coordinates: int) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        Hybrid(1.0, coordinates)


def test_more_coordinates_than_weights_are_refused() -> None:
    mechanism, ranges = Piecewise(1.0, 4), box([0.0], [1.0], [3])
    for call in (partial(payload_bits, mechanism), partial(guarantee_of, mechanism), mechanism.release, mechanism.noise):
        with pytest.raises(ConfigError, match="only 3 weights"):
            call(ranges)
    with pytest.raises(ConfigError, match="only 3 weights"):
        mechanism.encode(torch.zeros(1, 3), ranges, seeded(1))


# --- what is refused, and what is stated ------------------------------------------------------------------------------

SECRET = 8675.309


def test_a_sampled_value_that_is_not_finite_stops_the_report() -> None:
    ranges, mechanism = box([0.0], [1.0], [30]), Piecewise(1.0, 1)
    hit = int(few(mechanism, torch.zeros(1, 30), ranges, seeded(1)).index[0, 0])
    values = torch.zeros(1, 30)
    values[0, hit] = math.nan
    with pytest.raises(PrivacyError, match="NaN"):
        mechanism.encode(values, ranges, seeded(1))


@pytest.mark.parametrize("coordinates", [None, 3])
def test_a_source_without_a_stream_for_every_client_is_refused(coordinates: int | None) -> None:
    with pytest.raises(PrivacyError, match="client number 1"):
        Laplace(1.0, coordinates).encode(torch.zeros(2, 4), box([0.0], [1.0], [4]), seeded(1))


@pytest.mark.parametrize("coordinates", [None, 2])
def test_encode_leaves_strided_values_that_require_grad_alone(coordinates: int | None) -> None:
    ranges, plain = box([0.0], [1.0], [40]), torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 2
    strided = plain.T.contiguous().T.requires_grad_()
    before = plain.clone()
    first, second = (Piecewise(2.0, coordinates).encode(values, ranges, seeded(3)) for values in (plain, strided))
    assert same(first, second)
    assert torch.equal(plain, before)


def test_aggregate_and_decode_refuse_missing_or_foreign_reports() -> None:
    ranges = box([0.0], [1.0], [9])
    every, two = Laplace(1.0), Laplace(1.0, 2)
    dense, sampled = (mechanism.encode(torch.zeros(1, 9), ranges, seeded(1)) for mechanism in (every, two))
    for mechanism, other in ((every, sampled), (two, dense)):
        with pytest.raises(PrivacyError, match="no report"):
            mechanism.aggregate([], ranges)
        with pytest.raises(PrivacyError, match="expected"):
            mechanism.aggregate([other], ranges)
        with pytest.raises(PrivacyError, match="expected"):
            mechanism.decode(other, ranges)
    with pytest.raises(PrivacyError, match="2 sampled weights, expected 3"):
        Laplace(1.0, 3).aggregate([sampled], ranges)
    with pytest.raises(PrivacyError, match="the clipping ranges have 8"):
        two.decode(sampled, box([0.0], [1.0], [8]))


@pytest.mark.parametrize("coordinates", [None, 2])
def test_one_bad_payload_does_not_spoil_the_others(coordinates: int | None) -> None:
    mechanism, ranges = Piecewise(1.0, coordinates), box([0.0], [1.0], [9])
    payloads = list(mechanism.encode(torch.zeros(3, 9), ranges, seeded(3)).payloads())
    bad = [payloads[0], payloads[1][:-1], payloads[2], payloads[2][:-4] + np.float32(np.nan).tobytes()]
    with pytest.raises(ProtocolError):
        mechanism.read(bad, ranges)
    kept, refused = read_valid(mechanism, bad, ranges)
    assert kept is not None
    assert list(kept.payloads()) == [payloads[0], payloads[2]]
    assert [entry.place for entry in refused] == [1, 3]


def forged(mechanism: ScalarMechanism, ranges: LayerRanges, value: float) -> bytes:
    """A report of which the last value is ``value``: in both formats the values come last."""
    (honest,) = mechanism.encode(torch.zeros(1, ranges.dimension), ranges, seeded(1)).payloads()
    return honest[:-4] + np.float32(value).tobytes()


def largest(kind: type[ScalarMechanism], epsilon: float) -> float:
    """The largest report, from the papers' expressions; Laplace's noise is cut off at 36.1 scales."""
    if kind is Laplace:
        return 1 + 2 / epsilon * 36.1
    power = math.exp(epsilon if kind is Hybrid and epsilon <= HYBRID_THRESHOLD else epsilon / 2)
    return (power + 1) / (power - 1)


@pytest.mark.parametrize("coordinates", [None, 2])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_no_client_can_send_are_refused(kind: type[ScalarMechanism], epsilon: float, coordinates: int | None) -> None:
    mechanism, ranges = kind(epsilon * (coordinates or 1), coordinates), box([0.0], [1.0], [9])
    bound = mechanism.law_for(ranges).bound
    assert bound == pytest.approx(largest(kind, epsilon), rel=1e-7)  # of a lattice
    for sign in (-1, 1):
        inside = forged(mechanism, ranges, sign * bound * (1 + 5e-7))
        mechanism.read([inside], ranges)
        for factor in (1 + 2e-6, 1e30, 3e38 / bound):
            outside = forged(mechanism, ranges, sign * bound * factor)
            with pytest.raises(ProtocolError, match="the largest that a client can send") as caught:
                mechanism.read([inside, outside], ranges)
            assert "\n" not in str(caught.value)
            kept, refused = read_valid(mechanism, [outside, inside, outside], ranges)
            assert kept is not None
            assert list(kept.payloads()) == [inside]
            assert [entry.place for entry in refused] == [0, 2]


class Repeated:
    """A source that repeats a few words at first, so that its numbers may be as close to an end as they get, and then others."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words, self._given = torch.tensor(words, dtype=torch.int32), 0

    def int32(self, row: int, count: int) -> Tensor:
        self._given += count
        words = self._words if self._given <= 16 else torch.tensor([0x1234567])
        return words.repeat(count // len(words) + 1)[:count].to(torch.int32)


@pytest.mark.parametrize("coordinates", [None, 2])
@pytest.mark.parametrize(
    "epsilon",
    [1e-6, pytest.param(0.3, marks=pytest.mark.thorough), 1.0, pytest.param(8.0, marks=pytest.mark.thorough), 60.0],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_the_largest_honest_report(kind: type[ScalarMechanism], epsilon: float, coordinates: int | None) -> None:
    mechanism, ranges = kind(epsilon, coordinates), box([0.0], [1.0], [3])
    bound, found = mechanism.law_for(ranges).bound, 0.0
    heads = [-(2**31) + 2**15, 0, 0, 0, 0, 0]  # all coins show heads, and the first point is drawn
    for words in ([0], heads, [-1], [0, -(2**31)], [2**31 - 1, 5, 2**31 - 1]):
        for value in (-1.0, 1.0):
            reports = mechanism.encode(torch.full((1, 3), value), ranges, Repeated(words))
            mechanism.read(list(reports.payloads()), ranges)
            found = max(found, float(np.abs(np.asarray(reports.values)).max()))
    assert found == pytest.approx(bound, rel=1e-6)


@given(
    st.sampled_from(KINDS),
    st.floats(-8, 4),
    st.sampled_from([None, 1, 3, "auto"]),
    st.lists(st.sampled_from([0, -1]) | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    st.lists(st.floats(-2, 2, width=32), min_size=5, max_size=5),
)
@pytest.mark.slow
@pytest.mark.thorough
def test_whatever_is_encoded_is_accepted(
    kind: type[ScalarMechanism], exponent: float, coordinates: Coordinates, words: list[int], values: list[float]
) -> None:
    mechanism, ranges = kind(10**exponent, coordinates), box([0.0, 0.5], [1.0, 0.25], [3, 2])
    payloads = list(mechanism.encode(torch.tensor([values]), ranges, Repeated(words)).payloads())
    assert list(mechanism.read(payloads, ranges).payloads()) == payloads


@pytest.mark.parametrize("coordinates", [None, 2])
def test_no_payload_reads_as_no_report(coordinates: int | None) -> None:
    assert Piecewise(1.0, coordinates).read([], box([0.0], [1.0], [3])).clients == 0


@pytest.mark.parametrize("kind", KINDS)
def test_guarantee_and_release_state_the_unit_and_count_it(kind: type[ScalarMechanism]) -> None:
    ranges = box([0.0, 0.0], [1.0, 1.0], [3, 4])
    cases: tuple[tuple[Coordinates, Unit, int], ...] = ((None, "weight", 7), (2, "vector", 1), ("auto", "vector", 1))
    for coordinates, unit, units in cases:
        mechanism = kind(1.5, coordinates)
        guarantee = guarantee_of(mechanism, ranges)
        assert (guarantee.epsilon, guarantee.delta, guarantee.unit, guarantee.units_per_round) == (1.5, 0.0, unit, units)
        assert (guarantee.trust_model, guarantee.status, guarantee.scope) == ("local", "proved", "round")
        assert guarantee.assumptions == ("ranges are public", "random bits are uniform and secret")
        assert replace(mechanism.release(ranges), blanket=None, signed=False) == PureRelease(kind.name, 1.5, units, unit)
    assert {each.name for each in KINDS} == {"laplace", "piecewise", "hybrid"}


def test_payload_bits_follow_the_formula() -> None:
    ranges = box([0.0], [1.0], [21_840])
    assert payload_bits(Laplace(1.0), ranges) == 32 * 21_840
    assert payload_bits(Laplace(10.0, "auto"), ranges) == 4 * (32 + 15)
    assert payload_bits(Laplace(10.0, 5), ranges) == 5 * (32 + 15)


@pytest.mark.parametrize(
    ("mechanism", "told"),
    [(Laplace(36.0), 0), (Laplace(1e4), 0), (Piecewise(88.0), 0), (Piecewise(89.0), 1), (Hybrid(22.0), 0), (Hybrid(44.6, 2), 1)],
)
def test_what_random_bits_cannot_express_is_told_as_a_caveat(mechanism: ScalarMechanism, told: int) -> None:
    assert len(mechanism.properties.caveats) == told
