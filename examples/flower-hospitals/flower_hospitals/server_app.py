"""The server: it asks three hospitals for gradients, with the noise that keeps the target of ``config.toml``."""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from flower_hospitals.patients import Network, read
from ldpfl.experiments.config import read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy, Waiting

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the hospitals' network, and leave a run folder if one is named."""
    settings = context.run_config
    config = read_config(Path(__file__).with_name("config.toml"))
    torch.manual_seed(config.seed)
    network = Network()
    inputs, came_back = read(Path(str(settings["public-rows"])))

    def accuracy(weights: Tensor) -> float:
        """Measure on rows that are public: those of the hospitals stay where they are."""
        nn.utils.vector_to_parameters(weights, network.parameters())
        with torch.no_grad():
            return float(((network(**inputs) > 0) == came_back.bool()).float().mean())

    strategy = LdpStrategy(
        config,
        folder=RunFolder(Path(str(settings["out"]))) if settings["out"] else None,
        waiting=Waiting(config.clients.count),
        score=accuracy,
        reply_s=float(settings["ldpfl.reply-s"]),
        run_config=settings,
    )
    strategy.start(grid, ArrayRecord(network.state_dict()))
