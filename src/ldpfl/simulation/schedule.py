"""Which samples a client sees in which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class BatchSchedule:
    """Mini-batches of K clients over S steps of at most B samples.

    Attributes:
        index: (K, S, B) int64, positions in the training set; padding points at a sample that ``mask`` blanks out.
        mask: (K, S, B) float32, 1 for a sample that counts.
    """

    index: Tensor
    mask: Tensor

    @property
    def clients(self) -> int:
        return int(self.index.shape[0])

    @property
    def steps(self) -> int:
        return int(self.index.shape[1])

    def head(self, steps: int) -> BatchSchedule:
        """Return the first ``steps`` steps."""
        return BatchSchedule(self.index[:, :steps], self.mask[:, :steps])

    def to(self, device: torch.device) -> BatchSchedule:
        """Return a copy on ``device``."""
        return BatchSchedule(self.index.to(device), self.mask.to(device))


def batch_schedule(
    samples: Sequence[NDArray[np.int64]], generators: Sequence[np.random.Generator], *, epochs: int, batch_size: int
) -> BatchSchedule:
    """Shuffle each client's samples anew for every epoch and cut them into batches.

    The last batch of an epoch may be smaller. Clients with fewer samples finish earlier: the rest of their steps are
    blanked out. A client's order depends on its own generator alone.

    Args:
        samples: for each client, positions (n_k,) in the training set.
        batch_size: width B of the schedule, whoever is in it. A federation whose largest client holds fewer samples
            than its batch size passes that smaller number.
    """
    per_client = [
        [
            order[start : start + batch_size]
            for order in (generator.permutation(own) for _ in range(epochs))
            for start in range(0, order.size, batch_size)
        ]
        for own, generator in zip(samples, generators, strict=True)
    ]
    # The width must not depend on who else is here: another width takes other kernels, which round differently.
    shape = (len(samples), max(len(batches) for batches in per_client), batch_size)
    index, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    for client, batches in enumerate(per_client):
        index[client] = samples[client][0]
        for step, batch in enumerate(batches):
            index[client, step, : batch.size] = batch
            mask[client, step, : batch.size] = 1.0
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def full_batch(samples: Sequence[NDArray[np.int64]], width: int) -> BatchSchedule:
    """Return the schedule of one step over all of each client's samples, in the order that they have; ``width`` as for mini-batches."""
    index, mask = np.zeros((len(samples), 1, width), dtype=np.int64), np.zeros((len(samples), 1, width), dtype=np.float32)
    for client, own in enumerate(samples):
        index[client] = own[0]
        index[client, 0, : own.size] = own
        mask[client, 0, : own.size] = 1.0
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def poisson_batch(whole: BatchSchedule, rate: float, generators: Sequence[np.random.Generator]) -> BatchSchedule:
    """Return ``whole`` with each sample in it by a coin of its own, with a probability of ``rate``, and up to 2^-32 less."""
    mask = whole.mask.clone()
    for client, generator in enumerate(generators):
        drawn = generator.integers(2**32, size=mask.shape[1:], dtype=np.uint64)
        mask[client] *= torch.from_numpy((drawn < int(rate * 2**32)).astype(np.float32))
    return BatchSchedule(whole.index, mask)
