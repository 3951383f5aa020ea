"""Vectors made so short that a sum of them says little about any one: in integers, where a bound is a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ldpfl.errors import ConfigError
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 2**20
"""Most lattice points to the norm C."""

_INSIDE = 1 - 2.0**-30
"""Gradients are made so much shorter, so that rounding cannot leave one too long."""
_SMALLEST, _LARGEST = 1e-20, 1e20
"""Norms of float32 gradients that are worth telling apart."""


@dataclass(frozen=True)
class RecordClip:
    """Shorten each record's gradient, or each client's vector, to the norm C.

    Attributes:
        norm: C. A small one, which most gradients exceed, makes directions of them; those of records that are learnt stay short, and
            with them what rounding left of them.
        steps: lattice points to the norm, a power of two; fewer than :data:`STEPS` where sums of points have to fit 32 bits.

    Raises:
        ConfigError: the norm or the number of steps is out of range.
    """

    norm: float
    steps: int = STEPS

    def __post_init__(self) -> None:
        if not _SMALLEST <= self.norm <= _LARGEST:  # a server chooses it, and what it divides has to stay finite
            raise ConfigError(f"records' gradients are clipped to a norm between {_SMALLEST:g} and {_LARGEST:g}, got {self.norm!r}")
        if not 1 <= self.steps <= STEPS or self.steps & (self.steps - 1):
            raise ConfigError(f"a norm has a power of two of lattice points, at most {STEPS}; got {self.steps!r}")

    @property
    def scale(self) -> float:
        """Lattice points to the norm C of a gradient that is shortened to it, a little fewer than ``steps``."""
        return self.steps * _INSIDE

    def points(self, gradients: Tensor, watch: Callable[[Tensor], None] | None = None) -> Tensor:
        """Return ``gradients`` (R, d), shortened, as lattice points, ``steps`` to C: (R, d) float64 integers, no row longer than ``steps``.

        Coordinates are rounded towards 0, so that no norm grows. A gradient with NaN or infinity counts as 0: were its record to
        stop the round, that would tell of it. ``watch`` is told which gradients were too long (R,): that is private, and for simulations.
        """
        rows = gradients.double()
        norms = torch.linalg.vector_norm(rows, dim=1)  # squares of float32 values do not overflow here
        usable = norms.isfinite()
        if watch is not None:
            watch(norms[usable] > self.norm)
        if not bool(usable.all()):
            rows[~usable] = 0.0
        rows.mul_(torch.where(usable, self.scale / norms.clamp_min(self.norm), 0.0)[:, None]).trunc_()
        # The very numbers that are sent are what the guarantee rests on: integers up to 2^20, whose squares add up exactly.
        short_enough = torch.linalg.vecdot(rows, rows) <= self.steps**2  # not so for NaN
        if not bool(short_enough.all()):
            rows[~short_enough] = 0.0
        return rows
