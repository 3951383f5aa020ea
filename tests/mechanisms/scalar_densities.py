"""Densities of the laws that randomise one number, from the papers' formulas: without lattices."""

from __future__ import annotations

from math import exp, expm1

import torch
from torch import Tensor

from ldpfl.mechanisms.scalar_noise import HybridLaw, LaplaceLaw, PiecewiseLaw, ScalarLaw


def density(law: ScalarLaw, x: Tensor, t: float) -> Tensor:
    """Return the density at ``x`` of t*, the randomised value of ``t``: of its continuous part, without atoms."""
    if isinstance(law, LaplaceLaw):
        return torch.exp((x - t).abs() * (-law.epsilon / 2)) * (law.epsilon / 4)  # Laplace noise of scale 2 / epsilon around t
    if isinstance(law, HybridLaw):
        return density(PiecewiseLaw(law.epsilon), x, t) * law.piecewise_share  # the bit has no density
    # Piecewise: one constant where |x (1 - q) - t| <= q = e^(-epsilon / 2), e^-epsilon times it elsewhere.
    q, one_minus_q = exp(-law.epsilon / 2), -expm1(-law.epsilon / 2)
    inside = one_minus_q / (2 * (1 + q)) / q
    values = torch.where((x * one_minus_q - t).abs() <= q, torch.full_like(x, inside), torch.full_like(x, inside * q**2))
    return values * (x.abs() <= law.bound)


def plus_probability(law: HybridLaw, t: Tensor) -> Tensor:
    """Return the probability that the one bit about ``t``, if it is sent, is +: then its mean is t."""
    return t / (2 * law.gain) + 0.5
