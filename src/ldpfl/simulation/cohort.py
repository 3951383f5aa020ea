"""Who takes part in a round."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

from ldpfl.randomness import Purpose, stream


def sample_cohort(seed: int, round_number: int, clients: int, fraction: float) -> NDArray[np.int64]:
    """Return ceil(``fraction`` * ``clients``) distinct clients, drawn uniformly, in ascending order.

    Source: LDP-FL, Algorithm 1, line 6; ``fraction`` is f_r in section 5.1.
    """
    size = min(clients, max(1, ceil(fraction * clients - 1e-9)))
    chosen = stream(seed, Purpose.COHORT, round_number).choice(clients, size=size, replace=False)
    return np.sort(chosen).astype(np.int64)
