"""The server's end of rounds: which replies count, what is charged, and how a run goes on after it was stopped."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_parts import EXAMPLES, OpenNode, app_of, config_of, ledger_rounds, shift, simulator_bits, start_arrays, start_vector
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.server.superlink.linkstate.utils import (
    create_message_error_unavailable_ins_message,
    create_message_error_unavailable_res_message,
)

from ldpfl.errors import ConfigError, DataError, NotSetUp, PrivacyError
from ldpfl.experiments.nodes_asked import MAX_BYTES, Participation
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import (
    AllDeclined,
    DirectCollector,
    InProcessGrid,
    LdpClientApp,
    LdpStrategy,
    RelayCollector,
    SumCollector,
    TooFewTakePart,
    Waiting,
    operator_relay,
)
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.server import Checkpoint

CLIENTS = 10
QUIET = config_of("mechanism.name=none")  # without noise the model tells exactly which reports counted

Change = Callable[[list[Message]], Iterable[Message]]


class ChangedGrid(InProcessGrid):
    """A grid on whose way back replies to ``train`` are changed, in the rounds named (all, if none is)."""

    def __init__(self, change: Change, *rounds: str, app: ClientApp | None = None, clients: int = CLIENTS) -> None:
        super().__init__(app or app_of(), clients)
        self._change, self._rounds = change, rounds

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        told = replies[0].metadata.message_type == MessageType.TRAIN
        changed = told and (not self._rounds or replies[0].metadata.group_id in self._rounds)
        return iter(self._change(replies) if changed else replies)


def run(grid: InProcessGrid, *, rounds: int = 1, folder: RunFolder | None = None, config: Any = QUIET) -> Checkpoint:
    strategy = LdpStrategy(config, folder=folder, waiting=Waiting(1, 0.0))
    strategy.start(grid, start_arrays(), rounds)
    return strategy.checkpoint


def moved(checkpoint: Checkpoint) -> float:
    """How far the model went from its start: a client with partition i moves it by (i + 1) / 10."""
    change = checkpoint.state.weights - start_vector()
    assert float(change.max() - change.min()) < 1e-5
    return float(change.mean())


def mean_of(clients: Iterable[int]) -> Any:
    moves = [0.1 * (1 + client) for client in clients]
    return pytest.approx(sum(moves) / len(moves), abs=1e-6)


def report_of(reply: Message) -> ConfigRecord:
    return reply.content.config_records["ldpfl"]


def replaced(reply: Message, **fields: Any) -> Message:
    """The same node's reply with other fields in its answer."""
    record = ConfigRecord({**report_of(reply), **fields})
    other = Message(RecordDict({"ldpfl": record}), reply_to=reply)
    other.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return other


def failing(reply: Message) -> Message:
    other = Message(Error(2, "crashed"), reply_to=reply)
    other.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id
    return other


def test_a_round_is_the_uniform_mean_of_all_reports() -> None:
    """Not weighted by num-examples, which never arrives."""
    last = run(InProcessGrid(app_of(), CLIENTS))
    assert moved(last) == mean_of(range(CLIENTS))
    assert last.history[0].clients == CLIENTS


@pytest.mark.parametrize(
    ("name", "change", "counted"),
    [
        ("a client that errors", lambda replies: [failing(replies[0]), *replies[1:]], range(1, 10)),
        ("30 % gone", lambda replies: replies[:7], range(7)),
        ("another 30 % gone", lambda replies: replies[3:], range(3, 10)),
        ("all twice", lambda replies: [*replies, *replies], range(10)),
        ("one twice, with another report", lambda replies: [*replies, replaced(replies[0], report=bytes(60))], range(10)),
        ("any order", lambda replies: replies[::-1], range(10)),
        ("wrong length", lambda replies: [replaced(replies[0], report=b"short"), *replies[1:]], range(1, 10)),
        ("empty", lambda replies: [replaced(replies[0], report=b""), *replies[1:]], range(1, 10)),
        ("NaN", lambda replies: [replaced(replies[0], report=b"\xff" * 60), *replies[1:]], range(1, 10)),
        ("text for bytes", lambda replies: [replaced(replies[0], report="secret"), *replies[1:]], range(1, 10)),
        ("previous round", lambda replies: [replaced(replies[0], round=0), *replies[1:]], range(1, 10)),
        ("another run", lambda replies: [replaced(replies[0], run="other"), *replies[1:]], range(1, 10)),
        ("another version", lambda replies: [replaced(replies[0], version=9), *replies[1:]], range(1, 10)),
        ("more than an answer", lambda replies: [replaced(replies[0], loss=1.0), *replies[1:]], range(1, 10)),
        ("no answer", lambda replies: [Message(RecordDict(), reply_to=replies[0]), *replies[1:]], range(1, 10)),
    ],
)
def test_only_one_valid_report_of_each_node_that_was_asked_counts(name: str, change: Change, counted: Iterable[int]) -> None:
    last = run(ChangedGrid(change))
    assert moved(last) == mean_of(counted)
    (event,) = last.ledger.events
    assert event.cohort == len(list(counted))
    assert event.population == CLIENTS
    assert event.sampling == ("everyone" if event.cohort == CLIENTS else "visible")


def test_what_is_left_out_is_logged_with_its_number_and_without_payload(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    run(ChangedGrid(lambda replies: [replaced(r, report=b"private bytes") for r in replies[:3]] + replies[3:]))
    assert "round 1: left out 3: a report has 13 bytes, expected 60" in caplog.text
    assert "private bytes" not in caplog.text


@pytest.mark.parametrize(
    "absent",
    [
        lambda told: create_message_error_unavailable_ins_message(told.message_id, 1),
        lambda told: create_message_error_unavailable_res_message(told, "msg_unavail"),
        lambda told: create_message_error_unavailable_res_message(told, "node_unavail"),
        lambda told: None,
    ],
)
def test_a_node_that_is_killed_while_it_trains_is_said_to_be_late_and_not_to_be_a_stranger(
    absent: Callable[[Any], Message | None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink answers in its place, under a number of its own, or not before the server stops waiting."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)

    class Killing(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            first, *others = messages
            if first.metadata.message_type == MessageType.TRAIN:
                replies = [reply for reply in [absent(first.metadata)] if reply]
                assert {reply.metadata.src_node_id for reply in replies} <= {1}
                return iter([*replies, *super().send_and_receive(others, timeout=timeout)])
            return super().send_and_receive([first, *others], timeout=timeout)

    assert moved(run(Killing(app_of(), CLIENTS))) == mean_of(range(1, CLIENTS))
    assert "round 1: left out 1: a node did not reply in time" in caplog.text
    assert "round 1: no reply in time from node 2" in caplog.text
    assert "not asked" not in caplog.text


def test_a_node_that_was_not_asked_is_not_counted() -> None:
    def change(replies: list[Message]) -> list[Message]:
        stranger = replaced(replies[0])
        stranger.metadata.__dict__["_src_node_id"] = 999
        return [*replies, stranger]

    assert moved(run(ChangedGrid(change))) == mean_of(range(CLIENTS))


def test_a_round_without_any_report_keeps_the_model_and_the_run_goes_on() -> None:
    last = run(ChangedGrid(lambda replies: [], "1"), rounds=2)
    assert moved(last) == mean_of(range(CLIENTS))
    assert [metrics.clients for metrics in last.history] == [0, CLIENTS]
    assert [(event.round, event.cohort, event.joined) for event in last.ledger.events] == [(1, 1, 1), (2, CLIENTS, 2)]  # all had sent one


def test_declining_nodes_are_left_out() -> None:
    def node(context: Context) -> OpenNode:
        return OpenNode(refuse="admit" if context.node_config["partition-id"] in (0, 1) else "")

    app = LdpClientApp(shift, node=node, source=simulator_bits)
    assert moved(run(InProcessGrid(app, CLIENTS))) == mean_of(range(2, CLIENTS))


def test_nodes_whose_training_fails_report_no_change_and_count() -> None:
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] in (0, 1):
            raise ValueError("private")
        return shift(message, context)

    last = run(InProcessGrid(app_of(train), CLIENTS))
    assert last.history[0].clients == CLIENTS
    assert moved(last) == pytest.approx(sum(0.1 * (1 + client) for client in range(2, CLIENTS)) / CLIENTS, abs=1e-6)


def test_a_run_in_which_no_node_takes_part_ends_and_says_what_they_wait_for(tmp_path: Path) -> None:
    """It does not go on for all its rounds, and leave an untrained model as if it had been trained."""
    folder = RunFolder(tmp_path / "run")
    for step, steps in (("question", []), ("admit", ["admit"] * CLIENTS)):
        node = OpenNode(refuse=step, error=NotSetUp("no policy is set up on this node"))
        with pytest.raises(AllDeclined, match=r"round 1: .*10 said 'declined: this node has no policy and budget'.* policy init"):
            run(InProcessGrid(app_of(node=node), CLIENTS), rounds=10, folder=folder)
        assert node.steps == steps
        assert not folder.ledger_path.exists()
        assert not folder.model_path.exists()


def test_the_server_asks_a_fraction_and_charges_who_was_asked_most() -> None:
    last = run(InProcessGrid(app_of(), CLIENTS), rounds=4, config=config_of("mechanism.name=none", "clients.fraction=0.3"))
    assert [event.cohort for event in last.ledger.events] == [3] * 4
    assert [event.population for event in last.ledger.events] == [CLIENTS] * 4
    assert 2 <= last.ledger.events[-1].joined <= 4  # 12 places for 10 clients
    assert last.ledger.events[0].joined == 1


def test_too_few_nodes_are_an_error_after_a_bounded_wait() -> None:
    strategy = LdpStrategy(QUIET, waiting=Waiting(4, 0.01))
    with pytest.raises(TooFewTakePart, match=r"2 of the 4 nodes that a round needs are connected after 0\.01 s"):
        strategy.start(InProcessGrid(app_of(), 2), start_arrays())


@pytest.mark.parametrize(
    ("agreeing", "advice"),
    [
        (1, "set ldpfl.nodes to 3 (in a custom app: nodes of Waiting), and start"),
        (3, "set ldpfl.nodes to 3 "),
        (4, "set ldpfl.nodes and ldpfl.agreeing to 3 (in a custom app: nodes of Waiting and agreeing of Waiting), and start"),
    ],
)
def test_advice_on_missing_nodes_raises_no_setting(agreeing: int, advice: str) -> None:
    strategy = LdpStrategy(QUIET, waiting=Waiting(4, 0.01, agreeing=agreeing))
    with pytest.raises(TooFewTakePart, match=re.escape(advice)):
        strategy.start(InProcessGrid(app_of(), 3), start_arrays())


def test_nodes_may_come_late() -> None:
    class Late(InProcessGrid):
        calls = 0

        def get_node_ids(self) -> list[int]:
            self.calls += 1
            return super().get_node_ids() if self.calls > 1 else []

    strategy = LdpStrategy(QUIET, waiting=Waiting(CLIENTS, 0.2))
    strategy.start(Late(app_of(), CLIENTS), start_arrays(), 1)
    assert strategy.checkpoint.history[0].clients == CLIENTS


class Killed(BaseException):
    """Stands for SIGKILL: nothing in between handles it."""


def kill_in_round(number: str) -> Change:
    def change(replies: list[Message]) -> list[Message]:
        raise Killed

    return change


@pytest.mark.thorough_except("config1")
@pytest.mark.parametrize("config", [QUIET, config_of(), config_of("ranges.rule=denoised")])
def test_a_run_stopped_between_rounds_ends_as_one_that_was_not(config: Any, tmp_path: Path) -> None:
    whole = run(InProcessGrid(app_of(), CLIENTS), rounds=4, config=config)
    folder = RunFolder(tmp_path / "run")
    for rounds in (1, 3, 4, 4):
        last = run(InProcessGrid(app_of(), CLIENTS), rounds=rounds, folder=folder, config=config)
        assert last.state.round == rounds
    assert torch.equal(last.state.weights, whole.state.weights)
    assert last.ledger == whole.ledger
    assert [entry.reproducible() for entry in last.history[:-1]] != []
    assert [entry.clients for entry in last.history] == [CLIENTS] * 4
    assert ledger_rounds(folder.ledger_path) == [1, 2, 3, 4]


def test_a_round_in_which_the_server_was_killed_is_charged_and_not_repeated(tmp_path: Path) -> None:
    """Its reports may have left the clients; a second one for the same round would be one more release."""
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        run(ChangedGrid(kill_in_round("2"), "2"), rounds=3, folder=folder)
    before = folder.checkpoint()
    assert before is not None
    assert before.state.round == 1
    node = OpenNode()
    last = run(InProcessGrid(app_of(node=node), CLIENTS), rounds=3, folder=folder)
    assert node.steps.count("admit") == CLIENTS  # round 3 only
    assert [entry.clients for entry in last.history] == [CLIENTS, 0, CLIENTS]
    assert [(event.round, event.cohort, event.joined) for event in last.ledger.events] == [(1, 10, 1), (2, 1, 2), (3, 10, 3)]
    assert moved(last) == pytest.approx(2 * 0.55, abs=1e-6)


@pytest.mark.parametrize("kept", [("config.toml", "kind.txt", "ledger.json"), ()])
def test_a_ledger_of_later_rounds_than_the_checkpoint_is_not_overwritten(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """Part of the folder was put back from a backup: nodes have sent what the ledger counts."""
    folder, node = RunFolder(tmp_path / "run"), OpenNode()
    run(InProcessGrid(app_of(), CLIENTS), rounds=1, folder=folder)
    shutil.copytree(folder.path, tmp_path / "backup")
    run(InProcessGrid(app_of(), CLIENTS), rounds=3, folder=folder)
    before = folder.ledger_path.read_bytes()
    for file in list(folder.path.iterdir()):
        if kept and file.name not in kept:
            file.unlink()
        elif not kept and file.name != "ledger.json":
            shutil.copy(tmp_path / "backup" / file.name, file)
    with pytest.raises(DataError, match=r"ledger\.json has 3 rounds and the checkpoint beside it [01], .* Put back the latest one"):
        run(InProcessGrid(app_of(node=node), CLIENTS), rounds=4, folder=folder)
    assert (folder.ledger_path.read_bytes(), node.steps) == (before, [])


def test_a_run_that_is_killed_between_checkpoint_and_ledger_has_a_ledger(tmp_path: Path) -> None:
    """The ledger then still has the round as it was charged before it began: with as few reports as the server allows."""
    folder, snapshots = RunFolder(tmp_path / "run"), []

    class Watches(DirectCollector):
        def open(self, *args: Any) -> None:
            super().open(*args)
            snapshots.append(folder.ledger_path.read_bytes())

    collector = Watches(0)
    LdpStrategy(QUIET, collector=collector, folder=folder, waiting=Waiting(1, 0.0)).start(InProcessGrid(app_of(), 3), start_arrays(), 2)
    whole = folder.ledger()
    assert snapshots[-1] != folder.ledger_path.read_bytes()
    folder.ledger_path.write_bytes(snapshots[-1])
    assert folder.ledger() == whole
    last = whole.events[-1]
    Ledger((*whole.events[:-1], replace(last, linked=2))).save(folder.ledger_path)
    with pytest.raises(DataError, match=r"does not belong to this run's checkpoint"):
        folder.ledger()


def test_a_ledger_of_several_rounds_on_flower_is_not_read_without_the_participation(tmp_path: Path) -> None:
    """The participation shows whether nodes were told to train in later rounds."""
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app_of(), CLIENTS), rounds=2, folder=folder)
    folder.participation_path.unlink()
    with pytest.raises(DataError, match=r"participation\.json is missing"):
        folder.ledger()


def test_a_run_keeps_its_name_over_a_resume_and_shares_it_with_no_other(tmp_path: Path) -> None:
    names: list[str] = []

    def train(message: Message, context: Context) -> Message:
        names.append(str(message.content.config_records["ldpfl"]["run"]))
        return shift(message, context)

    for out, rounds in (("one", 1), ("one", 2), ("two", 1)):
        run(InProcessGrid(app_of(train), 1), rounds=rounds, folder=RunFolder(tmp_path / out))
    assert names[0] == names[1] != names[2]


def test_a_folder_of_another_config_or_model_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app_of(), 2), folder=folder)
    with pytest.raises(ConfigError, match=r"another config.* set another folder \(ldpfl\.out\).* some because they follow from others"):
        run(InProcessGrid(app_of(), 2), folder=folder, config=config_of())
    with pytest.raises(ConfigError, match="was begun on"):
        LdpStrategy(QUIET, folder=folder, origin="other data").start(InProcessGrid(app_of(), 2), start_arrays(), 2)
    other = ArrayRecord([torch.zeros(4).numpy()])
    with pytest.raises(ConfigError, match="another model"):
        LdpStrategy(QUIET, folder=folder).start(InProcessGrid(app_of(), 2), other, 2)
    renamed = ArrayRecord({f"other.{name}": array for name, array in start_arrays().items()})
    with pytest.raises(ConfigError, match=r"it trained weight, bias, but initial_arrays has other\.weight, other\.bias"):
        LdpStrategy(QUIET, folder=folder).start(InProcessGrid(app_of(), 2), renamed, 2)


def test_a_damaged_record_of_who_was_asked_stops_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app_of(), 2), folder=folder)
    (folder.path / "participation.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="damaged"):
        run(InProcessGrid(app_of(), 2), rounds=2, folder=folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"begun": 1' + "0" * 400 + "}", "a number has 401 digits"),
        ('{"begun": 1000000}', "begun: Input should be less than or equal to 100000"),
        (
            '{"rounds": {"7": 1' + "0" * 30 + "}}",
            "expected node ids, each with the number of rounds that the node was asked in, from 0 to 100,000",
        ),
        ('{"rounds": {"seven": 1}}', "expected node ids"),
        ('{"rounds": {"1' + "0" * 30 + '": 1}}', "expected node ids"),
        ("{" + '"rounds": {}' + " " * (1 << 25) + "}", "33,554,446 bytes, expected at most 33,554,432"),
        ("[]", "is damaged"),
    ],
    ids=["digits", "rounds", "rounds of a node", "a node's name", "a node's digits", "size", "a list"],
)
def test_a_record_of_who_was_asked_is_bounded_before_it_is_believed(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "participation.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        Participation.load(path)


@pytest.mark.thorough
def test_a_record_of_a_million_nodes_is_read_again(tmp_path: Path) -> None:
    """Wrong entries in as many are refused by the first of them, for each would take a thousand bytes."""
    asked = Participation(run="r", rounds=dict.fromkeys(range(2**64 - 10**6, 2**64), 100_000))
    asked.save(tmp_path / "participation.json")
    assert (tmp_path / "participation.json").stat().st_size < MAX_BYTES
    assert Participation.load(tmp_path / "participation.json") == asked


def test_a_run_whose_checkpoint_was_put_back_to_an_earlier_round_is_not_resumed(tmp_path: Path) -> None:
    """Nodes were told to train in later rounds, which its ledger would lack."""
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app_of(), 2), rounds=1, folder=folder)
    kept = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}
    run(InProcessGrid(app_of(), 2), rounds=3, folder=folder)
    for path, content in kept.items():
        if path != folder.participation_path:
            path.write_bytes(content)
    with pytest.raises(DataError, match="is of round 1, but nodes were asked up to round 3"):
        run(InProcessGrid(app_of(), 2), rounds=4, folder=folder)
    with pytest.raises(DataError, match=r"has 1 rounds, but participation\.json says that nodes were told to train in 3 rounds"):
        folder.ledger()
    for path in (folder.ledger_path, folder.checkpoint_path, folder.metrics_path):
        path.unlink()
    with pytest.raises(DataError, match=r"ledger\.json"):  # not: nothing was released yet
        folder.ledger()


def test_without_the_record_of_who_was_asked_a_run_is_not_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    run(InProcessGrid(app_of(), 2), folder=folder)
    (folder.path / "participation.json").unlink()
    with pytest.raises(DataError, match="counts only "):
        run(InProcessGrid(app_of(), 2), rounds=2, folder=folder)


def test_nodes_with_new_numbers_count_as_those_that_were_asked_before() -> None:
    """Flower numbers SuperNodes anew when they start again without a key."""

    class Renumbered(InProcessGrid):
        def get_node_ids(self) -> list[int]:
            self._contexts = {node + 1000: context for node, context in self._contexts.items()}
            return super().get_node_ids()

    last = run(Renumbered(app_of(), 3), rounds=4, config=config_of())
    assert [event.joined for event in last.ledger.events] == [1, 2, 3, 4]


def test_reports_that_come_after_the_time_out_are_charged_and_messages_end_with_the_round() -> None:
    lives: list[float] = []

    class Late(InProcessGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            messages = list(messages)
            if messages[0].metadata.message_type != MessageType.TRAIN:
                return super().send_and_receive(messages)
            lives.extend(message.metadata.ttl for message in messages)
            assert all(reply.has_content() for reply in super().send_and_receive(messages))  # they have left
            return iter(())

    strategy = LdpStrategy(config_of())
    with pytest.raises(TooFewTakePart, match="the run has no model: all 2 training rounds are over"):
        strategy.start(Late(app_of(), 3), start_arrays(), 2, timeout=20.0)
    assert [event.joined for event in strategy.checkpoint.ledger.events] == [1, 2]
    assert lives == [20.0] * 6


def test_the_strategy_of_an_own_app_asks_for_the_noise_that_keeps_the_target() -> None:
    """As nodes' policies assume; a config that was settled before is not changed."""
    config = config_of("mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.clip_norm=1.0", "privacy.target_epsilon=2")
    strategy = LdpStrategy(config)
    settings: Any = strategy.config.mechanism
    epsilon = run_epsilon(planned_ledger(strategy.config), config.privacy.delta)
    assert 1.99 < epsilon <= 2
    assert settings.noise_multiplier != config.mechanism.model_dump()["noise_multiplier"]
    assert LdpStrategy(strategy.config).config == strategy.config


def test_a_target_is_for_as_many_rounds_as_the_config_says() -> None:
    config = config_of("mechanism.name=dp-fedavg", "mechanism.clip_norm=1.0", "privacy.target_epsilon=2", "training.rounds=2")
    with pytest.raises(ConfigError, match=r"num_rounds is 3, but privacy\.target_epsilon is planned for training.rounds = 2"):
        run(InProcessGrid(app_of(), CLIENTS), rounds=3, config=config)


def test_the_ledger_has_a_round_that_the_server_did_not_live_to_close(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Killed):
        run(ChangedGrid(kill_in_round("2"), "2"), rounds=3, folder=folder)
    assert ledger_rounds(folder.ledger_path) == [1, 2]


@pytest.mark.slow
@pytest.mark.thorough
def test_ranges_that_run_away_do_not_end_the_run(tmp_path: Path) -> None:
    """Five honest clients at a small epsilon: each round's noise widens the ranges, and so the noise of the next one."""
    config, folder = config_of("mechanism.epsilon=0.5", "ranges.rule=noisy-minmax"), RunFolder(tmp_path / "run")
    last = run(InProcessGrid(app_of(), 5), rounds=90, folder=folder, config=config)
    assert last.state.round == 90
    assert 1e20 < float(last.state.ranges.radius.max()) < 1e26
    assert run(InProcessGrid(app_of(), 5), rounds=91, folder=folder, config=config).state.round == 91


def test_finite_reports_that_add_up_to_infinity_do_not_end_the_run(tmp_path: Path) -> None:
    config, folder = config_of("mechanism.name=full-dp"), RunFolder(tmp_path / "run")
    huge = (torch.ones(15) * 3.4e38).numpy().tobytes()
    grid = ChangedGrid(lambda replies: [replaced(replies[0], report=huge), *replies[1:]], "1", "2", "3", clients=2)
    last = run(grid, rounds=5, folder=folder, config=config)
    assert torch.isfinite(last.state.weights).all()
    assert [event.round for event in last.ledger.events] == [1, 2, 3, 4, 5]
    assert last.history[-1].clients == 2


def test_the_result_has_the_figures_of_all_rounds(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for rounds in (1, 3, 3, 0):
        result = LdpStrategy(QUIET, folder=folder).start(InProcessGrid(app_of(), 2), start_arrays(), rounds)
        assert list(result.train_metrics_clientapp) == list(range(1, max(1, rounds or 3) + 1))


def test_a_report_that_would_make_the_model_infinite_is_left_out() -> None:
    huge = (torch.ones(15) * float("inf")).numpy().tobytes()
    assert moved(run(ChangedGrid(lambda replies: [replaced(replies[0], report=huge), *replies[1:]]))) == mean_of(range(1, 10))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["clients.self_sampling=restrictive"], "self_sampling"),
        (["mechanism.name=ladp"], "works only in simulations"),
        (["mechanism.name=sensitive-dp"], "works only in simulations"),
        (["mechanism.name=nbafl", "mechanism.epsilon=0.5"], "works only in simulations"),
        (["ranges.radius={nowhere = 0.1}"], "nowhere"),
    ],
)
def test_settings_that_flower_cannot_keep_are_refused_before_anyone_is_asked(overrides: list[str], named: str) -> None:
    node = OpenNode()
    with pytest.raises(ConfigError, match=named):
        run(InProcessGrid(app_of(node=node), 2), config=config_of(*overrides))
    assert node.steps == []


def test_clients_that_would_evaluate_are_not_asked() -> None:
    strategy = LdpStrategy(QUIET)
    with pytest.raises(ConfigError, match="evaluate_config"):
        strategy.start(InProcessGrid(app_of(), 2), start_arrays(), evaluate_config=ConfigRecord())
    assert list(strategy.configure_evaluate(1, start_arrays(), ConfigRecord(), InProcessGrid(app_of(), 2))) == []


def _with_content(message: Message, **changed: Any) -> Message:
    """Return ``message`` with ``changed`` records."""
    return Message(RecordDict({**message.content, **changed}), message.metadata.dst_node_id, "train")


def _tell_in_place(messages: list[Message]) -> list[Message]:
    messages[0].content.config_records["config"]["lr"] = 0.5
    return messages


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda messages: [*messages, Message(messages[0].content, 4711, "train")], "to node 4711, which did not agree"),
        (lambda messages: [*messages, messages[0]], "several messages to one node"),
        (lambda messages: messages[1:], "no message to node 2, which agreed"),
        (lambda messages: [], "no message to nodes 2, 3, which agreed"),
        (lambda messages: None, "None, not a list of messages"),
        (lambda messages: "train", "'train', not a list of messages"),
        (lambda messages: [message.content for message in messages], "a list of 2, not a list of messages"),
        (lambda messages: [_with_content(messages[0], ldpfl=ConfigRecord()), *messages[1:]], "type or content is changed"),
        (lambda messages: [_with_content(messages[0], config=ConfigRecord({"lr": 0.5})), *messages[1:]], "type or content is changed"),
        (lambda messages: [Message(m.content, m.metadata.dst_node_id, "train.other") for m in messages], "type or content is changed"),
        (_tell_in_place, "type or content is changed"),
    ],
)
def test_a_subclass_tells_nodes_nothing_that_the_ledger_does_not_count(change: Any, named: str, tmp_path: Path) -> None:
    class Changes(LdpStrategy):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            return change(super().configure_train(server_round, arrays, config, grid))

    node, folder = OpenNode(), RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"Changes\.configure_train returned .*{named}.*before you call super\(\)\.configure_train"):
        Changes(QUIET, waiting=Waiting(1, 0.0), folder=folder).start(InProcessGrid(app_of(node=node), 2), start_arrays(), 1)
    assert node.steps == []
    # The round stays charged, since the method may have sent messages itself. The corrected app goes on with the next one.
    assert len(folder.ledger().events) == 1
    resumed = LdpStrategy(QUIET, folder=folder)
    metrics = resumed.start(InProcessGrid(app_of(), 2), start_arrays(), 2).train_metrics_clientapp
    assert [metrics[number]["reports"] for number in (1, 2)] == [0, 2]
    assert len(resumed.checkpoint.ledger.events) == 2


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_subclass_that_skips_a_round_is_told_to_call_super(skipped: int) -> None:
    class Skips(LdpStrategy):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> list[Message]:
            return [] if server_round == skipped else super().configure_train(server_round, arrays, config, grid)

    strategy = Skips(QUIET)
    with pytest.raises(ConfigError, match=r"0 messages without a call of super\(\)\.configure_train.*return the messages of super"):
        strategy.start(InProcessGrid(app_of(), 2), start_arrays(), 2)
    assert len(strategy.checkpoint.ledger.events) == skipped - 1


def test_a_subclass_may_change_the_settings_that_apps_get_and_return_messages_in_any_iterable() -> None:
    class Counts(LdpStrategy):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            return iter(super().configure_train(server_round, arrays, ConfigRecord({"lr": 0.5}), grid)[::-1])

    assert Counts(QUIET).start(InProcessGrid(app_of(), 2), start_arrays(), 1).train_metrics_clientapp[1]["reports"] == 2


def test_an_app_that_nothing_wraps_is_named_at_the_server() -> None:
    inner = ClientApp()
    inner.train()(shift)
    with pytest.raises(TooFewTakePart, match=r"its app is not wrapped, .*: its clientapp must be LdpClientApp\("):
        LdpStrategy(QUIET, waiting=Waiting(1, 0.0)).start(InProcessGrid(inner, 2), start_arrays(), 1)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("waiting", 3, r"waiting must be a Waiting, got 3: give ldpfl\.flower\.Waiting"),
        ("collector", "relay", r"collector must be a Collector, got 'relay': give the result of operator_relay\(\.\.\.\)"),
        ("collector", operator_relay, "collector must be a Collector, got a function"),
        ("collector", RelayCollector, "collector must be a Collector, got a ABCMeta"),
        ("run_config", None, r"run_config must be a mapping, got None: give context\.run_config"),
        ("kind", "own-app", "kind must be a Kind, got 'own-app'"),
        ("score", 0.5, "score must be a function, got 0.5"),
        ("score", None, "score must be a function, got None"),
        ("on_measured", "f", "on_measured must be a function, got 'f'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_with_what_was_expected(argument: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LdpStrategy(QUIET, **{argument: value})


def test_the_path_of_a_folder_given_as_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be a Path, got 'run': give RunFolder\(Path\(\.\.\.\)\)"):
        RunFolder("run")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (torch.nn.Linear(2, 1).state_dict(), r"must be an ArrayRecord of flwr\.app, got a OrderedDict of 2: give ArrayRecord\(model\.st"),
        ([np.zeros(2)], r"initial_arrays must be an ArrayRecord of flwr\.app, got a list of 1"),
        (ArrayRecord(), "initial_arrays has no arrays, expected the arrays of the model"),
    ],
)
def test_initial_arrays_of_a_wrong_type_are_refused_with_what_was_expected(arrays: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LdpStrategy(QUIET).start(InProcessGrid(app_of(), 2), arrays, 1)


@pytest.mark.parametrize("name", ["channel", "linked", "min_clients"])
def test_no_argument_lets_a_direct_transport_claim_another_one(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DirectCollector(4, **{name: "ideal-shuffler"})


@pytest.mark.parametrize("kind", [RelayCollector, SumCollector])
def test_no_argument_lets_a_relay_claim_another_channel(kind: type) -> None:
    with pytest.raises(TypeError, match="channel"):
        kind(channel="secure-sum")


def test_the_config_of_a_strategy_cannot_be_replaced() -> None:
    """Nodes would then get other terms than those that the ledger charges."""
    with pytest.raises(AttributeError):
        LdpStrategy(QUIET).config = config_of("mechanism.epsilon=8.0")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("aggregate_train", "server_optimiser"), ("configure_evaluate", "evaluate_fn"), ("aggregate_evaluate", "evaluate_fn")],
)
def test_a_subclass_is_not_started_if_it_overrides_a_method_whose_result_is_not_used(name: str, remedy: str) -> None:
    node, overriding = OpenNode(), type("Mine", (LdpStrategy,), {name: lambda self, *args: None})
    with pytest.raises(ConfigError, match=rf"Mine overrides {name}, which would have no effect: .*{remedy}"):
        overriding(QUIET).start(InProcessGrid(app_of(node=node), 2), start_arrays())
    assert (node.questions, node.steps) == ([], [])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.zeros(3, dtype=torch.int64), "leave buffers and counters out"),
        (torch.zeros(3, dtype=torch.float64), r"is float64, .*: convert it to float32, as by model\.float\(\)"),
        (torch.zeros(3, dtype=torch.float16), r"is float16, .*: convert it to float32"),
        (torch.tensor(1.0), "at least one dimension"),
    ],
)
def test_a_model_with_arrays_that_no_mechanism_protects_is_refused(bad: torch.Tensor, words: str) -> None:
    with pytest.raises(PrivacyError, match=words):
        LdpStrategy(QUIET).start(InProcessGrid(app_of(), 2), ArrayRecord({**start_arrays(), **ArrayRecord({"x": bad})}))


def test_a_strategy_measures_on_the_server_and_hands_its_own_settings_to_apps() -> None:
    told: list[ConfigRecord] = []

    def train(message: Message, context: Context) -> Message:
        told.append(message.content.config_records["config"])
        return shift(message, context)

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"largest": float(arrays["weight"].numpy().max())})

    strategy = LdpStrategy(QUIET, score=lambda weights: 0.5)
    result = strategy.start(
        InProcessGrid(app_of(train), 2), start_arrays(), 2, train_config=ConfigRecord({"lr": 0.1}), evaluate_fn=evaluate
    )
    assert [dict(entry) for entry in told[::2]] == [{"lr": 0.1, "server-round": 1}, {"lr": 0.1, "server-round": 2}]
    largest = {number: entry["largest"] for number, entry in result.evaluate_metrics_serverapp.items()}
    assert largest == {0: 1.0, 1: pytest.approx(1.15), 2: pytest.approx(1.3)}
    assert result.train_metrics_clientapp[1]["score"] == 0.5
    assert result.arrays["bias"].numpy() == pytest.approx(strategy.checkpoint.state.weights[12:].numpy())
    assert EXAMPLES not in [value for entry in result.train_metrics_clientapp.values() for value in entry.values()]


def divide(number: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"rate": 1 / number})


@pytest.mark.parametrize(
    ("settings", "wrong", "problem"),
    [
        ({"score": lambda weights: "a"}, None, "`score` must return a number, got 'a'"),
        ({"score": lambda weights: weights.mean()}, None, "got a Tensor: convert its result by float"),
        ({}, lambda number, arrays: {"accuracy": 1.0}, "evaluate_fn must return a MetricRecord of flwr.app, or None, got a dict of 1"),
        ({}, divide, "division by zero"),
    ],
)
def test_what_is_wrong_with_an_evaluation_shows_before_anyone_is_asked(settings: Any, wrong: Any, problem: str) -> None:
    node = OpenNode()
    with pytest.raises((ConfigError, ZeroDivisionError), match=problem):
        LdpStrategy(QUIET, **settings).start(InProcessGrid(app_of(node=node), 2), start_arrays(), evaluate_fn=wrong)
    assert (node.questions, node.steps) == ([], [])


def test_a_resumed_run_first_evaluates_the_model_of_its_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for rounds, evaluated in ((1, [0, 1]), (2, [1, 2])):
        strategy = LdpStrategy(QUIET, folder=folder, score=lambda weights: np.float64(0.5))
        result = strategy.start(
            InProcessGrid(app_of(), 2), start_arrays(), rounds, evaluate_fn=lambda number, arrays: MetricRecord({"number": number})
        )
        assert [entry["number"] for entry in result.evaluate_metrics_serverapp.values()] == evaluated


@pytest.mark.parametrize("wrong", ["config.toml", None])
def test_a_config_or_folder_that_is_only_named_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"config must be a RunConfig, got {wrong!r}: read its file"):
        LdpStrategy(wrong)
    with pytest.raises(ConfigError, match="folder must be a RunFolder, got '/tmp/run'"):
        LdpStrategy(QUIET, folder="/tmp/run")  # type: ignore[arg-type]


def test_an_app_without_the_mod_gets_no_round() -> None:
    """It does not answer the question, and is never told to train: weights without noise do not even leave."""
    app, trained = ClientApp(), list[Message]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained.append(message)
        return shift(message, context)

    with pytest.raises(TooFewTakePart, match=r"round 1 was not begun, and nothing was charged: 0 of 2 nodes would take part"):
        run(InProcessGrid(app, 2))
    assert not trained


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda wrong: LdpStrategy(QUIET, reply_s=wrong), "reply_s"),
        (lambda wrong: started(num_rounds=wrong), "num_rounds"),
        (lambda wrong: started(timeout=wrong), "timeout"),
        (lambda wrong: Waiting(nodes=wrong), "node"),
        (lambda wrong: Waiting(seconds=wrong), "s"),
        (lambda wrong: Waiting(answer_s=wrong), "answer_s"),
    ],
)
def test_a_setting_that_is_no_such_number_is_named(make: Callable[[Any], object], name: str) -> None:
    """The run config of an app may hold a text where a number is meant."""
    for wrong in ("5", -1, True):
        with pytest.raises(ConfigError, match=name) as raised:
            make(wrong)
        assert repr(wrong) in str(raised.value)


def started(**settings: Any) -> None:
    LdpStrategy(QUIET, waiting=Waiting(1, 0.0)).start(InProcessGrid(app_of(), 2), start_arrays(), **settings)


def test_an_app_that_leaves_out_the_run_config_is_told_so() -> None:
    grid = InProcessGrid(app_of(), 2, run_config={"lr": 0.1})
    with pytest.raises(AllDeclined, match=r"set LdpStrategy\(run_config=context\.run_config\)"):
        LdpStrategy(QUIET, waiting=Waiting(1, 0.0)).start(grid, start_arrays(), 1)
    LdpStrategy(QUIET, waiting=Waiting(1, 0.0), run_config={"lr": 0.1}).start(grid, start_arrays(), 1)


def test_a_round_that_is_over_before_clients_reply_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"make its timeout \(ldpfl\.timeout-s\) longer"):
        LdpStrategy(config_of(), reply_s=60.0).start(InProcessGrid(app_of(), 3), start_arrays(), 1, timeout=60.0)
