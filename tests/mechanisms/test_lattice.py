"""Lattice points for a sum: how many bits they take, that sums of them are exact, and that they have the law of what is simulated."""

from __future__ import annotations

from itertools import product
from math import pi, sqrt

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ks_1samp, ks_2samp, norm
from torch import Tensor

from ldpfl import ConfigError, LayerRanges, PrivacyError
from ldpfl.mechanisms import payload_bits
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.lattice import Lattice, LatticeMechanism
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.transport.sums import Bits, fold, new_seed, shard, unshard
from ldpfl.transport.sums.masks import zeros
from ldpfl.util.randomness import SeededStreams

DIMENSION = 500
RANGES = LayerRanges(0.0, 1.0, (DIMENSION,))


def mechanisms(clients: int, bits: int) -> list[tuple[LatticeMechanism, Tensor]]:
    """Return mechanisms for sums of ``bits`` bits, with what each of ``clients`` puts into them."""
    drawn, lattice = (
        torch.randn(clients, DIMENSION, generator=torch.Generator().manual_seed(7)),
        Lattice.for_sum(clients, 30, 2.0, DIMENSION),
    )
    assert lattice.bits == 32
    steps = lattice.steps if bits == 32 else STEPS
    sums = RecordClip(0.5, steps).points(drawn).long() * 30
    return [
        (DpSgd(RecordClip(0.5, steps), 2.0, summed=True, bits=bits, records=30.0), sums),
        (DpFedAvg(RecordClip(0.5, steps), 2.0, summed=True, bits=bits), drawn),
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_over_two_servers_is_the_sum_of_the_points_bit_for_bit(bits: Bits) -> None:
    for mechanism, values in mechanisms(40, bits):
        points = mechanism.points(values, RANGES, SeededStreams.for_clients(5, 1, range(len(values))))
        total, seeds = zeros(DIMENSION, bits), [new_seed() for _ in points]
        for own, seed in zip(points, seeds, strict=True):
            share = shard(own, seed, bits)
            assert 8 * len(share) == payload_bits(mechanism, RANGES)
            fold(total, share)
        opened = unshard(total, seeds)
        assert np.array_equal(opened, points.sum(axis=0))
        mean = mechanism.aggregate([mechanism.reports_from_sum(opened, len(points))], RANGES)
        expected = points.sum(axis=0) / len(points) / mechanism.steps * (0.5 if isinstance(mechanism, DpFedAvg) else 1 / 30)
        np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [32, 64])
def test_no_sum_of_honest_clients_is_longer_than_is_said_and_one_of_uniform_numbers_is(bits: Bits) -> None:
    """All clients alike, at the clipping norm, make the longest that there is.

    Seeded. Of other seeds, one in 10^31 exceeds the bound. Its 12 standard deviations are 1.8 times both lengths in at most one of 10^8, by
    the law of the length, a noncentral chi with 500 degrees of freedom: 1e-4 for ``values`` and 3e-5 for ``alike`` of ``DpFedAvg``.
    """
    for mechanism, values in mechanisms(40, bits):
        inputs = (values, values[:1].expand(40, -1))
        sources = (SeededStreams.for_clients(5, number, range(40)) for number in (1, 2))
        totals = [mechanism.points(own, RANGES, source).sum(axis=0) for own, source in zip(inputs, sources, strict=True)]
        longest = mechanism.max_sum_length(40, 40, DIMENSION)
        lengths = [float(np.linalg.norm(total.astype(np.float64))) for total in totals]
        assert max(lengths) <= longest < 1.8 * max(lengths)
        junk = np.random.default_rng(1).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), DIMENSION).astype(np.float64)
        assert float(np.linalg.norm(junk)) > longest
        assert mechanism.max_sum_length(20, 40, DIMENSION) < longest


def noise_of_points(mechanism: LatticeMechanism, values: Tensor, seed: int) -> NDArray[np.float64]:
    source = SeededStreams.for_clients(seed, 1, range(len(values)))
    found = mechanism.aggregate([mechanism.reports_from_sum(mechanism.points(values, RANGES, source).sum(axis=0), len(values))], RANGES)
    return np.asarray(found.double())


def noise_at_once(mechanism: LatticeMechanism, values: Tensor, seed: int) -> NDArray[np.float64]:
    nothing = torch.Generator()  # draws come with the sum
    reports = [mechanism.encode(some, RANGES, nothing) for some in torch.split(values, 7)]
    sums = [one for one in reports if isinstance(one, SummedReports)]
    return np.asarray(mechanism.aggregate([SummedReports.mix(sums, np.random.default_rng(seed))], RANGES).double())


def test_what_clients_send_has_the_law_of_what_the_simulator_draws_at_once() -> None:
    """10,000 draws either way, four tests by Kolmogorov and Smirnov: a right one fails with probability 4e-6."""
    for mechanism, values in mechanisms(20, 32):
        exact = np.asarray(mechanism._clipped_points(values, RANGES).double().mean(dim=0)) * mechanism._scale
        sent, drawn = (
            np.concatenate([way(mechanism, values, seed) - exact for seed in range(20)]) for way in (noise_of_points, noise_at_once)
        )
        assert ks_2samp(sent, drawn).pvalue > 1e-6
        assert ks_1samp(sent, norm(scale=mechanism.noise(RANGES).largest_std(20)[0]).cdf).pvalue > 1e-6


def test_32_bits_are_taken_where_the_largest_sum_fits_them_and_rounding_does_no_harm() -> None:
    for clients, parts, noise, dimension in product(
        (1, 20, 100, 10_000, 10**6), (1.0, 600.0, 1e5), (0.05, 4.0, 500.0), (20, 2000, 200_000)
    ):
        lattice = Lattice.for_sum(clients, parts, noise, dimension)
        length = clients * parts + 12 * sqrt(clients) * noise
        fits = [2**power for power in range(21) if 2**power * length + clients / 2 < 2**31]
        fine = [steps for steps in fits if steps * noise >= 2**10 and sqrt(dimension) / steps <= 2**-6]
        assert (lattice.steps, lattice.bits) == ((max(fine), 32) if fine else (STEPS, 64))


@pytest.mark.parametrize(
    ("clients", "records", "noise", "weights", "steps", "bits"),
    [
        (100, 600, 4.09, 2000, 2**15, 32),  # MNIST, records, epsilon 1
        (100, 500, 4.15, 14_080, 2**15, 32),  # CIFAR-10
        (60_000, 1, 0.088, 2000, 2**15, 32),
        (1000, 1, 0.75, 2000, 2**20, 32),  # clients
        (10_000, 1, 0.137, 2000, 2**17, 32),
        (10**6, 1, 0.04, 2000, 2**20, 64),  # a client's share of the noise would be rounded away
    ],
)
def test_bits_of_the_sizes_that_are_run(clients: int, records: int, noise: float, weights: int, steps: int, bits: int) -> None:
    assert Lattice.for_sum(clients, records, noise, weights) == Lattice(steps, bits)


def test_rounding_takes_next_to_nothing_off_a_vector() -> None:
    """At the coarsest lattice that is taken for 10,000 weights: 0.5 % of a vector's length, and never more than 1.6 %."""
    dimension, steps = 10_000, 6400
    steps = 2 ** (steps - 1).bit_length()  # sqrt(10,000) = 100 is no more than 1/64 of it
    assert sqrt(dimension) / steps <= 2**-6 < 2 * sqrt(dimension) / steps
    drawn = torch.randn(20, dimension, generator=torch.Generator().manual_seed(1)).double()
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    found = RecordClip(1.0, steps).points(directions.float()) / steps
    lost = 1 - (found * directions).sum(dim=1)
    torch.testing.assert_close(lost, torch.full_like(lost, 0.5 * sqrt(2 * dimension / pi) / steps), rtol=0.05, atol=0)
    assert float((found - directions).norm(dim=1).max()) <= 2**-6


def test_who_does_not_say_how_many_are_added_up_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"add --set shuffling\.max_clients=100"):
        Lattice.for_sum(0, 1.0, 1.0, 10)
    with pytest.raises(ConfigError, match="does not fit 64 bits"):
        Lattice.for_sum(10**9, 1e9, 1.0, 10)


def test_impossible_lattices_and_sums_are_refused() -> None:
    for steps in (0, 3, 2**21):
        with pytest.raises(ConfigError, match="power of two"):
            RecordClip(1.0, steps)
    with pytest.raises(ConfigError, match="32 or 64"):
        DpFedAvg(RecordClip(1.0), 1.0, bits=16)
    total = np.zeros(DIMENSION, dtype=np.int64)
    for summed, clients, message in ((False, 5, "built with summed=False"), (True, 0, "at least 1 client, got 0")):
        with pytest.raises(PrivacyError, match=message):
            DpFedAvg(RecordClip(1.0), 1.0, summed).reports_from_sum(total, clients)
