"""The operator's commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ldpfl import ConfigError
from ldpfl.cli import relay
from ldpfl.relay.database import open_engine
from ldpfl.relay.tokens import Tokens


def call(*arguments: str | Path) -> str:
    """Return what a command prints; its own errors are raised, and the main program prints those."""
    outcome = CliRunner().invoke(relay.app, [*map(str, arguments)], catch_exceptions=False, standalone_mode=False)
    return outcome.output


def test_tokens_are_added_listed_and_revoked(tmp_path: Path) -> None:
    store = tmp_path / "relay.db"
    token = call("token", "add", "alice", "--role", "client", "--store", store).strip()
    call("token", "add", "server", "--role", "aggregator", "--store", store)
    assert call("token", "list", "--store", store).splitlines() == ["client      alice", "aggregator  server"]
    engine = open_engine(str(store))
    assert Tokens(engine).owner(token).name == "alice"
    engine.dispose()
    call("token", "revoke", "alice", "--store", store)
    assert call("token", "list", "--store", store).splitlines() == ["aggregator  server"]


def test_the_store_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(relay.STORE_VARIABLE, str(tmp_path / "relay.db"))
    assert call("token", "list") == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["token", "add", "alice", "--role", "king"], "client or aggregator"),
        (["token", "add", "a b", "--role", "client"], "cannot name"),
        (["token", "revoke", "alice"], "no token"),
        (["serve", "--host", "0.0.0.0"], "--tls-cert"),
        (["serve", "--tls-cert", "x.pem"], "belong together"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        call(*arguments, "--store", tmp_path / "relay.db")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'ldpfl\[relay\]'"):
        call("serve", "--store", tmp_path / "relay.db")
