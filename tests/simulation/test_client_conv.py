"""Patch convolutions compute what PyTorch computes, wherever they apply."""

from __future__ import annotations

from typing import Any

import torch
from torch.func import vmap
from torch.nn import functional as F

from grids import each
from ldpfl.simulation.local_training import ManyAtOnce


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@each("channels", [1, 3, 4, 5])
@each(
    "options",
    [
        {},
        {"stride": 2},
        {"stride": (1, 3), "padding": (2, 0)},
        {"padding": "same"},
        {"padding": 2, "dilation": 2},
    ],
)
@each("with_bias", [True, False])
def test_patches_give_the_convolution_of_each_client(channels: int, options: dict[str, Any], with_bias: bool) -> None:
    generator = seeded()
    images = torch.randn(3, 2, channels, 9, 8, generator=generator)
    weight = torch.randn(3, 6, channels, 3, 5, generator=generator)
    bias = torch.randn(3, 6, generator=generator)

    def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # A model may rely on the result being contiguous, as PyTorch's own is.
        return F.conv2d(x, w, b if with_bias else None, **options).view(2, -1)

    with ManyAtOnce():
        patched = vmap(convolve)(images, weight, bias)
    expected = torch.stack([convolve(*client) for client in zip(images, weight, bias, strict=True)])
    torch.testing.assert_close(patched, expected, rtol=1e-4, atol=1e-4)


def test_strides_and_paddings_of_one_number_are_read_as_pytorch_reads_them() -> None:
    images, weight = torch.randn(2, 1, 7, 7, generator=seeded()), torch.randn(3, 1, 3, 3, generator=seeded())
    with ManyAtOnce():
        patched = F.conv2d(images, weight, stride=(2,), padding=(1,))
    torch.testing.assert_close(patched, F.conv2d(images, weight, stride=2, padding=1), rtol=1e-4, atol=1e-5)


def test_grouped_convolutions_are_left_alone() -> None:
    images, weight = torch.randn(2, 4, 6, 6, generator=seeded()), torch.randn(4, 1, 3, 3, generator=seeded())
    with ManyAtOnce():
        assert torch.equal(F.conv2d(images, weight, groups=4), torch.conv2d(images, weight, groups=4))
        assert F.conv2d(images, weight, groups=4).shape == (2, 4, 4, 4)
