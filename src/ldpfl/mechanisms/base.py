"""What every mechanism offers, and the checks that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from ldpfl.errors import PrivacyError, ProtocolError
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import Reports
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
    """What everybody knows when a round begins.

    Attributes:
        round: its number, from 1.
        weights: (d,) what was broadcast.
        previous: (d,) the broadcast of the round before; None in round 1.
        sizes: weights of each layer.

    Raises:
        PrivacyError: shapes that contradict each other, or weights that are NaN or infinite.
    """

    round: int
    weights: Tensor
    previous: Tensor | None
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        dimension = sum(self.sizes)
        if self.round < 1:
            raise PrivacyError(f"rounds are numbered from 1, got {self.round}; nothing was sent")
        for vector in (self.weights, self.previous):
            if vector is not None and vector.shape != (dimension,):
                raise PrivacyError(f"broadcast weights have shape {tuple(vector.shape)}, expected ({dimension},); nothing was sent")
            if vector is not None and not is_finite(vector):
                raise PrivacyError("broadcast weights contain NaN or infinity; nothing was sent")


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


class Mechanism(ABC):
    """A local randomiser and the estimator that belongs to it.

    ``values`` is always (K, d) float32, one client a row; ``ranges`` is public.
    """

    name: ClassVar[str]

    @abstractmethod
    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Any:
        """Clamp ``values`` to ``ranges``, randomise them, and return the clients' reports.

        Raises:
            PrivacyError: values that must not leave (NaN, infinity, another dtype or shape).
        """

    @abstractmethod
    def decode(self, reports: Any, ranges: LayerRanges) -> Tensor:
        """Return the (K, d) unbiased estimates that the reports stand for, one row a client."""

    @abstractmethod
    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> Any:
        """Return the reports that were received as ``payloads``, one a client.

        Raises:
            ProtocolError: a payload does not follow the wire format; :func:`read_valid` keeps the others.
        """

    @abstractmethod
    def aggregate(self, reports: Sequence[Any], ranges: LayerRanges) -> Tensor:
        """Return the (d,) mean over all reports, without building the dense (K, d) matrix."""

    @abstractmethod
    def noise(self, ranges: LayerRanges) -> Noise:
        """Return how far estimates are from what clients hold, in closed form."""

    @abstractmethod
    def units(self, ranges: LayerRanges) -> Units | SampledUnits:
        """Say how a report is laid out in units that may be released apart; ``Units.whole`` where nothing may be taken apart.

        Units may be taken apart only where each of them was randomised on its own, so that what it tells about its weights
        does not depend on the company it arrives in. Their bits add up to the length of a report, the same whatever the values. What
        :meth:`read` refuses in a unit may depend on its bits and its number of weights, not on which weights these are.
        """

    @abstractmethod
    def release(self, ranges: LayerRanges) -> Release:
        """Say what one client's report of a round is, for the ledger."""

    @property
    def properties(self) -> Properties:
        """What holds of it in every round: the defaults of :class:`Properties`, unless stated."""
        return Properties()


def guarantee_of(mechanism: Mechanism, ranges: LayerRanges) -> Guarantee:
    """State what one report of ``mechanism`` protects. It follows from what the mechanism releases, and from whose code it is."""
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
        assumptions=properties.assumptions if epsilon < inf else (release.why_unprotected or "nothing is protected",),
        source=properties.source,
    )


def payload_bits(mechanism: Mechanism, ranges: LayerRanges) -> int:
    """Return how many bits one client sends in one round, before they are rounded up to bytes.

    Raises:
        ConfigError: the mechanism does not fit the layers.
    """
    return mechanism.units(ranges).payload_bits


def privatize(mechanism: Mechanism, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> Tensor:
    """Return what a server that sees each report learns of ``values`` (K, d): ``decode(encode(values))``, (K, d)."""
    return mechanism.decode(mechanism.encode(values, ranges, generator), ranges)


@dataclass(frozen=True)
class Refused:
    """A payload that was not accepted: its place among those received, and why, in one line."""

    place: int
    reason: str


def read_valid(mechanism: Mechanism, payloads: Sequence[bytes], ranges: LayerRanges) -> tuple[Any | None, tuple[Refused, ...]]:
    """Return the reports of all payloads that follow the wire format (None if there are none), and those refused."""
    try:
        return (mechanism.read(payloads, ranges) if payloads else None), ()
    except ProtocolError:
        kept, refused = [], []
        for place, payload in enumerate(payloads):
            try:
                mechanism.read([payload], ranges)
                kept.append(payload)
            except ProtocolError as error:
                refused.append(Refused(place, str(error)))
    return (mechanism.read(kept, ranges) if kept else None), tuple(refused)


def require_finite(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` on the CPU if a mechanism may randomise them; otherwise stop, without repeating any value.

    Raises:
        PrivacyError: wrong dtype or shape, or a value that is NaN or infinite.
    """
    return require_finite_block(require_shape(values, ranges).cpu())


def require_finite_block(values: Tensor) -> Tensor:
    """Return ``values`` if all are finite; otherwise stop, without repeating any.

    Raises:
        PrivacyError: one is NaN or infinite.
    """
    if values.numel():
        require_finite_sample(torch.stack(values.aminmax()))  # NaN propagates through both
    return values


def is_finite(vector: Tensor) -> bool:
    """Tell whether no value is NaN or infinite; several times as fast as ``torch.isfinite`` on a long vector."""
    if vector.stride() == (0,):  # one number, seen many times: PyTorch would write all of them out
        vector = vector[:1]
    return bool(torch.isfinite(torch.stack(vector.aminmax())).all())  # NaN propagates through both


def require_shape(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` detached if their dtype and shape fit; for mechanisms that look only at a sample of them.

    Raises:
        PrivacyError: wrong dtype or shape.
    """
    if values.dtype != torch.float32:
        raise PrivacyError(f"values have dtype {values.dtype}, expected torch.float32; nothing was sent")
    return require_shape_of(values, ranges)


def require_shape_of(values: Tensor, ranges: LayerRanges) -> Tensor:
    """Return ``values`` of any dtype detached if their shape fits.

    Raises:
        PrivacyError: it does not.
    """
    if values.dim() != 2 or values.shape[1] != ranges.dimension:
        raise PrivacyError(f"values have shape {tuple(values.shape)}, expected (clients, {ranges.dimension}); nothing was sent")
    return values.detach()


def require_finite_sample(sampled: Tensor) -> Tensor:
    """Return the values that are about to be randomised if all of them are finite; otherwise stop, without repeating any.

    Raises:
        PrivacyError: one is NaN or infinite.
    """
    if not bool(torch.isfinite(sampled).all()):
        raise PrivacyError("a client's values contain NaN or infinity; nothing was sent (lower the learning rate, or check the data)")
    return sampled


def total_clients(reports: Sequence[Reports], ranges: LayerRanges, kind: type) -> int:
    """Count the clients behind ``reports`` and check that all are of this ``kind`` and fit ``ranges``.

    Raises:
        PrivacyError: no report at all, or one of another kind or dimension.
    """
    for batch in reports:
        if not isinstance(batch, kind):
            raise PrivacyError(f"a report is a {type(batch).__name__}, expected {kind.__name__}")
        if batch.dimension != ranges.dimension:
            raise PrivacyError(f"a report covers {batch.dimension} weights, the ranges cover {ranges.dimension}")
    clients = sum(batch.clients for batch in reports)
    if clients == 0:
        raise PrivacyError("there is no report to aggregate")
    return clients
