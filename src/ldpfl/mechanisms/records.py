"""Gradients of single records, made so short that a sum of them says little about any one: in integers, where a bound is a bound."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from ldpfl.errors import ConfigError

STEPS = 2**20
"""Lattice points to the longest gradient C."""

_INSIDE = 1 - 2.0**-30
"""Gradients are made so much shorter, so that rounding cannot leave one too long."""


@dataclass(frozen=True)
class RecordClip:
    """Shorten each record's gradient to the norm C.

    Attributes:
        norm: C.
        normalised: bring all gradients to the norm C (automatic clipping, Bu et al. 2023), also short ones.

    Raises:
        ConfigError: the norm is not positive and finite.
    """

    norm: float
    normalised: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.norm < inf:
            raise ConfigError(f"records' gradients are clipped to a positive, finite norm, got {self.norm!r}")

    @property
    def step(self) -> float:
        """Distance of two lattice points."""
        return self.norm / STEPS

    def points(self, gradients: Tensor) -> Tensor:
        """Return ``gradients`` (R, d) float32, shortened, as lattice points (R, d), float64 integers: none is longer than 2^20 steps.

        Coordinates are rounded towards 0, so that no norm grows. A gradient with NaN or infinity counts as 0: were its record to
        stop the round, that would tell of it.
        """
        rows = gradients.double()
        norms = torch.linalg.vector_norm(rows, dim=1)  # squares of float32 values do not overflow here
        longest = norms if self.normalised else norms.clamp_min(self.norm)
        usable = norms.isfinite() & (norms > 0)
        if not bool(usable.all()):
            rows[~usable] = 0.0
        rows.mul_(torch.where(usable, STEPS * _INSIDE / longest, 0.0)[:, None]).trunc_()
        # The very numbers that are sent are what the guarantee rests on: integers below 2^20, whose squares add up exactly.
        too_long = torch.linalg.vecdot(rows, rows) > STEPS**2
        if bool(too_long.any()):
            rows[too_long] = 0.0
        return rows
