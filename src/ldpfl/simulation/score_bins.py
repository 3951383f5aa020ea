"""Bins of scores, by which an evaluation at clients counts its held-back records.

A score is a probability. Two scores in one bin count as equal, and each bin's count has its own noise. So there are few bins, and their
places decide how exactly AUROC and calibration are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from ldpfl.data.columns import draw_synthetic_inputs, hashed_inputs
from ldpfl.data.settings import DataConfig

Floats = NDArray[np.float64]

BINS = 22
"""Number of bins."""
_REACH = 3.0
"""Bins cover this many standard deviations of the examples on either side, times the root of the number of columns: the scores of columns
that rise and fall together spread that much more than those of the examples, whose columns are independent."""
_LARGEST_REACH = 8.0
"""Maximum distance in log odds from the middle to the outer bins, but for examples that lie farther out."""
_SYNTHETIC_ROWS = 1024
"""Number of synthetic rows from which the bins of a logistic regression follow."""
_USED_INPUTS = 4
"""Number of different words that a column of hashed words is assumed to have."""
_SMEAR = 0.1 * np.linspace(-1, 1, 5)
"""Offsets, in standard deviations, by which each example counts several times. Examples of a table of words are few different values."""


@dataclass(frozen=True)
class ScoreBins:
    """The bins of an evaluation. By default, they have equal steps in log odds, which resolve small and large probabilities.

    Attributes:
        edges: (BINS - 1,) log odds between neighbouring bins, ascending.
    """

    edges: tuple[float, ...] = tuple(np.linspace(-5, 5, BINS - 1).tolist())

    @classmethod
    def for_log_odds(cls, examples: Floats, columns: int) -> ScoreBins:
        """Return bins that suit a model, by ``examples`` (E,) of its log odds for synthetic rows with ``columns`` independent columns.

        One half of the bins hold about equally many examples. The other half have equal steps, because real scores may lie elsewhere.
        Examples that are all equal, or not finite, give the default bins.
        """
        if not np.isfinite(examples).all() or np.ptp(examples) == 0:
            return EQUAL_STEPS
        spread, middle = float(np.std(examples)), float(np.median(examples))
        reach = min(_REACH * sqrt(columns) * spread, _LARGEST_REACH)
        smeared = (examples[:, None] + spread * _SMEAR).ravel()
        # The edges are quantiles of both halves together, so they are distinct, even if many examples are equal.
        pool = np.concatenate([smeared, np.linspace(middle - reach, middle + reach, len(smeared))])
        return cls(tuple(np.quantile(pool, np.arange(1, BINS) / BINS).tolist()))

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


def bins_for_table(table: DataConfig, weights: Tensor) -> ScoreBins:
    """Return bins for the logistic regression of two classes with ``weights`` (2 F + 2,): slopes of either class, then two biases.

    They follow from synthetic rows of the ``table``, and so from public facts alone.
    """
    inputs = draw_synthetic_inputs(table, _SYNTHETIC_ROWS, torch.Generator().manual_seed(0)).double()
    slopes, biases = weights[:-2].reshape(2, -1).double(), weights[-2:].double()
    slope, log_odds = slopes[1] - slopes[0], (biases[1] - biases[0]).repeat(_SYNTHETIC_ROWS)
    generator = torch.Generator().manual_seed(0)
    for place in hashed_inputs(table):  # which of its inputs words use is not known: those with the largest slopes, if words matter at all
        of_column = slope[place]
        largest = of_column[of_column.abs().topk(min(_USED_INPUTS, len(of_column))).indices]
        log_odds += largest[torch.randint(len(largest), log_odds.shape, generator=generator)]
        slope[place] = 0
    return ScoreBins.for_log_odds((log_odds + inputs @ slope).numpy(), len(table.columns))
