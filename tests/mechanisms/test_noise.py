"""Closed forms that mechanisms share: two ways to state the error of a bit are one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ldpfl import LayerRanges
from ldpfl.mechanisms.noise import QuadraticNoise, TwoValueNoise

RANGES = LayerRanges([0.5, -1.0], [0.25, 2.0], (3, 4))
GAIN = 3.5


@pytest.mark.parametrize("clients", [1, 2, 40])
def test_a_bit_of_two_values_is_quadratic_noise_with_the_slope_minus_one(clients: int) -> None:
    two, quadratic = TwoValueNoise(RANGES, GAIN), QuadraticNoise(RANGES, offset=GAIN**2, slope=-1)
    values = torch.linspace(-4, 4, 14).reshape(2, 7)  # within the ranges, and beyond them
    torch.testing.assert_close(two.variance(values), quadratic.variance(values))
    torch.testing.assert_close(two.mean_variance(values[0], clients), quadratic.mean_variance(values[0], clients))
    np.testing.assert_allclose(two.largest_std(clients), quadratic.largest_std(clients))
    np.testing.assert_allclose(two.largest_std(clients), RANGES.radii * GAIN / np.sqrt(clients))


def test_the_largest_deviation_is_that_of_the_worst_value() -> None:
    t = torch.linspace(-1, 1, 201)
    ranges = LayerRanges(0.5, 0.25, (201,))
    for offset, slope in ((4.0, -1.0), (4.0, 0.0), (4.0, 2.0)):
        noise = QuadraticNoise(ranges, offset, slope)
        assert float(noise.variance((0.5 + 0.25 * t)[None]).max()) == pytest.approx(float(noise.largest_std(1)[0]) ** 2, rel=1e-6)
