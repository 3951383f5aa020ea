"""The non-private reference: values leave as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ldpfl.mechanisms.base import Mechanism, require_finite, total_clients
from ldpfl.mechanisms.noise import ConstantNoise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.dense import DenseReports, mean_of_rows
from ldpfl.mechanisms.reports.units import FLOAT_BITS, Units
from ldpfl.mechanisms.settings import Facts, MechanismSettings
from ldpfl.privacy import UnprotectedRelease
from ldpfl.util.lazy_imports import torch
from ldpfl.util.randomness import RandomSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Identity(Mechanism):
    """Send float32 values that are not randomised: federated averaging.

    Guarantee: none, epsilon is infinite. It exists to measure what privacy costs.

    Attributes:
        clamp: whether values are clamped to their ranges, to measure the cost of clamping apart from that of noise.
    """

    clamp: bool = False
    name: ClassVar[str] = "none"

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> DenseReports:
        values = require_finite(values, ranges)
        return DenseReports(ranges.clamp(values).float() if self.clamp else values.clone())  # a copy: values may change

    def decode(self, reports: DenseReports, ranges: LayerRanges) -> Tensor:
        total_clients([reports], ranges, DenseReports)  # raises if the reports do not fit
        return reports.values.clone()

    def read(self, payloads: Sequence[bytes], ranges: LayerRanges) -> DenseReports:
        return DenseReports.from_payloads(payloads, ranges.dimension)

    def aggregate(self, reports: Sequence[DenseReports], ranges: LayerRanges) -> Tensor:
        return mean_of_rows(reports, total_clients(reports, ranges, DenseReports)).float()

    def noise(self, ranges: LayerRanges) -> ConstantNoise:
        return ConstantNoise(ranges, 0.0)

    @property
    def properties(self) -> Properties:
        return Properties(adds_up=True)

    def units(self, ranges: LayerRanges) -> Units:
        return Units.whole(ranges.dimension, FLOAT_BITS * ranges.dimension)

    def release(self, ranges: LayerRanges) -> UnprotectedRelease:
        return UnprotectedRelease(self.name, "values leave as they are", ranges.dimension, "weight")


class IdentitySettings(MechanismSettings):
    """Settings of ``none``."""

    name: Literal["none"] = "none"
    clamp: bool = False
    """Whether values are clamped to their ranges, as by mechanisms with noise. A run then shows what clamping alone costs."""

    protects: ClassVar[bool] = False

    def build(self, facts: Facts) -> Identity:
        return Identity(self.clamp)
