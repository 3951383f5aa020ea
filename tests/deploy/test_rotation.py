"""The commands of docs/deploy.md on rotating keys and replacing a node are run as they stand there, in that order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from test_site import shake_hands

from conftest import CommandLine
from ldpfl.deploy.certificates import issue
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_books, set_limit
from ldpfl.privacy.events import OURS, BinaryRelease
from ldpfl.privacy.policy import Policy, Request, read_policy
from ldpfl.relay.database import open_engine
from ldpfl.relay.errors import Unauthenticated
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.transport.shuffling.sealing import generate_key, load_key, public_text

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def commands(section: str) -> list[list[str]]:
    """Return the commands in the blocks of a section, without what is said beside them."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture
def running(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A relay's store with a client, certificates, and a node's policy with the key of before."""
    monkeypatch.setenv("LDPFL_RELAY_STORE", "relay.db")
    issue(Path("tls"), ["superlink.example", "relay.example,10.0.0.7"], 5)
    Path("policy.toml").write_text(f'# mine\naggregator_keys = ["{OLD}"]\n', encoding="utf-8")
    set_limit(Path("budget.sqlite"), 40.0)
    return ldpfl


OLD = public_text(generate_key())


def test_keys_are_rotated_by_the_commands_on_the_page(running: CommandLine) -> None:
    engine = open_engine("relay.db")
    tokens = Tokens(engine)
    first = tokens.add("hospital-3", Role.CLIENT)
    before = Path("tls/relay.example/server.crt").read_bytes()
    said: dict[str, str] = {}
    for words in commands("Rotating keys"):
        new = public_text(load_key(Path("new.key"))) if Path("new.key").exists() else ""
        names = {"NEW": new, "OLD": OLD}
        outcome = running(*(names.get(word, word) for word in words))
        assert outcome.code == 0, (words, outcome.err)
        said[" ".join(words[:3])] = outcome.out
        if words[:3] == ["policy", "key", "add"]:
            assert read_policy(Path("policy.toml")).aggregator_keys == (OLD, new)
        if words[:3] == ["relay", "token", "list"]:  # both are good before the older one goes
            second = said["relay token renew"].strip()
            assert tokens.owner(first).name == tokens.owner(second).name
    assert read_policy(Path("policy.toml")).aggregator_keys == (new,)
    assert said["policy key list"].strip() == new
    assert "# mine" in Path("policy.toml").read_text(encoding="utf-8")
    assert tokens.owner(second).name == "hospital-3"
    with pytest.raises(Unauthenticated):
        tokens.owner(first)
    assert Path("tls/relay.example/server.crt").read_bytes() != before
    shake_hands(Path("tls/relay.example"), Path("tls/ca.crt"), "10.0.0.7")
    engine.dispose()


def test_a_budget_moves_by_the_commands_on_the_page(running: CommandLine) -> None:
    outcomes = [running(*words) for words in commands("Replacing or upgrading a node")]
    assert [outcome.code for outcome in outcomes] == [0, 0]
    assert "this budget was moved to" in outcomes[-1].out
    assert read_books(Path("moved.sqlite")).limit.epsilon == 40.0
    assert read_books(Path("budget.sqlite")).limit.epsilon == 0.0


def test_a_backup_is_charged_by_the_command_on_the_page(running: CommandLine) -> None:
    bounds: dict[str, Any] = {"lifetime_epsilon": 40.0, "epsilon_per_unit": 1.0, "epsilon_per_round": 1.0, "rounds": 100}
    policy = Policy(mechanisms=("duchi",), min_clients=2, transports=("direct",), **bounds)
    release = BinaryRelease("duchi", 1.0, 1, author=OURS)
    Budget(Path("budget.sqlite"), policy).charge(Request("run", 1, release, 3, "direct"))
    (words,) = commands("Backups, and what to do after a loss")
    assert running(*words).code == 0
    assert read_books(Path("budget.sqlite")).charges == 13
