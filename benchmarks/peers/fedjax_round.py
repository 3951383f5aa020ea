"""A round by FedJAX: its federated averaging, compiled by JAX."""

from __future__ import annotations

import fedjax
import jax
from fedjax.algorithms import fed_avg
from jax_models import loss, start
from round_of import BATCH, RATE, task_from_arguments, time_rounds


def main() -> None:
    """Time the rounds."""
    task = task_from_arguments()

    def gradient(weights: object, batch: dict[str, jax.Array], key: object) -> object:
        return jax.grad(loss)(weights, batch["x"], batch["y"])

    hyper = fedjax.ShuffleRepeatBatchHParams(batch_size=min(BATCH, len(task.clients[0])), num_epochs=1)
    algorithm = fed_avg.federated_averaging(gradient, fedjax.optimizers.sgd(RATE), fedjax.optimizers.sgd(1.0), hyper)
    clients = [
        (str(number).encode(), fedjax.ClientDataset({"x": task.images[rows], "y": task.labels[rows]}), jax.random.PRNGKey(number))
        for number, rows in enumerate(task.clients)
    ]
    state = algorithm.init(start(task.model))

    def run_round(number: int) -> None:
        nonlocal state
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    time_rounds(task, run_round)


if __name__ == "__main__":
    main()
