"""``ldpfl policy init``: what an app asks becomes a policy and a budget under which a node takes part in just that."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from flower_parts import config_of, shift, start_arrays
from flwr.app import Context

from conftest import CommandLine
from ldpfl.flower import AllDeclined, InProcessGrid, LdpClientApp, LdpStrategy, OperatorNode, operator_node
from ldpfl.flower.policy_init import offer_of, ranges_for, releases_of
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_books
from ldpfl.privacy.events import OURS, GaussianRelease
from ldpfl.privacy.policy import Request, read_policy
from ldpfl.transport.shuffling.sealing import generate_key, public_text

# What an app imports takes seconds to find out: once, in one worker.
pytestmark = pytest.mark.xdist_group("imports-of-apps")

APP = """
[project]
name = "app"
version = "1.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
clientapp = "ldpfl.flower.apps:client_app"
[tool.flwr.app.config.ldpfl]
recipe = "quickstart"
"""


@pytest.fixture
def app(ldpfl: CommandLine) -> Path:
    """A Flower app whose modules end everything that imports them, in the folder that commands run in."""
    folder = Path("app")
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    (folder / "pyproject.toml").write_text(APP, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_node_set_up_by_it_takes_part_in_the_whole_run_and_in_no_more(app: Path, ldpfl: CommandLine) -> None:
    config = config_of("training.rounds=3", "clients.count=2")
    Path("config.toml").write_text(config.to_toml(), encoding="utf-8")
    own = {}
    for client in range(2):
        files = ("--out", f"{client}.toml", "--budget", f"{client}.sqlite")
        shown = ldpfl("policy", "init", app, "--config", "config.toml", "--layers", "12, 3", *files)
        assert f"{client}.toml holds the policy; {client}.sqlite holds the budget" in shown.out
        assert "3 reports of duchi (direct)" in shown.out
        assert f"LDPFL_BUDGET={Path(f'{client}.sqlite').absolute()}" in shown.out
        own[client] = {"LDPFL_POLICY": f"{client}.toml", "LDPFL_BUDGET": f"{client}.sqlite"}

    def node(context: Context) -> OperatorNode:
        with mock.patch.dict(os.environ, own[int(context.node_config["partition-id"])]):
            return operator_node(context)

    grid = InProcessGrid(LdpClientApp(shift, node=node), 2)
    strategy = LdpStrategy(config)
    strategy.start(grid, start_arrays(), 3)
    assert [metrics.clients for metrics in strategy.checkpoint.history] == [2, 2, 2]
    for other in (config, config_of("mechanism.epsilon=2.1", "clients.count=2")):
        with pytest.raises(AllDeclined):
            LdpStrategy(other).start(grid, start_arrays(), 1)


OWN = {
    'from ldpfl.flower import LdpClientApp\n\napp = LdpClientApp("mine.training:app")\n': True,
    "app = made()\n": True,
    "from ldpfl.flower.apps import client_app as app\n": False,
}


@pytest.mark.thorough_for('from ldpfl.flower import LdpClientApp\\n\\napp = LdpClientApp("mine.training:app")\\n')
@pytest.mark.parametrize("client", OWN)
def test_an_app_whose_model_is_its_own_needs_its_size(client: str, app: Path, ldpfl: CommandLine) -> None:
    """The epsilon of all rounds grows with the number of values: that of ldpfl's default model is of another model."""
    (app / "mine").mkdir()
    (app / "mine" / "client.py").write_text(client, encoding="utf-8")
    (app / "pyproject.toml").write_text(APP.replace("ldpfl.flower.apps:client_app", "mine.client:app"), encoding="utf-8")
    Path("config.toml").write_text(config_of("clients.count=2").to_toml(), encoding="utf-8")
    asked = ("policy", "init", app, "--config", "config.toml")
    checked = ("deploy", "check-node", "--app", app, "--config", "config.toml")
    if OWN[client]:
        assert "the cost of mechanism 'duchi' depends on the model's size: give the arrays that its server sends" in ldpfl.refused(*asked)
        assert not Path("policy.toml").exists()
    else:
        ldpfl(*asked, "--out", "ready.toml")
        assert read_policy(Path("ready.toml")).epsilon_per_round > 1000
    ldpfl(*asked, "--layers", "weight=3x4,bias=3")
    assert read_policy(Path("policy.toml")).epsilon_per_round == 30
    set_up = {"LDPFL_POLICY": "policy.toml", "LDPFL_BUDGET": "budget.sqlite"}
    with mock.patch.dict(os.environ, set_up):
        assert ("depends on the model's size" in ldpfl(*checked).out) == OWN[client]
        checked_with_sizes = ldpfl(*checked, "--layers", "12,3")
    is_wrapped = "LdpClientApp" in client or "apps import client_app" in client
    assert checked_with_sizes.code == (0 if is_wrapped else 3)
    assert is_wrapped != ("reach the server without noise" in " ".join(checked_with_sizes.out.split()))


def test_the_size_of_an_own_model_is_not_asked_for_where_nothing_depends_on_it(app: Path, ldpfl: CommandLine) -> None:
    """Noise on sums of clipped gradients is the same for a large model as for a small one."""
    (app / "mine.py").write_text('app = LdpClientApp(records="mine.training:records")\n', encoding="utf-8")
    (app / "pyproject.toml").write_text(APP.replace("ldpfl.flower.apps:client_app", "mine:app"), encoding="utf-8")
    Path("config.toml").write_text('[mechanism]\nname = "dp-sgd"\nrecords = 40\n', encoding="utf-8")
    shown = ldpfl("policy", "init", app, "--config", "config.toml").out
    assert read_policy(Path("policy.toml")).protects == "record"
    assert "This guarantee holds only if the app's model code treats each record by itself" in " ".join(shown.split())


def test_an_existing_budget_is_compared_with_what_a_second_app_asks_for(app: Path, ldpfl: CommandLine) -> None:
    ldpfl("policy", "init", app, "--out", "first.toml")
    policy = read_policy(Path("first.toml"))
    offer = offer_of(str(app), None)
    for number, release in enumerate(releases_of(offer, ranges_for(offer, ())), 1):
        Budget(Path("budget.sqlite"), policy).charge(Request("run", number, release, offer.cohort, offer.transport))
    shown = " ".join(ldpfl("policy", "init", app, "--out", "second.toml").out.split())
    assert f" of {policy.lifetime_epsilon:g} left at delta 1e-05, and {policy.rounds} reports charged." in shown
    assert f"raise rounds (to {2 * policy.rounds:,}) and each limit on epsilon that is a number in the policy" in shown
    of_records = policy.model_copy(update={"protects": "record", "mechanisms": ("dp-sgd",), "rounds": 99})
    release = GaussianRelease("dp-sgd", 0.05, unit="record", author=OURS)
    Budget(Path("budget.sqlite"), of_records).charge(Request("other", 1, release, offer.cohort, offer.transport))
    shown = " ".join(ldpfl("policy", "init", app, "--out", "third.toml").out.split())
    assert "This node sends nothing for this app: budget.sqlite has releases that protected one record at a time" in shown
    assert "raise rounds" not in shown


def test_the_settings_of_an_app_decide_and_nothing_of_it_runs(app: Path, ldpfl: CommandLine) -> None:
    key = public_text(generate_key())
    settings = 'set = "training.rounds=7; mechanism.epsilon=0.5"\ntransport = "relay"\nlinked = 4\nmin-clients = 30\nreply-s = 60\n'
    (app / "pyproject.toml").write_text(APP + settings, encoding="utf-8")
    assert "encrypted for the aggregator" in ldpfl.refused("policy", "init", app)
    shown = ldpfl("policy", "init", app, "--key", key)
    assert "immediate_replies" not in shown.out
    policy = read_policy(Path("policy.toml"))
    assert (policy.epsilon_per_unit, policy.rounds, policy.min_clients, policy.linked) == (0.5, 7, 30, 4)
    assert (policy.transports, policy.aggregator_keys, policy.immediate_replies) == (("relay",), (key,), False)
    assert "longest_upload_s = 86400.0" in Path("policy.toml").read_text(encoding="utf-8")
    assert read_books(Path("budget.sqlite")).limit.epsilon == policy.lifetime_epsilon
    assert "# Largest number of reports that the client ever sends.\nrounds = 7\n" in Path("policy.toml").read_text(encoding="utf-8")


def test_a_model_that_is_code_is_not_run_but_named(ldpfl: CommandLine) -> None:
    Path("own.toml").write_text(config_of("model.name=nowhere:Net").to_toml(), encoding="utf-8")
    assert "give the sizes of the model's arrays by --layers" in ldpfl.refused("policy", "init", "own.toml")
    ldpfl("policy", "init", "own.toml", "--layers", "12,3")
    assert read_policy(Path("policy.toml")).models == ("nowhere:Net",)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("quickstar",), "did you mean 'quickstart'?"),
        (("app", "--layers", "12.5"), "--layers is '12.5', expected sizes, as in 500,10"),
        (("quickstart", "--config", "x.toml"), "--config works only with a Flower app"),
        (("quickstart", "--out", "there.toml"), "there.toml already exists and is not overwritten"),
        (("none.toml",), "protects nothing"),
        (("bad",), "is not the file of a Flower app"),
        (("without",), "give --config FILE, the config that the app's ServerApp uses"),
        (("unnamed",), "has no recipe in [tool.flwr.app.config.ldpfl]"),
        (("quickstart", "--key", "abc"), "a public key must be 32 bytes"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(arguments: tuple[str, ...], named: str, app: Path, ldpfl: CommandLine) -> None:
    Path("there.toml").write_text("mine", encoding="utf-8")
    Path("none.toml").write_text(config_of("mechanism.name=none").to_toml(), encoding="utf-8")
    texts = {"bad": "[project]\n", "without": "[tool.flwr.app]\npublisher = 'x'\n", "unnamed": APP.replace("recipe", "out")}
    for name, text in texts.items():
        Path(name).mkdir()
        (Path(name) / "pyproject.toml").write_text(text, encoding="utf-8")
    before = sorted(Path().iterdir())
    assert named in ldpfl.refused("policy", "init", *arguments)
    assert sorted(Path().iterdir()) == before
    assert Path("there.toml").read_text(encoding="utf-8") == "mine"
