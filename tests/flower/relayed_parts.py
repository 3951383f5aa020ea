"""A relay, clients and an aggregator in one process, for the tests of rounds over it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flower_parts import config_of, shift, start_arrays
from flwr.app import Context, Message
from sqlalchemy import event

from ldpfl.errors import NoSigningKey
from ldpfl.experiments import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, LdpStrategy, OperatorNode, RelayCollector
from ldpfl.flower.relay_collection import SumCollector
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.policy import Policy
from ldpfl.relay import Patience, RelayAggregator, RelayClient
from ldpfl.relay.app import create_app
from ldpfl.relay.database import open_engine
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.relay.usage_limits import Limits
from ldpfl.server import Checkpoint
from ldpfl.transport.sums import signer_of
from ldpfl.util.randomness import SeededStreams

CLIENTS = 5


def signing_key(client: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([client + 1]) * 32)


KEY = X25519PrivateKey.generate()


class WatchedGrid(InProcessGrid):
    """Keeps all replies that came."""

    def __init__(self, world: World) -> None:
        super().__init__(LdpClientApp(shift, node=world.node, source=world.source), CLIENTS)
        self.replies: list[Message] = []

    def send_and_receive(self, messages, *, timeout=None):  # type: ignore[no-untyped-def]
        for reply in super().send_and_receive(messages, timeout=timeout):
            self.replies.append(reply)
            yield reply


class InProcess(httpx.BaseTransport):
    """Carries requests to an application in this process."""

    def __init__(self, store: Store) -> None:
        self._app = create_app(store, Limits(burst=1e6))  # a whole run is over in a second here
        self.replies: list[tuple[str, int]] = []
        self.falsely: dict[str, Any] = {}
        """What it says of a round in place of what is so."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def send() -> httpx.Response:
            own = httpx.Request(request.method, request.url, headers=request.headers, stream=httpx.ByteStream(request.read()))
            response = await httpx.ASGITransport(self._app).handle_async_request(own)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        response = asyncio.run(send())
        self.replies.append((request.method, response.status_code))
        if self.falsely and request.method == "GET" and request.url.path.startswith("/v1/rounds/") and "records" not in request.url.path:
            return httpx.Response(response.status_code, json=response.json() | self.falsely)
        return response


@dataclass
class World:
    """A relay with a clock to turn, five clients with budgets of their own, and an aggregator."""

    folder: Path
    store: Store
    wire: InProcess
    tokens: dict[str, str]
    now: list[float]
    policy: Policy
    key: X25519PrivateKey = KEY
    linked: int = 1
    min_clients: int = 3
    budget: float = 1000.0
    signing: dict[int, Ed25519PrivateKey] = field(default_factory=lambda: {client: signing_key(client) for client in range(CLIENTS)})
    strangers: tuple[int, ...] = ()
    """Clients whose signing keys the aggregator does not know."""
    before_upload: Callable[[int], None] = lambda client: None
    asked: list[Ask] = field(default_factory=list)

    def node(self, context: Context) -> OperatorNode:
        client = int(context.node_config["partition-id"])
        path = self.folder / f"budget-{client}.sqlite"
        if not path.exists():
            set_limit(path, self.budget)

        def connect() -> RelayClient:
            return RelayClient("http://127.0.0.1", self.tokens[f"client-{client}"], transport=self.wire, patience=Patience(2, 0.0, 0.0))

        before_upload = self.before_upload

        class Watched(OperatorNode):
            def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
                before_upload(client)
                super().upload(ask, sealed, within_s)

        def signing() -> Ed25519PrivateKey:
            if client not in self.signing:
                raise NoSigningKey("there is none")
            return self.signing[client]

        return Watched(self.policy, Budget(path, self.policy, str(client)), connect, signing)

    def source(self, ask: Ask, context: Context) -> SeededStreams:
        self.asked.append(ask)
        return SeededStreams.for_clients(4, ask.terms.round, [int(context.node_config["partition-id"])])

    def sleep(self, seconds: float) -> None:
        self.now[0] += seconds

    def aggregator(self) -> RelayAggregator:
        return RelayAggregator(
            "http://127.0.0.1",
            self.tokens["aggregator"],
            transport=self.wire,
            patience=Patience(2, 1.0, 1.0),
            sleep=self.sleep,
            clock=lambda: self.now[0],
        )

    def adding_up(self, relay: RelayAggregator | None = None) -> SumCollector:
        publics = [key.public_key() for client, key in self.signing.items() if client not in self.strangers]
        nodes = {signer_of(public): public for public in publics}
        return SumCollector(relay=relay or self.aggregator(), key=self.key, nodes=nodes, min_clients=self.min_clients, window_s=60.0)

    def collector(self) -> RelayCollector:
        relay = self.aggregator()
        return RelayCollector(relay=relay, key=self.key, linked=self.linked, min_clients=self.min_clients, window_s=60.0)

    def grid(self, train: Callable[[Message, Context], Message] = shift) -> InProcessGrid:
        return InProcessGrid(LdpClientApp(train, node=self.node, source=self.source), CLIENTS)

    def run(self, rounds: int = 1, *, config: RunConfig | None = None, folder: RunFolder | None = None) -> Checkpoint:
        strategy = LdpStrategy(config or config_of(), collector=self.collector(), folder=folder)
        strategy.start(self.grid(), start_arrays(), rounds, timeout=100.0)
        return strategy.checkpoint

    def charges(self) -> list[int]:
        return [len(read_charges(path)) for path in sorted(self.folder.glob("budget-*.sqlite"))]


def policy_of(**changes: object) -> Policy:
    settings: dict[str, object] = {
        "mechanisms": ("duchi", "harmony", "full-dp", "laplace"),
        "epsilon_per_unit": 30.0,
        "epsilon_per_round": 100.0,
        "lifetime_epsilon": 1000.0,
        "delta": 1e-5,
        "rounds": 10,
        "min_clients": 3,
        "transports": ("relay",),
        "aggregator_keys": (base64.b64encode(KEY.public_key().public_bytes_raw()).decode(),),
        "linked": 4,
        "immediate_replies": True,
    }
    return Policy.model_validate({**settings, **changes})


class _SameThread:
    """Calls the store where its application runs: one request comes after another here, and handing each to a thread takes most of it."""

    @staticmethod
    async def run_sync(function: Callable[[], Any]) -> Any:
        return function()


@contextmanager
def world_in(tmp_path: Path) -> Iterator[World]:
    """Yield a relay, five clients and an aggregator, whose files are in ``tmp_path``."""
    now = [1_000_000.0]
    engine = open_engine(str(tmp_path / "relay.db"))
    event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))  # no power cut is tested here
    engine.dispose()
    store = Store(engine, clock=lambda: now[0])
    known = Tokens(store.engine)
    tokens = {f"client-{client}": known.add(f"client-{client}", Role.CLIENT, signing_key(client).public_key()) for client in range(CLIENTS)}
    tokens["aggregator"] = known.add("aggregator", Role.AGGREGATOR)
    with mock.patch("ldpfl.relay.app.to_thread", _SameThread):
        yield World(tmp_path, store, InProcess(store), tokens, now, policy_of())
    store.close()
