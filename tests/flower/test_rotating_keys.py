"""The aggregator's key is replaced in the middle of a run, and its tokens: no round is lost, and no report is sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flower_parts import config_of, start_arrays
from relayed_parts import CLIENTS, KEY, World, policy_of, world_in

from ldpfl import ConfigError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy
from ldpfl.relay.tokens import Tokens
from ldpfl.server import Checkpoint
from ldpfl.transport.shuffling.sealing import public_text

# An app's process is forked in each round: slow where memory is.
pytestmark = pytest.mark.slow


class Killed(BaseException):
    """Stands for SIGKILL: nothing in between handles it."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        yield made


def go_on(world: World, folder: RunFolder, before: X25519PrivateKey | None, rounds: int = 2) -> Checkpoint:
    strategy = LdpStrategy(config_of(), collector=replace(world.collector(), before=before), folder=folder)
    strategy.start(world.grid(), start_arrays(), rounds, timeout=100.0)
    return strategy.checkpoint


@pytest.mark.thorough
def test_a_round_that_was_begun_with_the_key_before_is_read_with_it_and_the_next_with_the_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, new = RunFolder(world.folder / "run"), X25519PrivateKey.generate()
    world.policy = policy_of(aggregator_keys=(public_text(KEY), public_text(new)))

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("ldpfl.flower.round_closing.close_round", killed)
        with pytest.raises(Killed):
            world.run(2, folder=folder)
    world.key = new
    with pytest.raises(ConfigError, match=r"changed: key.*LDPFL_AGGREGATOR_KEY_BEFORE"):
        go_on(world, folder, before=None)
    with pytest.raises(ConfigError, match="changed: key"):
        go_on(world, folder, before=X25519PrivateKey.generate())
    last = go_on(world, folder, before=KEY)
    assert [metrics.clients for metrics in last.history] == [CLIENTS, CLIENTS]
    assert world.charges() == [2] * CLIENTS
    world.policy = policy_of(aggregator_keys=(public_text(new),))
    last = go_on(world, folder, before=None, rounds=3)
    assert [metrics.clients for metrics in last.history] == [CLIENTS] * 3


def test_a_token_is_replaced_while_its_owner_uploads(world: World) -> None:
    """What was begun with one token goes on with the other: a run is its aggregator's, and an upload its client's, by name."""
    tokens = Tokens(world.store.engine)

    def renew(client: int) -> None:
        if client == 0:
            for name in ("client-0", "aggregator"):
                world.tokens[name] = tokens.renew(name)
                tokens.revoke(name, older=True)

    world.before_upload = renew
    folder = RunFolder(world.folder / "run")
    with pytest.raises(Exception, match="not known to this relay"):  # the aggregator's older one was revoked under it
        world.run(2, folder=folder)
    world.before_upload = lambda client: None
    last = world.run(2, folder=folder)
    assert [metrics.clients for metrics in last.history] == [CLIENTS, CLIENTS]
    assert world.charges() == [2] * CLIENTS
