"""The relay: takes encrypted records from authenticated clients and passes them on in random order, so that nobody sees who sent which.

It can also take masked vectors and pass on their sum, so that nobody sees a single client's vector.

Servers import ``app``, ``store`` and ``serve``. This package itself exports only what callers of the relay need, and loads no server.
"""

from ldpfl.errors import RelayNotReleased, RelayRefused, RelayRoundOver, RelayUnreachable
from ldpfl.relay.clients import RelayAggregator, RelayClient
from ldpfl.relay.protocol import RoundStatus, SumTerms, Terms
from ldpfl.relay.requests import Patience

__all__ = [
    "Patience",
    "RelayAggregator",
    "RelayClient",
    "RelayNotReleased",
    "RelayRefused",
    "RelayRoundOver",
    "RelayUnreachable",
    "RoundStatus",
    "SumTerms",
    "Terms",
]
