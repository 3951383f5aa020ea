"""Encoding by comparison: each bit tells whether a random integer lies below a threshold. A simulation can compile it with the training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ldpfl.mechanisms.base import Mechanism
from ldpfl.mechanisms.coins import Places
from ldpfl.mechanisms.ranges import LayerRanges

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Comparison:
    """How each value becomes a bit: the bit is set if a signed random 32-bit integer lies below a threshold computed from the value.

    A client draws the first 16 bits of all its integers in one call. It draws the other 16 bits only where the first bits equal those of
    the threshold. :func:`~ldpfl.mechanisms.coins.compare_random_words` draws in the same order, so the bits equal those of ``encode``.

    Attributes:
        first_bits: returns the first 16 bits of the thresholds, as whole numbers in float32. It takes values (k, b) of k clients at b
            coordinates, and each tensor in ``arguments`` at the same coordinates. So that it can be compiled, it uses only PyTorch
            functions and no other variable.
        arguments: further arguments of ``first_bits``, one tensor (d,) each.
        exact_thresholds: returns all 32 bits of the thresholds (m,) of values (m,), given the coordinate of each value, (m,).
    """

    first_bits: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]
    exact_thresholds: Callable[[NDArray[np.float32], Places], Places]


class ByComparison(ABC):
    """A mechanism that compares each value with one random integer."""

    @abstractmethod
    def comparison(self, ranges: LayerRanges) -> Comparison | None:
        """Return the comparison, so that a simulation can compile it; None if these ranges are encoded in another way."""


def comparison_of(mechanism: Mechanism, ranges: LayerRanges) -> Comparison | None:
    """Return the comparison that ``mechanism`` encodes by, or None if it encodes in another way.

    A subclass that overrides only ``encode`` inherits a comparison that no longer describes its ``encode``, so the result is None.
    """
    # Of the classes that define ``encode`` or ``comparison``, the most derived one. It has to define ``comparison``.
    last_override = next(cls for cls in type(mechanism).__mro__ if "encode" in vars(cls) or "comparison" in vars(cls))
    return mechanism.comparison(ranges) if "comparison" in vars(last_override) and isinstance(mechanism, ByComparison) else None
