"""Adaptive clipping: a bit beside each vector, under the same noise, from which the next clipping norm follows."""

from __future__ import annotations

from math import exp, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from ldpfl import ConfigError, LayerRanges
from ldpfl.mechanisms import payload_bits
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.ranges import NormQuantile
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.transport.shuffling import ReportPool
from ldpfl.transport.shuffling.records import RecordPlan
from ldpfl.util.randomness import SecureSource, SeededStreams

DIMENSION = 3
COORDINATES = st.floats(width=32, allow_nan=True, allow_infinity=True)


def ranges_at(norm: float, dimension: int = DIMENSION) -> LayerRanges:
    return LayerRanges(0.0, norm, (dimension,))


def fedavg(noise: float = 2.0, *, summed: bool = False, steps: int = STEPS) -> DpFedAvg:
    return DpFedAvg(RecordClip(0.5, steps, adaptive=True), noise, summed=summed)


def lengths(norms: Tensor) -> Tensor:
    """Return updates (K, 3) of these ``norms`` (K,) in any direction."""
    drawn = torch.randn(len(norms), DIMENSION, generator=torch.Generator().manual_seed(3))
    scaled: Tensor = drawn / drawn.norm(dim=1, keepdim=True) * norms[:, None]
    return scaled.float()


@given(st.lists(COORDINATES, min_size=DIMENSION, max_size=DIMENSION), st.floats(1e-20, 1e20), st.integers(0, 20))
def test_vector_and_bit_together_are_not_longer_than_the_norm_in_exact_arithmetic(values: list[float], norm: float, power: int) -> None:
    """So two records lie no farther apart than two clipped gradients, and the accountant's mu holds."""
    points = RecordClip(norm, 2**power, adaptive=True).points(torch.tensor([values], dtype=torch.float32))
    exact = [int(value) for value in points[0].tolist()]
    assert len(exact) == DIMENSION + 1
    assert sum(value**2 for value in exact) <= 4**power
    assert torch.equal(points, points.trunc())
    if not np.isfinite(values).all():
        assert not any(exact)


def test_the_bit_says_whether_the_vector_was_clipped() -> None:
    clip = RecordClip(1.0, adaptive=True)
    points = clip.points(torch.tensor([[0.0, 1.0], [0.3, 0.4], [3.0, 4.0], [0.0, 0.0]]))
    assert (points[:, -1] / clip.bit).tolist() == [1, 1, -1, 1]
    torch.testing.assert_close(
        points[:, :-1] / clip.scale, torch.tensor([[0, 1], [0.3, 0.4], [0.6, 0.8], [0, 0]]).double(), atol=4e-6, rtol=0
    )


def test_what_is_released_is_what_a_fixed_norm_releases() -> None:
    """So ledgers, accountants, policies and verifiers are the same, whatever norm a server asks for."""
    for adaptive, fixed in (
        (fedavg(), DpFedAvg(RecordClip(0.5), 2.0)),
        (fedavg(summed=True), DpFedAvg(RecordClip(0.5), 2.0, summed=True)),
        (DpSgd(RecordClip(0.5, adaptive=True), 2.0), DpSgd(RecordClip(0.5), 2.0)),
    ):
        assert adaptive.max_sum_length(9, 9, 1000) == fixed.max_sum_length(9, 9, 1000)
        for norm in (1e-20, 0.5, 1e20):
            assert adaptive.release(ranges_at(norm)) == fixed.release(ranges_at(0.5))


@pytest.mark.parametrize("norm", [1e-20, 1e-3, 1.0, 1e20])
def test_noise_is_in_lattice_points_whatever_norm_a_server_asks_for(norm: float) -> None:
    """With the same random bits, reports of two updates differ by their lattice points alone: no more than twice the norm C."""
    mechanism, clients = fedavg(), range(40)
    values = torch.randn(40, DIMENSION, generator=torch.Generator().manual_seed(1))
    one, other = (
        mechanism.points(part, ranges_at(norm), SeededStreams.for_clients(1, 1, clients)) for part in (values, torch.zeros_like(values))
    )
    noise = other - np.array([0] * DIMENSION + [mechanism.clip.bit])
    again = mechanism.points(torch.zeros_like(values), ranges_at(1.0), SeededStreams.for_clients(1, 1, clients))
    assert np.array_equal(noise, again - np.array([0] * DIMENSION + [mechanism.clip.bit]))
    assert (np.square(one - noise).sum(axis=1) <= STEPS**2).all()


@pytest.mark.parametrize("norm", [1e-22, 1e22])
def test_a_norm_that_no_honest_server_asks_for_is_refused_before_anything_is_sent(norm: float) -> None:
    with pytest.raises(ConfigError, match="clipping norm must lie between"):
        payload_bits(fedavg(), ranges_at(norm))


@pytest.mark.parametrize("summed", [False, True])
def test_a_report_has_the_same_form_whatever_the_data(summed: bool) -> None:
    mechanism = fedavg(summed=summed)
    rows = torch.tensor([[0.0] * 3, [1e30, 0, 0], [1e-30] * 3, [0.5, 0, 0]])
    if summed:
        assert mechanism.points(rows, ranges_at(0.5), SecureSource()).shape == (4, DIMENSION + 1)
        assert payload_bits(mechanism, ranges_at(0.5)) == 64 * (DIMENSION + 1)
        return
    payloads = list(mechanism.encode(rows, ranges_at(0.5), SecureSource()).payloads())
    assert {len(payload) for payload in payloads} == {4 * (DIMENSION + 1)} == {payload_bits(mechanism, ranges_at(0.5)) // 8}
    estimates = mechanism.decode(mechanism.read(payloads, ranges_at(0.5)), ranges_at(0.5))
    assert estimates.shape == (4, DIMENSION)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("norm", [0.05, 0.5, 5.0])
def test_fraction_and_mean_are_unbiased(norm: float, summed: bool) -> None:
    """20,000 clients: each figure within 5 standard errors, so 24 figures are wrong once in 70,000 runs."""
    clients, noise = 20_000, 2.0
    values = lengths(torch.linspace(0.01, 1.0, clients))
    mechanism, ranges = fedavg(noise, summed=summed), ranges_at(norm)
    reports: Any
    if summed:
        reports = mechanism.reports_from_sum(
            mechanism.points(values, ranges, SeededStreams.for_clients(2, 1, range(clients))).sum(axis=0), clients
        )
    else:
        reports = mechanism.encode(values, ranges, SeededStreams.for_clients(2, 1, range(clients)))
    true = float((values.double().norm(dim=1) <= norm).double().mean())
    std = noise * STEPS / (2 * mechanism.clip.bit * sqrt(clients))
    assert abs(mechanism.fraction_within([reports], ranges) - true) < 5 * std
    clipped = values.double() * (norm / values.double().norm(dim=1, keepdim=True)).clamp_max(1)
    error = mechanism.aggregate([reports], ranges).double() - clipped.mean(dim=0)
    stated = float(mechanism.noise(ranges).largest_std(clients)[0])
    assert stated == pytest.approx(noise * norm * sqrt(1 + 0.25**2) / sqrt(clients))  # 3 % more than without the bit
    assert float(error.abs().max()) < 5 * stated


def test_fraction_of_records_is_unbiased() -> None:
    """Sums of 50 records of 400 clients, within 5 standard errors: wrong once in a million."""
    clip, norms = RecordClip(0.3, adaptive=True), torch.rand(400, 50, generator=torch.Generator().manual_seed(5))
    sums = torch.stack([clip.points(lengths(own)).sum(dim=0) for own in norms]).long()
    mechanism = DpSgd(clip, 4.0, records=50.0)
    reports = mechanism.encode(sums, ranges_at(0.3), SeededStreams.for_clients(2, 1, range(400)))
    true = float((norms <= 0.3).double().mean())
    assert abs(mechanism.fraction_within([reports], ranges_at(0.3)) - true) < 5 * 4.0 * STEPS / (2 * clip.bit * 50 * sqrt(400)) + 1e-4
    assert mechanism.aggregate([reports], ranges_at(0.3)).shape == (DIMENSION,)
    torch.testing.assert_close(
        mechanism.aggregate([reports], ranges_at(0.3)), mechanism.decode(reports, ranges_at(0.3)).mean(dim=0), atol=1e-5, rtol=1e-4
    )


@pytest.mark.thorough_except("0.2-5.0")
@pytest.mark.parametrize("start", [0.05, 5.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5])
def test_the_norm_converges_to_the_quantile(start: float, quantile: float) -> None:
    """Norms are uniform from 0 to 1, so C goes to ``quantile``. Noise of 0.13 in a fraction moves log C by 0.026 a round, and a share
    0.2 C of its distance is made up for: its mean over 100 rounds has a standard error of 0.013. Five of them: wrong once in a million."""
    clients, rule = 1000, NormQuantile(quantile, 0.2, start)
    values, mechanism, ranges, norms = lengths(torch.linspace(0, 1, clients)), fedavg(), ranges_at(start), []
    for number in range(1, 201):
        reports = mechanism.encode(values, ranges, SeededStreams.for_clients(3, number, range(clients)))
        ranges = rule.ranges_after_round(ranges, mechanism.fraction_within([reports], ranges))
        norms.append(float(ranges.radii[0]))
    assert float(np.mean(norms[100:])) == pytest.approx(quantile, abs=0.07)


def test_a_step_is_that_of_the_paper_and_stays_in_its_limits() -> None:
    rule = NormQuantile(0.5, 0.2, 2.0)
    assert float(rule.ranges_after_round(ranges_at(3.0), 0.9).radii[0]) == pytest.approx(3 * exp(-0.2 * 0.4))
    assert float(rule.ranges_after_round(ranges_at(3.0), -1e9).radii[0]) == pytest.approx(2e4)
    assert float(rule.ranges_after_round(ranges_at(3.0), float("inf")).radii[0]) == 3.0
    assert float(rule.ranges_after_round(ranges_at(3.0), 1e9).radii[0]) == pytest.approx(2e-4)


def test_a_relay_carries_the_bit_with_the_vector() -> None:
    mechanism, ranges = fedavg(), ranges_at(0.2)
    values = lengths(torch.linspace(0, 1, 20))
    reports = mechanism.encode(values, ranges, SeededStreams.for_clients(4, 1, range(20)))
    plan = RecordPlan(mechanism, ranges)
    plaintexts = np.concatenate([plan.split(payload) for payload in reports.payloads()])
    joining = plan.joining()
    joining.add(plaintexts)
    for pool in (plan.join(plaintexts, 20).pool, joining.joined(20).pool):
        assert isinstance(pool, ReportPool)
        torch.testing.assert_close(pool.aggregate(mechanism, ranges).mean, mechanism.aggregate([reports], ranges))
        assert mechanism.fraction_within([pool.reports], ranges) == pytest.approx(mechanism.fraction_within([reports], ranges))
