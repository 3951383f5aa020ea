"""Rounds by a sum that no single server sees, in one process: what is learnt, what is refused, and what each end can do alone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flower_parts import config_of, start_arrays, start_vector
from numpy.typing import NDArray
from relayed_parts import CLIENTS, WatchedGrid, World, policy_of, signing_key, world_in

from ldpfl.deploy.stopped_runs import cancel_at_relay, read_left_open, status_at_relay
from ldpfl.errors import AllDeclined, ConfigError, ProtocolError, TooFewTakePart
from ldpfl.experiments import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.relay import RelayAggregator, SumTerms
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.server import Checkpoint
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, new_seed, seal_seed, shard, signer_of
from ldpfl.util.randomness import SeededStreams

SETTINGS = """
seed = 4
[clients]
count = 5
[training]
rounds = 2
[mechanism]
name = "dp-fedavg"
clip_norm = 0.5
noise_multiplier = 2.0
[ranges]
rule = "fixed"
[shuffling]
channel = "secure-sum"
"""
SIZES = (12, 3)
NODE = sys.modules["ldpfl.flower.operator_node"]  # the module: its function of the same name hides it

Sum = tuple[NDArray[Any], list[bytes]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_in(tmp_path) as made:
        made.policy = policy_of(mechanisms=("dp-fedavg",), transports=("sum",), sum_epsilon=900.0)
        yield made


def config_of_sum(*changes: str) -> RunConfig:
    from ldpfl.experiments.config import parse_config

    return parse_config(SETTINGS, changes, origin="test")


def run(world: World, rounds: int = 1, *, relay: RelayAggregator | None = None, folder: RunFolder | None = None) -> Checkpoint:
    strategy = LdpStrategy(config_of_sum(), collector=world.adding_up(relay), folder=folder)
    strategy.start(world.grid(), start_arrays(), rounds, timeout=100.0)
    return strategy.checkpoint


def expected(clients: list[int]) -> torch.Tensor:
    """The first round's model, from the points that each of ``clients`` makes of the same random bits."""
    ranges = LayerRanges(center=0.0, radius=0.5, sizes=SIZES)
    mechanism: Any = deployable_mechanism(config_of_sum(), ranges)
    updates = {client: torch.full((1, sum(SIZES)), 0.1 * (1 + client)) for client in clients}
    points = [mechanism.points(updates[client], ranges, SeededStreams.for_clients(4, 1, [client]))[0] for client in clients]
    mean: torch.Tensor = mechanism.aggregate([mechanism.reports_from_sum(np.sum(points, axis=0), len(points))], ranges)
    return start_vector() + mean


class Lying(RelayAggregator):
    """An aggregator's view of a relay that hands out something else than the sum that it took."""

    def __init__(self, honest: RelayAggregator, lie: Callable[[NDArray[Any], list[bytes]], Sum]) -> None:
        self.__dict__ |= honest.__dict__
        self._lie = lie

    def pull_sum(self, run: str, number: int, terms: SumTerms) -> Sum:
        return self._lie(*super().pull_sum(run, number, terms))


@pytest.mark.slow
def test_a_round_learns_the_sum_of_what_clients_send(world: World) -> None:
    last = run(world)
    torch.testing.assert_close(last.state.weights, expected([*range(CLIENTS)]), atol=1e-6, rtol=0)
    assert [(event.channel, event.cohort) for event in last.ledger.events] == [("secure-sum", CLIENTS)]
    assert last.history[-1].uplink_bytes_per_client == 4 * sum(SIZES) + ENVELOPE_BYTES
    assert world.charges() == [1] * CLIENTS


@pytest.mark.slow
def test_a_client_that_does_not_upload_takes_its_own_noise_along_and_nothing_else(world: World) -> None:
    def fail(client: int) -> None:
        if client in (0, 3):
            raise RuntimeError("power cut")

    world.before_upload = fail
    last = run(world)
    torch.testing.assert_close(last.state.weights, expected([1, 2, 4]), atol=1e-6, rtol=0)
    assert last.ledger.events[0].cohort == 3


@pytest.mark.slow
def test_replies_hold_nothing_of_a_report(world: World) -> None:
    grid = WatchedGrid(world)
    strategy = LdpStrategy(config_of_sum(), collector=world.adding_up())
    strategy.start(grid, start_arrays(), 1, timeout=100.0)
    assert all(set(reply.content.config_records["ldpfl"]) == {"version", "run", "round"} for reply in grid.replies)


# --- a relay that lies ------------------------------------------------------------------------------------------------


def invented(total: NDArray[Any], envelopes: list[bytes], *, world: World, signer: Ed25519PrivateKey) -> Sum:
    """Drop all uploads but the first one, and put two of the relay's own making beside it."""
    round_ = world.asked[0].terms
    binding = SumBinding(round_.run, 1, bytes.fromhex(world.asked[0].agreement), sum(SIZES), 32)
    own = [(seed := new_seed(), seal_seed(seed, world.key.public_key(), signer, binding)) for _ in range(2)]
    for seed, _ in own:
        total = total + np.frombuffer(shard(np.zeros(sum(SIZES), dtype=np.int64), seed, 32), dtype=total.dtype)
    return total, [envelopes[0], *(envelope for _, envelope in own)]


LIES: dict[str, tuple[Callable[[World], Callable[[NDArray[Any], list[bytes]], Sum]], str]] = {
    "drops all but two": (lambda world: lambda total, sent: (total, sent[:2]), "it adds up 2 reports, expected at least 3"),
    "repeats one": (lambda world: lambda total, sent: (total, [*sent, sent[0]]), "in the sum more than once"),
    "invents by a key of its own": (
        lambda world: partial(invented, world=world, signer=Ed25519PrivateKey.generate()),
        "not known: [0-9a-f]{16}, [0-9a-f]{16} ",
    ),
    "invents by the key of a node that it owns": (
        lambda world: partial(invented, world=world, signer=signing_key(4)),
        "in the sum more than once",
    ),
    "alters an envelope": (
        lambda world: lambda total, sent: (total, [*sent[1:], bytes([*sent[0][:-1], sent[0][-1] ^ 1])]),
        "not signed for this round by the node that is named",
    ),
}


@pytest.mark.slow
@pytest.mark.thorough_except("invents by a key of its own")
@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_about_who_is_in_a_sum_gets_none_opened(lie: str, world: World, tmp_path: Path) -> None:
    make, why = LIES[lie]
    folder = RunFolder(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(ProtocolError, match=f"round 1 is spent, but its reports cannot be read: the sum is not opened: .*{why}"):
            run(world, relay=Lying(world.aggregator(), make(world)), folder=folder)
    assert folder.checkpoint() is None
    assert [event.channel for event in folder.ledger().events] == ["secure-sum"]
    assert world.charges() == [1] * CLIENTS
    honest = run(world, folder=folder)  # no more than one of these is ever opened
    torch.testing.assert_close(honest.state.weights, expected([*range(CLIENTS)]), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_wrong_sum_is_wrong_by_what_the_relay_chose_and_by_nothing_else(world: World) -> None:
    """Nobody notices; nothing is revealed: what is published moves by what the relay has added."""
    added = 1 << 20
    last = run(world, relay=Lying(world.aggregator(), lambda total, sent: (total + total.dtype.type(added), sent)))
    mechanism: Any = deployable_mechanism(config_of_sum(), LayerRanges(center=0.0, radius=0.5, sizes=SIZES))
    moved = last.state.weights - expected([*range(CLIENTS)])
    torch.testing.assert_close(moved, torch.full_like(moved, added * 0.5 / mechanism.steps / CLIENTS), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sum_that_is_longer_than_honest_clients_make_it_is_refused(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """As one client's uniform numbers make it. The round is charged, the model stays, and the next round is as any other."""
    junk = np.random.default_rng(1).integers(0, 2**32, sum(SIZES), dtype=np.uint32)
    lies = iter([junk, np.zeros_like(junk)])
    with caplog.at_level(logging.WARNING, "flwr.ldpfl"):
        last = run(world, 2, relay=Lying(world.aggregator(), lambda total, sent: (total + next(lies), sent)))
    assert any("the sum over 5 clients is a vector of length" in record.getMessage() for record in caplog.records)
    assert [metrics.clients for metrics in last.history] == [0, CLIENTS]
    assert len(last.ledger.events) == 2
    assert world.charges() == [2] * CLIENTS
    assert last.state.weights.isfinite().all()
    assert float((last.state.weights - start_vector()).norm()) < 10


@pytest.mark.slow
def test_nodes_that_the_relay_tells_of_another_agreement_decline(world: World) -> None:
    aggregator = world.aggregator()
    opened = aggregator.open_round

    def open_and_lie(run: str, number: int, terms: Any) -> Any:
        status = opened(run, number, terms)
        world.wire.falsely = {"terms": {**terms.model_dump(), "agreement": "0" * 64}}
        return status

    aggregator.open_round = open_and_lie  # type: ignore[method-assign]
    with pytest.raises(AllDeclined):
        run(world, relay=aggregator)
    assert world.charges() == [0] * CLIENTS


# --- clients that are not relied on -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_the_ledger_leaves_out_clients_that_may_collude(world: World) -> None:
    strategy = LdpStrategy(config_of_sum("shuffling.colluding=2"), collector=world.adding_up())
    strategy.start(world.grid(), start_arrays(), 2, timeout=100.0)
    events = strategy.checkpoint.ledger.events
    assert [(event.cohort, event.colluding) for event in events] == [(CLIENTS, 2)] * 2


@pytest.mark.slow
def test_more_nodes_than_a_sum_was_made_for_are_not_asked(world: World) -> None:
    """Their sum could leave 32 bits; a node that is asked all the same declines."""
    strategy = LdpStrategy(config_of_sum("clients.count=4"), collector=world.adding_up())
    with pytest.raises(ConfigError, match="5 nodes are asked, but the sum is planned for at most 4"):
        strategy.start(world.grid(), start_arrays(), 1, timeout=100.0)
    assert sum(world.charges()) == 0


# --- nodes that cannot, and a server that asks for what does not fit --------------------------------------------------


@pytest.mark.slow
def test_nodes_without_a_signing_key_decline_when_they_are_asked(world: World) -> None:
    world.signing = {}
    with pytest.raises(AllDeclined, match="this node has no signing key"):
        LdpStrategy(config_of_sum(), collector=_of_others(world)).start(world.grid(), start_arrays(), 1, timeout=100.0)
    assert world.charges() == [0] * CLIENTS


def _of_others(world: World) -> Any:
    world.signing = {client: signing_key(client) for client in range(CLIENTS)}
    collector = world.adding_up()
    world.signing = {}
    return collector


@pytest.mark.slow
def test_a_node_that_the_aggregator_does_not_know_stops_the_run_and_is_named(world: World) -> None:
    world.strangers = (2,)
    name = signer_of(signing_key(2).public_key()).hex()
    with pytest.raises(
        ProtocolError, match=f"round 1 is spent, but its reports cannot be read: .* not known: {name} .add their lines to LDPFL_NODE_KEYS"
    ):
        run(world, 2)
    assert world.charges() == [1] * CLIENTS


def test_keys_of_too_few_nodes_are_noticed_before_any_charge(world: World) -> None:
    world.strangers = tuple(range(1, CLIENTS))
    with pytest.raises(ConfigError, match=rf"LDPFL_NODE_KEYS names 1 node, but a sum needs {world.min_clients} \(ldpfl.min-clients\): add"):
        run(world, 2)
    assert world.charges() == []


class Watched(RelayAggregator):
    """Keeps what the relay has handed out."""

    def __init__(self, honest: RelayAggregator) -> None:
        self.__dict__ |= honest.__dict__
        self.pulled: list[tuple[bytes, tuple[bytes, ...]]] = []

    def pull_sum(self, run: str, number: int, terms: SumTerms) -> Sum:
        total, envelopes = super().pull_sum(run, number, terms)
        self.pulled.append((total.tobytes(), tuple(envelopes)))
        return total, envelopes


@pytest.mark.slow
@pytest.mark.thorough
def test_an_aggregator_that_lacked_a_key_opens_the_same_sum_later(world: World, tmp_path: Path) -> None:
    folder, relay = RunFolder(tmp_path / "run"), Watched(world.aggregator())
    world.strangers = (2,)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"not known: .* The relay still has the reports. To read them again, resume the run"):
            run(world, 2, relay=relay, folder=folder)
        assert [event.cohort for event in folder.ledger().events] == [3]  # as long as it is not opened: the fewest that it is over
    world.strangers = ()
    first = run(world, 1, relay=relay, folder=folder)
    torch.testing.assert_close(first.state.weights, expected([*range(CLIENTS)]), atol=1e-6, rtol=0)
    assert len(relay.pulled) == 3
    assert len(set(relay.pulled)) == 1
    assert world.store.status("aggregator", world.asked[0].terms.run, 1).state == "gone"
    last = run(world, 2, relay=relay, folder=folder)
    assert [event.cohort for event in last.ledger.events] == [CLIENTS] * 2
    assert world.charges() == [2] * CLIENTS


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_whose_seed_does_not_open_is_named_and_the_round_can_be_given_up(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has signed that itself, so its operator can revoke its token; the others' round is lost."""
    folder, stranger = RunFolder(tmp_path / "run"), X25519PrivateKey.generate().public_key()
    bad = signing_key(3)

    def sealed(seed: bytes, aggregator: Any, node: Ed25519PrivateKey, binding: SumBinding) -> bytes:
        return seal_seed(seed, stranger if node is world.signing[3] else aggregator, node, binding)

    with monkeypatch.context() as patched:
        patched.setattr(NODE, "seal_seed", sealed)
        with pytest.raises(
            ProtocolError, match=f"not sealed to this key for this round: {signer_of(bad.public_key()).hex()} .these nodes signed"
        ):
            run(world, 2, folder=folder)
    relay = world.aggregator()
    assert status_at_relay(relay, read_left_open(folder)) is not None
    assert "are lost, and stay charged" in " ".join(cancel_at_relay(relay, read_left_open(folder)))
    Tokens(world.store.engine).revoke("client-3")
    last = run(world, 1, folder=folder)
    assert torch.equal(last.state.weights, start_vector())
    assert [event.cohort for event in last.ledger.events] == [3]


@pytest.mark.slow
def test_a_node_whose_token_is_for_another_key_declines_before_anything_is_charged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Also one whose token has no key; the relay would refuse what they send, after their charge."""
    known, own = Tokens(world.store.engine), signer_of(signing_key(1).public_key()).hex()
    world.tokens["client-0"] = known.renew("client-0", Ed25519PrivateKey.generate().public_key())
    known.revoke("client-1")
    world.tokens["client-1"] = known.add("client-1", Role.CLIENT)
    with caplog.at_level(logging.WARNING, "flwr.ldpfl"):
        last = run(world)
    torch.testing.assert_close(last.state.weights, expected([2, 3, 4]), atol=1e-6, rtol=0)
    assert sum(world.charges()) == 3
    said = [record.getMessage() for record in caplog.records]
    assert any(f"is for no signing key, but the node signs with {own}: send the line" in line for line in said)
    assert any("2 said 'declined: its token at the relay is for another signing key'" in line for line in said)


@pytest.mark.slow
def test_a_client_that_writes_another_nodes_name_on_its_envelope_is_in_no_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay refuses it, and the sum of the others is opened."""

    def forged(seed: bytes, aggregator: Any, node: Ed25519PrivateKey, binding: SumBinding) -> bytes:
        made = seal_seed(seed, aggregator, node, binding)
        return made if node is not world.signing[3] else signer_of(signing_key(0).public_key()) + made[8:]

    monkeypatch.setattr(NODE, "seal_seed", forged)
    last = run(world)
    torch.testing.assert_close(last.state.weights, expected([0, 1, 2, 4]), atol=1e-6, rtol=0)
    assert ("PUT", 403) in world.wire.replies
    assert last.ledger.events[0].cohort == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"transports": ("relay",)}, "transport 'sum' is not among the policy's transports"),
        ({"sum_epsilon": 0.5}, "in sums, above the policy's sum_epsilon = 0.5"),
        ({"min_clients": 4}, "below min_clients = 4"),
        ({"aggregator_keys": ()}, "aggregator_keys"),
        ({"longest_upload_s": 10.0}, "longest_upload_s"),
    ],
)
def test_what_a_policy_does_not_allow_is_declined(policy: dict[str, Any], why: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.policy = world.policy.model_copy(update=policy)
    with caplog.at_level(logging.WARNING, "flwr.ldpfl"), pytest.raises(AllDeclined):
        run(world)
    assert any(why in record.getMessage() for record in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["duchi", "full-dp"])
def test_what_cannot_be_added_up_is_no_sum(name: str, world: World) -> None:
    with pytest.raises(ConfigError, match=f"mechanism '{name}' has reports that cannot be added up"):
        LdpStrategy(config_of(f"mechanism.name={name}", "ranges.rule=fixed"), collector=world.adding_up()).start(
            world.grid(), start_arrays(), 1, timeout=100.0
        )
    assert world.charges() == []


@pytest.mark.slow
def test_a_server_that_asks_for_points_without_a_sum_is_refused_before_anything_is_charged(world: World) -> None:
    """What is made for a sum has a share of its noise only; and what is made for the relay is not masked."""
    for collector, channel in ((world.collector(), "secure-sum"), (world.adding_up(), "ideal-shuffler")):
        object.__setattr__(collector, "channel", channel)
        with pytest.raises(TooFewTakePart, match="5 said 'failed'"):
            LdpStrategy(config_of_sum(), collector=collector).start(world.grid(), start_arrays(), 1, timeout=100.0)
    assert sum(world.charges()) == 0


# --- a server that is stopped -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_was_stopped_after_the_uploads_goes_on_with_the_sum(world: World, tmp_path: Path) -> None:
    class Stopped(RelayAggregator):
        def pull_sum(self, run: str, number: int, terms: SumTerms) -> Sum:
            raise KeyboardInterrupt

    stopped, folder = Stopped.__new__(Stopped), RunFolder(tmp_path / "run")
    stopped.__dict__ |= world.aggregator().__dict__
    with pytest.raises(KeyboardInterrupt):
        run(world, relay=stopped, folder=folder)
    last = run(world, folder=folder)
    torch.testing.assert_close(last.state.weights, expected([*range(CLIENTS)]), atol=1e-6, rtol=0)
    assert world.charges() == [1] * CLIENTS
    assert [event.cohort for event in last.ledger.events] == [CLIENTS]
