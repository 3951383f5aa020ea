"""The relay: takes encrypted records from authenticated clients and passes them on in random order, so that nobody sees who sent which.

It can also take masked vectors and pass on their sum, so that nobody sees a single client's vector.

Servers import ``app``, ``store`` and ``serve``. This package itself exports only what callers of the relay need, and loads no server.
"""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.errors import RelayNotReleased as RelayNotReleased
    from ldpfl.errors import RelayRefused as RelayRefused
    from ldpfl.errors import RelayRoundOver as RelayRoundOver
    from ldpfl.errors import RelayUnreachable as RelayUnreachable
    from ldpfl.relay.clients import RelayAggregator as RelayAggregator
    from ldpfl.relay.clients import RelayClient as RelayClient
    from ldpfl.relay.protocol import RoundStatus as RoundStatus
    from ldpfl.relay.protocol import SumTerms as SumTerms
    from ldpfl.relay.protocol import Terms as Terms
    from ldpfl.relay.requests import Patience as Patience

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "Patience": "ldpfl.relay.requests",
        "RelayAggregator": "ldpfl.relay.clients",
        "RelayClient": "ldpfl.relay.clients",
        "RelayNotReleased": "ldpfl.errors",
        "RelayRefused": "ldpfl.errors",
        "RelayRoundOver": "ldpfl.errors",
        "RelayUnreachable": "ldpfl.errors",
        "RoundStatus": "ldpfl.relay.protocol",
        "SumTerms": "ldpfl.relay.protocol",
        "Terms": "ldpfl.relay.protocol",
    },
)
