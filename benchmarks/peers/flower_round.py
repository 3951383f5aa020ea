"""A round by Flower's own simulation: federated averaging, clients as tasks of Ray."""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import sys
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from round_of import BATCH, RATE, Task, task_from_arguments, time_rounds
from torch.nn import functional as F
from torch_models import model_of

client, server = ClientApp(), ServerApp()
_TASK: list[Task] = []


def cached_task() -> Task:
    """Return the task. Each process of Ray reads it once, from the environment."""
    if not _TASK:
        sys.argv = ["flower_round.py", *os.environ["PEER_TASK"].split("\n")]
        _TASK.append(task_from_arguments())
    return _TASK[0]


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for an epoch."""
    task = cached_task()
    torch.set_num_threads(1)
    model: Any = model_of(task.model)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    rows = torch.from_numpy(task.clients[int(context.node_config["partition-id"])])
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in rows[torch.randperm(len(rows))].split(BATCH):
        optimiser.zero_grad()
        F.cross_entropy(model(torch.from_numpy(task.images[batch])), torch.from_numpy(task.labels[batch])).backward()
        optimiser.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Time the rounds."""
    task = cached_task()
    weights = ArrayRecord(model_of(task.model).state_dict())
    while len(list(grid.get_node_ids())) < len(task.clients):
        time.sleep(0.1)

    def run_round(number: int) -> None:
        nonlocal weights
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(task.clients))
        weights = strategy.start(grid, weights, num_rounds=1).arrays

    time_rounds(task, run_round)


if __name__ == "__main__":
    os.environ["PEER_TASK"] = "\n".join(sys.argv[1:])
    task = cached_task()
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"address": "local", "num_cpus": task.threads, "include_dashboard": False}}
    run_simulation(server, client, len(task.clients), backend_config=backend)
