"""Whole reports of clients that hold known values: how often each payload is sent, and what a mixed pool keeps of the reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ldpfl.auditing.bounds import Bins, Counts, Floats
from ldpfl.errors import LdpflError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.transport.shuffling.pool import mix
from ldpfl.util.randomness import Purpose, RandomSource, SecureSource, SeededStreams, stream

_CLIENTS = 2048
"""Clients whose reports are mixed."""

ROWS_AT_ONCE = 1024
_STREAM_KEY = 0x434C4149
CENTER, RADIUS = 0.5, 0.25
FAR = 1_003_001.7
"""Distance of the farthest inputs from the center, in radii. A round number could return into the range where integers overflow."""

_MAX_PAYLOADS = 256
"""Largest number of different payloads that are outcomes of their own. If there are more, outcomes are bins of the mean estimate."""

_LEVELS = 32
_LARGER_WIDTHS = (4, 8, 32)
"""Widths that are tried where a mechanism cannot do with as few weights as are wanted."""


def random_source(seed: int | None) -> RandomSource:
    """Return the source of the clients' random bits: the operating system's if ``seed`` is None."""
    return SecureSource() if seed is None else SeededStreams.of(range(_CLIENTS), seed, Purpose.MECHANISM, _STREAM_KEY)


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Reports of several inputs.

    Attributes:
        names: names of the inputs.
        counts: (3, B) for each input, how often each outcome occurred, in the trials that order, choose and test events.
        statistics: (n,) for each input, the mean of each report's estimates over its weights, in radii from the center.
        set_bit_counts: (bits,) for each input, how often each bit of the wire was set.
    """

    names: list[str]
    counts: list[Counts]
    statistics: list[Floats]
    set_bit_counts: list[Floats]

    @property
    def report_counts(self) -> list[int]:
        return [statistic.size for statistic in self.statistics]


@dataclass(frozen=True, eq=False)
class WholeReports:
    """A mechanism on one layer of a few weights."""

    mechanism: Mechanism
    ranges: LayerRanges
    source: RandomSource

    @classmethod
    def with_width(cls, mechanism: Mechanism, width: int, source: RandomSource) -> WholeReports | None:
        """Return the mechanism on a layer of ``width`` weights, or of a few more if it refuses ``width`` > 1. None if it refuses all."""
        larger_widths = [larger for larger in _LARGER_WIDTHS if larger > width > 1]
        for weights in (width, *larger_widths):
            ranges = LayerRanges(torch.tensor([CENTER], dtype=torch.float64), torch.tensor([RADIUS], dtype=torch.float64), (weights,))
            try:  # only whether the mechanism raises matters
                mechanism.release(ranges)
                mechanism.encode(torch.full((1, weights), 0.5), ranges, SecureSource())
            except LdpflError:
                continue
            return cls(mechanism, ranges, source)
        return None

    def inputs(self) -> dict[str, Floats]:
        """Return the inputs by name, in radii from the center: at both ends of the range, beyond them, at the center, and in between."""
        width = self.ranges.dimension
        ends = {f"all at {end:+g}": np.full(width, end) for end in (1.0, -1.0, FAR, -FAR)}
        between = {"center": np.zeros(width), "all at +0.5": np.full(width, 0.5)}
        if width == 1:
            return ends | between
        turned = np.where(np.arange(width) % 2, -1.0, 1.0)
        first = np.where(np.arange(width) == 0, 1.0, 0.0)
        return ends | between | {"signs in turn": turned, "the other signs": -turned, "one weight": first, "one weight turned": -first}

    def collect_outcomes(self, trials: int) -> Outcomes:
        """Send ``trials`` reports of each input, and return their statistics.

        An outcome is a payload if there are few different ones, else a bin of the mean estimate. The first quarter of the trials, the
        pilot, decides this.
        """
        rows = max(64, trials)
        names, payloads_of_inputs, statistics = [], [], []
        for name, input_ in self.inputs().items():
            payloads, mean_estimates = self._send(input_, rows)
            names.append(name)
            payloads_of_inputs.append(payloads)
            statistics.append(mean_estimates)
        pilot_payloads = Counter(payload for payloads in payloads_of_inputs for payload in payloads[: rows // 4])
        code_of_payload = {payload: code for code, payload in enumerate(pilot_payloads)}
        if len(code_of_payload) <= _MAX_PAYLOADS:
            other = len(code_of_payload)  # code of all payloads that did not occur in the pilot
            codes = [np.array([code_of_payload.get(payload, other) for payload in payloads]) for payloads in payloads_of_inputs]
            size = len(code_of_payload) + 1
        else:
            bins = Bins.covering([statistic[: rows // 4] for statistic in statistics], _LEVELS)
            codes, size = [bins.places(statistic) for statistic in statistics], bins.count
        # Trials that order, choose and test events.
        cuts = (slice(0, rows // 4), slice(rows // 4, rows // 2), slice(rows // 2, rows))
        counts = [np.stack([np.bincount(codes_of_input[cut], minlength=size) for cut in cuts]) for codes_of_input in codes]
        return Outcomes(names, counts, statistics, [_count_set_bits(payloads) for payloads in payloads_of_inputs])

    def _send(self, input_: Floats, rows: int) -> tuple[list[bytes], Floats]:
        """Send ``rows`` reports of an input. Return their payloads, and the mean estimate (rows,) in radii from the center."""
        payloads: list[bytes] = []
        projected: list[Floats] = []
        for start in range(0, rows, ROWS_AT_ONCE):
            rows_now = min(ROWS_AT_ONCE, rows - start)
            values = self.values(input_).expand(rows_now, -1).contiguous()
            reports = self.mechanism.encode(values, self.ranges, self.source)
            payloads += map(bytes, reports.payloads())
            estimates = self.mechanism.decode(reports, self.ranges).double().numpy()
            projected.append((estimates - CENTER).mean(axis=1) / RADIUS)
        return payloads, np.concatenate(projected)

    def distances(self) -> list[Floats]:
        """Return the differences of n clients' mean estimates, (n,) in radii, for each of two pairs of inputs at opposite ends.

        Both inputs of a pair are encoded with the same random bits, so that noise which does not depend on the input cancels out.
        """
        estimates_at = {}
        for end in (1.0, -1.0, FAR, -FAR):
            source = SeededStreams.of(range(ROWS_AT_ONCE), 0, Purpose.MECHANISM, _STREAM_KEY, 1)
            _, estimates_at[end] = replace(self, source=source)._send(np.full(self.ranges.dimension, end), ROWS_AT_ONCE)
        return [estimates_at[end] - estimates_at[-end] for end in (1.0, FAR)]

    def rows(self, clients: int, *, turned: bool) -> Floats:
        """Return a different row for each client, in radii: random values inside the range, but for the last client ends of the range.

        If ``turned``, all signs of the last client's row are flipped. The other rows stay the same.
        """
        rows = stream(0, Purpose.MECHANISM, _STREAM_KEY, clients).uniform(-1, 1, (clients, self.ranges.dimension))
        rows[-1] = -np.sign(rows[-1]) if turned else np.sign(rows[-1])
        return rows

    def estimates_of_calls(self, rows: Floats, calls: int) -> Floats:
        """Send ``rows`` (clients, d) in each of ``calls`` calls of ``encode``. Return the estimates (calls, clients, d) in radii."""
        values, estimates = self.values(rows), []
        for _ in range(calls):
            sent = self.mechanism.encode(values.clone(), self.ranges, self.source)  # a copy, in case that encode changes it
            estimates.append(self.mechanism.decode(sent, self.ranges).double().numpy())
        return (np.stack(estimates) - CENTER) / RADIUS

    def values(self, rows: Floats) -> Tensor:
        """Return the values of clients whose ``rows`` (clients, d) are in radii from the center."""
        return torch.from_numpy(CENTER + RADIUS * rows).float()

    def mixed_estimates(self) -> Floats | None:
        """Return estimates (clients, weights) of mixed reports. Half of the clients held one end of the range, the rest the other end.

        Return None if the pool has no reports of single clients, for example because it is a sum.
        """
        ends = np.ones((_CLIENTS, self.ranges.dimension))
        ends[_CLIENTS // 2 :] = -1
        generator = stream(0, Purpose.MIXING, _STREAM_KEY)
        pool = mix([self.mechanism.encode(self.values(ends), self.ranges, self.source)], generator)
        try:
            estimates = self.mechanism.decode(pool.reports, self.ranges).double().numpy()
        except (LdpflError, AttributeError):
            return None
        return estimates if estimates.shape == (_CLIENTS, self.ranges.dimension) else None


def _count_set_bits(payloads: list[bytes]) -> Floats:
    """Return how often each bit of the payloads is set, up to the length of the shortest one."""
    shortest = min(map(len, payloads))
    rows = np.frombuffer(b"".join(payload[:shortest] for payload in payloads), np.uint8).reshape(len(payloads), shortest)
    bits = np.unpackbits(rows, axis=1)
    ones: Floats = bits.sum(axis=0, dtype=np.float64)
    return ones
