"""Norms of rows and layers, and clipping whose norm bound still holds after rounding to float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ldpfl.mechanisms.base import require_finite_block

BLOCK = 1 << 18
"""Number of weights that are converted to float64 at once (one layer of one client, if that is larger)."""

_MARGIN_FACTOR = 1 - 2.0**-20
"""Vectors are clipped to this part of the norm, so that rounding to float32 cannot make them too long."""


def layer_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the slice of each layer in the flat vector of all weights."""
    stops = list(accumulate(sizes))
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def blocks(rows: int, size: int) -> Iterator[slice]:
    """Yield slices of consecutive rows that have about ``BLOCK`` weights together, for ``rows`` rows of ``size`` weights each."""
    rows_per_block = max(1, BLOCK // size)
    for start in range(0, rows, rows_per_block):
        yield slice(start, min(start + rows_per_block, rows))


def layer_norms(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the L2 norms (K, L) of the layers of ``rows`` (K, d), in float64.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    norms = torch.empty(rows.shape[0], len(sizes), dtype=torch.float64)
    for layer, part in enumerate(layer_slices(sizes)):
        for block in blocks(rows.shape[0], sizes[layer]):
            values = rows[block, part].double()
            # NumPy always adds up a row in the same order; PyTorch's order depends on the number of rows.
            norms[block, layer] = torch.from_numpy(values.mul_(values).numpy().sum(axis=1)).sqrt()
    return require_finite_block(norms)  # squares of float32 values do not overflow here


def row_norms(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the L2 norms (K,) of whole ``rows`` (K, d), in float64, computed layer by layer.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    return layer_norms(rows, sizes).square().sum(dim=1).sqrt()


def clip_rows(rows: Tensor, sizes: Sequence[int], limit: float) -> Tensor:
    """Shorten each of ``rows`` (K, d) whose L2 norm exceeds ``limit`` to that norm. No returned float32 row is longer, despite rounding.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    factors = _shortening_factors(row_norms(rows, sizes), limit)
    clipped = torch.empty_like(rows)
    for block in blocks(*rows.shape):
        clipped[block] = _scaled_rows(rows[block], factors[block])
    return clipped


def clip_layers(rows: Tensor, sizes: Sequence[int], limits: Tensor) -> Tensor:
    """Shorten each layer of ``rows`` (K, d) whose L2 norm exceeds its limit in ``limits`` (L,) to that norm.

    No layer of the returned float32 rows is longer than its limit, despite rounding.

    Raises:
        PrivacyError: a value is NaN or infinite.
    """
    factors = _shortening_factors(layer_norms(rows, sizes), limits)
    clipped = torch.empty_like(rows)
    for layer, part in enumerate(layer_slices(sizes)):
        for block in blocks(len(rows), sizes[layer]):
            clipped[block, part] = _scaled_rows(rows[block, part], factors[block, layer])
    return clipped


def _scaled_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor in float64, where tiny factors keep their digits, and return float32. Factor 1 changes nothing."""
    return rows.double().mul_(factors.unsqueeze(1)).float()


def _shortening_factors(norms: Tensor, limits: float | Tensor) -> Tensor:
    """Return the factors that shorten vectors with ``norms`` to slightly below ``limits``; 1 for those that are short enough."""
    return (limits * _MARGIN_FACTOR / norms).clamp_(max=1.0)  # for a zero vector the quotient is infinite, so the factor is 1
