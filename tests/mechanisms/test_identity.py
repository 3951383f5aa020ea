"""The non-private reference: what goes in comes out, and it says that it protects nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ldpfl
from ldpfl import ConfigError, LayerRanges, PrivacyError, SeededStreams
from ldpfl.mechanisms import DenseReports, guarantee_of, payload_bits, privatize
from ldpfl.privacy import UnprotectedRelease

RANGES = LayerRanges(center=torch.tensor([0.0, 1.0]), radius=torch.tensor([0.1, 0.1]), sizes=(3, 2))
NONE = ldpfl.mechanisms.create("none")


def values(clients: int) -> Tensor:
    return torch.randn(clients, 5, generator=torch.Generator().manual_seed(clients))


def test_values_pass_unchanged_and_unclamped() -> None:
    held = values(4) * 100
    assert torch.equal(privatize(NONE, held, RANGES, SeededStreams.for_clients(0, 0, range(4))), held)


def test_reports_do_not_alias_the_callers_tensor() -> None:
    held = values(2)
    reports = NONE.encode(held, RANGES, SeededStreams.for_clients(0, 0, range(2)))
    held.zero_()
    assert bool(reports.values.abs().sum() > 0)


def test_aggregate_is_the_mean_and_does_not_depend_on_splits() -> None:
    held = values(301)
    mean = NONE.aggregate([DenseReports(held)], RANGES)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, held.double().mean(0).float())
    for cut in (1, 100, 300):
        assert torch.equal(NONE.aggregate([DenseReports(held[:cut]), DenseReports(held[cut:])], RANGES), mean)


def test_noise_is_zero_everywhere() -> None:
    assert torch.equal(NONE.noise(RANGES).variance(values(3)), torch.zeros(3, 5))
    assert torch.equal(NONE.noise(RANGES).mean_variance(torch.ones(5), 3), torch.zeros(5))
    assert NONE.noise(RANGES).largest_std(3).tolist() == [0.0, 0.0]


def test_payload_is_32_bits_a_weight_and_carries_the_values() -> None:
    held = values(2)
    payloads = list(NONE.encode(held, RANGES, SeededStreams.for_clients(0, 0, range(2))).payloads())
    assert payload_bits(NONE, RANGES) == 160
    assert [len(payload) * 8 for payload in payloads] == [160, 160]
    assert torch.equal(torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.float32).reshape(2, 5), held)


def test_guarantee_admits_that_nothing_is_protected() -> None:
    guarantee = guarantee_of(NONE, RANGES)
    assert guarantee.epsilon == math.inf
    assert guarantee.units_per_round == 5
    assert guarantee.assumptions == ("values leave as they are",)
    assert NONE.release(RANGES) == UnprotectedRelease("none", "values leave as they are", 5, "weight")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused(bad: float) -> None:
    held = values(2)
    held[1, 4] = bad
    with pytest.raises(PrivacyError, match="nothing was sent"):
        NONE.encode(held, RANGES, SeededStreams.for_clients(0, 0, range(2)))


@pytest.mark.parametrize("held", [torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5), torch.zeros(2, 4)])
def test_other_dtypes_and_shapes_are_refused(held: Tensor) -> None:
    with pytest.raises(PrivacyError, match="nothing was sent"):
        NONE.encode(held, RANGES, SeededStreams.for_clients(0, 0, range(2)))


def test_aggregate_refuses_missing_or_foreign_reports() -> None:
    for reports in ([], [DenseReports(torch.zeros(0, 5))]):
        with pytest.raises(PrivacyError, match="no report"):
            NONE.aggregate(reports, RANGES)
    with pytest.raises(PrivacyError, match="has 4 weights"):
        NONE.aggregate([DenseReports(torch.zeros(1, 4))], RANGES)


def test_create_refuses_a_budget_that_would_not_be_kept() -> None:
    with pytest.raises(ConfigError, match="none"):
        ldpfl.mechanisms.create("none", epsilon=1.0)
