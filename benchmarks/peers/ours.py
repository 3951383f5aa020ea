"""A round by ldpfl, with the one-bit mechanism: each client's report is randomised, which no peer's is."""

from __future__ import annotations

import os

import numpy as np
import torch
from round_of import BATCH, RATE, task_from_arguments, time_rounds

from ldpfl import data
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig
from ldpfl.simulation import simulate
from ldpfl.simulation.workers import workers


def main() -> None:
    """Time the rounds."""
    task = task_from_arguments()
    order = np.concatenate(task.clients)
    pixels = np.rint((task.images[order] * 0.3081 + 0.1307) * 255).astype(np.uint8)[:, None]
    train = data.Samples(torch.from_numpy(pixels), torch.from_numpy(task.labels[order]))
    digits = data.Dataset("digits", train, train.take(slice(100)), 10, (0.1307,), (0.3081,), "digits")
    config = RunConfig.model_validate(
        {
            "seed": 1,
            "data": {"name": "mnist", "partition": "iid"},
            "model": {"name": "two-layer-cnn" if task.model == "cnn" else "linear"},
            "clients": {"count": len(task.clients), "fraction": 1.0},
            "training": {
                "rounds": task.rounds,
                "epochs": 1,
                "batch_size": min(BATCH, len(task.clients[0])),
                "learning_rate": RATE,
                "compile": os.environ.get("COMPILE", "on"),
            },
            "mechanism": {"name": os.environ.get("MECHANISM", "duchi"), "epsilon": 1.0, "perturbed": "update"},
            "shuffling": {"channel": "direct"},
        }
    )
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    federation, start = build(config, digits, cpu)
    with workers(task.threads, cpu) as pool:
        rounds = simulate(federation, start, task.rounds, workers=pool)
        time_rounds(task, lambda number: next(rounds))


if __name__ == "__main__":
    main()
