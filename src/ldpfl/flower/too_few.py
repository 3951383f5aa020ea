"""Errors for rounds in which too few nodes take part: which nodes are missing, why, and what the server's operator can do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from math import inf

from ldpfl.errors import AllDeclined, ChargedBefore, ConfigError, TooFewTakePart, TooLate
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.flower.invitation import Answers
from ldpfl.flower.policy_init import targets_for_all_clients, transport_for_channel
from ldpfl.flower.run_progress import RunProgress
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.util.number_format import counted, number

MAX_NAMED = 20
"""Maximum number of nodes that a message names."""

MIN_CLIENTS = "ldpfl.min-clients"
"""Setting with the minimum number of clients of a round over a relay. Nodes' policies have a minimum of their own."""

_MIN_OVER_RELAY = 2
"""Minimum number of clients of a round over a relay: with a single client there is nothing to mix or add up."""


def node_ids_text(nodes: Collection[int]) -> str:
    """Return Flower's ids of ``nodes`` as text, as ``flwr supernode list`` shows them: the first :data:`MAX_NAMED`, and how many more."""
    shown = ", ".join(map(str, sorted(nodes)[:MAX_NAMED]))
    more = f" and {len(nodes) - MAX_NAMED:,} more" if len(nodes) > MAX_NAMED else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"


def reasons_text(reasons: Mapping[int, str], silent: Collection[int] = ()) -> str:
    """Return why nodes do not take part, as the end of a sentence: each reason in ``reasons`` with its nodes, then the ``silent`` nodes.

    It begins with a colon. It is empty if there are no such nodes.
    """
    nodes_with: dict[str, list[int]] = {}
    for node, reason in reasons.items():
        nodes_with.setdefault(reason, []).append(node)
    most_frequent_first = sorted(nodes_with, key=lambda reason: -len(nodes_with[reason]))
    parts = [f"{len(nodes_with[reason])} said {reason!r} ({node_ids_text(nodes_with[reason])})" for reason in most_frequent_first]
    if silent:
        parts.append(f"{len(silent)} did not answer in time ({node_ids_text(silent)})")
    return f": {'; '.join(parts)}" if parts else ""


def all_declined(progress: RunProgress, reasons: Mapping[int, str]) -> AllDeclined:
    """Return the error for a round in which all nodes declined. ``reasons`` has each node's reason."""
    return AllDeclined(
        f"{progress.planned}: none of {counted(len(reasons), 'node')} takes part{reasons_text(reasons)}. The log of each node says what "
        "its operator has to change; if policy and budget are missing, run: ldpfl policy init APP. Then "
        f"start the run again.{notes_on_reasons(reasons)}"
    )


def too_few_connected(
    progress: RunProgress, connected: Collection[int], needed: int, seconds: float, required: Mapping[str, int]
) -> TooFewTakePart:
    """Return the error for a round for which fewer nodes are connected than it needs after ``seconds`` seconds. No node was asked.

    ``required`` has the run's settings that state a minimum number of nodes, with that number.
    """
    advice = advice_on_continuing(progress, len(connected), required)
    return TooFewTakePart(
        f"{len(connected)} of the {needed} nodes that a round needs are connected after {seconds:g} s{_away_note(progress, connected)}. "
        f"Start the missing SuperNodes, and the run again: it goes on with the next round.{advice}"
    )


def too_few_agree(
    progress: RunProgress, answers: Answers, connected: Collection[int], needed: int, advice_on_waiting: str, required: Mapping[str, int]
) -> TooFewTakePart:
    """Return the error for a round that was not begun, because too few nodes agreed to it: an ``AllDeclined`` if all have declined.

    Args:
        connected: nodes that are connected.
        needed: minimum number of nodes for the round.
        advice_on_waiting: text about how long nodes were waited for; empty if all answered.
        required: the run's settings that state a minimum number of nodes, with that number.
    """
    if answers.asked and answers.declined == answers.asked:
        return all_declined(progress, answers.reasons)
    only_silent = bool(answers.silent) and not answers.reasons
    remedy = "" if only_silent else f". {_REMEDY}"  # for silent nodes, `advice_on_waiting` is enough
    return TooFewTakePart(
        f"{progress.planned} was not begun, and nothing was charged: {len(answers.agreed)} of {counted(answers.asked, 'node')} would take "
        f"part, and it needs {needed}{reasons_text(answers.reasons, answers.silent)}{_away_note(progress, connected)}{advice_on_waiting}"
        f"{remedy}.{notes_on_reasons(answers.reasons)}{advice_on_continuing(progress, len(answers.agreed), required)}"
    )


def notes_on_reasons(reasons: Mapping[int, str]) -> str:
    """Return what the server's operator should know about the nodes' ``reasons``; empty if each of them speaks for itself.

    A node may say that it has charged the round before, that it was too late, or that its app has no answer to the question.
    """
    notes = ""
    if ChargedBefore.public in reasons.values():
        notes += (
            " If a node has already charged this round, this run folder is an older copy, such as a backup that was put back: its ledger "
            "lacks what nodes have sent since. Put back the newest copy; without one, begin another run in another folder (ldpfl.out), and "
            "see what each node has sent in its budget (ldpfl budget show)."
        )
    if {*reasons.values()} == {TooLate.public}:  # beside other reasons, the round was over because it was given up
        notes += " If too little time was left, set a longer window (ldpfl.window-s), unless nodes or the relay were interrupted."
    if any(_NOT_WRAPPED in reason for reason in reasons.values()):
        notes += (
            " If a node has no function for the question, its app is not wrapped, and would reply without noise: its clientapp must be "
            'LdpClientApp("package.module:name"), see docs/flower.md.'
        )
    return notes


_NOT_WRAPPED = "No query function registered"
"""Part of Flower's error for the question before a round, from a ClientApp that ``LdpClientApp`` does not wrap."""


def too_few_reported(progress: RunProgress, needed: int, reasons: Mapping[int, str], required: Mapping[str, int]) -> TooFewTakePart:
    """Return the error for a round that was ended, because nodes that had agreed sent no report. No report was released.

    Args:
        needed: minimum number of reports for the round.
        reasons: reason of each node that sent no report.
        required: the run's settings that state a minimum number of nodes, with that number.
    """
    asked = progress.round.asked
    return TooFewTakePart(
        f"{progress.planned} was ended, and no report of it was released: {asked - len(reasons)} of {counted(asked, 'node')} can still "
        f"take part, and it needs {needed}{reasons_text(reasons)}. All of them had agreed "
        f"before; nodes that train may have been charged. {_REMEDY}: it goes on after {progress.planned}, which is not repeated."
        f"{notes_on_reasons(reasons)}{advice_on_continuing(progress, asked - len(reasons), required)}"
    )


def no_reports(progress: RunProgress) -> TooFewTakePart:
    """Return the error for a run that is over, and in which no training round had a report."""
    rounds = len(progress.checkpoint.history)
    over = "its only training round is over" if rounds == 1 else f"all {rounds:,} training rounds are over"
    return TooFewTakePart(
        f"the run has no model: {over}, and none had a report. Remove the cause, which their logs name, and begin another run in another "
        "folder (ldpfl.out). What nodes were charged stays charged: see ldpfl budget show on each node"
    )


_REMEDY = (
    "The log of each of these nodes says why. A node that declined needs a change by its operator; if policy and budget are missing, run: "
    "ldpfl policy init APP. Start the run again afterwards"
)


def advice_on_continuing(progress: RunProgress, remaining: int, required: Mapping[str, int]) -> str:
    """Return advice on how to continue with the ``remaining`` nodes if the missing nodes do not come back.

    It is empty if so few nodes remain that no round is possible, or if a round asks only a fraction of the clients.

    Reports in replies do not protect one another, so the run can go on with fewer nodes. Over a relay it can go on as well if no target
    epsilon needs all clients: each round is charged with the noise of the nodes that take part. Else the noise was calibrated for all
    nodes, so fewer nodes need a new run with another plan.

    Args:
        required: the run's settings that state a minimum number of nodes, with that number. Only numbers above ``remaining`` have to be
            lowered.
    """
    config = progress.config
    fewest = 1 if config.shuffling.channel == "direct" else _MIN_OVER_RELAY
    if config.clients.fraction != 1 or remaining < fewest:
        return ""
    lowered = [setting for setting, minimum in required.items() if minimum > remaining]
    settings = f"{' and '.join(lowered)} to {remaining}{_in_custom_app(lowered, config)}"
    start_again = f" To go on without the missing nodes: set {settings}, and start the run again"
    if config.shuffling.channel == "direct":
        return start_again
    allow_fewer = f"each node's operator has to allow it (min_clients = {remaining} in the policy)"
    targets = targets_for_all_clients(config, transport_for_channel(config.shuffling.channel))
    if not targets:
        to_allow = f"; {allow_fewer}" if MIN_CLIENTS in lowered else ""
        return f"{start_again}{to_allow}. The ledger then counts the noise of {remaining} nodes in each further round"
    return (
        " To go on without the missing nodes: begin another run, in another folder (ldpfl.out), with clients.count, ldpfl.nodes and "
        f"ldpfl.min-clients set to {remaining}{_in_custom_app(('ldpfl.out', 'ldpfl.nodes', MIN_CLIENTS), config)}; {allow_fewer}. "
        f"Its noise is planned for {remaining} nodes and keeps {targets[0]} for that run"
        f"{_same_noise_note(config, remaining)}"
        f"{_spent_note(progress)}. See docs/sums.md, When a node leaves for good"
    )


_CUSTOM_APP_NAMES = {
    "ldpfl.out": "the path of RunFolder",
    "ldpfl.nodes": "nodes of Waiting",
    "ldpfl.agreeing": "agreeing of Waiting",
    MIN_CLIENTS: "min_clients of {collector}",
}
"""Settings of the ready app, each with what the ServerApp of a custom app sets instead."""


def _in_custom_app(settings: Collection[str], config: RunConfig) -> str:
    """Return text that says what the ServerApp of a custom app sets instead of these ``settings``."""
    collector = "operator_sum" if config.shuffling.channel == "secure-sum" else "operator_relay"
    names = " and ".join(_CUSTOM_APP_NAMES[setting] for setting in settings).format(collector=collector)
    return f" (in a custom app: {names})"


def _away_note(progress: RunProgress, connected: Collection[int]) -> str:
    """Return text that names the nodes of this run's earlier rounds that are not ``connected``; empty if all are connected."""
    away = progress.participation.rounds.keys() - set(connected)
    if not away:
        return ""
    is_crowded = len(away) + len(connected) > progress.config.clients.count
    former = " (some of these ids are former ones: a node that registers anew, as after a restart of the SuperLink, gets another)"
    return f"; not connected, but asked in earlier rounds of this run: {node_ids_text(away)}{former if is_crowded else ''}"


def _same_noise_note(config: RunConfig, remaining: int) -> str:
    """Return text with the epsilon of a whole run of ``remaining`` nodes with the noise of ``config``; empty if it cannot be computed."""
    smaller = config.model_copy(update={"clients": config.clients.model_copy(update={"count": remaining})})
    with suppress(ConfigError):  # the ledger cannot be planned for an app's own model, or without figures that only a run has
        epsilon = run_epsilon(planned_ledger(smaller), config.privacy.delta)
        return f" (with this run's noise, {remaining} nodes would give epsilon {number(epsilon)})" if epsilon < inf else ""
    return ""


def _spent_note(progress: RunProgress) -> str:
    """Return text with the epsilon that this run has spent so far, which a new run does not give back; empty if it has spent nothing."""
    if not progress.checkpoint.ledger.events:
        return ""
    epsilon = run_epsilon(progress.checkpoint.ledger, progress.config.privacy.delta)
    return f". What this run has released stays charged in addition: epsilon {number(epsilon)} so far"
