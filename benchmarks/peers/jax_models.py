"""The two models in JAX, for peers that use it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, jax.Array]


def start(name: str) -> Weights:
    """Return random initial weights of the model ``name``."""
    shapes = (
        {"c1": (10, 1, 5, 5), "b1": (10,), "c2": (20, 10, 5, 5), "b2": (20,), "w1": (320, 50), "v1": (50,), "w2": (50, 10), "v2": (10,)}
        if name == "cnn"
        else {"w": (784, 10), "v": (10,)}
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: 0.1 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def outputs(weights: Weights, images: jax.Array) -> jax.Array:
    """Return the scores (B, 10) of images (B, 28, 28)."""
    if "w" in weights:
        return images.reshape(len(images), -1) @ weights["w"] + weights["v"]
    hidden = jax.nn.relu(_pooled(_convolved(images[:, None], weights["c1"]) + weights["b1"][:, None, None]))
    hidden = jax.nn.relu(_pooled(_convolved(hidden, weights["c2"]) + weights["b2"][:, None, None]))
    hidden = jax.nn.relu(hidden.reshape(len(images), -1) @ weights["w1"] + weights["v1"])
    return hidden @ weights["w2"] + weights["v2"]


def loss(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs(weights, images)), labels[:, None], axis=1).mean()


def _convolved(images: jax.Array, kernel: jax.Array) -> Any:
    return jax.lax.conv(images, kernel, (1, 1), "VALID")


def _pooled(images: jax.Array) -> Any:
    return jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
