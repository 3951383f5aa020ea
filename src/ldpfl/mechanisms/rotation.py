"""A public random rotation: random signs, then a Hadamard transform. It spreads a vector evenly over its coordinates."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor

_VALUES_PER_BLOCK = 1 << 18
"""Number of values that are rotated at once: 1 MiB, which fits a cache."""

_NEAR_DISTANCE = 16
"""Entries closer than this are moved apart in memory before they are added, which is four times as fast."""


def rotated_size(dimension: int) -> int:
    """Return the number of coordinates after the rotation: the next power of two."""
    return 1 << max(0, dimension - 1).bit_length()


def rotate(rows: Tensor, key: int) -> Tensor:
    """Return ``rows`` (K, d) float32, padded with zeros, and rotated as ``key`` says, (K, D). Rows do not depend on one another."""
    size = rotated_size(rows.shape[1])
    rotated = torch.zeros(rows.shape[0], size)
    rotated[:, : rows.shape[1]] = rows * _signs(size, key)[: rows.shape[1]]
    _transform(rotated)
    return rotated


def rotate_back(vectors: Tensor, dimension: int, key: int) -> Tensor:
    """Undo :func:`rotate`: return the vectors (..., d) that were rotated to ``vectors`` (..., D). d is ``dimension``; the dtype is kept."""
    size = vectors.shape[-1]
    back = vectors.reshape(-1, size).clone()
    _transform(back)  # the inverse too: the Hadamard matrix over sqrt(D) is its own inverse
    return (back[:, :dimension] * _signs(size, key)[:dimension]).reshape(*vectors.shape[:-1], dimension)


def _transform(rows: Tensor) -> None:
    """Multiply ``rows`` (K, D) in place by the Hadamard matrix over sqrt(D), a few rows at a time."""
    rows_per_block = max(1, _VALUES_PER_BLOCK // rows.shape[1])
    for start in range(0, len(rows), rows_per_block):
        _transform_block(rows[start : start + rows_per_block])


def _transform_block(rows: Tensor) -> None:
    """Multiply ``rows`` (k, D), few enough for a cache, in place by the Hadamard matrix over sqrt(D), by sums and differences."""
    count, size = rows.shape
    near = min(size, _NEAR_DISTANCE)
    # The first steps add entries closer than ``near``. In the transposed copy these are size // near or more apart.
    transposed = rows.view(count, -1, near).transpose(1, 2).contiguous()
    _add_and_subtract(transposed.view(count, size), size // near)
    rows.view(count, -1, near).copy_(transposed.transpose(1, 2))
    _add_and_subtract(rows, near)
    rows.mul_(size**-0.5)


def _add_and_subtract(rows: Tensor, distance: int) -> None:
    """Replace each two entries of ``rows`` (K, D) at this ``distance`` by their sum and difference, then at twice it, and so on."""
    count, size = rows.shape
    while distance < size:
        pairs = rows.view(count, size // (2 * distance), 2, distance)
        difference = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = difference
        distance *= 2


@lru_cache(maxsize=4)
def _signs(size: int, key: int) -> Tensor:
    """Return ``size`` public random signs, 1 or -1. They depend only on ``key``, a round's number, and are the same on any machine."""
    packed_bits = np.frombuffer(hashlib.shake_256(f"ldpfl rotation {key}".encode()).digest((size + 7) // 8), dtype=np.uint8)
    return torch.from_numpy(1 - 2 * np.unpackbits(packed_bits, count=size).astype(np.float32))
