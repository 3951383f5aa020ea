"""Divide samples over clients: seeded, every sample used at most once, no client empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError

Scheme = Literal["iid", "dirichlet", "labels", "quantity"]
Indices = NDArray[np.int64]


def partition(
    labels: NDArray[np.int64],
    clients: int,
    generator: np.random.Generator,
    *,
    scheme: Scheme = "iid",
    alpha: float = 0.5,
    labels_per_client: int = 2,
) -> tuple[Indices, ...]:
    """Return the sample indices of each client.

    ``iid``: equal shares at random; a remainder that does not divide is left out (LDP-FL, section 5). ``dirichlet``:
    each label is divided in proportions drawn from Dirichlet(``alpha``) (Hsu et al. 2019). ``labels``: each client
    holds ``labels_per_client`` of the labels. ``quantity``: sizes in proportions drawn from Dirichlet(``alpha``).

    Raises:
        ConfigError: more clients than samples, or a parameter out of range.
    """
    if clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if clients > labels.size:
        raise ConfigError(f"{clients} clients need at least {clients} samples, the training data has {labels.size}")
    if scheme in ("dirichlet", "quantity") and not (np.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha must be a positive finite number, got {alpha}")
    match scheme:
        case "iid":
            order = generator.permutation(labels.size)[: labels.size // clients * clients]
            shares = np.split(order, clients)
        case "quantity":
            shares = _split_by_shares(generator.permutation(labels.size), _dirichlet(generator, alpha, clients))
        case "dirichlet":
            shares = _by_label(labels, clients, generator, lambda _: _dirichlet(generator, alpha, clients))
        case "labels":
            holders = _label_holders(labels, clients, labels_per_client, generator)
            shares = _by_label(labels, clients, generator, lambda label: holders[label])
        case _:
            assert_never(scheme)
    return _fill_empty([share.astype(np.int64) for share in shares])


def _dirichlet(generator: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    proportions = generator.dirichlet(np.full(clients, alpha))
    # A tiny alpha underflows to all zeros or NaN: then one client takes it all, which is the limit.
    if not np.isfinite(proportions).all() or proportions.sum() == 0:
        proportions = np.zeros(clients)
        proportions[generator.integers(clients)] = 1.0
    return proportions


def _split_by_shares(order: Indices, proportions: NDArray[np.float64]) -> list[Indices]:
    cuts = np.floor(np.cumsum(proportions / proportions.sum())[:-1] * order.size + 0.5).astype(np.int64)
    return np.split(order, cuts)


def _by_label(
    labels: NDArray[np.int64], clients: int, generator: np.random.Generator, proportions_of: Callable[[int], NDArray[np.float64]]
) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        order = generator.permutation(np.flatnonzero(labels == label))
        proportions = proportions_of(int(label))
        if proportions.sum() == 0:
            continue  # no client holds this label
        for client, share in enumerate(_split_by_shares(order, proportions)):
            parts[client].append(share)
    return [np.concatenate(part) if part else np.empty(0, dtype=np.int64) for part in parts]


def _label_holders(
    labels: NDArray[np.int64], clients: int, labels_per_client: int, generator: np.random.Generator
) -> dict[int, NDArray[np.float64]]:
    """Give every client ``labels_per_client`` distinct labels, each label to about as many clients."""
    present = np.unique(labels)
    if not 1 <= labels_per_client <= present.size:
        raise ConfigError(f"labels_per_client must lie between 1 and {present.size}, got {labels_per_client}")
    holders = {int(label): np.zeros(clients) for label in present}
    held = np.zeros(present.size)
    for client in generator.permutation(clients):
        # The least held labels first, ties at random.
        chosen = np.lexsort((generator.random(present.size), held))[:labels_per_client]
        held[chosen] += 1
        for index in chosen:
            holders[int(present[index])][client] = 1.0
    return holders


def _fill_empty(shares: list[Indices]) -> tuple[Indices, ...]:
    """Hand an empty client one sample of the client that holds most."""
    for client, share in enumerate(shares):
        if share.size == 0:
            donor = max(range(len(shares)), key=lambda other: shares[other].size)
            shares[client], shares[donor] = shares[donor][-1:], shares[donor][:-1]
    return tuple(shares)
