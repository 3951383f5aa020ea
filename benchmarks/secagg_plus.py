"""Flower's SecAgg+ as the sum that hides its terms: whether sums of noisy integers come out exactly, what it costs, and what else is seen.

    python benchmarks/secagg_plus.py --nodes 8 --weights 2000

Each node reports lattice points (clipped sums with rounded Gaussian noise, as ``dp-sgd`` makes them, of a lattice that SecAgg+ can
carry). Everything runs in one process, through Flower's own workflow and mod; nothing here is part of the package.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow

from ldpfl.flower import InProcessGrid
from ldpfl.flower.internals import records_to_bytes

LARGEST = 1 << 21
"""Of a node's lattice points on either side of 0: 22 bits, which leave 32 - 22 bits for 1,024 nodes."""


@dataclass
class Seen:
    """What passes the server, message by message."""

    sent: int = 0
    received: int = 0
    replies: list[RecordDict] = field(default_factory=list)


class CountingGrid(InProcessGrid):
    """Counts bytes of arrays and configs; messages of nodes in ``silent`` are lost once masked vectors are asked for."""

    def __init__(self, *args: Any, silent: Iterable[int] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen, self.silent, self.stage = Seen(), set(silent), 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        own = list(messages)
        self.stage += 1
        if self.stage >= 3:
            own = [message for message in own if message.metadata.dst_node_id not in self.silent]
        for message in own:
            message.content = deepcopy(message.content)  # the mod takes things out of what all nodes share in one process
        self.seen.sent += sum(size_of(message.content) for message in own)
        replies = list(super().send_and_receive(own, timeout=timeout))
        self.seen.received += sum(size_of(reply.content) for reply in replies if reply.has_content())
        self.seen.replies += [reply.content for reply in replies if reply.has_content()]
        return iter(replies)


def size_of(content: RecordDict) -> int:
    return len(records_to_bytes(content))


@dataclass
class Proxy:
    """All of a client that the workflow looks at."""

    node_id: int


class Everyone(FedAvg):
    """Asks every node, and keeps the aggregate as it comes."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__()
        self.nodes, self.aggregate = nodes, np.zeros(0)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return [(Proxy(node), FitIns(parameters, {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.aggregate = parameters_to_ndarrays(results[0][1].parameters)[0]
        return results[0][1].parameters, {}


def lattice_points(node: int, weights: int, noise: float) -> np.ndarray:
    generator = np.random.default_rng([7, node])
    return np.rint(generator.integers(-200, 200, weights) + noise * generator.standard_normal(weights)).clip(1 - LARGEST, LARGEST - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--weights", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=30_000.0, help="standard deviation of a node's noise, in lattice points")
    options = parser.parse_args()
    for silent in (0, 1):
        attempt(options.nodes, options.weights, options.noise, silent)
    guess_masks(20_000)


def guess_masks(tried: int) -> None:
    """Say how long it takes to try all masks of a pair of nodes: 32 bits of what they agreed on seed each, whatever its length."""
    agreed = np.random.default_rng(1).bytes(32)
    folded = bytes(np.bitwise_xor.reduce(np.frombuffer(agreed, dtype=np.uint32)).tobytes())
    same = (pseudo_rand_gen(agreed, 1 << 32, [(1000,)])[0] == pseudo_rand_gen(folded, 1 << 32, [(1000,)])[0]).all()
    began = time.perf_counter()
    for seed in range(tried):
        np.random.RandomState(seed).randint(0, (1 << 32) - 1, 3, dtype=np.int64)
    hours = (time.perf_counter() - began) / tried * 2**32 / 3600
    print(f"a mask follows from 4 bytes: {bool(same)}; to try all 2^32 of them takes {hours:,.0f} hours on one core, in Python")


def attempt(nodes: int, weights: int, noise: float, silent: int) -> None:
    """Run one round, of which ``silent`` nodes drop out before their masked vector, and print what came of it."""

    def app(message: Message, context: Context) -> Message:
        own = lattice_points(int(context.node_config["partition-id"]), weights, noise)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([own]), 1, {"secret": 0.731})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    client_app = ClientApp(mods=[secaggplus_mod])
    client_app.train()(app)
    grid = CountingGrid(client_app, nodes)
    ids = sorted(grid.get_node_ids())
    lost = ids[:silent]
    grid.silent = set(lost)
    strategy = Everyone(ids)
    context = LegacyContext(grid.server_context(), ServerConfig(num_rounds=1), strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord([np.zeros(weights)])
    # A lattice point is one step of the quantisation: range / 2 of them on either side, and a weight of 1 of at most 1.
    workflow = SecAggPlusWorkflow(
        1.0, 0.5, max_weight=1.0, clipping_range=float(LARGEST), quantization_range=2 * LARGEST, modulus_range=1 << 32
    )
    began = time.perf_counter()
    workflow(grid, context)
    seconds = time.perf_counter() - began
    kept = [node for node in range(nodes) if ids[node] not in lost]
    exact = sum(lattice_points(node, weights, noise) for node in kept)
    wrong = int((np.rint(strategy.aggregate * len(kept)) != exact).sum()) if strategy.aggregate.size else weights
    plain = sorted({name for content in grid.seen.replies for record in content.metric_records.values() for name in record})
    print(
        f"{nodes} nodes, {weights:,} weights, {silent} dropped: {wrong} of {weights:,} sums wrong, {seconds:.2f} s; "
        f"a node sends {grid.seen.received / nodes:,.0f} bytes and receives {grid.seen.sent / nodes:,.0f}; "
        f"in plain text: {', '.join(plain)}"
    )


if __name__ == "__main__":
    main()
