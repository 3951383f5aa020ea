"""A public random rotation: signs by chance, then Hadamard. It spreads every vector evenly over its coordinates."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ldpfl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 1 << 16
"""Values that are rotated at once: 256 KiB, which a cache holds twice."""

_SHORT = 64
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
    size = rows.shape[1]
    part = min(size, _AT_ONCE)
    at_once = _AT_ONCE // part
    pieces = rows.view(-1, part)  # entries that are closer than a piece is long are added first, piece by piece
    for start in range(0, len(pieces), at_once):
        _transform_block(pieces[start : start + at_once])
    if part < size:
        for row in rows:
            row.copy_(_add_and_subtract(row[None], part)[0])
    rows.mul_(size**-0.5)


def _transform_block(rows: Tensor) -> None:
    """Multiply ``rows`` (K, D) in place by the Hadamard matrix."""
    count, size = rows.shape
    short = min(size, _SHORT)
    # The first steps are about neighbours: beside each other in memory they take four times as long.
    turned = rows.view(count, -1, short).transpose(1, 2).contiguous()
    turned = _add_and_subtract(turned.view(count, size), size // short)
    rows.view(count, -1, short).copy_(turned.view(count, short, -1).transpose(1, 2))
    rows.copy_(_add_and_subtract(rows, short))


def _add_and_subtract(rows: Tensor, half: int) -> Tensor:
    """Return ``rows`` (K, D) with sums and differences of entries that are ``half`` apart, then twice as far, and so on.

    ``rows`` are overwritten.
    """
    count, size = rows.shape
    other = torch.empty_like(rows)
    while half < size:
        pairs, found = (part.view(count, size // (2 * half), 2, half) for part in (rows, other))
        torch.add(pairs[:, :, 0], pairs[:, :, 1], out=found[:, :, 0])
        torch.sub(pairs[:, :, 0], pairs[:, :, 1], out=found[:, :, 1])
        rows, other, half = other, rows, 2 * half
    return rows


@lru_cache(maxsize=4)
def _signs(size: int, key: int) -> Tensor:
    """Return ``size`` public signs; whoever knows the key, a round's number, draws the same, on any machine."""
    drawn = np.frombuffer(hashlib.shake_256(f"ldpfl rotation {key}".encode()).digest((size + 7) // 8), dtype=np.uint8)
    return torch.from_numpy(1 - 2 * np.unpackbits(drawn, count=size).astype(np.float32))
