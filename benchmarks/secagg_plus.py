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

MAX_LATTICE_POINT = 1 << 21
"""Largest lattice point of a node, on either side of 0. Points then take 22 bits, which leaves 10 of 32 bits for sums of 1,024 nodes."""


@dataclass
class Traffic:
    """Bytes that the server sent and received, and the replies that it saw."""

    sent: int = 0
    received: int = 0
    replies: list[RecordDict] = field(default_factory=list)


class CountingGrid(InProcessGrid):
    """A grid that counts bytes. Messages to nodes in ``silent`` are lost from the third stage on, in which masked vectors are asked for."""

    def __init__(self, *args: Any, silent: Iterable[int] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.traffic, self.silent, self.stage = Traffic(), set(silent), 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        delivered = list(messages)
        self.stage += 1
        if self.stage >= 3:
            delivered = [message for message in delivered if message.metadata.dst_node_id not in self.silent]
        for message in delivered:
            message.content = deepcopy(message.content)  # nodes in one process share it, and the mod removes parts of it
        self.traffic.sent += sum(size_of(message.content) for message in delivered)
        replies = list(super().send_and_receive(delivered, timeout=timeout))
        self.traffic.received += sum(size_of(reply.content) for reply in replies if reply.has_content())
        self.traffic.replies += [reply.content for reply in replies if reply.has_content()]
        return iter(replies)


def size_of(content: RecordDict) -> int:
    return len(records_to_bytes(content))


@dataclass
class NodeProxy:
    """A stand-in for a client, with the one attribute that the workflow reads."""

    node_id: int


class AllNodes(FedAvg):
    """A strategy that asks every node, and stores the aggregate unchanged."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__()
        self.nodes, self.aggregate = nodes, np.zeros(0)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        return [(NodeProxy(node), FitIns(parameters, {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self.aggregate = parameters_to_ndarrays(results[0][1].parameters)[0]
        return results[0][1].parameters, {}


def lattice_points(node: int, weights: int, noise: float) -> np.ndarray:
    """Return the lattice points that ``node`` sends. They depend on its number alone, so that the exact sum can be computed."""
    generator = np.random.default_rng([7, node])
    return np.rint(generator.integers(-200, 200, weights) + noise * generator.standard_normal(weights)).clip(
        1 - MAX_LATTICE_POINT, MAX_LATTICE_POINT - 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--weights", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=30_000.0, help="standard deviation of a node's noise, in lattice points")
    options = parser.parse_args()
    for silent in (0, 1):
        run_round(options.nodes, options.weights, options.noise, silent)
    print_time_to_guess_masks(20_000)


def print_time_to_guess_masks(tried: int) -> None:
    """Print how long it takes to try all masks of a pair of nodes. The seed of a mask has 32 bits, however long the agreed secret is."""
    agreed = np.random.default_rng(1).bytes(32)
    folded = bytes(np.bitwise_xor.reduce(np.frombuffer(agreed, dtype=np.uint32)).tobytes())
    same = (pseudo_rand_gen(agreed, 1 << 32, [(1000,)])[0] == pseudo_rand_gen(folded, 1 << 32, [(1000,)])[0]).all()
    began = time.perf_counter()
    for seed in range(tried):
        np.random.RandomState(seed).randint(0, (1 << 32) - 1, 3, dtype=np.int64)
    hours = (time.perf_counter() - began) / tried * 2**32 / 3600
    print(f"a mask follows from 4 bytes: {bool(same)}; to try all 2^32 of them takes {hours:,.0f} hours on one core, in Python")


def run_round(nodes: int, weights: int, noise: float, silent: int) -> None:
    """Run one round in which ``silent`` nodes drop out before they send a masked vector, and print wrong sums, seconds and bytes."""

    def send_lattice_points(message: Message, context: Context) -> Message:
        points = lattice_points(int(context.node_config["partition-id"]), weights, noise)
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([points]), 1, {"secret": 0.731})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    client_app = ClientApp(mods=[secaggplus_mod])
    client_app.train()(send_lattice_points)
    grid = CountingGrid(client_app, nodes)
    ids = sorted(grid.get_node_ids())
    lost_ids = ids[:silent]
    grid.silent = set(lost_ids)
    strategy = AllNodes(ids)
    context = LegacyContext(grid.server_context(), ServerConfig(num_rounds=1), strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord([np.zeros(weights)])
    # A lattice point is one step of the quantisation: range / 2 of them on either side, and a weight of 1 of at most 1.
    workflow = SecAggPlusWorkflow(
        1.0, 0.5, max_weight=1.0, clipping_range=float(MAX_LATTICE_POINT), quantization_range=2 * MAX_LATTICE_POINT, modulus_range=1 << 32
    )
    began = time.perf_counter()
    workflow(grid, context)
    seconds = time.perf_counter() - began
    remaining = [node for node in range(nodes) if ids[node] not in lost_ids]
    exact_sum = sum(lattice_points(node, weights, noise) for node in remaining)
    wrong_sums = int((np.rint(strategy.aggregate * len(remaining)) != exact_sum).sum()) if strategy.aggregate.size else weights
    plain_text_names = sorted({name for content in grid.traffic.replies for record in content.metric_records.values() for name in record})
    print(
        f"{nodes} nodes, {weights:,} weights, {silent} dropped: {wrong_sums} of {weights:,} sums wrong, {seconds:.2f} s; "
        f"a node sends {grid.traffic.received / nodes:,.0f} bytes and receives {grid.traffic.sent / nodes:,.0f}; "
        f"in plain text: {', '.join(plain_text_names)}"
    )


if __name__ == "__main__":
    main()
