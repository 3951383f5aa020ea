"""The server: it starts the rounds, and computes each new model from the nodes' reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from ldpfl.experiments.config import read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy, Waiting, operator_relay

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the model's weights in the run folder."""
    asked = {name.removeprefix("ldpfl."): value for name, value in context.run_config.items()}
    relay = None
    if asked["transport"] == "relay":
        relay = operator_relay(linked=asked["linked"], min_clients=asked["min-clients"], window_s=asked["window-s"])
    out = Path(asked["out"])
    strategy = LdpStrategy(
        read_config(Path(__file__).with_name("config.toml")),
        collector=relay,
        folder=RunFolder(out),
        waiting=Waiting(nodes=3, seconds=300),
        reply_s=asked["reply-s"],
        run_config=context.run_config,
    )
    start = ArrayRecord({"weight": Array(np.zeros((1, 2), np.float32)), "bias": Array(np.zeros(1, np.float32))})
    result = strategy.start(grid, start, timeout=600, train_config=ConfigRecord({"epochs": 20, "learning-rate": 0.1}))
    np.savez(out / "weights.npz", **{name: array.numpy() for name, array in result.arrays.items()})
