"""Cut reports into records, if each client samples its own weights: a record carries the indices of its weights."""

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
    """Cuts reports into records of ``per_record`` (index, value) pairs, in the wire format of :class:`SampledReports`.

    A record's id is its number of pairs, and nothing else. A position among the sampled weights would link the records of one client. So
    would runs of ascending indices, because one run ends where the next begins. Therefore pairs are assigned to records at random. Two
    records of one client, with a and b pairs, are then independent uniform draws among d weights, except that they never share a weight.
    Two records of different clients share no weight with probability C(d - a, b) / C(d, b), about exp(-a b / d). The indices reveal
    nothing more: every assignment of records to clients in which no client has a weight twice is equally likely. This is negligible if
    ``per_record`` squared is far below d. If it is far above d, all records of a client can be found.

    No guarantee relies on the separation: sampled weights are one unit, so the whole report counts as one message, however it is cut.
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
        """Return the ids (m,) and contents (m, body_bytes) of one payload's records. Row 0 of ``source`` assigns pairs to records."""
        report = SampledReports.from_payloads([payload], self._units.dimension, self._units.count)
        bodies, first, order = np.zeros((self.records, self.body_bytes), dtype=np.uint8), 0, self._order_of_pairs(source)
        for row, size in enumerate(self._sizes):
            pairs = np.sort(order[first : first + size])
            wire = next(iter(SampledReports(report.index[:, pairs], report.values[:, pairs], self._units.dimension).payloads()))
            bodies[row, : len(wire)] = np.frombuffer(wire, dtype=np.uint8)
            first += size
        return np.array(self._sizes), bodies

    def _order_of_pairs(self, source: RandomSource) -> Numbers:
        """Return the order in which the k pairs are assigned to records. All orders are equally likely (up to about k^2 / 2^53).

        If all weights are reported, the order is fixed: then records are the same for all clients, and reveal nothing.
        """
        count = self._units.count
        return np.arange(count) if count == self._units.dimension else np.argsort(uniform(source, range(1), count)[0])

    def join(
        self, mechanism: Mechanism, ranges: LayerRanges, ids: Numbers, bodies: Bytes, uploads: int
    ) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all readable records, and the counts of refused ones. ``ids`` are (R,), ``bodies`` (R, ...).

        Pairs are assigned to rows in the order of their indices, so that no row gets a weight twice. The mechanism can read such rows,
        although a row is not one client's. If the number of pairs is not a multiple of k, or a weight came too often, each pair counts as
        the report of a client that sampled one weight. The estimate then divides by the number of all pairs.
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
        """Return the indices and values (T,) of all records of ``size`` pairs whose content a client can send. Count the others."""
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
        """Return the indices and values (R, size) of records of ``size`` pairs, and which records are correctly padded with zeros."""
        width, end = index_bits(self._units.dimension), self._bytes(size)
        head = end - 4 * size
        bits = np.unpackbits(bodies[:, :head], axis=1, bitorder="little")
        padded = ~np.logical_or(bits[:, size * width :].any(axis=1), bodies[:, end:].any(axis=1))
        index: Numbers = bits[:, : size * width].reshape(len(bodies), size, width) @ (1 << np.arange(width))
        return index, bodies[:, head:end].copy().view("<f4").astype(np.float32), padded

    def _bytes(self, size: int) -> int:
        return packed_size(size * index_bits(self._units.dimension)) + 4 * size
