"""Clipping of vectors to a norm, as integers, so that the norm bound holds exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ldpfl.errors import ConfigError
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 2**20
"""Largest number of lattice points per norm C."""

_INSIDE = 1 - 2.0**-30
"""Gradients are clipped to this part of C, so that rounding cannot make one longer than C."""
_SMALLEST, _LARGEST = 1e-20, 1e20
"""Smallest and largest norm C. Norms of float32 gradients outside are not useful."""


@dataclass(frozen=True)
class RecordClip:
    """Clip each record's gradient, or each client's vector, to the norm C.

    Attributes:
        norm: C. With a small C nearly all gradients are clipped, so only their directions count. Gradients of records that the model
            predicts well already stay shorter than C.
        steps: number of lattice points per C, a power of two. Less than :data:`STEPS` if sums of points have to fit 32 bits.

    Raises:
        ConfigError: the norm or the number of steps is out of range.
    """

    norm: float
    steps: int = STEPS

    def __post_init__(self) -> None:
        if not _SMALLEST <= self.norm <= _LARGEST:  # an untrusted server chooses it, and quotients by it have to stay finite
            raise ConfigError(f"the clipping norm must lie between {_SMALLEST:g} and {_LARGEST:g}, got {self.norm!r}")
        if not 1 <= self.steps <= STEPS or self.steps & (self.steps - 1):
            raise ConfigError(f"steps, the lattice points per norm, must be a power of two up to {STEPS}, got {self.steps!r}")

    @property
    def scale(self) -> float:
        """Norm of a clipped gradient in lattice points, slightly less than ``steps``."""
        return self.steps * _INSIDE

    def points(self, gradients: Tensor, watch: Callable[[Tensor], None] | None = None) -> Tensor:
        """Clip ``gradients`` (R, d) and return them as lattice points: (R, d) whole float64 numbers, no row longer than ``steps``.

        Coordinates are rounded towards 0, so that no norm grows. A gradient with NaN or infinity counts as 0. If it stopped the round
        instead, that would reveal its record. ``watch`` receives which gradients were longer than C, (R,) bool. That is private, and for
        simulations only.
        """
        rows = gradients.double()
        norms = torch.linalg.vector_norm(rows, dim=1)  # squares of float32 values do not overflow here
        usable = norms.isfinite()
        if watch is not None:
            watch(norms[usable] > self.norm)
        if not bool(usable.all()):
            rows[~usable] = 0.0
        rows.mul_(torch.where(usable, self.scale / norms.clamp_min(self.norm), 0.0)[:, None]).trunc_()
        # The guarantee needs this bound for the numbers that are sent: integers up to 2^20, whose squares add up exactly.
        short_enough = torch.linalg.vecdot(rows, rows) <= self.steps**2  # False for NaN
        if not bool(short_enough.all()):
            rows[~short_enough] = 0.0
        return rows
