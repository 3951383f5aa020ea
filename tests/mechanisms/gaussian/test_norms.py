"""KL between layers against scipy and 60-digit arithmetic, and norms and clipping by layer."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from ldpfl import PrivacyError
from ldpfl.mechanisms.gaussian.divergence import Normaliser, layer_divergence
from ldpfl.mechanisms.gaussian.norms import BLOCK, clip_layers, clip_rows, layer_norms

NORMALISERS: tuple[Normaliser, ...] = ("softmax", "l1")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distribution(weights: Tensor, normaliser: Normaliser) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = weights.double().numpy()
    return np.asarray(special.softmax(values) if normaliser == "softmax" else np.abs(values) / np.abs(values).sum())


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("step", [0.03, 0.3, 3.0])
def test_kl_equals_scipy(normaliser: Normaliser, step: float) -> None:
    sizes = (1, 2, 17, 400)
    reference = normal(sum(sizes), seed=1)
    local = reference + step * normal(5, sum(sizes), seed=2)
    found = layer_divergence(local, reference, sizes, normaliser)
    assert found.dtype == torch.float64
    assert found.shape == (5, 4)
    for client in range(5):
        for layer, (own, base) in enumerate(
            zip(local[client].split_with_sizes(sizes, dim=-1), reference.split_with_sizes(sizes, dim=-1), strict=True)
        ):
            p, q = distribution(own, normaliser), distribution(base, normaliser)
            assert float(found[client, layer]) == pytest.approx(special.rel_entr(p, q).sum(), rel=1e-9, abs=1e-14)
            assert float(found[client, layer]) == pytest.approx(stats.entropy(p, q), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.1, 2.0])
def test_kl_of_a_small_change_keeps_its_digits(step: float) -> None:
    reference = 0.1 * normal(200, seed=3)
    local = reference + step * normal(1, 200, seed=4)
    with mpmath.workdps(60):
        own, base = [mpmath.mpf(float(x)) for x in local[0]], [mpmath.mpf(float(x)) for x in reference]
        p_sum, q_sum = mpmath.fsum(mpmath.exp(x) for x in own), mpmath.fsum(mpmath.exp(x) for x in base)
        logs = [(x - mpmath.log(p_sum), y - mpmath.log(q_sum)) for x, y in zip(own, base, strict=True)]
        expected = float(mpmath.fsum(mpmath.exp(x) * (x - y) for x, y in logs))
    assert float(layer_divergence(local, reference, (200,), "softmax")) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [50_000, BLOCK + 3])
def test_kl_of_a_small_change_is_half_its_mean_square(size: int) -> None:
    """The relative standard deviation of the mean square is sqrt(2 / size), 0.6 % at most, and the seed is fixed."""
    reference = 0.05 * normal(size, seed=5)
    for step in (1e-4, 1e-2):
        moved = float(layer_divergence(reference + step * normal(1, size, seed=6), reference, (size,), "softmax"))
        assert moved == pytest.approx(step**2 / 2, rel=0.03)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_kl_is_never_negative_and_zero_where_nothing_moved(normaliser: Normaliser) -> None:
    sizes = (3, 1000, 20_000)
    reference = normal(sum(sizes), seed=7)
    for step in (0.0, 1e-8, 1e-7, 1e-6, 1e-4):
        found = layer_divergence(reference + step * normal(4, sum(sizes), seed=8), reference, sizes, normaliser)
        assert bool((found >= 0).all())
        if step == 0:
            assert bool((found < 1e-15).all())


def test_layers_that_are_the_same_distribution() -> None:
    ones = torch.ones(6)
    constants = torch.stack([ones, 5 * ones, 0 * ones])
    for normaliser in NORMALISERS:
        assert layer_divergence(constants, ones, (6,), normaliser).flatten().tolist() == pytest.approx([0, 0, 0], abs=1e-15)
    shifted = normal(6, seed=9)
    assert float(layer_divergence(shifted[None] + 1, shifted, (6,), "softmax")) == pytest.approx(0, abs=1e-12)
    assert float(layer_divergence(shifted[None] * -3, shifted, (6,), "l1")) == pytest.approx(0, abs=1e-12)


def test_what_the_reference_excludes_is_infinitely_far() -> None:
    local = torch.tensor([[1.0, 1.0, 2.0], [0.0, 1.0, 1.0]])
    found = layer_divergence(local, torch.tensor([0.0, 1.0, 1.0]), (3,), "l1")
    assert found[:, 0].tolist() == [math.inf, 0.0]


@pytest.mark.parametrize("scale", [200.0, 700.0, 1e4, 1e30])
def test_weights_far_apart_do_not_overflow(scale: float) -> None:
    reference, local = torch.tensor([0.0, 0.1, 0.2]), torch.tensor([[0.0, scale, 0.0], [-scale, 0.0, 0.1]])
    found = layer_divergence(local, reference, (3,), "softmax")
    q = special.log_softmax(reference.double().numpy())
    assert float(found[0, 0]) == pytest.approx(-q[1], rel=1e-9)  # all of the mass lies on the second
    p = special.log_softmax(local[1].double().numpy())
    assert float(found[1, 0]) == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-9)
    back = layer_divergence(reference[None], local[0], (3,), "softmax")
    assert float(back) == pytest.approx(scale * float(1 - np.exp(q[1])), rel=0.02)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_a_client_does_not_depend_on_who_shares_its_batch(normaliser: Normaliser) -> None:
    sizes = (1, 7, 250, 20_001)
    reference = normal(sum(sizes), seed=10)
    local = reference + 0.01 * normal(29, sum(sizes), seed=11)
    together = layer_divergence(local, reference, sizes, normaliser)
    norms = layer_norms(local, sizes)
    for step in (1, 3, 8):
        parts = [layer_divergence(local[start : start + step].clone(), reference, sizes, normaliser) for start in range(0, 29, step)]
        assert torch.equal(torch.cat(parts), together)
        assert torch.equal(torch.cat([layer_norms(local[start : start + step].clone(), sizes) for start in range(0, 29, step)]), norms)


def test_norms_and_clipping() -> None:
    sizes = (3, 50, 4000)
    rows = normal(4, sum(sizes), seed=12)
    rows[3] *= 1e-6
    norms = layer_norms(rows, sizes)
    assert torch.allclose(
        norms, torch.stack([part.double().norm(dim=1) for part in rows.split_with_sizes(sizes, dim=-1)], dim=1), rtol=1e-13
    )
    limits = torch.tensor([0.1, 2.0, 5.0], dtype=torch.float64)
    clipped = clip_layers(rows, sizes, limits)
    assert bool((layer_norms(clipped, sizes) <= limits).all())
    assert torch.allclose(layer_norms(clipped, sizes)[:3], limits.expand(3, 3), rtol=2e-6)
    assert torch.equal(clipped[3], rows[3]), "what is short enough stays as it is"
    for limit in (1e-6, 0.3, 7.0):
        flat = clip_rows(rows[:3], sizes, limit)
        assert bool((flat.double().norm(dim=1) <= limit).all())
        assert torch.allclose(flat.double().norm(dim=1), torch.full((3,), limit, dtype=torch.float64), rtol=2e-6)
        cosine = (flat.double() * rows[:3].double()).sum(1) / flat.double().norm(dim=1) / rows[:3].double().norm(dim=1)
        assert torch.allclose(cosine, torch.ones_like(cosine), rtol=1e-9)
    assert torch.equal(clip_rows(torch.zeros(2, 5), (5,), 1.0), torch.zeros(2, 5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_stop(bad: float) -> None:
    rows = torch.zeros(2, 5)
    rows[1, 3] = bad
    with pytest.raises(PrivacyError, match="NaN or infinity"):
        layer_norms(rows, (2, 3))
    with pytest.raises(PrivacyError, match="NaN or infinity"):
        clip_rows(rows, (2, 3), 1.0)
