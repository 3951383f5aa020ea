"""Kullback-Leibler divergence between the layers of two models, whose weights are turned into distributions."""

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

_MAX_DIFFERENCE = 300.0
"""Largest difference of weights for which the fast formula is used: its exponential is far from overflow."""


def layer_divergence(local: Tensor, reference: Tensor, sizes: Sequence[int], normaliser: Normaliser) -> Tensor:
    """Return the KL divergence (K, L), in nats, of each layer of ``local`` (K, d) from that of ``reference`` (d,).

    The weights w of a layer are first turned into a distribution: softmax(w), or with ``l1`` |w| / sum |w|, which is uniform for a layer of
    zeros. The divergence is zero if both distributions are the same, for example if both layers are constant. With ``l1`` it is infinite
    if the reference is 0 at a weight where the local layer is not. It is computed in float64, one block of weights at a time, and never
    below zero. In float32, the divergence of a large layer could be a hundred times too large, or negative. Source: LaDP-FL, equation (8)
    and Algorithm 3. Confidence medium: the paper's normalisation is a guess (softmax), but the direction (local from global) is not.
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
    """Return the KL divergence (K,) of softmax(w), for each row w of ``rows`` (K, n), from q = softmax(g), where g is ``base`` (n,).

    It is E_q[x e^x] / Z - ln Z, with x = w - g less its mean under q, and Z = E_q[e^x]. For small x, the first term is about E_q[x^2] and
    the second half of it, so no digits cancel. The difference of two logarithms of sums would lose all digits for x below 1e-8.
    """
    if base.max() - base.min() > _MAX_DIFFERENCE:
        return _softmax_divergence_by_logarithms(rows, base)
    q = softmax(base)
    x = rows - base
    x -= _expectations(x, q)[:, None]
    overflowing = x.max(axis=1) > _MAX_DIFFERENCE
    x[overflowing] = 0.0  # their divergences are computed by logarithms below
    growth = np.expm1(x)
    z_minus_1 = _expectations(growth, q)
    growth *= x  # x e^x - x, which has the same mean as x e^x because x has the mean 0
    divergence = _expectations(growth, q) / (1 + z_minus_1) - np.log1p(z_minus_1)
    divergence[overflowing] = _softmax_divergence_by_logarithms(rows[overflowing], base)
    return divergence


def _expectations(rows: Floats, probabilities: Floats) -> Floats:
    """Return the mean of each row under ``probabilities``. A matrix product would round a row differently in another block of rows."""
    return np.asarray((rows * probabilities).sum(axis=1))


def _softmax_divergence_by_logarithms(rows: Floats, base: Floats) -> Floats:
    """Return the divergence as :func:`_softmax_divergence` does, for weights of any size; less precise for close distributions."""
    logs = log_softmax(rows, axis=1)
    return np.asarray((np.exp(logs) * (logs - log_softmax(base))).sum(axis=1))


def _l1_divergence(rows: Floats, base: Floats) -> Floats:
    """Return the KL divergence (K,) of ``rows`` (K, n) from ``base`` (n,), both as absolute values over their sum."""
    p, q = _l1_distributions(rows), _l1_distributions(base[None])
    # p - q sums to zero; with it, each term is of second order in the difference of p and q.
    return np.asarray((rel_entr(p, q) - p + q).sum(axis=1))


def _l1_distributions(rows: Floats) -> Floats:
    """Return the absolute values of each row over their sum; the uniform distribution for a row of zeros."""
    magnitudes = np.abs(rows)
    totals = magnitudes.sum(axis=1, keepdims=True)
    magnitudes[totals[:, 0] == 0] = 1.0
    return np.asarray(magnitudes / magnitudes.sum(axis=1, keepdims=True))
