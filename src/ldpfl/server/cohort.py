"""Choose the clients of a round, and build the privacy event of the round for the ledger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ldpfl.errors import ConfigError
from ldpfl.privacy import Release, RoundEvent
from ldpfl.privacy.events import Channel, Sampling
from ldpfl.util.quantities import cohort_size
from ldpfl.util.randomness import Purpose, SeededStreams, stream


def round_cohort(seed: int, round_number: int, clients: int, fraction: float, self_sampling: float | None) -> NDArray[np.int64]:
    """Return the clients of a round: a ``fraction`` that the server samples, or with ``self_sampling`` those that check in at random.

    ``clients`` is the number of all clients. ``self_sampling`` is the lowest probability of joining. None: the server samples.
    """
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
    """Return the clients outside the ``cohort`` of a round, in the random order in which they replace members that fail."""
    outside = np.setdiff1d(np.arange(clients), cohort)
    return stream(seed, Purpose.COHORT, round_number, 1).permutation(outside)  # 1: another stream than the cohort's


def self_sampled_cohort(seed: int, round_number: int, clients: int, self_sampling: float) -> NDArray[np.int64]:
    """Return the clients that check in at random, in ascending order. There may be none.

    For each round, each client draws its probability of joining uniformly from [``self_sampling``, 1], and joins with that probability.
    Nobody learns the drawn probability. So for privacy, a client joins with the mean probability (``self_sampling`` + 1) / 2.

    Source: Optimal LDP-FL, Algorithm 4, with ``self_sampling`` 0.5; the plain variant that it replaces has 0.
    """
    # Each client has a random stream of its own, from which it takes four words of 32 bits.
    words = SeededStreams.of(range(clients), seed, Purpose.PARTICIPATION, round_number).block(range(clients), 4)
    draws = (words.view(np.uint64) >> np.uint64(11)) * 2.0**-53  # two numbers in [0, 1) for each client, of 53 random bits
    probabilities = self_sampling + (1 - self_sampling) * draws[:, 0]
    return np.flatnonzero(draws[:, 1] < probabilities)


def once_cohort(seed: int, round_number: int, clients: int, rounds: int) -> NDArray[np.int64]:
    """Return the clients whose only round this is, in ascending order.

    The order of all ``clients`` is random, but the same for each round. It is cut into ``rounds`` parts of about equal size.

    Raises:
        ConfigError: there are fewer clients than rounds.
    """
    if clients < rounds:
        raise ConfigError(
            f"training.rounds is {rounds}, but each of the {clients} clients takes part in only one round, which is enough for {clients} "
            f"rounds: set training.rounds to {clients} or less"
        )
    order = stream(seed, Purpose.COHORT).permutation(clients)  # without the round's number, so the same in each round
    first, last = (clients * number // rounds for number in (round_number - 1, round_number))
    return np.sort(order[first:last]).astype(np.int64)


def round_event(
    number: int,
    release: Release,
    cohort: int,
    rounds_joined: NDArray[np.int64],
    channel: Channel,
    self_sampling: float | None = None,
    *,
    once: bool = False,
    colluding: int = 0,
) -> RoundEvent:
    """Return the privacy event of round ``number``.

    Args:
        cohort: number of clients whose reports arrived.
        rounds_joined: (N,) number of rounds that each of all N clients has taken part in so far, this one included.
        channel: channel between clients and server.
        self_sampling: argument of :func:`self_sampled_cohort`, if that function chose the cohort; else None. Then participation is secret
            behind a shuffler, which hides who took part. A cohort that the server samples is not secret.
        once: whether each client takes part in one round of the run. Then a shuffler hides in which.
        colluding: number of clients in the cohort whose noise is not counted. Only a sum relies on other clients' noise.
    """
    clients, most_joined = rounds_joined.size, int(rounds_joined.max())  # the guarantee is for the client that took part most often
    # Only behind a shuffler is it secret who takes part in which round.
    if once and channel == "ideal-shuffler":
        return RoundEvent(number, release, cohort, clients, most_joined, sampling="once", channel=channel)
    if self_sampling is not None and channel == "ideal-shuffler":
        mean_rate = (1 + self_sampling) / 2
        return RoundEvent(number, release, cohort, clients, most_joined, sampling="secret", rate=mean_rate, channel=channel)
    sampling: Sampling = "everyone" if cohort == clients else "visible"
    return RoundEvent(number, release, cohort, clients, most_joined, sampling, channel=channel, colluding=colluding)


def histogram_event(stage: int, release: Release, clients: int, channel: Channel, colluding: int = 0) -> RoundEvent:
    """Return the privacy event of the histograms of ``stage`` 1, 2, and so on, which all ``clients`` send before the first round."""
    rounds_joined = np.full(clients, stage)  # each client takes part in each stage
    return evaluation_event(stage, release, rounds_joined, channel, colluding)


def evaluation_event(number: int, release: Release, rounds_joined: NDArray[np.int64], channel: Channel, colluding: int = 0) -> RoundEvent:
    """Return the privacy event ``number`` of noisy sums that all clients send. ``rounds_joined`` is as in :func:`round_event`."""
    # The flag marks any noisy sums that are not a training round.
    return replace(round_event(number, release, rounds_joined.size, rounds_joined, channel, colluding=colluding), histograms=True)
