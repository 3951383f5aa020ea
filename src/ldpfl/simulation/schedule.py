"""Which samples a client sees in which step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.division import Division, Places
from ldpfl.randomness import BlockSource


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


def batch_schedule(samples: Sequence[Places], orders: Sequence[BlockSource], *, batch_size: int) -> BatchSchedule:
    """Shuffle each client's samples anew for every epoch and cut them into batches.

    The last batch of an epoch may be smaller. Clients with fewer samples finish earlier: the rest of their steps are
    blanked out. A client's order depends on its own random words alone.

    Args:
        samples: for each client, positions (n_k,) in the training set.
        orders: for each epoch the source of the words by which the samples of client i, its row i, are ordered.
        batch_size: width B of the schedule, whoever is in it. A federation whose largest client holds fewer samples
            than its batch size passes that smaller number.
    """
    own, inside = Division.of(samples).table()
    clients, most = own.shape
    steps = -(-inside.sum(axis=1, keepdims=True) // batch_size)
    # The width must not depend on who else is here: another width takes other kernels, which round differently.
    index = np.repeat(own[:, :1], len(orders) * int(steps.max(initial=0)) * batch_size, axis=1).reshape(clients, -1, batch_size)
    mask = np.zeros(index.shape, dtype=np.float32)
    row, place = np.nonzero(inside)
    step, within = place // batch_size, place % batch_size
    for epoch, source in enumerate(orders):
        order = own if most == 1 else np.take_along_axis(own, _ranks(source, inside), axis=1)
        index[row, step + epoch * steps[row, 0], within] = order[row, place]
        mask[row, step + epoch * steps[row, 0], within] = 1.0
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def _ranks(source: BlockSource, inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row (K, n) the order of its entries that are ``inside``, which come first: that of 64 random bits of each."""
    clients, most = inside.shape
    keys = source.block(range(clients), 2 * most).view(np.uint64)
    return np.where(inside, keys, np.iinfo(np.uint64).max).argsort(axis=1)


def full_batch(samples: Sequence[Places], width: int) -> BatchSchedule:
    """Return the schedule of one step over all of each client's samples, in the order that they have; ``width`` as for mini-batches."""
    own, inside = Division.of(samples).table()
    index = np.repeat(own[:, None, :1], width, axis=2)
    index[:, 0, : own.shape[1]] = own
    mask = np.zeros(index.shape, dtype=np.float32)
    mask[:, 0, : own.shape[1]] = inside
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def poisson_batch(whole: BatchSchedule, rate: float, coins: BlockSource) -> BatchSchedule:
    """Return ``whole`` with each sample in it by a coin of its own, with a probability of ``rate``, and up to 2^-32 less."""
    drawn = coins.block(range(whole.clients), whole.mask[0].numel()).view(np.uint32)
    taken = torch.from_numpy(drawn < int(rate * 2**32)).reshape(whole.mask.shape)
    return BatchSchedule(whole.index, whole.mask * taken)
