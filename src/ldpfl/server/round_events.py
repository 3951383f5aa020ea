"""The ledger's record of a round: who took part, in which way that came about, and what stood between clients and server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ldpfl.privacy import Release, RoundEvent
from ldpfl.privacy.events import Channel, Sampling


def round_event(
    number: int,
    release: Release,
    cohort: int,
    joined: NDArray[np.int64],
    channel: Channel,
    self_sampling: float | None = None,
    *,
    once: bool = False,
    colluding: int = 0,
) -> RoundEvent:
    """Return the ledger's record of round ``number``.

    Args:
        cohort: clients whose reports arrived.
        joined: how many rounds each client has taken part in so far, this one included.
        channel: what stands between clients and server.
        self_sampling: of :func:`self_sampled_cohort`, if that is how the cohort came about. Then who took part is a secret as long
            as the channel keeps it; a cohort that the server draws is none.
        once: whether each client takes part in one round of the run. Its place in their order is a secret as long as the channel
            keeps it.
        colluding: clients of the cohort that are not relied on.
    """
    most = int(joined.max())
    if once and channel == "ideal-shuffler":
        return RoundEvent(number, release, cohort, joined.size, most, "once", channel=channel)
    if self_sampling is not None and channel == "ideal-shuffler":
        return RoundEvent(number, release, cohort, joined.size, most, "secret", (1 + self_sampling) / 2, channel)
    sampling: Sampling = "everyone" if cohort == joined.size else "visible"
    return RoundEvent(number, release, cohort, joined.size, most, sampling, channel=channel, colluding=colluding)


def histogram_event(stage: int, release: Release, clients: int, channel: Channel, colluding: int = 0) -> RoundEvent:
    """Return the ledger's record of histograms that all ``clients`` send before the first round, the ``stage``-th, from 1."""
    return evaluation_event(stage, release, np.full(clients, stage), channel, colluding)


def evaluation_event(number: int, release: Release, joined: NDArray[np.int64], channel: Channel, colluding: int = 0) -> RoundEvent:
    """Return the ledger's record, the one with this ``number``, of counts that all clients send; ``joined`` as for :func:`round_event`."""
    return replace(round_event(number, release, joined.size, joined, channel, colluding=colluding), histograms=True)
