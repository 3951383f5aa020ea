"""DP-FedAvg with noise at the client: each client's vector is clipped and noised, which protects all data that the client holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ldpfl.mechanisms.base import require_finite
from ldpfl.mechanisms.lattice import LEAST_NOISE, ROUNDED_UP, Lattice, LatticeMechanism
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.settings import Facts, MechanismSettings
from ldpfl.privacy import GaussianRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.quantities import Positive
from ldpfl.util.randomness import client_blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DpFedAvg(LatticeMechanism):
    """Clip each client's update or gradient to the norm C, and add Gaussian noise of standard deviation s C.

    Guarantee: mu-GDP with mu = 2 / s for **everything that a client holds**, replaced by any other data, in the report of one round. It
    protects against everybody, because the client itself adds the noise. If a server learns only the sum over n clients, mu is
    2 / (s sqrt(n)). T rounds have mu sqrt(T). The guarantee holds for the exact bits that are sent: clipped vectors are points of a
    lattice, whose norms are checked as integers, and the noise is real noise rounded to that lattice.

    ``values`` are float32, offset by the ranges' center, which is 0 for updates and gradients. A report estimates the clipped vector
    itself, and not the vector in units of C as with ``dp-sgd``.

    Source: McMahan et al. 2018, where a trusted server adds the noise; here each client adds its share.

    Attributes:
        clip: clipping of clients' vectors.
        noise_multiplier: s, for one client's noise.
        summed, bits: as in :class:`LatticeMechanism`.
    """

    name: ClassVar[str] = "dp-fedavg"

    @property
    def properties(self) -> Properties:
        return replace(super().properties, source="McMahan et al. 2018")

    @property
    def _report_divisor(self) -> float:
        """1 / C: dividing a vector in units of C by it gives the vector itself."""
        return 1 / self.clip.norm

    def _norm_ratio(self, ranges: LayerRanges) -> float:
        """Return the round's norm C over that of the first round, for adaptive clipping."""
        return self.clip.in_round(ranges).norm / self.clip.norm

    def _clipped_points(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Clip each client's vector, less the center of ``ranges``, to the round's norm C. Return it as lattice points, (K, d) int64.

        With adaptive clipping there is one more coordinate, (K, d + 1), which shows whether the vector was longer than C.
        """
        vectors, center = require_finite(values, ranges), ranges.expand()[0].double()
        clip = self.clip.in_round(ranges)
        points = torch.empty(len(vectors), clip.width(ranges.dimension), dtype=torch.int64)
        for rows in client_blocks(*vectors.shape):
            block = slice(rows.start, rows.stop)
            points[block] = clip.points(vectors[block].double() - center).to(torch.int64)
        return points

    def release(self, ranges: LayerRanges) -> GaussianRelease:
        mu = 2 / self.noise_multiplier * ROUNDED_UP  # two clipped vectors are at most 2 C apart
        return GaussianRelease(self.name, mu, alike=True, integers=self.summed)


class DpFedAvgSettings(MechanismSettings):
    """Settings of ``dp-fedavg``."""

    name: Literal["dp-fedavg"] = "dp-fedavg"
    perturbed: Literal["update", "gradient"] = "update"
    noise_multiplier: Positive = 4.0
    """Standard deviation of a client's own noise, as a multiple of ``clip_norm``. In one round, mu of a client is 2 / ``noise_multiplier``.
    If only a sum over n clients is seen, mu is divided by sqrt(n)."""
    clip_norm: Positive = 1.0
    """Clipping norm: a client's update or gradient that is longer is shortened to it. With ``clipping.target_quantile``, the clipping
    norm of the first round."""

    uses_ranges: ClassVar[bool] = False

    def at_strength(self, strength: float) -> DpFedAvgSettings:
        return self.model_copy(update={"noise_multiplier": max(1 / strength, LEAST_NOISE)})  # a larger strength means less noise

    @property
    def nearly_noise_free(self) -> DpFedAvgSettings:
        """These settings with the least noise: a thousandth of ``clip_norm`` for each client."""
        return self.model_copy(update={"noise_multiplier": LEAST_NOISE})

    def build(self, facts: Facts) -> DpFedAvg:
        lattice = Lattice.of(facts, parts=1.0, noise_multiplier=self.noise_multiplier)  # a client sends one vector
        return DpFedAvg(RecordClip(self.clip_norm, lattice.steps, facts.adaptive), self.noise_multiplier, facts.summed, lattice.bits)
