"""The relay: takes sealed records from clients that it knows, and hands them on mixed, so that nobody sees who sent what.

Or it takes masked vectors and hands on their sum, so that nobody sees what one client sent.

Servers import ``app``, ``store`` and ``serve``; this package itself gives what its callers need, and loads no server.
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
