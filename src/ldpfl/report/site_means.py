"""Summarise the figures of many clients: their mean, their spread, and the mean of the clients with the worst figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from ldpfl.tasks.weighted_metrics import CLASS_ERROR, COMMONEST, INTEGRATED_BRIER, MEAN_PREDICTION, OBSERVED, OBSERVED_MEAN, PREDICTED

MIN_CLIENTS = 10
"""Minimum number of clients with a figure for a mean over the worst tenth."""

_LOWER_IS_BETTER = ("MAE", "RMSE", "Brier score", CLASS_ERROR, INTEGRATED_BRIER)
"""Figures of which a low value is good. Only built-in tasks have figures by client."""

_WITHOUT_A_WORST = (COMMONEST, OBSERVED, PREDICTED, MEAN_PREDICTION, OBSERVED_MEAN)
"""Figures that describe a client's rows or predictions, and are neither good nor bad."""


class SiteMeans(NamedTuple):
    """One figure over the clients that have it. Each client counts the same.

    Attributes:
        clients: number of clients.
        mean, deviation: mean and standard deviation of the figure over these clients.
        worst: mean over the ``worst_clients`` with the worst figures, which are a tenth of the clients, rounded up.
    """

    clients: int
    mean: float
    deviation: float
    worst: float
    worst_clients: int


def site_means(sites: Sequence[Mapping[str, Any]]) -> dict[str, SiteMeans]:
    """Return the summary of each figure of ``sites``, the entries of ``result.json``. A figure of fewer than ten clients is left out."""
    names = dict.fromkeys(name for site in sites for name in site["scores"])
    all_scores = {name: [score for site in sites if (score := site["scores"].get(name)) is not None and isfinite(score)] for name in names}
    return {
        name: _summary(sorted(scores, reverse=name in _LOWER_IS_BETTER))  # the worst first
        for name, scores in all_scores.items()
        if name not in _WITHOUT_A_WORST and len(scores) >= MIN_CLIENTS
    }


def _summary(worst_first: Sequence[float]) -> SiteMeans:
    """Return the summary of one figure's values at clients, which begin with the worst one."""
    tenth = ceil(len(worst_first) / 10)
    return SiteMeans(len(worst_first), fmean(worst_first), pstdev(worst_first), fmean(worst_first[:tenth]), tenth)
