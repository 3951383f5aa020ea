"""The question before a round: a node answers from policy, budget and terms alone, for no charge, and leaves no trace."""

from __future__ import annotations

import base64
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from flower_parts import POLICY, OpenNode, app_of, ask, config_of, instruction, shift, terms_of
from flwr.app import ConfigRecord, Context, Message, RecordDict
from relayed_parts import CLIENTS, KEY, policy_of, world_in

from ldpfl.errors import (
    ChargedBefore,
    ConfigError,
    Declined,
    Exhausted,
    GivesWeights,
    NoRelay,
    NotSetUp,
    OtherRunConfig,
    OtherVersion,
    ProtocolError,
)
from ldpfl.flower import InProcessGrid, LdpClientApp, RoundTerms
from ldpfl.flower.client_app import DECLINED, FAILED
from ldpfl.flower.invitation import QUESTION, question_of, read_question
from ldpfl.flower.terms import VERSION, digest_of, mechanism_name_in
from ldpfl.privacy.budget_file import read_charges, set_limit

SIZES = (12, 3)


def question(terms: RoundTerms | None = None) -> Message:
    return Message(question_of(terms or terms_of(), SIZES), 2, QUESTION, group_id="1")


def refused(reply: Message, reason: str) -> bool:
    return reply.has_error() and reply.error.reason == reason


def by(setting: str) -> str:
    """What a server is told where this setting of the policy does not allow the round."""
    return f"declined: its policy's {setting} does not allow the round"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A node's folder, with policy and budget that the environment names."""
    set_limit(tmp_path / "budget.sqlite", 100.0, 0.0)
    allow(tmp_path)
    own = {"LDPFL_POLICY": str(tmp_path / "policy.toml"), "LDPFL_BUDGET": str(tmp_path / "budget.sqlite")}
    with mock.patch.dict(os.environ, own):
        yield tmp_path


def allow(folder: Path, **changes: str) -> None:
    (folder / "policy.toml").write_text("".join(f"{key} = {value}\n" for key, value in {**POLICY, **changes}.items()), encoding="utf-8")


def untouched(message: Message, context: Context) -> Message:
    raise AssertionError("the app was called for a question")


def test_the_answer_is_run_and_round_and_nothing_else() -> None:
    node = OpenNode()
    reply = ask(app_of(untouched, node), question())
    assert list(reply.content) == ["ldpfl"]
    assert dict(reply.content.config_records["ldpfl"]) == {"version": VERSION, "run": "run", "round": 1}
    assert (node.steps, node.questions) == ([], [3])


@pytest.mark.parametrize(
    ("error", "would", "does"),
    [
        (None, "would take part: the server asked about round 1 of run run; nothing was charged", "sent: the report of round 1 of run run"),
        (Declined("no budget"), "would decline: no budget", "declined: no budget"),
        (ValueError("4711"), "not answered: ValueError", "failed: ValueError"),
    ],
)
def test_the_operator_can_tell_a_question_from_a_report(
    error: Exception | None, would: str, does: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever counts what was sent, or waits for a report to have left, must not take the question for it."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO)

    def said(message: Message, step: str) -> str:
        caplog.clear()
        ask(app_of(node=OpenNode(step, error) if error else OpenNode()), message)
        (line,) = caplog.messages
        return line

    assert said(question(), "question").startswith(would)
    assert said(instruction(), "admit").startswith(does)


def test_what_policy_or_budget_do_not_allow_is_declined_and_nothing_is_written(folder: Path) -> None:
    """Neither a charge nor, as for a message that tells to train, a refusal: whoever asks all the time changes nothing."""
    app, before = LdpClientApp(untouched), (folder / "budget.sqlite").read_bytes()
    assert ask(app, question()).has_content()
    for setting, value in (
        ("mechanisms", "[]"),
        ("epsilon_per_unit", "1.9"),
        ("epsilon_per_round", "29.9"),
        ("rounds", "0"),
        ("min_clients", "4"),
        ("transports", '["relay"]'),
        ("immediate_replies", "false"),
    ):
        allow(folder, **{setting: value})
        assert refused(ask(app, question()), by(setting)), setting
    allow(folder, lifetime_epsilon="29.9")
    assert refused(ask(app, question()), Exhausted.public)
    allow(folder)
    for changed, told in (
        ("mechanism.epsilon=2.5", by("epsilon_per_unit")),
        ("mechanism.name=harmony", by("mechanisms")),
        ("model.name=os:getcwd", by("models")),
        ('data.path="rows.csv"', DECLINED),
    ):
        assert refused(ask(app, question(terms_of(config=config_of(changed)))), told), changed
    assert (folder / "budget.sqlite").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["budget.sqlite", "policy.toml"]


def test_a_spent_budget_is_declined_until_more_is_granted(folder: Path) -> None:
    app = LdpClientApp(shift)
    set_limit(folder / "budget.sqlite", 29.0)
    assert refused(ask(app, question()), Exhausted.public)
    set_limit(folder / "budget.sqlite", 30.0)
    assert ask(app, question()).has_content()
    assert ask(app).has_content()
    assert refused(ask(app, question(terms_of(round=2))), Exhausted.public)
    assert refused(ask(app, question()), ChargedBefore.public)
    assert len(read_charges(folder / "budget.sqlite")) == 1


def test_a_node_without_a_policy_says_so() -> None:
    with mock.patch.dict(os.environ):
        os.environ.pop("LDPFL_POLICY", None)
        assert refused(ask(LdpClientApp(untouched), question()), NotSetUp.public)


def test_an_answer_is_no_promise(folder: Path) -> None:
    app = LdpClientApp(shift)
    assert ask(app, question()).has_content()
    allow(folder, rounds="0")
    assert refused(ask(app), by("rounds"))
    assert read_charges(folder / "budget.sqlite") == ()


def test_a_node_with_another_version_of_ldpfl_says_so() -> None:
    message = question()
    message.content.config_records["ldpfl"]["version"] = VERSION + 1
    assert refused(ask(app_of(untouched), message), OtherVersion.public)


def test_the_server_is_told_no_figure_of_the_policy_or_the_budget(folder: Path) -> None:
    """Bounds and what is spent are the operator's: the reason that leaves is the same for all of their values."""
    told = set[str]()
    for value in ("1.0", "3.5", "29.9"):
        allow(folder, epsilon_per_round=value)
        told.add(str(ask(LdpClientApp(untouched), question()).error.reason))
    assert told == {by("epsilon_per_round")}


def test_data_and_app_change_nothing_of_an_answer(folder: Path) -> None:
    """The app is not even imported, and no file of data is looked at."""
    answers = []
    for name, data in (("flower_parts:shift", "there.csv"), ("nowhere.at_all:app", "missing.csv")):
        (folder / "there.csv").write_text("a,b\n1,2\n", encoding="utf-8")
        (folder / "there.csv").chmod(0)
        with mock.patch.dict(os.environ, {"LDPFL_DATA": str(folder / data), "LDPFL_DATA_DIR": str(folder / data)}):
            answers.append(dict(ask(LdpClientApp(name), question()).content.config_records["ldpfl"]))
    assert answers[0] == answers[1]


def test_an_app_that_gives_trained_weights_does_not_agree_to_gradients() -> None:
    config = config_of("mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.records=5")
    assert refused(ask(app_of(), question(terms_of(config=config))), GivesWeights.public)


def test_over_the_relay_a_node_judges_by_what_the_relay_will_mix_and_asks_it_nothing(tmp_path: Path) -> None:
    terms = terms_of(transport="relay", key=KEY.public_key().public_bytes_raw(), asked=CLIENTS, min_clients=3)
    with world_in(tmp_path) as world:
        grid = InProcessGrid(LdpClientApp(untouched, node=world.node), CLIENTS)
        for min_clients, agrees in ((2, False), (3, True)):
            (reply,) = grid.send_and_receive([question(replace(terms, min_clients=min_clients))])
            assert reply.has_content() == agrees
        world.policy = policy_of(lifetime_epsilon=1.0)
        (reply,) = grid.send_and_receive([question(terms)])
        assert refused(reply, Exhausted.public)
        world.policy = policy_of(longest_upload_s=90.0)
        for reply_s, agrees in ((60.0, True), (61.0, False)):  # or each round would find it out when others have been charged
            asked = terms_of(transport="relay", key=KEY.public_key().public_bytes_raw(), asked=CLIENTS, reply_s=reply_s)
            (reply,) = grid.send_and_receive([question(asked)])
            assert reply.has_content() if agrees else refused(reply, by("longest_upload_s"))
        assert world.wire.replies == []
        assert world.charges() == [0]


@pytest.mark.parametrize("missing", ["LDPFL_RELAY", "LDPFL_RELAY_TOKEN"])
def test_a_node_without_a_relay_or_a_token_for_it_does_not_agree_to_a_round_over_one(missing: str, folder: Path) -> None:
    key = base64.b64encode(KEY.public_key().public_bytes_raw()).decode()
    allow(folder, transports='["relay"]', aggregator_keys=f'["{key}"]')
    (folder / "token").write_text("word", encoding="utf-8")
    (folder / "token").chmod(0o600)
    app, message = LdpClientApp(untouched), question(terms_of(transport="relay", key=KEY.public_key().public_bytes_raw(), asked=CLIENTS))
    with mock.patch.dict(os.environ, {"LDPFL_RELAY": "https://127.0.0.1:1", "LDPFL_RELAY_TOKEN": str(folder / "token")}):
        assert ask(app, message).has_content()
        del os.environ[missing]
        assert refused(ask(app, message), NoRelay.public)


def test_a_mechanism_that_the_policy_does_not_name_is_declined_before_anything_is_built(folder: Path) -> None:
    """Not even the terms are read, which would be refused as they are: the ranges do not fit the layers."""
    message = question(terms_of(config=config_of("mechanism.name=rotated-sign")))
    message.content.config_records["ldpfl"]["center"] = [0.0]
    assert refused(ask(LdpClientApp(untouched), message), by("mechanisms"))
    allow(folder, mechanisms='["rotated-sign"]')
    assert refused(ask(LdpClientApp(untouched), message), FAILED)


LARGE = [
    ("duchi", ()),
    ("harmony", ("mechanism.group=1",)),
    ("harmony", ("mechanism.group=layer",)),
    ("laplace", ()),
    ("duchi-vector", ()),
    ("privunit-g", ()),
    ("dpa", ()),
    ("rotated-sign", ("mechanism.group=1",)),
    ("rotated-sign", ("mechanism.group=64",)),
]


def peak_kib() -> int:
    """Return the most memory that this process had since its peak was last forgotten."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forgets and reads the peak of its memory as Linux has it")
def test_a_few_bytes_that_claim_a_large_model_take_no_memory(folder: Path) -> None:
    """The node works its answer out without a table of weights, whatever its policy allows."""
    wide = {"epsilon_per_unit": "1e6", "epsilon_per_round": "1e13", "lifetime_epsilon": "1e14", "delta": "1e-5"}
    allow(folder, mechanisms=str([name for name, _ in LARGE]).replace("'", '"'), **wide)
    set_limit(folder / "budget.sqlite", 1e14, 1e-5)
    app = LdpClientApp(untouched)

    def answers(size: int) -> list[str | None]:
        replies: list[str | None] = []
        for name, settings in LARGE:
            terms = terms_of(config=config_of(f"mechanism.name={name}", *settings), size=size)
            content = question_of(terms, (size // 2, size - size // 2))
            reply = ask(app, Message(content, 2, QUESTION, group_id="1"))
            replies.append(reply.error.reason if reply.has_error() else "agreed")
        return replies

    assert answers(200) == ["agreed"] * len(LARGE)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_kib()
    assert answers(2**28) == ["agreed"] * len(LARGE)
    assert peak_kib() - before < 100 * 1024


def _in_question(field: str, value: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.config_records["question"].__setitem__(field, value)


def _in_terms(field: str, value: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.config_records["ldpfl"].__setitem__(field, value)


MALFORMED: dict[str, Callable[[RecordDict], None]] = {
    "no terms": lambda content: content.__delitem__("ldpfl"),
    "no question": lambda content: content.__delitem__("question"),
    "another record": lambda content: content.__setitem__("config", ConfigRecord({"path": "/etc/passwd"})),
    "unknown field": _in_question("charge", True),
    "no sizes": _in_question("sizes", []),
    "a size too few": _in_question("sizes", [12]),
    "a size of 0": _in_question("sizes", [15, 0]),
    "a size below 0": _in_question("sizes", [16, -1]),
    "a size that is no whole number": _in_question("sizes", [12.0, 3.0]),
    "a model that fills all memory": _in_question("sizes", [2**62, 3]),
    "no cohort": _in_terms("min-clients", 0),
    "cohort as text": _in_terms("min-clients", "many"),
    "another version": _in_terms("version", VERSION + 1),
    "another run config": _in_terms("run-config", "0" * 64),
    "a path for a run": _in_terms("run", "../../admin"),
    "a layer twice": _in_terms("layers", ["weight", "weight"]),
    "too few ranges": _in_terms("center", [0.0]),
    "no ranges": _in_terms("radius", [0.0, float("nan")]),
    "unknown mechanism": _in_terms("config", '[mechanism]\nname = "trust-me"'),
    "an endless config": _in_terms("config", "#" * 200_000),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_question_gets_no_answer_and_asks_the_node_nothing(case: str) -> None:
    node, message = OpenNode(), question()
    MALFORMED[case](message.content)
    # Of these two the server's author is told what to set.
    told = {"another run config": OtherRunConfig.public, "another version": OtherVersion.public}.get(case, FAILED)
    assert refused(ask(app_of(untouched, node), message), told)
    assert (node.steps, node.questions) == ([], [])


LARGE_RECORDS: dict[str, Callable[[RecordDict], None]] = {
    "integers for floats": _in_terms("center", [1] * 2_000_000),
    "floats for names": _in_terms("layers", [1.0] * 2_000_000),
    "sizes of 0": _in_question("sizes", [0] * 2_000_000),
    "unknown fields": lambda content: content.config_records["ldpfl"].update({f"field-{i}": 1 for i in range(300_000)}),
    "a version of many numbers": _in_terms("version", [1] * 2_000_000),
}


@pytest.mark.thorough_for("unknown fields")
@pytest.mark.parametrize("name", LARGE_RECORDS)
def test_what_is_wrong_in_a_large_record_is_refused_at_once(name: str) -> None:
    """An error for each wrong element took 10 s and gigabytes; the bound is a tenth of that and hundreds of times what is needed."""
    content = question().content
    LARGE_RECORDS[name](content)
    began = time.process_time()
    with pytest.raises(ProtocolError) as refusal:
        read_question(content, digest_of({}))
    assert time.process_time() - began < 1
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("field", ["center", "radius", "sizes"])
def test_a_model_has_no_more_layers_than_a_node_reads(field: str) -> None:
    content = question().content
    many: list[int] | list[float] = [1] * 20_000 if field == "sizes" else [1.0] * 20_000
    (_in_question if field == "sizes" else _in_terms)(field, many)(content)
    with pytest.raises(ProtocolError, match=f"{field}: List should have at most 16384 items"):
        read_question(content, digest_of({}))


def test_the_name_of_a_mechanism_is_empty_where_a_number_has_thousands_of_digits() -> None:
    content = question().content
    _in_terms("config", '[mechanism]\nname = "duchi"\nepsilon = ' + "9" * 8_000)(content)
    assert mechanism_name_in(content) == ""
    with pytest.raises(ProtocolError, match="not valid TOML"):
        read_question(content, digest_of({}))


@pytest.mark.parametrize("name", ["time-varying", "adapldp", "full-dp"])
def test_an_epsilon_whose_square_no_float_holds_is_refused_in_words(name: str) -> None:
    terms = terms_of(config=config_of(f"mechanism.name={name}", "mechanism.epsilon=1.7e308", "training.clip_norm=1.0"))
    with pytest.raises(ConfigError, match="epsilon must be at most"):
        read_question(question(terms).content, digest_of({}))


def test_terms_that_no_node_would_read_are_refused_before_anybody_is_asked() -> None:
    bounds = {f"column {place}": [0.0, 1.0] for place in range(10_000)}
    config = config_of()
    long = config.model_copy(update={"data": config.data.model_copy(update={"bounds": bounds})})
    with pytest.raises(ConfigError, match="nodes read configs of at most 131,072 characters"):
        terms_of(config=long).to_record()
