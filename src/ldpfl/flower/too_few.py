"""What the server says when too few nodes take part in a round: which nodes are missing, why, and what its operator may do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from math import inf

from ldpfl.errors import AllDeclined, ConfigError, TooFewTakePart
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.flower.invitation import Answers
from ldpfl.flower.run_progress import Course
from ldpfl.privacy.statement import run_epsilon
from ldpfl.util.number_format import counted, number

MAX_NAMED = 20
"""Number of nodes that a message names at most."""

_LEAST_OVER_RELAY = 2


def named(nodes: Collection[int]) -> str:
    """Return Flower's ids of ``nodes``, as ``flwr supernode list`` shows them; of many nodes the first ones."""
    shown = ", ".join(map(str, sorted(nodes)[:MAX_NAMED]))
    more = f" and {len(nodes) - MAX_NAMED:,} more" if len(nodes) > MAX_NAMED else ""
    return f"{'node' if len(nodes) == 1 else 'nodes'} {shown}{more}"


def reasons(said: Mapping[int, str], silent: Collection[int] = ()) -> str:
    """Return what nodes ``said`` that do not take part, how often and which nodes, and which were ``silent``; empty if there are none."""
    by_reason: dict[str, list[int]] = {}
    for node, reason in said.items():
        by_reason.setdefault(reason, []).append(node)
    parts = [f"{len(nodes)} said {reason!r} ({named(nodes)})" for reason, nodes in sorted(by_reason.items(), key=lambda one: -len(one[1]))]
    if silent:
        parts.append(f"{len(silent)} did not answer in time ({named(silent)})")
    return f": {'; '.join(parts)}" if parts else ""


def all_declined(course: Course, said: Mapping[int, str]) -> AllDeclined:
    """Return the error for the round that is under way, in which all nodes declined; ``said`` has each node's reason."""
    return AllDeclined(
        f"{course.planned}: none of {counted(len(said), 'node')} takes part{reasons(said)}. Each waits for its operator, and its log "
        "says for what; a node without policy and budget gets them by: ldpfl policy init APP"
    )


def too_few_connected(course: Course, connected: Collection[int], needed: int, seconds: float) -> TooFewTakePart:
    """Return the error for a round for which too few nodes are connected after some ``seconds``. Nobody was asked."""
    return TooFewTakePart(
        f"{len(connected)} of the {needed} nodes that a round needs are connected after {seconds:g} s{_away(course, connected)}. Start the "
        f"missing SuperNodes, and the run again: it goes on with the next round.{going_on_without(course, len(connected))}"
    )


def too_few_agree(course: Course, answers: Answers, connected: Collection[int], needed: int, patience: str) -> TooFewTakePart:
    """Return the error for the round that is under way, which was not begun: too few nodes agreed to it.

    Args:
        connected: nodes that are connected.
        patience: how long nodes were waited for; empty if all answered.
    """
    if answers.declined == answers.asked > 0:
        return all_declined(course, answers.said)
    remedy = f". {_REMEDY}" if answers.said or not answers.silent else ""
    return TooFewTakePart(
        f"{course.planned} was not begun, and nothing was charged: {len(answers.agreed)} of {counted(answers.asked, 'node')} would take "
        f"part, and it needs {needed}{reasons(answers.said, answers.silent)}{_away(course, connected)}{patience}{remedy}."
        f"{going_on_without(course, len(answers.agreed))}"
    )


def too_few_came(course: Course, needed: int, said: Mapping[int, str]) -> TooFewTakePart:
    """Return the error for the round that is under way, in which nodes that had agreed sent no report. None was released."""
    asked = course.round.asked
    return TooFewTakePart(
        f"{course.planned} was ended, and no report of it was released: {asked - len(said)} of {counted(asked, 'node')} can still "
        f"take part, and it needs {needed}{reasons(said)}. All of them had agreed "
        f"before; nodes that train may have been charged. {_REMEDY}.{going_on_without(course, asked - len(said))}"
    )


_REMEDY = (
    "The log of each of these nodes says why: a node that declined waits for its operator, and one without policy and budget gets them by: "
    "ldpfl policy init APP. Start the run again afterwards"
)


def going_on_without(course: Course, left: int) -> str:
    """Return what the operator may do if the missing nodes do not come back and ``left`` nodes take part; empty where these are too few.

    With a target epsilon the noise was planned for all nodes, so fewer nodes need another plan, and a run of their own. Without a target
    each round is charged with the noise of the nodes that take part.
    """
    config = course.config
    if config.clients.fraction != 1 or left < (1 if config.shuffling.channel == "direct" else _LEAST_OVER_RELAY):
        return ""
    if config.shuffling.channel == "direct":
        return (
            f" To go on without the missing nodes: set ldpfl.nodes and ldpfl.agreeing to {left} (in an app of your own, those of Waiting), "
            "and start the run again"
        )
    lower = f"each node's operator has to allow it (min_clients = {left} in the policy)"
    if config.privacy.target_epsilon == "off":
        return (
            f" To go on without the missing nodes: set ldpfl.nodes and ldpfl.min-clients to {left}, and start the run again; {lower}. The "
            f"ledger then counts the noise of {left} nodes in each further round"
        )
    return (
        " To go on without the missing nodes: begin another run, in another folder (ldpfl.out), with clients.count, ldpfl.nodes and "
        f"ldpfl.min-clients set to {left}; {lower}. Its noise is planned for {left} nodes and keeps privacy.target_epsilon = "
        f"{config.privacy.target_epsilon:g} for that run{_same_noise(config, left)}{_spent(course)}. See docs/sums.md, When a node leaves "
        "for good"
    )


def _away(course: Course, connected: Collection[int]) -> str:
    """Return which nodes of this run are not ``connected`` now; empty if all nodes are that it has seen."""
    away = course.participation.rounds.keys() - set(connected)
    return f"; not connected: {named(away)}, of the run's earlier rounds" if away else ""


def _same_noise(config: RunConfig, left: int) -> str:
    """Return the epsilon that a whole run of ``left`` nodes would have with the noise of ``config``."""
    fewer = config.model_copy(update={"clients": config.clients.model_copy(update={"count": left})})
    with suppress(ConfigError):  # of an app's own model, or of figures that only a run has
        epsilon = run_epsilon(planned_ledger(fewer), config.privacy.delta)
        return f" (with this run's noise, {left} nodes would give epsilon {number(epsilon)})" if epsilon < inf else ""
    return ""


def _spent(course: Course) -> str:
    """Return what the run has released so far, which another run does not give back."""
    if not course.last.ledger.events:
        return ""
    epsilon = run_epsilon(course.last.ledger, course.config.privacy.delta)
    return f". What this run has released stays charged beside it: epsilon {number(epsilon)} so far"
