"""DP-SGD at the client: the sum of its records' clipped gradients with Gaussian noise, which protects each record from everybody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import Mechanism, require_shape_of
from ldpfl.mechanisms.hooks import PerRecord
from ldpfl.mechanisms.lattice import LEAST_NOISE, MOST_NOISE, UP, Lattice, LatticeMechanism
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.settings import Facts, MechanismSettings, Part
from ldpfl.privacy import GaussianRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Positive

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_SUM = 2**52
"""Lattice points up to which sums and noise are exact, in float64 as in 64 bits: those of 2^32 records."""


def of_records(mechanism: Mechanism) -> DpSgd:
    """Return ``mechanism``, which has to protect sums over records.

    Raises:
        TypeError: it protects none.
    """
    if not isinstance(mechanism, DpSgd):
        raise TypeError(f"{mechanism.name} protects no sums over records")
    return mechanism


@dataclass(frozen=True)
class DpSgd(LatticeMechanism, PerRecord):
    """Add Gaussian noise of standard deviation s C to the sum of a client's gradients, each clipped to the norm C.

    Reports are in units of C (De et al. 2022), so that a step does not shrink with it: the estimate is of the mean clipped gradient / C.

    Guarantee: mu-GDP with mu = 2 / s for **one record** of a client, replaced by any other, in the report of one round, which is the
    gradient at broadcast weights over all its records; against everybody, for the noise is the client's own. T rounds are mu sqrt(T).
    Nothing is said of a client as a whole: m records are m mu, or m epsilon at more delta where they take part by chance. It holds
    for the bits that leave: clipped gradients are points of a lattice, whose norms are checked as integers; their sum is exact; the
    noise is real noise rounded to that lattice. That the number of a client's records is public is part of the adjacency: replacing
    keeps it.

    ``values`` are sums of lattice points, (K, d) int64, as :class:`~ldpfl.simulation.gradients.RecordGradientTrainer` gives them. Other
    updates are refused: clipping what many local steps led to bounds a client, not a record.

    With the ``part`` ``person`` all this is said of a person in the place of a record: what is clipped is one vector of each person, the
    mean gradient over those of its records that count in the round, and all records of a person may be replaced, by more or fewer.

    With a ``sample_rate`` below 1 each record takes part in a round by a coin of its own (Poisson batches), which is accounted for as
    long as nobody learns how the coins fell; a client's own budget charges the whole batch all the same.

    Source: Abadi et al. 2016; for full batches the composition is exact (Dong, Roth and Su 2022).

    Attributes:
        clip: how records' gradients are bounded.
        noise_multiplier: s, of one client's noise.
        summed, bits: as in :class:`LatticeMechanism`.
        records: mean number of records, or persons, a client: the report stands for the sum over it.
        sample_rate: probability with which a record, or person, takes part in a round.
        part: what is protected, and what is clipped.
    """

    records: float = 1.0
    sample_rate: float = 1.0
    part: Part = "record"
    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.records >= 1:
            raise ConfigError(f"a client has at least one record, got {self.records}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate is a probability above 0, got {self.sample_rate}")

    @property
    def record_clip(self) -> RecordClip:
        return self.clip

    @property
    def record_rate(self) -> float:
        return self.sample_rate

    @property
    def _share(self) -> float:
        """Records in a client's batch, on average: a report is the mean over them, in units of C."""
        return self.records * self.sample_rate

    @property
    def _vectors(self) -> float:
        return self.records

    def _bounded(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        if values.dtype != torch.int64:
            raise PrivacyError("dp-sgd protects records whose gradients it clipped one by one, and these values are none; nothing was sent")
        sums = require_shape_of(values, ranges)
        least, most = sums.aminmax()  # the size of the smallest integer is itself, and negative
        if least < -_LONGEST_SUM or most > _LONGEST_SUM:
            raise PrivacyError("a sum of gradients is longer than its lattice; nothing was sent")
        return sums

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        return GaussianRelease(self.name, 2 / self.noise_multiplier * UP, unit=self.part, rate=self.sample_rate)

    @property
    def properties(self) -> Properties:
        assumptions = (
            f"the number of a client's {self.part}s is public",
            f"no single {self.part} makes training fail or miss its time: what is sent then shows that it did",
            "random bits are uniform and secret",
        )
        # A node's batches would have to be drawn from its own secret bits, not from the run's seed, as the simulator's are.
        return replace(super().properties, source="Abadi et al. 2016", assumptions=assumptions, deployable=self.sample_rate == 1)


class DpSgdSettings(MechanismSettings):
    """Settings of ``dp-sgd``."""

    name: Literal["dp-sgd"] = "dp-sgd"
    perturbed: Literal["gradient"] = "gradient"
    noise_multiplier: Positive = 10.0
    """Standard deviation of a client's own noise, as a multiple of ``clip_norm``; mu of a record and round is 2 over it."""
    clip_norm: Positive | Literal["auto"] = 0.02
    """Longest gradient of a record, or mean gradient of a person's records; a small one makes directions of nearly all of them, which
    spares choosing it well. ``auto`` takes, for tables, images and arrays, about the longest that a record with a usual row has, so that
    the gradients of a rare class are not cut."""
    records: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Mean number of records a client, or of persons with ``data.person``, which is public; 0 takes that of the simulated clients."""
    sample_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Probability with which each record, or person, takes part in a round (Poisson batches); in simulations alone. 1 makes for the least
    noise."""

    uses_ranges: ClassVar[bool] = False
    needs_training: ClassVar[bool] = True

    def for_measuring(self, factor: float) -> DpSgdSettings:
        noise = min(max(self.noise_multiplier * factor, LEAST_NOISE), MOST_NOISE)
        return self.model_copy(update={"noise_multiplier": noise})

    def at_strength(self, strength: float) -> DpSgdSettings:
        return self.model_copy(update={"noise_multiplier": max(1 / strength, LEAST_NOISE)})

    @property
    def unsaid(self) -> str:
        if self.records:
            return ""
        what = "mechanism.records, the mean number of records (or persons) a client, is public and has to be said on Flower"
        return f"{what}: set it in the app's pyproject.toml, or as by --set mechanism.records=600 where a recipe is named"

    @property
    def nearly_noise_free(self) -> DpSgdSettings:
        """The same clipping, and noise of a thousandth of ``clip_norm`` a client."""
        return self.model_copy(update={"noise_multiplier": LEAST_NOISE})

    def build(self, facts: Facts) -> DpSgd:
        if self.clip_norm == "auto":
            raise ConfigError("mechanism.clip_norm = 'auto' is for one's own data only: give a number")
        records = float(self.records) or facts.records
        lattice = Lattice.of(facts, records, self.noise_multiplier)
        clip = RecordClip(self.clip_norm, lattice.steps)
        return DpSgd(clip, self.noise_multiplier, facts.summed, lattice.bits, records, self.sample_rate, facts.part)
