"""Who takes part in a round."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from ldpfl.privacy import Release, RoundEvent
from ldpfl.privacy.events import Channel, Sampling
from ldpfl.randomness import Purpose, stream


def sample_cohort(seed: int, round_number: int, clients: int, fraction: float) -> NDArray[np.int64]:
    """Return ceil(``fraction`` * ``clients``) distinct clients, drawn uniformly, in ascending order.

    Source: LDP-FL, Algorithm 1, line 6; ``fraction`` is f_r in section 5.1.
    """
    size = min(clients, max(1, ceil(fraction * clients - 1e-9)))
    chosen = stream(seed, Purpose.COHORT, round_number).choice(clients, size=size, replace=False)
    return np.sort(chosen).astype(np.int64)


def round_event(number: int, release: Release, cohort: int, joined: NDArray[np.int64], channel: Channel) -> RoundEvent:
    """Return the ledger's record of round ``number``.

    Args:
        cohort: clients whose reports arrived. The server draws them, so who they are is no secret.
        joined: how many rounds each client has taken part in so far, this one included.
        channel: what stands between clients and server.
    """
    sampling: Sampling = "everyone" if cohort == joined.size else "visible"
    return RoundEvent(number, release, cohort, joined.size, int(joined.max()), sampling, channel=channel)
