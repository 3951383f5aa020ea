"""Parameter shuffling: what it keeps (counts), what it destroys (order, rows), and that its order is uniform."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from ldpfl import LayerRanges, LdpflError, PrivacyError
from ldpfl.mechanisms import BitReports, DenseReports, Reports, create
from ldpfl.transport.shuffling import ReportPool, mix

Bits = NDArray[np.uint8]


def pack(bits: Bits) -> BitReports:
    return BitReports(np.packbits(bits, axis=1, bitorder="little"), bits.shape[1])


def unpack(pool: ReportPool) -> Bits:
    assert isinstance(pool.reports, BitReports)
    return pool.reports.unpack()


def dense(pool: ReportPool) -> NDArray[np.float32]:
    assert isinstance(pool.reports, DenseReports)
    values: NDArray[np.float32] = pool.reports.values.numpy()
    return values


def random_bits(clients: int, dimension: int, seed: int = 0) -> Bits:
    return np.random.default_rng(seed).integers(0, 2, size=(clients, dimension), dtype=np.uint8)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("clients", "dimension"), [(1, 3), (2, 8), (37, 21), (300, 9)])
def test_every_id_keeps_its_reports(clients: int, dimension: int) -> None:
    bits = random_bits(clients, dimension)
    bits[:, 0], bits[:, 1] = 0, 1
    pool = mix([pack(bits)], generator(1))
    assert pool.clients == clients
    assert pool.reports.dimension == dimension
    np.testing.assert_array_equal(unpack(pool).sum(axis=0, dtype=np.int64), bits.sum(axis=0, dtype=np.int64))


def test_every_id_keeps_its_dense_values() -> None:
    values = torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
    mixed = dense(mix([DenseReports(values[:50]), DenseReports(values[50:])], generator(1)))
    np.testing.assert_array_equal(np.sort(mixed, axis=0), np.sort(values.numpy(), axis=0))
    assert not np.array_equal(mixed, values.numpy())


def test_mixed_payloads_are_valid_on_the_wire() -> None:
    pool = mix([pack(random_bits(20, 13))], generator(2))
    assert isinstance(pool.reports, BitReports)
    BitReports.from_payloads(list(pool.reports.payloads()), 13)  # no stray padding bits


def test_the_pool_is_a_function_of_counts_alone() -> None:
    # Whoever sent a bit, and however clients were batched: with equal draws the pool is the same.
    bits = random_bits(60, 33)
    rearranged = generator(5).permuted(bits, axis=0)
    assert not np.array_equal(bits, rearranged)
    whole = unpack(mix([pack(bits)], generator(3)))
    np.testing.assert_array_equal(unpack(mix([pack(rearranged)], generator(3))), whole)
    np.testing.assert_array_equal(unpack(mix([pack(bits[:7]), pack(bits[7:])], generator(3))), whole)
    assert not np.array_equal(unpack(mix([pack(bits)], generator(4))), whole)


def test_mixing_leaves_the_reports_alone() -> None:
    bits, values = random_bits(30, 16), torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    packed, before = pack(bits), values.clone()
    kept = packed.packed.copy()
    mix([packed], generator(0))
    mix([DenseReports(values)], generator(0))
    np.testing.assert_array_equal(packed.packed, kept)
    assert torch.equal(values, before)


def test_the_order_does_not_depend_on_when_somebody_looks() -> None:
    bits = random_bits(60, 33)
    drawn, again = generator(3), generator(3)
    first, later = mix([pack(bits)], drawn), mix([pack(bits)], drawn)
    drawn.random(100)
    assert not np.array_equal(unpack(later), unpack(first))  # an order of its own for each
    np.testing.assert_array_equal(unpack(first), unpack(mix([pack(bits)], again)))
    np.testing.assert_array_equal(unpack(later), unpack(mix([pack(bits)], again)))


def test_a_pool_can_be_mixed_again() -> None:
    bits = random_bits(60, 33)
    pool = mix([pack(bits)], generator(3))
    again = mix([pool.reports], generator(4))
    assert not np.array_equal(unpack(again), unpack(pool))
    np.testing.assert_array_equal(unpack(again).sum(axis=0), bits.sum(axis=0))


def test_the_mean_of_bits_needs_no_order() -> None:
    clients, dimension = 2000, 8000
    packed = BitReports(np.random.default_rng(0).integers(0, 256, size=(clients, dimension // 8), dtype=np.uint8), dimension)
    mechanism, ranges = create("duchi", epsilon=1.0), LayerRanges(torch.tensor(0.0), torch.tensor(1.0), (dimension,))
    tracemalloc.start()
    try:
        told = mix([packed], generator(0)).aggregate(mechanism, ranges)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * dimension  # an order takes clients * dimension / 8 bytes
    assert torch.equal(told.mean, mechanism.aggregate([packed], ranges))


COLUMNS = 24_000
FALSE_ALARM = 1e-6
"""Chance that a uniform arrangement fails a chi-square test below; the seeds are fixed, too."""


@pytest.mark.parametrize(("clients", "ones"), [(5, 2), (5, 4), (4, 1), (6, 3)])
def test_arrangements_of_bits_are_uniform(clients: int, ones: int) -> None:
    column = np.repeat(np.array([1, 0], dtype=np.uint8), [ones, clients - ones])
    bits = np.repeat(column[:, None], COLUMNS, axis=1)
    seen = Counter(map(bytes, unpack(mix([pack(bits)], generator(10 * clients + ones))).T))
    arrangements = math.comb(clients, ones)
    assert len(seen) == arrangements
    assert stats.chisquare(list(seen.values())).pvalue > FALSE_ALARM


def test_arrangements_of_dense_values_are_uniform() -> None:
    values = torch.arange(4, dtype=torch.float32)[:, None].expand(4, COLUMNS).contiguous()
    seen = Counter(map(bytes, dense(mix([DenseReports(values)], generator(8))).astype(np.uint8).T))
    assert len(seen) == math.factorial(4)
    assert stats.chisquare(list(seen.values())).pvalue > FALSE_ALARM


def test_rows_of_two_columns_are_unlinked_though_they_were_identical() -> None:
    """|z| < 4 for 12 bit pairs and 3 dense pairs: a false alarm once in 1,000 seeds; the seeds are fixed."""
    clients = 5_000
    column = random_bits(clients, 1, seed=7)
    mixed = unpack(mix([pack(np.repeat(column, 13, axis=1))], generator(9))).astype(np.float64)
    values = torch.randn(clients, 1, generator=torch.Generator().manual_seed(1)).expand(-1, 4).contiguous()
    mixed_values = dense(mix([DenseReports(values)], generator(9)))
    for table in (mixed, mixed_values):
        for left, right in pairwise(table.T):
            assert abs(np.corrcoef(left, right)[0, 1]) * math.sqrt(clients - 1) < 4


def test_rows_of_the_pool_say_nothing_about_clients() -> None:
    """Correlation of a column with itself before mixing, |z| < 4 for 9 columns: a false alarm once in 1,700 seeds."""
    clients = 5_000
    bits = random_bits(clients, 9, seed=3)
    mixed = unpack(mix([pack(bits)], generator(2)))
    for before, after in zip(bits.T, mixed.T, strict=True):
        assert abs(np.corrcoef(before, after)[0, 1]) * math.sqrt(clients - 1) < 4


def test_nothing_to_mix_is_refused() -> None:
    nothing: list[list[Reports]] = [[], [pack(np.zeros((0, 9), dtype=np.uint8))], [DenseReports(torch.zeros(0, 9))]]
    for reports in nothing:
        with pytest.raises(PrivacyError, match="no client sent a report"):
            mix(reports, generator(0))


@pytest.mark.parametrize(
    "other",
    [pack(random_bits(2, 16)), DenseReports(torch.zeros(2, 9))],
    ids=["another dimension in as many bytes", "another kind"],
)
def test_reports_that_do_not_fit_together_are_refused(other: Reports) -> None:
    with pytest.raises(LdpflError, match="different kinds or dimensions"):
        mix([pack(random_bits(2, 9)), other], generator(0))
