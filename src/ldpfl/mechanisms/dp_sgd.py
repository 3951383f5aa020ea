"""DP-SGD at the client: the sum of its records' clipped gradients with Gaussian noise, which protects each record from everybody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, FiniteFloat

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.mechanisms.base import Mechanism, PerRecord, require_shape_of_any_dtype
from ldpfl.mechanisms.lattice import LEAST_NOISE, MOST_NOISE, ROUNDED_UP, Lattice, LatticeMechanism
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.settings import Facts, MechanismSettings, Part
from ldpfl.privacy import GaussianRelease
from ldpfl.privacy.events import UNKNOWN, USERS_CODE
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Positive

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_SUM = 2**52
"""Largest sum of gradients, in lattice points. Up to it, sums with noise are exact in float64 and int64. 2^32 records cannot exceed it."""


def require_dp_sgd(mechanism: Mechanism) -> DpSgd:
    """Return ``mechanism`` after checking that it is a :class:`DpSgd`.

    Raises:
        TypeError: ``mechanism`` does not protect sums over records.
    """
    if not isinstance(mechanism, DpSgd):
        raise TypeError(f"mechanism {mechanism.name} cannot protect sums over records: use dp-sgd")
    return mechanism


def on_users_code(mechanism: Mechanism) -> Mechanism:
    """Return ``mechanism``, marked as randomising gradients that a user's own code computes, such as a custom model.

    Only a :class:`DpSgd` is marked, because its guarantee needs that this code treats each record by itself. Other mechanisms are returned
    unchanged: the built-in ones clip and randomise all that a client sends, whatever code computed it.
    """
    return replace(mechanism, users_code=True) if isinstance(mechanism, DpSgd) else mechanism


@dataclass(frozen=True)
class DpSgd(LatticeMechanism, PerRecord):
    """Add Gaussian noise of standard deviation s C to the sum of a client's gradients, each clipped to the norm C.

    Reports are in units of C (De et al. 2022), so that a step does not shrink with C: the estimate is the mean clipped gradient / C.

    Guarantee: mu-GDP with mu = 2 / s for **one record** of a client, replaced by any other, in the report of one round. The report is the
    gradient at the broadcast weights over all its records. It protects against everybody, because the client itself adds the noise. T
    rounds have mu sqrt(T). The client as a whole is not protected: m of its records have m mu (with Poisson batches, m epsilon at a larger
    delta). The guarantee holds for the exact bits that are sent: clipped gradients are points of a lattice, whose norms are checked as
    integers; their sum is exact; the noise is real noise rounded to that lattice. The number of a client's records is public: replacing a
    record does not change it.

    ``values`` are sums of lattice points, (K, d) int64, as :class:`~ldpfl.simulation.gradients.RecordGradientTrainer` computes them. Other
    updates are refused: clipping the result of many local steps bounds the influence of a client, not of a record.

    With ``part`` ``person``, all this holds for a person instead of a record. One vector of each person is clipped: the mean gradient over
    those of its records that count in the round. All records of a person may be replaced, by more or fewer records.

    With a ``sample_rate`` below 1, each record takes part in a round independently with that probability (Poisson batches). This is
    accounted for, provided that nobody learns which records took part. A client's own budget charges the whole batch nevertheless.

    Source: Abadi et al. 2016; for full batches the composition is exact (Dong, Roth and Su 2022).

    Attributes:
        clip: clipping of records' gradients.
        noise_multiplier: s, for one client's noise.
        summed, bits: as in :class:`LatticeMechanism`.
        records: mean number of records, or persons, per client. A report is the sum divided by this number.
        sample_rate: probability that a record, or person, takes part in a round.
        part: the unit that is protected and clipped.
        users_code: whether code that is not ldpfl's, such as a user's model, computes the gradients. Then the release says so, because the
            guarantee needs that this code treats each record, or person, by itself.
    """

    records: float = 1.0
    sample_rate: float = 1.0
    part: Part = "record"
    users_code: bool = False
    name: ClassVar[str] = "dp-sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.records >= 1:
            raise ConfigError(f"records, the number of records of a client, must be at least 1, got {self.records}")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate must lie in (0, 1], got {self.sample_rate}")

    @property
    def record_clip(self) -> RecordClip:
        return self.clip

    @property
    def record_rate(self) -> float:
        return self.sample_rate

    @property
    def _report_divisor(self) -> float:
        """Average number of records, or persons, in a client's batch. A report is the mean over them, in units of C."""
        return self.records * self.sample_rate

    @property
    def _vectors_held(self) -> float:
        return self.records  # one clipped gradient for each record

    @property
    def _vectors_in_round(self) -> float:
        return self._report_divisor  # a report is the sum over a batch, divided by the average size of batches

    def _clipped_points(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Return ``values``, sums (K, d) of gradients that were clipped already, in lattice points, after checking that they are exact."""
        if values.dtype != torch.int64:
            raise PrivacyError(f"dp-sgd needs int64 sums of clipped gradients of records, got {values.dtype}; nothing was sent")
        sums = require_shape_of_any_dtype(values, self.sent_ranges(ranges))
        least, most = sums.aminmax()  # not abs(): the absolute value of the smallest int64 overflows
        if least < -_LONGEST_SUM or most > _LONGEST_SUM:
            raise PrivacyError("a sum of gradients exceeds 2^52 lattice points, so it is not exact; nothing was sent (use fewer records)")
        return sums

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        mu = 2 / self.noise_multiplier * ROUNDED_UP  # replacing a record changes a sum by 2 C at most
        author = USERS_CODE if self.users_code else UNKNOWN
        return GaussianRelease(self.name, mu, unit=self.part, rate=self.sample_rate, author=author)

    @property
    def properties(self) -> Properties:
        assumptions = (
            f"the number of a client's {self.part}s is public",
            f"no single {self.part} makes training fail or miss its time: what is sent then shows that it did",
            "random bits are uniform and secret",
        )
        # Only simulations sample records: a node would have to draw its batches from its own secret bits, not from the run's seed.
        return replace(super().properties, source="Abadi et al. 2016", assumptions=assumptions, deployable=self.sample_rate == 1)


class DpSgdSettings(MechanismSettings):
    """Settings of ``dp-sgd``."""

    name: Literal["dp-sgd"] = "dp-sgd"
    perturbed: Literal["gradient"] = "gradient"
    noise_multiplier: Positive = 10.0
    """Standard deviation of a client's own noise, as a multiple of ``clip_norm``. In a round a record has mu = 2 / ``noise_multiplier``."""
    clip_norm: Positive | Literal["auto"] = 0.02
    """Clipping norm of a record's gradient, or of the mean gradient of a person's records. With a small one nearly all gradients are
    shortened to it, so only their directions count, and its exact value matters little. ``auto``, for tables, images and arrays, is about
    the norm of the longest gradient of a usual row, so that the gradients of a rare class are not shortened. With
    ``clipping.target_quantile``, the clipping norm of the first round."""
    records: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Mean number of records per client, or with ``data.person`` of persons. It is public. 0 takes the mean of the simulated clients."""
    sample_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Probability with which each record, or person, takes part in a round (Poisson batches). Only a simulation can use less than 1. With 1
    the noise is least."""

    uses_ranges: ClassVar[bool] = False
    needs_training: ClassVar[bool] = True

    def for_measuring(self, factor: float) -> DpSgdSettings:
        noise_multiplier = min(max(self.noise_multiplier * factor, LEAST_NOISE), MOST_NOISE)
        return self.model_copy(update={"noise_multiplier": noise_multiplier})

    def at_strength(self, strength: float) -> DpSgdSettings:
        return self.model_copy(update={"noise_multiplier": max(1 / strength, LEAST_NOISE)})  # a larger strength means less noise

    @property
    def missing_setting_message(self) -> str:
        if self.records:
            return ""
        problem = "mechanism.records, the mean number of records (or persons) of a client, must be set on Flower, and it is public"
        return f"{problem}: set it in the app's pyproject.toml; with a recipe, add --set mechanism.records=600, for example"

    @property
    def nearly_noise_free(self) -> DpSgdSettings:
        """These settings with the least noise: a thousandth of ``clip_norm`` for each client."""
        return self.model_copy(update={"noise_multiplier": LEAST_NOISE})

    def build(self, facts: Facts) -> DpSgd:
        """Return the mechanism, with a lattice that fits the sum over clients if reports are summed."""
        if self.clip_norm == "auto":
            raise ConfigError("mechanism.clip_norm = 'auto' works only in a run, whose model and data decide it: here give a number")
        records = float(self.records) or facts.records  # the setting is 0 if it was not given
        lattice = Lattice.of(facts, records, self.noise_multiplier)
        clip = RecordClip(self.clip_norm, lattice.steps, facts.adaptive)
        return DpSgd(clip, self.noise_multiplier, facts.summed, lattice.bits, records, self.sample_rate, facts.part)
