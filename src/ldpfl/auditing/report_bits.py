"""Test the bytes of reports bit by bit, and whether two weights share noise, for unequal inputs in many layers.

The other checks use decoded estimates, in four layers of equal weights. Here no decoder is involved. Each bit on the wire is a function of
one protected unit, so its odds for any two inputs differ by a factor of at most e^epsilon.
"""

from __future__ import annotations

from math import inf, isinf

import numpy as np
import torch
from torch import Tensor

from ldpfl.auditing.bounds import FLOAT32, Floats, epsilon_lower_bound, mean_bound
from ldpfl.mechanisms import Mechanism, guarantee_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.randomness import Purpose, RandomSource, stream

LAYERS, WIDTH = 12, 96
"""Number of layers, and of weights of each layer: enough to find a fault of one layer, one weight, or the last thousandth."""

PAIRS = ("all signs turned", "the largest moved elsewhere", "the first sign turned")

_BLOCK = 1 << 20
_CANDIDATES = 32
"""Number of the most suspicious bits that are tested exactly."""


class BitBench:
    """Runs clients with unequal values in ``LAYERS`` layers, some far outside their range, and counts the bits on the wire."""

    def __init__(self, mechanism: Mechanism, clients: int, source: RandomSource, key: int) -> None:
        """Draw the inputs, which ``key`` determines.

        They are a vector, the same with all signs turned, the same shifted by half its length, and the same with the first sign turned.
        """
        self.mechanism, self.clients, self._source = mechanism, clients, source
        radius = torch.tensor(10.0 ** np.linspace(-3, 0.5, LAYERS), dtype=torch.float64)
        center = torch.tensor([0.0, 0.3, -2.0] * (LAYERS // 3), dtype=torch.float64)
        self.ranges = LayerRanges(center, radius, (WIDTH,) * LAYERS)
        generator = stream(0, Purpose.MECHANISM, key, 1)
        dimension = self.ranges.dimension
        sizes = 10.0 ** generator.uniform(-1.5, 1.5, dimension)  # in radii: a third lies beyond the range
        sizes[0] = sizes[-1] = 30.0
        first = sizes * generator.choice((-1.0, 1.0), dimension)
        self.inputs = {"first": first, PAIRS[0]: -first, PAIRS[1]: np.roll(first, dimension // 2), PAIRS[2]: first.copy()}
        self.inputs[PAIRS[2]][0] *= -1
        guarantee = guarantee_of(mechanism, self.ranges)
        self.by_weight = guarantee.unit == "weight"
        self._need_not_clip = isinf(guarantee.epsilon)
        self.deviation_sums = {name: np.zeros(dimension) for name in self.inputs}
        self.largest_deviation = 0.0
        self.changed_values = False  # whether ``encode`` changed values in place

    def values(self, input_name: str) -> Tensor:
        """Return the rows (clients, d) of clients that all hold the input ``input_name``."""
        center, radius = self.ranges.expand()
        return (center + radius * torch.from_numpy(self.inputs[input_name])).float().expand(self.clients, -1)

    def set_bit_counts(self, input_name: str) -> Floats:
        """Return for each bit on the wire the number of clients' reports in which it is set. Bits that some report lacks are left out.

        Also note whether ``encode`` changed its input. If a weight is the unit, add up deviations for :meth:`mean_deviations`.
        """
        rows = max(1, _BLOCK // self.ranges.dimension)
        counts_by_call: list[Floats] = []
        for start in range(0, self.clients, rows):
            values = self.values(input_name)[start : start + rows].contiguous()
            sent = self.mechanism.encode(values, self.ranges, self._source)
            as_before = self.values(input_name)[start : start + rows]  # a new tensor
            self.changed_values |= not torch.equal(values, as_before)
            payloads = list(sent.payloads())
            shortest = min(map(len, payloads))  # unequal lengths are found by another check
            bits = np.stack([np.unpackbits(np.frombuffer(payload[:shortest], np.uint8)) for payload in payloads])
            counts_by_call.append(bits.sum(axis=0, dtype=np.float64))
            if self.by_weight:
                self._add_deviations(input_name, self.mechanism.decode(sent, self.ranges))
        length = min(counts.size for counts in counts_by_call)
        return np.asarray(np.sum([counts[:length] for counts in counts_by_call], axis=0))

    def _add_deviations(self, input_name: str, estimates: Tensor) -> None:
        """Add the distances of ``estimates`` (K, d) from the clipped input, in radii, to the sums of each weight.

        A mechanism that claims no privacy need not clip, so inputs beyond the range are then left out.
        """
        center, radius = self.ranges.expand()
        values = self.inputs[input_name]
        deviations = ((estimates.double() - center) / radius - torch.from_numpy(values.clip(-1, 1))).numpy()
        if self._need_not_clip:
            deviations[:, np.abs(values) > 1] = 0.0
        self.deviation_sums[input_name] += deviations.sum(axis=0)
        self.largest_deviation = max(self.largest_deviation, float(np.abs(deviations).max()))

    def mean_deviations(self, error: float) -> tuple[Floats, Floats]:
        """Return how far the mean estimates of each input's weights are from the clipped input, and how far chance can move them.

        Both are (inputs, d), in radii. The second one fails with probability ``error`` at most, over all inputs and weights. First call
        :meth:`set_bit_counts` for each input: it collects the estimates.
        """
        center, radius = (part.double().numpy() for part in self.ranges.expand())
        figures, bounds = [], []
        for name, sums in self.deviation_sums.items():
            variances = self.mechanism.noise(self.ranges).variance(self.values(name)[:1])[0].double().numpy() / radius**2
            share = error / (len(self.inputs) * sums.size)
            chance = np.array([mean_bound(self.clients, float(variance), self.largest_deviation, share) for variance in variances])
            figures.append(np.abs(sums) / self.clients)
            bounds.append(chance + FLOAT32 * (np.abs(center) / radius + 1 + self.largest_deviation))
        return np.stack(figures), np.stack(bounds)

    def stated_variance(self) -> Floats:
        """Return the variance (d,) that the mechanism states for the estimates of clients that hold the centers."""
        center, _ = self.ranges.expand()
        variances = self.mechanism.noise(self.ranges).variance(center.float()[None])  # (1, d)
        return np.asarray(variances[0].double().numpy())

    def noise(self) -> Floats:
        """Return the noise (clients, d) in the estimates of clients that hold the centers, less its mean over clients."""
        center, _ = self.ranges.expand()
        step, rows = max(1, _BLOCK // self.ranges.dimension), []
        for start in range(0, self.clients, step):
            values = center.float().repeat(min(step, self.clients - start), 1)
            rows.append(self.mechanism.decode(self.mechanism.encode(values, self.ranges, self._source), self.ranges).double().numpy())
        noise: Floats = np.concatenate(rows)
        noise -= noise.mean(axis=0)
        return noise


def epsilon_of_bits(first: Floats, second: Floats, clients: int, delta: float, error: float) -> float:
    """Return a lower bound of epsilon from the odds of single bits. It is wrong with probability ``error`` at most, over all bits.

    Args:
        first, second: for each bit on the wire, the number of reports in which it is set, under either input.
        clients: number of reports of each input.
    """
    length = min(first.size, second.size)
    first, second = first[:length], second[:length]
    best = -inf
    error_per_test = error / (4 * length)  # each bit, set or not, in both directions
    first_zeros, second_zeros = clients - first, clients - second
    for first_hits, second_hits in ((first, second), (second, first), (first_zeros, second_zeros), (second_zeros, first_zeros)):
        ratios = (first_hits + 1) / (second_hits + 1)
        for bit in np.argsort(ratios)[-_CANDIDATES:]:  # the largest ratios
            hits = int(first_hits[bit]), int(second_hits[bit])
            best = max(best, epsilon_lower_bound(hits, (clients, clients), delta, error_per_test))
    return max(0.0, best)
