"""Limits on the use of the relay: connections, times, and requests of a token. ``connections`` enforces the first two."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ldpfl.relay.errors import StoreUnavailable, TooMany


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number of connections, and on their times in seconds.

    Attributes:
        served: maximum number of requests and connections that are served at once; others get status 503. With a block of 256 KiB each,
            they take at most 100 MB.
        in_total: maximum number of connections at once, including those that get status 503 or have no TLS yet; others are closed at once.
        per_address: maximum number of connections from one IPv4 address or one IPv6 /64; 0 for no limit, behind a proxy.
        handshake_s: time for the TLS handshake.
        head_s: time for the head of a request, from the connection's beginning or the first byte of a later request.
        idle_s: time between two requests.
        answer_s: time for a caller to read an answer.
        closing_s: time for a caller to read the rest of the last answer, and to end TLS.
    """

    served: int = 400
    in_total: int = 480
    per_address: int = 100
    handshake_s: float = 10.0
    head_s: float = 10.0
    idle_s: int = 30
    answer_s: float = 120.0
    closing_s: float = 15.0


@dataclass(frozen=True)
class Limits:
    """Limits on authenticated requests.

    Attributes:
        requests_per_s: mean rate of requests for one token.
        burst: number of requests with one token that may come at once.
        block_s: seconds for each block of a body.
        parts_at_once: number of parts that an aggregator may be sent at once. Each takes some MiB of memory until it has been read.
        sum_bytes: bytes of all uploads to sum rounds that are under way: in memory, or in files for longer uploads.
    """

    requests_per_s: float = 50.0
    burst: float = 200.0
    block_s: float = 60.0
    parts_at_once: int = 4
    sum_bytes: int = 384 * 2**20


class RateLimit:
    """A token bucket for each name, in this process: each of several workers allows the full rate.

    Only owners of valid tokens have buckets, so their number is bounded. No library is used, because those for rate limits need a store.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def count_request(self, name: str) -> None:
        """Count one request of ``name``.

        Raises:
            TooMany: the rate is exceeded; the refusal's header says how many seconds to wait.
        """
        now = self._clock()
        # `tokens` are the requests that the bucket still allows. A request takes one, and time adds more, up to the size of the bucket.
        tokens, updated_at = self._buckets.get(name, (self._limits.burst, now))
        tokens = min(self._limits.burst, tokens + (now - updated_at) * self._limits.requests_per_s)
        if tokens < 1:
            self._buckets[name] = (tokens, now)
            wait_s = math.ceil((1 - tokens) / self._limits.requests_per_s)
            reason = f"this token may make {self._limits.requests_per_s:g} requests a second: wait {wait_s} s, and send fewer"
            raise TooMany(reason, {"Retry-After": str(wait_s)})
        self._buckets[name] = (tokens - 1, now)


class BufferedUploads:
    """Limit on uploads that are buffered whole: ``max_bytes`` bytes for all together, and one at a time for each client."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes, self._clients = max_bytes, set[str]()

    @contextmanager
    def reserve(self, client: str, size: int) -> Iterator[None]:
        """Count an upload of ``size`` bytes for as long as the ``with`` block takes.

        Raises:
            TooMany: another upload of the client is under way.
            StoreUnavailable: all uploads together would exceed the limit.
        """
        if client in self._clients:
            raise TooMany("an upload with this token is under way already; send one at a time", {"Retry-After": "1"})
        if size > self._free_bytes:
            raise StoreUnavailable("the relay has no room for one more upload at present; try again later", {"Retry-After": "1"})
        self._clients.add(client)
        self._free_bytes -= size
        try:
            yield
        finally:
            self._clients.discard(client)
            self._free_bytes += size
