"""DP-SGD at the client: bounds that hold in integers, noise of the stated size, and what is not its own."""

from __future__ import annotations

from math import inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from ldpfl import ConfigError, LayerRanges, PrivacyError
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.mechanisms.reports.vectors import VectorReports
from ldpfl.util.randomness import SecureSource, SeededStreams

DIMENSION = 40
RANGES = LayerRanges(torch.zeros(1), torch.ones(1), (DIMENSION,))


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=3, max_size=3),
    st.floats(1e-20, 1e20),
)
@settings(max_examples=4 * settings().max_examples)
@pytest.mark.slow
def test_no_record_is_longer_than_the_norm_in_exact_arithmetic(values: list[float], norm: float) -> None:
    points = RecordClip(norm).points(torch.tensor([values], dtype=torch.float32))
    exact = [int(value) for value in points[0].tolist()]
    assert sum(value**2 for value in exact) <= STEPS**2
    assert torch.equal(points, points.trunc())
    if not np.isfinite(values).all():
        assert not any(exact)


def test_short_gradients_stay_and_long_ones_keep_their_direction() -> None:
    rows = torch.tensor([[0.3, -0.4], [30.0, -40.0], [0.0, 0.0]])
    points = RecordClip(1.0).points(rows) / STEPS
    torch.testing.assert_close(points, torch.tensor([[0.3, -0.4], [0.6, -0.8], [0.0, 0.0]], dtype=torch.float64), atol=3e-6, rtol=0)


def test_the_noise_is_of_the_stated_size_and_in_units_of_the_norm() -> None:
    """20,000 draws a row: standard deviations within 5 of their own standard errors, so wrong once in a million."""
    mechanism = DpSgd(RecordClip(0.02), 3.0, records=10.0)
    clients = 500
    sums = torch.full((clients, DIMENSION), 5 * STEPS, dtype=torch.int64)
    reports = mechanism.encode(sums, RANGES, SeededStreams.for_clients(1, 1, range(clients)))
    assert isinstance(reports, VectorReports)
    drawn = reports.values.double() - 0.5
    assert float(drawn.std()) == pytest.approx(0.3, rel=5 / sqrt(2 * drawn.numel()))
    assert float(mechanism.noise(RANGES).largest_std(4)[0]) == pytest.approx(0.15)
    torch.testing.assert_close(mechanism.aggregate([reports], RANGES), reports.values.double().mean(dim=0).float())


def test_mu_of_a_record_is_twice_the_norm_over_the_noise() -> None:
    release = DpSgd(RecordClip(0.5), 4.0).release(RANGES)
    assert release.unit == "record"
    assert 0.5 <= release.mu <= 0.5 * (1 + 1e-14)


@pytest.mark.parametrize("values", [torch.zeros(1, DIMENSION), torch.zeros(1, DIMENSION, dtype=torch.float64)])
def test_what_was_not_clipped_record_by_record_is_refused(values: torch.Tensor) -> None:
    with pytest.raises(PrivacyError, match="int64 sums of clipped gradients"):
        DpSgd(RecordClip(1.0), 1.0).encode(values, RANGES, SecureSource())


def test_a_sum_over_clients_has_the_noise_of_all_and_shows_no_client() -> None:
    mechanism = DpSgd(RecordClip(1.0), 2.0, records=1.0, summed=True)
    batches = [mechanism.encode(torch.full((50, DIMENSION), 3 * STEPS, dtype=torch.int64), RANGES, SecureSource()) for _ in range(4)]
    sums = [batch for batch in batches if isinstance(batch, SummedReports)]
    assert len(sums) == 4
    with pytest.raises(PrivacyError, match="has no noise yet"):
        mechanism.aggregate(batches[:1], RANGES)
    with pytest.raises(PrivacyError, match="cannot be decoded into single reports"):
        list(sums[0].payloads())
    draws = []
    for seed in range(300):
        mixed = SummedReports.mix(sums, np.random.default_rng(seed))
        draws.append(mechanism.aggregate([mixed], RANGES).double() - 3)
    found = torch.stack(draws)
    assert float(found.std()) == pytest.approx(2 / sqrt(200), rel=5 / sqrt(2 * found.numel()))
    with pytest.raises(PrivacyError, match="cannot be decoded into single reports"):
        mechanism.decode(mixed, RANGES)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, 2**53, -(2**53)])
def test_sums_that_no_clipped_gradients_add_up_to_are_refused(value: int) -> None:
    with pytest.raises(PrivacyError, match=r"exceeds 2\^52 lattice points"):
        DpSgd(RecordClip(1.0), 1.0).encode(torch.full((1, DIMENSION), value, dtype=torch.int64), RANGES, SecureSource())


IMPOSSIBLE = [(norm, 1.0) for norm in (5e-324, 1e-300, 1e300, 0.0, -1.0, nan, inf)] + [(1.0, multiplier) for multiplier in (0.0, nan, 1e9)]


@pytest.mark.parametrize(("norm", "multiplier"), IMPOSSIBLE)
def test_impossible_settings_are_refused(norm: float, multiplier: float) -> None:
    with pytest.raises(ConfigError):
        DpSgd(RecordClip(norm), multiplier)


def test_a_clients_report_is_its_own_whoever_is_beside_it() -> None:
    """More clients than fit a block, and a client whose coordinates do not fit one."""
    for clients, dimension in ((5000, 30), (2, 40_000)):
        ranges, sums = LayerRanges(0.0, 1.0, (dimension,)), torch.arange(clients * dimension).reshape(clients, dimension)
        mechanism = DpSgd(RecordClip(1.0), 1.0)
        together = mechanism.encode(sums, ranges, SeededStreams.for_clients(1, 1, range(clients)))
        assert isinstance(together, VectorReports)
        for client in {0, clients // 2, clients - 1}:
            alone = mechanism.encode(sums[client : client + 1], ranges, SeededStreams.for_clients(1, 1, [client]))
            assert isinstance(alone, VectorReports)
            assert torch.equal(alone.values[0], together.values[client])
