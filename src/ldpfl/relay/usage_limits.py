"""How much of the relay one may take: connections, times, requests of a token. What enforces the first two is ``connections``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ldpfl.relay.errors import StoreUnavailable, TooMany


@dataclass(frozen=True)
class Connections:
    """Bounds on connections, and on what each may take its time for, in seconds.

    Attributes:
        served: requests and connections at once; more are told 503. A block of 256 KiB each is at most 100 MB.
        in_all: connections at once, those that are told 503 or have no TLS yet included; others are closed when they come.
        an_address: of these, from one IPv4 address or one /64 of IPv6; 0 is no bound, for a relay behind a proxy.
        handshake_s: for TLS.
        head_s: for the head of a request, from the connection's beginning or the first byte of a later request.
        idle_s: between two requests.
        answer_s: for a caller to read an answer.
        closing_s: for a caller to read the rest of what it is sent last, and to end TLS.
    """

    served: int = 400
    in_all: int = 480
    an_address: int = 100
    handshake_s: float = 10.0
    head_s: float = 10.0
    idle_s: int = 30
    answer_s: float = 120.0
    closing_s: float = 15.0


@dataclass(frozen=True)
class Limits:
    """``requests_per_s`` a token, of which ``burst`` may come at once; ``block_s`` seconds for each block of a body.

    ``parts_at_once`` are those that an aggregator is being sent: each is some MiB, and in memory until it has been read.
    ``sum_bytes`` are those of all uploads to sum rounds that are under way: in memory, or the longer ones in files.
    """

    requests_per_s: float = 50.0
    burst: float = 200.0
    block_s: float = 60.0
    parts_at_once: int = 4
    sum_bytes: int = 384 * 2**20


class RateLimit:
    """A token bucket for each name, in this process: with several workers each allows the full rate.

    Names are those of known tokens, so the buckets are as many as these at most. Some lines of our own: the libraries
    for it bring stores of their own, of which this needs none.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> None:
        """Count one request of ``name``.

        Raises:
            TooMany: the name has none left; the refusal's header says for how many seconds.
        """
        now = self._clock()
        left, then = self._buckets.get(name, (self._limits.burst, now))
        left = min(self._limits.burst, left + (now - then) * self._limits.requests_per_s)
        if left < 1:
            self._buckets[name] = (left, now)
            wait = math.ceil((1 - left) / self._limits.requests_per_s)
            raise TooMany("too many requests with this token; slow down", {"Retry-After": str(wait)})
        self._buckets[name] = (left - 1, now)


class UnderWay:
    """Uploads that are taken whole, of ``most`` bytes together, and one at a time of each client."""

    def __init__(self, most: int) -> None:
        self._left, self._clients = most, set[str]()

    @contextmanager
    def held(self, client: str, size: int) -> Iterator[None]:
        """Count an upload for as long as the block takes.

        Raises:
            TooMany: another one of the client is under way.
            StoreUnavailable: all together would be too long.
        """
        if client in self._clients:
            raise TooMany("an upload with this token is under way already; send one at a time", {"Retry-After": "1"})
        if size > self._left:
            raise StoreUnavailable("the relay is taking as many uploads as it has room for; try again later", {"Retry-After": "1"})
        self._clients.add(client)
        self._left -= size
        try:
            yield
        finally:
            self._clients.discard(client)
            self._left += size
