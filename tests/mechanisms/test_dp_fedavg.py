"""DP-FedAvg: a client's vector is bounded in integers, its noise is of the stated size, and it keeps its own scale."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from ldpfl import LayerRanges, mechanisms
from ldpfl.auditing import audit_mechanism
from ldpfl.mechanisms import guarantee_of
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.reports.vectors import VectorReports
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.util.randomness import SecureSource, SeededStreams

RANGES = LayerRanges(0.0, 1.0, (3,))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
    st.floats(1e-20, 1e20),
    st.integers(10, 20),
)
def test_replacing_a_client_moves_a_sum_by_twice_the_norm_at_most(values: list[float], norm: float, power: int) -> None:
    """With the same random bits, so the same noise: in exact arithmetic."""
    mechanism = DpFedAvg(RecordClip(norm, 2**power), 1.0, summed=True)
    source = SeededStreams.for_clients(1, 1, [0])
    one, other = (
        mechanism.points(torch.tensor([row], dtype=torch.float32), RANGES, SeededStreams.for_clients(1, 1, [0]))[0]
        for row in (values, [-value for value in values])
    )
    noise = mechanism.points(torch.zeros(1, 3), RANGES, source)[0]
    assert sum(part**2 for part in (one - noise).tolist()) <= 4**power
    assert sum(part**2 for part in (one - other).tolist()) <= 4 * 4**power


def test_a_report_stands_for_the_clipped_vector_and_noise_of_the_stated_size() -> None:
    """15,000 draws: a standard deviation within 5 of its own standard errors, and means within 5; so wrong once in 300,000."""
    mechanism = DpFedAvg(RecordClip(0.5), 3.0)
    values = torch.tensor([[0.3, -0.4, 0.0]]).repeat(5000, 1) * 4  # four times too long
    reports = mechanism.encode(values, RANGES, SeededStreams.for_clients(1, 1, range(5000)))
    assert isinstance(reports, VectorReports)
    noise = reports.values.double() - torch.tensor([0.3, -0.4, 0.0])
    assert float(noise.std()) == pytest.approx(1.5, rel=5 / sqrt(2 * noise.numel()))
    assert float(noise.mean(dim=0).abs().max()) < 5 * 1.5 / sqrt(5000)
    assert float(mechanism.noise(RANGES).largest_std(9)[0]) == pytest.approx(0.5)
    assert float(mechanism.noise(RANGES).variance(values)[0, 0]) == pytest.approx(2.25)


def test_its_guarantee_is_for_a_whole_client() -> None:
    release = mechanisms.create("dp-fedavg", noise_multiplier=8.0, clip_norm=0.1).release(RANGES)
    assert (release.unit, release.units, release.protected) == ("vector", 1, True)
    assert 0.25 <= release.parameter <= 0.25 * (1 + 1e-14)
    assert guarantee_of(mechanisms.create("dp-fedavg", noise_multiplier=8.0), RANGES).epsilon == pytest.approx(
        gaussian_epsilon(0.25, 1e-5), rel=1e-9
    )


def test_reports_by_themselves_are_floats_and_do_not_add_up() -> None:
    alone, summed = DpFedAvg(RecordClip(1.0), 2.0).release(RANGES), DpFedAvg(RecordClip(1.0), 2.0, summed=True).release(RANGES)
    assert (alone.adds_up, summed.adds_up) == (False, True)


@pytest.mark.thorough
def test_an_audit_finds_nothing_against_it() -> None:
    found = audit_mechanism(mechanisms.create("dp-fedavg"), trials=2000, seed=3)
    assert found.passed, found.verdict
    assert found.epsilon_claimed == pytest.approx(gaussian_epsilon(0.5, 1e-5), rel=1e-9)


@pytest.mark.parametrize("summed", [False, True])
def test_values_are_taken_around_the_ranges_center(summed: bool) -> None:
    ranges, values = LayerRanges(0.7, 1.0, (3,)), torch.full((4000, 3), 0.9)
    mechanism = DpFedAvg(RecordClip(1.0), 2.0**-10, summed=summed)
    reports = mechanism.reports_from_sum(mechanism.points(values, ranges, SecureSource()).sum(axis=0), 4000) if summed else None
    found = mechanism.aggregate([reports or mechanism.encode(values, ranges, SecureSource())], ranges)
    np.testing.assert_allclose(found, 0.9, atol=1e-3)  # unseeded: noise of 1.5e-5, so 64 standard deviations
