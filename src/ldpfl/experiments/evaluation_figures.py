"""Add the figures that clients measured on their held-back records to a run's result."""

from __future__ import annotations

from typing import Any

from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.record_sums import rounds_evaluated_at_clients
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.simulation import Federation
from ldpfl.simulation.evaluating_records import ClientFigures, RecordScores
from ldpfl.simulation.evaluating_whole_clients import ClientScores
from ldpfl.tasks.weighted_metrics import MEASURED_AT_CLIENTS


def client_evaluation_entries(federation: Federation, history: tuple[RoundMetrics, ...]) -> list[dict[str, Any]]:
    """Return an entry of ``result.json`` for each round after which clients measured the model.

    An entry has each figure's value, deviations and 95 % interval. For numeric targets it also has the target's spread, since the model
    predicts in units of the spread.
    """
    if federation.judged is None:  # the run has no evaluation at clients
        return []
    vectors, encoder = federation.judged.vectors, federation.encoder
    entries = [client_evaluation_entry(vectors, metrics.round, metrics.at_clients) for metrics in history if metrics.at_clients is not None]
    if vectors.kind in ("number", "count") and encoder is not None:
        entries = [{**entry, "target_spread": encoder.target_spread} for entry in entries]
    return entries


def lost_evaluations(config: RunConfig, checkpoint: Checkpoint) -> list[int]:
    """Return the rounds after which an evaluation at clients was charged to the ledger but gave no figures."""
    # The first histograms in a ledger measured the columns; each later one is an evaluation.
    charged = sum(event.histograms for event in checkpoint.ledger.events) - checkpoint.ledger.measured
    with_figures = {metrics.round for metrics in checkpoint.history if metrics.at_clients is not None}
    # Evaluations are charged in the order of their rounds, so the first ones were charged.
    return [number for number in rounds_evaluated_at_clients(config)[:charged] if number not in with_figures] if charged else []


def client_evaluation_entry(scores: RecordScores, number: int, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of ``result.json`` for what the clients ``measured`` after round ``number``.

    Keys from "binning" on are only in entries that they concern.

    Args:
        scores: layout of the noisy sums in ``measured``.
        measured: ``RoundMetrics.at_clients``: the sums, their noise, the number of records, and ``stated``. If that is True, the number
            of records was agreed on before the round, and the entry also has the number that the clients counted under noise.
    """
    client_figures = ClientFigures.of(scores, measured)
    entries = {}
    for name, figure in client_figures.all().items():
        low, high = figure.interval
        # ``noise`` and ``sampling`` are the standard deviations by the added noise, and by the choice of records.
        entries[name] = {"value": figure.value, "noise": figure.noise, "sampling": figure.sampling, "low": low, "high": high}
    result = {"round": number, "records": client_figures.records, "figures": entries, "calibration": client_figures.calibration()}
    # Two reasons why the AUROC is not shown: scores were binned too coarsely, or one of two classes is rare.
    if (ties := client_figures.too_many_ties()) is not None:
        result["binning"] = ties
    if client_figures.has_a_rare_class():
        result["rare_class"] = True
    if isinstance(scores, ClientScores):
        result["unit"] = "client"  # figures are means over clients, not over records
    if measured["stated"]:
        result["stated"] = True
        if (counted := client_figures.counted()) is not None:
            result["counted"] = [counted.value, *counted.interval]
    if (confusion := client_figures.confusion()) is not None:
        matrix, noise = confusion
        result |= {"confusion": matrix.tolist(), "confusion_noise": noise}
    return result


def add_figures_of_clients(entries: dict[str, Any], measured: list[dict[str, Any]]) -> None:
    """Add the figures of the last evaluation at clients to the scores and intervals in ``entries``, in place.

    ``measured`` are the entries of :func:`client_evaluation_entries`. The names of the added figures end with
    :data:`~ldpfl.tasks.weighted_metrics.MEASURED_AT_CLIENTS`, since other scores are of the test rows.
    """
    if not measured:
        return
    figures = measured[-1]["figures"]
    by_new_name = {f"{name}{MEASURED_AT_CLIENTS}": figure for name, figure in figures.items()}
    entries["scores"] = {**entries["scores"], **{name: figure["value"] for name, figure in by_new_name.items()}}
    entries["intervals"] = {
        **entries.get("intervals", {}),
        **{name: [figure["low"], figure["high"]] for name, figure in by_new_name.items()},
    }
