"""Who takes part in a round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.quantities import cohort_size
from ldpfl.randomness import Purpose, SeededStreams, stream


def round_cohort(seed: int, round_number: int, clients: int, fraction: float, self_sampling: float | None) -> NDArray[np.int64]:
    """Return who takes part in a round: a ``fraction`` that the server draws, or, given ``self_sampling``, those who decide to."""
    if self_sampling is None:
        return sample_cohort(seed, round_number, clients, fraction)
    return self_sampled_cohort(seed, round_number, clients, self_sampling)


def sample_cohort(seed: int, round_number: int, clients: int, fraction: float) -> NDArray[np.int64]:
    """Return ceil(``fraction`` * ``clients``) distinct clients, drawn uniformly, in ascending order.

    Source: LDP-FL, Algorithm 1, line 6; ``fraction`` is f_r in section 5.1.
    """
    size = cohort_size(fraction, clients)
    chosen = stream(seed, Purpose.COHORT, round_number).choice(clients, size=size, replace=False)
    return np.sort(chosen).astype(np.int64)


def reserves(seed: int, round_number: int, clients: int, cohort: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the clients that are not in the ``cohort`` of a round, in the random order in which they may stand in for its members."""
    others = np.setdiff1d(np.arange(clients), cohort)
    return stream(seed, Purpose.COHORT, round_number, 1).permutation(others)


def self_sampled_cohort(seed: int, round_number: int, clients: int, self_sampling: float) -> NDArray[np.int64]:
    """Return the clients that decide to take part, in ascending order; it may be none.

    Each client draws q ~ U(``self_sampling``, 1) for this round and joins with probability q, so with (``self_sampling`` + 1) / 2 over all;
    q itself changes nothing, for nobody learns it.

    Source: Optimal LDP-FL, Algorithm 4, with ``self_sampling`` 0.5; the plain variant that it replaces has 0.
    """
    words = SeededStreams.of(range(clients), seed, Purpose.PARTICIPATION, round_number).block(range(clients), 4)
    draws = (words.view(np.uint64) >> np.uint64(11)) * 2.0**-53
    return np.flatnonzero(draws[:, 1] < self_sampling + (1 - self_sampling) * draws[:, 0])


def once_cohort(seed: int, round_number: int, clients: int, rounds: int) -> NDArray[np.int64]:
    """Return the clients whose only round this is, in ascending order: all of them in a random order, cut into ``rounds`` equal parts.

    Raises:
        ConfigError: there are fewer clients than rounds.
    """
    if clients < rounds:
        raise ConfigError(f"{clients} clients cannot take part once each in {rounds} rounds, with somebody in each of them")
    order = stream(seed, Purpose.COHORT).permutation(clients)
    first, last = (clients * number // rounds for number in (round_number - 1, round_number))
    return np.sort(order[first:last]).astype(np.int64)
