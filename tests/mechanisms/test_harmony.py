"""One sampled sign a group: its budget and moments by enumeration, z-tests at scale, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl import ConfigError, LayerRanges, PrivacyError, SecureSource, SeededStreams
from ldpfl.mechanisms import BitReports, guarantee_of, payload_bits, privatize
from ldpfl.mechanisms.base import read_valid
from ldpfl.mechanisms.duchi import BITS, Duchi, thresholds
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.reports.bits import WRONG_LENGTH_HINT
from ldpfl.mechanisms.reports.indexed import IndexedBitReports
from ldpfl.util.randomness import COORDINATE_BLOCK

WORDS = 1 << BITS
LOWEST = -(WORDS // 2)
CNN = (250, 10, 5000, 20, 16_000, 50, 500, 10)
"""Weights of each tensor of the two-layer CNN: 21,840 in all."""


class Prepared:
    """Hands every row the same place words, and the only row the halves of its sign's, so that a test decides every comparison."""

    def __init__(self, places: Sequence[int], sign: int | None = None) -> None:
        self._places = torch.tensor(places, dtype=torch.int32)
        self._halves = [] if sign is None else [sign >> 16, sign & 0xFFFF]

    def int32(self, row: int, count: int) -> Tensor:
        if count == self._places.numel():
            return self._places
        return torch.tensor([self._halves.pop(0)], dtype=torch.int32).reshape(count)


def place_words(index: int, size: int) -> tuple[int, int]:
    """Two words, the upper first, that choose ``index`` below ``size``: the smallest 64-bit x with x * size // 2**64 == index."""
    word = -(-(index << 64) // size)
    return tuple(half - WORDS if half >= WORDS // 2 else half for half in (word >> 32, word % WORDS))  # type: ignore[return-value]


def box(center: Sequence[float], radius: Sequence[float], sizes: Sequence[int]) -> LayerRanges:
    return LayerRanges(torch.tensor(center, dtype=torch.float64), torch.tensor(radius, dtype=torch.float64), tuple(sizes))


def streams(clients: int, seed: int = 0, number: int = 0) -> SeededStreams:
    return SeededStreams.for_clients(seed, number, range(clients))


def plus_counts(mechanism: Harmony, values: Sequence[float], ranges: LayerRanges, index: int) -> int:
    """Count the sign words out of 2**32 that send + once ``index`` of the only group was sampled, by bisection."""
    low, high = LOWEST, -LOWEST
    while low < high:
        middle = (low + high) // 2
        source = Prepared(place_words(index, len(values)), middle)
        report = mechanism.encode(torch.tensor([list(values)]), ranges, source)
        assert report.index.tolist() == [[index]]
        low, high = (middle + 1, high) if report.signs[0, 0] else (low, middle)
    return low - LOWEST


# --- the law of one report, by enumeration ----------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.thorough_except("2-0.1")
def test_the_budget_of_a_whole_group_is_epsilon(epsilon: float, size: int) -> None:
    """Over all (index, sign) and all groups of end points; the index has the same probability in each, so it cancels."""
    mechanism, ranges = Harmony(epsilon), box([0.5], [0.25], [size])
    corners = [[0.25 if corner >> place & 1 else 0.75 for place in range(size)] for corner in range(1 << size)]
    counts = [[plus_counts(mechanism, corner, ranges, index) for index in range(size)] for corner in corners]
    worst = Fraction(0)
    for first in counts:
        for second in counts:
            for one, other in zip(first, second, strict=True):
                worst = max(worst, Fraction(one, other), Fraction(WORDS - one, WORDS - other))
    lo, hi = thresholds(epsilon)
    assert worst == Fraction(hi, lo)
    assert math.log(worst) == pytest.approx(mechanism.epsilon_realised, abs=1e-9)
    assert mechanism.epsilon_realised <= epsilon
    assert epsilon - mechanism.epsilon_realised < 1 / lo + 1 / hi  # one word of 2**32: all that the integers give away


@pytest.mark.thorough_except("0.5")
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_the_moments_are_exact_with_the_center_as_fill(epsilon: float) -> None:
    """Mean and variance from all (index, sign); filling with 0, as the paper's equations (11) and (12) do, is biased."""
    mechanism, center, radius = Harmony(epsilon), 0.3, 0.25
    for values in ([0.1, 0.3, 0.55, 0.4, 7.0], [0.2, -9.0]):
        size, ranges = len(values), box([center], [radius], [len(values)])
        variances = mechanism.noise(ranges).variance(torch.tensor([values]))[0]
        for index, value in enumerate(values):
            inside = min(max(value, center - radius), center + radius)
            plus = plus_counts(mechanism, values, ranges, index) / WORDS
            step = size * radius * mechanism.gain
            sampled = plus * (center + step) + (1 - plus) * (center - step)
            mean = sampled / size + center * (1 - 1 / size)
            assert mean == pytest.approx(inside, abs=1e-7)
            squares = plus * (center + step - mean) ** 2 + (1 - plus) * (center - step - mean) ** 2
            second = squares / size + (center - mean) ** 2 * (1 - 1 / size)
            assert float(variances[index]) == pytest.approx(second, rel=1e-6)
            filled_with_zero = sampled / size
            assert filled_with_zero - inside == pytest.approx(-center * (1 - 1 / size), abs=1e-7)


@pytest.mark.parametrize("size", [2, 3, 5, 1000, 2**20, 2**20 + 1])
def test_the_place_is_the_upper_half_of_word_times_size(size: int) -> None:
    ranges, values = box([0.0], [1.0], [size]), torch.zeros(1, size)
    generator = np.random.default_rng(4)
    edges = [0, 1, WORDS - 1, WORDS, (1 << 64) - 1, 1 << 63, *(-(-(index << 64) // size) - 1 for index in range(1, min(size, 5)))]
    for word in edges + [int(high) << 32 | int(low) for high, low in generator.integers(0, WORDS, (20, 2))]:
        halves = [half - WORDS if half >= WORDS // 2 else half for half in (word >> 32, word % WORDS)]
        report = Harmony(1.0).encode(values, ranges, Prepared(halves, 0))
        assert int(report.index[0, 0]) == word * size >> 64


def test_the_place_does_not_depend_on_the_values() -> None:
    ranges = box([0.0, 0.0], [1.0, 1.0], [50, 7])
    values = torch.randn(20, 57, generator=torch.Generator().manual_seed(1))
    first, second = (Harmony(1.0, 10).encode(inputs, ranges, streams(20)) for inputs in (values, -9 * values))
    np.testing.assert_array_equal(first.index, second.index)
    assert (first.signs != second.signs).any()


def test_places_are_uniform() -> None:
    """chi-squared with 6 degrees of freedom over 210,000 groups of 7: above 27.9 once in 10,000 seeds; the seed is fixed."""
    draws = 210_000
    report = Harmony(1.0, 7).encode(torch.zeros(1, 7 * draws), box([0.0], [1.0], [7 * draws]), streams(1, seed=3))
    counts = np.bincount(report.index[0], minlength=7)
    assert float(((counts - draws / 7) ** 2).sum() / (draws / 7)) < 27.9


# --- z-tests at scale -------------------------------------------------------------------------------------------------

DRAWS = 200_000
GROUP = (0.25, 0.75, 0.5, 0.6, -2.0)  # ends, centre, inside, beyond an end of [0.25, 0.75]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0, 10.0])
def test_estimates_are_unbiased_with_the_stated_variance(epsilon: float) -> None:
    """40 comparisons with |z| < 4 over the four epsilons: a false alarm once in 400 seeds; the seed is fixed."""
    mechanism, size = Harmony(epsilon, len(GROUP)), len(GROUP)
    ranges = box([0.5], [0.25], [size * DRAWS])
    values = torch.tensor(GROUP).repeat(DRAWS)[None]
    draws = privatize(mechanism, values, ranges, streams(1, seed=20))[0].double().reshape(DRAWS, size)
    step = size * 0.25 * mechanism.gain
    assert torch.unique(draws).tolist() == pytest.approx([0.5 - step, 0.5, 0.5 + step], rel=1e-6)
    variances = mechanism.noise(ranges).variance(torch.tensor(GROUP).repeat(DRAWS)[None])[0, :size].double()
    for place, value in enumerate(GROUP):
        inside, variance = min(max(value, 0.25), 0.75), float(variances[place])
        assert abs(float(draws[:, place].mean()) - inside) < 4 * math.sqrt(variance / DRAWS)
        squares = (draws[:, place] - inside) ** 2
        assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(DRAWS)


def test_a_fill_of_zero_would_be_biased_beyond_any_doubt() -> None:
    """c = 0.2, s = 6, w = 0.3: filling with 0 gives 0.133 (bias -c (1 - 1/s)), hundreds of standard errors off; c gives 0.3."""
    mechanism, size = Harmony(4.0, 6), 6
    ranges = box([0.2], [0.25], [size * DRAWS])
    reports = mechanism.encode(torch.full((1, size * DRAWS), 0.3), ranges, streams(1, seed=9))
    draws = mechanism.decode(reports, ranges)[0].double().reshape(DRAWS, size)
    error = math.sqrt(float(mechanism.noise(ranges).variance(torch.full((1, size * DRAWS), 0.3))[0, 0]) / (DRAWS * size))
    assert abs(float(draws.mean()) - 0.3) < 4 * error
    sampled = torch.zeros(DRAWS, size).scatter_(1, torch.from_numpy(reports.index.reshape(DRAWS, 1)), 1.0).bool()
    zero_filled = torch.where(sampled, draws, 0.0)
    assert abs(float(zero_filled.mean()) - (0.3 - 0.2 * (1 - 1 / 6))) < 4 * error
    assert 0.3 - float(zero_filled.mean()) > 50 * error


def test_noise_of_the_mean_has_the_stated_deviation() -> None:
    """40,000 groups of 5 at the centre, |z| < 4 on the variance: a false alarm once in 16,000 seeds; the seed is fixed."""
    groups, clients = 40_000, 60
    mechanism, ranges = Harmony(1.0, 5), box([0.1], [0.3], [5 * groups])
    reports = mechanism.encode(torch.full((1, 5 * groups), 0.1).expand(clients, -1), ranges, streams(clients, seed=2))
    noise = mechanism.aggregate([reports], ranges).double() - 0.1
    squares = (noise**2).reshape(groups, 5).mean(dim=1)  # independent of one another
    stated = float(mechanism.noise(ranges).largest_std(clients)[0]) ** 2
    assert abs(float(squares.mean()) - stated) < 4 * float(squares.std()) / math.sqrt(groups)


@pytest.mark.parametrize("clients", [2, 60])
def test_the_variance_of_the_mean_is_told_from_the_mean_alone(clients: int) -> None:
    """Unbiased where clients outnumber sqrt(s); below that the cut at 0 makes it too large, by the stated bound at most."""
    groups, value = 8_000, 0.3
    mechanism, ranges = Harmony(1.0, 5), box([0.1], [0.3], [5 * groups])
    values = torch.full((1, 5 * groups), value).expand(clients, -1)
    mean = mechanism.aggregate([mechanism.encode(values, ranges, streams(clients, seed=6))], ranges)
    told = mechanism.noise(ranges).mean_variance(mean, clients).double()
    truth = float(mechanism.noise(ranges).variance(values[:1])[0, 0]) / clients
    upper = 5 * (0.3 * mechanism.gain) ** 2 / (clients - 1)
    assert bool((told >= 0).all())
    assert float(told.max()) <= upper * (1 + 1e-6)
    if clients == 60:
        each = told.reshape(groups, 5).mean(dim=1)  # independent of one another; |z| < 4
        assert abs(float(each.mean()) - truth) < 4 * float(each.std()) / math.sqrt(groups)
    else:
        assert truth < float(told.mean()) <= upper


def test_one_client_has_the_upper_bound_as_variance() -> None:
    mechanism, ranges = Harmony(1.0, 4), box([0.1], [0.3], [6])
    expected = [4 * (0.3 * mechanism.gain) ** 2] * 4 + [2 * (0.3 * mechanism.gain) ** 2] * 2
    assert mechanism.noise(ranges).mean_variance(torch.zeros(6), 1).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("epsilon", "deviation"), [(1.0, 1.4516), (4.0, 0.692), (10.0, 0.671)])
def test_the_papers_setting_drowns_the_largest_layer(epsilon: float, deviation: float) -> None:
    # 16,000 weights, 200 clients, radius 0.075: the noise of a mean, where weights are about 0.025.
    ranges = box([0.0] * 8, [0.075] * 8, CNN)
    # Independent figures (a simulation of Algorithm 2 as written), hence the tolerance.
    assert float(Harmony(epsilon).noise(ranges).largest_std(200)[4]) == pytest.approx(deviation, rel=0.01)


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "layers", "expected"),
    [
        (None, (7, 1, 12), [7, 1, 12]),
        (1, (2, 3), [1] * 5),
        (3, (7, 3, 2, 6, 1), [3, 3, 1, 3, 2, 3, 3, 1]),
        (12, (7, 12), [7, 12]),
        (5, (5, 5), [5, 5]),
        (4, (9,), [4, 4, 1]),
    ],
)
def test_layers_are_cut_into_consecutive_groups(group: int | None, layers: tuple[int, ...], expected: list[int]) -> None:
    ranges = box([0.0] * len(layers), [1.0] * len(layers), layers)
    mechanism = Harmony(1.0, group)
    report = mechanism.encode(torch.zeros(3, sum(layers)), ranges, streams(3))
    assert report.group_sizes.tolist() == expected
    assert guarantee_of(mechanism, ranges).units_per_round == len(expected)
    largest = [min(size, group or size) for size in layers]
    assert mechanism.noise(ranges).largest_std(4).tolist() == pytest.approx([mechanism.gain * math.sqrt(s / 4) for s in largest])


class Counting:
    """A random source that counts the words drawn for each row."""

    def __init__(self, clients: int) -> None:
        self.used = [0] * clients
        self._source = streams(clients)

    def int32(self, row: int, count: int) -> Tensor:
        self.used[row] += count
        return self._source.int32(row, count)


@pytest.mark.parametrize(
    ("group", "layers", "groups"),
    [(3, (12,), 4), (10_000, (40_000,), 4), (None, (2, 5, 2), 3), (None, (7, 50_000, 9), 3), (20_000, (30_000, 3), 3)],
)
def test_words_are_drawn_for_each_group_and_not_for_each_weight(group: int | None, layers: tuple[int, ...], groups: int) -> None:
    """Two for the place and half of one for the sign, whatever the number of weights."""
    ranges, source = box([0.0] * len(layers), [1.0] * len(layers), layers), Counting(2)
    Harmony(1.0, group).encode(torch.zeros(2, sum(layers)), ranges, source)
    assert source.used == [2 * groups + -(-groups // 2)] * 2


def test_each_report_moves_one_weight_of_each_group_and_leaves_the_centers() -> None:
    ranges, mechanism = box([0.3, -0.2], [0.1, 2.0], [7, 5]), Harmony(1.0, 3)
    values = torch.randn(40, 12, generator=torch.Generator().manual_seed(3))
    reports = mechanism.encode(values, ranges, streams(40))
    decoded = mechanism.decode(reports, ranges)
    start = 0
    for number, size in enumerate([3, 3, 1, 3, 2]):
        center, radius = (0.3, 0.1) if number < 3 else (-0.2, 2.0)
        for row in range(40):
            expected = torch.full((size,), center)
            expected[reports.index[row, number]] += size * radius * mechanism.gain * (1 if reports.signs[row, number] else -1)
            torch.testing.assert_close(decoded[row, start : start + size], expected)
        start += size


@pytest.mark.parametrize("clients", [1, 255, 256])
@pytest.mark.parametrize("group", [None, 1, 3])
def test_the_aggregate_is_the_mean_of_what_is_decoded_however_it_is_batched(clients: int, group: int | None) -> None:
    ranges, mechanism = box([0.3, -0.2, 5.0], [0.1, 2.0, 0.7], [7, 5, 1]), Harmony(1.0, group)
    values = torch.randn(clients, 13, generator=torch.Generator().manual_seed(3))
    whole = mechanism.encode(values, ranges, streams(clients))
    mean = mechanism.aggregate([whole], ranges)
    torch.testing.assert_close(mean, mechanism.decode(whole, ranges).double().mean(dim=0).float(), rtol=1e-5, atol=1e-5)
    for cuts in ([clients // 2], [1, clients // 3 + 1]):
        parts = [
            IndexedBitReports(index, signs, whole.group_sizes)
            for index, signs in zip(np.split(whole.index, cuts), np.split(whole.signs, cuts), strict=True)
        ]
        assert torch.equal(mechanism.aggregate(parts, ranges), mean)
        assert torch.equal(mechanism.aggregate(parts[::-1], ranges), mean)
    assert torch.equal(mechanism.aggregate([IndexedBitReports.mix([whole], np.random.default_rng(0))], ranges), mean)


def test_reports_do_not_depend_on_batching_or_order() -> None:
    layers = (2 * COORDINATE_BLOCK + 5, 3, 41)  # with groups of 2, more than one block of them
    ranges, mechanism = box([0.0, 0.3, 0.1], [0.1, 1.0, 2.0], layers), Harmony(1.0, 2)
    values = torch.randn(4, sum(layers), generator=torch.Generator().manual_seed(11)) * 0.2
    clients = [3, 40, 7, 1000]
    together = mechanism.encode(values, ranges, SeededStreams.for_clients(1, 6, clients))
    for rows in ([0], [3, 2, 1, 0], [2, 0]):
        alone = mechanism.encode(values[rows], ranges, SeededStreams.for_clients(1, 6, [clients[row] for row in rows]))
        np.testing.assert_array_equal(alone.index, together.index[rows])
        np.testing.assert_array_equal(alone.signs, together.signs[rows])


def test_groups_of_one_are_duchi_bit_for_bit() -> None:
    ranges = box([0.0, 0.3], [0.1, 1.0], [COORDINATE_BLOCK + 3, 42])
    values = torch.randn(3, COORDINATE_BLOCK + 45, generator=torch.Generator().manual_seed(5)) * 0.2
    ours, theirs = Harmony(1.0, 1), Duchi(1.0)
    mine, bits = ours.encode(values, ranges, streams(3)), theirs.encode(values, ranges, streams(3))
    assert list(mine.payloads()) == list(bits.payloads())
    torch.testing.assert_close(ours.decode(mine, ranges), theirs.decode(bits, ranges))
    mean = theirs.aggregate([bits], ranges)
    torch.testing.assert_close(ours.aggregate([mine], ranges), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.noise(ranges).variance(values), theirs.noise(ranges).variance(values))
    for clients in (1, 3):
        torch.testing.assert_close(ours.noise(ranges).mean_variance(mean, clients), theirs.noise(ranges).mean_variance(mean, clients))
        assert ours.noise(ranges).largest_std(clients).tolist() == pytest.approx(theirs.noise(ranges).largest_std(clients).tolist())
    assert payload_bits(ours, ranges) == payload_bits(theirs, ranges)


def test_values_outside_the_box_report_like_the_clamped_ones() -> None:
    ranges, mechanism = box([0.5, -1.0], [0.25, 2.0], [500, 500]), Harmony(1.0, 4)
    values = torch.empty(3, 1000).uniform_(-9, 9, generator=torch.Generator().manual_seed(1))
    center, radius = ranges.expand()
    clamped = values.clamp((center - radius).float(), (center + radius).float())
    outside, inside = (mechanism.encode(inputs, ranges, streams(3)) for inputs in (values, clamped))
    np.testing.assert_array_equal(outside.index, inside.index)
    np.testing.assert_array_equal(outside.signs, inside.signs)


def test_clients_may_share_one_row_and_values_may_need_gradients() -> None:
    ranges, mechanism = box([0.0], [1.0], [40]), Harmony(1.0, 7)
    row = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    plain = mechanism.encode(row.repeat(3, 1), ranges, streams(3))
    for values in (row.expand(3, 40), row.repeat(3, 1).T.contiguous().T.requires_grad_()):
        other = mechanism.encode(values, ranges, streams(3))
        np.testing.assert_array_equal(other.index, plain.index)
        np.testing.assert_array_equal(other.signs, plain.signs)


@pytest.mark.parametrize("source", [SecureSource(), torch.Generator().manual_seed(0)])
def test_other_sources_give_both_signs_and_all_places(source: Any) -> None:
    report = Harmony(1.0, 3).encode(torch.zeros(2, 12_000), box([0.0], [1.0], [12_000]), source)
    for row in range(2):  # 8 standard deviations: 1e-14 in the unseeded case
        assert abs(int(report.signs[row].sum()) - 2000) < 8 * math.sqrt(1000)
        assert np.all(np.abs(np.bincount(report.index[row], minlength=3) - 4000 / 3) < 8 * math.sqrt(4000 * 2 / 9))
    assert (report.index[0] != report.index[1]).any()


# --- the wire ---------------------------------------------------------------------------------------------------------


def test_payloads_of_the_two_layer_cnn() -> None:
    ranges = box([0.0] * 8, [0.075] * 8, CNN)
    mechanism = Harmony(1.0)
    assert payload_bits(mechanism, ranges) == 71  # indices 8 + 4 + 13 + 5 + 14 + 6 + 9 + 4, and 8 signs
    assert (payload_bits(Duchi(1.0), ranges), 32 * ranges.dimension) == (21_840, 698_880)
    assert payload_bits(Harmony(1.0, 100), ranges) == 217 * 8 + 2 * 7 + 6 + 2 * 5  # groups of 100, 50, 20 and 10 weights
    report = mechanism.encode(torch.zeros(2, 21_840), ranges, streams(2))
    assert {len(payload) for payload in report.payloads()} == {9} == {report.bytes_per_client}


@pytest.mark.parametrize("group", [None, 1, 2, 5, 16])
def test_measured_bytes_are_the_stated_bits(group: int | None) -> None:
    ranges, mechanism = box([0.0, 0.0], [1.0, 1.0], [37, 3]), Harmony(1.0, group)
    reports = mechanism.encode(torch.zeros(3, 40), ranges, streams(3))
    payloads = list(reports.payloads())
    assert {len(payload) for payload in payloads} == {math.ceil(payload_bits(mechanism, ranges) / 8)}
    received = mechanism.read(payloads, ranges)
    assert torch.equal(mechanism.aggregate([received], ranges), mechanism.aggregate([reports], ranges))


@pytest.mark.parametrize("group", [1, 4, 7, 40, None])
@pytest.mark.parametrize("layers", [(40,), (40, 3, 1), (8, 41, 16)])
def test_what_is_told_of_a_report_without_its_groups_agrees_with_them(group: int | None, layers: tuple[int, ...]) -> None:
    ranges, mechanism = LayerRanges(torch.tensor(0.0), torch.tensor(1.0), layers), Harmony(1.0, group)
    units = mechanism.units(ranges)
    release = mechanism.release(ranges)
    bits, weights = units.bits_and_weights_per_unit()
    assert payload_bits(mechanism, ranges) == bits.sum()
    assert (release.units, release.sampled) == (units.count, weights.max())


def test_good_reports_are_kept_when_bad_ones_arrive_with_them() -> None:
    ranges, mechanism = box([0.0], [1.0], [5]), Harmony(1.0)  # 3 bits of index and a sign: 4 of a byte's 8
    good = list(mechanism.encode(torch.zeros(3, 5), ranges, streams(3)).payloads())
    received, refused = read_valid(mechanism, [good[0], bytes([7]), good[1], b"", bytes([0x40]), good[2]], ranges)
    assert received is not None
    assert list(received.payloads()) == good
    assert [(one.place, one.reason) for one in refused] == [
        (1, "a report names index 7 in a group of 5 weights, expected 0 to 4"),
        (3, f"a report has 0 bytes, expected 1 for 1 groups: {WRONG_LENGTH_HINT}"),
        (4, "a report has bits set after its 1 groups, expected zeros"),
    ]
    assert read_valid(mechanism, [bytes([7])], ranges)[0] is None


# --- what is refused, and what is stated ------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, -1, True, False, 1.0, 2.5, "3", math.nan, math.inf])
def test_a_group_that_is_no_positive_whole_number_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match="group must be a positive whole number") as caught:
        Harmony(1.0, group)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("epsilon", [0, -1.0, math.nan, math.inf, 1e-10, True, "1"])
def test_an_epsilon_that_duchi_refuses_is_refused(epsilon: Any) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        Harmony(epsilon)


def test_a_group_larger_than_every_layer_is_refused_and_the_largest_is_not() -> None:
    ranges = box([0.0, 0.0], [1.0, 1.0], [3, 8])
    assert guarantee_of(Harmony(1.0, 8), ranges).units_per_round == 2
    mechanism = Harmony(1.0, 9)
    for use in (partial(guarantee_of, mechanism), partial(payload_bits, mechanism), mechanism.release):
        with pytest.raises(ConfigError, match="group is 9, but the largest layer has 8 weights"):
            use(ranges)


def test_a_group_that_a_word_cannot_index_is_refused() -> None:
    assert payload_bits(Harmony(1.0), box([0.0], [1.0], [WORDS - 1])) == 33
    with pytest.raises(ConfigError, match="to a smaller number"):
        payload_bits(Harmony(1.0), box([0.0], [1.0], [WORDS]))


SECRET = 8675.309


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_refused_where_it_is_sampled_and_not_looked_at_elsewhere(bad: float) -> None:
    ranges = box([0.0], [1.0], [3])
    values = torch.tensor([[0.1, bad, SECRET]])
    with pytest.raises(PrivacyError, match="NaN or infinity; nothing was sent") as caught:
        Harmony(1.0).encode(values, ranges, Prepared(place_words(1, 3), 0))
    assert "867" not in str(caught.value)
    for index in (0, 2):
        report = Harmony(1.0).encode(values, ranges, Prepared(place_words(index, 3), 0))
        assert bool(torch.isfinite(Harmony(1.0).decode(report, ranges)).all())


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.tensor([[SECRET, 0.0, 0.0]], dtype=torch.float64), id="float64"),
        pytest.param(torch.tensor([[SECRET, 0.0, 0.0]], dtype=torch.float16), id="float16"),
        pytest.param(torch.tensor([[8675, 0, 0]]), id="integers"),
        pytest.param(torch.tensor([SECRET, 0.0, 0.0]), id="one-dimensional"),
        pytest.param(torch.tensor([[SECRET, 0.0]]), id="too-narrow"),
        pytest.param(torch.tensor([[SECRET, 0.0, 0.0, 0.0]]), id="too-wide"),
        pytest.param(torch.tensor([[[SECRET, 0.0, 0.0]]]), id="three-dimensional"),
        pytest.param(torch.empty(0), id="empty"),
        pytest.param(torch.empty(1, 0), id="no-weights"),
    ],
)
@pytest.mark.parametrize("group", [None, 1, 2])
def test_other_dtypes_and_shapes_are_refused_without_being_repeated(values: Tensor, group: int | None) -> None:
    with pytest.raises(PrivacyError, match="nothing was sent") as caught:
        Harmony(1.0, group).encode(values, box([0.0], [1.0], [3]), streams(len(values)))
    assert "867" not in str(caught.value)


def test_aggregate_and_decode_refuse_missing_or_foreign_reports() -> None:
    mechanism, ranges = Harmony(1.0, 4), box([0.0], [1.0], [8])
    empty = mechanism.read([], ranges)
    for reports in ([], [empty], [empty, empty]):
        with pytest.raises(PrivacyError, match="no report"):
            mechanism.aggregate(reports, ranges)
    other = Harmony(1.0, 8).encode(torch.zeros(1, 8), ranges, streams(1))
    narrow = mechanism.encode(torch.zeros(1, 7), box([0.0], [1.0], [7]), streams(1))
    bits: Any = BitReports(np.zeros((1, 1), dtype=np.uint8), 8)
    for foreign, message in (
        (other, "other group sizes"),
        (narrow, "7 weights, but the clipping ranges have 8"),
        (bits, "expected IndexedBitReports"),
    ):
        with pytest.raises(PrivacyError, match=message):
            mechanism.aggregate([foreign], ranges)
        with pytest.raises(PrivacyError, match=message):
            mechanism.decode(foreign, ranges)


@pytest.mark.parametrize(("group", "unit", "units"), [(None, "layer", 2), (1, "weight", 11), (3, "group", 4)])
def test_guarantee_and_release_state_the_unit_and_count_it(group: int | None, unit: Any, units: int) -> None:
    ranges, mechanism = box([0.0, 0.0], [1.0, 1.0], [8, 3]), Harmony(1.5, group)
    guarantee = guarantee_of(mechanism, ranges)
    assert (guarantee.epsilon, guarantee.delta, guarantee.unit, guarantee.units_per_round) == (1.5, 0.0, unit, units)
    assert (guarantee.trust_model, guarantee.status, guarantee.scope) == ("local", "proved", "round")
    assert guarantee.assumptions
    release = mechanism.release(ranges)
    assert (release.mechanism, release.epsilon, release.units, release.unit) == ("harmony", 1.5, units, unit)
    assert release.sampled == {None: 8, 1: 1, 3: 3}[group]
    if group == 1:
        assert release == replace(Duchi(1.5).release(ranges), mechanism="harmony")


@pytest.mark.parametrize(("epsilon", "told"), [(1.0, False), (40.0, True)])
def test_a_budget_beyond_the_bits_is_told_as_a_caveat(epsilon: float, told: bool) -> None:
    assert len(Harmony(epsilon).properties.caveats) == told
