"""Wavelet scattering of images: features by formulas alone, which are learnt from no data.

An image is convolved with Morlet wavelets of two scales and eight directions. The moduli of the finer scale are convolved again with the
wavelets of the coarser scale. Each result is averaged over neighbourhoods of some 4 x 4 pixels, which gives 81 maps for each channel.

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

from ldpfl.data.features.base import FeatureMap, group_normalised, unit_length
from ldpfl.errors import ConfigError

_DIRECTIONS = 8
"""Number of directions of the wavelets."""
_GROUPS = 27
"""Number of groups in which the maps are normalised."""
_STRIDE = 4
"""Number of pixels each way over which maps are averaged: 2^J for J = 2 scales."""
MAPS = 1 + 2 * _DIRECTIONS + _DIRECTIONS**2
"""Number of maps of each channel: the average, the moduli of both scales, and the moduli of the finer convolved with the coarser."""


@dataclass(frozen=True)
class ScatteringFeatures(FeatureMap):
    """Images (N, C, H, W) uint8 to their scattering, as vectors (N, 81 C H W / 16) float32 of length 1. Maps are normalised in groups.

    Source: Tramer and Boneh 2021, for the group norm and its 27 groups.

    Attributes:
        pooled: number of places each way over which maps are averaged. Fewer features mean less noise.
        mirrored: whether maps are averaged with those of the mirror image, for pictures in which left and right mean nothing.
        roots: whether square roots are taken of the maps. Then a sample is normalised as a whole instead of in groups.
    """

    pooled: int = 1
    mirrored: bool = False
    roots: bool = False

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape (F,) of one image's features, or raise if ``pooled`` does not divide the sides of its maps."""
        maps, height, width = Scattering().shape(inputs)
        if self.pooled < 1 or height % self.pooled or width % self.pooled:
            raise ConfigError(
                f"pooled is {self.pooled}, but scattering makes maps of {height} x {width}: set pooled to a divisor of both sides"
            )
        return (maps * height * width // self.pooled**2,)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the scattering of images (N, C, H, W) as vectors (N, F) of length 1.

        If the attributes say so, maps are averaged with those of the mirrored image, pooled, and replaced by their square roots.
        """
        maps = Scattering()(inputs)
        if self.mirrored:
            maps = (maps + Scattering()(inputs.flip(-1))) / 2
        if self.pooled > 1:
            maps = F.avg_pool2d(maps, self.pooled)
        if self.roots:
            maps = maps.clamp_min(0).sqrt()
        return unit_length(group_normalised(maps, 1 if self.roots else _GROUPS))


def normalised_scattering(images: Tensor) -> Tensor:
    """Return the scattering (N, 81 C, H / 4, W / 4) of ``images`` (N, C, H, W), normalised in 27 groups of maps."""
    return group_normalised(Scattering()(images), _GROUPS)


@dataclass(frozen=True)
class Scattering(FeatureMap):
    """The scattering transform: images (N, C, H, W) uint8 to maps (N, 81 C, H / 4, W / 4) float32."""

    def shape(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one image's maps, (81 C, H / 4, W / 4), or raise if an image of the shape ``inputs`` does not fit."""
        if len(inputs) != 3 or inputs[1] % _STRIDE or inputs[2] % _STRIDE or min(inputs[1:]) < 2 * _STRIDE:
            raise ConfigError(f"scattering needs images whose sides are multiples of 4 and at least 8, got samples of shape {inputs}")
        channels, height, width = inputs
        return channels * MAPS, height // _STRIDE, width // _STRIDE

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the maps of images: the images, and moduli of their convolutions with wavelets, all averaged over 4 x 4 pixels."""
        shape = self.shape(tuple(inputs.shape[1:]))
        fine, coarse, average = _filters(inputs.shape[2] + 2 * _STRIDE, inputs.shape[3] + 2 * _STRIDE)
        padded = F.pad(inputs.float() / 255, (_STRIDE,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)[:, :, None]  # (N, C, 1, H + 8, W + 8)

        def averaged(maps: Tensor) -> Tensor:
            """Return the average of maps, given their spectra, at every fourth pixel of the image, without the padding."""
            height, width = maps.shape[-2:]
            # Keeping every fourth pixel each way means averaging the 4 x 4 blocks of the spectrum.
            blocks = (maps * average).reshape(*maps.shape[:-2], _STRIDE, height // _STRIDE, _STRIDE, width // _STRIDE)
            pixels: Tensor = torch.fft.ifft2(blocks.mean((-4, -2))).real
            return pixels[..., 1:-1, 1:-1]  # the padding is one pixel wide now

        def modulus(maps: Tensor, wavelets: Tensor) -> Tensor:
            """Return the spectra of the moduli of maps, given their spectra, after convolution with ``wavelets``."""
            moduli: Tensor = torch.fft.fft2(torch.fft.ifft2(maps * wavelets).abs())
            return moduli

        fine_moduli = modulus(spectrum, fine)  # (N, C, 8 directions, H + 8, W + 8)
        results = [averaged(spectrum), averaged(fine_moduli), averaged(modulus(spectrum, coarse))]
        for direction in range(_DIRECTIONS):  # all at once would take eight times the memory
            results.append(averaged(modulus(fine_moduli[:, :, direction, None], coarse)))
        return torch.cat(results, dim=2).reshape(-1, *shape)


@lru_cache(maxsize=4)
def _filters(height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the spectra of the finer and of the coarser wavelets, (8, height, width) each, and of the filter that averages.

    The spectra are real, because each filter's value at -x is the complex conjugate of its value at x.
    """

    def spectra(filters: list[NDArray[np.complex128]]) -> Tensor:
        return torch.from_numpy(np.fft.fft2(np.stack(filters)).real.astype(np.float32))

    # Constants of Kymatio. Each scale doubles the width, and halves the frequency, of the one before.
    angles = [(_DIRECTIONS // 2 - 1 - direction) * pi / _DIRECTIONS for direction in range(_DIRECTIONS)]
    fine, coarse = (
        spectra([_morlet(height, width, sigma, angle, frequency) for angle in angles])
        for sigma, frequency in ((0.8, 0.75 * pi), (0.8 * 2, 0.75 * pi / 2))
    )
    average = spectra([_gabor(height, width, sigma=1.6, angle=0.0, frequency=0.0, slant=1.0)])[0]
    return fine, coarse, average


def _morlet(height: int, width: int, sigma: float, angle: float, frequency: float) -> NDArray[np.complex128]:
    """Return a Morlet wavelet: a Gabor function minus its envelope, scaled such that the mean is 0. See :func:`_gabor`."""
    slant = 4 / _DIRECTIONS
    wave, envelope = _gabor(height, width, sigma, angle, frequency, slant), _gabor(height, width, sigma, angle, frequency=0.0, slant=slant)
    wavelet: NDArray[np.complex128] = wave - wave.sum() / envelope.sum() * envelope
    return wavelet


def _gabor(height: int, width: int, sigma: float, angle: float, frequency: float, slant: float) -> NDArray[np.complex128]:
    """Return a Gabor function (height, width): a Gaussian times a wave of this ``frequency``, in radians per pixel, along ``angle``.

    The Gaussian's deviation is ``sigma`` pixels along the angle, and ``sigma / slant`` across it. Copies that are shifted by multiples of
    the height and width are added, so that the function is periodic, as the Fourier transform needs.
    """
    total = np.zeros((height, width), dtype=np.complex128)
    for rows in range(-2, 3):
        for columns in range(-2, 3):
            x, y = np.mgrid[rows * height : (rows + 1) * height, columns * width : (columns + 1) * width].astype(np.float64)
            along, across = x * cos(angle) + y * sin(angle), y * cos(angle) - x * sin(angle)
            total += np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    total *= slant / (2 * pi * sigma**2)
    return total
