"""The server asks before it begins a round: nobody pays for a round that cannot come about, and the run says why it ends."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flower_parts import OpenNode, app_of, config_of, ledger_rounds, shift, simulator_bits, start_arrays
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from flwr.serverapp import Grid
from relayed_parts import CLIENTS, InProcess, World, policy_of, world_in

from ldpfl.errors import ConfigError, Declined, LdpflError, TooLate
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import (
    AllDeclined,
    Ask,
    InProcessGrid,
    LdpClientApp,
    LdpStrategy,
    Node,
    OperatorNode,
    TooFewTakePart,
    Waiting,
)
from ldpfl.flower.invitation import QUESTION
from ldpfl.flower.server_invitations import WaitingLog, wait_for_nodes
from ldpfl.privacy.budget_file import set_limit
from ldpfl.relay import RelayUnreachable
from ldpfl.server import Checkpoint, round_cohort

NO_WAIT = Waiting(1, 0.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        made.min_clients = CLIENTS
        yield made


def run(
    world: World, folder: RunFolder, rounds: int = 2, *, node: Callable[[Context], Node] | None = None, grid: Grid | None = None
) -> Checkpoint:
    strategy = LdpStrategy(config_of(), collector=world.collector(), folder=folder, waiting=NO_WAIT)
    app = LdpClientApp(shift, node=node or world.node, source=world.source)
    strategy.start(grid or InProcessGrid(app, CLIENTS), start_arrays(), rounds, timeout=100.0)
    return strategy.checkpoint


def nodes_of(world: World, kind: type[OperatorNode], only: int | None = None) -> Callable[[Context], Node]:
    """Return what makes nodes of this ``kind``; with ``only``, the other clients have the usual nodes."""

    def node(context: Context) -> Node:
        own = world.node(context)
        is_of_kind = only is None or context.node_config["partition-id"] == only
        return kind(own.policy, own.budget, own.connect) if is_of_kind else own

    return node


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two rounds in which nothing went wrong."""
    folder = tmp_path_factory.mktemp("calm")
    with world_in(folder) as world:
        world.min_clients = CLIENTS
        return run(world, RunFolder(folder / "run"))


def test_a_server_that_waits_says_for_what_and_seldom(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When it begins, and then after 10, 20, 40 s ...: an operator sees which nodes are missing, and no log is filled."""
    now = [1000.0]
    monkeypatch.setattr("ldpfl.flower.server_invitations.time.monotonic", lambda: now[0])
    monkeypatch.setattr("ldpfl.flower.server_invitations.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    class Filling(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            return [1, 2, 3][: 2 if now[0] < 1250 else 3]

    with caplog.at_level(logging.INFO, logger="flwr.ldpfl"):
        grid = Filling(app_of(), 3)
        assert wait_for_nodes(grid, Waiting(3, 300.0), 1300.0, lambda nodes: None, WaitingLog()) == [1, 2, 3]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "2 of the 3 nodes that a round needs are connected: waiting for more, up to 300 s"
    assert [line.split()[-2] for line in said] == ["300", "290", "270", "230", "150"]


def same(one: Checkpoint, other: Checkpoint) -> bool:
    return torch.equal(one.state.weights, other.state.weights) and one.ledger == other.ledger


class Passing(InProcessGrid):
    """A grid that hands messages of one type through ``change``, and their replies."""

    def __init__(self, app: LdpClientApp, kind: str, change: Callable[[list[Message], Callable[..., Any]], Iterable[Message]]) -> None:
        super().__init__(app, CLIENTS)
        self._kind, self._change = kind, change

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        own, send = list(messages), super().send_and_receive
        return iter(self._change(own, send)) if own and own[0].metadata.message_type == self._kind else send(own, timeout=timeout)


def passing(world: World, kind: str, change: Callable[[list[Message], Callable[..., Any]], Iterable[Message]]) -> Passing:
    return Passing(LdpClientApp(shift, node=world.node, source=world.source), kind, change)


@pytest.mark.slow
def test_messages_that_are_replayed_over_the_relay_are_charged_once_and_send_one_report(world: World) -> None:
    """By a server, or by who can; also to a node that was started again, and also as a question."""
    again: list[str] = []

    def replayed(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        first = list(send(messages))
        posted = [method for method, _ in world.wire.replies].count("POST")
        for _ in range(2):
            again.extend(str(reply.error.reason) for reply in world.grid().send_and_receive(messages))
        assert [method for method, _ in world.wire.replies].count("POST") == posted == CLIENTS
        return first

    folder = RunFolder(world.folder / "run")
    assert run(world, folder, 1, grid=passing(world, "train", replayed)).ledger.events[0].cohort == CLIENTS
    assert world.charges() == [1] * CLIENTS
    assert again == ["declined: the round was charged before"] * 2 * CLIENTS
    own = world.node(Context(0, 1, {"partition-id": 0}, RecordDict(), {}))
    with pytest.raises(Declined, match="round 1: this round was charged before"):
        own.would_admit(world.asked[0])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["direct", "relay"])
def test_nodes_report_no_round_again_to_a_server_whose_folder_is_an_older_copy(world: World, transport: str) -> None:
    """The copy's ledger lacks what nodes have sent since, and agrees with all other files of the folder."""
    world.policy, folder, backup = policy_of(transports=(transport,)), RunFolder(world.folder / "run"), world.folder / "backup"

    def run_to(rounds: int) -> None:
        collector = world.collector() if transport == "relay" else None
        strategy = LdpStrategy(config_of(), collector=collector, folder=folder, waiting=NO_WAIT)
        strategy.start(world.grid(), start_arrays(), rounds, timeout=100.0)

    run_to(1)
    shutil.copytree(folder.path, backup)
    run_to(3)
    shutil.rmtree(folder.path)
    shutil.copytree(backup, folder.path)
    with pytest.raises(TooFewTakePart, match=r"charged before.*this run folder is an older copy.*begin another run"):
        run_to(4)
    assert world.charges() == [3] * CLIENTS  # nothing was sent a second time


def test_a_node_that_has_charged_a_round_before_counts_as_having_joined_it() -> None:
    """It has sent a report that the server's older copy of the ledger lacks."""
    begun = Participation().after_asking(1, [1, 2], [1, 2, 3], {}).after_asking(2, [1, 2], [1, 2, 3], {}, charged_before=[3])
    assert begun.rounds == {1: 2, 2: 2, 3: 1}
    assert begun.asked == 2


class Killed(BaseException):
    """Stands for SIGKILL: nothing in between handles it."""


@pytest.mark.slow
@pytest.mark.thorough
def test_one_node_without_budget_costs_the_others_nothing_and_the_run_goes_on_when_it_has_some(world: World, calm: Checkpoint) -> None:
    folder = RunFolder(world.folder / "run")
    set_limit(world.folder / "budget-0.sqlite", 1.0)
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(
            TooFewTakePart,
            match=r"round 1 was not begun.*: 4 of 5 nodes would take part, and it needs 5: 1 said 'declined: its life.* \(node 2\)",
        ):
            run(world, folder, 10)
    assert time.monotonic() - began < 20
    assert world.charges() == [0] * CLIENTS
    assert not folder.ledger_path.exists()
    assert {method for method, _ in world.wire.replies} == {"GET"}  # no round was opened
    set_limit(world.folder / "budget-0.sqlite", 1000.0)
    assert same(run(world, folder), calm)
    assert world.charges() == [2] * CLIENTS


@pytest.mark.slow
@pytest.mark.thorough
def test_nodes_that_agreed_and_then_all_decline_leave_the_round_to_be_begun(world: World, calm: Checkpoint) -> None:
    """A decline comes before any charge. The round begins again under another name: the relay has the old one as over."""

    class Declining(OperatorNode):
        def admit(self, ask: Ask) -> float:
            raise Declined("changed meanwhile")

    def declining(context: Context) -> Node:
        own = world.node(context)
        return Declining(own.policy, own.budget, own.connect)

    folder = RunFolder(world.folder / "run")
    with pytest.raises(AllDeclined, match="round 1: none of 5 nodes takes part: 5 said 'declined'"):
        run(world, folder, node=declining)
    assert not folder.ledger_path.exists()
    assert Participation.load(folder.participation_path).begun == 0
    assert same(run(world, folder), calm)


@pytest.mark.slow
def test_a_node_that_agreed_and_then_declines_ends_the_round_at_once(world: World) -> None:
    class Declining(OperatorNode):
        def admit(self, ask: Ask) -> float:
            raise Declined("changed meanwhile")

    folder = RunFolder(world.folder / "run")
    with pytest.raises(
        TooFewTakePart, match=r"round 1 was ended, .*: 4 of 5 nodes can still take part, and it needs 5: 1 said 'declined'"
    ) as raised:
        run(world, folder, 10, node=nodes_of(world, Declining, only=1))
    assert "set ldpfl.min-clients to 4 (in a custom app: min_clients of operator_relay), and start the run again" in str(raised.value)
    assert world.charges() == [1, 0, 0, 0, 0]
    assert ledger_rounds(folder.ledger_path) == [1]  # the first had uploaded: that is charged, though the relay has deleted it
    assert world.collector().relay.round_status(world.asked[0].terms.run, 1).state == "gone"


@pytest.mark.slow
def test_a_round_that_all_nodes_find_too_short_is_taken_back_and_the_window_is_named(world: World) -> None:
    class Late(OperatorNode):
        def admit(self, ask: Ask) -> float:
            raise TooLate("the relay's round ends in 3 s")

    folder = RunFolder(world.folder / "run")
    with pytest.raises(AllDeclined, match=r"5 said \"declined: too little time .* set a longer window \(ldpfl.window-s\)"):
        run(world, folder, node=nodes_of(world, Late))
    assert world.charges() == [0] * CLIENTS
    run(world, folder)
    assert ledger_rounds(folder.ledger_path) == [1, 2]  # the same folder goes on with round 1


@pytest.mark.slow
def test_a_message_that_is_repeated_after_its_round_is_over_takes_no_charged_round_back(world: World) -> None:
    class Repeated(OperatorNode):
        def admit(self, ask: Ask) -> float:
            super().admit(ask)  # charged; then the node is killed, and the round ends
            relay = world.collector().relay
            with suppress(LdpflError):  # it was cancelled before
                relay.cancel(ask.terms.run, ask.terms.round)
            return super().admit(ask)

    folder = RunFolder(world.folder / "run")
    with pytest.raises(TooFewTakePart, match="declined: the round was charged before"):
        run(world, folder, node=nodes_of(world, Repeated, only=0))
    assert world.charges()[0] == 1
    assert ledger_rounds(folder.ledger_path) == [1]


@pytest.mark.slow
def test_a_run_without_any_report_has_no_model(world: World) -> None:
    def failed(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "failed"), reply_to=message) for message in messages]

    folder = RunFolder(world.folder / "run")
    for number in (1, 2):
        with pytest.raises(TooFewTakePart, match=f"round {number} was ended"):
            run(world, folder, grid=passing(world, MessageType.TRAIN, failed))
    for _ in range(2):
        with pytest.raises(TooFewTakePart, match=r"has no model: all 2 training rounds are over, and none had a report\."):
            run(world, folder)
    assert ledger_rounds(folder.ledger_path) == [1, 2]
    assert world.charges() == [0] * CLIENTS


@pytest.mark.slow
def test_a_node_that_dies_after_its_answer_is_waited_for_once(world: World) -> None:
    dead = list[int]()

    def without_the_first(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        dead.append(messages[0].metadata.dst_node_id)
        yield from send(messages[1:])

    class Dying(Passing):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            return super().send_and_receive([one for one in messages if one.metadata.dst_node_id not in dead], timeout=timeout)

    folder = RunFolder(world.folder / "run")
    grid = Dying(LdpClientApp(shift, node=world.node, source=world.source), MessageType.TRAIN, without_the_first)
    with pytest.raises(TooFewTakePart, match=r"round 2 was not begun.*: 4 of 5 nodes would take part.*: 1 did not answer in time"):
        run(world, folder, 10, grid=grid)
    assert world.charges() == [0, 1, 1, 1, 1]
    assert ledger_rounds(folder.ledger_path) == [1]  # one reply is missing: its report may have left


@pytest.mark.slow
def test_a_decline_and_a_missing_reply_are_charged(world: World) -> None:
    """All that replied declined before any charge; what the one did that did not reply, nobody knows."""

    def change(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        return [Message(Error(6, "declined"), reply_to=message) for message in messages[1:]]

    folder = RunFolder(world.folder / "run")
    with pytest.raises(TooFewTakePart, match="4 said 'declined'"):
        run(world, folder, grid=passing(world, MessageType.TRAIN, change))
    assert ledger_rounds(folder.ledger_path) == [1]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_server_killed_after_the_answers_has_begun_nothing(world: World, calm: Checkpoint) -> None:
    def killed(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        yield from send(messages)
        raise Killed

    folder = RunFolder(world.folder / "run")
    with pytest.raises(Killed):
        run(world, folder, grid=passing(world, QUESTION, killed))
    assert not folder.ledger_path.exists()
    assert same(run(world, folder), calm)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_that_the_relay_does_not_open_is_not_begun(world: World, calm: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: InProcess, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            raise httpx.ConnectError("away")
        return handle(self, request)

    folder, handle = RunFolder(world.folder / "run"), InProcess.handle_request
    with monkeypatch.context() as patched:
        patched.setattr(InProcess, "handle_request", away)
        with pytest.raises(RelayUnreachable):
            run(world, folder)
    assert not folder.ledger_path.exists()
    assert same(run(world, folder), calm)


@pytest.mark.slow
@pytest.mark.thorough
def test_enough_uploads_are_taken_though_too_many_replies_are_errors(world: World, calm: Checkpoint) -> None:
    """A node may fail after its upload: what the relay has counts."""

    def failing(messages: list[Message], send: Callable[..., Any]) -> Iterable[Message]:
        replies = list(send(messages))
        return [Message(Error(8, "crashed"), reply_to=message) for message, _ in zip(messages, replies, strict=True)]

    assert same(run(world, RunFolder(world.folder / "run"), grid=passing(world, MessageType.TRAIN, failing)), calm)


def recorded(refusing: Iterable[int], fewest: int = 1) -> tuple[LdpClientApp, dict[int, list[int]], dict[int, int]]:
    """An app, by node among how many clients it was asked, and told to train; those in ``refusing`` do not agree, nor any to too few."""
    asked: dict[int, list[int]] = {}
    told: dict[int, int] = {}

    class Noting(OpenNode):
        def __init__(self, context: Context) -> None:
            super().__init__()
            self.own = int(context.node_config["partition-id"])

        def would_admit(self, ask: Ask) -> None:
            asked.setdefault(self.own, []).append(ask.terms.cohort)
            if self.own in refusing or ask.terms.cohort < fewest:
                raise Declined("no")

        def admit(self, ask: Ask) -> float:
            told[self.own] = ask.terms.asked
            return super().admit(ask)

    return LdpClientApp(shift, node=Noting, source=simulator_bits), asked, told


def rounds(app: LdpClientApp, number: int = 1, *, waiting: Waiting = NO_WAIT, clients: int = 10, fraction: float = 0.4) -> Checkpoint:
    strategy = LdpStrategy(config_of(f"clients.fraction={fraction}"), waiting=waiting)
    strategy.start(InProcessGrid(app, clients), start_arrays(), number)
    return strategy.checkpoint


def test_where_all_agree_the_cohort_is_asked_and_nobody_else() -> None:
    app, asked, told = recorded([])
    rounds(app)
    cohort = [int(place) for place in round_cohort(4, 1, 10, 0.4, None)]
    assert list(asked) == list(told) == cohort
    assert set(told.values()) == {4}


def test_others_stand_in_for_nodes_that_decline() -> None:
    cohort = [int(place) for place in round_cohort(4, 1, 10, 0.4, None)]
    app, asked, told = recorded(cohort[:2])
    last = rounds(app)
    assert last.history[0].clients == 4
    assert len(told) == 4
    assert not set(cohort[:2]) & set(told)
    assert set(told.values()) == {4}
    assert len(asked) == 6
    (event,) = last.ledger.events
    assert (event.cohort, event.population, event.joined) == (4, 10, 1)


def test_a_node_judges_by_the_number_of_nodes_that_take_part() -> None:
    app, asked, told = recorded([0], fewest=4)
    assert rounds(app, clients=5, fraction=1.0).history[0].clients == 4
    assert told == dict.fromkeys(range(1, 5), 4)
    assert asked == {0: [5]} | {node: [5, 4] for node in range(1, 5)}
    app, asked, told = recorded([0], fewest=5)
    with pytest.raises(TooFewTakePart, match="4 said 'would take part in a round of 5, not of 4'"):
        rounds(app, clients=5, fraction=1.0)
    assert told == {}


def test_a_run_may_want_more_nodes_to_agree_than_one() -> None:
    app, _, told = recorded([0])
    with pytest.raises(TooFewTakePart, match="4 of 5 nodes would take part, and it needs 5"):
        rounds(app, waiting=Waiting(1, 0.0, agreeing=5), clients=5, fraction=1.0)
    assert told == {}
    rounds(app, waiting=Waiting(1, 0.0, agreeing=4), clients=5, fraction=1.0)
    assert list(told) == [1, 2, 3, 4]
    for wrong in ({"agreeing": 0}, {"answer_s": 0.0}):
        with pytest.raises(ConfigError, match="agreeing must be at least 1"):
            Waiting(**wrong)


def test_a_server_app_that_calls_the_steps_itself_asks_as_well() -> None:
    app, asked, told = recorded([0])
    strategy, grid = LdpStrategy(config_of(), waiting=NO_WAIT), InProcessGrid(app, 3)
    strategy.start(grid, start_arrays(), 0)
    messages = strategy.configure_train(1, start_arrays(), ConfigRecord(), grid)
    assert list(asked) == [0, 1, 2]
    strategy.aggregate_train(1, list(grid.send_and_receive(messages)))
    assert list(told) == [1, 2]
    assert strategy.checkpoint.history[0].clients == 2


class Remote(Grid):
    """A grid as Flower's are: replies are pulled when they are there. Some nodes never reply to a type of message.

    Nodes in ``slow`` reply so many seconds after a message was sent. Those in ``away`` are not connected; the SuperLink replies for them.
    """

    def __init__(self, app: LdpClientApp, silent: dict[str, set[int]], slow: dict[int, float] | None = None) -> None:
        self._inner, self._silent, self.slow, self.away = InProcessGrid(app, 3), silent, slow or {}, set[int]()
        self.sent = list[tuple[str, int]]()
        self._since = dict[str, float]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        names = list(self._inner.push_messages(sent))
        self.sent += [(message.metadata.message_type, message.metadata.dst_node_id - 2) for message in sent]
        self._since |= dict.fromkeys(names, time.monotonic())
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        pulled: list[Message] = []
        for message in [self._inner._pushed[name] for name in sorted(message_ids) if name in self._inner._pushed]:
            node, name = int(message.metadata.dst_node_id) - 2, message.metadata.message_id
            if node in self.away:
                pulled.append(create_message_error_unavailable_res_message(message.metadata, "node_unavail"))
            elif time.monotonic() < self._since[name] + self.slow.get(node, 0.0):
                continue
            elif node not in self._silent.get(message.metadata.message_type, ()):
                pulled += self._inner.pull_messages([name])
        return pulled

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("this would wait for those that never reply")

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self._inner.get_node_ids() if node - 2 not in self.away]

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return self._inner.run


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_left_out_after_a_short_time() -> None:
    app, _, told = recorded([])
    strategy = LdpStrategy(config_of(), waiting=Waiting(1, 0.0, answer_s=0.05))
    began = time.monotonic()
    strategy.start(Remote(app, {QUESTION: {1}}), start_arrays(), 2, timeout=300.0)
    assert time.monotonic() - began < 30
    assert told == {0: 2, 2: 2}
    assert [metrics.clients for metrics in strategy.checkpoint.history] == [2, 2]


@pytest.mark.slow
def test_a_slow_node_gets_in_by_its_late_answer_and_nobody_is_asked_twice() -> None:
    """It needs several times as long as others are waited for, each time that it is asked."""
    app, _, told = recorded([])
    strategy, grid = LdpStrategy(config_of(), waiting=Waiting(1, 5.0, agreeing=3, answer_s=0.1)), Remote(app, {}, {1: 0.5})
    strategy.start(grid, start_arrays(), 1, timeout=300.0)
    assert told == {0: 3, 1: 3, 2: 3}
    assert grid.sent == [(kind, node) for kind in (QUESTION, "train") for node in range(3)]


@pytest.mark.slow
def test_a_late_answer_that_comes_together_with_the_awaited_one_counts() -> None:
    """A node's answer can be pulled once only."""
    refusing = set[int]()

    class Together(Remote):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            questions = [node for kind, node in self.sent if kind == QUESTION]
            refusing.update(questions[2:])  # the one that is asked in the place of the first, which is slow until then
            self.slow = {} if refusing else {questions[0]: 60.0}
            return sorted(super().pull_messages(message_ids), key=lambda reply: reply.metadata.src_node_id - 2 == questions[0])

    app, _, told = recorded(refusing)
    strategy = LdpStrategy(config_of("clients.fraction=0.66"), waiting=Waiting(1, 5.0, agreeing=2, answer_s=0.1))
    strategy.start(Together(app, {}), start_arrays(), 1, timeout=300.0)
    assert told == dict.fromkeys({0, 1, 2} - refusing, 2)


@pytest.mark.slow
def test_a_node_that_was_away_is_asked_again() -> None:
    """The message that it had got before is lost to it."""

    class Restarting(Remote):
        def get_node_ids(self) -> Iterable[int]:
            if self.away:  # and so back
                self.slow = {}
            self.away = {1} if self.slow and self.sent else set()
            return super().get_node_ids()

    app, _, told = recorded([])
    grid = Restarting(app, {}, {1: 60.0})
    strategy = LdpStrategy(config_of(), waiting=Waiting(3, 5.0, agreeing=3, answer_s=0.1))
    strategy.start(grid, start_arrays(), 1, timeout=300.0)
    assert told == {0: 3, 1: 3, 2: 3}
    assert [grid.sent.count((QUESTION, node)) for node in range(3)] == [1, 2, 1]


@pytest.mark.slow
def test_where_nodes_are_silent_the_error_says_what_to_raise_and_nothing_of_declining() -> None:
    def error(refusing: Iterable[int]) -> str:
        app, _, _ = recorded(refusing)
        strategy = LdpStrategy(config_of(), waiting=Waiting(1, 0.2, agreeing=3, answer_s=0.05))
        with pytest.raises(TooFewTakePart) as raised:
            strategy.start(Remote(app, {QUESTION: {1}}), start_arrays(), 1, timeout=300.0)
        return str(raised.value)

    silent = error([])
    assert "did not answer within 0.05 s" in silent
    assert "raise answer_s (ldpfl.answer-s)" in silent
    assert "more than 0.2 s in all" in silent
    assert "declined" not in silent
    assert "policy init" not in silent
    both = error([0])
    assert "raise answer_s" in both
    assert "policy init" in both


@pytest.mark.slow
def test_a_round_that_cannot_come_about_is_not_waited_for(tmp_path: Path) -> None:
    """One node declines, and the two others would reply after a long time."""
    with world_in(tmp_path) as world:
        world.policy = policy_of(min_clients=3)

        class Declining(OperatorNode):
            def admit(self, ask: Ask) -> float:
                raise Declined("changed meanwhile")

        strategy = LdpStrategy(config_of(), collector=world.collector(), waiting=Waiting(1, 0.0, answer_s=0.05))
        began = time.monotonic()
        with pytest.raises(TooFewTakePart, match="round 1 was ended"):
            strategy.start(
                Remote(LdpClientApp(shift, node=nodes_of(world, Declining)), {"train": {1, 2}}), start_arrays(), 5, timeout=300.0
            )
        assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_that_is_missing_is_waited_for_once(world: World) -> None:
    """The time for the replies is over when the relay is asked for the round, which it cannot release without that node."""

    def fail(client: int) -> None:
        if client == 1:
            raise RuntimeError("power cut")

    world.before_upload = fail
    collector = replace(world.collector(), min_clients=3, window_s=0.5)
    strategy, began = LdpStrategy(config_of(), collector=collector, waiting=NO_WAIT), world.now[0]
    grid = Remote(LdpClientApp(shift, node=world.node, source=world.source), {"train": {1}})
    strategy.start(grid, start_arrays(), 1, timeout=2.0)
    assert world.now[0] - began < 1.0  # seconds that the relay was waited for, beside those for the replies
    assert [metrics.clients for metrics in strategy.checkpoint.history] == [0]
    assert world.store.status("aggregator", world.asked[0].terms.run, 1).state == "gone"


def test_the_question_holds_no_model() -> None:
    seen: list[Message] = []

    class Seeing(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            own = list(messages)
            seen.extend(message for message in own if message.metadata.message_type == QUESTION)
            return super().send_and_receive(own, timeout=timeout)

    LdpStrategy(config_of(), waiting=NO_WAIT).start(Seeing(app_of(), 3), start_arrays(), 1)
    assert len(seen) == 3
    assert len({id(message.content) for message in seen}) == 1
    assert not [record for record in seen[0].content.values() if isinstance(record, ArrayRecord)]


def test_a_folder_says_who_was_told_to_train_and_not_who_was_asked(tmp_path: Path) -> None:
    app, _, _ = recorded([0])
    folder = RunFolder(tmp_path / "run")
    LdpStrategy(config_of(), folder=folder, waiting=NO_WAIT).start(InProcessGrid(app, 3), start_arrays(), 2)
    assert sorted(Participation.load(folder.participation_path).rounds.values()) == [0, 2, 2]
