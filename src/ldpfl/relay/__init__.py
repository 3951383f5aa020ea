"""The relay: takes encrypted records from authenticated clients and passes them on in random order, so that nobody sees who sent which.

It can also take masked vectors and pass on their sum, so that nobody sees a single client's vector.

Servers import ``app``, ``store`` and ``serve``. This package itself exports only what callers of the relay need, and loads no server.
"""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.errors import (
        RelayNotReleased as RelayNotReleased,
        RelayRefused as RelayRefused,
        RelayRoundOver as RelayRoundOver,
        RelayUnreachable as RelayUnreachable,
    )
    from ldpfl.relay.clients import RelayAggregator as RelayAggregator, RelayClient as RelayClient
    from ldpfl.relay.protocol import RoundStatus as RoundStatus, SumTerms as SumTerms, Terms as Terms
    from ldpfl.relay.requests import Patience as Patience

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "ldpfl.errors": ("RelayNotReleased", "RelayRefused", "RelayRoundOver", "RelayUnreachable"),
        "ldpfl.relay.clients": ("RelayAggregator", "RelayClient"),
        "ldpfl.relay.protocol": ("RoundStatus", "SumTerms", "Terms"),
        "ldpfl.relay.requests": ("Patience",),
    },
)
