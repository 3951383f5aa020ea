"""Compute the figures of a finished run, which ``result.json`` holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from math import fsum, inf
from statistics import fmean
from typing import Any

import numpy
import torch

import ldpfl
from ldpfl import tasks
from ldpfl.data import Dataset
from ldpfl.data.holding_out import scored_part
from ldpfl.errors import error_without_data
from ldpfl.experiments.config import RunConfig, toml_value
from ldpfl.experiments.evaluation_figures import add_figures_of_clients, client_evaluation_entries, lost_evaluations
from ldpfl.experiments.planning.evaluation_noise import server_sees_senders
from ldpfl.experiments.quality import Reference, quality_entries
from ldpfl.experiments.run_folder import Kind
from ldpfl.experiments.table_rules import output_bias
from ldpfl.experiments.trainers import is_compiled
from ldpfl.mechanisms import payload_bits
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.privacy import Ledger
from ldpfl.privacy.accountants.registry import unit_epsilon
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import USERS_CODE
from ldpfl.privacy.guarantee import Statement, json_number
from ldpfl.server import Checkpoint, RoundMetrics
from ldpfl.simulation import Federation
from ldpfl.simulation.measuring import NOT_SEEN_TO_VARY
from ldpfl.simulation.personal_layers import PersonalTrainer
from ldpfl.tasks.weighted_metrics import MEAN_PREDICTION, OBSERVED, OBSERVED_MEAN, PREDICTED
from ldpfl.util.files import finite
from ldpfl.util.number_format import counted, number
from ldpfl.util.user_code import is_code, is_pretrained, public_name


def summarise(
    config: RunConfig, federation: Federation, data: Dataset, final: Checkpoint, baseline: Reference | None, clamped: float | None = None
) -> dict[str, Any]:
    """Return the content of ``result.json`` for a run whose last checkpoint is ``final``. Figures that are not finite become None.

    Args:
        baseline: scores of the noise-free baseline; None if it was not run.
        clamped: score of the same training with clipping and without noise; None if it was not computed.
    """
    history, privacy = final.history, _privacy_entries(config, federation, final)
    entries: dict[str, Any] = {"scores": {}}
    try:
        entries = quality_entries(federation, final.state.model, config.seed, data.classes, final.personal)
    except Exception as error:  # a user's own metric may fail, and the trained model must not be lost
        privacy["caveats"].append(f"{NO_SCORES}, because computing them failed: {error_without_data(error)}")
    clipped = last_round_with_clients(final).clipped_records
    privacy["caveats"] += _pop_findings_as_caveats(entries, config, federation, baseline, clipped)
    if missing := lost_evaluations(config, final):
        rounds = ", ".join(f"{number:,}" for number in missing)
        privacy["caveats"].append(
            f"{NO_FIGURES} {rounds}: too few clients sent theirs in time; the guarantee counts these rounds all the same"
        )
    measured = client_evaluation_entries(federation, history)
    add_figures_of_clients(entries, measured)
    figures = {
        "name": config.name,
        "seed": config.seed,
        "seed_is_secret": config.hides_seed,
        "own_data": config.data.brought,
        "metric": federation.task.task.metric,
        "lower_is_better": federation.task.task.metric in federation.task.task.lower_is_better,
        "score": history[-1].score,
        **entries,
        "at_clients": measured,
        "score_per_round": [metrics.score for metrics in history],
        "noise_free_score": baseline.score_per_round[-1] if baseline else None,
        "noise_free_score_per_round": baseline.score_per_round if baseline else None,
        "noise_free_scores": dict(baseline.scores) if baseline else {},
        "pooled_scores": dict(baseline.pooled) if baseline and baseline.pooled is not None else {},
        "clamped_score": clamped,
        "evaluated_on": config.data.evaluate_on,
        **privacy,
        "clients": config.clients.count,
        "records": total_records(config, federation),
        "clients_per_round": last_round_with_clients(final).clients,
        "clients_in_rounds": fewest_and_most_clients(final),
        "stopped_after": last_round_before_stopping(federation, final),
        "rounds": len(history),
        "weights": federation.task.layout.dimension,
        "chosen": _chosen_automatically(config, federation),
        "uplink_bits_per_client_round": payload_bits(federation.mechanism, final.state.ranges),
        "uplink_bytes_per_client_round": max(metrics.uplink_bytes_per_client for metrics in history),
        "layers": _layer_entries(config, federation, final),
        "clipped_records_per_round": _clipped_records(federation, final),
        **_noise_entry(config, federation, final),
        "seconds": sum(metrics.seconds for metrics in history),
        "seconds_per_round": [metrics.seconds for metrics in history],
        "device": federation.device.type,
        "compiled": is_compiled(federation.trainer),
        "threads": torch.get_num_threads(),
        "data_fingerprint": data.fingerprint,
        "versions": {
            "ldpfl": ldpfl.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
    }
    strict: dict[str, Any] = finite(figures)
    return strict


def _pop_findings_as_caveats(
    entries: dict[str, Any], config: RunConfig, federation: Federation, baseline: Reference | None, clipped: float | None
) -> list[str]:
    """Remove the findings of :func:`~ldpfl.experiments.quality.quality_entries` from ``entries``, and return a caveat for each finding.

    A caveat names a fault of the model, and what may help. ``clipped`` is the share of records that were clipped in the last round; None
    if only clients know it.
    """
    caveats, part = [], scored_part(config.data.evaluate_on)
    if entries.pop("unusable", False):
        caveats.append(
            f"{UNUSABLE} for some {part} rows: these count as wrong in the accuracy and in exact matches, and other figures have no value; "
            "a smaller training.learning_rate or less noise may help, else look for a logarithm or a quotient in the model"
        )
    if entries.pop("without_intervals", False):
        caveats.append(
            f"the metrics of task {federation.task.task.name!r} have no intervals, and there are no figures by client and no pooled "
            "reference: several seeds (ldpfl sweep --seeds) show how far the metrics vary between runs"
        )
    if extreme := entries.pop("extreme", ""):
        caveats.append(
            f"{EXTREME}: {extreme}. Rank rows by them, but do not read them as probabilities; a smaller training.server_learning_rate (or "
            "training.learning_rate), a larger training.server_weight_decay, more rows or a larger epsilon bring them closer together"
        )
    if narrow := entries.pop("narrow", ""):
        caveats.append(
            f"{NARROW}: {narrow}. Rank rows by them, but do not read them as probabilities; more training.rounds, a larger "
            f"training.server_learning_rate{_LARGER_STEP if _is_fine_tuned(config) else ''} or a smaller "
            "training.server_weight_decay move them apart"
        )
    if chance := entries.pop("chance", ""):
        caveats.append(
            f"{CHANCE}: {chance}. {_more_data(config, federation)}, a larger epsilon, or a model with fewer weights may help; the "
            "noise-free baseline shows whether the data can be learnt at all"
        )
    if unsure := entries.pop("unsure", ""):
        more = _more_data(config, federation)
        caveats.append(
            f"{UNSURE.replace('test', part)}: {unsure}. New rows may score much lower or higher. {_SURER_SCORES[config.data.evaluate_on]}. "
            f"For a better model: {more[0].lower()}{more[1:]}, fewer columns, or a larger epsilon"
        )
    constant = entries.pop("constant", False)
    if constant and not _all_columns_hidden(federation):  # else another note tells why
        caveats.append(
            f"{CHANCE}: the model's output is the same for all {entries['test_rows']:,} {part} rows, whatever their inputs. "
            f"{_remedy_for_constant_outputs(config, federation)}"
        )
    threshold = entries.pop("threshold", "")
    one_class, has_learnt = entries.pop("one_class", ""), not chance and not constant
    if one_class and has_learnt:  # a threshold does not help a model that ranks rows by chance
        caveats.append(
            f"{ONE_CLASS.replace('test', part)} {one_class}: the accuracy shows no more than how common that class is. Probabilities still "
            "differ between rows"
            + (
                f". To predict both, give a threshold within the predicted risks: ldpfl predict --threshold {threshold}"
                if threshold
                else ""
            )
        )
    caveats += _common_event_caveats(entries, config)
    off = entries.pop("off", "")
    # If nearly all targets have one value, predicted and observed mean may differ by a tiny amount, and another note tells of it.
    if off and not any(NOT_SEEN_TO_VARY in note for note in federation.notes):
        if OBSERVED not in entries["scores"]:  # numbers or counts: a mean that is off may be the reason why R2 shows nothing learnt
            caveats.append(f"{OFF_MEAN}: {off}. {_remedy_for_numbers(config, entries, baseline, clipped)}")
        else:
            caveats.append(f"{OFF}: {off}. {_remedy_for_risks(config, federation, entries, baseline, clipped)}")
    return caveats


def _is_fine_tuned(config: RunConfig) -> bool:
    """Return whether the model is a pretrained one, or has an adapter, which only pretrained models take."""
    return is_pretrained(config.model.name) or config.model.adapter != "none"


def _remedy_for_constant_outputs(config: RunConfig, federation: Federation) -> str:
    """Return why a model's output may be the same for all rows, and what to do about it."""
    if _is_fine_tuned(config):
        return (
            "A pretrained model that hardly tells inputs apart has short gradients, and training hardly moves it: try a larger "
            f"training.server_learning_rate{_LARGER_STEP}, more rounds, or a larger epsilon"
        )
    is_table = federation.encoder is not None and not federation.encoder.data.text
    return (
        "Either training did not move it, or steps or noise were so large that no input has an effect any more: try another step size (a "
        "smaller training.server_learning_rate or training.learning_rate), more rounds, a larger epsilon"
        f"{', and data.bounds that are not far wider than the values' if is_table else ''}"
    )


def _more_data(config: RunConfig, federation: Federation) -> str:
    """Return which further data would help against the noise, as the start of a sentence.

    If the server sees each client's report, and records are protected, each client alone adds all the noise that its records need. Then
    more clients bring more noise.
    """
    if record_clip_of(federation.mechanism) is None or not server_sees_senders(config.shuffling.channel):
        return "More clients or rows"
    return "More rows at each client (of rows that you deal out: fewer clients, because each adds noise of its own)"


def _common_event_caveats(entries: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the caveat that the event may be the wrong one of two classes; an empty list if nothing suggests that.

    The caveat is given if nearly all test rows have the event, and no setting says which of the two classes is the event.
    """
    part = scored_part(config.data.evaluate_on)
    share, names = entries.get("scores", {}).get(OBSERVED, 0.0), entries.get("classes", [])
    if not config.data.brought or config.data.classes or len(names) != 2 or share <= _MAX_SHARE_OF_EVENT:
        return []
    other, event = names
    return [
        f"{COMMON_EVENT} {event!r}, which {share:.1%} of the {part} rows have: it is the second class in the order of names. "
        f"Sensitivity, predictive value, mean risk and thresholds are about it. If {other!r} is meant, name it last: "
        f"--set 'data.classes={toml_value([event, other])}'"
    ]


def _remedy_for_risks(
    config: RunConfig, federation: Federation, entries: Mapping[str, Any], baseline: Reference | None, clipped: float | None
) -> str:
    """Return why the mean predicted risk may be far from the observed share of events, and what to do about it.

    ``entries`` has the run's ``scores`` and their ``intervals``.
    """
    if emphasis := _emphasis_settings(config):
        return (
            f"{emphasis} moved the predicted probabilities: train with the default loss, or use the predictions as a ranking, with a "
            "threshold of your own (ldpfl predict --threshold)"
        )
    steps, is_noise = _steps_towards_mean(config, entries, baseline, clipped)
    cause = "" if is_noise else _clipping_as_a_cause(entries["scores"], clipped)
    remedy = f"take {steps}; or add a number to all log odds, so that the mean risk is the share that you expect"
    # The base rate at which training starts was stated or measured with noise. Or it is not known, or the model has no place for it.
    if config.data.class_shares or output_bias(config, federation.task.module, federation.task.layout, outputs=2) is None:
        return f"{cause}{remedy[0].upper()}{remedy[1:]}"
    if federation.encoder is not None and federation.encoder.shares:
        return f"{cause}The base rate was measured with noise: state data.class_shares, where the public knows them; else {remedy}"
    return (
        f"{cause}No base rate was measured for these data: state the shares of the classes in data.class_shares, where the public knows "
        f"them; else {remedy}"
    )


def _steps_towards_mean(
    config: RunConfig, entries: Mapping[str, Any], baseline: Reference | None, clipped: float | None
) -> tuple[str, bool]:
    """Return, as text, which settings may move the mean prediction to the observed mean, and whether noise is known to be the cause.

    The baseline has no noise, but clips and takes as many rounds. If its mean is off, too, and at least half as much as that of the run,
    clipping or too few rounds are the cause. Otherwise noise is. Without a baseline, nothing shows whether more or fewer rounds help.
    """
    is_risk = OBSERVED in entries["scores"]
    names, noun, form = ((PREDICTED, OBSERVED), "risk", ".2%") if is_risk else ((MEAN_PREDICTION, OBSERVED_MEAN), "prediction", ".4g")
    (predicted, observed), (low, high) = (entries["scores"][name] for name in names), entries["intervals"][names[1]]
    larger_norm, without_noise = _larger_norm(config, clipped), baseline.scores.get(names[0]) if baseline else None
    if without_noise is None:
        return " or ".join((*larger_norm, "more or fewer training.rounds (a run with the noise-free baseline shows which)")), False
    mean = f"(without noise the mean {noun} is {without_noise:{form}}"
    if low <= without_noise <= high or 2 * abs(without_noise - observed) < abs(predicted - observed):
        return f"a larger epsilon or fewer training.rounds, each of which adds noise {mean})", True
    steps, either = " or ".join((*larger_norm, "more training.rounds")), "either" if larger_norm else "them"
    return f"{steps} {mean}, so noise is not the cause, but grows with {either})", False


def _clipping_as_a_cause(scores: Mapping[str, float], clipped: float | None) -> str:
    """Return a sentence on clipping as a cause if risks lie closer to the commoner class than they should, else "".

    The more a record's prediction is wrong, the longer is its gradient. So while the model is near the base rate, gradients of the rarer
    class are the longest, and are clipped first. Only a simulation knows the share ``clipped``; without it, the result is "".
    """
    observed, predicted = scores[OBSERVED], scores[PREDICTED]
    are_too_low, are_events_rarer = predicted < observed, observed < 0.5
    if not clipped or clipped < _MIN_CLIPPED or are_too_low != are_events_rarer:
        return ""
    return (
        f"Clipping shortened {clipped:.1%} of the gradients in the last round (known only in a simulation). As a rule those of the rarer "
        "class are the longest, so clipping draws risks towards the commoner class. "
    )


def _remedy_for_numbers(config: RunConfig, entries: Mapping[str, Any], baseline: Reference | None, clipped: float | None) -> str:
    """Return why the mean prediction may be far from the observed mean of numbers or counts, and what to do about it."""
    steps, is_noise = _steps_towards_mean(config, entries, baseline, clipped)
    if is_noise or not _larger_norm(config, clipped):
        return f"Take {steps}"
    return (
        "Clipping draws the fit of a skewed target towards its median, which the mean absolute error does not show: take "
        f"{steps}, or predict the target's logarithm"
    )


def _larger_norm(config: RunConfig, clipped: float | None) -> tuple[str, ...]:
    """Return the advice to take a larger clipping norm, as text; empty if the mechanism has none, or if it hardly clipped a gradient.

    ``clipped`` is the share of records that were clipped in the last round; None if only clients know it.
    """
    norm = getattr(config.mechanism, "clip_norm", None)
    has_clipped = clipped is None or clipped >= _MIN_CLIPPED
    return () if norm is None or not has_clipped else (f"a larger mechanism.clip_norm (it is {norm:.3g})",)


def _all_columns_hidden(federation: Federation) -> bool:
    """Return whether the noise of measuring hid all columns of a table. Then another note already tells why all outputs are the same."""
    encoder = federation.encoder
    return encoder is not None and not encoder.data.text and encoder.hidden_columns == frozenset(encoder.data.columns)


def _emphasis_settings(config: RunConfig) -> str:
    """Return the settings that move predicted probabilities away from the frequencies of the classes, as text; "" if none is set."""
    is_set = {"task.class_weights": config.task.class_weights != "off", "task.focusing": config.task.focusing > 0}
    return " and ".join(key for key, value in is_set.items() if value)


def _emphasis_caveats(config: RunConfig) -> list[str]:
    """Return the caveat that class weights or the focal loss move predicted probabilities; an empty list without them."""
    if not (emphasis := _emphasis_settings(config)):
        return []
    cause = "with class weights" if config.task.class_weights != "off" else "with the focal loss"
    return [f"trained {cause} ({emphasis}): predicted probabilities are not frequencies; rank rows by them, or choose a threshold"]


def _personal_caveats(federation: Federation) -> list[str]:
    """Return the caveat that personal layers are not in the saved model; an empty list if there are none."""
    trainer = federation.trainer
    if not isinstance(trainer, PersonalTrainer):
        return []
    layers, weights = ", ".join(trainer.personal.names), counted(trainer.personal.dimension, "weight")
    return [
        f"{layers} ({weights}) stay at each client and were not released. Scores are of each client's own model on records "
        "that it holds back; the saved model has the initial values of these layers"
    ]


def metric_before_data(config: RunConfig, kind: Kind = Kind.SIMULATION) -> str:
    """Return the name of a task's main metric if it is known before the data are read, else "score".

    It is known for classification alone. It depends on the number of classes, which a user's own data may not state before they are read.
    A user's own ServerApp may measure anything.
    """
    if kind is Kind.OWN_APP or config.task.name != "classification" or (config.data.brought and not config.data.classes):
        return "score"
    # Built-in data have more than two classes, so their main metric is the accuracy.
    return tasks.create(config.task.name, len(config.data.classes)).metric if config.data.classes else tasks.ACCURACY


def _chosen_automatically(config: RunConfig, federation: Federation) -> dict[str, float]:
    """Return the values that were chosen for settings that are "auto" in the config, by setting key."""
    numbers = {"server_learning_rate": federation.optimiser.learning_rate, "server_weight_decay": federation.optimiser.decay}
    return {f"training.{name}": value for name, value in numbers.items() if getattr(config.training, name) == "auto"}


_LARGER_STEP = " (for a pretrained model 1 to 3, with mechanism.clip_norm = 1)"
"""Advice on the step of a pretrained model, in notes on models that were moved too little. Its source is docs/results/adapters.md."""

UNUSABLE = "the model gives NaN or infinity"
"""Start of the note that some outputs for test rows are no numbers."""

NO_SCORES = "no scores of the final model beside those of each round"
"""Start of the note that a metric failed. The rest may quote what an installed package or the user's code says of the test rows."""

EXTREME = "predicted probabilities are far too close to 0 and 1"
"""Start of the note on a calibration slope far below 1."""

COMMON_EVENT = "the event is"
"""Start of the note on an event that nearly all test rows have."""

_MAX_SHARE_OF_EVENT = 0.9
"""Share of test rows from which on an event may be the wrong one of two classes, such as "no" beside "yes" taken by alphabet."""

NO_FIGURES = "clients' figures are missing after round"
"""Start of the note on evaluations at clients that were lost."""

NARROW = "predicted probabilities lie far too close together"
"""Start of the note on a calibration slope far above 1."""

CHANCE = "nothing was found to have been learnt"
"""Start of the note on a model whose main figure is no better than chance."""

UNSURE = "the test rows hardly show how good the model is"
"""Start of the note on a main figure with a wide interval; it says "holdout rows" if scores are of such rows."""

_SURER_SCORES = {
    "test": (
        "Runs with other seeds are tested on the same rows, so they do not help: test on more rows (data.test_path names a file of its own "
        "for them)"
    ),
    "holdout": (
        "The mean over several seeds (ldpfl sweep --seeds) is surer: each seed draws other holdout rows, unless names of persons or files "
        "choose them"
    ),
    "clients": "More rows are tested with a larger evaluation.share",
}
"""Advice on a score with a wide interval, for each value of ``data.evaluate_on``."""

ONE_CLASS = "all test rows are predicted to be of the class"
"""Start of the note on the one class that a model predicts for all rows; it says "holdout rows" if scores are of such rows."""

_MIN_CLIPPED = 0.01
"""Share of clipped records from which on clipping may be the cause of a wrong mean."""

OFF, OFF_MEAN = "the mean predicted risk is far from the observed share", "the mean prediction is far from the observed mean"
"""Starts of the notes on a model whose risks, or whose predicted numbers, are too high or too low on the whole."""

STOPPED = "training stopped after round"
"""Start of the note on the round after which a run ended early."""


def last_round_before_stopping(federation: Federation, checkpoint: Checkpoint) -> int | None:
    """Return the last round in which clients trained, if the validation loss ended training before the run's end; None otherwise.

    The rounds that follow are counted and charged, but no client trains, so they have no validation loss. If there is none that follows,
    training did not end early, and the result is None.
    """
    trained_rounds = [metrics.round for metrics in checkpoint.history if metrics.validation is not None]
    if federation.has_stopped(checkpoint.history) and trained_rounds[-1] < checkpoint.state.round:
        return trained_rounds[-1]
    return None


def _stopping_caveats(config: RunConfig, federation: Federation, checkpoint: Checkpoint) -> list[str]:
    """Return the caveat of a run that stopped early: what decided it, and whether the guarantee covers that; else an empty list.

    The guarantee counts all rounds of the run, also those after training ended.
    """
    last_round, rounds = last_round_before_stopping(federation, checkpoint), checkpoint.state.round
    if last_round is None:
        return []
    decided_by = "what was released and the public rows of data.validation"
    if config.data.brought:
        decided_by = "the loss on the rows of data.validation, which are not protected: the guarantee does not cover it"
    return [f"{STOPPED} {last_round} of {rounds}, and the guarantee counts all {rounds}: when to stop was decided by {decided_by}"]


def assumption_caveats(config: RunConfig) -> list[str]:
    """Return a caveat for each assumption of the guarantee that ``config`` shows: on code that is not ldpfl's, and on added rounds."""
    return [*_code_caveats(config), *_extension_caveats(config)]


def _code_caveats(config: RunConfig) -> list[str]:
    """Return the caveat that names code that is not ldpfl's; an empty list if there is none, or nothing is protected.

    The ledger's warnings say what is assumed of that code.
    """
    if not config.users_code or config.mechanism.name == "none":
        return []
    named = f"{' and '.join(config.users_code)}: {USERS_CODE}"
    if not is_code(config.data.name):
        return [named]
    return [f"{named}. Rows are protected as {public_name(config.data.name)} returns them: what it made of other rows is not covered"]


def _extension_caveats(config: RunConfig) -> list[str]:
    """Return the caveat of a run to which rounds were added; an empty list for other runs."""
    added, rounds = config.training.extended, config.training.rounds
    if not added:
        return []
    assumption = "each epsilon here holds only if no earlier result decided how many rounds were added"
    return [f"{added} of {rounds} rounds were added to a run that had ended: {assumption}; a client's own budget holds in any case"]


def _target_caveats(config: RunConfig, statement: Statement) -> list[str]:
    """Return the caveat that a run had a target epsilon before rounds were added, with the epsilon that it has now.

    The result is an empty list if there was no target, or if no rounds were added.
    """
    target = config.privacy.original_target
    if target == "off":
        return []
    reached = inf if statement.best is None else statement.best.epsilon
    return [f"epsilon {target:g} was asked for; with the {counted(config.training.extended, 'added round')} it is {number(reached)}"]


def _ending_caveats(config: RunConfig, checkpoint: Checkpoint) -> list[str]:
    """Return the caveat of a run on Flower that ended before its last round; an empty list for other runs."""
    finished_rounds, rounds = len(checkpoint.history), config.training.rounds
    if finished_rounds >= rounds:
        return []
    reason = "too few nodes took part in the next round. To resume the run, start it again; its guarantee is then that of more rounds"
    return [f"the run ended after {finished_rounds} of {rounds} rounds: {reason}"]


def _idle_round_caveats(federation: Federation, checkpoint: Checkpoint) -> list[str]:
    """Return the caveat that the model was not trained in some rounds, because they had no report; an empty list if all had one."""
    if last_round_before_stopping(federation, checkpoint) is not None:  # :func:`_stopping_caveats` names the rounds after that
        return []
    rounds = len(checkpoint.history)
    with_reports = sum(metrics.clients > 0 for metrics in checkpoint.history)
    if with_reports == rounds:
        return []
    return [f"only {with_reports:,} of {counted(rounds, 'round')} had reports and changed the model; the guarantee counts all {rounds:,}"]


def total_records(config: RunConfig, federation: Federation) -> int | None:
    """Return the number of records, or persons, of all clients.

    For nodes' own tables, whose rows the server does not see, it is computed from ``mechanism.records``, the stated mean number of a
    client. It is None if the config states none.
    """
    if not config.data.at_nodes:
        return int(federation.samples.sizes.sum())
    return round(getattr(config.mechanism, "records", 0) * config.clients.count) or None


def _delta_caveats(config: RunConfig, federation: Federation) -> list[str]:
    """Return the caveat that delta is too large for the number of protected records or persons; an empty list if it is not."""
    records, delta = total_records(config, federation) or 0, config.privacy.delta
    if record_clip_of(federation.mechanism) is None or delta * records < 1:
        return []
    unit = "persons" if config.data.person else "records"
    return [
        f"delta {delta:g} is not below 1/{records:,}: even publishing one of the {unit} at random would satisfy it; lower privacy.delta"
    ]


def last_round_with_clients(checkpoint: Checkpoint) -> RoundMetrics:
    """Return the figures of the last round in which clients took part, or of the last one if none did."""
    return next((metrics for metrics in reversed(checkpoint.history) if metrics.clients), checkpoint.history[-1])


def fewest_and_most_clients(checkpoint: Checkpoint) -> list[int]:
    """Return the fewest and the most clients whose reports any one training round had."""
    numbers = [metrics.clients for metrics in checkpoint.history]
    return [min(numbers), max(numbers)]


def _privacy_entries(config: RunConfig, federation: Federation, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the privacy entries of ``result.json``: the guarantee of the run, the epsilon of one unit of a report, and the caveats."""
    statement = account(checkpoint.ledger, config.privacy.delta)
    caveats = [
        *_stopping_caveats(config, federation, checkpoint),
        *_ending_caveats(config, checkpoint),
        *_idle_round_caveats(federation, checkpoint),
        *assumption_caveats(config),
        *_target_caveats(config, statement),
        *_delta_caveats(config, federation),
        *_emphasis_caveats(config),
        *_personal_caveats(federation),
    ]
    return {
        "mechanism": config.mechanism.name,
        "perturbed": config.mechanism.perturbed,
        **unit_epsilon_entries(checkpoint.ledger, config.privacy.delta),
        "target": None if config.privacy.target_epsilon == "off" else config.privacy.target_epsilon,
        "caveats": [*federation.mechanism.properties.caveats, *federation.notes, *caveats],
        "privacy": statement.to_dict(),
    }


def unit_epsilon_entries(ledger: Ledger, delta: float) -> dict[str, Any]:
    """Return the name and the epsilon of one unit, such as a weight, of a report in the last round.

    The epsilon is pure if the mechanism's guarantee is, else it holds at ``delta``. It is None if nothing is protected, and infinite if it
    cannot be computed.
    """
    if not ledger.events:
        return {"epsilon_per_unit": None, "unit": "weight"}
    release = ledger.events[-1].release
    try:
        epsilon = unit_epsilon(release, delta) if release.protected else None
    except Exception:  # the privacy statement reports the failure, and the trained model must not be lost
        epsilon = inf
    return {"epsilon_per_unit": json_number(epsilon), "unit": release.unit}


def as_released(figures: dict[str, Any], ledger: Ledger, privacy: Statement) -> dict[str, Any]:
    """Return the ``figures`` of a run with its privacy figures computed from the ledger, because a stored file may have been changed."""
    return {**figures, **unit_epsilon_entries(ledger, privacy.delta), "privacy": privacy.to_dict()}


def _noise_entry(config: RunConfig, federation: Federation, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the figures of a noise schedule (LaDP-FL) over the whole run; an empty dict for other mechanisms.

    ``norm`` is LaDP-FL's "noise scale", and ``paper_epsilon`` the claim of its equations (17) to (19) for the mean client: the sum of
    q * epsilon over the rounds that it takes part in, with q = batch size / data set size. The proved guarantee is in the ledger.
    """
    noisy_rounds = [metrics for metrics in checkpoint.history if metrics.noise]
    if not noisy_rounds:
        return {}
    schedules = [metrics.noise for metrics in noisy_rounds]
    sampling = min(1.0, config.training.batch_size / float(federation.samples.sizes.mean()))  # q
    # The mean client takes part in a round with probability clients / count.
    claimed = [sampling * metrics.clients / config.clients.count * metrics.noise["paper_epsilon"] for metrics in noisy_rounds]
    return {
        "noise": {
            "norm": fsum(figures["norm"] for figures in schedules),
            "protected_fraction": fmean(figures["protected_fraction"] for figures in schedules),
            "paper_epsilon": fsum(claimed),
            "paper_epsilon_per_round": claimed,
            "multiplier_median": [figures["multiplier_median"] for figures in schedules if "multiplier_median" in figures],
        }
    }


def _clipped_records(federation: Federation, checkpoint: Checkpoint) -> list[float | None] | None:
    """Return the share of clipped records in each round; None in the list for a round in which only clients know it.

    The result is None if the mechanism does not clip records.
    """
    return None if record_clip_of(federation.mechanism) is None else [metrics.clipped_records for metrics in checkpoint.history]


def _layer_entries(config: RunConfig, federation: Federation, checkpoint: Checkpoint) -> dict[str, dict[str, float | None]]:
    """Return the number of weights, the radius, the noise and the clipped fraction of each layer in the last round.

    The radius and the clipped fraction are None if values are clipped by their norm. The clipped fraction is None too if only clients know
    it.
    """
    layout, metrics = federation.task.layout, last_round_with_clients(checkpoint)
    return {
        name: {
            "weights": size,
            "radius": metrics.radius[name] if config.mechanism.uses_ranges else None,
            "noise_std": metrics.noise_std[name],
            "clipped_fraction": metrics.clipped_fraction.get(name),
        }
        for name, size in zip(layout.names, layout.sizes, strict=True)
    }
