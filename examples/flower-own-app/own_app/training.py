"""The training at a node: gradient descent on the node's own table, in the file that LDPFL_DATA names."""

from __future__ import annotations

import os

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the trained arrays under the names that came."""
    table = np.loadtxt(os.environ["LDPFL_DATA"], delimiter=",", skiprows=1, dtype=np.float32)
    inputs, targets = table[:, :-1], table[:, -1:]
    weight, bias = (message.content["arrays"][name].numpy().copy() for name in ("weight", "bias"))
    config = message.content["config"]
    for _ in range(config["epochs"]):
        wrong = inputs @ weight.T + bias - targets
        weight -= np.float32(config["learning-rate"]) * (wrong.T @ inputs) / len(table)
        bias -= np.float32(config["learning-rate"]) * wrong.mean(axis=0)
    trained = ArrayRecord({"weight": Array(weight), "bias": Array(bias)})
    return Message(RecordDict({"arrays": trained}), reply_to=message)
