"""Signs of a rotated direction: the rotation, the bits' exact odds, what the counts estimate, and how much noise is in that."""

from __future__ import annotations

from collections import Counter
from math import exp, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch

from ldpfl import ConfigError, LayerRanges, PrivacyError
from ldpfl.mechanisms import PublicState, payload_bits
from ldpfl.mechanisms.duchi import Duchi, thresholds
from ldpfl.mechanisms.reports.bits import BitReports
from ldpfl.mechanisms.rotated_sign import RotatedSign
from ldpfl.mechanisms.rotation import rotate, rotate_back, rotated_size
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.util.randomness import SeededStreams

DIMENSION = 21
RANGES = LayerRanges(torch.zeros(1), torch.ones(1), (DIMENSION,))


class Words:
    """A source that gives each client the same word for every bit: its first 16 bits, and the others if they are asked for.

    Where coordinates are sampled, places are drawn before, by whole words.
    """

    def __init__(self, word: int, *, sampled: bool = False) -> None:
        self._word, self._sampled, self._asked = word, sampled, Counter[int]()

    def int32(self, row: int, count: int) -> torch.Tensor:
        self._asked[row] += 1
        if self._sampled and self._asked[row] == 1:
            return torch.full((count,), self._word, dtype=torch.int32)
        if self._asked[row] == 1 + self._sampled:
            return torch.from_numpy(np.full(2 * count, self._word >> 16, dtype=np.int16).view(np.int32))
        return torch.full((count,), self._word & 0xFFFF, dtype=torch.int32)


def test_the_rotation_is_orthogonal_and_another_one_in_each_round() -> None:
    basis = torch.eye(rotated_size(DIMENSION))
    for key in (1, 2):
        matrix = rotate(basis, key)
        torch.testing.assert_close(matrix @ matrix.T, basis, atol=1e-6, rtol=0)
        assert torch.equal(matrix.abs(), torch.full_like(matrix, matrix.shape[0] ** -0.5))
    assert not torch.equal(rotate(basis, 1), rotate(basis, 2))


def test_rotating_back_undoes_it() -> None:
    row = torch.randn(1, DIMENSION, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate_back(rotate(row, 7)[0], DIMENSION, 7), row[0], atol=1e-6, rtol=0)


def test_a_rows_rotation_does_not_depend_on_the_others() -> None:
    rows = torch.randn(300, 3000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rotate(rows, 3)[17], rotate(rows[17:18], 3)[0])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-9, 0.01, 0.02, 1.0, 1e38])
def test_no_update_moves_a_bits_odds_beyond_epsilon(scale: float) -> None:
    """Exactly: the word below which + is sent lies between the two thresholds, whatever the update."""
    mechanism = RotatedSign(0.7, norm=0.02)
    low, high = thresholds(0.7)
    assert high / low <= exp(0.7)
    values = scale * torch.linspace(-1, 1, DIMENSION)[None].float()
    below, above = low - 2**31 - 1, high - 2**31  # the largest word that is always +, the smallest that never is
    for word, sent in ((below, 0xFF), (above, 0x00)):
        packed = mechanism.encode(values, RANGES, Words(word)).packed
        assert packed.shape == (1, rotated_size(DIMENSION) // 8)
        assert (packed == sent).all()


def test_a_full_update_uses_both_thresholds_and_none_uses_half() -> None:
    mechanism = RotatedSign(0.7, norm=0.02)
    half = (1 << 31) - thresholds(0.7)[0]

    def odds(values: torch.Tensor) -> np.ndarray:
        """Return how often each bit is +, by a search for the word at which it turns."""
        low, high = np.full(rotated_size(DIMENSION), -(2**31)), np.full(rotated_size(DIMENSION), 2**31 - 1)
        while (high - low > 1).any():
            middle, plus = (low + high) // 2, np.empty(len(low), dtype=bool)
            for word in np.unique(middle).tolist():
                sent = np.unpackbits(mechanism.encode(values, RANGES, Words(word)).packed[0], bitorder="little").astype(bool)
                plus[middle == word] = sent[middle == word]
            low, high = np.where(plus, middle, low), np.where(plus, high, middle)
        return np.asarray(high)

    update = torch.randn(1, DIMENSION, generator=torch.Generator().manual_seed(3))
    assert set(np.abs(odds(update))) == {half}
    assert set(odds(torch.zeros(1, DIMENSION))) == {0}
    short = update / update.norm() * 0.005
    np.testing.assert_allclose(np.abs(odds(short)), half / 4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.thorough
def test_counts_estimate_the_mean_direction_with_the_stated_noise() -> None:
    """Over rotations: 400 rounds of 200 clients; a bound that a right estimate exceeds with probability below 1e-6."""
    generator = torch.Generator().manual_seed(4)
    dimension, clients, rounds = 500, 200, 400
    ranges = LayerRanges(torch.zeros(1), torch.ones(1), (dimension,))
    mechanism = RotatedSign(0.5)
    values = torch.randn(clients, dimension, generator=generator) + 0.3
    mean = (values / values.norm(dim=1, keepdim=True)).mean(dim=0).double()
    found = []
    for number in range(1, rounds + 1):
        bound = mechanism.in_round(PublicState(number, torch.zeros(dimension), None, (dimension,)))
        reports = bound.encode(values, ranges, SeededStreams.for_clients(5, number, range(clients)))
        found.append(bound.aggregate([reports], ranges))
    estimates = torch.stack(found).double()
    noise = float(mechanism.noise(ranges).largest_std(clients)[0])
    assert noise == pytest.approx(Duchi(0.5).gain * sqrt(pi / (2 * 512 * clients)))
    # The direction: along the mean, the estimate is that of a rotated vector of 512 coordinates; sqrt(pi / 2) E|N(0, 1)| = 1.
    along = estimates @ (mean / mean.norm())
    assert float(along.mean()) == pytest.approx(float(mean.norm()), abs=5 * noise / sqrt(rounds) + 0.01 * float(mean.norm()))
    # Of a client's bits, a part 1 / A^2 of the variance is their mean; what the rotation adds is less than that here.
    assert sqrt(1 - 1 / Duchi(0.5).gain ** 2) * 0.99 < float(estimates.std(dim=0).mean()) / noise < 1.01


def test_the_release_is_of_bits_and_of_all_rotated_coordinates() -> None:
    release = RotatedSign(0.3).release(RANGES)
    assert (release.epsilon, release.units, release.unit) == (0.3, 32, "coordinate")
    assert payload_bits(RotatedSign(0.3), RANGES) == 32


def test_what_is_no_report_of_this_model_is_refused() -> None:
    mechanism = RotatedSign(1.0)
    with pytest.raises(PrivacyError, match="21 weights, but the clipping ranges have 32"):
        mechanism.aggregate([BitReports(np.zeros((1, 3), dtype=np.uint8), 21)], RANGES)
    for wrong in (-1.0, float("nan"), float("inf"), 1e30):
        with pytest.raises(ConfigError, match="norm"):
            RotatedSign(1.0, norm=wrong)


def cut_for_a_relay(mechanism: RotatedSign, clients: int) -> tuple[Any, RecordPlan, list[Any]]:
    """Return reports of random updates, the plan of their records, and each client's records."""
    values = torch.randn(clients, DIMENSION, generator=torch.Generator().manual_seed(6))
    reports = mechanism.encode(values, RANGES, SeededStreams.for_clients(7, 3, range(clients)))
    plan = RecordPlan(mechanism, RANGES)
    return reports, plan, [plan.split(payload) for payload in reports.payloads()]


def test_bits_that_were_mixed_one_by_one_say_the_same_and_missing_ones_leave_gaps() -> None:
    """Through the records of a relay: all of them are the pool itself, and without some coordinates these count as 0."""
    mechanism, clients = RotatedSign(2.0, round=3), 30
    reports, plan, cut = cut_for_a_relay(mechanism, clients)
    assert plan.records == 32
    whole = plan.join(np.concatenate(cut), clients).pool
    assert whole is not None
    assert torch.equal(whole.aggregate(mechanism, RANGES).mean, mechanism.aggregate([reports], RANGES))

    missing = plan.join(np.concatenate([records[5:] for records in cut]), clients).pool
    fewer = plan.join(np.concatenate([cut[0][:20], *cut[1:]]), clients).pool
    assert missing is not None
    assert fewer is not None
    known = missing.aggregate(mechanism, RANGES)
    assert known.reported is None
    counts = torch.from_numpy(reports.unpack()).double().mean(dim=0) * 2 - 1
    counts[:5] = 0
    expected = rotate_back(counts * Duchi(2.0).gain * sqrt(pi / 64), DIMENSION, 3)
    torch.testing.assert_close(known.mean.double(), expected, atol=1e-6, rtol=0)
    assert fewer.clients == clients - 1
    assert float((fewer.aggregate(mechanism, RANGES).mean - mechanism.aggregate([reports], RANGES)).abs().max()) < 0.2


@pytest.mark.parametrize("group", [1, 3, 16, 32])
@pytest.mark.slow
@pytest.mark.thorough_for("1", "3", "32")
def test_a_sampled_coordinate_stands_for_its_group(group: int) -> None:
    """The mean over many clients with the same update; a bound that a right estimate exceeds with probability below 1e-8."""
    mechanism, clients = RotatedSign(1.0, group=group, round=2), 5_000
    values = torch.linspace(-1, 1, DIMENSION)[None].repeat(clients, 1)
    reports = mechanism.encode(values, RANGES, SeededStreams.for_clients(11, 2, range(clients)))
    assert reports.bytes_per_client == (payload_bits(mechanism, RANGES) + 7) // 8
    found = mechanism.aggregate([reports], RANGES)
    expected = rotate_back(torch.sign(rotate(values[:1], 2)[0]).double() * sqrt(pi / 64), DIMENSION, 2)
    noise = float(mechanism.noise(RANGES).largest_std(clients)[0])
    assert noise == pytest.approx(Duchi(1.0).gain * sqrt(group * pi / (64 * clients)))
    assert float((found - expected).abs().max()) < 6.5 * noise
    own = mechanism.decode(reports, RANGES)
    torch.testing.assert_close(own.mean(dim=0), found, atol=1e-5, rtol=1e-4)
    measured = float(own.double().var(dim=0).mean())
    assert measured == pytest.approx(float(mechanism.noise(RANGES).variance(values[:1]).mean()), rel=0.05)


def test_sampled_coordinates_are_released_group_by_group() -> None:
    mechanism, clients = RotatedSign(2.0, group=8, round=3), 30
    release = mechanism.release(RANGES)
    assert (release.units, release.sampled, release.epsilon) == (4, 8, 2.0)
    assert payload_bits(mechanism, RANGES) == 4 * (3 + 1)
    reports, plan, cut = cut_for_a_relay(mechanism, clients)
    assert plan.records == 4
    whole = plan.join(np.concatenate(cut), clients).pool
    missing = plan.join(np.concatenate([records[1:] for records in cut]), clients).pool
    assert whole is not None
    assert missing is not None
    assert torch.equal(whole.aggregate(mechanism, RANGES).mean, mechanism.aggregate([reports], RANGES))
    known = rotate(whole.aggregate(mechanism, RANGES).mean[None], 3)[0]
    assert known.shape == (32,)
    assert not torch.equal(missing.aggregate(mechanism, RANGES).mean, whole.aggregate(mechanism, RANGES).mean)


def test_the_odds_of_a_sampled_bit_stay_within_epsilon_and_its_place_does_not_depend_on_the_update() -> None:
    mechanism = RotatedSign(0.7, group=8)
    low, high = thresholds(0.7)
    updates = torch.randn(50, DIMENSION, generator=torch.Generator().manual_seed(8)) * torch.logspace(-9, 9, 50)[:, None]
    for word, plus in ((low - 2**31 - 1, True), (high - 2**31, False)):
        reports = mechanism.encode(updates, RANGES, Words(word, sampled=True))
        assert (reports.signs == plus).all()
        assert (reports.index == reports.index[0]).all()


@pytest.mark.parametrize("group", [0, -1, 33, True])
def test_what_is_no_group_of_coordinates_is_refused(group: int) -> None:
    with pytest.raises(ConfigError, match="group"):
        RotatedSign(1.0, group=group).release(RANGES)
