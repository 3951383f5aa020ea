"""The Fréchet distance between two sets of images: how far the normal distributions fitted to their features lie apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ldpfl.attacks.extractor import Extractor
from ldpfl.errors import DataError

FEWEST_IMAGES = 2
_BATCH = 250


@dataclass(frozen=True)
class Distance:
    """A Fréchet distance, with the facts that are needed to interpret it.

    Attributes:
        value: squared distance, in the square of the features' unit; 0 for equal sets.
        extractor: the extractor's name; distances under different names are not comparable.
        features: number of features of an image.
        real, other: number of images in each set. A set that is small beside the features biases the distance upwards, so only
            distances of equal counts compare fairly.
    """

    value: float
    extractor: str
    features: int
    real: int
    other: int


def frechet_distance(extractor: Extractor, real: Tensor, other: Tensor) -> Distance:
    """Return |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)) of two sets of images (N, C, H, W) uint8.

    m1, m2 are the means of the sets' features, and C1, C2 their covariances, with the divisor N - 1. torchmetrics computes in float64.

    Raises:
        DataError: a set has fewer than two images, or the features are not finite.

    Source: Heusel et al. 2017, equation 6.
    """
    for images in (real, other):
        if len(images) < FEWEST_IMAGES:
            raise DataError(f"a Fréchet distance needs at least {FEWEST_IMAGES} images in each set, got {len(images)}")
    from torchmetrics.image.fid import FrechetInceptionDistance  # slow to import

    metric = FrechetInceptionDistance(_ForTorchmetrics(extractor))
    with torch.no_grad():
        for images, is_real in ((real, True), (other, False)):
            for part in torch.split(images, _BATCH):
                metric.update(part, real=is_real)
        value = float(metric.compute())
    # For equal sets, rounding may give a little less than 0.
    return Distance(max(value, 0.0), extractor.name, extractor.features, len(real), len(other))


class _ForTorchmetrics(torch.nn.Module):
    """Adapter of an extractor for torchmetrics: it has the attribute ``num_features``, and returns features in float64."""

    def __init__(self, extractor: Extractor) -> None:
        super().__init__()
        self.num_features = extractor.features
        self._function = extractor.function

    def forward(self, pixels: Tensor) -> Tensor:
        features = torch.as_tensor(self._function(pixels)).double()
        # Checked before the eigenvalues are computed, because on a NaN LAPACK may end the whole process.
        if not bool(torch.isfinite(features).all()):
            raise DataError(f"the Fréchet distance cannot be computed: the features of {len(pixels)} images contain NaN or infinity")
        return features
