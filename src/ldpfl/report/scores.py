"""Format the figures by which models are judged: shares in per cent, other figures as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from ldpfl.data.holding_out import scored_part
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

_SHARE_METRICS = (ACCURACY, COMMONEST, PREDICTED, OBSERVED)
_MAX_NAMED = 10  # classes or clients that a sentence names
_SHARE_METRICS_AT_THRESHOLDS = (SENSITIVITY, SPECIFICITY, PPV)


def seed_text(result: Mapping[str, Any]) -> str:
    """Return the run's seed for a title; "" if it is secret. The noise on a user's own data does not follow from a "public seed"."""
    if result.get("seed_is_secret"):
        return ""
    return f", {'public ' if result.get('own_data') else ''}seed {result['seed']}"


def part_of(result: Mapping[str, Any]) -> str:
    """Return the word for the rows that the scores of a ``result`` are of: "test" or "holdout"."""
    return scored_part(result.get("evaluated_on", "test"))


def _is_share(metric: str) -> bool:
    """Whether scores of this metric are shares, which are shown in per cent."""
    metric = metric.removesuffix(MEASURED_AT_CLIENTS)
    return metric in _SHARE_METRICS or metric.startswith(tuple(f"{name} at " for name in _SHARE_METRICS_AT_THRESHOLDS))


def display_factor(metric: str) -> float:
    """Return the factor by which a score of this metric is multiplied for display without a unit: 100 for shares, which are in per cent."""
    return 100.0 if _is_share(metric) else 1.0


def chosen_settings(result: Mapping[str, Any]) -> str:
    """Return the settings that ``auto`` chose, as in a config; empty if it chose none."""
    return ", ".join(f"{name} = {value:.3g}" for name, value in result.get("chosen", {}).items())


def clients_a_round(result: Mapping[str, Any]) -> str:
    """Return ", N a round", or the range over rounds if it differs; empty if all clients took part in each round."""
    fewest, most = result["clients_in_rounds"]
    if fewest == most == result["clients"]:
        return ""
    return f", {fewest:,} a round" if fewest == most else f", {fewest:,} to {most:,} a round"


def metric_heading(metric: str) -> str:
    """Return the heading above figures of this metric, with their unit."""
    return f"{metric} %" if _is_share(metric) else metric


def format_score(metric: str, score: float | None) -> str:
    """Return a score with its unit; "-" if it is not known."""
    if score is None or not isfinite(score):
        return "-"
    return f"{score:.2%}" if _is_share(metric) else f"{score:.4g}"


def with_interval(metric: str, score: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a score with its 95 % interval, if it has one."""
    if interval is None or None in interval or score is None:
        return format_score(metric, score)
    low, high = (display_factor(metric) * float(end or 0.0) for end in interval)
    # With "#", zeros at the end are kept, so that both ends have three digits.
    number_format = ".1f" if _is_share(metric) else "#.3g" if max(abs(low), abs(high)) < 100 else ".4g"
    return f"{format_score(metric, score)} ({low:{number_format}} to {high:{number_format}})"


def score_change(metric: str, without: float, score: float, cause: str = "noise") -> str:
    """Return by how much ``cause`` changes a score from its value ``without`` the cause, as a part of a sentence."""
    if _is_share(metric):
        points = 100 * (without - score)
        return f"{cause} costs {points:.2f} points" if points >= 0 else f"without {cause} {-points:.2f} points worse"
    return f"with {cause} {score - without:+.4g}"


def event_sentence(result: Mapping[str, Any]) -> str:
    """Return sentences on which of two classes is the event and how often it occurs; for more classes, a sentence with their names."""
    names = list(result.get("classes", ()))
    if result.get("event") is None:
        more = ", ..." if len(names) > _MAX_NAMED else ""
        return f"The classes are {', '.join(names[:_MAX_NAMED])}{more}." if names else ""
    observed = result["scores"].get(OBSERVED)
    sentence = (
        f"The event is {result['event']!r}, the second class: {format_score(OBSERVED, observed)} of {result['test_rows']:,} "
        f"{part_of(result)} rows."
    )
    if observed is None or observed <= 0.5 or len(names) != 2:
        return sentence
    reversed_names = json.dumps(names[::-1], ensure_ascii=False)
    return f"{sentence} If the rarer {names[0]!r} is the event that you mean, name it second: --set 'data.classes={reversed_names}'."


def resampled_units(result: Mapping[str, Any]) -> str:
    """Return the units that the intervals' bootstrap draws with replacement."""
    return "persons, each with all its rows" if result.get("resampled") == "persons" else "rows"


def no_score_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on why a run has no score because nobody measured one, as may happen on Flower; otherwise an empty text."""
    if result["score"] is not None or result.get("at_clients") or result.get("test_rows"):
        return ""
    return "Nobody scored the model: the server had no test rows (data.test_path), and no client measured it (evaluation.epsilon)."


def zero_f1_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on why F1 is 0 if a model of several labels predicts none of them; otherwise an empty text."""
    scores = result.get("scores", {})
    if EXACT_MATCH not in scores or scores.get(MACRO_F1) != 0:
        return ""
    return f"{MACRO_F1} is 0: a label is predicted from a probability of 0.5 on, and no row that has a label reached this probability."


def horizon_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on the time over which predicted survival is scored; empty if none was, as for test rows without events."""
    end = result.get("horizon")
    if end is None or not isfinite(end):  # None once the result has been read from its file
        return ""
    events = f"nine tenths of the {part_of(result)} rows' events"
    return f"The {INTEGRATED_BRIER} covers times from 0 to {end:.4g}, by which {events} have happened."


def no_slope_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on why there is no calibration slope if the classes are perfectly separated; otherwise an empty text."""
    scores = result.get("scores", {})
    if SLOPE not in scores or scores[SLOPE] is not None or scores.get(AUROC) not in (0, 1):
        return ""
    return f"There is no {SLOPE}: the predicted risks separate the classes perfectly, and no slope fits such rows best."


def figure_columns(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the headings of the table of figures: the model's own figures, and those of each known reference."""
    references = (("noise_free_scores", "without noise"), ("pooled_scores", "pooled"))
    return "figure", "model", *(title for key, title in references if result.get(key))


def figure_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table of figures, one row for each figure."""
    references = [result[key] for key in ("noise_free_scores", "pooled_scores") if result.get(key)]
    intervals = result.get("intervals", {})
    return [
        [name, with_interval(name, value, intervals.get(name)), *(format_score(name, scores.get(name)) for scores in references)]
        for name, value in result.get("scores", {}).items()
    ]


def site_columns(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the headings of the table of clients."""
    return "client", f"{part_of(result)} rows", *(["events"] if _has_events(result) else []), *_site_figures(result)


def _has_events(result: Mapping[str, Any]) -> bool:
    """Whether events are counted at clients: for two classes, or for times to an event."""
    return any(site.get("events") is not None for site in result.get("sites", ()))


def _site_figures(result: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures in the table of clients: the main score, and further ones that show, say, too high predictions."""
    further = (PREDICTED, OBSERVED) if result.get("event") is not None else _FURTHER_SITE_FIGURES
    known = {name for site in result.get("sites", ()) for name in site["scores"]}
    return [name for name in dict.fromkeys((result["metric"], *further)) if name in known]


_FURTHER_SITE_FIGURES = (ACCURACY, COMMONEST, EXACT_MATCH, CLASS_ERROR, "MAE", "RMSE", INTEGRATED_BRIER)


def site_heading(result: Mapping[str, Any]) -> str:
    """Return the heading of the table of clients. They are sorted by the main score, if any client has it."""
    are_sorted = any(site["scores"].get(result["metric"]) is not None for site in result.get("sites", ()))
    return "By client, the worst first" if are_sorted else "By client"


def site_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the table of clients, the worst first; "-" for a figure that a client lacks, see :func:`site_notes`."""
    names = _site_figures(result)
    rows = []
    for site in result.get("sites", ()):
        figures = [with_interval(name, site["scores"].get(name), site["intervals"].get(name)) for name in names]
        events = [f"{site['events']:,}" if site.get("events") is not None else "-"] if _has_events(result) else []
        rows.append([site["name"], f"{site['rows']:,}", *events, *figures])
    return rows


def site_spread(result: Mapping[str, Any]) -> str:
    """Return the mean of each shown figure over clients and over the worst tenth of them, as text; "" for fewer than ten clients."""
    means, names = site_means(result.get("sites", ())), _site_figures(result)
    return " ".join(
        f"{name}: mean over {summary.clients:,} clients {format_score(name, summary.mean)} (standard deviation "
        f"{_deviation(name, summary.deviation)}), over the worst {summary.worst_clients:,} {format_score(name, summary.worst)}."
        for name, summary in means.items()
        if name in names
    )


def _deviation(metric: str, deviation: float) -> str:
    """Format the standard deviation of a score: for shares in percentage points."""
    return f"{100 * deviation:.2f} points" if _is_share(metric) else f"{deviation:.4g}"


def site_notes(result: Mapping[str, Any]) -> str:
    """Return a sentence on which clients lack the main figure, and why; empty if no client does.

    A client's note may also be about figures that the table of clients does not show, such as the AUROC of several classes.
    """
    names: dict[str, list[str]] = {}
    for site in result.get("sites", ()):
        if site["note"] and site["scores"].get(result["metric"]) is None:
            names.setdefault(site["note"], []).append(site["name"])
    reasons = [f"{listed(clients)} ({reason})" for reason, clients in names.items()]
    return f"Without {result['metric']}: {'; '.join(reasons)}." if reasons else ""


def listed(names: Sequence[str]) -> str:
    """Return the first ``names`` as text, and the number of further ones."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def intervals_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on how intervals were computed, and one on why some figures have none."""
    any_bootstrap = any(not name.endswith(MEASURED_AT_CLIENTS) for name in result.get("intervals", ()))
    sentence = (
        f"Intervals: 95 %, Wilson's for shares of rows, else by a bootstrap over {part_of(result)} {resampled_units(result)}."
        if any_bootstrap
        else ""
    )
    reason = result.get("intervals_note")
    missing = f"{'Some figures have no interval' if sentence else 'No intervals'}: {reason}." if reason else ""
    return " ".join(filter(None, (sentence, missing)))


def noise_unit_sentence(result: Mapping[str, Any]) -> str:
    """Return a sentence on the unit of the noise in the mean. Empty if the noise has the unit of the weights or gradients."""
    return "Noise is in multiples of the clipping norm (mechanism.clip_norm)." if result["mechanism"] == "dp-sgd" else ""


def clipped_records(result: Mapping[str, Any]) -> str:
    """Return the shares of gradients (of records or persons) clipped in the first and last round; empty if only clients know them."""
    shares = [share for share in result.get("clipped_records_per_round") or () if share is not None]
    if not shares:
        return ""
    return f"{shares[0]:.1%} in the first round, {shares[-1]:.1%} in the last (known only in a simulation)"
