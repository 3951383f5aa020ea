"""Bits by comparison, in a form that a simulation compiles together with the training before it."""

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
    """How each value becomes a bit: whether a random integer of 32 bits, signed, lies below a threshold that follows from the value.

    A client draws the first 16 bits of all its integers in one call, and the other 16 bits where the first ones are those of the threshold:
    so does :func:`~ldpfl.mechanisms.coins.words_below`, and so the bits are those of ``encode``.

    Attributes:
        first: returns the first 16 bits of the thresholds of values (k, b), as whole numbers in float32, from the values and from some
            coordinates of each of ``told``. It consists of PyTorch's functions alone and reads no other variable.
        told: what ``first`` is told of each coordinate, tensors (d,).
        exact: returns the thresholds (m,) of values (m,) at some coordinates (m,).
    """

    first: Callable[..., Tensor]
    told: tuple[Tensor, ...]
    exact: Callable[[NDArray[np.float32], Places], Places]


class ByComparison(ABC):
    """A mechanism that compares each value with one random integer."""

    @abstractmethod
    def comparison(self, ranges: LayerRanges) -> Comparison | None:
        """Return how, so that a simulation can compile it; None where another encoding is used for these ranges."""


def comparison_of(mechanism: Mechanism, ranges: LayerRanges) -> Comparison | None:
    """Return the comparison by which ``mechanism`` encodes, or None: also for a subclass that encodes in a way of its own."""
    nearest = next(kind for kind in type(mechanism).__mro__ if "encode" in vars(kind) or "comparison" in vars(kind))
    return mechanism.comparison(ranges) if "comparison" in vars(nearest) and isinstance(mechanism, ByComparison) else None
