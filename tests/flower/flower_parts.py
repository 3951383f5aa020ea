"""A small model, apps and nodes that the tests of ``ldpfl.flower`` share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

# Flower reads these when it is first imported.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from ldpfl.errors import Declined
from ldpfl.experiments import RunConfig
from ldpfl.experiments.config import parse_config
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, RoundTerms
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.internals import local_run
from ldpfl.privacy import Ledger
from ldpfl.util.randomness import SeededStreams

local_run()  # from here on, messages can be made

SETTINGS = """
seed = 4
[training]
rounds = 2
[mechanism]
name = "duchi"
epsilon = 2.0
perturbed = "update"
[ranges]
radius = 0.5
"""

START = {"weight": torch.linspace(-1, 1, 12).reshape(3, 4), "bias": torch.tensor([0.25, -0.25, 0.5])}
SECRET = 0.123456789
EXAMPLES = 7_654_321
"""Part of what the clients of these tests must not give away."""


def config_of(*overrides: str) -> RunConfig:
    return parse_config(SETTINGS, overrides, origin="test")


def start_arrays() -> ArrayRecord:
    return ArrayRecord({name: Array(value.numpy()) for name, value in START.items()})


def start_vector() -> Tensor:
    return to_vector(start_arrays(), layout_of(start_arrays()))


@dataclass
class OpenNode:
    """A node that allows everything, or refuses at a step, and notes what it was asked; in ``questions`` among how many clients."""

    refuse: str = ""
    error: Exception = field(default_factory=lambda: Declined("private reason"))
    steps: list[str] = field(default_factory=list)
    questions: list[int] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)

    def keeps_state(self, ask: Ask) -> bool:
        return True

    def would_admit(self, ask: Ask) -> None:
        if self.refuse == "question":
            raise self.error
        self.questions.append(ask.terms.cohort)

    def admit(self, ask: Ask) -> float:
        self._step("admit")
        return inf

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        self._step("seal")
        return payload[::-1]

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        self._step("upload")
        self.uploads.append(sealed)

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.refuse == name:
            raise self.error


def simulator_bits(ask: Ask, context: Context) -> SeededStreams:
    """The random bits that the simulator gives to a client."""
    return SeededStreams.for_clients(4, ask.terms.round, [int(context.node_config["partition-id"])])


def shift(message: Message, context: Context) -> Message:
    """Train by adding a number of the client's own; report metrics that must not leave."""
    arrays = message.content.array_records["arrays"]
    layout = layout_of(arrays)
    trained = to_vector(arrays, layout) + 0.1 * (1 + int(context.node_config["partition-id"]))
    metrics = MetricRecord({"num-examples": EXAMPLES, "loss": SECRET})
    return Message(RecordDict({"arrays": to_arrays(trained, layout), "metrics": metrics}), reply_to=message)


def in_parallel(message: Message, context: Context) -> Message:
    """Train to all weights 1, by an operation that PyTorch shares out over its threads."""
    arrays = message.content.array_records["arrays"]
    layout = layout_of(arrays)
    return Message(RecordDict({"arrays": to_arrays(torch.exp(torch.zeros(layout.dimension)), layout)}), reply_to=message)


Train = Callable[[Message, Context], Message]


def app_of(train: Train = shift, node: OpenNode | None = None) -> LdpClientApp:
    """A private app that trains by ``train``, with the simulator's random bits; what it evaluates has no noise."""
    app, used = ClientApp(), node or OpenNode()
    app.train()(train)
    app.evaluate()(train)
    app.query()(train)
    return LdpClientApp(app, node=lambda context: used, source=simulator_bits)


def terms_of(**changes: object) -> RoundTerms:
    values: dict[str, object] = {
        "run": "run",
        "round": 1,
        "size": 15,
        "config": config_of(),
        "layers": tuple(START),
        "center": (0.0, 0.0),
        "radius": (0.5, 0.5),
        "asked": 3,
        "min_clients": 3,
    }
    return RoundTerms(**{**values, **changes})  # type: ignore[arg-type]


def instruction(terms: RoundTerms | None = None, arrays: ArrayRecord | None = None, message_type: str = MessageType.TRAIN) -> Message:
    """What the server sends to the node of partition 0."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "arrays": arrays or start_arrays(),
        "config": ConfigRecord(),
        "ldpfl": (terms or terms_of()).to_record(),
    }
    return Message(RecordDict(records), 2, message_type, group_id="1")


def ask(app: ClientApp, message: Message | None = None, node_config: dict[str, str] | None = None) -> Message:
    """Send one message to the first of three clients, and return the reply."""
    grid = InProcessGrid(app, 3, node_config=node_config)  # before the message: it makes this process a server
    (reply,) = grid.send_and_receive([message or instruction()])
    return reply


def ledger_rounds(path: Path) -> list[int]:
    """Rounds that a ledger file has charged."""
    return [event.round for event in Ledger.load(path).events]


POLICY = {
    "mechanisms": '["duchi"]',
    "epsilon_per_unit": "2.0",
    "epsilon_per_round": "30.0",
    "lifetime_epsilon": "100.0",
    "delta": "0.0",
    "rounds": "10",
    "min_clients": "3",
    "transports": '["direct"]',
    "immediate_replies": "true",
}
"""A policy that allows the tests' rounds, as lines of its file."""
