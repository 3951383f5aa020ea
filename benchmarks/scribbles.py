"""Draw random scribbles, and learn the features ``strokes`` from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.features.scattering import MAPS, normalised_scattering
from ldpfl.data.features.strokes import DIRECTIONS, SIDE

_SCRIBBLES, _COPIES = 2500, 10
_RIDGE = 0.3
"""Share of the mean variance within scribbles that is added to each direction's variance, so that no direction has nearly none."""

_CURVE_POINTS = 48
"""Number of points at which a curve is drawn."""

Floats = NDArray[np.float64]


def learn(progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Tensor]:
    """Compute the mean (3969,) and the directions (3969, 200), float16, from scribbles alone. It takes minutes on one core.

    Fisher's linear discriminant (1936), with a ridge, gives the directions: they maximise the variance between scribbles, relative to the
    variance between the copies of one scribble. ``progress`` is called with the number of scribbles that are done, and of all.
    """
    generator = np.random.Generator(np.random.PCG64DXSM(0))
    rows = np.empty((_SCRIBBLES * _COPIES, MAPS * (SIDE // 4) ** 2), dtype=np.float32)
    for scribble in range(_SCRIBBLES):
        images = torch.from_numpy(draw_copies(generator, _COPIES))
        rows[scribble * _COPIES : (scribble + 1) * _COPIES] = normalised_scattering(images[:, None]).flatten(1).numpy()
        progress(scribble + 1, _SCRIBBLES)
    mean = rows.mean(axis=0, dtype=np.float64)
    rows -= mean.astype(np.float32)
    means = rows.reshape(_SCRIBBLES, _COPIES, -1).mean(axis=1, dtype=np.float64)
    between_scribbles = means.T @ means / _SCRIBBLES  # covariance matrices
    within_scribbles = (rows.T @ rows).astype(np.float64) / len(rows) - between_scribbles
    size = len(within_scribbles)
    within_scribbles += np.eye(size) * (_RIDGE * np.trace(within_scribbles) / size)
    _, ascending = scipy.linalg.eigh(between_scribbles, within_scribbles, subset_by_index=[size - DIRECTIONS, size - 1])
    directions = ascending[:, ::-1]  # the best first
    # A direction and its opposite are equally good. To be reproducible, its largest entry is made positive.
    directions = directions * np.sign(directions[np.abs(directions).argmax(axis=0), np.arange(DIRECTIONS)])
    directions = directions / np.abs(directions).max()
    return {"mean": torch.from_numpy(mean).half(), "directions": torch.from_numpy(directions.copy()).half()}


def draw_copies(generator: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Draw a random scribble ``count`` times, each time a little differently: (count, 28, 28)."""
    curves = _draw_scribble(generator)
    return np.stack([_draw_points(_deform(curves, generator), generator.uniform(0.7, 1.7)) for _ in range(count)])


def _draw_scribble(generator: np.random.Generator) -> Floats:
    """Draw the control points (S, 4, 2) of one to three cubic curves in a square of side 2. Most begin where the previous curve ended."""
    curves = generator.uniform(-1, 1, (generator.integers(1, 4), 4, 2))
    for number in range(1, len(curves)):
        if generator.random() < 0.6:
            curves[number, 0] = curves[number - 1, 3]
    return curves


def _deform(curves: Floats, generator: np.random.Generator) -> Floats:
    """Return points (P, 2) on ``curves`` (S, 4, 2) with control points moved a little, and all turned, slanted and stretched at random."""
    moved_controls = curves + generator.normal(0, 0.12, curves.shape)
    time = np.linspace(0, 1, _CURVE_POINTS)[:, None]
    bernstein = np.concatenate([(1 - time) ** 3, 3 * time * (1 - time) ** 2, 3 * time**2 * (1 - time), time**3], axis=1)
    points = (bernstein @ moved_controls).reshape(-1, 2)
    angle, slant, stretch = generator.normal(0, 0.15), generator.normal(0, 0.25), np.exp(generator.normal(0, 0.12, 2))
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    deformed: Floats = points @ (rotation @ np.array([[1, slant], [0, 1]]) @ np.diag(stretch)).T
    return deformed


def _draw_points(points: Floats, width: float) -> NDArray[np.uint8]:
    """Draw ``points`` (P, 2) in the middle of an image (28, 28), 18 pixels high or wide, with ink ``width`` pixels around each point."""
    extent = max(float((points.max(axis=0) - points.min(axis=0)).max()), 0.6)  # a tiny scribble is not enlarged to the full 18 pixels
    placed = points * (18 / extent)
    placed = placed - placed.mean(axis=0) + (SIDE - 1) / 2
    pixels = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), axis=-1).reshape(-1, 1, 2)
    distance = np.sqrt(((pixels - placed) ** 2).sum(axis=2).min(axis=1))
    ink: NDArray[np.uint8] = (255 * np.clip(width + 0.5 - distance, 0, 1)).astype(np.uint8)
    return ink.reshape(SIDE, SIDE)
