"""What only some mechanisms have, and others need not know of: noise that changes from round to round, and clipped records.

A mechanism derives from these classes, beside :class:`Mechanism`. Its class decides, and never an attribute of an instance, because the
author of a mechanism is found from classes (:mod:`ldpfl.privacy.authors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from ldpfl.mechanisms.base import Mechanism, PublicState
from ldpfl.mechanisms.record_clipping import RecordClip


class PerRound(ABC):
    """A mechanism that is another one in each round: its noise follows a schedule, or its rotation is that of the round."""

    @abstractmethod
    def in_round(self, public: PublicState) -> Mechanism:
        """Return the mechanism of the round in which ``public`` is known."""

    @property
    @abstractmethod
    def terms(self) -> object:
        """What client and server must agree on, beside the ranges and the round: a dataclass of plain values."""


class PerRecord(ABC):
    """A mechanism that protects single records, or single persons, and so clips the gradient of each of them."""

    @property
    @abstractmethod
    def record_clip(self) -> RecordClip:
        """How each record's gradient is bounded before a client adds them up."""

    @property
    @abstractmethod
    def record_rate(self) -> float:
        """Probability with which each of a client's records takes part in a round, by a coin of its own."""


def in_round(mechanism: Mechanism, public: PublicState) -> Mechanism:
    """Return ``mechanism`` as it is in the round in which ``public`` is known: itself, unless it is :class:`PerRound`."""
    return mechanism.in_round(public) if isinstance(mechanism, PerRound) else mechanism


def terms_of(mechanism: Mechanism) -> object:
    """Return what client and server must agree on of ``mechanism``, beside the ranges and the round: a dataclass of plain values."""
    return mechanism.terms if isinstance(mechanism, PerRound) else mechanism


def record_clip_of(mechanism: Mechanism) -> RecordClip | None:
    """Return how each record's gradient is bounded, or None where records are not looked at one by one."""
    return mechanism.record_clip if isinstance(mechanism, PerRecord) else None


def record_rate_of(mechanism: Mechanism) -> float:
    """Return the probability with which each record takes part in a round: 1, unless ``mechanism`` is :class:`PerRecord`."""
    return mechanism.record_rate if isinstance(mechanism, PerRecord) else 1.0
