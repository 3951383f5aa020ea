"""HTML page about runs: a single file that needs no network and no script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.figures import as_released
from ldpfl.experiments.public_figures import scores_are_public, without_private_figures
from ldpfl.experiments.run_folder import TRIAL, Kind, RunFolder
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import account, run_epsilon
from ldpfl.privacy.events import Channel
from ldpfl.privacy.guarantee import Statement, worth_of
from ldpfl.report import client_figures
from ldpfl.report.methods import bibtex, methods
from ldpfl.report.plots import plot_calibration, plot_protection, plot_risks, plot_scores, plot_spent
from ldpfl.report.rendering import guarantee_values, inline, rendered
from ldpfl.report.scores import (
    chosen_settings,
    clients_a_round,
    clipped_records,
    event_sentence,
    figure_columns,
    figure_rows,
    format_score,
    horizon_sentence,
    intervals_sentence,
    no_slope_sentence,
    noise_unit_sentence,
    part_of,
    score_change,
    site_columns,
    site_heading,
    site_notes,
    site_rows,
    site_spread,
    with_interval,
    zero_f1_sentence,
)
from ldpfl.report.terminal_tables import POOLED
from ldpfl.report.unfinished import figures_so_far, progress_sentence
from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import COMMONEST
from ldpfl.util.files import from_json_lines, read_text
from ldpfl.util.number_format import NO_EPSILON, counted, epsilon_text
from ldpfl.util.user_code import public_name

_MAX_COMPARED = 8
"""Maximum number of figures in the comparison of runs. Each run's own table has all of them."""

_SPENT_POINTS = 8
"""Number of rounds for which the epsilon so far is computed: each takes up to some seconds."""


def page(folders: Sequence[Path], *, refresh_s: int = 0, public: bool = False, metric: str = "") -> str:
    """Return the page of the runs in ``folders``. A run that is not finished is shown as far as it has come.

    Privacy figures are computed from the ledgers, as ``ldpfl show`` does. Those in a result's file are not used.

    Args:
        refresh_s: seconds after which a browser reloads the page while a run goes on; 0 for never.
        public: whether to leave out everything that the guarantee does not cover, see :mod:`ldpfl.experiments.public_figures`.
        metric: name of the main metric of runs that are not finished, if it is known.

    Raises:
        ConfigError: there is no run, or a run has no finished round.
        DataError: a file is damaged.
    """
    runs = [_run_values(RunFolder(folder), public=public, metric=metric) for folder in folders]
    names = [run["name"] for run in runs]
    metrics = list(dict.fromkeys(name for run in runs for name in run["scores"]))[:_MAX_COMPARED]
    for run, folder in zip(runs, folders, strict=True):
        run["label"] = run["name"] if names.count(run["name"]) == 1 else f"{run['name']} in {folder.resolve().name}"
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    return rendered(
        "runs.html", title=title, runs=runs, metrics=metrics, refresh_s=refresh_s if any(run["progress"] for run in runs) else 0
    )


def _compared_scores(result: dict[str, Any]) -> dict[str, float | None]:
    """Return the scores by which runs are compared, first the score that each round has; empty if the last round has no score."""
    scores = {result["metric"]: result["score"], **result.get("scores", {})}
    return {} if result["score"] is None else scores


@dataclass(frozen=True)
class _Figure:
    """A figure at the head of a page; ``more`` is text below it."""

    name: str
    value: str
    more: str = ""


def _run_values(folder: RunFolder, *, public: bool, metric: str) -> dict[str, Any]:
    """Return the values for the template of a run's page. ``metric`` names the main metric of an unfinished run, if it is known."""
    config, stored, kind = folder.config(), folder.result(), folder.kind()
    is_finished = stored is not None
    figures = figures_so_far(folder, config, metric) if stored is None else stored
    progress = "" if is_finished else progress_sentence(folder, config, figures["rounds"])
    if public:
        figures = without_private_figures(config, figures)
    ledger = folder.ledger()  # after the figures, so that it has all of their rounds
    if kind.on_flower:  # the config has only the planned number of clients, or no number for a user's own app
        figures["clients"] = max(event.population for event in ledger.events)
        if len(ledger.events) > figures["rounds"]:
            progress += (
                f" Round {ledger.events[-1].round:,} has begun. The privacy figures count it, because its reports may have been sent."
            )
    statement = account(ledger, config.privacy.delta)
    if folder.is_trial:
        statement = replace(statement, warnings=(TRIAL, *statement.warnings))
    result = as_released(figures, ledger, statement) | {"mechanism": config.mechanism.name}
    best = statement.best
    protects = config.mechanism.protects
    return {
        "name": result["name"],
        "progress": progress,
        "left_out": _left_out_sentence(config) if public else "",
        "scores": {name: format_score(name, value) for name, value in _compared_scores(result).items()},
        "baseline": format_score(result["metric"], result["noise_free_score"]) if result["noise_free_score"] is not None else "",
        "epsilon": epsilon_text(best.epsilon) if best else NO_EPSILON,
        "bytes": f"{result['uplink_bytes_per_client_round']:,}",
        "sentence": _summary_sentence(config, result, kind),
        "verdict": statement.verdict if protects and best else "Nothing is protected: values leave as they are.",
        "worth": worth_of(best.epsilon) if best else "bad",
        "figures": list(_main_figures(result, statement)),
        "scale_note": "" if best and isfinite(best.epsilon) else "No epsilon is known here.",
        "protection": inline(lambda axes: plot_protection(axes, statement), (6.2, 1.9)),
        **guarantee_values(statement, result.get("caveats", ())),
        "metric": result["metric"],
        "curve": inline(lambda axes: plot_scores(axes, result), (7.2, 3.6))
        if any(score is not None for score in result["score_per_round"])
        else "",
        "rounds": list(_round_rows(result)),
        "spent": _spent_plot(ledger, statement),
        "measuring": _measuring_sentence(ledger, result["rounds"]),
        **_quality_values(result),
        "noise_unit": noise_unit_sentence(result),
        "ranged": any(layer["radius"] is not None for layer in result["layers"].values()),
        "layers": list(_layer_values(folder, result, public=public)),
        "environment": list(_environment_facts(config, result, kind, ledger)),
        "config": _config_text(folder, hide_seed=config.hides_seed, hide_paths=public),
        "methods": methods(config, result, ledger, statement, kind) if is_finished and not folder.is_trial else "",
        "citation": bibtex(result["name"]),
    }


def _config_text(folder: RunFolder, *, hide_seed: bool, hide_paths: bool) -> str:
    """Return the text of the config in the folder, without the seed and without this machine's paths if they must be hidden."""
    text = read_text(folder.config_path)
    hidden_keys = (["seed"] if hide_seed else []) + (["path", "test_path"] if hide_paths else [])
    for key in hidden_keys:
        text = re.sub(rf"^{key} = .*$", f"# {key}: in the run's folder", text, count=1, flags=re.MULTILINE)
    # Names of models and data may contain a path, too.
    return _QUOTED.sub(lambda quoted: f'"{public_name(quoted[1])}{quoted[2]}', text) if hide_paths else text


_QUOTED = re.compile(r'"((?:[^"\\\n]++|\\.)*+)("?)')
"""Matches a string of TOML, closed or not, so that each character is read once."""


def _left_out_sentence(config: RunConfig) -> str:
    """Return the sentence of a public page that says what was left out."""
    figures = "the noise-free baseline, how much was clipped, and times"
    if scores_are_public(config):
        return f"Left out, because the guarantee does not cover it: {figures}. Scores were measured on the public test split."
    scores = "scores, which were measured on rows that are not protected"
    return f"Left out, because the guarantee does not cover it: {scores}; {figures}."


def _summary_sentence(config: RunConfig, result: dict[str, Any], kind: Kind) -> str:
    """Return the sentence that sums up a run: model, data, score, rounds, clients and mechanism."""
    data = "its own table" if config.data.brought else public_name(config.data.name)
    score_text = f": {format_score(result['metric'], result['score'])} {result['metric']} ({result['evaluated_on']})"
    training = f"{public_name(config.model.name)} on {data}{score_text if result['score'] is not None else ''}"
    if kind is Kind.OWN_APP:  # the config does not name its model and data
        score_text = "" if result["score"] is None else f": a score of {result['score']:.4g}"
        training = f"An {kind}{score_text}"
    rounds, clients = counted(result["rounds"], "round"), counted(result["clients"], "client")
    return f"{training} after {rounds} with {clients}{clients_a_round(result)}, by {result['mechanism']}."


def _main_figures(result: dict[str, Any], statement: Statement) -> Iterator[_Figure]:
    """Yield the figures at the head of the page: scores, the whole run's epsilons, and bytes sent."""
    metric, score, baseline = result["metric"], result["score"], result["noise_free_score"]
    if score is not None:
        interval = result.get("intervals", {}).get(metric)
        # Only the interval is taken from the text "value (low to high)".
        interval_text = "" if interval is None else f", {with_interval(metric, score, interval).partition(' (')[2].rstrip(')')}"
        yield _Figure(metric, format_score(metric, score), f"on {result['evaluated_on']} data{interval_text}")
    if result.get("scores", {}).get(COMMONEST) is not None:
        commonest = format_score(COMMONEST, result["scores"][COMMONEST])
        if metric == ACCURACY:
            yield _Figure("commonest class", commonest, "accuracy of always saying it")
        elif result["scores"][COMMONEST] <= _MAX_COMMONEST:  # else the accuracy is high whatever the model has learnt
            yield _Figure(ACCURACY, format_score(ACCURACY, result["scores"][ACCURACY]), f"{commonest} by always saying the commonest class")
    if baseline is not None:
        yield _Figure("without noise", format_score(metric, baseline), score_change(metric, baseline, score) if score is not None else "")
    for trust, name in (("hidden", "epsilon, if the others hide it"), ("local", "epsilon, trusting nobody")):
        row = statement.find(trust, "run")
        if row is not None:
            yield _Figure(name, epsilon_text(row.epsilon), f"whole run, delta {row.delta:g}")
    size = result["uplink_bytes_per_client_round"]
    yield _Figure("sent by a client", f"{size:,} bytes", f"a round, for {result['weights']:,} weights")


_MAX_COMMONEST = 0.9
"""Share of the commonest of two classes above which the head of the page does not show the accuracy."""


def _round_rows(result: dict[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the rows of the table below the score curve: each round's number, its score, and the score without noise."""
    scores = result["score_per_round"]
    baselines = result.get("noise_free_score_per_round") or [None] * len(scores)
    for number, (score, baseline) in enumerate(zip_longest(scores, baselines), start=1):
        yield number, format_score(result["metric"], score), format_score(result["metric"], baseline)


def _spent_plot(ledger: Ledger, statement: Statement) -> Markup | str:
    """Return a plot of the cumulative epsilon after some of the rounds; empty if no epsilon is known, or there is only one round."""
    best, count = statement.best, len(ledger.events)
    if best is None or not isfinite(best.epsilon) or count < 2:
        return ""
    # Evenly spread numbers of rounds, up to all of them. With few rounds, several are equal.
    round_counts = sorted({max(1, round(count * point / _SPENT_POINTS)) for point in range(1, _SPENT_POINTS + 1)})
    points = [(ledger.events[rounds - 1].round, run_epsilon(Ledger(ledger.events[:rounds]), statement.delta)) for rounds in round_counts]
    measuring = ledger.measured
    return inline(lambda axes: plot_spent(axes, points, measuring), (6.2, 2.6))


def _measuring_sentence(ledger: Ledger, rounds: int) -> str:
    """Return sentences on releases other than training: rounds that measured columns, and evaluations at clients; empty if none."""
    measured = ledger.measured
    evaluations = sum(event.histograms for event in ledger.events) - measured  # both kinds of measurements release histograms
    sentences = [f"{counted(measured, 'round')} of measuring, then {rounds} of training."] if measured else []
    sentences += [f"{evaluations} of the charged releases are measurements of the model at clients."] if evaluations else []
    return " ".join(sentences)


def _quality_values(result: dict[str, Any]) -> dict[str, Any]:
    """Return the page's values on the model's quality: figures with intervals, clients, calibration."""
    predicts_risks = result.get("event") is not None
    calibration = _CALIBRATION if predicts_risks else _PREDICTED
    sentences = (event_sentence(result), zero_f1_sentence(result), no_slope_sentence(result), horizon_sentence(result))
    return {
        "quality": figure_rows(result) if len(result.get("scores", {})) > 1 else [],
        "part": part_of(result),
        "quality_columns": figure_columns(result),
        "event": " ".join(filter(None, sentences)),
        "pooled": POOLED if result.get("pooled_scores") else "",
        "intervals": intervals_sentence(result),
        "at_clients": client_figures.how_measured(result),
        "at_clients_columns": client_figures.COLUMNS,
        "at_clients_rows": list(client_figures.figure_rows(result)),
        "confusion": client_figures.confusion_rows(result),
        "confusion_columns": client_figures.confusion_columns(result),
        "confusion_said": client_figures.confusion_caption(result),
        "bins": list(client_figures.bin_rows(result)),
        "sites": site_rows(result),
        "site_columns": site_columns(result),
        "site_heading": site_heading(result),
        "site_notes": " ".join(filter(None, (site_spread(result), site_notes(result)))),
        "calibration": inline(lambda axes: plot_calibration(axes, result), (4.6, 3.6)) if result.get("calibration") else "",
        "calibration_said": f"What was observed against what was predicted, for each tenth of the {part_of(result)} rows{calibration}",
        "tenths": [[f"{tenth['rows']:,}", *(f"{tenth[name]:.4g}" for name in _TENTH_COLUMNS)] for tenth in result.get("calibration", ())],
        "risks": inline(lambda axes: plot_risks(axes, result), (4.6, 2.4)) if result.get("risks") else "",
        "risk_rows": list(_risk_rows(result)),
    }


_TENTH_COLUMNS = ("predicted", "observed", "low", "high")
_CALIBRATION, _PREDICTED = " by predicted risk, with 95 % intervals.", "; bars hold the middle 80 % of observations."
"""Ends of the caption of the calibration plot: for risks, and for numbers."""


def _risk_rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each interval of predicted risk, and the number of scored rows in it."""
    if result.get("risks"):
        for (low, high), row_count in zip(pairwise(result["risks"]["edges"]), result["risks"]["rows"], strict=True):
            yield f"{low:.2%} to {high:.2%}", f"{row_count:,}"


def _first_clipped_fractions(folder: RunFolder) -> Any:
    """Return each layer's fraction of clipped values in the first round that had clients. Empty if the file of metrics is damaged."""
    try:
        lines = from_json_lines(folder.metrics_path)
        return next((line.get("clipped_fraction") for line in lines if isinstance(line, dict) and line.get("clients")), {})
    except (OSError, ValueError):
        return {}


def _layer_values(folder: RunFolder, result: dict[str, Any], *, public: bool) -> Iterator[dict[str, str]]:
    """Yield the page's values for each layer: noise, and the clipped fractions of the first and last round."""
    stored: Any = {} if public else _first_clipped_fractions(folder)
    stored_by_layer = stored if isinstance(stored, dict) else {}  # the file may be damaged
    # JSON readers may return 0 and 1 as integers.
    first_fractions = {name: fraction for name, fraction in stored_by_layer.items() if isinstance(fraction, float) or fraction in (0, 1)}
    for name, layer in result["layers"].items():
        yield {
            "name": name,
            "weights": f"{layer['weights']:,}",
            "radius": _number_or_dash(layer["radius"]),
            "noise": _number_or_dash(layer["noise_std"]),
            "first": _percent_or_dash(first_fractions.get(name)),
            "last": _percent_or_dash(layer["clipped_fraction"]),
        }


def _number_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent_or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_CHANNEL_TEXTS: Mapping[Channel, str] = {
    "direct": "in the replies, so the aggregator sees each client's",
    "ideal-shuffler": "sealed, over the relay, which mixes them",
    "secure-sum": "masked, added up by the relay, and unmasked as a sum by the aggregator: neither server sees one of them",
}
"""How the reports of a deployed run reached the aggregator, as text."""


def _environment_facts(config: RunConfig, result: dict[str, Any], kind: Kind, ledger: Ledger) -> Iterator[tuple[str, str]]:
    """Yield name and value of each fact on how the run was done: nodes, seed, versions, device, data, mechanism."""
    if kind.on_flower:
        yield "run by", f"{kind}, whose config is at the end; clients trained on machines of their own"
        yield "nodes", f"{result['clients']:,}, of which none was asked in more than {counted(ledger.events[-1].joined, 'round')}"
        yield "reports", _CHANNEL_TEXTS[ledger.events[-1].channel]
    if not result.get("seed_is_secret"):
        yield "public seed" if result.get("own_data") else "seed", str(result["seed"])
    if "versions" in result:  # only a finished run has them
        yield "versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    training = "" if result["seconds"] is None else f"{result['seconds']:.1f} s of training"
    if "threads" in result:
        yield "device", ", ".join(filter(None, (result["device"], f"{result['threads']} threads", training)))
    elif training:
        yield "time", f"{training} so far"
    if not config.data.brought and kind is not Kind.OWN_APP:
        yield "data", f"{public_name(config.data.name)}, fingerprint {result.get('data_fingerprint', '-')}"
    if clipped := clipped_records(result):
        yield "gradients clipped", clipped
    if settings := chosen_settings(result):
        yield "chosen by auto", settings
    yield "mechanism", config.mechanism.name
    for name, value in config.mechanism.model_dump(mode="json", exclude={"name"}).items():
        if name == "records" and value == 0:  # not stated, as only nodes need it
            continue
        yield name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value)
