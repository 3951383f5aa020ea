"""Records of weights that each client samples for itself: a record carries their indices."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ldpfl.mechanisms import Mechanism, SampledReports
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import packed_size
from ldpfl.mechanisms.reports.sampled import index_bits
from ldpfl.mechanisms.reports.units import SampledUnits
from ldpfl.transport.shuffling.fixed_records import IMPOSSIBLE, PADDING, TOO_MANY, UNKNOWN_ID, impossible
from ldpfl.transport.shuffling.partial import Part, PartialPool
from ldpfl.transport.shuffling.pool import ReportPool
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource, uniform

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class SampledRecords:
    """``per_record`` (weight, value) pairs a record, as :class:`SampledReports` has them on the wire; its id is their number.

    The id tells nothing else: by its place among the sampled weights a record could be linked to others of its client. So could
    runs of ascending indices, where one ends and the next begins; pairs are dealt to records at random instead. Two records of one
    client, of a and b pairs, then are independent uniform draws among the d weights, but for one thing: they never share a weight.
    Two of different clients share none with probability C(d - a, b) / C(d, b), about exp(-a b / d). That is all that indices tell:
    every way to put records together in which no client has a weight twice is equally likely. It is next to nothing where
    ``per_record`` squared is far below d, and well above it is enough to find all records of a client.

    No guarantee rests on it: sampled weights are one unit, so the whole report counts as one message, however it is cut.
    """

    def __init__(self, units: SampledUnits, per_record: int) -> None:
        self._units = units
        self._sizes = [min(per_record, units.count - first) for first in range(0, units.count, per_record)]

    @property
    def records(self) -> int:
        return len(self._sizes)

    @property
    def body_bytes(self) -> int:
        return self._bytes(self._sizes[0])

    def split(self, payload: bytes, source: RandomSource) -> tuple[Numbers, Bytes]:
        """Return the ids (m,) and contents (m, body_bytes) of the records of one payload, dealt by bits of ``source``, row 0."""
        report = SampledReports.from_payloads([payload], self._units.dimension, self._units.count)
        bodies, first, order = np.zeros((self.records, self.body_bytes), dtype=np.uint8), 0, self._dealing(source)
        for row, size in enumerate(self._sizes):
            pairs = np.sort(order[first : first + size])
            wire = next(iter(SampledReports(report.index[:, pairs], report.values[:, pairs], self._units.dimension).payloads()))
            bodies[row, : len(wire)] = np.frombuffer(wire, dtype=np.uint8)
            first += size
        return np.array(self._sizes), bodies

    def _dealing(self, source: RandomSource) -> Numbers:
        """Return the k pairs in an order in which records take them, each equally likely (to about k^2 / 2^53).

        Where all weights are reported, runs of them are the same for all clients: they alone tell nothing whatever their length.
        """
        count = self._units.count
        return np.arange(count) if count == self._units.dimension else np.argsort(uniform(source, range(1), count)[0])

    def join(
        self, mechanism: Mechanism, ranges: LayerRanges, ids: Numbers, bodies: Bytes, uploads: int
    ) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all records that can be read, ``ids`` (R,) and ``bodies`` (R, ...), and what was refused.

        Pairs are dealt out to rows in the order of their indices, so that no row gets a weight twice: such rows are what
        the mechanism reads, though none of them is a client's. Where their number does not come out even, or a weight came
        too often, each pair counts as the report of a client that sampled one weight; the estimate divides by all pairs.
        """
        refused: Counter[str] = Counter()
        refused[UNKNOWN_ID] = int((~np.isin(ids, self._sizes)).sum())
        single = self._units.read_by(mechanism, ranges)
        found = [self._pairs(size, bodies[ids == size], single, ranges, refused) for size in sorted(set(self._sizes))]
        index, values = (np.concatenate(column) for column in zip(*found, strict=True))
        if not index.size:
            return None, refused
        order = np.lexsort((values, index))
        index, values = index[order], values[order]
        counts = np.bincount(index, minlength=self._units.dimension)
        clients, left = divmod(index.size, self._units.count)
        if not left and counts.max() <= clients <= uploads:
            dealt = SampledReports(index.reshape(-1, clients).T.copy(), values.reshape(-1, clients).T.copy(), self._units.dimension)
            return ReportPool(mechanism.read(list(dealt.payloads()), ranges)), refused
        often = counts > uploads
        refused[TOO_MANY] = int(counts[often].sum())
        alone = SampledReports(index[:, None], values[:, None], self._units.dimension)
        part = Part(alone, torch.ones(self._units.dimension, dtype=torch.bool), max(1, min(clients, uploads)))
        return PartialPool((part,), torch.from_numpy(~often)), refused

    def _pairs(
        self, size: int, bodies: Bytes, single: Mechanism, ranges: LayerRanges, refused: Counter[str]
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Return the indices and values (T,) of all records of ``size`` pairs that hold only what a client can send."""
        index, values, padded = self._decode(size, bodies)
        sound = (index < self._units.dimension).all(axis=1) & (index[:, 1:] > index[:, :-1]).all(axis=1) & np.isfinite(values).all(axis=1)
        refused[PADDING] += int((~padded).sum())
        refused[IMPOSSIBLE] += int((padded & ~sound).sum())
        index, values = index[padded & sound], values[padded & sound]
        wire = SampledReports(index.reshape(-1, 1), values.reshape(-1, 1), self._units.dimension).payloads()
        bad = sorted({place // size for place in impossible(single, ranges, list(wire))})
        refused[IMPOSSIBLE] += len(bad)
        return np.delete(index, bad, axis=0).ravel(), np.delete(values, bad, axis=0).ravel()

    def _decode(self, size: int, bodies: Bytes) -> tuple[Numbers, NDArray[np.float32], NDArray[np.bool_]]:
        """Return the indices and values (R, size) of records of ``size`` pairs, and which of them are padded by zeros."""
        width, end = index_bits(self._units.dimension), self._bytes(size)
        head = end - 4 * size
        bits = np.unpackbits(bodies[:, :head], axis=1, bitorder="little")
        padded = ~np.logical_or(bits[:, size * width :].any(axis=1), bodies[:, end:].any(axis=1))
        index: Numbers = bits[:, : size * width].reshape(len(bodies), size, width) @ (1 << np.arange(width))
        return index, bodies[:, head:end].copy().view("<f4").astype(np.float32), padded

    def _bytes(self, size: int) -> int:
        return packed_size(size * index_bits(self._units.dimension)) + 4 * size
