"""Privacy: what was released (events, ledger), and the guarantees that hold.

Accountants are imported by name where they are needed: they load SciPy and dp-accounting.
"""

from ldpfl.privacy.events import BinaryRelease, GaussianRelease, PureRelease, Release, RoundEvent, UnprotectedRelease, usable_blanket
from ldpfl.privacy.guarantee import REPLACE_ONE, REPLACE_PERSON, REPLACE_RECORD, Guarantee
from ldpfl.privacy.ledger import Ledger

__all__ = [
    "REPLACE_ONE",
    "REPLACE_PERSON",
    "REPLACE_RECORD",
    "BinaryRelease",
    "GaussianRelease",
    "Guarantee",
    "Ledger",
    "PureRelease",
    "Release",
    "RoundEvent",
    "UnprotectedRelease",
    "usable_blanket",
]
