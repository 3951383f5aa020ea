"""How much the relay takes: requests a token, seconds a block, bytes a block; and how much it hands out at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ldpfl.shuffling.relay.errors import TooMany

BLOCK_BYTES = 256 * 2**10
"""Uploads are stored in blocks of this length; no more of a request's body is in memory."""

TERMS_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """``requests_per_s`` a token, of which ``burst`` may come at once; ``block_s`` seconds for each block of a body.

    ``parts_at_once`` are those that an aggregator is being sent: each is some MiB, and in memory until it has been read.
    """

    requests_per_s: float = 50.0
    burst: float = 200.0
    block_s: float = 60.0
    parts_at_once: int = 4


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
