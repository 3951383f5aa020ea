"""Wavelet scattering of images: features that were learnt from nothing, so that no data are behind them.

An image is convolved with Morlet wavelets of two scales and eight directions, the moduli again with those of the coarser scale, and
each result is averaged over neighbourhoods of 4 x 4 pixels: 81 maps a channel.

Source: Bruna and Mallat 2013; filters, padding and their constants as in Andreux et al. 2020 (Kymatio), which
``tests/data/features/test_features.py`` compares with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sin

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ldpfl.data.features.base import FeatureMap, group_normalised, unit
from ldpfl.errors import ConfigError

_DIRECTIONS = 8
_GROUPS = 27
_STRIDE = 4
"""2^J for J = 2 scales: over so many pixels each way is averaged."""

MAPS = 1 + 2 * _DIRECTIONS + _DIRECTIONS**2
"""Maps of each channel: the average, the moduli of both scales, and those of the finer one seen through the coarser."""


@dataclass(frozen=True)
class ScatteringFeatures(FeatureMap):
    """Images (N, C, H, W) uint8 to their scattering, normalised in groups of maps and to length 1: (N, 81 C H W / 16) float32.

    Source: Tramer and Boneh 2021, for the group norm and its 27 groups.

    Attributes:
        pooled: places each way over which maps are averaged: fewer features, and so less noise.
        mirrored: whether the mean with the mirrored image's maps is taken; for pictures in which left and right mean nothing.
        roots: whether square roots are taken, and a sample is normalised as a whole, in the place of groups.
    """

    pooled: int = 1
    mirrored: bool = False
    roots: bool = False

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        maps, height, width = Scattering().shape(inputs)
        if self.pooled < 1 or height % self.pooled or width % self.pooled:
            raise ConfigError(f"maps of {height} x {width} places cannot be averaged over {self.pooled} each way")
        return (maps * height * width // self.pooled**2,)

    def __call__(self, inputs: Tensor) -> Tensor:
        maps = Scattering()(inputs)
        if self.mirrored:
            maps = (maps + Scattering()(inputs.flip(-1))) / 2
        if self.pooled > 1:
            maps = F.avg_pool2d(maps, self.pooled)
        if self.roots:
            maps = maps.clamp_min(0).sqrt()
        return unit(group_normalised(maps, 1 if self.roots else _GROUPS))


def scattered(images: Tensor) -> Tensor:
    """Return the scattering (N, 81 C, H / 4, W / 4) of images, normalised in 27 groups of maps."""
    return group_normalised(Scattering()(images), _GROUPS)


@dataclass(frozen=True)
class Scattering(FeatureMap):
    """Images (N, C, H, W) uint8 to maps (N, 81 C, H / 4, W / 4) float32."""

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        if len(inputs) != 3 or inputs[1] % _STRIDE or inputs[2] % _STRIDE or min(inputs[1:]) < 2 * _STRIDE:
            raise ConfigError(f"scattering takes images whose sides are multiples of 4, from 8 on; these samples are {inputs}")
        channels, height, width = inputs
        return channels * MAPS, height // _STRIDE, width // _STRIDE

    def __call__(self, inputs: Tensor) -> Tensor:
        images, shape = inputs, self.shape(tuple(inputs.shape[1:]))
        fine, coarse, average = _filters(images.shape[2] + 2 * _STRIDE, images.shape[3] + 2 * _STRIDE)
        padded = F.pad(images.float() / 255, (_STRIDE,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, :, None]

        def averaged(maps: Tensor) -> Tensor:
            """Return the average of maps, given their spectra, at every fourth pixel of the image."""
            height, width = maps.shape[-2:]
            # To keep every fourth pixel is to add up four spectra.
            parts = (maps * average).reshape(*maps.shape[:-2], _STRIDE, height // _STRIDE, _STRIDE, width // _STRIDE)
            low: Tensor = torch.fft.ifft2(parts.mean((-4, -2))).real
            return low[..., 1:-1, 1:-1]

        first = torch.fft.fft2(torch.fft.ifft2(spectrum * fine).abs())
        found = [averaged(spectrum), averaged(first), averaged(torch.fft.fft2(torch.fft.ifft2(spectrum * coarse).abs()))]
        for direction in range(_DIRECTIONS):  # all at once would take eight times the memory
            found.append(averaged(torch.fft.fft2(torch.fft.ifft2(first[:, :, direction, None] * coarse).abs())))
        return torch.cat(found, dim=2).reshape(-1, *shape)


@lru_cache(maxsize=4)
def _filters(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the spectra of the wavelets of both scales, (8, height, width) each, and of the average, float32: they are real."""

    def spectra(filters: list[NDArray[np.complex128]]) -> Tensor:
        return torch.from_numpy(np.fft.fft2(np.stack(filters)).real.astype(np.float32))

    scales = [
        spectra([_morlet(height, width, 0.8 * 2**j, (_DIRECTIONS // 2 - 1 - k) * pi / _DIRECTIONS, 0.75 * pi / 2**j) for k in range(8)])
        for j in range(2)
    ]
    return scales[0], scales[1], spectra([_gabor(height, width, 1.6, 0.0, 0.0, 1.0)])[0]


def _morlet(height: int, width: int, sigma: float, angle: float, frequency: float) -> NDArray[np.complex128]:
    """Return a Morlet wavelet: a Gabor function, less as much of its envelope as brings its mean to 0."""
    slant = 4 / _DIRECTIONS
    wave, envelope = _gabor(height, width, sigma, angle, frequency, slant), _gabor(height, width, sigma, angle, 0.0, slant)
    wavelet: NDArray[np.complex128] = wave - wave.sum() / envelope.sum() * envelope
    return wavelet


def _gabor(height: int, width: int, sigma: float, angle: float, frequency: float, slant: float) -> NDArray[np.complex128]:
    """Return a periodic Gaussian, ``1 / slant`` times as long across ``angle`` as its ``sigma`` along it, times a wave along it."""
    total = np.zeros((height, width), dtype=np.complex128)
    for rows in range(-2, 3):
        for columns in range(-2, 3):
            x, y = np.mgrid[rows * height : (rows + 1) * height, columns * width : (columns + 1) * width].astype(np.float64)
            along, across = x * cos(angle) + y * sin(angle), y * cos(angle) - x * sin(angle)
            total += np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    total *= slant / (2 * pi * sigma**2)
    return total
