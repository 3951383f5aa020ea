"""Clipping of vectors to a norm, as integers, so that the norm bound holds exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 2**20
"""Largest number of lattice points per norm C."""

_MARGIN_FACTOR = 1 - 2.0**-30
"""Gradients are clipped to this part of C, so that rounding cannot make one longer than C."""
_BIT_LENGTH = 0.25
"""Length of the clipping bit, the coordinate that shows whether a vector was clipped, as a multiple of C. The paper's beta is twice it."""
_SHORTENED = 1 / sqrt(1 + _BIT_LENGTH**2)
"""Factor on a vector and this coordinate, so that both together are not longer than C. The noise in an estimate grows by 3 %."""

_MIN_NORM, _MAX_NORM = 1e-20, 1e20
"""Smallest and largest norm C. Norms of float32 gradients outside are not useful."""


@dataclass(frozen=True)
class RecordClip:
    """Clip each record's gradient, or each client's vector, to the norm C.

    Attributes:
        norm: C. With a small C nearly all gradients are clipped, so only their directions count. Gradients of records that the model
            predicts well already stay shorter than C.
        steps: number of lattice points per C, a power of two. Less than :data:`STEPS` if sums of points have to fit 32 bits.
        adaptive: whether C changes from round to round, so that ``norm`` is that of the first round. Each vector then has one more
            coordinate, :attr:`bit` if it was not longer than C and minus :attr:`bit` if it was. Vector and coordinate together are
            shortened to the length C, so that the same noise protects both in one release.

    Raises:
        ConfigError: the norm or the number of steps is out of range.
    """

    norm: float
    steps: int = STEPS
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not _MIN_NORM <= self.norm <= _MAX_NORM:  # an untrusted server chooses it, and quotients by it have to stay finite
            raise ConfigError(f"the clipping norm must lie between {_MIN_NORM:g} and {_MAX_NORM:g}, got {self.norm!r}")
        if not 1 <= self.steps <= STEPS or self.steps & (self.steps - 1):
            raise ConfigError(f"steps, the lattice points per norm, must be a power of two up to {STEPS}, got {self.steps!r}")

    @property
    def scale(self) -> float:
        """Norm of a clipped gradient in lattice points: slightly less than ``steps``, or 3 % less if the vector has a :attr:`bit`."""
        return self.steps * _MARGIN_FACTOR * self.shortened

    @property
    def shortened(self) -> float:
        """Factor on vectors, with which vector and :attr:`bit` together are not longer than C; 1 without adaptive clipping."""
        return _SHORTENED if self.adaptive else 1.0

    @property
    def bit(self) -> int:
        """Absolute value, in lattice points, of the coordinate that shows if a vector was clipped; 0 without adaptive clipping."""
        return int(self.scale * _BIT_LENGTH) if self.adaptive else 0

    def width(self, dimension: int) -> int:
        """Return the number of coordinates that :meth:`points` returns for a vector of ``dimension`` numbers: one more if adaptive."""
        return dimension + int(self.adaptive)

    def in_round(self, ranges: LayerRanges) -> RecordClip:
        """Return the clipping of the round with these public ``ranges``. Their radius is C if it is adaptive.

        Raises:
            ConfigError: the norm is out of range.
        """
        return replace(self, norm=float(ranges.radii[0])) if self.adaptive else self

    def points(self, gradients: Tensor, watch: Callable[[Tensor], None] | None = None) -> Tensor:
        """Clip ``gradients`` (R, d) and return them as lattice points: (R, d) whole float64 numbers, no row longer than ``steps``.

        With ``adaptive``, rows have d + 1 numbers, of which :attr:`bit` is the last.

        Coordinates are rounded towards 0, so that no norm grows. A gradient with NaN or infinity counts as 0. If it stopped the round
        instead, that would reveal its record. ``watch`` is called with a mask (R,) of the gradients that were longer than C. The mask is
        private, and for simulations only.
        """
        rows = gradients.double()
        norms = torch.linalg.vector_norm(rows, dim=1)  # squares of float32 values do not overflow here
        usable = norms.isfinite()
        if watch is not None:
            watch(norms[usable] > self.norm)
        if not bool(usable.all()):
            rows[~usable] = 0.0  # a factor of 0 would not do: NaN and infinity times 0 are NaN
        # ``scale`` is the norm C in lattice points, slightly shortened against rounding.
        rows.mul_(torch.where(usable, self.scale / norms.clamp_min(self.norm), 0.0)[:, None]).trunc_()
        if self.adaptive:
            bits = torch.where(norms <= self.norm, self.bit, -self.bit).where(usable, 0)
            rows = torch.cat([rows, bits[:, None].double()], dim=1)
        # The guarantee needs this bound for the numbers that are sent: integers up to 2^20, whose squares add up exactly.
        short_enough = torch.linalg.vecdot(rows, rows) <= self.steps**2  # False for NaN
        if not bool(short_enough.all()):
            rows[~short_enough] = 0.0
        return rows
