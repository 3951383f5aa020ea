"""Time and memory of a round over the in-process grid against Flower's own simulation (Ray) of the same app, in one run.

    python benchmarks/flower.py [--clients 300] [--weights 1000000] [--rounds 2] [--mechanism duchi]

The grid runs one client after another in one process; Ray starts a worker for each core. Both run the same ServerApp and
ClientApp: the strategy of ldpfl, and the mod around a training step that adds 0.01 to every weight. A node allows everything
and charges no budget, so that neither side waits for a disk. A round is timed inside the ServerApp, from asking the clients to
the new model; the fastest round counts, because Ray's workers start in the first. Each side runs in processes of its own, one
after the other. Memory is the peak resident size of the process of the ServerApp, and of all processes added up, which counts
what they share more than once. Nothing leaves the machine: telemetry is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from math import inf
from pathlib import Path
from typing import Any

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}

import numpy as np
import psutil
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from rich.table import Table

from ldpfl.experiments.config import parse_config
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp, LdpStrategy, Waiting


class OpenNode:
    """A node that allows everything, and charges no budget."""

    def keeps_state(self, ask: Ask) -> bool:
        return True

    def would_admit(self, ask: Ask) -> None: ...

    def admit(self, ask: Ask) -> float:
        return inf

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        return payload

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None: ...


def open_node(context: Context) -> OpenNode:
    return OpenNode()


def train(message: Message, context: Context) -> Message:
    """Return the received weights plus 0.01, in the place of training."""
    arrays = message.content.array_records["arrays"]
    trained = ArrayRecord({name: Array(array.numpy() + np.float32(0.01)) for name, array in arrays.items()})
    return Message(RecordDict({"arrays": trained}), reply_to=message)


def client_app() -> LdpClientApp:
    return LdpClientApp(train, node=open_node)


def server_app(options: argparse.Namespace, figures: dict[str, Any]) -> ServerApp:
    """Return a ServerApp that writes the seconds and the reports of each round to ``figures``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = parse_config(
            "", [f"mechanism.name={options.mechanism}", "mechanism.perturbed=update", "ranges.radius=0.1"], origin="benchmark"
        )
        strategy = LdpStrategy(config, waiting=Waiting(options.clients, 120.0))
        initial = ArrayRecord({"weights": Array(np.zeros(options.weights, dtype=np.float32))})
        result = strategy.start(grid, initial, options.rounds, timeout=3600)
        rounds = result.train_metrics_clientapp.values()
        figures["seconds"] = [entry["seconds"] for entry in rounds]
        figures["reports"] = [entry["reports"] for entry in rounds]

    return app


def run_side(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the grid ``name``, in-process or Ray, in this process, and return its figures."""
    figures: dict[str, Any] = {}
    app, memory = server_app(options, figures), Memory()
    with memory:
        if name == "in-process":
            grid = InProcessGrid(client_app(), options.clients)
            app(grid, grid.server_context())
        else:
            from flwr.simulation import run_simulation

            backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
            run_simulation(app, client_app(), options.clients, backend_config=backend)
    return {**figures, "peak": memory.own, "peak_all": memory.all}


class Memory:
    """Watches the resident size of this process, and the sum over it and its children, ten times a second."""

    def __init__(self) -> None:
        self.own = self.all = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.1):
            sizes = [process.memory_info().rss]
            for child in process.children(recursive=True):
                try:
                    sizes.append(child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            self.own, self.all = max(self.own, sizes[0]), max(self.all, sum(sizes))


def run_side_in_process(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run the grid ``name`` in a new process with a new Flower home, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="ldpfl-") as home:
        out = Path(home) / "figures.json"
        command = [sys.executable, __file__, *arguments, "--side", name, "--figures", str(out)]
        began = time.perf_counter()
        finished = subprocess.run(command, env={**os.environ, "FLWR_HOME": home}, capture_output=True, text=True, check=False)
        if not out.exists():
            raise SystemExit(f"{name} ended with code {finished.returncode}:\n{finished.stderr[-3000:]}")
        return {**json.loads(out.read_text(encoding="utf-8")), "wall": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--weights", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mechanism", default="duchi")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        options.figures.write_text(json.dumps(run_side(options.side, options)), encoding="utf-8")
        return
    sides = {name: run_side_in_process(name, sys.argv[1:]) for name in ("in-process", "Ray")}
    title = f"{options.clients} clients x {options.weights:,} weights, {options.mechanism}"
    table = Table(title=title)
    for heading in ("", "seconds a round", "reports", "ServerApp MB", "all processes MB", "wall s with start"):
        table.add_column(heading, justify="right")
    for name, figures in sides.items():
        seconds = f"{min(figures['seconds']):.2f}"
        sizes = [f"{figures[key] / 1e6:,.0f}" for key in ("peak", "peak_all")]
        table.add_row(name, seconds, str(min(figures["reports"])), *sizes, f"{figures['wall']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
