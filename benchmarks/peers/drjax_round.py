"""A round by DrJAX: all clients in one compiled program, in parts that fit into memory."""

from __future__ import annotations

import drjax
import jax
import jax.numpy as jnp
import numpy as np
from jax_models import Weights, loss, start
from round_of import BATCH, RATE, task_from_arguments, time_rounds

AT_ONCE = 10_000
"""Clients in one program."""


def main() -> None:
    """Time the rounds."""
    task = task_from_arguments()
    clients_at_once, samples_per_client = min(len(task.clients), AT_ONCE), len(task.clients[0])
    batch = min(BATCH, samples_per_client)

    def trained_weights(weights: Weights, images: jax.Array, labels: jax.Array) -> Weights:
        def step(current: Weights, batch_of_client: tuple[jax.Array, jax.Array]) -> tuple[Weights, None]:
            gradient = jax.grad(loss)(current, *batch_of_client)
            return jax.tree_util.tree_map(lambda weight, slope: weight - RATE * slope, current, gradient), None

        return jax.lax.scan(step, weights, (images, labels))[0]

    @jax.jit
    @drjax.program(placements={"clients": clients_at_once})
    def program(weights: Weights, images: jax.Array, labels: jax.Array) -> Weights:
        weights_of_clients = drjax.map_fn(trained_weights, (drjax.broadcast(weights), images, labels))
        return drjax.reduce_mean(weights_of_clients)

    weights = start(task.model)

    def run_round(number: int) -> None:
        nonlocal weights
        means = []
        for begin in range(0, len(task.clients), clients_at_once):
            shuffled = [np.random.permutation(rows) for rows in task.clients[begin : begin + clients_at_once]]
            rows = np.stack([rows[: samples_per_client // batch * batch] for rows in shuffled]).reshape(clients_at_once, -1, batch)
            means.append(program(weights, jnp.asarray(task.images[rows]), jnp.asarray(task.labels[rows])))
        weights = jax.tree_util.tree_map(lambda *parts: sum(parts) / len(parts), *means)
        jax.block_until_ready(weights)

    time_rounds(task, run_round)


if __name__ == "__main__":
    main()
