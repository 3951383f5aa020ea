"""Tables of figures that clients measured on held-back records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ldpfl.report.scores import format_score, with_interval
from ldpfl.tasks.weighted_metrics import DEVIANCE
from ldpfl.util.number_format import counted

COLUMNS = ("figure", "measured at clients", "deviation by noise", "deviation by sample")


def how_measured(result: Mapping[str, Any]) -> str:
    """Return a sentence that says how the figures were measured; empty if there are no figures."""
    last = _last_evaluation(result)
    if not last:
        return ""
    unit = _counted_unit(result)
    held_back = "records that they hold back from training"
    # `records` counts what `unit` names.
    if unit == "person":
        where = f"on {counted(last['records'], unit)}, all of whose records are held back from training"
    elif unit == "client":
        where = f"by {last['records']:,} clients, each of which counts once, on {held_back}"
    else:
        where = f"on {last['records']:,} {held_back}"
    return (
        f"Measured at clients after round {last['round']:,}, {where}. The figures are released with noise, and the guarantee covers them. "
        f"The 95 % intervals allow for the noise and for the limited number of {unit}s.{_sentence_on_clusters(unit)}"
        f"{_sentence_on_count(last, unit)}{sentence_on_loss(result)}{_sentence_on_auroc(last)}"
    )


def _last_evaluation(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures that clients measured last; empty if they measured none."""
    evaluations = result.get("at_clients")
    return evaluations[-1] if evaluations else {}


def _sentence_on_clusters(unit: str) -> str:
    """Return a sentence on the assumption behind the intervals if a client has several ``unit``s; empty if a unit is a client."""
    return "" if unit == "client" else f" They take {unit}s as independent, so they are too narrow if scores differ from client to client."


def _sentence_on_auroc(last: Mapping[str, Any]) -> str:
    """Return a sentence on why the AUROC is left out of the ``last`` evaluation; empty if it is not left out."""
    if last.get("rare_class"):
        return " The AUROC is left out: the held-back records of one class are too few to be seen above the noise."
    error_by_bins = last.get("binning")
    if error_by_bins is None:
        return ""
    return f" The AUROC is left out: most scores lie in the same few bins, so it could be {error_by_bins:.2f} off; more rounds spread them."


def sentence_on_loss(result: Mapping[str, Any]) -> str:
    """Return a sentence on the unit of the loss of a number or a count; empty for other targets."""
    spread = _last_evaluation(result).get("target_spread")
    if spread is None:
        return ""
    if result.get("metric") == DEVIANCE:
        return f" The loss of a count is half its deviance, in units of the spread {spread:.4g}."
    return (
        f" The loss of a number is its squared error in units of {spread:.4g} squared: the measured spread, no standard deviation. A good "
        "constant prediction has a loss of about 1 if the spread was measured well."
    )


def _counted_unit(result: Mapping[str, Any]) -> str:
    """Return the unit that counts once in the last evaluation at clients: record, person or client.

    The evaluation says "record" also if the guarantee protects persons; each person then counts once.
    """
    unit = str(_last_evaluation(result).get("unit", "record"))
    protected = {row["unit"] for row in result.get("privacy", {}).get("guarantees", ())}
    return "person" if unit == "record" and "person" in protected else unit


def _sentence_on_count(last: Mapping[str, Any], unit: str) -> str:
    """Return sentences on the number of ``unit``s and its noisy estimate. They are empty unless the run's terms state the number."""
    if not last.get("stated"):
        return ""
    estimate_sentence = ""
    if last.get("counted"):
        count, low, high = last["counted"]
        estimate_sentence = f" By the released sum itself, {count:,.0f} ({low:,.0f} to {high:,.0f}) {unit}s gave an answer."
    return f" The run's terms state the number of {unit}s, by which the sums are divided; clients do not send their own.{estimate_sentence}"


def figure_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of a row, under the headings :data:`COLUMNS`, for each figure that clients measured."""
    for name, figure in _last_evaluation(result).get("figures", {}).items():
        interval = (figure["low"], figure["high"])
        noise, sampling = format_score(name, figure["noise"]), format_score(name, figure["sampling"])
        yield [name, with_interval(name, figure["value"], interval), noise, sampling]


def confusion_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the confusion matrix, with one row for each observed class; empty if there is no matrix."""
    matrix = _last_evaluation(result).get("confusion", [])
    names = _class_names(result, len(matrix))
    return [[name, *(f"{count:,.0f}" for count in row)] for name, row in zip(names, matrix, strict=True)]


def confusion_columns(result: Mapping[str, Any]) -> list[str]:
    """Return the headings of the confusion matrix, with one column for each predicted class; empty if there is no matrix."""
    class_names = [name for name, *_ in confusion_rows(result)]
    return ["", *class_names] if class_names else []


def _class_names(result: Mapping[str, Any], count: int) -> list[str]:
    """Return the names of ``count`` classes. If the run names another number of classes, or none, return their indices."""
    names = list(result.get("classes", ()))
    return names if len(names) == count else [str(index) for index in range(count)]


def confusion_caption(result: Mapping[str, Any]) -> str:
    """Return the text above the confusion matrix; empty if there is no matrix."""
    noise = _last_evaluation(result).get("confusion_noise")
    if noise is None:
        return ""
    unit = "Persons" if _counted_unit(result) == "person" else "Records"
    return f"{unit} by their class (rows) and the class that the model predicts (columns), each with noise of {noise:.3g}."


def bin_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the cells of a row for each bin of scores: predicted share, observed share with interval, and records.

    Bins whose count does not exceed the noise are not among the figures that clients release.
    """
    for bin_ in _last_evaluation(result).get("calibration", ()):
        observed = f"{bin_['observed']:.1%} ({100 * bin_['low']:.1f} to {100 * bin_['high']:.1f})"
        yield [f"{bin_['predicted']:.1%}", observed, f"{bin_['rows']:,}"]
