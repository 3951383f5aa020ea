"""A round by DrJAX: all clients in one compiled program, in parts that fit into memory."""

from __future__ import annotations

import drjax
import jax
import jax.numpy as jnp
import numpy as np
from jax_models import Weights, loss, start
from round_of import BATCH, RATE, asked, timed

AT_ONCE = 10_000
"""Clients in one program."""


def main() -> None:
    """Time the rounds."""
    task = asked()
    count, held = min(len(task.clients), AT_ONCE), len(task.clients[0])
    batch = min(BATCH, held)

    def trained(weights: Weights, images: jax.Array, labels: jax.Array) -> Weights:
        def step(now: Weights, own: tuple[jax.Array, jax.Array]) -> tuple[Weights, None]:
            found = jax.grad(loss)(now, *own)
            return jax.tree_util.tree_map(lambda value, slope: value - RATE * slope, now, found), None

        return jax.lax.scan(step, weights, (images, labels))[0]

    @jax.jit
    @drjax.program(placements={"clients": count})
    def program(weights: Weights, images: jax.Array, labels: jax.Array) -> Weights:
        found = drjax.map_fn(trained, (drjax.broadcast(weights), images, labels))
        return drjax.reduce_mean(found)

    weights = start(task.model)

    def run_round(number: int) -> None:
        nonlocal weights
        means = []
        for begin in range(0, len(task.clients), count):
            rows = np.stack([np.random.permutation(own)[: held // batch * batch] for own in task.clients[begin : begin + count]])
            rows = rows.reshape(count, -1, batch)
            means.append(program(weights, jnp.asarray(task.images[rows]), jnp.asarray(task.labels[rows])))
        weights = jax.tree_util.tree_map(lambda *parts: sum(parts) / len(parts), *means)
        jax.block_until_ready(weights)

    timed(task, run_round)


if __name__ == "__main__":
    main()
