"""Where the numbers of a column lie, from four histograms; these may be noisy, and nothing else is known of the column.

The first has two bins for each power of two; each of the others has 16 equal ones where the one before found something: few, so
that a bin holds enough to be seen above the noise. What comes out are a middle and a spread, which bring numbers to about [-1, 1].
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import inf, isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.data.encoder import REACH, moved
from ldpfl.data.samples import Dataset, Samples
from ldpfl.errors import DataError

Floats = NDArray[np.float64]

_POWERS = 2.0 ** (np.arange(-40, 81) / 2)
_FINE = 16
_MARGIN = 0.25
"""Part of what was found by which the next histogram reaches beyond it."""
_SURE = 4.5
"""Standard deviations of noise above which a bin is not empty: in a thousand columns, one bin or so that is empty seems not to be."""
_BESIDE = 2
"""Bins on each side of one that is not empty whose counts are believed as well."""
STAGES = 4
"""Histograms that are taken, one after another."""


def coarse_edges(columns: int) -> Floats:
    """Return the edges (columns, bins + 1) of the first histograms."""
    edges = np.concatenate([-_POWERS[::-1], _POWERS])
    return np.tile(edges, (columns, 1))


def fine_edges(counts: Floats, edges: Floats, noise: float) -> Floats:
    """Return the edges of the next ones, from the ``counts`` (columns, bins) of the last, which have ``noise`` as standard deviation."""
    return np.stack([_span(*own, noise) for own in zip(counts, edges, strict=True)])


def beyond(counts: Floats, noise: float) -> NDArray[np.bool_]:
    """Tell which columns have numbers beyond the first histograms, from their ``counts`` (columns, bins): these count as one there."""
    return np.asarray((counts[:, [0, -1]] > max(_SURE * noise, 0.5)).any(axis=1))


LARGEST = float(_POWERS[-1])
"""Beyond which numbers are beyond the first histograms."""


def _not_empty(counts: Floats, noise: float) -> NDArray[np.intp]:
    """Return the bins that surely hold something."""
    return np.flatnonzero(counts > max(_SURE * noise, 0.5))


def _span(counts: Floats, edges: Floats, noise: float) -> Floats:
    sure = _not_empty(counts, noise)
    first, last = (int(counts.argmax()),) * 2 if not sure.size else (int(sure[0]), int(sure[-1]))
    margin = _MARGIN * (edges[last + 1] - edges[first])
    return np.linspace(edges[first] - margin, edges[last + 1] + margin, _FINE + 1)


def center_and_spread(counts: Floats, edges: Floats, noise: float) -> tuple[Floats, Floats]:
    """Return the middle and the spread of each column, from the last histograms; of one that was not seen above the noise, NaN."""
    middles, widths = (edges[:, 1:] + edges[:, :-1]) / 2, edges[:, 1:] - edges[:, :-1]
    weights = np.stack([_around(own, noise) for own in counts])
    total = weights.sum(axis=1, keepdims=True)
    weights = np.divide(weights, total, out=np.full_like(weights, np.nan), where=total > 0)
    center = (weights * middles).sum(axis=1)
    variance = (weights * ((middles - center[:, None]) ** 2 + widths**2 / 12)).sum(axis=1)
    return center, np.sqrt(variance)


def _around(counts: Floats, noise: float) -> Floats:
    """Return the counts of the bins that are surely not empty and of a few beside them, 0 for others: there lie the tails."""
    sure = _not_empty(counts, noise)
    near = np.zeros(counts.size, dtype=bool)
    for bin_ in sure:
        near[max(0, bin_ - _BESIDE) : bin_ + _BESIDE + 1] = True
    return np.where(near, np.maximum(counts, 0.0), 0.0)


def place(values: Floats, edges: Floats) -> NDArray[np.int64]:
    """Return the bin of each value (N, columns), with what lies beyond in the bins at the ends; -1 for NaN."""
    bins = edges.shape[1] - 1
    found = np.stack([np.searchsorted(own, column, side="right") - 1 for own, column in zip(edges, values.T, strict=True)], axis=1)
    return np.where(np.isnan(values), -1, np.clip(found, 0, bins - 1)).astype(np.int64)


def unscaled_values(dataset: Dataset) -> Floats:
    """Return the columns (N, columns) of the train samples that are not scaled, the target last where it is one of them."""
    columns = [dataset.train.tensor[:, place].double().numpy() for place in dataset.unscaled]
    if dataset.target_unscaled:
        columns.append(dataset.train.targets.double().numpy())
    return np.stack(columns, axis=1)


def scaled(dataset: Dataset, center: Floats, spread: Floats) -> Dataset:
    """Return ``dataset`` with the columns of :func:`unscaled_values` less their ``center``, in units of ``spread``.

    Gaps are 0, and so is all of a column of which nothing is known.
    """
    places = torch.tensor(dataset.unscaled, dtype=torch.int64)
    middles, units = (torch.from_numpy(figures).float() for figures in (center, spread))

    def changed(samples: Samples, reach: float = REACH) -> Samples:
        inputs, targets, count = samples.inputs, samples.targets, len(places)
        if count:  # tokens of texts have no scale
            inputs = samples.tensor.clone()
            inputs[:, places] = moved(inputs[:, places], middles[:count], units[:count])
        return Samples(inputs, moved(targets, middles[-1], units[-1], reach) if dataset.target_unscaled else targets)

    if dataset.target_unscaled and not isfinite(spread[-1]):
        raise DataError("the target was not seen above the noise of measuring: give data.bounds for it")
    unit = float(spread[-1]) if dataset.target_unscaled else dataset.unit
    train, test = changed(dataset.train), changed(dataset.test, inf)  # what is measured on is told as it is
    encoder = None if dataset.encoder is None else dataset.encoder.measured(center, spread)
    # What was measured is a part of what is trained on: a run goes on with it, or not at all, for to measure anew would cost anew.
    content = f"{dataset.fingerprint} {center.tolist()} {spread.tolist()}"
    return replace(
        dataset,
        train=train,
        test=test,
        unscaled=(),
        unscaled_names=(),
        target_unscaled=False,
        unit=unit,
        encoder=encoder,
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:16],
    )
