"""The operator's commands."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from relay_support import RUN, Clock, on_disk, opened, put, terms, upload_id
from typer.testing import CliRunner

from ldpfl import ConfigError
from ldpfl.cli import relay
from ldpfl.relay.database import open_engine
from ldpfl.relay.errors import Unauthenticated, Unknown
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Tokens
from ldpfl.transport.sums import signer_of
from ldpfl.transport.sums.node_keys import line_of, public_text

pytest_plugins = ["relay_fixtures"]


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
        (["token", "add", "alice", "--role", "client", "--signing-key", "alice"], "'alice' does not begin with a node's public key"),
        (["serve", "--host", "0.0.0.0"], "--tls-cert"),
        (["serve", "--tls-cert", "x.pem"], "only one of --tls-cert and --tls-key is set"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        call(*arguments, "--store", tmp_path / "relay.db")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.api.operators.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'ldpfl\[relay\]'"):
        call("serve", "--store", tmp_path / "relay.db")


def test_a_token_is_renewed_and_the_older_one_revoked_when_nobody_uses_it_any_more(tmp_path: Path) -> None:
    store = tmp_path / "relay.db"
    first = call("token", "add", "alice", "--role", "client", "--store", store).strip()
    with pytest.raises(ConfigError, match="ldpfl relay token renew alice"):
        call("token", "add", "alice", "--role", "client", "--store", store)
    second = call("token", "renew", "alice", "--store", store).strip()
    assert call("token", "list", "--store", store).splitlines() == ["client      alice", "client      alice  (older token)"]
    engine = open_engine(str(store))
    tokens = Tokens(engine)
    assert tokens.owner(first).name == tokens.owner(second).name == "alice"
    with pytest.raises(ConfigError, match="two tokens already: revoke the older one first"):
        call("token", "renew", "alice", "--store", store)
    call("token", "revoke", "alice", "--older", "--store", store)
    assert call("token", "list", "--store", store).splitlines() == ["client      alice"]
    assert tokens.owner(second).name == "alice"
    with pytest.raises(Unauthenticated):
        tokens.owner(first)
    with pytest.raises(ConfigError, match="no older token"):
        call("token", "revoke", "alice", "--older", "--store", store)
    call("token", "renew", "alice", "--store", store)
    call("token", "revoke", "alice", "--store", store)  # both
    with pytest.raises(Unauthenticated):
        tokens.owner(second)
    with pytest.raises(ConfigError, match="alice has no token"):
        call("token", "renew", "alice", "--store", store)
    engine.dispose()


def test_a_clients_token_has_its_signing_key_and_keeps_it(tmp_path: Path) -> None:
    store, keys = ("--store", tmp_path / "relay.db"), {name: Ed25519PrivateKey.generate() for name in ("alice", "bob", "new")}
    lines = {name: line_of(key) for name, key in keys.items()}
    names = {name: signer_of(key.public_key()).hex() for name, key in keys.items()}
    call("token", "add", "alice", "--role", "client", "--signing-key", lines["alice"], *store)
    call("token", "add", "bob", "--role", "client", *store)
    call("token", "add", "server", "--role", "aggregator", *store)
    alice = f"client      alice  signs as {names['alice']}"
    assert call("token", "list", *store).splitlines() == [alice, "client      bob", "aggregator  server"]
    call("token", "renew", "alice", *store)
    assert call("token", "list", *store).splitlines()[:2] == [alice, f"{alice}  (older token)"]
    call("token", "revoke", "alice", "--older", *store)
    call("token", "renew", "alice", "--signing-key", lines["new"].split()[0], *store)
    signs = f"client      alice  signs as {names['new']}"
    assert call("token", "list", *store).splitlines()[:2] == [signs, f"{alice}  (older token)"]
    for key in ("alice", "new"):
        with pytest.raises(ConfigError, match="this signing key is that of alice: make a separate key for each client"):
            call("token", "renew", "bob", "--signing-key", lines[key], *store)
    call("token", "renew", "bob", "--signing-key", lines["bob"], *store)
    with pytest.raises(ConfigError, match="an aggregator uploads nothing to sums"):
        call("token", "renew", "server", "--signing-key", public_text(Ed25519PrivateKey.generate()), *store)


def test_rounds_are_listed_by_what_the_relay_s_operator_may_see_and_cancelled(sqlite_store: Store, clock: Clock, tmp_path: Path) -> None:
    place = ("--store", tmp_path / "relay.db")
    assert "holds no round" in call("rounds", *place)
    clock.now = time.time() - 500
    opened(sqlite_store, 1, closes_in_s=100.0)
    opened(sqlite_store, 2, closes_in_s=5000.0)
    opened(sqlite_store, 3)
    put(sqlite_store, "carol")
    put(sqlite_store, "alice", 2)
    put(sqlite_store, "bob", 2)
    sqlite_store.begin("dora", RUN, 2, upload_id("dora"), terms().upload_bytes)
    sqlite_store.cancel("aggregator", RUN, 3)
    text = call("rounds", *place)
    assert not any(name in text for name in ("alice", "bob", "carol", "dora"))
    waiting, still_open = json.loads(call("rounds", "--json", *place))
    assert (waiting["round"], waiting["state"], waiting["uploads"], waiting["min_clients"]) == (1, "waiting", 1, 2)
    assert (still_open["round"], still_open["state"], still_open["uploads"], still_open["incomplete"]) == (2, "open", 2, 1)
    assert 500 <= still_open["age_s"] < 600
    assert 4400 < still_open["seconds_left"] <= 4500
    assert -500 < waiting["seconds_left"] <= -400
    assert "round 2 of run-1 is cancelled" in call("cancel", RUN, "2", *place)
    assert "was deleted before" in call("cancel", RUN, "2", *place)
    assert b"upload-of-alice" not in on_disk(tmp_path / "relay.db")
    assert [one["round"] for one in json.loads(call("rounds", "--json", *place))] == [1]
    with pytest.raises(Unknown, match="run ldpfl relay rounds"):
        call("cancel", RUN, "7", *place)
