"""What the time of a reply still tells about training, when rounds state a time for replies: python benchmarks/reply_time.py

A client trains for a moment, for most of the time, for ever (also in a gibibyte, and in sixteen processes), to weights that are not
finite, to an exception, or to the end of its process: in turn, so that the machine's moods are the same for all. For each way, the
milliseconds by which replies come after the stated time, and how often an observer who has seen half of the replies tells the other
half from those of a short training.
"""

from __future__ import annotations

import argparse
import os
import time
from math import inf

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ldpfl.experiments.config import parse_config
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, RoundTerms

CONFIG = parse_config("[mechanism]\nperturbed = 'update'\n", (), origin="benchmark")
WAYS = ("short", "long", "endless", "much memory", "many processes", "not finite", "exception", "process ends")
WEIGHTS = 21_840


class OpenNode:
    """A node that allows everything."""

    def keeps_state(self, ask: Ask) -> bool:
        return True

    def would_admit(self, ask: Ask) -> None: ...

    def admit(self, ask: Ask) -> float:
        return inf

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        return payload

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None: ...


def train(message: Message, context: Context) -> Message:
    """Train in the way that the node's config names: return in time, never, or with an error."""
    way, arrays = context.node_config["way"], message.content.array_records["arrays"]
    value = 0.01
    if way in ("long", "endless"):
        end = time.monotonic() + (0.7 * float(context.node_config["reply-s"]) if way == "long" else inf)
        _compute_until(end)
    elif way == "much memory":
        memory = np.ones(1 << 27)  # 1 GiB
        _compute_until(inf)
        del memory
    elif way == "many processes":
        for _ in range(15):
            if os.fork() == 0:
                _compute_until(inf)
        _compute_until(inf)
    elif way == "not finite":
        value = inf
    elif way == "exception":
        raise ValueError
    elif way == "process ends":
        os._exit(1)
    trained = {name: Array(array.numpy() + np.float32(value)) for name, array in arrays.items()}
    return Message(RecordDict({"arrays": ArrayRecord(trained)}), reply_to=message)


def _compute_until(end: float) -> None:
    """Keep the processor busy until the monotonic clock reaches ``end``."""
    while time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)


def lateness_ms(way: str, seconds: float) -> float:
    """Train in the given ``way``, and return by how many milliseconds the reply comes after the stated time of ``seconds``."""
    app = LdpClientApp(train, node=lambda context: OpenNode())
    grid = InProcessGrid(app, 1, node_config={"way": way, "reply-s": seconds})
    terms = RoundTerms("run", 1, WEIGHTS, CONFIG, ("w",), (0.0,), (0.1,), asked=1, reply_s=seconds)
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "arrays": ArrayRecord({"w": Array(np.zeros(WEIGHTS, np.float32))}),
        "config": ConfigRecord(),
        "ldpfl": terms.to_record(),
    }
    message = Message(RecordDict(content), grid.get_node_ids()[0], "train")
    began = time.monotonic()
    (reply,) = grid.send_and_receive([message])
    elapsed_s = time.monotonic() - began
    if reply.has_error():
        raise RuntimeError(reply.error.reason)
    return (elapsed_s - seconds) * 1000


def share_recognised(first_way: NDArray[np.float64], second_way: NDArray[np.float64]) -> float:
    """Return how often a threshold chosen on the first halves of both samples tells the second halves apart; 0.5 is chance."""
    half = len(first_way) // 2
    cuts = np.concatenate((first_way[:half], second_way[:half]))
    accuracies = [np.mean((first_way[:half] > cut).astype(float)) + np.mean((second_way[:half] <= cut).astype(float)) for cut in cuts]
    best_cut = max(range(len(cuts)), key=lambda i: abs(accuracies[i] - 1))
    accuracy = (float(np.mean(first_way[half:] > cuts[best_cut])) + float(np.mean(second_way[half:] <= cuts[best_cut]))) / 2
    return accuracy if accuracies[best_cut] >= 1 else 1 - accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, default=100, help="of each way")
    parser.add_argument("--reply-s", type=float, default=1.0)
    options = parser.parse_args()
    lateness_by_way: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in track(range(options.replies * len(WAYS)), "replies"):
        way = WAYS[number % len(WAYS)]
        lateness_by_way[way].append(lateness_ms(way, options.reply_s))
    table = Table(title=f"replies at {options.reply_s:g} s, {options.replies} of each way, {WEIGHTS:,} weights")
    for heading in ("training", "late by, ms: median", "90 % below", "largest", "told from short"):
        table.add_column(heading, justify="right" if heading != "training" else "left")
    for way, values in lateness_by_way.items():
        recognised = "" if way == "short" else f"{share_recognised(np.array(values), np.array(lateness_by_way['short'])):.0%}"
        table.add_row(way, *(f"{figure:.2f}" for figure in (np.median(values), np.quantile(values, 0.9), max(values))), recognised)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
