"""Cut reports into records, if record j is about the same weights for every client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ProtocolError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.bits import packed_size
from ldpfl.mechanisms.reports.units import Units
from ldpfl.transport.shuffling.partial import Part, PartialPool
from ldpfl.transport.shuffling.pool import ReportPool
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

UNKNOWN_ID = "a record id that this round's plan does not have"
PADDING = "padding that is not zero"
IMPOSSIBLE = "content that no client can send"
TOO_MANY = "a record id that came more often than there are uploads: at least one is false, so the record's weights keep their values"


@dataclass(frozen=True, eq=False)
class Layout:
    """Records with the same layout. They are read together, whatever weights they are about.

    Attributes:
        ids: ids of these records.
        size: number of bytes of a record's content.
        weights: number of weights that a record is about.
        mechanism: the mechanism that reads these records.
        part_ranges: the ranges for reading them.
    """

    ids: Numbers
    size: int
    weights: int
    mechanism: Mechanism
    part_ranges: LayerRanges

    def payloads(self, bodies: Bytes) -> list[bytes]:
        """Return the contents of the records in the rows of ``bodies``, without the padding, as bytes that the mechanism decodes."""
        return [body.tobytes() for body in bodies[:, : self.size]]


class FixedRecords:
    """Cuts payloads into records of ``per_record`` consecutive units, and joins the records of many clients.

    A unit is the smallest part of a report that can be sent alone, such as the bits about one weight.

    Attributes:
        weights: (m,) number of weights that each of the m records is about.
    """

    def __init__(self, units: Units, per_record: int) -> None:
        self._units, self._per_record = units, per_record
        self._unit_bits, self._unit_weights = units.bits_and_weights_per_unit()
        first = np.arange(0, units.count, per_record)  # (m,) first unit of each record
        self._bits = np.add.reduceat(self._unit_bits, first)  # (m,) sums over the units of each record
        self.weights = np.add.reduceat(self._unit_weights, first)
        self._size = packed_size(int(self._bits.sum()))
        # If all records begin at byte borders, cut by bytes: this avoids an eightfold copy of long payloads.
        self._by_bytes = not ((np.cumsum(self._bits) - self._bits) % 8).any()
        lengths = -(-self._bits // 8) if self._by_bytes else self._bits  # of records, in bytes (rounded up) or bits
        self._is_content = np.arange(lengths.max()) < lengths[:, None]  # (m, max length): True where a record has content, not padding

    @property
    def records(self) -> int:
        """Number of records that one payload is cut into."""
        return int(self._bits.size)

    @property
    def body_bytes(self) -> int:
        """Number of bytes of the longest record's content, to which all records are padded."""
        return packed_size(int(self._bits.max()))

    def split(self, payload: bytes) -> tuple[Numbers, Bytes]:
        """Return the ids (m,) and contents (m, body_bytes) of the records of one payload.

        A payload has no ids and no padding: it is the contents of records 0, 1, ..., m - 1, one after the other. Each content is put into a
        row of whole bytes here, and the rest of the row is zeros. The payload is cut by bytes if all records begin at byte borders, else
        by bits.

        Raises:
            ProtocolError: the payload has the wrong length.
        """
        if len(payload) != self._size:
            raise ProtocolError(f"a payload has {len(payload)} bytes, expected {self._size}: it is of another mechanism or model")
        pieces = np.frombuffer(payload, dtype=np.uint8)
        if not self._by_bytes:
            pieces = np.unpackbits(pieces, count=int(self._bits.sum()), bitorder="little")
        table = np.zeros(self._is_content.shape, dtype=np.uint8)
        table[self._is_content] = pieces  # fills row after row, each up to the length of its record
        return np.arange(self.records), table if self._by_bytes else np.packbits(table, axis=1, bitorder="little")

    def layouts(self, mechanism: Mechanism, ranges: LayerRanges) -> list[Layout]:
        """Group the records by layout: by how many bits and weights each of their units has, in order.

        A unit is the smallest part of a report that can be sent alone. Nearly always all records but the last of a payload share one
        layout, and so one reader: the mechanism that can read such records.
        """
        ids_by_shape: dict[tuple[bytes, bytes], list[int]] = {}
        for record_id, first in enumerate(range(0, self._units.count, self._per_record)):
            units_in_record = slice(first, first + self._per_record)
            shape = self._unit_bits[units_in_record].tobytes(), self._unit_weights[units_in_record].tobytes()
            ids_by_shape.setdefault(shape, []).append(record_id)
        layouts = []
        for record_ids in ids_by_shape.values():
            # Reading a record needs only the number of its weights, so the ranges of the first record serve for the whole layout.
            part_ranges = self._units.unit_ranges(ranges).part(self.coordinate_mask(np.array(record_ids[:1])))
            size = packed_size(int(self._bits[record_ids[0]]))
            reader = self._units.reader_of_part(mechanism, part_ranges)
            weights = int(self.weights[record_ids[0]])
            layouts.append(Layout(ids=np.array(record_ids), size=size, weights=weights, mechanism=reader, part_ranges=part_ranges))
        return layouts

    def join(
        self, mechanism: Mechanism, ranges: LayerRanges, ids: Numbers, bodies: Bytes, uploads: int
    ) -> tuple[ReportPool | PartialPool | None, Counter[str]]:
        """Return the pool of all readable records, and the number of refused records by reason.

        Args:
            ids, bodies: ids (R,) of the records, ascending, and their contents (R, ...).
            uploads: number of clients, and so the maximum number of records with the same id.
        """
        accepted = AcceptedRecords(ids, bodies)
        accepted.refuse(ids >= self.records, UNKNOWN_ID)
        accepted.refuse(self.have_stray_bits(accepted.ids, accepted.bodies), PADDING)
        is_too_frequent = np.bincount(accepted.ids, minlength=self.records) > uploads  # (m,), by id
        accepted.refuse(is_too_frequent[accepted.ids], TOO_MANY)
        try:
            return self._pool(mechanism, ranges, accepted), accepted.refused
        except ProtocolError:  # the mechanism refuses a record, but does not say which
            accepted.refuse(self._refused_by_mechanism(mechanism, ranges, accepted), IMPOSSIBLE)
            return self._pool(mechanism, ranges, accepted), accepted.refused

    def coordinate_mask(self, record_ids: Numbers) -> Tensor:
        """Return a mask (D,) of the D reported coordinates: True where a record with one of these ids is about the coordinate.

        For most mechanisms the coordinates are the weights.
        """
        chosen = np.zeros(self.records, dtype=np.bool_)
        chosen[record_ids] = True
        return torch.from_numpy(np.repeat(chosen, self.weights))

    def _payload(self, record_ids: Numbers, bodies: Bytes) -> bytes:
        """Return a payload that consists only of the records with ids ``record_ids``, whose contents are the rows of ``bodies``."""
        is_content = self._is_content[record_ids]
        if self._by_bytes:
            return bodies[:, : is_content.shape[1]][is_content].tobytes()
        bits = np.unpackbits(bodies, axis=1, count=is_content.shape[1], bitorder="little")[is_content]
        return np.packbits(bits, bitorder="little").tobytes()

    def _pool(self, mechanism: Mechanism, ranges: LayerRanges, accepted: AcceptedRecords) -> ReportPool | PartialPool | None:
        """Return the pool of the accepted records: a :class:`PartialPool` if some ids came less often than others; None without records.

        Records are grouped by how often their ids came. In a group, the i-th records of all ids form one payload for the mechanism. They
        may come from different clients, which makes no difference to means.
        """
        parts = []
        for record_ids, positions in self._groups_by_count(accepted.ids):
            payloads = [self._payload(record_ids, accepted.bodies[positions_of_payload]) for positions_of_payload in positions]
            if record_ids.size == self.records:  # all ids came equally often, so this is the only group
                return ReportPool(mechanism.read(payloads, ranges))
            weights = self.coordinate_mask(record_ids)
            part_ranges = self._units.unit_ranges(ranges).part(weights)
            reader = self._units.reader_of_part(mechanism, part_ranges)
            parts.append(Part(reader.read(payloads, part_ranges), weights, clients=len(payloads)))
        return PartialPool(tuple(parts), torch.stack([part.weights for part in parts]).any(dim=0)) if parts else None

    def _refused_by_mechanism(self, mechanism: Mechanism, ranges: LayerRanges, accepted: AcceptedRecords) -> NDArray[np.bool_]:
        """Return which records the mechanism refuses. Records of the same layout are read together, whatever their ids."""
        refused = np.zeros(accepted.ids.size, dtype=np.bool_)
        for layout in self.layouts(mechanism, ranges):
            positions = np.flatnonzero(np.isin(accepted.ids, layout.ids))
            refused[positions[refused_payloads(layout.mechanism, layout.part_ranges, layout.payloads(accepted.bodies[positions]))]] = True
        return refused

    def _groups_by_count(self, ids: Numbers) -> list[tuple[Numbers, Numbers]]:
        """Group the record ids by how often they came.

        For each number n, return the u ids that came n times, (u,), and the positions (n, u) of their records in ``ids``. Row i of the
        positions has the i-th record of each id. ``ids`` must ascend.
        """
        counts = np.bincount(ids, minlength=self.records)
        first = np.cumsum(counts) - counts  # position of each id's first record, since equal ids are neighbours
        groups = []
        for count in np.unique(counts[counts > 0]).tolist():
            ids_with_count = np.flatnonzero(counts == count)
            groups.append((ids_with_count, first[ids_with_count] + np.arange(count)[:, None]))
        return groups

    def have_stray_bits(self, ids: Numbers, bodies: Bytes) -> NDArray[np.bool_]:
        """Return which records (R,) have a bit set in their padding: in bytes after the content, or in the last bits of its last byte."""
        is_stray = np.zeros(ids.size, dtype=np.bool_)
        for bits in np.unique(self._bits).tolist():  # records with contents of the same length are checked together
            positions = np.flatnonzero(self._bits[ids] == bits)
            is_stray[positions] = bodies[positions, packed_size(bits) :].any(axis=1)
            if bits % 8:  # content begins at a byte's lowest bit, so the upper bits of its last byte are padding
                is_stray[positions] |= bodies[positions, bits // 8] >> (bits % 8) != 0
        return is_stray


class AcceptedRecords:
    """Records that are accepted so far, and the number of refused records by reason."""

    def __init__(self, ids: Numbers, bodies: Bytes) -> None:
        self.ids, self.bodies = ids, bodies
        self.refused: Counter[str] = Counter()

    def refuse(self, is_refused: NDArray[np.bool_], reason: str) -> None:
        """Leave out the records where ``is_refused`` (R,) is True, and count them under ``reason``."""
        if is_refused.any():
            self.refused[reason] += int(is_refused.sum())
            self.ids, self.bodies = self.ids[~is_refused], self.bodies[~is_refused]


def refused_payloads(mechanism: Mechanism, ranges: LayerRanges, payloads: Sequence[bytes], first: int = 0) -> list[int]:
    """Return the indices, counted from ``first``, of payloads that ``mechanism`` refuses.

    The mechanism reads many payloads in one call and says only that one of them is bad. So the payloads are halved until each bad one is
    found, which is cheap if few are bad.
    """
    try:
        if payloads:
            mechanism.read(payloads, ranges)
    except ProtocolError:
        if len(payloads) == 1:
            return [first]
        half = len(payloads) // 2
        refused_in_first_half = refused_payloads(mechanism, ranges, payloads[:half], first)
        return refused_in_first_half + refused_payloads(mechanism, ranges, payloads[half:], first + half)
    return []
