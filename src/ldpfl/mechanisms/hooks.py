"""Optional interfaces of mechanisms: noise that changes from round to round, and clipping of single records.

A mechanism inherits from these classes in addition to :class:`Mechanism`. Only its class decides, never an attribute of an instance,
because the author of a mechanism is derived from classes (:mod:`ldpfl.privacy.authors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ldpfl.mechanisms.base import Mechanism, PublicState
from ldpfl.mechanisms.record_clipping import RecordClip


class PerRound(ABC):
    """A mechanism that differs from round to round: its noise follows a schedule, or each round has its own rotation."""

    @abstractmethod
    def in_round(self, public: PublicState) -> Mechanism:
        """Return the mechanism of the round that ``public`` describes."""

    @property
    @abstractmethod
    def terms(self) -> object:
        """Parameters that client and server must agree on, apart from the ranges and the round: a dataclass of plain values."""


class PerRecord(ABC):
    """A mechanism that protects single records, or single persons, and therefore clips the gradient of each."""

    @property
    @abstractmethod
    def record_clip(self) -> RecordClip:
        """Clipping of each record's gradient before a client adds the gradients up."""

    @property
    @abstractmethod
    def record_rate(self) -> float:
        """Probability that a record takes part in a round, independently of the others (Poisson sampling)."""


def in_round(mechanism: Mechanism, public: PublicState) -> Mechanism:
    """Return the mechanism of the round that ``public`` describes: ``mechanism`` itself, unless it is :class:`PerRound`."""
    return mechanism.in_round(public) if isinstance(mechanism, PerRound) else mechanism


def terms_of(mechanism: Mechanism) -> object:
    """Return the parameters of ``mechanism`` that client and server must agree on: a dataclass of plain values."""
    return mechanism.terms if isinstance(mechanism, PerRound) else mechanism


def record_clip_of(mechanism: Mechanism) -> RecordClip | None:
    """Return how ``mechanism`` clips each record's gradient, or None if it does not clip records."""
    return mechanism.record_clip if isinstance(mechanism, PerRecord) else None


def record_rate_of(mechanism: Mechanism) -> float:
    """Return the probability that a record takes part in a round: 1, unless ``mechanism`` is :class:`PerRecord`."""
    return mechanism.record_rate if isinstance(mechanism, PerRecord) else 1.0
