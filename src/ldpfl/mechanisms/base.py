"""The interfaces of mechanisms and of their reports, and the input checks that mechanisms share.

Beside :class:`Mechanism` there are two optional interfaces: :class:`PerRound`, for noise that changes from round to round, and
:class:`PerRecord`, for clipping of single records. A mechanism inherits from them in addition. Only its class decides, never an attribute
of an instance, because the author of a mechanism is derived from classes (:mod:`ldpfl.privacy.authors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ldpfl.errors import PrivacyError, ProtocolError
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.reports.units import SampledUnits, Units
from ldpfl.privacy import REPLACE_ONE, REPLACE_PERSON, REPLACE_RECORD, Guarantee, Release
from ldpfl.privacy.accountants.registry import unit_epsilon
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import OURS
from ldpfl.privacy.guarantee import AUTHORS_CLAIM
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class PublicState:
    """Public information at the beginning of a round.

    Attributes:
        round: number of the round, from 1.
        weights: (d,) broadcast weights.
        previous: (d,) broadcast weights of the round before; None in round 1.
        sizes: number of weights of each layer.

    Raises:
        PrivacyError: a round below 1, shapes that contradict each other, or weights that are NaN or infinite.
    """

    round: int
    weights: Tensor
    previous: Tensor | None
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        dimension = sum(self.sizes)
        if self.round < 1:
            raise PrivacyError(f"the round's number is {self.round}, expected 1 or more; nothing was sent")
        for vector in (self.weights, self.previous):
            if vector is not None and vector.shape != (dimension,):
                raise PrivacyError(f"the broadcast weights have shape {tuple(vector.shape)}, expected ({dimension},); nothing was sent")
            if vector is not None and not is_finite(vector):
                raise PrivacyError(
                    "the broadcast weights contain NaN or infinity; nothing was sent (begin with finite ones, or lower the learning rate)"
                )


class Reports(Protocol):
    """The reports of ``clients`` clients about ``dimension`` weights; each form is a file in ``reports``.

    ``bytes_per_client`` is the length of one client's report on the wire. :func:`payload_bits` computes it, in bits, without any report.
    """

    @property
    def clients(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def bytes_per_client(self) -> int: ...

    def payloads(self) -> Iterable[bytes]: ...

    @classmethod
    def mix(cls, batches: Sequence[Any], generator: np.random.Generator) -> Reports:
        """Return all reports of ``batches`` in a uniformly random order, which says nothing about clients.

        :func:`ldpfl.transport.shuffling.mix` calls this after checking that there are reports, and that all have one class and dimension.

        A unit is a part of a report that has a guarantee of its own, such as one weight. The bits of a unit stay together. Different units
        of a report are reordered independently.

        Raises:
            PrivacyError: the reports differ in more than class and dimension, for instance in their groups of weights.
        """
        ...


_ADJACENCY: Mapping[str, str] = {
    "weight": "replace one client's value",
    "group": "replace one client's values of one group",
    "layer": "replace one client's values of one layer",
    "vector": "replace one client's vector",
    "coordinate": "replace one client's value",
    "record": REPLACE_RECORD,
    "person": REPLACE_PERSON,
    "client": REPLACE_ONE,
}
"""Difference between the two data sets that a guarantee compares, by the unit of the release."""


class Mechanism(ABC):
    """A local randomiser and its estimator.

    ``values`` is (K, d): d values for each of K clients. It is float32, unless the class says otherwise. ``ranges`` is public.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Any:
        """Clip ``values`` to ``ranges``, randomise them, and return the clients' reports. ``values`` itself is left as it is.

        Raises:
            PrivacyError: invalid values, which must not be sent (NaN, infinity, another dtype or shape).
        """

    @abstractmethod
    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        """Return unbiased estimates (K, d) of the clients' values, one row for each client."""

    @abstractmethod
    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> Any:
        """Parse ``payloads``, one for each client, into reports.

        Raises:
            ProtocolError: a payload does not follow the wire format, for example its length. :func:`read_valid` skips such payloads.
        """

    @abstractmethod
    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        """Return the (d,) mean over all reports, without building the dense (K, d) matrix."""

    @abstractmethod
    def noise(self, ranges: LayerRanges) -> Noise:
        """Return the error of the estimates, in closed form."""

    @abstractmethod
    def units(self, ranges: LayerRanges) -> Units | SampledUnits:
        """Return the layout of a report: its units that a shuffler may separate. ``Units.whole`` if the report must stay together.

        Units may be separated only if each was randomised independently, so that what a unit reveals does not depend on the other units.
        The bits of all units add up to the length of a report, which must not depend on the values. :meth:`read` may refuse a unit because
        of its bits and its number of weights, but not because of which weights it is about.
        """

    @abstractmethod
    def release(self, ranges: LayerRanges) -> Release:
        """Return the facts about one client's report of a round from which accountants compute its privacy cost, for the ledger."""

    @property
    def properties(self) -> Properties:
        """Facts that hold in every round; by default the defaults of :class:`Properties`."""
        return Properties()


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


def guarantee_of(mechanism: Mechanism, ranges: LayerRanges) -> Guarantee:
    """Return the local guarantee of one unit of a report: a weight, a group of weights, or the whole report.

    The guarantee is computed from the mechanism's release. Its status is "proved" only if the mechanism is built in, else "author's claim".
    Its delta is 0 if a pure epsilon is known, and also if nothing is protected (epsilon infinite).
    """
    release, properties = released(mechanism, ranges), mechanism.properties
    epsilon = unit_epsilon(release, properties.delta)
    return Guarantee(
        epsilon=epsilon,
        delta=properties.delta if release.pure_epsilon == inf and epsilon < inf else 0.0,
        unit=release.unit,
        units_per_round=release.units,
        adjacency=_ADJACENCY[release.unit],
        trust_model="local",
        status="proved" if release.author == OURS else AUTHORS_CLAIM,
        # A guarantee has assumptions. Without a guarantee, the field says why there is none.
        assumptions=properties.assumptions if epsilon < inf else (release.why_unprotected or "nothing is protected",),
        source=properties.source,
    )


def payload_bits(mechanism: Mechanism, ranges: LayerRanges) -> int:
    """Return the number of bits that one client sends in one round, before rounding up to bytes.

    Raises:
        ConfigError: the mechanism does not fit the layers.
    """
    return mechanism.units(ranges).payload_bits


def privatize(mechanism: Mechanism, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Tensor:
    """Randomise ``values`` (K, d), and return the estimates (K, d) of a server that sees each report: ``decode(encode(values))``."""
    return mechanism.decode(mechanism.encode(values, ranges, generator), ranges)


@dataclass(frozen=True)
class Refused:
    """A payload that was not accepted: its index among the received payloads, and the reason in one line."""

    place: int
    reason: str


def read_valid(mechanism: Mechanism, payloads: Sequence[bytes], ranges: LayerRanges) -> tuple[Any | None, tuple[Refused, ...]]:
    """Parse all payloads that follow the wire format into reports (None if no payload does), and list the refused payloads."""
    try:  # parses all payloads at once, which is fast; one by one only if a payload is refused
        return (mechanism.read(payloads, ranges) if payloads else None), ()
    except ProtocolError:
        valid, refused = [], []
        for place, payload in enumerate(payloads):
            try:
                mechanism.read([payload], ranges)
                valid.append(payload)
            except ProtocolError as error:
                refused.append(Refused(place, str(error)))
    return (mechanism.read(valid, ranges) if valid else None), tuple(refused)


def require_finite(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` on the CPU after checking that a mechanism may randomise them. Error messages contain no value.

    Raises:
        PrivacyError: wrong dtype or shape, or a value that is NaN or infinite.
    """
    return require_finite_block(require_shape(values, ranges).cpu())


def require_finite_block(values: Tensor) -> Tensor:
    """Return ``values`` after checking that all are finite. Error messages contain no value.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    if values.numel():  # an empty tensor has no minimum
        require_finite_sample(torch.stack(values.aminmax()))  # NaN propagates through both
    return values


def is_finite(vector: Tensor) -> bool:
    """Whether no value is NaN or infinite. Several times as fast as ``torch.isfinite`` on a long vector."""
    if vector.stride() == (0,):  # an expanded scalar: PyTorch would materialise all its elements
        vector = vector[:1]
    return bool(torch.isfinite(torch.stack(vector.aminmax())).all())  # NaN propagates through both


def require_shape(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` (K, d), detached from autograd, after checking dtype and shape. The caller checks the values that it reads.

    Raises:
        PrivacyError: wrong dtype or shape.
    """
    if values.dtype != torch.float32:
        raise PrivacyError(f"clients' values have dtype {values.dtype}, expected torch.float32; nothing was sent")
    return require_shape_of_any_dtype(values, ranges)


def require_shape_of_any_dtype(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` (K, d), detached from autograd, after checking their shape, but not their dtype.

    Raises:
        PrivacyError: wrong shape.
    """
    if values.dim() != 2 or values.shape[1] != ranges.dimension:
        raise PrivacyError(f"clients' values have shape {tuple(values.shape)}, expected (clients, {ranges.dimension}); nothing was sent")
    return values.detach()


def require_finite_sample(sampled: Tensor) -> Tensor:
    """Return the ``sampled`` values after checking that all are finite. Error messages contain no value.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    if not bool(torch.isfinite(sampled).all()):
        raise PrivacyError("a client's values contain NaN or infinity; nothing was sent (lower the learning rate, or check the data)")
    return sampled


def total_clients(reports: Sequence[Reports], ranges: LayerRanges, kind: type) -> int:
    """Return the number of clients of ``reports``, after checking that all are of class ``kind`` and fit ``ranges``.

    Raises:
        PrivacyError: there is no report, or a report has another class or dimension.
    """
    for batch in reports:
        if not isinstance(batch, kind):
            raise PrivacyError(f"reports are of type {type(batch).__name__}, expected {kind.__name__}: give the reports of this mechanism")
        if batch.dimension != ranges.dimension:
            raise PrivacyError(
                f"a report has {batch.dimension} weights, but the clipping ranges have {ranges.dimension}: give the ranges of the model "
                "that the report is about"
            )
    clients = sum(batch.clients for batch in reports)
    if clients == 0:
        raise PrivacyError("there are no reports to aggregate, expected at least one")
    return clients
