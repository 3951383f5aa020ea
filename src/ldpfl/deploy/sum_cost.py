"""Estimate the cost of one round of a sum over two servers: bytes, processor time and memory. The constants were measured on one core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ldpfl.deploy.cost import HOUR_S
from ldpfl.relay.protocol import MAX_UPLOADS
from ldpfl.transport.sums import ENVELOPE_BYTES
from ldpfl.util.number_format import size_text

TAKE_S, TAKE_BYTE_S = 3.2e-3, 2.7e-9
"""Seconds of one core of a relay for an upload and for each of its bytes, HTTP and the sum included: ``benchmarks/sum.py``."""

OPEN_S, UNMASK_BYTE_S = 0.2e-3, 0.45e-9
"""Seconds of one core of the aggregator for an envelope, and for each byte of a mask: ``benchmarks/sum.py``."""

NOISE_S, MASK_BYTE_S = 27e-9, 0.45e-9
"""Seconds of one core of a client for the noise of a weight (``benchmarks/mechanism.py``), and for each byte of its mask."""

KEPT_BYTES = 600
"""Bytes that the relay's store keeps of an upload until the release, with indexes."""


@dataclass(frozen=True)
class SumCost:
    """Cost of one round, without training, on cores like the one that was measured.

    Attributes:
        clients: number of clients of the round.
        upload_bytes: size of one client's upload, its masked vector and its envelope.
        round_bytes: size of all uploads, which the relay receives.
        download_bytes: size of the sum and of all envelopes, which the aggregator receives.
        client_s: seconds of one core in which one client draws its noise and makes its mask.
        relay_s: seconds of one core in which the relay takes all uploads and adds them up.
        aggregator_s: seconds of one core in which the aggregator opens all envelopes and takes all masks off.
        store_bytes: size of the relay's store just before the release.
    """

    clients: int
    upload_bytes: int
    round_bytes: int
    download_bytes: int
    client_s: float
    relay_s: float
    aggregator_s: float
    store_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of each figure."""
        yield "a client, each round", f"{self.client_s:.2g} s for noise and mask, {size_text(self.upload_bytes)} sent"
        rate = size_text(self.round_bytes / HOUR_S)
        yield "relay, network", f"{size_text(self.round_bytes)} in ({rate} a second for an hour), {size_text(self.download_bytes)} out"
        yield "relay, processor time", _core_time(self.relay_s)
        yield "relay, store", f"{size_text(self.store_bytes)}: one sum, and {KEPT_BYTES} bytes for each upload"
        yield "aggregator, network", f"{size_text(self.download_bytes)} in"
        yield "aggregator, processor time", _core_time(self.aggregator_s)
        if self.clients > MAX_UPLOADS:
            yield "note", f"a round takes at most {MAX_UPLOADS:,} uploads: split it into {ceil(self.clients / MAX_UPLOADS):,} rounds"
        yield "figures", "measured on one core of an AMD EPYC, without TLS; training is not included"


def sum_cost(clients: int, weights: int, bits: int) -> SumCost:
    """Estimate the cost of one round, in which each of ``clients`` sends ``weights`` numbers of ``bits`` each."""
    vector_bytes = weights * bits // 8
    upload_bytes, download_bytes = vector_bytes + ENVELOPE_BYTES, vector_bytes + clients * ENVELOPE_BYTES
    return SumCost(
        clients=clients,
        upload_bytes=upload_bytes,
        round_bytes=clients * upload_bytes,
        download_bytes=download_bytes,
        client_s=NOISE_S * weights + MASK_BYTE_S * vector_bytes,
        relay_s=clients * (TAKE_S + TAKE_BYTE_S * vector_bytes),
        aggregator_s=clients * (OPEN_S + UNMASK_BYTE_S * vector_bytes),
        store_bytes=vector_bytes + clients * KEPT_BYTES,
    )


def _core_time(seconds: float) -> str:
    """Format seconds of one core, and how many cores do the work in an hour if one does not."""
    return f"{seconds:,.0f} s of one core" + (f": an hour on {ceil(seconds / HOUR_S):,} cores" if seconds > HOUR_S else "")
