"""Start a run on Flower, or take up one that was stopped: check that everything fits, and return how far the run has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real

from flwr.app import ArrayRecord
from torch import Tensor

from ldpfl.errors import ConfigError, DataError, shown
from ldpfl.experiments.build import count_measured_weights, initial_ranges, range_rule_of
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.record_sums import is_evaluated
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower.arrays import layout_of, to_vector
from ldpfl.flower.policy_init import config_for_transport, transport_for_channel
from ldpfl.flower.report_collection import Collector
from ldpfl.flower.round_kinds import statistics_rounds
from ldpfl.flower.run_progress import RunProgress
from ldpfl.flower.server_invitations import Waiting
from ldpfl.flower.statistics import unmeasured_stages
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms import guarantee_of, payload_bits
from ldpfl.mechanisms.dp_sgd import on_users_code
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.authors import released
from ldpfl.privacy.events import Channel
from ldpfl.server import Checkpoint, ServerRules, check_log_size, initial_checkpoint
from ldpfl.util.quantities import is_number

Terms = Callable[[Mapping[str, str | int]], dict[str, str | int]]
"""Function that returns the transport's terms. Its argument has the terms of a round that was begun, or is empty.

If the round was begun with the aggregator's previous key, the returned terms name that key.
"""

_MAX_NAMES = 10
"""Maximum number of arrays that a message names."""


def check_strategy_types(
    *,
    config: object,
    collector: object,
    folder: object,
    waiting: object,
    score: object,
    run_config: object,
    kind: object,
    on_measured: object,
) -> None:
    """Check the types of the arguments of ``LdpStrategy``.

    Raises:
        ConfigError: an argument has a wrong type.
    """
    is_collector = collector is None or (hasattr(collector, "channel") and not isinstance(collector, type))  # an object, not its class
    collectors = "the result of operator_relay(...) or operator_sum(...), or leave it out for reports in the replies"
    checks = (
        ("config", config, isinstance(config, RunConfig), "a RunConfig", "read its file by ldpfl.experiments.config.read_config"),
        ("collector", collector, is_collector, "a Collector", f"give {collectors}"),
        ("folder", folder, isinstance(folder, RunFolder | None), "a RunFolder", "give ldpfl.experiments.run_folder.RunFolder(Path)"),
        ("waiting", waiting, isinstance(waiting, Waiting), "a Waiting", "give ldpfl.flower.Waiting(nodes=...)"),
        ("score", score, callable(score), "a function", "give one that returns a number for weights (d,), or leave it out"),
        ("run_config", run_config, isinstance(run_config, Mapping), "a mapping", "give context.run_config"),
        ("kind", kind, isinstance(kind, Kind), "a Kind", "leave it out for an app of your own"),
        ("on_measured", on_measured, on_measured is None or callable(on_measured), "a function", "leave it out for an app of your own"),
    )
    for name, value, fits, expected, remedy in checks:
        if not fits:
            raise ConfigError(f"{name} must be {expected}, got {shown(value)}: {remedy}")


def check_start_arguments(initial: ArrayRecord, rounds: int | None, timeout: float, reply_s: float) -> None:
    """Check arguments of ``LdpStrategy.start``: the initial model, the number of rounds, and the seconds that a round waits for replies.

    Clients send their replies ``reply_s`` seconds after the charge.

    Raises:
        ConfigError: one of these arguments is not allowed, or ``timeout`` is too short.
    """
    if not isinstance(initial, ArrayRecord):
        raise ConfigError(f"initial_arrays must be an ArrayRecord of flwr.app, got {shown(initial)}: give ArrayRecord(model.state_dict())")
    if not initial:
        raise ConfigError("initial_arrays has no arrays, expected the arrays of the model: give ArrayRecord(model.state_dict())")
    if rounds is not None and not (is_number(rounds, whole=True) and rounds >= 0):
        raise ConfigError(f"num_rounds must be a whole number of at least 0, or left out to use training.rounds, got {shown(rounds)}")
    if not (is_number(timeout) and timeout > 0):
        raise ConfigError(f"timeout must be a number of seconds above 0, got {shown(timeout)}")
    if reply_s >= timeout:
        raise ConfigError(
            f"clients reply only after {reply_s:g} s (ldpfl.reply-s), but a round waits {timeout:g} s for them: make its timeout "
            "(ldpfl.timeout-s) longer"
        )


def check_score(score: object) -> None:
    """Raise if ``score``, which the function of ``LdpStrategy(score=...)`` returned, is not a number.

    Raises:
        ConfigError: it is no real number, such as a float of Python or NumPy.
    """
    if not isinstance(score, Real):
        raise ConfigError(f"the function `score` must return a number, got {shown(score)}: convert its result by float()")


def with_calibrated_noise(config: RunConfig, collector: Collector) -> RunConfig:
    """Return ``config`` on the collector's channel, and with the least noise that keeps ``privacy.target_epsilon``, if there is a target.

    Nodes' policies are made for this noise (``ldpfl policy init``), so the server must ask for the same.

    Raises:
        ConfigError: no noise of the mechanism meets the target on this channel.
    """
    return resolve_settings(config_for_transport(config, transport_for_channel(collector.channel), collector.linked, collector.min_clients))


def guarantee_text(progress: RunProgress) -> str:
    """Return the guarantee of each client's report, and against whom it holds, as text for the log."""
    guarantee = guarantee_of(progress.mechanism, progress.checkpoint.state.ranges)
    at_delta = f" at delta {guarantee.delta:g}" if guarantee.delta else ""
    return (
        f"epsilon {guarantee.epsilon:g}{at_delta} for each {guarantee.unit} of each report, {guarantee.units_per_round:,} of them a round, "
        f"{_ADVERSARIES[progress.config.shuffling.channel]}"
    )


_ADVERSARIES: Mapping[Channel, str] = {
    "direct": "against the server, which sees each report",
    "ideal-shuffler": "against relay and aggregator together; either alone learns less, because the relay mixes the reports",
    "secure-sum": "against relay and aggregator together; either alone sees no report, and the noise of all clients protects the sum",
}
"""Against whom the figure of a single report holds, by the channel of the reports."""


def start_or_resume(
    config: RunConfig,
    kind: Kind,
    folder: RunFolder | None,
    origin: str,
    score: Callable[[Tensor], float],
    terms: Terms,
    initial: ArrayRecord,
    timeout: float,
    rounds: int,
) -> RunProgress:
    """Start a run, or resume the run in ``folder``, and return its progress.

    Args:
        config, kind, folder, origin, score: as given to ``LdpStrategy``.
        terms: function that returns the transport's terms.
        initial: the public initial model.
        timeout: seconds to wait for the replies of a round.
        rounds: rounds of training in all.

    Raises:
        ConfigError: the config does not fit the app, the model, or the run in the folder.
        DataError: files of the folder contradict each other.
    """
    _check_runs_on_flower(config, kind, rounds)
    layout = layout_of(initial)
    weights = to_vector(initial, layout)
    ranges = initial_ranges(config, layout, weights)
    mechanism = deployable_mechanism(config, ranges)
    if kind is not Kind.READY_APP:  # such an app trains a model of its author's, whatever model the config names
        mechanism = on_users_code(mechanism)
    payload_bits(mechanism, ranges)  # raises if the mechanism does not fit the layers
    check_log_size(layout.names, released(mechanism, ranges), rounds)  # raises if files of the run would be too large to be read again
    rules = ServerRules(
        layout.names,
        config.mechanism.perturbed,
        range_rule_of(config),
        config.training.make_server_optimiser(count_measured_weights(config, layout), weights),
        score,
    )
    # The origin differs from a simulation's, so that neither can resume the other's run.
    checkpoint, participation = initial_checkpoint(weights, ranges, f"{origin} on Flower"), Participation()
    if folder is not None:
        folder.open(config, resume=True, kind=kind)
        checkpoint, participation = _load_progress(folder, checkpoint, layout, terms)
    return RunProgress(config, participation.run, layout, mechanism, rules, timeout, checkpoint, participation)


def _load_progress(folder: RunFolder, initial: Checkpoint, layout: ParameterLayout, terms: Terms) -> tuple[Checkpoint, Participation]:
    """Return the last checkpoint in ``folder``, or ``initial`` if there is none, and the participation: the rounds of each node.

    The participation is saved before a round, and the checkpoint after it. So the participation may be one round ahead, but no more.

    Raises:
        ConfigError: the folder holds a run of another model, or a round that was begun on other terms of the transport.
        DataError: checkpoint and participation contradict each other.
    """
    checkpoint = folder.checkpoint_or(initial)
    folder.check_ledger_continues(checkpoint)  # before anything is written
    if checkpoint.state.ranges.sizes != layout.sizes:
        raise ConfigError(f"{folder.path} holds a run of another model, so it cannot be resumed: use another folder (ldpfl.out)")
    # The first round with ranges has an entry for each array that was trained. Without such a round, there is nothing to compare.
    trained = next((list(metrics.radius) for metrics in checkpoint.history if metrics.radius), list(layout.names))
    if trained != list(layout.names):
        raise ConfigError(
            f"{folder.path} holds a run of a model with other arrays, so it cannot be resumed: it trained {_names_text(trained)}, but "
            f"initial_arrays has {_names_text(layout.names)}. Give arrays of the same names in the same order, or use another folder"
        )
    participation = folder.participation()
    done = len(checkpoint.ledger.events)
    if participation.begun < done:
        raise DataError(
            f"{folder.path} holds round {done}, but its {folder.participation_path.name} counts only {participation.begun} rounds: "
            "restore the newest copy of this file, because the run's guarantee needs to know which nodes were asked"
        )
    if participation.begun > done + 1:
        raise DataError(
            f"the checkpoint in {folder.path} is of round {done}, but nodes were asked up to round {participation.begun}: restore "
            "the newest copy of the checkpoint, because an earlier one does not count the rounds since then"
        )
    if participation.begun > done:  # the server was stopped in a round, whose reports it may still receive
        participation.check_terms(terms(participation.terms))
    elif done and folder.ledger_path.exists():  # it may have been stopped after the checkpoint of the last round, before the ledger
        folder.save_ledger(checkpoint.ledger)
    return checkpoint, participation


def _names_text(names: Sequence[str]) -> str:
    """Return the ``names`` of arrays as text: the first few, and how many more."""
    more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def _check_runs_on_flower(config: RunConfig, kind: Kind, rounds: int) -> None:
    """Raise if a setting of ``config`` does not run on Flower with this ``kind`` of app, or noise is planned for other ``rounds``.

    An app that is not ldpfl's own computes no sums over records, as evaluation, least squares and statistics need them. The noise of an
    evaluation, or for a target epsilon, is planned for ``training.rounds`` training rounds.

    Raises:
        ConfigError: one of these problems; the text says what to set.
    """
    if kind is not Kind.READY_APP and (config.evaluation.share or config.training.method != "gradient" or statistics_rounds(config)):
        raise ConfigError(
            "evaluation.share, training.method = 'least-squares' and data.scaling = 'measured' work only with the app "
            "ldpfl.flower.apps: with another app leave them out, and measure on the server (evaluate_fn)"
        )
    if config.model.personal or config.data.evaluate_on == "clients":
        raise ConfigError(
            "model.personal and data.evaluate_on = 'clients' work only in simulations, because nodes keep no layers and send no figures "
            "without noise: leave them out"
        )
    if statistics_rounds(config) and not unmeasured_stages(config).columns:
        raise ConfigError("data.scaling is 'measured', but the table has no columns to measure: set it to 'bounds'")
    if is_evaluated(config) and rounds != config.training.rounds:
        raise ConfigError(
            f"num_rounds is {rounds}, but the noise of the evaluation at clients is planned for training.rounds = "
            f"{config.training.rounds}: leave num_rounds out"
        )
    if config.privacy.target_epsilon != "off" and rounds > config.training.rounds:
        raise ConfigError(
            f"num_rounds is {rounds}, but privacy.target_epsilon is planned for training.rounds = {config.training.rounds}: set "
            "training.rounds instead, or leave num_rounds out"
        )
    if config.clients.full_weight != "off" and kind is not Kind.READY_APP:
        raise ConfigError("clients.full_weight works only with the app ldpfl.flower.apps: leave it out, and scale what your app returns")
