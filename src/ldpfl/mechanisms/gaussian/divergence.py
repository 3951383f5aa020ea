"""Kullback-Leibler divergence between the layers of two models, read as distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor

from ldpfl.mechanisms.gaussian.norms import blocks, layer_slices

Normaliser = Literal["softmax", "l1"]
"""How weights become a distribution: ``softmax``, or ``l1``: absolute values over their sum."""

Floats = NDArray[np.float64]

_WIDE = 300.0
"""Differences of weights beyond it could overflow once they are exponents."""


def layer_divergence(local: Tensor, reference: Tensor, sizes: Sequence[int], normaliser: Normaliser) -> Tensor:
    """Return the KL divergence (K, L), in nats, of each layer of ``local`` (K, d) from that of ``reference`` (d,).

    All in float64 and never below zero, where float32 would be wrong by a hundred times and possibly negative for a large
    layer. Zero for layers that stand for the same distribution, such as two constant ones; infinite where the reference
    excludes what the local layer has (``l1`` only). A layer of zeros stands for the uniform distribution. No more than
    one block of weights is held in float64. Source: LaDP-FL, equation (8) and Algorithm 3; confidence medium: that the
    normaliser is a softmax is a guess, the direction (local from global) is not.
    """
    values = torch.empty(local.shape[0], len(sizes), dtype=torch.float64)
    divergence = _softmax_divergence if normaliser == "softmax" else _l1_divergence
    for layer, part in enumerate(layer_slices(sizes)):
        base = reference[part].double().cpu().numpy()
        for block in blocks(local.shape[0], sizes[layer]):
            rows = local[block, part].double().cpu().numpy()
            values[block, layer] = torch.from_numpy(np.maximum(divergence(rows, base), 0.0))
    return values


def _softmax_divergence(rows: Floats, base: Floats) -> Floats:
    """KL of softmax(w) from q = softmax(g): E_q[x e^x] / Z - ln Z with x = w - g less its mean under q, Z = E_q[e^x].

    Both terms are about the mean of x^2 there, one whole and one half, so that no digit is lost however small x is; the
    difference of two logarithms of sums would lose all of them below 1e-8.
    """
    if base.max() - base.min() > _WIDE:
        return _wide_softmax_divergence(rows, base)
    weights = softmax(base)
    x = rows - base
    x -= _means(x, weights)[:, None]
    wide = x.max(axis=1) > _WIDE
    x[wide] = 0.0
    growth = np.expm1(x)
    excess = _means(growth, weights)  # Z - 1
    growth *= x
    divergence = _means(growth, weights) / (1 + excess) - np.log1p(excess)
    divergence[wide] = _wide_softmax_divergence(rows[wide], base)
    return divergence


def _means(rows: Floats, weights: Floats) -> Floats:
    """Sums of whole rows: products of matrices, and einsum, round a client's row according to who shares its block."""
    return np.asarray((rows * weights).sum(axis=1))


def _wide_softmax_divergence(rows: Floats, base: Floats) -> Floats:
    logs = log_softmax(rows, axis=1)
    return np.asarray((np.exp(logs) * (logs - log_softmax(base))).sum(axis=1))


def _l1_divergence(rows: Floats, base: Floats) -> Floats:
    p, q = _shares(rows), _shares(base[None])
    # p - q sums to zero; with it, each term is of second order in the difference of p and q.
    return np.asarray((rel_entr(p, q) - p + q).sum(axis=1))


def _shares(rows: Floats) -> Floats:
    sizes = np.abs(rows)
    totals = sizes.sum(axis=1, keepdims=True)
    sizes[totals[:, 0] == 0] = 1.0
    return np.asarray(sizes / sizes.sum(axis=1, keepdims=True))
