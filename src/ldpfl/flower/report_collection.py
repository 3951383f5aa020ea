"""How a round's reports reach the server: in the Flower replies themselves, or over the relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from flwr.app import RecordDict

from ldpfl.flower.terms import Answer
from ldpfl.mechanisms import Mechanism, read_valid
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.events import Channel
from ldpfl.transport.shuffling import PartialPool, RecordPlan, ReportPool, mix
from ldpfl.util.randomness import Purpose, stream


@dataclass(frozen=True, eq=False)
class OpenRound:
    """A round that clients have been asked to join.

    Attributes:
        run: names the run.
        number: of the round, from 1.
        mechanism: of this round.
        asked: clients that were asked.
        timeout: seconds that the server waits for reports.
        linked: units that stay together on the way.
        vector: length of the longest vector that a client adds up, in clipping norms.
    """

    run: str
    number: int
    mechanism: Mechanism
    ranges: LayerRanges
    asked: int
    timeout: float
    linked: int = 1
    vector: float = 1.0

    @cached_property
    def plan(self) -> RecordPlan:
        """How reports are cut into records; made once a round.

        Raises:
            ConfigError: they cannot be cut so.
        """
        # Whoever sets the mechanism "none" has asked for it; whether clients do it is for their policies to say.
        return RecordPlan(self.mechanism, self.ranges, self.linked, unprotected=True)


@dataclass(frozen=True, eq=False)
class Received:
    """What came of a round.

    Attributes:
        pool: the reports that follow the wire format; None if there is none.
        uplink_bytes: length of one client's message.
        refused: what was not accepted and why, a line each.
        broken: why what came cannot be opened, as long as nobody mends that; empty if it can. The same is there when it is asked for again.
    """

    pool: ReportPool | PartialPool | None
    uplink_bytes: int = 0
    refused: tuple[str, ...] = ()
    broken: str = ""


class Collector(Protocol):
    """How reports come in."""

    @property
    def channel(self) -> Channel:
        """What the ledger says stands between clients and server."""
        ...

    @property
    def linked(self) -> int:
        """Units that stay together on the way."""
        ...

    @property
    def min_clients(self) -> int:
        """Fewest clients among which a report can have been, where it is not known how many there were."""
        ...

    def terms(self) -> Mapping[str, Any]:
        """Return what clients are told of it: fields of ``RoundTerms``."""
        ...

    def begun_on(self, terms: Mapping[str, str | int]) -> Collector:
        """Return the collector that can take up a round that was begun on ``terms``; this one, unless it knows how they came about."""
        ...

    def check_ready(self, round_: OpenRound, reply_s: float) -> None:
        """Raise if the round could not be opened now, with replies after ``reply_s``; called before anything is written down of it."""
        ...

    def open(self, round_: OpenRound, content: RecordDict) -> None:
        """Get ready for the reports of a round, before anyone is asked; ``content`` is what all clients are going to be sent."""
        ...

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        """Return what came in.

        Args:
            answers: those of the Flower replies, one a client, in the order of the clients' numbers.
            left_s: seconds that are left of the time for reports.
        """
        ...

    def give_up(self, round_: OpenRound) -> bool:
        """End the round now, so that none of its reports is released; unless enough have come already. Return whether it was ended."""
        ...

    def recover(self, round_: OpenRound) -> Received | None:
        """Return what came in for a round in which the server was stopped; None if that is lost."""
        ...

    def done(self, run: str, number: int) -> None:
        """Forget the round: what it led to is on disk. May be called again."""
        ...


@dataclass(frozen=True)
class DirectCollector:
    """Reports come in the Flower replies, so the server sees who sent which.

    Args:
        seed: of the run. Reports are put into the order that the simulator gives them, so that both end in the same bits;
            it hides nothing.
    """

    seed: int
    channel: Channel = "direct"
    linked: int = 1
    min_clients: int = 1

    def terms(self) -> Mapping[str, Any]:
        return {"transport": "direct"}

    def begun_on(self, terms: Mapping[str, str | int]) -> DirectCollector:
        return self

    def check_ready(self, round_: OpenRound, reply_s: float) -> None:
        return

    def open(self, round_: OpenRound, content: RecordDict) -> None:
        return

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        payloads = [answer.report for answer in answers if answer.report is not None]
        reports, refused = read_valid(round_.mechanism, payloads, round_.ranges)
        notes = [*(entry.reason for entry in refused), *["a reply without a report"] * (len(answers) - len(payloads))]
        if reports is None:
            return Received(None, refused=tuple(notes))
        pool = mix([reports], stream(self.seed, Purpose.MIXING, round_.number))
        return Received(pool, reports.bytes_per_client, tuple(notes))

    def give_up(self, round_: OpenRound) -> bool:
        return True

    def recover(self, round_: OpenRound) -> Received | None:
        return None

    def done(self, run: str, number: int) -> None:
        return
