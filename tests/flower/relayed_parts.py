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
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flower_parts import config_of, shift, start_arrays
from flwr.app import Context, Message
from sqlalchemy import event

from ldpfl.experiments import RunConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, LdpStrategy, OperatorNode, RelayCollector
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.policy import Policy
from ldpfl.randomness import SeededStreams
from ldpfl.relay import Patience, RelayAggregator, RelayClient
from ldpfl.relay.app import create_app
from ldpfl.relay.database import open_engine
from ldpfl.relay.store import Store
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.server import Checkpoint

CLIENTS = 5
KEY = X25519PrivateKey.generate()


class InProcess(httpx.BaseTransport):
    """Carries requests to an application in this process."""

    def __init__(self, store: Store) -> None:
        self._app = create_app(store)
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
        if self.falsely and request.method == "GET" and "records" not in request.url.path:
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
    before_upload: Callable[[int], None] = lambda client: None
    asked: list[Ask] = field(default_factory=list)

    def node(self, context: Context) -> OperatorNode:
        client = int(context.node_config["partition-id"])
        path = self.folder / f"budget-{client}.sqlite"
        if not path.exists():
            set_limit(path, 1000.0)

        def connect() -> RelayClient:
            return RelayClient("http://127.0.0.1", self.tokens[f"client-{client}"], transport=self.wire, patience=Patience(2, 0.0, 0.0))

        before_upload = self.before_upload

        class Watched(OperatorNode):
            def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
                before_upload(client)
                super().upload(ask, sealed, within_s)

        return Watched(self.policy, Budget(path, self.policy), connect)

    def source(self, ask: Ask, context: Context) -> SeededStreams:
        self.asked.append(ask)
        return SeededStreams.for_clients(4, ask.terms.round, [int(context.node_config["partition-id"])])

    def sleep(self, seconds: float) -> None:
        self.now[0] += seconds

    def collector(self) -> RelayCollector:
        relay = RelayAggregator(
            "http://127.0.0.1",
            self.tokens["aggregator"],
            transport=self.wire,
            patience=Patience(2, 1.0, 1.0),
            sleep=self.sleep,
            clock=lambda: self.now[0],
        )
        return RelayCollector(relay, self.key, self.linked, self.min_clients, 60.0)

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
    tokens = {f"client-{client}": known.add(f"client-{client}", Role.CLIENT) for client in range(CLIENTS)}
    tokens["aggregator"] = known.add("aggregator", Role.AGGREGATOR)
    with mock.patch("ldpfl.relay.app.to_thread", _SameThread):
        yield World(tmp_path, store, InProcess(store), tokens, now, policy_of())
    store.close()
