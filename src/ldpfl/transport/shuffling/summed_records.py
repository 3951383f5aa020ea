"""Add up records as they arrive, so that memory does not grow with the number of clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import DenseReports, Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import BitReports
from ldpfl.transport.shuffling.fixed_records import (
    IMPOSSIBLE,
    PADDING,
    TOO_MANY,
    UNKNOWN_ID,
    AcceptedRecords,
    Bytes,
    FixedRecords,
    Layout,
    Numbers,
    refused_payloads,
)
from ldpfl.transport.shuffling.partial import Part, PartialPool
from ldpfl.transport.shuffling.pool import ReportPool
from ldpfl.util.lazy_imports import torch

_MIN_WIDE = 4096
"""Records with at least this number of weights are added one by one, which needs no copies."""


class SummedRecords:
    """The sum of all records of each id, for a mechanism that :attr:`~Properties.adds_up`.

    Floats are added in float64, in the order of arrival. Batch sizes do not change the result. For bits, the ones are counted. The refused
    records and the means are the same as with :meth:`FixedRecords.join`.
    """

    def __init__(self, cut: FixedRecords, mechanism: Mechanism, ranges: LayerRanges) -> None:
        self._cutter, self._mechanism, self._ranges = cut, mechanism, ranges
        self._layouts = cut.layouts(mechanism, ranges)
        self._received_counts = np.zeros(cut.records, dtype=np.int64)  # by id: number of records with a known id and right padding
        self._accepted_counts = np.zeros(cut.records, dtype=np.int64)  # by id: number of those whose content the mechanism can read
        self._refused: Counter[str] = Counter()
        self._report_type: type[BitReports] | type[DenseReports] | None = None  # set by the first record, as is the shape of the sums
        self._sums = np.zeros((0, 0))

    def add(self, ids: Numbers, bodies: Bytes) -> None:
        """Add the records with these ``ids`` (R,) and contents ``bodies`` (R, ...). Unreadable records are left out and counted."""
        accepted = AcceptedRecords(ids, bodies)
        accepted.refuse(ids >= self._cutter.records, UNKNOWN_ID)
        accepted.refuse(self._cutter.have_stray_bits(accepted.ids, accepted.bodies), PADDING)
        self._refused += accepted.refused
        self._received_counts += np.bincount(accepted.ids, minlength=self._received_counts.size)
        for layout in self._layouts:
            positions = np.flatnonzero(np.isin(accepted.ids, layout.ids)) if len(self._layouts) > 1 else np.arange(accepted.ids.size)
            if positions.size:
                self._add_with_layout(layout, accepted.ids[positions], layout.payloads(accepted.bodies[positions]))

    def pool(self, uploads: int) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all readable records of ``uploads`` clients, and the number of refused records by reason.

        If an id came more often than there are clients, at least one of its records is false, so all of them are refused. The pool is None
        without readable records, and a :class:`PartialPool` if some ids came less often than others.
        """
        too_many = self._received_counts > uploads
        refused = self._refused.copy()
        refused[TOO_MANY] = int(self._received_counts[too_many].sum())
        refused[IMPOSSIBLE] = int((self._received_counts - self._accepted_counts)[~too_many].sum())
        counts = np.where(too_many, 0, self._accepted_counts)
        if self._report_type is None or not counts.any():
            return None, refused
        if counts.min() == counts.max():  # each id came equally often, so no weight lacks a report
            return ReportPool(self._report_type.from_sum(self._concatenated_sums(np.arange(counts.size)), int(counts[0]))), refused
        parts = []
        for count in np.unique(counts[counts > 0]).tolist():
            record_ids = np.flatnonzero(counts == count)
            reports = self._report_type.from_sum(self._concatenated_sums(record_ids), count)
            parts.append(Part(reports, self._cutter.coordinate_mask(record_ids), count))
        return PartialPool(tuple(parts), torch.stack([part.weights for part in parts]).any(dim=0)), refused

    def _add_with_layout(self, layout: Layout, ids: Numbers, payloads: list[bytes]) -> None:
        """Add records of one ``layout`` to the sums. Records whose content no client can send are left out."""
        try:
            reports = layout.mechanism.read(payloads, layout.part_ranges)
        except ProtocolError:
            refused = set(refused_payloads(layout.mechanism, layout.part_ranges, payloads))
            ids = np.delete(ids, sorted(refused))
            payloads = [payload for position, payload in enumerate(payloads) if position not in refused]
            if not payloads:
                return
            reports = layout.mechanism.read(payloads, layout.part_ranges)
        if self._report_type is None:
            self._report_type = type(reports)
            width = int(self._cutter.weights.max())
            self._sums = np.zeros((self._cutter.records, width), dtype=np.int32 if isinstance(reports, BitReports) else np.float64)
        self._accepted_counts += np.bincount(ids, minlength=self._accepted_counts.size)
        addends, sums = reports.addends(), self._sums[:, : layout.weights]  # addends: (R, weights), what each record adds
        if layout.weights >= _MIN_WIDE:
            for record_id, row in zip(ids.tolist(), addends, strict=True):
                sums[record_id] += row
        else:
            for group in _groups_without_repeats(ids):  # NumPy's += with repeated indices would add only one of the records
                sums[ids[group]] += addends[group]

    def _concatenated_sums(self, record_ids: Numbers) -> NDArray[np.float64]:
        """Return the sums of all weights of the records with these ids, record after record."""
        is_filled = np.arange(self._sums.shape[1]) < self._cutter.weights[record_ids][:, None]  # a row may be longer than its record
        return self._sums[record_ids][is_filled]


def _groups_without_repeats(ids: Numbers) -> Iterator[Numbers]:
    """Split the positions of ``ids`` into groups without repeated ids: the first occurrence of each id, then the second, and so on."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))  # where each id begins in `ordered`. No id is -1, so the first one counts
    # For each place in `ordered`, how many places before it have the same id.
    rank = np.arange(ids.size) - np.repeat(starts, np.diff(starts, append=ids.size))
    return (order[rank == occurrence] for occurrence in range(int(rank.max()) + 1))
