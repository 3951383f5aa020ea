"""The figure by which models are judged, as it is shown: accuracy in per cent, any other as it is."""

from __future__ import annotations

from math import isfinite

from ldpfl.tasks import ACCURACY


def factor(metric: str) -> float:
    """Return what a score of this metric is multiplied by, where it is shown without a unit."""
    return 100.0 if metric == ACCURACY else 1.0


def heading(metric: str) -> str:
    """Return what stands above such figures, with their unit."""
    return f"{metric} %" if metric == ACCURACY else metric


def shown(metric: str, score: float | None) -> str:
    """Return a score with its unit; "-" where there is none."""
    if score is None or not isfinite(score):
        return "-"
    return f"{score:.2%}" if metric == ACCURACY else f"{score:.4g}"


def cost(metric: str, without: float, score: float, what: str = "noise") -> str:
    """Return what noise, or something else, changed, as a part of a sentence."""
    if metric == ACCURACY:
        return f"{what} costs {100 * (without - score):.2f} points"
    return f"with {what} {score - without:+.4g}"
