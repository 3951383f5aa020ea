"""Rounds over the relay, in one process: what arrives, what is left out, and what survives an interruption."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flower_parts import config_of, instruction, shift, simulator_bits, start_arrays, start_vector, terms_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from relayed_parts import CLIENTS, KEY, WatchedGrid, World, policy_of, world_in

from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import ConfigError, Declined, ProtocolError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import AllDeclined, Ask, InProcessGrid, LdpClientApp, LdpStrategy, Node, RoundTerms, TooFewTakePart
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.client_app import FAILED
from ldpfl.flower.report_collection import OpenRound
from ldpfl.flower.round_request import read_request
from ldpfl.privacy.budget_file import read_books
from ldpfl.relay import RelayAggregator, RelayClient, RoundStatus, Terms
from ldpfl.server import Checkpoint
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import OVERHEAD


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


def direct(config: RunConfig, rounds: int, skip: tuple[int, ...] = ()) -> Checkpoint:
    """The same rounds with reports in the replies, from the same random bits."""

    class Open:
        def __init__(self, context: Context) -> None:
            self._gone = context.node_config["partition-id"] in skip

        def keeps_state(self, ask: Ask) -> bool:
            return True

        def would_admit(self, ask: Ask) -> None: ...

        def admit(self, ask: Ask) -> float:
            if self._gone:
                raise ValueError
            return inf

        def seal(self, ask: Ask, payload: bytes) -> bytes:
            return payload

        def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None: ...

    strategy = LdpStrategy(config)
    app = LdpClientApp(shift, node=Open, source=simulator_bits)
    strategy.start(InProcessGrid(app, CLIENTS), start_arrays(), rounds)
    return strategy.checkpoint


@pytest.mark.parametrize("linked", [1, 4])
@pytest.mark.parametrize("name", ["duchi", "harmony", "laplace", "full-dp"])
@pytest.mark.slow
@pytest.mark.thorough_for("laplace-1", "harmony-4", "full-dp-1", "harmony-1", "laplace-4", "duchi-1", "duchi-4")
def test_a_round_over_the_relay_learns_what_one_without_it_does(name: str, linked: int, world: World) -> None:
    config = config_of(f"mechanism.name={name}", "ranges.rule=fixed" if name == "full-dp" else "ranges.rule=denoised")
    world.linked = linked
    last = world.run(2, config=config)
    same = direct(config, 2)
    # Floats are added up in the relay's order, so the last bit may differ; bits are counted.
    torch.testing.assert_close(last.state.weights, same.state.weights, atol=0 if name in ("duchi", "harmony") else 1e-6, rtol=0)
    assert not torch.equal(last.state.weights, start_vector())
    assert [(event.channel, event.linked, event.cohort) for event in last.ledger.events] == [("ideal-shuffler", linked, CLIENTS)] * 2
    assert world.charges() == [2] * CLIENTS


@pytest.mark.slow
@pytest.mark.thorough
def test_the_flower_reply_is_a_bare_acknowledgement_and_the_relay_forgets(world: World) -> None:
    grid = WatchedGrid(world)
    collector = world.collector()
    strategy = LdpStrategy(config_of(), collector=collector)
    strategy.start(grid, start_arrays(), 1, timeout=100.0)
    replies = grid.replies
    assert [reply.metadata.message_type for reply in replies] == ["query.takes_part"] * CLIENTS + ["train"] * CLIENTS
    for reply in replies:
        assert list(reply.content) == ["ldpfl"]
        assert set(reply.content.config_records["ldpfl"]) == {"version", "run", "round"}
    run = str(replies[0].content.config_records["ldpfl"]["run"])
    assert collector.relay.round_status(run, 1).state == "gone"
    assert ("DELETE", 204) in world.wire.replies


@pytest.mark.slow
def test_missing_clients_are_left_out(world: World) -> None:
    def fail(client: int) -> None:
        if client in (0, 3):
            raise RuntimeError("power cut")

    world.before_upload = fail
    last = world.run()
    assert last.ledger.events[0].cohort == 3
    assert torch.equal(last.state.weights, direct(config_of(), 1, skip=(0, 3)).state.weights)


@pytest.mark.slow
def test_too_few_uploads_are_not_released_and_the_model_stays(world: World) -> None:
    def fail(client: int) -> None:
        if client > 1:
            raise RuntimeError("power cut")

    world.before_upload, folder = fail, RunFolder(world.folder / "run")
    with pytest.raises(TooFewTakePart, match=r"round 1 was ended, .*: 2 of 5 nodes can still take part, and it needs 3: 3 said 'failed'"):
        world.run(2, folder=folder)
    last = folder.checkpoint()
    assert last is not None
    assert [metrics.clients for metrics in last.history] == [0]
    assert [(event.cohort, event.population) for event in last.ledger.events] == [(3, 5)]  # two uploads left, sealed
    assert torch.equal(last.state.weights, start_vector())
    assert world.collector().relay.round_status(world.asked[0].terms.run, 1).state == "gone"


@pytest.mark.slow
def test_a_client_with_a_wrong_token_is_left_out_before_it_trains(world: World) -> None:
    world.tokens["client-2"] = "not a token"
    assert world.run().ledger.events[0].cohort == 4
    assert world.charges() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"aggregator_keys": ()}, {}),
        ({}, {"key": X25519PrivateKey.generate()}),
        ({"min_clients": 4}, {}),  # the relay mixes from 3 on, however many the server asks
        ({"linked": 2}, {"linked": 3}),
        ({"transports": ("direct",)}, {}),
    ],
)
def test_clients_decline_what_their_policy_does_not_allow_of_a_relay(
    changes: dict[str, object], asked: dict[str, object], world: World
) -> None:
    world.policy = policy_of(**changes)
    for name, value in asked.items():
        setattr(world, name, value)
    with pytest.raises(AllDeclined):
        world.run()
    assert world.charges() == [0] * CLIENTS
    assert not [method for method, _ in world.wire.replies if method in ("POST", "PATCH")]


def test_a_relay_that_claims_to_mix_more_clients_than_the_server_says_is_sent_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node would count less than its report costs: the server opens what fewer clients sent."""
    status_of = RelayClient.round_status

    def exaggerated(relay: RelayClient, run: str, number: int) -> RoundStatus:
        status = status_of(relay, run, number)
        return status.model_copy(update={"terms": status.terms.model_copy(update={"min_clients": CLIENTS})})

    monkeypatch.setattr(RelayClient, "round_status", exaggerated)
    with pytest.raises(AllDeclined):
        world.run()
    assert world.charges() == [0] * CLIENTS
    refusals = read_books(world.folder / "budget-0.sqlite").refusals
    assert refusals is not None
    assert "the relay waits for 5 reports, but the server's message says min_clients = 3" in refusals.reason


def failing(message: Message, context: Context) -> Message:
    raise ValueError


@pytest.mark.slow
@pytest.mark.parametrize("reply_s", [0.0, 3.0])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.thorough_except("True-0.0")
def test_what_the_relay_is_asked_does_not_depend_on_training(cancelled: bool, reply_s: float, world: World) -> None:
    """Also where the aggregator ends the round while clients train, to count how often those ask that could not finish."""
    seen = []
    for train in (shift, failing):

        def step(message: Message, context: Context, train: Any = train) -> Message:
            if cancelled:  # by the aggregator, at this very moment
                terms = message.content.config_records["ldpfl"]
                world.collector().relay.cancel(str(terms["run"]), int(terms["round"]))  # type: ignore[arg-type]
            reply: Message = train(message, context)
            return reply

        world.wire.replies.clear()
        replies: list[bool] = []

        class Watched(InProcessGrid):
            def send_and_receive(self, messages, *, timeout=None, told=replies):  # type: ignore[no-untyped-def]
                for reply in super().send_and_receive(messages, timeout=timeout):
                    if reply.metadata.message_type == "train":
                        told.append(reply.has_error())
                    yield reply

        grid = Watched(LdpClientApp(step, node=world.node, source=world.source), CLIENTS)
        with suppress(TooFewTakePart):  # what an aggregator gets that cancels its own round
            LdpStrategy(config_of(), collector=world.collector(), reply_s=reply_s).start(grid, start_arrays(), 1, timeout=100.0)
        requests = [reply for reply, _ in groupby(world.wire.replies)]  # how often the aggregator asks for the state depends on the clock
        seen.append((requests, replies, world.charges()))
    (asked, errors, charges), (asked_too, errors_too, charges_too) = seen
    assert asked == asked_too
    assert errors == errors_too == ([True] * 3 if cancelled else [False] * CLIENTS)  # it stops where too few are left
    assert charges == ([1, *[0] * (CLIENTS - 1)] if cancelled else [1] * CLIENTS)  # after a cancelled round no other client begins
    assert charges_too == [2 * charge for charge in charges]


@pytest.mark.slow
def test_a_relay_round_of_other_size_is_not_uploaded_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(**fields: object) -> Terms:
        return Terms.model_validate({**fields, "records_per_upload": 16})

    monkeypatch.setattr("ldpfl.flower.relay_collection.Terms", other)
    with pytest.raises(TooFewTakePart):
        world.run()
    assert world.charges() == [0] * CLIENTS


@pytest.mark.slow
def test_a_relay_that_says_other_terms_than_it_was_given_has_no_records_read(world: World) -> None:
    """How much is read, and held, goes by them: a million uploads where eight are allowed would fill the memory."""
    terms = {
        "record_bytes": 2**20,
        "records_per_upload": 1,
        "min_clients": 3,
        "closes_in_s": 60.0,
        "max_uploads": 10_000,
        "agreement": "0" * 64,
    }

    def false(client: int) -> None:
        world.wire.falsely = {"terms": terms, "uploads": 10_000} if client == CLIENTS - 1 else {}

    world.before_upload = false
    with pytest.raises(ProtocolError, match="10000 uploads, expected at most 5"):
        world.run()


def test_what_is_left_of_a_budget_does_not_show_before_it_is_charged(world: World) -> None:
    """A server that asks for a round that it never opens at the relay could find it out by asking for more and more."""
    replies = []
    for epsilon in (2.0, 25.0):  # of which the second is more than is left
        terms = terms_of(transport="relay", key=KEY.public_key().public_bytes_raw(), config=config_of(f"mechanism.epsilon={epsilon}"))
        world.policy = policy_of(lifetime_epsilon=100.0, epsilon_per_round=1000.0)
        grid = InProcessGrid(LdpClientApp(shift, node=world.node, source=world.source), 1)
        (reply,) = grid.send_and_receive([instruction(terms)])
        replies.append(reply.error.reason)
    assert replies == [FAILED, FAILED]
    assert world.charges() == [0]


@pytest.mark.slow
def test_a_relay_is_not_believed_for_days(world: World) -> None:
    world.wire.falsely = {"seconds_left": 6 * 24 * 3600.0}
    deliverable: list[float] = []

    def node(context: Context) -> Node:
        operator = world.node(context)
        if context.node_config["partition-id"] == 0:
            admit = operator.admit
            operator.admit = lambda ask: deliverable.append(admit(ask)) or deliverable[-1]  # type: ignore[method-assign, func-returns-value]
        return operator

    def reported(client: int) -> None:
        world.wire.falsely = {}

    world.before_upload = reported
    strategy = LdpStrategy(config_of(), collector=world.collector())
    strategy.start(InProcessGrid(LdpClientApp(shift, node=node, source=world.source), CLIENTS), start_arrays(), 1, timeout=100.0)
    assert deliverable == [pytest.approx(24 * 3600, abs=20)]


@pytest.mark.thorough_for("59.0-60.0-5-10000.0-0", "70.0-60.0-5-10000.0-0", "59.0-60.0-3-10000.0-1", "100000.0-60.0-3-90.0-1")
@pytest.mark.parametrize(
    ("window_s", "reply_s", "max_uploads", "longest_upload_s", "charged"),
    [
        (59.0, 60.0, 5, 1e4, 0),
        (70.0, 60.0, 5, 1e4, 0),  # a report of 60 s would not be uploaded in what is left
        (76.0, 60.0, 5, 1e4, 1),
        (59.0, 60.0, 3, 1e4, 1),  # a round that cannot end without all of its clients is open for longer
        (59.0, 700.0, 3, 1e4, 0),
        (1e5, 60.0, 5, 90.0, 1),
        (1e5, 60.0, 3, 90.0, 1),
        (1e5, 60.0, 5, 59.0, 0),
        (1e5, 60.0, 3, 59.0, 0),
    ],
)
def test_a_round_that_is_over_before_a_client_may_send_costs_it_nothing(
    window_s: float, reply_s: float, max_uploads: int, longest_upload_s: float, charged: int, world: World
) -> None:
    world.policy = policy_of(longest_upload_s=longest_upload_s)
    terms = terms_of(transport="relay", key=KEY.public_key().public_bytes_raw(), reply_s=reply_s)
    ask = read_request(instruction(terms).content, "train", terms.run_config).ask
    plan = RecordPlan(ask.mechanism, ask.ranges, terms.linked)
    size = {"record_bytes": plan.plaintext_bytes + OVERHEAD, "records_per_upload": plan.records, "max_uploads": max_uploads}
    world.store.open_round("aggregator", "run", 1, Terms(**size, min_clients=3, closes_in_s=window_s, agreement=ask.agreement))
    node = world.node(Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    if charged:
        assert reply_s < node.admit(ask) <= longest_upload_s
    else:
        with pytest.raises((Declined, ProtocolError), match=rf"clients (send|upload) after {reply_s:g} s"):
            node.admit(ask)
    assert world.charges() == [charged]


@pytest.mark.parametrize(("window_s", "min_clients", "opens"), [(61.0, 3, False), (90.0, 3, True), (61.0, CLIENTS, True)])
def test_a_window_has_to_leave_time_for_the_upload(window_s: float, min_clients: int, opens: bool, world: World) -> None:
    """A round that cannot end without all of its clients is open for longer than its window."""
    world.min_clients = min_clients
    collector = replace(world.collector(), window_s=window_s)
    round_ = OpenRound("run", 1, mechanisms.create("duchi", epsilon=1.0), LayerRanges(0.0, 1.0, (3,)), CLIENTS, 100.0)
    with nullcontext() if opens else pytest.raises(ConfigError, match=r"window is 61 s, .* make the window at least 90 s"):
        collector.check_ready(round_, 60.0)


def _tagged(message: Message, what: str) -> Message:
    """The message to one client alone, changed a little, so that what it sends would be known by that."""
    terms = RoundTerms.from_record(message.content.config_records["ldpfl"])
    arrays, own = message.content.array_records["arrays"], ConfigRecord({"server-round": 1})
    others: dict[str, MetricRecord] = {}
    if what == "settings of the app":
        own["learning-rate"] = 0.1
    elif what == "another record":
        others = {"metrics": MetricRecord({"you": 1})}
    elif what == "shapes":  # the same vector, and records that open under another plan
        vector = to_vector(arrays, layout_of(arrays))
        arrays = ArrayRecord({"weight": Array(vector[:10].numpy()), "bias": Array(vector[10:].numpy())})
    elif what == "ranges":
        terms = replace(terms, radius=(terms.radius[0] * (1 + 1e-9), *terms.radius[1:]))
    elif what == "config":
        terms = replace(terms, config=terms.config.model_copy(update={"description": "for you"}))
    elif what == "model":
        layout = layout_of(arrays)
        arrays = to_arrays(torch.nextafter(to_vector(arrays, layout), torch.tensor(1.0)), layout)
    content = RecordDict({"arrays": arrays, "config": own, "ldpfl": terms.to_record(), **others})
    kind = "train.alt" if what == "type of message" else message.metadata.message_type
    return Message(content, message.metadata.dst_node_id, kind, group_id=message.metadata.group_id)


@pytest.mark.parametrize("what", ["ranges", "config", "model", "shapes", "settings of the app", "another record", "type of message"])
@pytest.mark.slow
@pytest.mark.thorough_except("type of message")
def test_a_client_that_is_asked_for_something_else_than_the_others_declines(
    what: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LdpStrategy would send no such message, so it is changed on the way to the nodes, as by a hostile server."""
    grid = world.grid()
    send = grid.send_and_receive

    def tag_first(messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        first, *others = messages
        told = first.metadata.message_type == MessageType.TRAIN
        return send([_tagged(first, what) if told else first, *others], timeout=timeout)

    monkeypatch.setattr(grid, "send_and_receive", tag_first)
    strategy = LdpStrategy(config_of(), collector=world.collector())
    strategy.start(grid, start_arrays(), 1, timeout=100.0)
    assert strategy.checkpoint.history[-1].clients == CLIENTS - 1
    assert world.charges() == [0, *[1] * (CLIENTS - 1)]
    refusals = read_books(world.folder / "budget-0.sqlite").refusals
    assert refusals is not None
    assert "does not have the digest that the relay states to all clients" in refusals.reason


def test_a_subclass_that_changes_messages_is_refused_before_any_node_counts_a_refusal(world: World, tmp_path: Path) -> None:
    """Nodes would decline each of these messages, as if the server were hostile. The corrected app can go on."""

    class Late(LdpStrategy):
        def configure_train(self, *args: Any) -> list[Message]:
            messages = super().configure_train(*args)
            messages[0].content.config_records["config"]["lr"] = 0.1
            return messages

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match="change arrays or config before you call super"):
        Late(config_of(), collector=world.collector(), folder=folder).start(world.grid(), start_arrays(), 1, timeout=100.0)
    assert all(read_books(path).refusals is None for path in world.folder.glob("budget-*.sqlite"))
    assert [metrics.clients for metrics in world.run(2, folder=folder).history] == [0, CLIENTS]
    assert world.charges() == [1] * CLIENTS
    assert len(folder.ledger().events) == 2


def test_a_server_that_asks_fewer_than_the_relay_mixes_is_told(world: World) -> None:
    world.min_clients = 9
    with pytest.raises(ConfigError, match="the relay cannot run round 1: max_uploads is less than min_clients"):
        world.run()


class Killed(BaseException):
    """Stands for SIGKILL: nothing in between handles it."""


@pytest.mark.parametrize("where", ["ldpfl.flower.round_closing.close_round", "ldpfl.flower.relay_collection.RelayCollector.delete_round"])
@pytest.mark.slow
@pytest.mark.thorough
def test_an_aggregator_killed_after_it_pulled_ends_as_one_that_was_not(where: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay keeps the records until they are acknowledged: nothing is asked, charged or counted twice."""
    folder = RunFolder(world.folder / "run")

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(where, killed)
        with pytest.raises(Killed):
            world.run(2, folder=folder)
    last = world.run(2, folder=folder)
    assert torch.equal(last.state.weights, direct(config_of(), 2).state.weights)
    assert [event.cohort for event in last.ledger.events] == [CLIENTS] * 2
    assert [event.joined for event in last.ledger.events] == [1, 2]
    assert world.charges() == [2] * CLIENTS
    assert all(world.collector().relay.round_status(ask.terms.run, ask.terms.round).state == "gone" for ask in world.asked)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_server_killed_before_anyone_uploaded_waits_no_longer_than_for_a_round(world: World) -> None:
    folder = RunFolder(world.folder / "run")

    def kill(client: int) -> None:
        raise Killed

    world.before_upload = kill
    with pytest.raises(Killed):
        world.run(2, folder=folder)
    world.before_upload = lambda client: None
    last = world.run(2, folder=folder)
    assert [metrics.clients for metrics in last.history] == [0, CLIENTS]


def test_a_round_that_waits_for_a_dead_node_says_how_to_end_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def die(client: int) -> None:
        if client < 3:
            raise OSError

    class WithoutFailures(WatchedGrid):
        """Loses the replies of nodes that failed, as if these nodes had died."""

        def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
            return (reply for reply in super().send_and_receive(messages, timeout=timeout) if not reply.has_error())  # type: ignore[no-untyped-call]

    caplog.set_level(logging.INFO)
    world.before_upload = die
    strategy = LdpStrategy(config_of(), collector=world.collector())
    strategy.start(WithoutFailures(world), start_arrays(), 1, timeout=1000.0)
    (line, *later) = [record.getMessage() for record in caplog.records if "ldpfl relay cancel" in record.getMessage()]
    assert line.startswith("round 1: the relay has 2 uploads of the 3 it needs: waiting up to ")
    assert line.endswith(f"ldpfl relay cancel {world.asked[0].terms.run} 1")
    assert len(later) == 3  # one every 300 of the 940 seconds after the window


@pytest.mark.parametrize("when", ["waiting", "pulling", "resumed"])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_that_is_cancelled_at_the_relay_is_charged_and_the_run_goes_on(
    when: str, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(world.folder / "run")
    caplog.set_level(logging.INFO)

    def cancel() -> None:
        world.store.cancel("aggregator", world.asked[0].terms.run, 1)

    def sleep(seconds: float) -> None:
        world.now[0] += seconds
        cancel()

    def wait(self: RelayAggregator, run: str, number: int, timeout_s: float, **options: Any) -> RoundStatus:
        status = wait_for_relay(self, run, number, timeout_s, **options)
        cancel()
        return status

    def kill(client: int) -> None:
        raise Killed

    if when == "resumed":
        world.before_upload = kill
        with pytest.raises(Killed):
            world.run(2, folder=folder)
        world.before_upload = lambda client: None
    wait_for_relay = RelayAggregator.wait
    if when == "pulling":
        monkeypatch.setattr(RelayAggregator, "wait", wait)
    else:
        monkeypatch.setattr(world, "sleep", sleep)
    last = world.run(2, folder=folder)
    assert [metrics.clients for metrics in last.history] == [0, CLIENTS]
    assert [(event.cohort, event.population) for event in last.ledger.events] == [(3, CLIENTS), (CLIENTS, CLIENTS)]
    assert caplog.text.count("round 1 was cancelled at the relay, which has deleted its reports: the round stays charged") == 1
    told = "round 1 was begun before this start, and the relay has 0 uploads of the 3 it needs: waiting up to 100 s"
    assert caplog.text.count(told) == (when == "resumed")
    assert caplog.text.count(f"ldpfl relay cancel {world.asked[0].terms.run} 1") == (when == "resumed")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.slow
@pytest.mark.thorough
def test_what_an_app_remembers_of_a_round_over_the_relay_is_kept_only_if_the_policy_says_so(keep: bool, tmp_path: Path) -> None:
    """Else a server that asks one client alone, and cancels, has that client remember what no other does."""
    seen: list[int] = []

    def counting(message: Message, context: Context) -> Message:
        before = context.state.config_records.get("rounds", ConfigRecord({"n": 0}))["n"]
        (tmp_path / f"seen-{context.node_config['partition-id']}").write_text(str(before), encoding="ascii")
        context.state["rounds"] = ConfigRecord({"n": int(before) + 1})  # type: ignore[arg-type]
        return shift(message, context)

    with world_in(tmp_path) as world:
        world.policy = policy_of(keep_state=keep)
        strategy = LdpStrategy(config_of(), collector=world.collector())
        strategy.start(world.grid(counting), start_arrays(), 2, timeout=100.0)
        assert [metrics.clients for metrics in strategy.checkpoint.history] == [5, 5]
    seen = [int(path.read_text(encoding="ascii")) for path in sorted(tmp_path.glob("seen-*"))]
    assert seen == [int(keep)] * 5
