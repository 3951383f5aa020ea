"""Pictures of dead leaves: random shapes that lie over each other, larger and smaller ones, as if they had fallen.

They have of real pictures what needs no camera: edges at all scales, things in front of others, shading, a light of one colour; and
nobody's data. The model is Matheron's (1968); with sizes by a power law its statistics are near those of natural pictures (Lee, Mumford and
Huang 2001), and networks that only saw such pictures see (Baradad et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F

SIDE = 32

_LEAVES = 90
_SMALLEST, _LARGEST = 0.09, 1.4
"""Sizes of leaves, where a picture's side is 2; their density falls with the third power of the size."""

_FINER = 2
"""Pictures are drawn so many times as large and then averaged, as a lens does."""


@dataclass(frozen=True)
class _Leaves:
    """Of each picture (N,) its leaves (L,), those that lie lowest first: sizes, places, turns, shapes, colours, shading, stripes."""

    size: Tensor
    place: Tensor
    turn: Tensor
    stretch: Tensor
    shape: Tensor
    colour: Tensor
    shading: Tensor
    stripe: Tensor
    frequency: Tensor
    slant: Tensor


def drawn(generator: torch.Generator, count: int) -> Tensor:
    """Draw ``count`` pictures: (count, 3, 32, 32) uint8."""
    leaves = _scattered(generator, count)
    along = (torch.arange(_FINER * SIDE) + 0.5) / (_FINER * SIDE) * 2 - 1
    y, x = torch.meshgrid(along, along, indexing="ij")
    pictures = torch.full((count, 3, _FINER * SIDE, _FINER * SIDE), 0.5)
    for number in range(_LEAVES):
        pictures = _laid(pictures, leaves, number, x, y)
    pictures = F.avg_pool2d(pictures, _FINER)
    grain = 0.015 * torch.randn(pictures.shape, generator=generator)
    return ((pictures + grain).clamp(0, 1) * 255).round().to(torch.uint8)


def _scattered(generator: torch.Generator, count: int) -> _Leaves:
    def uniform(*more: int) -> Tensor:
        return torch.rand(count, _LEAVES, *more, generator=generator)

    def normal(*more: int) -> Tensor:
        return torch.randn(count, _LEAVES, *more, generator=generator)

    sizes = (_SMALLEST**-2 + uniform() * (_LARGEST**-2 - _SMALLEST**-2)) ** -0.5
    # Large ones fall first, by and large: else they would cover nearly all others.
    falls = (torch.arange(_LEAVES) + 0.6 * _LEAVES * uniform()).argsort(dim=1)
    light = 0.12 * torch.randn(count, 1, 3, generator=generator)
    return _Leaves(
        size=sizes.sort(dim=1, descending=True).values.gather(1, falls),
        place=uniform(2) * 2.8 - 1.4,
        turn=uniform() * 2 * pi,
        stretch=torch.exp(0.5 * normal()),
        shape=torch.randint(0, 3, (count, _LEAVES), generator=generator),
        colour=0.05 + 0.9 * uniform(1) + 0.1 * normal(3) + light,
        shading=0.25 * normal(2),
        stripe=(uniform() < 0.35) * 0.12 * normal().abs(),
        frequency=torch.exp(2 * uniform() + 1.6),
        slant=uniform() * 2 * pi,
    )


def _laid(pictures: Tensor, leaves: _Leaves, number: int, x: Tensor, y: Tensor) -> Tensor:
    """Return ``pictures`` with the leaf ``number`` of each over them: an ellipse, a rectangle or a triangle."""

    def own(values: Tensor) -> Tensor:
        return values[:, number, None, None]

    right, down = x - own(leaves.place[..., 0]), y - own(leaves.place[..., 1])
    cosine, sine, size, stretch = own(leaves.turn).cos(), own(leaves.turn).sin(), own(leaves.size), own(leaves.stretch).sqrt()
    a, b = (right * cosine + down * sine) / stretch, (down * cosine - right * sine) * stretch
    ellipse, rectangle = (a**2 + b**2).sqrt(), 1.1 * torch.maximum(a.abs(), b.abs())
    triangle = 1.4 * torch.maximum(b, 0.87 * a.abs() - 0.5 * b)
    shape = own(leaves.shape)
    inside = torch.where(shape == 0, ellipse, torch.where(shape == 1, rectangle, triangle)) < size
    shade = (own(leaves.shading[..., 0]) * a + own(leaves.shading[..., 1]) * b) / size
    wave = 2 * own(leaves.frequency) * (right * own(leaves.slant).cos() + down * own(leaves.slant).sin())
    painted = leaves.colour[:, number, :, None, None] + (shade + own(leaves.stripe) * torch.sin(wave))[:, None]
    return torch.where(inside[:, None], painted, pictures)
