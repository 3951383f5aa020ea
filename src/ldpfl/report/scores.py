"""Figures by which models are judged, as they are shown: shares in per cent, any other as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ldpfl.report.site_means import site_means
from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import (
    AUROC,
    CLASS_ERROR,
    COMMONEST,
    EXACT_MATCH,
    INTEGRATED_BRIER,
    MACRO_F1,
    MEASURED_AT_CLIENTS,
    OBSERVED,
    PPV,
    PREDICTED,
    SENSITIVITY,
    SLOPE,
    SPECIFICITY,
)

_SHARES = (ACCURACY, COMMONEST, PREDICTED, OBSERVED)
_MOST_NAMED = 10
_SHARES_AT = (SENSITIVITY, SPECIFICITY, PPV)


def _is_share(metric: str) -> bool:
    metric = metric.removesuffix(MEASURED_AT_CLIENTS)
    return metric in _SHARES or metric.startswith(tuple(f"{name} at " for name in _SHARES_AT))


def factor(metric: str) -> float:
    """Return what a score of this metric is multiplied by, where it is shown without a unit."""
    return 100.0 if _is_share(metric) else 1.0


def chosen(result: Mapping[str, Any]) -> str:
    """Return the settings that ``auto`` chose, as a config has them; nothing where it chose none."""
    return ", ".join(f"{name} = {value:.3g}" for name, value in result.get("chosen", {}).items())


def heading(metric: str) -> str:
    """Return what stands above such figures, with their unit."""
    return f"{metric} %" if _is_share(metric) else metric


def shown(metric: str, score: float | None) -> str:
    """Return a score with its unit; "-" where there is none."""
    if score is None or not isfinite(score):
        return "-"
    return f"{score:.2%}" if _is_share(metric) else f"{score:.4g}"


def with_interval(metric: str, score: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a score with its 95 % interval, where there is one."""
    if interval is None or None in interval or score is None:
        return shown(metric, score)
    low, high = (factor(metric) * float(end or 0.0) for end in interval)
    form = ".1f" if _is_share(metric) else "#.3g" if max(abs(low), abs(high)) < 100 else ".4g"
    return f"{shown(metric, score)} ({low:{form}} to {high:{form}})"


def cost(metric: str, without: float, score: float, what: str = "noise") -> str:
    """Return what noise, or something else, changed, as a part of a sentence."""
    if _is_share(metric):
        return f"{what} costs {100 * (without - score):.2f} points"
    return f"with {what} {score - without:+.4g}"


def event_of(result: Mapping[str, Any]) -> str:
    """Return what counts as the event, and how often it occurs, in a sentence; of more classes than two their names, if they have any."""
    if result.get("event") is None:
        names = list(result.get("classes", ()))
        return f"The classes are {', '.join(names[:_MOST_NAMED])}{', ...' * (len(names) > _MOST_NAMED)}." if names else ""
    observed, names = result["scores"].get(OBSERVED), list(result.get("classes", ()))
    said = f"The event is {result['event']!r}, the second class: {shown(OBSERVED, observed)} of {result['test_rows']:,} test rows."
    if observed is None or observed <= 0.5 or len(names) != 2:
        return said
    turned = json.dumps(names[::-1], ensure_ascii=False)
    return f"{said} If the rarer {names[0]!r} is the event that you mean, name it second: --set 'data.classes={turned}'."


def units_of(result: Mapping[str, Any]) -> str:
    """Return what intervals draw with replacement."""
    return "persons, each with all its rows" if result.get("resampled") == "persons" else "rows"


def untold_labels(result: Mapping[str, Any]) -> str:
    """Return why F1 is 0 where a model of several labels tells none of them; nothing elsewhere."""
    scores = result.get("scores", {})
    if EXACT_MATCH not in scores or scores.get(MACRO_F1) != 0:
        return ""
    return f"{MACRO_F1} is 0: it counts a label as told from a probability of 0.5 on, and no row that has a label reached that for it."


def no_slope(result: Mapping[str, Any]) -> str:
    """Return why there is no calibration slope where the classes are perfectly separated; "" elsewhere."""
    scores = result.get("scores", {})
    if SLOPE not in scores or scores[SLOPE] is not None or scores.get(AUROC) not in (0, 1):
        return ""
    return f"There is no {SLOPE}: the predicted risks separate the classes perfectly, and no slope fits such rows best."


def figure_columns(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the headings of the table of figures: the model's own, and those of what it is compared with where they are known."""
    kept = (("noise_free_scores", "without noise"), ("pooled_scores", "pooled"))
    return "figure", "model", *(title for key, title in kept if result.get(key))


def figure_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table of figures, a row each."""
    references = [result[key] for key in ("noise_free_scores", "pooled_scores") if result.get(key)]
    intervals = result.get("intervals", {})
    return [
        [name, with_interval(name, value, intervals.get(name)), *(shown(name, own.get(name)) for own in references)]
        for name, value in result.get("scores", {}).items()
    ]


def site_columns(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the headings of the table of clients."""
    return "client", "test rows", *(["events"] if _has_events(result) else []), *_of_site(result)


def _has_events(result: Mapping[str, Any]) -> bool:
    """Return whether events are counted at clients: those of two classes, or of times to an event."""
    return any(site.get("events") is not None for site in result.get("sites", ()))


def _of_site(result: Mapping[str, Any]) -> list[str]:
    """Return the figures that are shown of each client: the main one, and those that tell whether its predictions are too high or low."""
    beside = (PREDICTED, OBSERVED) if result.get("event") is not None else _BESIDE_THE_MAIN_ONE
    known = {name for site in result.get("sites", ()) for name in site["scores"]}
    return [name for name in dict.fromkeys((result["metric"], *beside)) if name in known]


_BESIDE_THE_MAIN_ONE = (ACCURACY, COMMONEST, EXACT_MATCH, CLASS_ERROR, "MAE", "RMSE", INTEGRATED_BRIER)


def site_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table of clients, the worst first; "-" for a figure that a client has not, see :func:`site_notes`."""
    names, rows = _of_site(result), []
    for site in result.get("sites", ()):
        figures = [with_interval(name, site["scores"].get(name), site["intervals"].get(name)) for name in names]
        events = [f"{site['events']:,}" if site.get("events") is not None else "-"] if _has_events(result) else []
        rows.append([site["name"], f"{site['rows']:,}", *events, *figures])
    return rows


def site_spread(result: Mapping[str, Any]) -> str:
    """Return the mean of each shown figure over clients and over the worst tenth of them, as text; "" for fewer than ten clients."""
    means, names = site_means(result.get("sites", ())), _of_site(result)
    return " ".join(
        f"{name}: mean over {own.clients:,} clients {shown(name, own.mean)} (standard deviation {_deviation(name, own.deviation)}), over "
        f"the worst {own.worst_clients:,} {shown(name, own.worst)}."
        for name, own in means.items()
        if name in names
    )


def _deviation(metric: str, deviation: float) -> str:
    return f"{100 * deviation:.2f} points" if _is_share(metric) else f"{deviation:.4g}"


def site_notes(result: Mapping[str, Any]) -> str:
    """Return which clients lack figures, and why, in a sentence; empty if none does."""
    names: dict[str, list[str]] = {}
    for site in result.get("sites", ()):
        names.setdefault(site["note"], []).append(site["name"])
    names.pop("", None)
    reasons = [f"{listed(own)} ({reason})" for reason, own in names.items()]
    return f"Without {result['metric']}: {'; '.join(reasons)}." if reasons else ""


def listed(names: Sequence[str]) -> str:
    """Return the first ``names``, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def intervals_said(result: Mapping[str, Any]) -> str:
    """Return what the intervals of figures are, and why some have none, in a sentence or two."""
    drawn = any(not name.endswith(MEASURED_AT_CLIENTS) for name in result.get("intervals", ()))
    said = f"Intervals: 95 %, by a bootstrap over test {units_of(result)}." if drawn else ""
    few = result.get("intervals_note")
    without = f"{'Some figures have no interval' if said else 'No intervals'}: {few}." if few else ""
    return " ".join(filter(None, (said, without)))


def clipped_records(result: Mapping[str, Any]) -> str:
    """Return how many records' gradients were clipped, first and last; nothing where only clients know it."""
    shares = [share for share in result.get("clipped_records_per_round") or () if share is not None]
    if not shares:
        return ""
    return f"{shares[0]:.1%} in the first round, {shares[-1]:.1%} in the last (known to a simulation only)"
