"""Reports of which each client's whole vector is one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.reports import DenseReports


@dataclass(frozen=True, eq=False)
class VectorReports(DenseReports):
    """Noisy float32 vectors, of which a client's row is protected as a whole: it stays together, in the shuffler too."""


def mix_vector_rows(batches: Sequence[VectorReports], generator: np.random.Generator) -> VectorReports:
    """Pool the rows of all ``batches`` and put them in a uniformly random order, each one unchanged.

    Raises:
        PrivacyError: no report, or reports of different dimensions.
    """
    clients = sum(batch.clients for batch in batches)
    if clients == 0:
        raise PrivacyError("there is no report to shuffle")
    if len({batch.dimension for batch in batches}) != 1:
        raise PrivacyError("reports of different dimensions cannot be shuffled together")
    order = torch.from_numpy(generator.permutation(clients))
    return VectorReports(torch.cat([batch.values for batch in batches])[order])
