"""What the fault tests share: a relay process that comes back when it dies, nodes and an aggregator that call it, a reference."""

from __future__ import annotations

import json
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path += [str(Path(__file__).parents[1] / room) for room in ("flower", "relay")]

import httpx
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from flower_parts import config_of, shift, start_arrays, start_vector
from flwr.app import Context
from numpy.typing import NDArray
from relay_support import process, serve_to
from torch import Tensor

from ldpfl import LayerRanges
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, LdpStrategy, OperatorNode, RelayCollector
from ldpfl.mechanisms import create
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.policy import Policy
from ldpfl.relay import Patience, RelayAggregator, RelayClient
from ldpfl.relay.database import open_engine
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.relay.usage_limits import ConnectionLimits
from ldpfl.server import Checkpoint
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import Binding, generate_key, load_key, public_text, seal
from ldpfl.util.key_files import save_key
from ldpfl.util.randomness import SeededStreams

SEED, EPSILON, RADIUS = 4, 2.0, 0.5
CONFIG = config_of(f"seed={SEED}", f"mechanism.epsilon={EPSILON}", f"ranges.radius={RADIUS}", "ranges.rule=fixed")
WEIGHTS = start_vector().numel()

BORNE = Patience(tries=300, first_s=0.02, longest_s=0.2, timeout_s=60.0)
"""Outlasts the restart of a relay, on a busy machine too."""

_STORE, _KEY = "relay.db", "aggregator.pem"
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # so that no list of authorities is read for each of many clients


class Relay:
    """A relay process on a port of the system's choice, started again there whenever it dies, as a service manager does.

    Process number i kills itself, as ``kill -9`` does, when it draws random bits for the ``dies[i]``-th time; 0 is never.
    """

    def __init__(self, folder: Path, dies: Sequence[int] = ()) -> None:
        self.store, self._log, self._dies = str(folder / _STORE), folder / "relay.log", list(dies)
        self._log.touch()
        self.port, self.starts = 0, 0
        self._running: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_up)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def kill(self) -> None:
        """Kill the process, and return when the next one listens."""
        starts = self.starts
        self._running.kill()
        self.wait_for(starts + 1)

    def wait_for(self, starts: int) -> None:
        deadline = time.monotonic() + 60
        while self.starts < starts:
            assert time.monotonic() < deadline
            assert self._thread.is_alive()
            time.sleep(0.01)

    def _keep_up(self) -> None:
        while not self._ended.is_set():
            dies = self._dies.pop(0) if self._dies else 0
            with process(serve_to, self._log, self.store, self.port, None, ConnectionLimits(), None, dies) as self._running:
                while len(lines := self._listening()) <= self.starts and self._running.is_alive():
                    time.sleep(0.01)
                if len(lines) > self.starts:
                    self.port, self.starts = json.loads(lines[-1])["port"], len(lines)
                while self._running.is_alive() and not self._ended.wait(0.01):
                    pass

    def _listening(self) -> list[str]:
        return [line for line in self._log.read_text().splitlines(keepends=True) if '"listening"' in line and line.endswith("\n")]


def plain() -> httpx.HTTPTransport:
    """Real sockets, without TLS."""
    return httpx.HTTPTransport(verify=_NO_TLS)


class Halfway(httpx.BaseTransport):
    """Real sockets; after half of the first upload's bytes ``then`` is called, and the connection breaks."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._inner, self._then = plain(), then
        self._broken = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "PATCH" or self._broken:
            return self._inner.handle_request(request)
        self._broken = True
        body = request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        half = httpx.Request("PATCH", request.url, headers=headers, content=body[: len(body) // 2])
        assert self._inner.handle_request(half).status_code == 204
        self._then()
        raise httpx.ReadError("broken off")

    def close(self) -> None:
        self._inner.close()


@dataclass
class World:
    """Clients with a token and a budget each, and an aggregator, in this process; what lasts is in ``folder``.

    Attributes:
        nodes: what some clients' nodes are instead, by client.
        transports: how some clients' requests travel instead.
        min_clients, window_s: what the relay waits for; with 0 seconds it releases the round as soon as so many are complete.
    """

    folder: Path
    url: str
    tokens: Mapping[str, str]
    clients: int
    min_clients: int
    window_s: float = 0.0
    nodes: dict[int, type[OperatorNode]] = field(default_factory=dict)
    transports: dict[int, Callable[[], httpx.BaseTransport]] = field(default_factory=dict)

    @classmethod
    def new(cls, folder: Path, relay: Relay, clients: int = 5, min_clients: int | None = None) -> World:
        """Return a world of its own budgets, tokens and key; the relay may have those of others."""
        save_key(generate_key(), folder / _KEY)
        engine = open_engine(relay.store)
        known = Tokens(engine)
        tokens = {_name(client): known.add(f"{folder.name}-{_name(client)}", Role.CLIENT) for client in range(clients)}
        tokens["aggregator"] = known.add(f"{folder.name}-aggregator", Role.AGGREGATOR)
        engine.dispose()
        for client in range(clients):
            set_limit(_budget(folder, client), 1000.0, 0.0)
        return cls(folder, relay.url, tokens, clients, min_clients or clients)

    @property
    def policy(self) -> Policy:
        return Policy(
            mechanisms=("duchi",),
            epsilon_per_unit=EPSILON,
            epsilon_per_round=EPSILON * WEIGHTS,
            lifetime_epsilon=1000.0,
            delta=0.0,
            rounds=10,
            min_clients=3,
            immediate_replies=True,
            aggregator_keys=(public_text(load_key(self.folder / _KEY)),),
        )

    def aggregator(self) -> RelayAggregator:
        return RelayAggregator(self.url, self.tokens["aggregator"], transport=plain(), patience=BORNE)

    def collector(self) -> RelayCollector:
        return RelayCollector(
            relay=self.aggregator(), key=load_key(self.folder / _KEY), min_clients=self.min_clients, window_s=self.window_s
        )

    def client(self, number: int) -> RelayClient:
        transport = self.transports.get(number, plain)()
        return RelayClient(self.url, self.tokens[_name(number)], transport=transport, patience=BORNE)

    def node(self, context: Context) -> OperatorNode:
        client = int(context.node_config["partition-id"])
        kind = self.nodes.get(client, OperatorNode)
        return kind(self.policy, Budget(_budget(self.folder, client), self.policy), lambda: self.client(client))

    def grid(self) -> InProcessGrid:
        def bits(ask: Ask, context: Context) -> SeededStreams:
            return _bits(ask.terms.round, [int(context.node_config["partition-id"])])

        return InProcessGrid(LdpClientApp(shift, node=self.node, source=bits), self.clients)

    def run(self, rounds: int = 1, folder: RunFolder | None = None) -> Checkpoint:
        """Run a strategy, as a ServerApp does; with ``folder`` it goes on where it stopped."""
        collector = self.collector()
        with collector.relay:
            strategy = LdpStrategy(CONFIG, collector=collector, folder=folder)
            strategy.start(self.grid(), start_arrays(), rounds, timeout=60.0)
        return strategy.checkpoint

    def charges(self) -> list[int]:
        """How many reports each client's own budget has counted."""
        return [len(read_charges(_budget(self.folder, client))) for client in range(self.clients)]


def _name(client: int) -> str:
    return f"client-{client}"


def _budget(folder: Path, client: int) -> Path:
    return folder / f"budget-{client}.sqlite"


def _bits(number: int, clients: Sequence[int]) -> SeededStreams:
    return SeededStreams.for_clients(SEED, number, clients)


def everyone(clients: int, *, but: Sequence[int] = ()) -> NDArray[np.bool_]:
    """Return that all reports of all clients ``but`` some arrived, (clients, weights)."""
    arrived = np.ones((clients, WEIGHTS), dtype=np.bool_)
    arrived[list(but)] = False
    return arrived


def estimates(weights: Tensor, number: int, clients: int) -> Tensor:
    """Return what each client's report of round ``number`` says by itself of its update since ``weights``, (clients, weights)."""
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(RADIUS), (WEIGHTS,))
    mechanism = create("duchi", epsilon=EPSILON)
    trained = torch.stack([weights + 0.1 * (1 + client) for client in range(clients)])
    return mechanism.decode(mechanism.encode(trained - weights, ranges, _bits(number, range(clients))), ranges)


def expected(*arrived: NDArray[np.bool_]) -> Tensor:
    """Return the weights after as many rounds, in which the reports that ``arrived``, (clients, weights), are averaged by weight.

    Straight from the formula: each client's estimate by itself, added up and divided by how many there are; where there is none, the
    weight stays.
    """
    weights = start_vector()
    for number, reported in enumerate(map(torch.from_numpy, arrived), start=1):
        weights = weights + (estimates(weights, number, len(reported)) * reported).sum(dim=0) / reported.sum(dim=0).clamp(min=1)
    return weights


def records_of(ask: Ask, payload: bytes) -> NDArray[np.uint8]:
    """Return a payload's records in the order of their ids, which their first four bytes are."""
    return RecordPlan(ask.mechanism, ask.ranges, ask.terms.linked).split(payload)


def sealed(ask: Ask, records: NDArray[np.uint8], key: bytes | None = None) -> bytes:
    """Seal records to the aggregator of the round, or to another ``key``."""
    plan = RecordPlan(ask.mechanism, ask.ranges, ask.terms.linked)
    public = X25519PublicKey.from_public_bytes(ask.terms.key if key is None else key)
    return seal(records, public, Binding(ask.terms.run, ask.terms.round, plan.fingerprint))
