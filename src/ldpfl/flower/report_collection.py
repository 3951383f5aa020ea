"""How a round's reports reach the server: in the Flower replies themselves, or over the relay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
        run: name of the run.
        number: number of the round, from 1.
        mechanism: mechanism of this round.
        ranges: public ranges of the vector that is asked for.
        asked: number of clients that were asked.
        timeout: seconds that the server waits for reports.
        linked: number of units of a report that stay together in transit.
        max_length: maximum length of each vector in a sum, a client's or a record's, as a multiple of the clipping norm.
    """

    run: str
    number: int
    mechanism: Mechanism
    ranges: LayerRanges
    asked: int
    timeout: float
    linked: int = 1
    max_length: float = 1.0

    @cached_property
    def plan(self) -> RecordPlan:
        """The rule by which reports are cut into records. It is computed once a round.

        Raises:
            ConfigError: reports cannot be cut into records of ``linked`` units.
        """
        # The server allows the mechanism "none", because its operator has asked for it. The clients' policies decide whether they do.
        return RecordPlan(self.mechanism, self.ranges, self.linked, unprotected=True)


@dataclass(frozen=True, eq=False)
class Received:
    """The reports of a round, as far as they arrived.

    Attributes:
        pool: the valid reports; None if there is none.
        uplink_bytes: length of one client's message.
        refused: reasons why reports were not accepted, one line each.
        decoding_error: reason why the relay's release cannot be decoded; empty if it can. The relay would hand out the same release
            again, so a retry helps only after someone has removed the cause.
    """

    pool: ReportPool | PartialPool | None
    uplink_bytes: int = 0
    refused: tuple[str, ...] = ()
    decoding_error: str = ""


class Collector(Protocol):
    """Way in which reports reach the server. The defaults suit a transport that holds no reports of its own."""

    @property
    def channel(self) -> Channel:
        """The channel between clients and server, as the ledger counts it."""
        ...

    @property
    def linked(self) -> int:
        """Number of units of a report that stay together in transit."""
        ...

    @property
    def min_clients(self) -> int:
        """Minimum number of clients whose reports are released together: the cohort to assume if the true number is not known."""
        ...

    def terms(self) -> Mapping[str, Any]:
        """Return what clients are told about this transport, as fields of ``RoundTerms``."""
        ...

    def collector_for(self, terms: Mapping[str, str | int]) -> Collector:
        """Return the collector that can resume a round that was begun on ``terms``: this one, or one with their previous key."""
        return self

    def check_ready(self, round_: OpenRound, reply_s: float) -> None:
        """Raise if the round could not be opened now, with replies after ``reply_s`` seconds. Called before the round is charged."""
        return

    def open(self, round_: OpenRound, content: RecordDict) -> None:
        """Prepare for the reports of a round, before any client is told to train. All clients will be sent ``content``."""
        return

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        """Return the round's reports.

        Args:
            answers: answers in the Flower replies, one for each client, in the order of the clients' ids.
            left_s: seconds left until reports are no longer waited for.
        """
        ...

    def wait_notes(self, round_: OpenRound) -> Callable[[float], None]:
        """Return a function that logs what the round waits for. The wait calls it repeatedly, with the seconds left."""
        return lambda left_s: None

    def give_up(self, round_: OpenRound) -> bool:
        """End the round without releasing any of its reports, unless enough have arrived. Return True if the round was ended."""
        return True

    def recover(self, round_: OpenRound) -> Received | None:
        """Return the reports of a round in which the server was stopped; None if they are lost."""
        return None

    def delete_round(self, run: str, number: int) -> None:
        """Delete the transport's copy of the round, whose result the server has saved. May be called again."""
        return


@dataclass(frozen=True)
class DirectCollector(Collector):
    """Collects reports from the Flower replies: the server sees who sent each report.

    Args:
        seed: seed of the run. Reports are permuted as in the simulator, so that both give the same model bit for bit. The permutation
            hides nothing.
    """

    seed: int
    # No arguments: the ledger relies on them.
    channel: Channel = field(default="direct", init=False)
    linked: int = field(default=1, init=False)
    min_clients: int = field(default=1, init=False)

    def terms(self) -> Mapping[str, Any]:
        return {"transport": "direct", "min_clients": self.min_clients}

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        """Return the valid reports among ``answers`` in permuted order, and a reason for each answer without a valid report."""
        payloads = [answer.report for answer in answers if answer.report is not None]
        reports, refused = read_valid(round_.mechanism, payloads, round_.ranges)
        reasons = [entry.reason for entry in refused]
        reasons += ["a reply without a report"] * (len(answers) - len(payloads))
        if reports is None:
            return Received(None, refused=tuple(reasons))
        pool = mix([reports], stream(self.seed, Purpose.MIXING, round_.number))
        return Received(pool, reports.bytes_per_client, tuple(reasons))
