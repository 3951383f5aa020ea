"""What a node's operator sets up decides, whatever the server asks."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import httpx
import pytest
from flower_parts import POLICY, Train, ask, config_of, instruction, shift, start_arrays, terms_of
from flwr.app import Context, Message, RecordDict

from brought_package import install
from ldpfl.errors import ChargedBefore, ConfigError, NoRelay, RelayUnreachable
from ldpfl.flower import AllDeclined, InProcessGrid, LdpClientApp, LdpStrategy, RoundTerms, apps, operator_node
from ldpfl.flower.client_app import DECLINED
from ldpfl.flower.operator_node import PATIENCE, read_token
from ldpfl.flower.terms import digest_of
from ldpfl.mechanisms import Duchi, Mechanism, PublicState
from ldpfl.mechanisms.base import PerRound
from ldpfl.privacy import BinaryRelease
from ldpfl.privacy.budget_file import read_books, read_charges, set_limit
from ldpfl.relay import RelayClient


def write_policy(folder: Path, **changes: str) -> Path:
    path = folder / "policy.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in {**POLICY, **changes}.items()), encoding="utf-8")
    return path


@pytest.fixture
def budget(tmp_path: Path) -> Path:
    set_limit(tmp_path / "budget.sqlite", 100.0, 0.0)
    return tmp_path / "budget.sqlite"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for name in ("LDPFL_POLICY", "LDPFL_BUDGET", "LDPFL_BUDGETS"):
        monkeypatch.delenv(name, raising=False)
    return caplog


def reply_of(policy: Path | None, budget: Path | None, terms: RoundTerms | None = None, train: Train | str = shift) -> Message:
    """What the first of three nodes answers, set up so."""
    own = {name: str(path) for name, path in (("LDPFL_POLICY", policy), ("LDPFL_BUDGET", budget)) if path is not None}
    with mock.patch.dict(os.environ, own):
        return ask(LdpClientApp(train), instruction(terms))


def declined(reply: Message) -> bool:
    return reply.has_error() and str(reply.error.reason).startswith(DECLINED)


def test_what_policy_and_budget_allow_is_sent_and_charged(tmp_path: Path, budget: Path) -> None:
    reply = reply_of(write_policy(tmp_path), budget)
    assert reply.has_content()
    (charge,) = read_charges(budget)
    assert (charge.run, charge.round, charge.cohort, charge.transport) == ("run", 1, 3, "direct")
    assert isinstance(charge.release, BinaryRelease)
    assert (charge.release.epsilon, charge.release.units) == (2.0, 15)
    assert read_books(budget).spent(0.0) == 30.0


@pytest.mark.parametrize(
    ("changes", "terms", "named"),
    [
        ({"mechanisms": "[]"}, terms_of(), "not among the policy's mechanisms"),
        ({"epsilon_per_unit": "1.9"}, terms_of(), "epsilon_per_unit"),
        ({"epsilon_per_round": "29.9"}, terms_of(), "epsilon_per_round"),
        ({"lifetime_epsilon": "29.9"}, terms_of(), "lifetime_epsilon"),
        ({"rounds": "0"}, terms_of(), "rounds = 0"),
        ({"min_clients": "4"}, terms_of(), "min_clients"),
        ({"transports": '["relay"]'}, terms_of(), "transport"),
        ({}, terms_of(config=config_of("mechanism.epsilon=2.5")), "epsilon_per_unit"),
        ({}, terms_of(config=config_of("mechanism.name=harmony")), "not among"),
        ({"mechanisms": '["none"]'}, terms_of(config=config_of("mechanism.name=none")), "allow_unprotected"),
        ({"unknown": "1"}, terms_of(), "unknown setting"),
    ],
)
def test_what_the_policy_does_not_allow_is_declined(
    changes: dict[str, str], terms: RoundTerms, named: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    assert declined(reply_of(write_policy(tmp_path, **changes), budget, terms))
    assert named in log.text
    assert read_charges(budget) == ()


@dataclass(frozen=True)
class Chooser(Duchi, PerRound):
    """Somebody else's, which returns a mechanism of ldpfl's for each round."""

    def in_round(self, public: PublicState) -> Mechanism:
        return Duchi(self.epsilon)

    @property
    def terms(self) -> object:
        return self


def test_a_mechanism_that_another_s_code_chose_is_not_judged_as_ldpfl_s(
    tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundTerms, "mechanism", lambda self, ranges: Chooser(2.0))
    assert declined(reply_of(write_policy(tmp_path), budget))
    assert f"has the name of a built-in mechanism but is code of {__name__}:Chooser" in log.text
    assert read_charges(budget) == ()


@pytest.mark.parametrize("division", ["data.partition=dirichlet", "data.partition=labels", "data.private_label=7"])
def test_a_server_cannot_divide_a_nodes_records_by_what_is_in_them(division: str, tmp_path: Path, budget: Path) -> None:
    """One record would decide which others are summed: far more than what is charged for it."""
    gradients = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.records=5"]
    config = config_of(*gradients, division)
    policy = write_policy(tmp_path, mechanisms='["dp-sgd"]', protects='"record"', delta="1e-5")
    assert reply_of(policy, budget, terms_of(config=config)).has_error()
    assert read_charges(budget) == ()


OWN = {
    'data.path="rows.csv"': "names data by a path",
    'data.test_path="rows.csv"': "names data by a path",
    'data.name="owner/name"': "names data by a path",
    'data.name="os:getcwd"': "names data by a path",
    "data.name=given": "names data by a path",
    'data.features="os:getcwd"': "features 'os:getcwd' is code, and the policy's models do not list it",
    'data.feature_options.directions="/etc/passwd"': "an option of the features is text",
    'task.name="os:getcwd"': "task 'os:getcwd' is code, and the policy's models do not list it",
}


@pytest.mark.parametrize("setting", OWN)
def test_a_server_names_neither_data_nor_features_nor_tasks_of_its_own(
    setting: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    """A node's operator may: by an app of the node's own. It is declined before the charge, and before anything is trained."""
    policy = write_policy(tmp_path, mechanisms='["duchi"]')
    assert not reply_of(policy, budget, terms_of(config=config_of())).has_error()
    trained: list[Message] = []

    def train(message: Message, context: Context) -> Message:
        trained.append(message)
        return shift(message, context)

    assert declined(reply_of(policy, budget, terms_of(config=config_of(setting), round=2), train))
    assert OWN[setting] in log.text
    assert not trained
    assert [charge.round for charge in read_charges(budget)] == [1]


def test_a_node_without_a_folder_of_data_fetches_nothing_that_a_server_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LDPFL_DATA_DIR", raising=False)
    monkeypatch.setattr("datasets.load_dataset", lambda *asked: pytest.fail(f"the hub was asked for {asked}"))
    context = Context(run_id=0, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    with pytest.raises(ConfigError, match="LDPFL_DATA_DIR is not set"):
        apps.train(instruction(terms_of(config=config_of("data.name=cifar10"))), context)


class Panic(BaseException):
    """What libraries in other languages raise when they give up."""


def panicking(message: Message, context: Context) -> Message:
    raise Panic("PATIENT 4711")


def exiting(message: Message, context: Context) -> Message:
    os._exit(3)


def leaving_a_helper(message: Message, context: Context) -> Message:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize("train", ["test_node:panicking", "test_node:exiting", "test_node:leaving_a_helper"])
@pytest.mark.slow
@pytest.mark.thorough
def test_training_that_dies_is_reported_as_no_change_also_where_replies_are_immediate(
    train: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    dead, alive = (
        reply_of(write_policy(tmp_path), budget, terms_of(run=name), which) for name, which in (("a", train), ("b", "flower_parts:shift"))
    )
    assert dead.content["ldpfl"].keys() == alive.content["ldpfl"].keys()
    assert len(read_charges(budget)) == 2
    assert "replaced" in log.text
    assert "PATIENT" not in log.text


def test_without_policy_or_budget_nothing_leaves(tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture) -> None:
    policy = write_policy(tmp_path)
    for own in ((None, budget), (policy, None), (tmp_path / "missing.toml", budget), (policy, tmp_path / "missing.sqlite")):
        assert declined(reply_of(*own))
    assert log.text.count("declined") == 4


def test_the_token_for_the_relay_tells_apart_nodes_that_share_a_budget(
    tmp_path: Path, budget: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in (("POLICY", write_policy(tmp_path)), ("BUDGET", budget), ("RELAY_TOKEN", tmp_path / "token")):
        monkeypatch.setenv(f"LDPFL_{name}", str(path))

    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})

    def node(token: str) -> str:
        (tmp_path / "token").write_text(token, encoding="ascii")
        (tmp_path / "token").chmod(0o600)
        return operator_node(context).budget.node

    assert node("a-token") == node("a-token") != node("b-token")
    assert "token" not in node("a-token")
    (tmp_path / "token").chmod(0o644)
    assert operator_node(context).budget.node == "1"  # of Flower; over the relay nothing is charged with it: the connection fails


def test_the_lifetime_budget_ends_the_rounds_of_a_client(tmp_path: Path, budget: Path) -> None:
    """100 / 30: three rounds, then no more, whatever run the server calls it."""
    replies = [reply_of(write_policy(tmp_path), budget, terms_of(run=f"run-{n}", round=n)) for n in range(1, 6)]
    assert [declined(reply) for reply in replies] == [False, False, False, True, True]
    assert len(read_charges(budget)) == 3


def test_a_round_that_was_charged_is_not_reported_again_in_replies(tmp_path: Path, budget: Path) -> None:
    """The server's ledger counts one report a round. It asks again only if its run folder is an older copy."""
    policy = write_policy(tmp_path)
    replies = [reply_of(policy, budget, terms_of(**changes)) for changes in ({}, {}, {"round": 2}, {"run": "another"})]
    assert [str(reply.error.reason) if reply.has_error() else "sent" for reply in replies] == ["sent", ChargedBefore.public, "sent", "sent"]
    assert len(read_charges(budget)) == 3


def test_the_run_s_config_which_is_the_server_s_sets_up_no_node(tmp_path: Path, budget: Path) -> None:
    settings = {"ldpfl-policy": str(write_policy(tmp_path)), "LDPFL_POLICY": str(tmp_path / "policy.toml"), "LDPFL_BUDGET": str(budget)}
    grid = InProcessGrid(LdpClientApp(shift), 3, run_config=settings)
    (reply,) = grid.send_and_receive([instruction(terms_of(run_config=digest_of(settings)))])
    assert declined(reply)


def test_the_environment_sets_up_simulated_nodes_with_a_budget_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "budgets").mkdir()
    monkeypatch.setenv("LDPFL_POLICY", str(write_policy(tmp_path)))
    monkeypatch.setenv("LDPFL_BUDGETS", str(tmp_path / "budgets"))
    strategy = LdpStrategy(config_of())
    with pytest.raises(
        AllDeclined, match="round 4: none of 3 nodes takes part: 3 said 'declined: its lifetime budget does not allow the round'"
    ):
        strategy.start(InProcessGrid(LdpClientApp(shift), 3), start_arrays(), 5)
    assert [metrics.clients for metrics in strategy.checkpoint.history] == [3, 3, 3]
    files = sorted((tmp_path / "budgets").iterdir())
    assert [path.name for path in files] == ["client-0.sqlite", "client-1.sqlite", "client-2.sqlite"]
    assert all(len(read_charges(path)) == 3 for path in files)


def test_the_node_s_config_which_others_on_its_machine_can_change_sets_up_nothing(tmp_path: Path, budget: Path) -> None:
    """SuperNode hands it to its processes over an interface that other users of the machine reach, and takes back what they made of it."""
    other = tmp_path / "other"
    other.mkdir()
    set_limit(other / "budget.sqlite", 1e6, 0.0)
    changed = {"ldpfl-policy": str(write_policy(other, rounds="1000")), "ldpfl-budget": str(other / "budget.sqlite")}
    app = LdpClientApp(shift)
    assert declined(ask(app, instruction(), node_config=changed))
    own = {"LDPFL_POLICY": str(write_policy(tmp_path, rounds="1")), "LDPFL_BUDGET": str(budget)}
    with mock.patch.dict(os.environ, own):
        assert ask(app, instruction(terms_of(run="a")), node_config=changed).has_content()
        assert declined(ask(app, instruction(terms_of(run="b")), node_config=changed))
    assert (len(read_charges(budget)), len(read_charges(other / "budget.sqlite"))) == (1, 0)


def test_a_folder_is_no_budget_of_a_node_whatever_its_partition_is_called(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "budgets").mkdir()
    assert declined(reply_of(write_policy(tmp_path), tmp_path / "budgets"))
    assert list((tmp_path / "budgets").iterdir()) == []


def test_a_folder_of_budgets_needs_a_partition_which_the_server_does_not_choose(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "budgets").mkdir()
    monkeypatch.setenv("LDPFL_POLICY", str(write_policy(tmp_path)))
    monkeypatch.setenv("LDPFL_BUDGETS", str(tmp_path / "budgets"))
    grid = InProcessGrid(LdpClientApp(shift), 1)
    for context in grid._contexts.values():
        del context.node_config["partition-id"]
    (reply,) = grid.send_and_receive([instruction()])
    assert declined(reply)
    assert "partition-id" in log.text
    assert list((tmp_path / "budgets").iterdir()) == []


def test_training_that_fails_is_charged_and_reported_as_any_other(tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture) -> None:
    def train(message: Message, context: Context) -> Message:
        raise ValueError("no data")

    own = {"LDPFL_POLICY": str(write_policy(tmp_path)), "LDPFL_BUDGET": str(budget)}
    with mock.patch.dict(os.environ, own):
        asked = [(LdpClientApp(app), instruction(terms_of(round=number))) for number, app in enumerate((train, shift), 1)]
        replies = [ask(app, message).content.config_records["ldpfl"] for app, message in asked]
    assert {name: type(value) for name, value in replies[0].items()} == {name: type(value) for name, value in replies[1].items()}
    assert len({len(bytes(reply["report"])) for reply in replies}) == 1  # type: ignore[arg-type]
    assert len(read_charges(budget)) == 2
    assert "replaced: round 1 is reported as no change" in log.text


@pytest.mark.parametrize(
    ("policy", "terms", "named"),
    [
        ({}, ["model.name=subprocess:getoutput"], "models do not list it"),
        ({"models": '["torch.nn:Linear"]'}, ["model.name=torch.nn:Bilinear"], "models do not list it"),
        (
            {"models": '["torch.nn:Linear"]'},
            ["model.name=torch.nn:Linear", "model.options.p=/etc"],
            "option of the model is text",
        ),
        ({"models": '["no path"]'}, [], "package.module:Class"),
        ({"models": '["net.py:Net"]'}, ["model.name=net.py:Net"], "package.module:Class"),
    ],
)
def test_code_that_the_server_names_is_run_only_if_the_policy_names_it(
    policy: dict[str, str], terms: list[str], named: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    assert declined(reply_of(write_policy(tmp_path, **policy), budget, terms_of(config=config_of(*terms))))
    assert named in log.text
    assert read_charges(budget) == ()


def test_a_model_that_the_policy_names_may_be_asked_for(tmp_path: Path, budget: Path) -> None:
    allowed = write_policy(tmp_path, models='["my_package.nets:MyNet"]')
    asked = terms_of(config=config_of("model.name=my_package.nets:MyNet", "model.options.width=3"))
    assert reply_of(allowed, budget, asked).has_content()


@pytest.mark.slow
def test_a_round_without_a_time_for_replies_is_declined_unless_the_policy_allows_it(
    tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    assert declined(reply_of(write_policy(tmp_path, immediate_replies="false"), budget))
    assert "how long the client trained" in log.text
    assert reply_of(write_policy(tmp_path, immediate_replies="false"), budget, terms_of(reply_s=2.0)).has_content()


@pytest.mark.parametrize("what", ["policy", "budget"])
def test_files_that_others_can_change_are_not_relied_on(what: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture) -> None:
    policy = write_policy(tmp_path)
    (policy if what == "policy" else budget).chmod(0o666)
    assert declined(reply_of(policy, budget))
    assert "by other users" in log.text


@pytest.mark.parametrize("what", ["policy", "budget"])
def test_a_link_that_other_users_can_turn_is_not_followed(what: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture) -> None:
    policy = write_policy(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    link = tmp_path / "open" / "link"
    link.symlink_to(policy if what == "policy" else budget)
    assert declined(reply_of(link, budget) if what == "policy" else reply_of(policy, link))
    assert "lies in a folder that other users can write to" in log.text
    (tmp_path / "open").chmod(0o755)
    assert reply_of(*((link, budget) if what == "policy" else (policy, link))).has_content()


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_certificate_authority_that_other_users_can_change_is_not_trusted(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever can change it can be the relay, and is told the token."""
    (tmp_path / "ca.crt").write_text("", encoding="ascii")
    (tmp_path / "ca.crt").chmod(mode)
    (tmp_path / "relay.token").write_text("token\n", encoding="ascii")
    (tmp_path / "relay.token").chmod(0o600)
    set_limit(tmp_path / "budget.sqlite", 100.0, 0.0)
    for name, value in (("POLICY", write_policy(tmp_path)), ("BUDGET", tmp_path / "budget.sqlite"), ("RELAY", "https://127.0.0.1:1")):
        monkeypatch.setenv(f"LDPFL_{name}", str(value))
    monkeypatch.setenv("LDPFL_RELAY_TOKEN", str(tmp_path / "relay.token"))
    monkeypatch.setenv("LDPFL_RELAY_CA", str(tmp_path / "ca.crt"))
    context = next(iter(InProcessGrid(LdpClientApp(shift), 1)._contexts.values()))
    with pytest.raises(NoRelay, match=r"certificate authority .* can be changed by other users"):
        operator_node(context).connect()


def test_a_relay_that_restarts_is_waited_for_before_the_charge(tmp_path: Path, budget: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "relay.token").write_text("token\n", encoding="ascii")
    (tmp_path / "relay.token").chmod(0o600)
    for name, value in (("POLICY", write_policy(tmp_path)), ("BUDGET", budget), ("RELAY", "http://127.0.0.1:1")):
        monkeypatch.setenv(f"LDPFL_{name}", str(value))
    monkeypatch.setenv("LDPFL_RELAY_TOKEN", str(tmp_path / "relay.token"))
    waited: list[float] = []
    monkeypatch.setattr(sys.modules["ldpfl.flower.operator_node"], "RelayClient", partial(RelayClient, sleep=waited.append))
    context = next(iter(InProcessGrid(LdpClientApp(shift), 1)._contexts.values()))
    with operator_node(context).connect() as relay, pytest.raises(RelayUnreachable):
        relay.round_status("run", 1)
    assert 120 < sum(waited) < 600


@pytest.mark.parametrize("mode", [0o644, 0o666])
def test_a_token_that_other_users_can_read_is_not_used(mode: int, tmp_path: Path) -> None:
    (tmp_path / "relay.token").write_text("token\n", encoding="ascii")
    (tmp_path / "relay.token").chmod(mode)
    with pytest.raises(ConfigError, match="can be read by other users: run chmod 600"):
        read_token(tmp_path / "relay.token")
    (tmp_path / "relay.token").chmod(0o600)
    assert read_token(tmp_path / "relay.token") == "token"


def test_a_mechanism_of_an_installed_package_is_looked_up_only_if_the_policy_names_it(
    tmp_path: Path, budget: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """To look it up runs the package's code, in the node's own process."""
    install(tmp_path / "site", monkeypatch)
    text = config_of().to_toml().replace('name = "duchi"', 'name = "careless"')
    record = terms_of().to_record()
    record["config"] = text
    message = instruction()
    message.content.config_records["ldpfl"] = record
    with mock.patch.dict(os.environ, {"LDPFL_POLICY": str(write_policy(tmp_path)), "LDPFL_BUDGET": str(budget)}):
        assert declined(ask(LdpClientApp(shift), message))
    assert "careless_package" not in sys.modules
    assert "'careless' is not among the policy's mechanisms (duchi); nothing was run or sent" in log.text
    assert read_charges(budget) == ()
    allowing = write_policy(tmp_path, mechanisms='["careless"]')
    with mock.patch.dict(os.environ, {"LDPFL_POLICY": str(allowing), "LDPFL_BUDGET": str(budget)}):
        assert ask(LdpClientApp(shift), message).has_content()
    assert [charge.release.mechanism for charge in read_charges(budget)] == ["careless"]


def test_a_mechanism_whose_reports_are_not_as_long_as_it_says_releases_nothing(
    tmp_path: Path, budget: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """Their lengths would tell of the data, and what stands behind a report in memory must not be taken for a part of it."""
    install(tmp_path / "site", monkeypatch, place="careless_package:ShortSettings", name="short")
    allowed = write_policy(tmp_path, mechanisms='["short"]')
    assert reply_of(allowed, budget, terms_of(config=config_of("mechanism.name=short"))).has_error()
    assert "must have the length that it states" in log.text
    assert read_charges(budget) == ()


@pytest.mark.parametrize(("reply_s", "ttl", "named"), [(7200.0, 1e6, "longest_reply_s = 3600"), (60.0, 30.0, "expires after 30 s")])
def test_times_for_replies_that_do_not_fit_are_refused_before_the_charge(
    reply_s: float, ttl: float, named: str, tmp_path: Path, budget: Path, log: pytest.LogCaptureFixture
) -> None:
    own = {"LDPFL_POLICY": str(write_policy(tmp_path)), "LDPFL_BUDGET": str(budget)}
    with mock.patch.dict(os.environ, own):
        message = instruction(terms_of(reply_s=reply_s))
        message.metadata.ttl = ttl
        assert ask(LdpClientApp(shift), message).has_error()
    assert named in log.text
    assert read_charges(budget) == ()


@pytest.mark.parametrize(("answer_s", "tries", "least_s"), [(0.0, 26, 150.0), (40.0, 8, 300.0)])
def test_a_node_asks_an_unavailable_relay_for_a_while_and_a_slow_one_no_longer(answer_s: float, tries: int, least_s: float) -> None:
    now, seen = [0.0], list[httpx.Request]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        now[0] += min(answer_s, request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("slow")

    transport = httpx.MockTransport(answer)
    with (
        RelayClient("http://127.0.0.1", "t", transport=transport, patience=PATIENCE, sleep=sleep, clock=lambda: now[0]) as client,
        pytest.raises(RelayUnreachable, match="times in a row"),
    ):
        client.round_status("run", 1)
    assert least_s <= now[0] <= 300.0
    assert len(seen) <= tries
