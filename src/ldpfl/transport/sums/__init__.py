"""A sum over clients that no single server sees: a relay adds up masked vectors, an aggregator takes the masks off their sum.

Pure functions; :mod:`ldpfl.relay` stores, and :mod:`ldpfl.flower` sends. The steps in order: a client makes two shares of its vector by
:func:`shard` and seals the second one by :func:`seal_seed`; the relay checks who signed it by :func:`check_signed`, and adds up the first
shares by :func:`fold`; the aggregator opens the second ones by :func:`open_seeds` and takes them off by :func:`unshard`.
"""

from ldpfl.transport.sums.envelopes import ENVELOPE_BYTES, SumBinding, check_signed, new_seed, open_seeds, seal_seed, signer_of
from ldpfl.transport.sums.masks import Bits, fold, shard, unshard
from ldpfl.transport.sums.node_keys import read_nodes

__all__ = [
    "ENVELOPE_BYTES",
    "Bits",
    "SumBinding",
    "check_signed",
    "fold",
    "new_seed",
    "open_seeds",
    "read_nodes",
    "seal_seed",
    "shard",
    "signer_of",
    "unshard",
]
