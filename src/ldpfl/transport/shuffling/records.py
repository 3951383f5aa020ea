"""Cut a client's report into records of equal length, and put the mixed records of many clients together again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError, ProtocolError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import terms_of
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.units import Units
from ldpfl.privacy.events import Release
from ldpfl.transport.shuffling.fixed_records import FixedRecords
from ldpfl.transport.shuffling.partial import PartialPool, RefusedRecords
from ldpfl.transport.shuffling.pool import ReportPool
from ldpfl.transport.shuffling.sampled_records import SampledRecords
from ldpfl.transport.shuffling.summed_records import SummedRecords
from ldpfl.util.randomness import RandomSource, SecureSource

Bytes = NDArray[np.uint8]

_SECURE = SecureSource()
_ID_BYTES = 4
_MIN_RECORD_BYTES = 16
"""Smallest length of a record in bytes. So a sealed record of one weight has 64 bytes with every mechanism."""


@dataclass(frozen=True)
class Joined:
    """The joined records of a round.

    Attributes:
        pool: all accepted reports; None if there are none.
        refused: numbers of refused records, with reasons.
    """

    pool: ReportPool | PartialPool | None
    refused: tuple[RefusedRecords, ...]


class Joining:
    """Joins the records of a round as they arrive. Memory does not grow with their number if the mechanism's reports add up."""

    def __init__(self, plan: RecordPlan, sums: SummedRecords | None) -> None:
        self._plan, self._sums = plan, sums  # without `sums`, which adds up records on arrival, they are stored and joined at the end
        self._stored = [np.empty((0, plan.plaintext_bytes), dtype=np.uint8)]  # one empty batch, so that there is always one to concatenate

    def add(self, plaintexts: Bytes) -> None:
        """Add records, (R, plaintext_bytes) uint8.

        Raises:
            ProtocolError: records of another length.
        """
        if self._sums is None:
            self._stored.append(plaintexts)
        else:
            self._sums.add(*self._plan.ids_and_bodies(plaintexts))

    def joined(self, uploads: int) -> Joined:
        """Join the added records, which ``uploads`` clients sent, as :meth:`RecordPlan.join` does. The pool may hold only sums of reports.

        Raises:
            ProtocolError: ``uploads`` is not positive.
        """
        if self._sums is None:
            return self._plan.join(np.concatenate(self._stored), uploads)
        return _as_joined(*self._sums.pool(_checked_uploads(uploads)))


@dataclass(frozen=True, eq=False)
class RecordPlan:
    """The rule by which payloads of ``mechanism`` are cut into records: the same at the clients and at the aggregator.

    A record holds ``linked`` consecutive units (see :meth:`Mechanism.units`). LDP-FL's parameter shuffling has one unit in a record. Wire
    format: the record's id (4 bytes, big-endian), the units as in the payload (lowest bit of a byte first), then zeros up to the common
    length of all records.

    A record of sampled weights holds randomly assigned units and their indices, and its id states only their number. If ``linked`` is above
    the square root of the model's size, the indices reveal which records are one client's, because no two of them share a weight. The
    guarantees do not rely on separating them.

    Attributes:
        mechanism: the mechanism of this round.
        ranges: the ranges of this round.
        linked: number of units in a record; the last record may hold fewer.
        unprotected: whether to accept a mechanism without any guarantee. A relay hides who sent a value, not the value.

    Raises:
        ConfigError: ``linked`` is not a positive whole number, or there are more than 2^32 records.
        PrivacyError: the mechanism guarantees nothing, and ``unprotected`` is not set.
    """

    mechanism: Mechanism
    ranges: LayerRanges
    linked: int = 1
    unprotected: bool = False

    def __post_init__(self) -> None:
        linked = self.linked
        if isinstance(linked, bool) or not isinstance(linked, int) or linked < 1:
            raise ConfigError(f"linked must be a positive whole number, got {linked!r}")
        release = self.mechanism.release(self.ranges)
        if not (release.protected or self.unprotected):
            raise PrivacyError(
                f"mechanism {self.mechanism.name!r} guarantees nothing ({release.why_unprotected}), and a relay hides senders, not values: "
                "choose another mechanism, or set unprotected=True for the plan"
            )
        self._require_units_of_release(release)
        if self.records >= 1 << (8 * _ID_BYTES):
            raise ConfigError(f"a report has {self.records} records, expected less than 2^{8 * _ID_BYTES}: set linked above {self.linked}")

    def _require_units_of_release(self, release: Release) -> None:
        """Raise unless records hold no more than accountants assume, who count the ``release``'s units as reported independently.

        Raises:
            PrivacyError: the mechanism's ``units`` cuts a report into fewer units than its ``release`` counts.
        """
        units = self.mechanism.units(self.ranges)
        if release.protected and isinstance(units, Units) and units.count < release.units:
            raise PrivacyError(
                f"mechanism {self.mechanism.name!r} cuts a report into {units.count:,} units that a relay may separate, but its release "
                f"counts {release.units:,}, so its cost would be stated too low: mend its units() or release()"
            )

    @cached_property
    def _cutter(self) -> FixedRecords | SampledRecords:
        """The object that cuts payloads: by place, or by index if each client samples its own weights."""
        units = self.mechanism.units(self.ranges)
        if isinstance(units, Units):
            return FixedRecords(units, self.linked)
        return SampledRecords(units, self.linked)

    @property
    def records(self) -> int:
        """Number m of records that a client sends."""
        return self._cutter.records

    @property
    def plaintext_bytes(self) -> int:
        """Length of each record before it is sealed."""
        return max(_MIN_RECORD_BYTES, _ID_BYTES + self._cutter.body_bytes)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever sender and receiver disagree on anything that is needed to read a record.

        They are the SHA-256 hash of the mechanism's name and parameters, the layers' sizes, centers and radii, and ``linked``. Numbers
        are hashed as hexadecimal floats, so that no bit is lost.
        """
        terms = {
            "format": 1,
            "mechanism": self.mechanism.name,
            "terms": _for_canonical_json(terms_of(self.mechanism)),
            "sizes": self.ranges.sizes,
            "center": [value.hex() for value in self.ranges.center.tolist()],
            "radius": [value.hex() for value in self.ranges.radius.tolist()],
            "parameters_per_report": self.linked,  # the name of `linked` in version 1 of the format
        }
        return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).digest()

    def split(self, payload: bytes, source: RandomSource = _SECURE) -> Bytes:
        """Cut one client's payload into its records, (m, plaintext_bytes) uint8, ordered by id.

        The relay must not see this order: :func:`ldpfl.transport.shuffling.sealing.seal` draws a random one. Row 0 of ``source`` assigns
        sampled weights to records; the result of :meth:`join` does not depend on it. Only simulated clients use another source than the
        secure one.

        Raises:
            ProtocolError: the payload does not follow the mechanism's wire format.
        """
        cut = self._cutter
        ids, bodies = cut.split(payload) if isinstance(cut, FixedRecords) else cut.split(payload, source)
        records = np.zeros((self.records, self.plaintext_bytes), dtype=np.uint8)  # zeros remain as padding
        records[:, :_ID_BYTES] = ids.astype(">u4").view(np.uint8).reshape(-1, _ID_BYTES)
        records[:, _ID_BYTES : _ID_BYTES + bodies.shape[1]] = bodies
        return records

    def join(self, plaintexts: Bytes, uploads: int) -> Joined:
        """Join records of ``uploads`` clients, (R, plaintext_bytes) uint8 in any order, and leave out unreadable ones.

        The result does not depend on the order of arrival. If every weight was reported equally often, the pool is like the simulator's;
        otherwise it is a :class:`PartialPool`. Records with unknown ids, nonzero padding or values that no client can send are refused. If
        an id came more often than there are uploads, at least one of its records is false. Which one is unknown, so all are refused,
        and the weights keep their values in this round. Thus a malicious client can block the update of weights. In return, no client can
        vote twice on a weight for which all other votes arrived.

        Raises:
            ProtocolError: records of another length, or ``uploads`` is not positive.
        """
        _checked_uploads(uploads)
        ids, bodies = self.ids_and_bodies(plaintexts)
        # Sorted by all bytes of a record, so that nothing depends on the order of arrival. The id comes first, so the ids ascend.
        order = np.argsort(np.ascontiguousarray(plaintexts).view(f"V{self.plaintext_bytes}").ravel(), kind="stable")
        return _as_joined(*self._cutter.join(self.mechanism, self.ranges, ids[order], bodies[order], uploads))

    def joining(self) -> Joining:
        """Return an object that joins mixed records (pieces of reports) batch by batch.

        It adds them up on arrival if they have a fixed form and the mechanism's reports add up.
        """
        if isinstance(self._cutter, FixedRecords) and self.mechanism.properties.adds_up:
            return Joining(self, SummedRecords(self._cutter, self.mechanism, self.ranges))
        return Joining(self, None)

    def ids_and_bodies(self, plaintexts: Bytes) -> tuple[NDArray[np.int64], Bytes]:
        """Return the ids (R,) and contents (R, ...) of records, (R, plaintext_bytes) uint8.

        Raises:
            ProtocolError: records of another length.
        """
        if plaintexts.dtype != np.uint8 or plaintexts.ndim != 2 or plaintexts.shape[1] != self.plaintext_bytes:
            raise ProtocolError(
                f"records are {plaintexts.dtype} of shape {plaintexts.shape}, expected uint8 (records, {self.plaintext_bytes}): "
                "they were cut by another plan"
            )
        ids = plaintexts[:, :_ID_BYTES].copy().view(">u4").ravel().astype(np.int64)
        return ids, plaintexts[:, _ID_BYTES:]


def _checked_uploads(uploads: int) -> int:
    """Return ``uploads``, or raise a :class:`ProtocolError` if the number is not positive."""
    if uploads < 1:
        raise ProtocolError(f"records of {uploads} uploads cannot be joined, expected at least 1")
    return uploads


def _as_joined(pool: ReportPool | PartialPool | None, refused: Counter[str]) -> Joined:
    """Return the pool, and the numbers of refused records by reason, as one result."""
    return Joined(pool, tuple(RefusedRecords(count, reason) for reason, count in refused.items() if count))


def _for_canonical_json(value: object) -> object:
    """Convert ``value`` to a form that ``json`` writes in exactly one way.

    Texts, True, False and None stay. Numbers become hexadecimal floats, sequences become lists, and a dataclass becomes a list of its
    class's name and its fields.

    Raises:
        ConfigError: the value has an unsupported type.
    """
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, int | float):
        return float(value).hex()
    if isinstance(value, Sequence):
        return [_for_canonical_json(entry) for entry in value]
    if is_dataclass(value):
        return [type(value).__name__, *([field.name, _for_canonical_json(getattr(value, field.name))] for field in fields(value))]
    raise ConfigError(
        f"terms() of the mechanism returned a value with a {type(value).__name__} in it: expected text, numbers, None, and lists or "
        "dataclasses of these"
    )
