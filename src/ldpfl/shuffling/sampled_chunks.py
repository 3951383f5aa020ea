"""Chunks of weights that each client samples for itself: a chunk carries their indices."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.mechanisms import Mechanism, SampledReports
from ldpfl.mechanisms.reports import packed_size
from ldpfl.mechanisms.sampled_reports import index_bits
from ldpfl.mechanisms.units import SampledUnits
from ldpfl.ranges import LayerRanges
from ldpfl.shuffling.fixed_chunks import IMPOSSIBLE, PADDING, TOO_MANY, UNKNOWN_ID, impossible
from ldpfl.shuffling.partial import Part, PartialPool
from ldpfl.shuffling.pool import ReportPool

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class SampledChunks:
    """``per_chunk`` (weight, value) pairs a chunk, as :class:`SampledReports` has them on the wire; its id is their number.

    The id tells nothing else: by its place among the sampled weights a chunk could be linked to others of its client.
    """

    def __init__(self, units: SampledUnits, per_chunk: int) -> None:
        self._units = units
        self._sizes = [min(per_chunk, units.count - first) for first in range(0, units.count, per_chunk)]

    @property
    def chunks(self) -> int:
        return len(self._sizes)

    @property
    def body_bytes(self) -> int:
        return self._bytes(self._sizes[0])

    def split(self, payload: bytes) -> tuple[Numbers, Bytes]:
        """Return the ids (m,) and contents (m, body_bytes) of the chunks of one payload."""
        report = SampledReports.from_payloads([payload], self._units.dimension, self._units.count)
        bodies, first = np.zeros((self.chunks, self.body_bytes), dtype=np.uint8), 0
        for row, size in enumerate(self._sizes):
            pairs = slice(first, first + size)
            wire = next(iter(SampledReports(report.index[:, pairs], report.values[:, pairs], self._units.dimension).payloads()))
            bodies[row, : len(wire)] = np.frombuffer(wire, dtype=np.uint8)
            first += size
        return np.array(self._sizes), bodies

    def join(
        self, mechanism: Mechanism, ranges: LayerRanges, ids: Numbers, bodies: Bytes, uploads: int
    ) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all chunks that can be read, ``ids`` (R,) and ``bodies`` (R, ...), and what was refused.

        Pairs are dealt out to rows in the order of their indices, so that no row gets a weight twice: such rows are what
        the mechanism reads, though none of them is a client's. Where their number does not come out even, or a weight came
        too often, each pair counts as the report of a client that sampled one weight; the estimate divides by all pairs.
        """
        refused: Counter[str] = Counter()
        refused[UNKNOWN_ID] = int((~np.isin(ids, self._sizes)).sum())
        single = mechanism.in_part(ranges)
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
        """Return the indices and values (T,) of all chunks of ``size`` pairs that hold only what a client can send."""
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
        """Return the indices and values (R, size) of chunks of ``size`` pairs, and which of them are padded by zeros."""
        width, end = index_bits(self._units.dimension), self._bytes(size)
        head = end - 4 * size
        bits = np.unpackbits(bodies[:, :head], axis=1, bitorder="little")
        padded = ~np.logical_or(bits[:, size * width :].any(axis=1), bodies[:, end:].any(axis=1))
        index: Numbers = bits[:, : size * width].reshape(len(bodies), size, width) @ (1 << np.arange(width))
        return index, bodies[:, head:end].copy().view("<f4").astype(np.float32), padded

    def _bytes(self, size: int) -> int:
        return packed_size(size * index_bits(self._units.dimension)) + 4 * size
