"""A public random rotation: signs by chance, then Hadamard. It spreads every vector evenly over its coordinates."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 1 << 18
"""Values that are rotated at once: 1 MiB, which a cache holds."""

_SHORT = 16
"""Places that are closer than this are brought apart before they are added."""


def rotated_size(dimension: int) -> int:
    """Return the number of coordinates after the rotation: the next power of two."""
    return 1 << max(0, dimension - 1).bit_length()


def rotate(rows: Tensor, key: int) -> Tensor:
    """Return ``rows`` (K, d) float32, padded with zeros and rotated, (K, D). A row's result does not depend on the others."""
    size = rotated_size(rows.shape[1])
    rotated = torch.zeros(rows.shape[0], size)
    rotated[:, : rows.shape[1]] = rows * _signs(size, key)[: rows.shape[1]]
    _transform(rotated)
    return rotated


def rotate_back(vectors: Tensor, dimension: int, key: int) -> Tensor:
    """Return the vectors (..., d) that the rotation takes to ``vectors`` (..., D), in their dtype."""
    size = vectors.shape[-1]
    back = vectors.reshape(-1, size).clone()
    _transform(back)
    return (back[:, :dimension] * _signs(size, key)[:dimension]).reshape(*vectors.shape[:-1], dimension)


def _transform(rows: Tensor) -> None:
    """Multiply ``rows`` (K, D) in place by the Hadamard matrix over sqrt(D), by sums and differences in a fixed order."""
    at_once = max(1, _AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), at_once):
        _transform_block(rows[start : start + at_once])


def _transform_block(rows: Tensor) -> None:
    count, size = rows.shape
    short = min(size, _SHORT)
    # The first steps are about neighbours: beside each other in memory they take four times as long.
    turned = rows.view(count, -1, short).transpose(1, 2).contiguous()
    _add_and_subtract(turned.view(count, size), size // short)
    rows.view(count, -1, short).copy_(turned.transpose(1, 2))
    _add_and_subtract(rows, short)
    rows.mul_(size**-0.5)


def _add_and_subtract(rows: Tensor, half: int) -> None:
    """Put sums and differences in the place of entries of ``rows`` (K, D) that are ``half`` apart, then twice as far, and so on."""
    count, size = rows.shape
    while half < size:
        pairs = rows.view(count, size // (2 * half), 2, half)
        difference = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = difference
        half *= 2


@lru_cache(maxsize=4)
def _signs(size: int, key: int) -> Tensor:
    """Return ``size`` public signs; whoever knows the key, a round's number, draws the same, on any machine."""
    drawn = np.frombuffer(hashlib.shake_256(f"ldpfl rotation {key}".encode()).digest((size + 7) // 8), dtype=np.uint8)
    return torch.from_numpy(1 - 2 * np.unpackbits(drawn, count=size).astype(np.float32))
