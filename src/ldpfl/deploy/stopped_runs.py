"""What a run that was stopped has left open at the aggregator and at its relay, and how to close it."""

from __future__ import annotations

import shlex
import ssl
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError, RelayRefused
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower.operator_node import read_token
from ldpfl.flower.round_kinds import last_round
from ldpfl.privacy.policy import OVER_RELAY
from ldpfl.relay import RelayAggregator, RoundStatus
from ldpfl.util.number_format import counted

_NOT_FOUND = 404  # HTTP status

_MAX_STOPPING_S = 60.0
"""Seconds after which a stopped ServerApp has ended. It reports to the SuperLink every 30 s, and learns from the answer."""


@dataclass(frozen=True)
class LeftOpen:
    """State of a run on Flower that may have been stopped.

    Attributes:
        run: name of the run, also at the relay.
        finished: number of rounds in the checkpoint.
        planned: number of rounds in the config.
        begun: number of the round that was begun and is not in the checkpoint; None if there is no such round.
        asked: number of nodes that were asked in the last round. Each may have charged its budget and sent its report.
        last: number of the last round that was begun. The relay may hold its records even if it is finished.
        over_relay: whether the run's reports go over a relay.
    """

    run: str
    finished: int
    planned: int
    begun: int | None
    asked: int
    last: int
    over_relay: bool


def read_left_open(folder: RunFolder) -> LeftOpen:
    """Return how far the run in ``folder`` is, and which round it left open.

    Raises:
        ConfigError: the folder holds no run on Flower, or the run is still under way.
        DataError: a file is damaged.
    """
    config = folder.config()
    if not folder.participation_path.exists():
        raise ConfigError(
            f"{folder.path} has no run on Flower in which a node was asked to take part, so nothing is left to be finished or cancelled"
        )
    try:
        with folder.locked():  # raises while a ServerApp works in the folder
            participation, checkpoint = folder.participation(), folder.checkpoint()
    except ConfigError:
        raise ConfigError(
            f"a ServerApp still works in {folder.path}, so it is not known yet which round it leaves unfinished. Either the run is under "
            f"way, or it is stopping, which takes up to {_MAX_STOPPING_S:.0f} s after flwr stop. Ask again when it has ended"
        ) from None
    finished = 0 if checkpoint is None else len(checkpoint.ledger.events)
    return LeftOpen(
        run=participation.run,
        finished=finished,
        planned=last_round(config, config.training.rounds),
        begun=participation.begun if participation.begun > finished else None,
        asked=participation.asked,
        last=participation.begun,
        over_relay=participation.terms.get("transport") in OVER_RELAY,
    )


def status_at_relay(relay: RelayAggregator, run: LeftOpen) -> RoundStatus | None:
    """Return the relay's status of the last round that was begun; None if the relay never knew the round or has deleted its data.

    Raises:
        RelayRefused, RelayUnreachable: the relay does not answer, or does not know the token.
    """
    try:
        status = relay.round_status(run.run, run.last)
    except RelayRefused as refusal:
        if refusal.status != _NOT_FOUND:
            raise
        return None
    return None if status.state == "gone" else status


def operator_aggregator(url: str, token: Path, authority: Path | None) -> RelayAggregator:
    """Return a client of the relay at ``url`` that acts as the aggregator whose ``token`` is in a file."""
    verify = ssl.create_default_context(cafile=str(authority)) if authority else True
    return RelayAggregator(url, read_token(token), verify=verify)


def progress_lines(run: LeftOpen) -> list[str]:
    """Return lines for the aggregator's operator: how far the run is, what is open, and how to go on."""
    if run.finished > run.planned:  # LdpStrategy.start(num_rounds=...) may ask for more rounds than the config
        lines = [f"run {run.run}: {counted(run.finished, 'round')} finished, more than the {run.planned:,} of the config"]
    else:
        lines = [f"run {run.run}: {run.finished:,} of {counted(run.planned, 'round')} finished"]
    if run.begun is not None:
        lines.append(
            f"round {run.begun} was begun with {counted(run.asked, 'node')} and is not finished: each of them may have sent a report. "
            "Their budgets may be charged, and the ledger counts the round: these charges stay"
        )
        if not run.over_relay:
            lines.append(
                "its reports were in the replies, and are lost. To go on: submit the same app again, with the same folder; the run goes on "
                "with the next round"
            )
    elif run.finished < run.planned:
        lines.append("no round is under way, and nothing is lost. To go on: submit the same app again, with the same folder")
    return lines


def relay_lines(relay: RelayAggregator, run: LeftOpen, folder: Path) -> list[str]:
    """Return lines for the operator: the round that the relay holds, and what to do. Errors are those of :func:`status_at_relay`."""
    status = status_at_relay(relay, run)
    if status is None:
        lines = ["the relay has no data of this run"]
        if run.begun is not None:
            lost = f"so the reports of round {run.begun} are lost"
            lines.append(f"{lost}. To go on with the next round: submit the same app again, with the same folder")
        return lines
    uploads = counted(status.uploads or 0, "upload")
    cancel = f"ldpfl deploy left-open {shlex.quote(str(folder))} --cancel"
    if status.state == "released":
        lines = [f"the relay has released round {run.last}, made of {uploads}"]
    else:
        condition = f"it releases the round from {status.terms.min_clients:,} uploads on"
        lines = [
            f"round {run.last} at the relay is {status.state}, with {uploads} so far; {condition}; nodes told to train may still upload"
        ]
    if run.begun is None:
        return [*lines, f"the run folder already has this round, so the relay's copy is not needed. To delete it there: {cancel}"]
    return [*lines, "to go on with these reports: submit the same app again, with the same folder", f"to give them up: {cancel}"]


def cancel_at_relay(relay: RelayAggregator, run: LeftOpen) -> list[str]:
    """Have the relay delete the run's last round, and return lines about the consequences. Errors are those of :func:`status_at_relay`."""
    if status_at_relay(relay, run) is None:
        return ["the relay has no data of this run: there was nothing to cancel"]
    relay.cancel(run.run, run.last)
    lost = "" if run.begun is None else f". The reports of round {run.begun} are lost, and stay charged"
    return [f"the relay has deleted what it held of round {run.last}{lost}"]
