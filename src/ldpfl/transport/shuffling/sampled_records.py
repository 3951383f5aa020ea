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
from ldpfl.transport.shuffling.fixed_records import IMPOSSIBLE, PADDING, UNKNOWN_ID, refused_payloads
from ldpfl.transport.shuffling.partial import Part, PartialPool
from ldpfl.transport.shuffling.pool import ReportPool
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource, uniform

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

WEIGHT_TOO_OFTEN = "a weight that came more often than there are uploads: at least one of its values is false, so it keeps its value"


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
        """Number of records that one payload is cut into."""
        return len(self._sizes)

    @property
    def body_bytes(self) -> int:
        """Number of bytes of the first record's content, which is the longest. All records are padded to it."""
        return self._content_bytes(self._sizes[0])

    def split(self, payload: bytes, source: RandomSource) -> tuple[Numbers, Bytes]:
        """Return the ids (m,) and contents (m, body_bytes) of one payload's records. A record's id is its number of pairs (index, value).

        Row 0 of the random ``source`` assigns the pairs of the payload to records.
        """
        report = SampledReports.from_payloads([payload], self._units.dimension, self._units.count)
        bodies = np.zeros((self.records, self.body_bytes), dtype=np.uint8)
        order, first = self._order_of_pairs(source), 0
        for row, size in enumerate(self._sizes):
            pairs = np.sort(order[first : first + size])  # a payload's pairs ascend by index, so a record's pairs do, too
            [content] = SampledReports(report.index[:, pairs], report.values[:, pairs], self._units.dimension).payloads()
            bodies[row, : len(content)] = np.frombuffer(content, dtype=np.uint8)
            first += size
        return np.array(self._sizes), bodies

    def _order_of_pairs(self, source: RandomSource) -> Numbers:
        """Return the order in which the k pairs are assigned to records. All orders are equally likely.

        Equal random numbers would break this, but their probability is at most about k^2 / 2^53.

        If all weights are reported, the order is fixed: then records are the same for all clients, and reveal nothing.
        """
        count = self._units.count
        return np.arange(count) if count == self._units.dimension else np.argsort(uniform(source, range(1), count)[0])

    def join(
        self, mechanism: Mechanism, ranges: LayerRanges, ids: Numbers, bodies: Bytes, uploads: int
    ) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all readable records, and the number of refused records by reason.

        The mechanism reads rows of k pairs (index, value), where k is the number of weights that a client samples. Pairs are dealt to rows
        in the order of their indices, so that no row gets a weight twice. A row's pairs may come from different clients. Such rows cannot
        be made if the number of pairs is not a multiple of k, or if a weight came too often. Then each pair counts as the report of a
        client that sampled one weight, and the estimate divides by the number of all pairs.

        Args:
            ids, bodies: ids (R,) of the records, which are their numbers of pairs, and their contents (R, ...).
            uploads: number of clients.
        """
        refused: Counter[str] = Counter()
        refused[UNKNOWN_ID] = int((~np.isin(ids, self._sizes)).sum())
        pair_mechanism = self._units.reader_of_part(mechanism, ranges)
        sizes = sorted(set(self._sizes))
        pairs_by_size = [self._valid_pairs(size, bodies[ids == size], pair_mechanism, ranges, refused) for size in sizes]
        index = np.concatenate([indices for indices, _ in pairs_by_size])
        values = np.concatenate([values_of_size for _, values_of_size in pairs_by_size])
        if not index.size:
            return None, refused
        order = np.lexsort((values, index))  # by index; by value as well, so that nothing depends on the order of arrival
        index, values = index[order], values[order]
        counts = np.bincount(index, minlength=self._units.dimension)
        clients, remainder = divmod(index.size, self._units.count)  # number of whole reports that the pairs make up
        if not remainder and counts.max() <= clients <= uploads:
            # Pair i goes to row i modulo `clients`: at most `clients` consecutive pairs have one index, so they go to different rows.
            reports = SampledReports(index.reshape(-1, clients).T.copy(), values.reshape(-1, clients).T.copy(), self._units.dimension)
            return ReportPool(mechanism.read(list(reports.payloads()), ranges)), refused
        too_often = counts > uploads  # `reported` leaves these weights out; the other pairs of their records still count
        indices_by_record = [indices.reshape(-1, size) for size, (indices, _) in zip(sizes, pairs_by_size, strict=True)]
        refused[WEIGHT_TOO_OFTEN] = sum(int(too_often[indices].any(axis=1).sum()) for indices in indices_by_record)
        single_pairs = SampledReports(index[:, None], values[:, None], self._units.dimension)
        complete_reports = max(1, min(clients, uploads))  # `clients` is 0 if less than one report's pairs arrived
        part = Part(single_pairs, torch.ones(self._units.dimension, dtype=torch.bool), complete_reports)
        return PartialPool((part,), torch.from_numpy(~too_often)), refused

    def _valid_pairs(
        self, size: int, bodies: Bytes, pair_mechanism: Mechanism, ranges: LayerRanges, refused: Counter[str]
    ) -> tuple[Numbers, NDArray[np.float32]]:
        """Return the indices and values (T,) of all pairs in valid records of ``size`` pairs.

        Records that no honest client sends are left out, and their numbers are added to ``refused``. ``pair_mechanism`` reads reports of a
        single pair.
        """
        index, values, has_right_padding = self._decode(size, bodies)
        is_ascending = (index[:, 1:] > index[:, :-1]).all(axis=1)
        is_valid = (index < self._units.dimension).all(axis=1) & is_ascending & np.isfinite(values).all(axis=1)
        refused[PADDING] += int((~has_right_padding).sum())
        refused[IMPOSSIBLE] += int((has_right_padding & ~is_valid).sum())
        index, values = index[has_right_padding & is_valid], values[has_right_padding & is_valid]
        pair_payloads = SampledReports(index.reshape(-1, 1), values.reshape(-1, 1), self._units.dimension).payloads()
        # Each pair is one payload, so a pair's number divided by `size` is the number of its record.
        refused_records = sorted({pair // size for pair in refused_payloads(pair_mechanism, ranges, list(pair_payloads))})
        refused[IMPOSSIBLE] += len(refused_records)
        return np.delete(index, refused_records, axis=0).ravel(), np.delete(values, refused_records, axis=0).ravel()

    def _decode(self, size: int, bodies: Bytes) -> tuple[Numbers, NDArray[np.float32], NDArray[np.bool_]]:
        """Return the indices and values (R, size) of R records of ``size`` pairs, and whether each record's padding (R,) is all zeros.

        A record holds its indices, packed bit by bit and filled up to a whole byte; then its values, as float32; then zeros.
        """
        bits_per_index, padding_at = index_bits(self._units.dimension), self._content_bytes(size)
        values_at = padding_at - 4 * size
        bits = np.unpackbits(bodies[:, :values_at], axis=1, bitorder="little")
        has_right_padding = ~np.logical_or(bits[:, size * bits_per_index :].any(axis=1), bodies[:, padding_at:].any(axis=1))
        index: Numbers = bits[:, : size * bits_per_index].reshape(len(bodies), size, bits_per_index) @ (1 << np.arange(bits_per_index))
        return index, bodies[:, values_at:padding_at].copy().view("<f4").astype(np.float32), has_right_padding

    def _content_bytes(self, size: int) -> int:
        """Return the length of a record of ``size`` pairs: the packed indices, then a float32 for each."""
        return packed_size(size * index_bits(self._units.dimension)) + 4 * size
