"""Estimate the cost of one round over relays: records, bytes, processor time and memory. The constants were measured on one core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.relay.protocol import MAX_ROUND_BYTES, MAX_UPLOADS
from ldpfl.transport.shuffling.records import RecordPlan
from ldpfl.transport.shuffling.sealing import OVERHEAD
from ldpfl.util.number_format import size_text

SEAL_S, OPEN_S = 45e-6, 36e-6
"""Core seconds to encrypt, and to decrypt, one record: ``benchmarks/sealing.py`` and ``benchmarks/server_round.py``."""

ADD_S, JOIN_S = 0.6e-9, 7e-9
"""Core seconds for one byte of a report, if reports are added up, and if they are kept and joined: ``benchmarks/server_round.py``."""

ADD_BIT_S = 0.4e-9
"""Core seconds for one bit of a report, if reports are added up and a weight takes one bit."""

ENCODE_NS = {
    "duchi": 2.4,
    "harmony": 0.1,
    "laplace": 21.0,
    "piecewise": 24.0,
    "hybrid": 34.0,
    "duchi-vector": 3.4,
    "privunit-g": 57.0,
    "full-dp": 46.0,
    "rotated-sign": 12.0,
    "none": 2.1,
    "dp-sgd": 27.0,
}
"""Core nanoseconds to encode one weight: ``benchmarks/mechanism.py``."""

_PROCESS_BYTES, _COPIES = 400 << 20, 7
"""Memory of a server process (one for each core) without its round; and number of copies of the reports in memory if they are not added
up."""

HOUR_S = 3600.0
_MACHINE_CORES = 64
"""Number of cores of a large machine; more cores are given as a number of such machines."""


@dataclass(frozen=True)
class RoundCost:
    """Cost of one round, without training, on cores like the one that was measured.

    Attributes:
        clients: number of clients of the round.
        linked: number of units of a report that stay together in a record.
        records: number of records of one client.
        upload_bytes: size of one client's encrypted upload.
        round_bytes: size of all clients' uploads. The relays receive them, and then the server.
        relays: number of relays needed to take all uploads of a round.
        encode_s: core seconds for one client to encode its report; None if the mechanism was not measured.
        seal_s: core seconds for one client to encrypt its records.
        server_s: core seconds for the server to decrypt all records and add them up.
        server_cores: number of cores that do the server's work in an hour.
        server_bytes: memory of the server, over all its machines.
    """

    clients: int
    linked: int
    records: int
    upload_bytes: int
    round_bytes: int
    relays: int
    encode_s: float | None
    seal_s: float
    server_s: float
    server_cores: int
    server_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of each figure."""
        encode = "" if self.encode_s is None else f"{self.encode_s:.2g} s to encode, "
        yield "a client, each round", f"{encode}{self.seal_s:.2g} s to seal {self.records:,} records, {size_text(self.upload_bytes)} sent"
        yield "relays", f"{self.relays:,}, for {size_text(self.round_bytes)} in and as much out"
        machines = (
            f" ({ceil(self.server_cores / _MACHINE_CORES):,} machines of {_MACHINE_CORES})" if self.server_cores > _MACHINE_CORES else ""
        )
        yield "server, processor time", f"{self.server_s:,.0f} s of one core: an hour on {self.server_cores:,} cores{machines}"
        yield "server, memory", size_text(self.server_bytes)
        if self.linked > 1:
            yield "note", "the guarantees are for 1 unit in each record: a record with more units reveals more"
        if self.relays > 1:
            yield "note", f"a client hides only among the {self.clients // self.relays:,} or so clients of its relay: plan with that number"
        yield "figures", "measured on one core of an AMD EPYC; training, disks and networks are not included"


def round_cost(mechanism: Mechanism, ranges: LayerRanges, clients: int, linked: int) -> RoundCost:
    """Estimate the cost of a round in which each of ``clients`` sends records of ``linked`` units.

    Raises:
        ConfigError: ``linked`` is not positive, or a report is cut into too many records.
    """
    plan = RecordPlan(mechanism, ranges, linked, unprotected=True)  # the cost may be asked for reports without protection, too
    report_bits = payload_bits(mechanism, ranges)
    upload_bytes = plan.records * (plan.plaintext_bytes + OVERHEAD)
    # A relay takes a limited number of uploads and of bytes a round, but one upload at least.
    relays = max(ceil(clients / MAX_UPLOADS), ceil(clients / max(1, MAX_ROUND_BYTES // upload_bytes)))
    kept_bytes = 0  # of all reports, in the server's memory
    # combine_s: core seconds to add one client's report up, or to keep and join it if the mechanism needs all reports.
    if not mechanism.properties.adds_up:
        combine_s = JOIN_S * report_bits / 8
        kept_bytes = _COPIES * clients * ((report_bits + 7) // 8)
    elif report_bits <= ranges.dimension:  # a bit for each weight
        combine_s = ADD_BIT_S * report_bits
    else:
        combine_s = ADD_S * report_bits / 8
    server_s = clients * (plan.records * OPEN_S + combine_s)
    cores = max(1, ceil(server_s / HOUR_S))
    encode_ns = ENCODE_NS.get(mechanism.name)
    return RoundCost(
        clients=clients,
        linked=linked,
        records=plan.records,
        upload_bytes=upload_bytes,
        round_bytes=clients * upload_bytes,
        relays=relays,
        encode_s=None if encode_ns is None else encode_ns * 1e-9 * ranges.dimension,
        seal_s=plan.records * SEAL_S,
        server_s=server_s,
        server_cores=cores,
        server_bytes=_PROCESS_BYTES * cores + kept_bytes,
    )
