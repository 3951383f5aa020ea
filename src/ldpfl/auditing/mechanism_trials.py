"""Run a mechanism for an audit: encode known inputs, send bytes, decode estimates, and collect their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldpfl.auditing.bounds import FLOAT32, Bins, Counts, Floats
from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import Mechanism, guarantee_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.randomness import Purpose, RandomSource, stream

CENTERS = (0.0, 1.5, -0.3, 0.0)
RADII = (0.02, 0.25, 1e-3, 1e-6)
"""Centers and radii of the audited layers: with and without a center, wide and tiny, so that a fault of some layers is found."""

STREAM_KEY = 0x41554449
"""First part of the key of an audit's random streams. No round has this number, so no round shares a stream."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Outcome of one call of ``encode``: n trials of each of G groups.

    A trial is a weight of a client, or a client's row; a group is a layer, or the whole row.

    Attributes:
        statistic: (n, G) estimates in radii from the center; of a row, the mean over its weights times their signs.
        squared_errors: (n, G) squared error in squared radii; of a row, the sum over its weights.
        evidence: (n, G) figures that distinguish inputs: as ``statistic``, but a row's weights count more if they have less noise.
    """

    statistic: Floats
    squared_errors: Floats
    evidence: Floats


class Bench:
    """Runs a mechanism on ``rows`` clients and the audited layers, with ``width`` weights each.

    A *position* is the distance of an input from the center in radii, the same for all weights. If a trial is a whole row, every weight
    gets a fixed random sign, so that a row is not a constant vector. In shapes, d is the number of weights and G that of groups.
    """

    def __init__(self, mechanism: Mechanism, rows: int, width: int, source: RandomSource) -> None:
        self.mechanism, self.rows, self._source = mechanism, rows, source
        layers = len(RADII)
        self.ranges = LayerRanges(torch.tensor(CENTERS, dtype=torch.float64), torch.tensor(RADII, dtype=torch.float64), (width,) * layers)
        unit = guarantee_of(mechanism, self.ranges).unit
        self.by_weight = unit == "weight"
        # A trial's statistic is taken for each layer, or once for the whole row, as the mechanism's guarantee is.
        self.groups = layers if unit in ("weight", "layer") else 1
        self._center, self._radius = self.ranges.expand()
        self._signs = torch.ones_like(self._center)
        if not self.by_weight:
            drawn = stream(0, Purpose.MECHANISM, STREAM_KEY).integers(0, 2, self.ranges.dimension)
            self._signs = torch.from_numpy(2.0 * drawn - 1.0)
        self._shares = self._shares_of_weights()
        self.lengths: set[int] = set()
        self.read_error = ""

    @property
    def trials(self) -> int:
        """Number of trials of each group in one call."""
        return self.rows * self.ranges.dimension // self.groups if self.by_weight else self.rows

    def draw(self, position: float) -> Sample:
        """Return the outcome of one call: encode all clients at ``position``, send the reports, read and decode them."""
        estimates = self.mechanism.decode(self.report(position), self.ranges).double()
        squared_errors = self._group(((estimates - self._clipped(position)) / self._radius) ** 2)
        return Sample(self._statistic(estimates), squared_errors, self._group(self._projected(estimates) * self._shares))

    @property
    def neighbour_direction(self) -> Floats:
        """The direction (d,) of the signs, in which the first weight counts half.

        So the projections of a row and of its neighbour differ, even where estimates have only a few values.
        """
        direction = self._signs.clone()
        direction[0] /= 2
        return np.asarray(direction.numpy())

    def draw_neighbours(self, *, turned: bool) -> Floats:
        """Return estimates (n, d), in radii, of rows at the ends of their ranges, with the first weight's sign ``turned`` or not."""
        signs = self._signs.clone()
        if turned:
            signs[0] *= -1
        values = (self._center + self._radius * signs).float().repeat(self.rows, 1)
        estimates = self.mechanism.decode(self.mechanism.encode(values, self.ranges, self._source), self.ranges).double()
        return np.asarray(((estimates - self._center) / self._radius).numpy())

    def report(self, position: float) -> Any:
        """Return the clients' reports as the server reads them from the wire."""
        return self.receive(*self.send(position))

    def send(self, position: float) -> tuple[Any, list[bytes]]:
        """Encode all clients at ``position``, and return the reports and their payloads."""
        values = self._inputs(position).expand(self.rows, -1).contiguous()
        sent = self.mechanism.encode(values, self.ranges, self._source)
        return sent, list(sent.payloads())

    def encodes(self, value: float) -> bool:
        """Return whether the mechanism encodes a client whose weights are all ``value``, instead of raising an error."""
        try:
            self.mechanism.encode(torch.full((1, self.ranges.dimension), value), self.ranges, self._source)
        except Exception:  # of any type: nothing is sent
            return False
        return True

    def accepted_lengths(self) -> list[str]:
        """Return the names of payloads of a wrong length that ``read`` accepts, or refuses with another error than a ProtocolError."""
        first, second = (self.send(0.0)[1][0] for _ in range(2))
        wrong = {
            "an empty payload": [b""],
            "one that lacks its last byte": [first[:-1]],
            "one with a byte more": [first + b"\0"],
            "one that is there twice": [first + first],
            "one that took a byte of the next one": [first + second[:1], second[1:]],
        }
        return [name for name, payloads in wrong.items() if not self._refuses(payloads)]

    def _refuses(self, payloads: Sequence[bytes]) -> bool:
        """Return whether ``read`` raises a ProtocolError."""
        try:
            self.mechanism.read(payloads, self.ranges)
        except ProtocolError:
            return True
        except Exception:  # of another type: a server would stop
            return False
        return False

    def summed_numbers(self) -> Floats | None:
        """Return the numbers of a report that are added up in a sum over clients; None if it has no such numbers."""
        values = self._inputs(0.7)  # any position inside the range would do
        if hasattr(self.mechanism, "points"):
            return np.asarray(self.mechanism.points(values, self.ranges, self._source))
        sent = self.mechanism.encode(values, self.ranges, self._source)
        return np.asarray(sent.addends()) if hasattr(sent, "addends") else None

    def mean_noise(self, clients: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the stated noise of the mean of ``clients`` that all hold the same input, for K inputs (K, d).

        The first six inputs are equal in all weights, or have signs in turn. The others have one weight alone at an end of its range. All
        variances are in squared radii, times ``clients``, so that they compare with those of one client.

        Returns:
            Variances (K, d) by the formula for one client; ``mean_variance`` (6, d) of the first six inputs; the square of ``largest_std``
            (d,); and the possible effect (d,) of rounding. ``mean_variance`` is averaged over two means, one standard deviation above and
            below the input. The average is exact for any quadratic formula.
        """
        noise, dimension = self.mechanism.noise(self.ranges), self.ranges.dimension
        width = dimension // len(RADII)
        signs_in_turn = 1.0 - 2.0 * (torch.arange(dimension) % 2)
        equal = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None].expand(-1, dimension)
        inputs = self._center + self._radius * torch.cat([equal, signs_in_turn[None], torch.eye(dimension)[::width]])
        variances = noise.variance(inputs.float()).double()
        std = (variances / clients).sqrt()
        estimated = [
            (noise.mean_variance((row + deviation).float(), clients) + noise.mean_variance((row - deviation).float(), clients)).double() / 2
            for row, deviation in zip(inputs[: len(equal) + 1], std, strict=False)  # the first six inputs
        ]
        scale = 1 / self._radius**2
        largest = torch.as_tensor(noise.largest_std(clients)).double().square().repeat_interleave(width)
        variances = variances * scale
        rounding = FLOAT32 * (self._center.abs() / self._radius + 1)
        slack = 4 * rounding * (1 + variances.amax(dim=0))
        means = torch.stack(estimated) * scale * clients
        return np.asarray(variances), np.asarray(means), np.asarray(largest * scale * clients), np.asarray(slack)

    def receive(self, sent: Any, payloads: Sequence[bytes]) -> Any:
        """Read ``payloads``, and note their lengths.

        If reading fails, note the error, and return the reports ``sent`` themselves, so that the other checks can go on.
        """
        self.lengths.update(len(payload) for payload in payloads)
        try:
            return self.mechanism.read(payloads, self.ranges)
        except ProtocolError as error:
            self.read_error = str(error)
            return sent

    def expected(self, position: float) -> Floats:
        """Return the expectation (G,) of the statistic of :class:`Sample`: its value if the estimates were the clipped input."""
        return np.asarray(self._statistic(self._clipped(position))[0])

    def expected_squared_errors(self, position: float) -> Floats:
        """Return the expectation (G,) of the squared error, from the mechanism's closed form."""
        return np.asarray(self._group(self.mechanism.noise(self.ranges).variance(self._inputs(position)).double() / self._radius**2)[0])

    def rounding(self, largest: Floats) -> Floats:
        """Return the largest rounding error (G,) of float32, in radii, for estimates up to ``largest`` (G,) radii from the center."""
        distance = (self._center.abs() / self._radius).reshape(self.groups, -1).amax(dim=1)
        rounding: Floats = FLOAT32 * (distance.double().numpy() + largest)
        return rounding

    def _inputs(self, position: float) -> Tensor:
        """Return the input (1, d) at ``position``."""
        return (self._center + position * self._radius * self._signs).float()[None]

    def _clipped(self, position: float) -> Tensor:
        """Return the input (1, d) at ``position``, clipped to the ranges."""
        return self.ranges.clamp(self._inputs(position))

    def _statistic(self, estimates: Tensor) -> Floats:
        """Project rows on the signs: any two inputs differ in this direction. It is in radii, so that all weights count the same."""
        weights = 1 if self.by_weight else self.ranges.dimension // self.groups
        return self._group(self._projected(estimates) / weights)

    def _projected(self, estimates: Tensor) -> Tensor:
        """Return the distances of ``estimates`` (clients, d) from the center, in radii, times the signs."""
        return (estimates - self._center) / self._radius * self._signs

    def _shares_of_weights(self) -> Tensor:
        """Return the share (d,) of each weight in the evidence of its group: 1 if a weight is a trial.

        A weight counts by its distance between two inputs over the variance of its noise, which distinguishes inputs best if noise is
        normal. Noise that follows the ranges gives all weights one share; noise that is equal in all weights gives wide layers most. The
        variance is the mechanism's own formula. If that is wrong, the audit finds less, and nothing more.
        """
        equal = torch.ones_like(self._center)
        if self.by_weight:
            return equal
        try:
            variance = self.mechanism.noise(self.ranges).variance(self._inputs(0.0))[0].double()
            precision = self._radius**2 / variance
        except Exception:  # of any type: other checks say so
            precision = equal
        if precision.shape != equal.shape or not bool((precision.isfinite() & (precision > 0)).all()):
            precision = equal
        grouped = precision.reshape(self.groups, -1)
        return (grouped / grouped.sum(dim=1, keepdim=True)).reshape(-1)

    def _group(self, values: Tensor) -> Floats:
        """Turn ``values`` (clients, d) into (n, G): a row for each weight of a group if a weight is a trial, else the sums over groups."""
        grouped = values.reshape(values.shape[0], self.groups, -1)
        if self.by_weight:
            return np.asarray(grouped.transpose(1, 2).reshape(-1, self.groups).numpy())
        return np.asarray(grouped.sum(dim=2).numpy())


class Tally:
    """Sums over all samples at one position, (G,) each for G groups, so that no sample has to be kept.

    A *deviation* is a trial's statistic less its expectation. A *squared error* is that of :class:`Sample`. If a trial is a row, it adds up
    over the row's weights, and so is not the square of the row's deviation.

    Attributes:
        expected: expectation of the statistic, if the mechanism is unbiased.
        count: number of trials of each group so far.
        largest_deviation: largest absolute deviation.
        largest_squared_error: largest squared error.
    """

    def __init__(self, expected: Floats) -> None:
        """Begin without trials, with the expectation ``expected`` (G,) of the statistic."""
        self.expected = expected
        self.count = 0
        self.largest_deviation = np.zeros_like(expected)
        self.largest_squared_error = np.zeros_like(expected)
        groups = expected.size
        self._deviations, self._squared_errors = _Sums(groups), _Sums(groups)

    def add(self, sample: Sample) -> None:
        """Add the trials of a sample to the sums."""
        deviations = sample.statistic - self.expected
        self.count += len(deviations)
        self.largest_deviation = np.maximum(self.largest_deviation, np.abs(deviations).max(axis=0))
        self.largest_squared_error = np.maximum(self.largest_squared_error, sample.squared_errors.max(axis=0))
        self._deviations.add(deviations)
        self._squared_errors.add(sample.squared_errors)

    @property
    def mean_deviation(self) -> Floats:
        """Mean deviation (G,), with its sign."""
        return np.asarray(self._deviations.totals / self.count)

    @property
    def variance(self) -> Floats:
        """Sample variance (G,) of the statistic."""
        return self._deviations.variance(self.count)

    @property
    def mean_squared_error(self) -> Floats:
        """Mean squared error (G,)."""
        return np.asarray(self._squared_errors.totals / self.count)

    @property
    def squared_error_variance(self) -> Floats:
        """Sample variance (G,) of the squared error."""
        return self._squared_errors.variance(self.count)


class _Sums:
    """The ``totals`` (G,) of the values of each group, and the totals of their squares."""

    def __init__(self, groups: int) -> None:
        self.totals, self._totals_of_squares = np.zeros(groups), np.zeros(groups)

    def add(self, values: Floats) -> None:
        """Add the rows of ``values`` (n, G)."""
        self.totals += values.sum(axis=0)
        self._totals_of_squares += np.einsum("ij,ij->j", values, values)  # the sum over rows of each column's squares

    def variance(self, count: int) -> Floats:
        """Return the sample variance (G,) of the ``count`` values of each group."""
        mean = self.totals / count
        return np.asarray(np.maximum(self._totals_of_squares / count - mean**2, 0) * (count / (count - 1)))


def histograms(bins: Bins, statistic: Floats) -> Counts:
    """Return the histogram (B,) of each column of ``statistic`` (n, G), as (G, B) counts."""
    return np.stack([bins.histogram(column) for column in statistic.T])
