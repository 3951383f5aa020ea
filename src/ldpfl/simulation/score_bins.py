"""Bins of scores, by which an evaluation at clients counts its held-back records.

A score is a probability. Two scores in one bin count as equal, and each bin's count has its own noise. So there are few bins, and their
places decide how exactly AUROC and calibration are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

BINS = 22
"""Number of bins."""
_STRETCH = 1.25
"""Factor on the distance of edges from the median, so that few scores lie in the first and last bin, which have no middle of their own."""


@dataclass(frozen=True)
class ScoreBins:
    """The bins of an evaluation. By default, they have equal steps in log odds, which resolve small and large probabilities.

    Attributes:
        edges: (BINS - 1,) log odds between neighbouring bins, ascending.
    """

    edges: tuple[float, ...] = tuple(np.linspace(-5, 5, BINS - 1).tolist())

    @classmethod
    def for_log_odds(cls, log_odds: Floats) -> ScoreBins:
        """Return bins that hold about equally many scores, if scores are distributed like the examples ``log_odds`` (N,).

        Examples that are all equal, or not finite, give the default bins.
        """
        if not np.isfinite(log_odds).all() or np.ptp(log_odds) == 0:
            return EQUAL_STEPS
        quantiles = np.quantile(log_odds, np.arange(1, BINS) / BINS)
        edges = np.median(log_odds) + _STRETCH * (quantiles - np.median(log_odds))
        return cls(tuple(edges.tolist()))

    def places(self, scores: Floats) -> NDArray[np.int64]:
        """Return the number of the bin (N,) of each of the ``scores`` (N,), from 0."""
        return np.searchsorted(expit(np.array(self.edges)), scores, side="right")

    @property
    def middles(self) -> Floats:
        """The score (BINS,) that stands for each bin: its middle in log odds. An outer bin is taken to be as wide as the next one."""
        edges = np.array(self.edges)
        first, last = 2 * edges[0] - edges[1], 2 * edges[-1] - edges[-2]
        outer = np.concatenate([[first], edges, [last]])
        return np.asarray(expit((outer[:-1] + outer[1:]) / 2))


EQUAL_STEPS = ScoreBins()
"""The default bins."""
