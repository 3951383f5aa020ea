"""What a run that was stopped has left open at the aggregator and at its relay, and how to close it."""

from __future__ import annotations

import shlex
import ssl
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError, RelayRefused
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower.nodes_asked import Participation
from ldpfl.flower.operator_node import read_token
from ldpfl.flower.round_kinds import last_round
from ldpfl.privacy.policy import OVER_RELAY
from ldpfl.relay import RelayAggregator, RoundStatus
from ldpfl.util.number_format import counted

_UNKNOWN = 404

_STOPPING_S = 60.0
"""Seconds after which a ServerApp has ended: it learns that its run was stopped when it next reports to the SuperLink, every 30 s."""


@dataclass(frozen=True)
class LeftOpen:
    """How a run on Flower stands.

    Attributes:
        run: its name, also at the relay.
        finished: rounds that are in the checkpoint.
        planned: rounds of its config.
        begun: the round that was begun and is not in the checkpoint; None if there is none.
        asked: nodes that were asked in it, each of which may have charged its budget and sent its report.
        last: the last round that was begun at all; the relay may hold its records even if it is finished.
        over_relay: whether its reports go over a relay.
    """

    run: str
    finished: int
    planned: int
    begun: int | None
    asked: int
    last: int
    over_relay: bool


def left_open(folder: RunFolder) -> LeftOpen:
    """Return how the run in ``folder`` stands.

    Raises:
        ConfigError: there is no run of Flower, or it is still under way.
        DataError: a file is damaged.
    """
    config = folder.config()
    if not folder.participation_path.exists():
        raise ConfigError(f"{folder.path} holds no run on Flower that has asked any node: nothing of it is open anywhere")
    try:
        with folder.locked():
            asked, last = Participation.load(folder.participation_path), folder.checkpoint()
    except ConfigError:
        raise ConfigError(
            f"a ServerApp is at work in {folder.path}, so what it leaves open is not known yet: the run is under way, or was stopped and "
            f"may still be stopping, which takes it up to {_STOPPING_S:.0f} s after flwr stop. Ask again then"
        ) from None
    finished = 0 if last is None else len(last.ledger.events)
    begun = asked.begun if asked.begun > finished else None
    return LeftOpen(
        asked.run,
        finished,
        last_round(config, config.training.rounds),
        begun,
        asked.asked,
        asked.begun,
        over_relay=asked.terms.get("transport") in OVER_RELAY,
    )


def at_relay(relay: RelayAggregator, left: LeftOpen) -> RoundStatus | None:
    """Return what the relay says of the last round that was begun, None if it never knew it or deleted all of it.

    Raises:
        RelayRefused, RelayUnreachable: the relay does not answer, or does not know the token.
    """
    try:
        status = relay.round_status(left.run, left.last)
    except RelayRefused as refusal:
        if refusal.status != _UNKNOWN:
            raise
        return None
    return None if status.state == "gone" else status


def operator_aggregator(url: str, token: Path, authority: Path | None) -> RelayAggregator:
    """Return the caller of the relay at ``url``, as the aggregator whose token is in a file."""
    verify = ssl.create_default_context(cafile=str(authority)) if authority else True
    return RelayAggregator(url, read_token(token), verify=verify)


def described(left: LeftOpen) -> list[str]:
    """Return what the run folder tells, a line each, for the aggregator's operator."""
    lines = [f"run {left.run}: {left.finished:,} of {counted(left.planned, 'round')} finished"]
    if left.begun is not None:
        lines.append(
            f"round {left.begun} was begun with {counted(left.asked, 'node')} and is not finished: each of them may have sent a report. "
            "Their budgets are charged, and the ledger counts the round: neither gives anything back"
        )
        if not left.over_relay:
            lines.append(
                "its reports were in the replies, and are lost. To go on: submit the same app again, with the same folder; the run goes on "
                "with the next round"
            )
    elif left.finished < left.planned:
        lines.append("no round is under way, and nothing is lost. To go on: submit the same app again, with the same folder")
    return lines


def held(relay: RelayAggregator, left: LeftOpen, folder: Path) -> list[str]:
    """Return what the relay holds of the run, a line each, and what can be done; errors as :func:`at_relay`."""
    status = at_relay(relay, left)
    if status is None:
        lines = ["the relay holds nothing of the run"]
        if left.begun is not None:
            lost = f"so the reports of round {left.begun} are lost"
            lines.append(f"{lost}. To go on with the next round: submit the same app again, with the same folder")
        return lines
    uploads, cancel = counted(status.uploads or 0, "upload"), f"ldpfl deploy left-open {shlex.quote(str(folder))} --cancel"
    if status.state == "released":
        lines = [f"the relay holds round {left.last}: released, of {uploads}"]
    else:
        needed = f"it releases nothing of fewer than {status.terms.min_clients:,}"
        lines = [f"the relay holds round {left.last}: {status.state}, {uploads} so far; {needed}; nodes told to train may still upload"]
    if left.begun is None:
        return [*lines, f"the run folder has the round, so the relay's copy is not needed. To have it deleted: {cancel}"]
    return [*lines, "to go on with these reports: submit the same app again, with the same folder", f"to give them up: {cancel}"]


def closed(relay: RelayAggregator, left: LeftOpen) -> list[str]:
    """Have the relay delete what it holds of the run, and return what that means, a line each; errors as :func:`at_relay`."""
    if at_relay(relay, left) is None:
        return ["the relay holds nothing of the run: there was nothing to cancel"]
    relay.cancel(left.run, left.last)
    lost = "" if left.begun is None else f". The reports of round {left.begun} are lost, and stay charged"
    return [f"the relay has deleted what it held of round {left.last}{lost}"]
