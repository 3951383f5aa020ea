"""Where the numbers of a column lie, from two histograms; these may be noisy, and nothing else is known of the column.

The first has a bin for each power of two, the second 64 equal ones where the first found something. What comes out are a middle and
a spread for each column, which bring its numbers to about [-1, 1].
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.samples import Dataset, Samples

Floats = NDArray[np.float64]

_POWERS = 2.0 ** np.arange(-20, 41)
_FINE = 64
_SURE = 4.0
"""Standard deviations of noise above which a bin is not empty."""
_REACH = 6.0
"""Spreads beyond which a number counts as if it lay there."""
STAGES = 2
"""Histograms that are taken, one after another."""


def coarse_edges(columns: int) -> Floats:
    """Return the edges (columns, bins + 1) of the first histograms."""
    edges = np.concatenate([-_POWERS[::-1], _POWERS])
    return np.tile(edges, (columns, 1))


def fine_edges(counts: Floats, edges: Floats, noise: float) -> Floats:
    """Return the edges of the second ones, from the counts (columns, bins) of the first, which have ``noise`` as standard deviation."""
    found = [_occupied(own, noise) for own in counts]
    spans = [np.linspace(own[first], own[last + 1], _FINE + 1) for own, (first, last) in zip(edges, found, strict=True)]
    return np.stack(spans)


def _occupied(counts: Floats, noise: float) -> tuple[int, int]:
    sure = np.flatnonzero(counts > max(_SURE * noise, 0.5))
    if not sure.size:
        sure = np.array([int(counts.argmax())])
    return int(sure[0]), int(sure[-1])


def center_and_spread(counts: Floats, edges: Floats, noise: float) -> tuple[Floats, Floats]:
    """Return the middle and the spread of each column, from the second histograms."""
    middles, widths = (edges[:, 1:] + edges[:, :-1]) / 2, edges[:, 1:] - edges[:, :-1]
    weights = np.where(counts > _SURE * noise / 2, np.maximum(counts, 0.0), 0.0)
    nothing = weights.sum(axis=1) <= 0
    weights[nothing] = 1.0
    weights /= weights.sum(axis=1, keepdims=True)
    center = (weights * middles).sum(axis=1)
    variance = (weights * ((middles - center[:, None]) ** 2 + widths**2 / 12)).sum(axis=1)
    return center, np.sqrt(variance)


def place(values: Floats, edges: Floats) -> NDArray[np.int64]:
    """Return the bin of each value (N, columns), with what lies beyond in the bins at the ends; -1 for NaN."""
    bins = edges.shape[1] - 1
    found = np.stack([np.searchsorted(own, column, side="right") - 1 for own, column in zip(edges, values.T, strict=True)], axis=1)
    return np.where(np.isnan(values), -1, np.clip(found, 0, bins - 1)).astype(np.int64)


def unscaled_values(dataset: Dataset) -> Floats:
    """Return the columns (N, columns) of the train samples that are not scaled, the target last where it is one of them."""
    columns = [dataset.train.inputs[:, place].double().numpy() for place in dataset.unscaled]
    if dataset.target_unscaled:
        columns.append(dataset.train.targets.double().numpy())
    return np.stack(columns, axis=1)


def scaled(dataset: Dataset, center: Floats, spread: Floats) -> Dataset:
    """Return ``dataset`` with the columns of :func:`unscaled_values` less their ``center``, in units of ``spread``; gaps are 0."""
    places = torch.tensor(dataset.unscaled, dtype=torch.int64)
    middles, units = (torch.from_numpy(figures).float() for figures in (center, spread))

    def changed(samples: Samples) -> Samples:
        inputs, targets = samples.inputs.clone(), samples.targets
        count = len(places)
        inputs[:, places] = _moved(inputs[:, places], middles[:count], units[:count])
        return Samples(inputs, _moved(targets, middles[-1], units[-1]) if dataset.target_unscaled else targets)

    unit = float(spread[-1]) if dataset.target_unscaled else dataset.unit
    train, test = changed(dataset.train), changed(dataset.test)
    return replace(dataset, train=train, test=test, unscaled=(), target_unscaled=False, unit=unit)


def _moved(values: Tensor, center: Tensor, spread: Tensor) -> Tensor:
    return ((values - center) / spread).clamp(-_REACH, _REACH).nan_to_num(0.0)
