"""Add the figures that clients measured on their held-back records to a run's result."""

from __future__ import annotations

from typing import Any

from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.record_sums import evaluations
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.simulation import Federation
from ldpfl.simulation.evaluating import ClientFigures, RecordScores
from ldpfl.simulation.evaluating_clients import ClientScores
from ldpfl.tasks.weighted_metrics import MEASURED_AT_CLIENTS


def at_clients(federation: Federation, history: tuple[RoundMetrics, ...]) -> list[dict[str, Any]]:
    """Return the figures of each round after which clients measured the model: each one's value, its deviations and 95 % interval."""
    if federation.judged is None:
        return []
    scores = federation.judged.vectors
    return [told(scores, metrics.round, metrics.at_clients) for metrics in history if metrics.at_clients is not None]


def lost_evaluations(config: RunConfig, last: Checkpoint) -> list[int]:
    """Return the rounds whose evaluation at clients was charged and brought no figures."""
    charged = sum(event.histograms for event in last.ledger.events) - last.ledger.measured
    with_figures = {metrics.round for metrics in last.history if metrics.at_clients is not None}
    return [number for number in evaluations(config)[:charged] if number not in with_figures] if charged else []


def told(scores: RecordScores, number: int, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of what clients ``measured`` after round ``number``."""
    found = ClientFigures.of(scores, measured)
    figures = {}
    for name, figure in found.all().items():
        low, high = figure.interval
        figures[name] = {"value": figure.value, "noise": figure.noise, "sampling": figure.records, "low": low, "high": high}
    result = {"round": number, "records": found.records, "figures": figures, "calibration": found.calibration()}
    if isinstance(scores, ClientScores):
        result["unit"] = "client"
    if measured["stated"]:
        result["stated"] = True
        if (counted := found.counted()) is not None:
            result["counted"] = [counted.value, *counted.interval]
    if (confusion := found.confusion()) is not None:
        result |= {"confusion": confusion[0].tolist(), "confusion_noise": confusion[1]}
    return result


def added_to(judged: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    """Add the last of the ``measured`` figures to the scores and intervals of ``judged``, named as what clients measured."""
    if not measured:
        return
    figures = measured[-1]["figures"]
    named = {f"{name}{MEASURED_AT_CLIENTS}": figure for name, figure in figures.items()}
    judged["scores"] = {**judged["scores"], **{name: figure["value"] for name, figure in named.items()}}
    judged["intervals"] = {**judged.get("intervals", {}), **{name: [figure["low"], figure["high"]] for name, figure in named.items()}}
