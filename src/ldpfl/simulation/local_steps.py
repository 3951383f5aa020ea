"""The steps of local training: the samples of each step, the local optimiser, and the split of clients into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.division import Division, Places
from ldpfl.server.round_aggregation import Schedule, scheduled
from ldpfl.util.randomness import BlockSource

ALIGNED = 16
"""Number of float32 rows, of any length, after which memory alignment repeats: 64 bytes."""
MOST_CLIENTS = 256
"""Maximum number of clients that are trained at once."""


@dataclass(frozen=True)
class BatchSchedule:
    """Mini-batches of K clients over S steps of at most B samples.

    Attributes:
        index: (K, S, B) int64, indices into the training set. Padding entries are valid indices for which ``mask`` is 0.
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
    """Shuffle each client's samples for every epoch and cut them into batches.

    The last batch of an epoch may be smaller. Clients with fewer samples finish earlier, and their remaining steps are
    masked. A client's order depends on its own random words alone.

    Args:
        samples: for each client, positions (n_k,) in the training set.
        orders: for each epoch the source of the words by which the samples of client i, its row i, are ordered.
        batch_size: width B of the schedule, whoever is in it. A federation whose largest client holds fewer samples
            than its batch size passes that smaller number.
    """
    own, inside = Division.of(samples).table()
    clients, most = own.shape
    steps = -(-inside.sum(axis=1, keepdims=True) // batch_size)
    # The width must not depend on the other clients: another width uses other kernels, which round differently.
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
    """Return ``whole`` with each sample kept independently, with probability ``rate``, rounded down to a multiple of 2^-32."""
    drawn = coins.block(range(whole.clients), whole.mask[0].numel()).view(np.uint32)
    taken = torch.from_numpy(drawn < int(rate * 2**32)).reshape(whole.mask.shape)
    return BatchSchedule(whole.index, whole.mask * taken)


Kind = Literal["sgd", "adam"]

BETA, BETA_2, TINY = 0.9, 0.999, 1e-8
"""Constants beta 1, beta 2 and epsilon of Adam (Kingma and Ba 2015), as in PyTorch."""


@dataclass(frozen=True)
class LocalOptimiser:
    """The optimiser of a client.

    Attributes:
        learning_rate: learning rate of the first round.
        momentum: classical momentum, for SGD.
        kind: ``sgd`` (LDP-FL, Algorithm 1, line 21) or ``adam``, whose moments are reset in each round.
        weight_decay: factor on the weights that are added to the gradient.
        proximal: factor on the distance from the broadcast weights that is added to the gradient (FedProx, Li et al. 2020).
        schedule: schedule of the learning rate over ``rounds``.
        rounds: number of rounds of the run.
    """

    learning_rate: float
    momentum: float = 0.0
    kind: Kind = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0
    schedule: Schedule = "constant"
    rounds: int = 1

    def rate(self, round_number: int) -> float:
        """Return the learning rate of a round, from 1."""
        return scheduled(self.learning_rate, self.schedule, round_number, self.rounds)

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD at a constant learning rate, with at most momentum."""
        return self.kind == "sgd" and self.schedule == "constant" and not self.pulls

    @property
    def pulls(self) -> bool:
        """Whether weight decay or the proximal term adds to the gradient of the loss."""
        return bool(self.weight_decay or self.proximal)


class Descent:
    """The steps of many clients in one round; every parameter is (K, *shape)."""

    def __init__(self, optimiser: LocalOptimiser, parameters: Sequence[Tensor], round_number: int) -> None:
        self._optimiser, self._parameters, self._rate = optimiser, parameters, optimiser.rate(round_number)
        kept = 2 if optimiser.kind == "adam" else 1 if optimiser.momentum else 0
        self._state = [tuple(torch.zeros_like(parameter) for _ in range(kept)) for parameter in parameters]
        self._start = [parameter.detach().clone() for parameter in parameters] if optimiser.proximal else []
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], active: Tensor) -> None:
        """Take one step. A client that has finished has a zero gradient; nothing else must carry it on either: ``active`` (K,) is 0."""
        self._steps += 1
        for number, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if self._optimiser.pulls:
                gradient = self._pulled(number, gradient)
            if not self._state[number]:
                carried = gradient * beside(active, gradient) if self._optimiser.pulls else gradient
                parameter.sub_(carried, alpha=self._rate)
            else:
                direction = self._direction(self._state[number], gradient)
                parameter.sub_(direction * beside(active, direction), alpha=self._rate)

    def _pulled(self, number: int, gradient: Tensor) -> Tensor:
        """Return the gradient with those of weight decay and of the distance from the broadcast."""
        parameter = self._parameters[number]
        gradient = gradient + self._optimiser.weight_decay * parameter
        return gradient + self._optimiser.proximal * (parameter - self._start[number]) if self._start else gradient

    def _direction(self, state: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        if self._optimiser.kind == "sgd":
            return state[0].mul_(self._optimiser.momentum).add_(gradient)
        first, second = state[0].lerp_(gradient, 1 - BETA), state[1].mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
        unbiased = second.sqrt() / sqrt(1 - BETA_2**self._steps)
        return first / (1 - BETA**self._steps) / (unbiased + TINY)


def beside(clients: Tensor, values: Tensor) -> Tensor:
    """Return ``clients`` (K,) so shaped that it multiplies ``values`` (K, *shape) client by client."""
    return clients.view(-1, *[1] * (values.dim() - 1))


def split_evenly(count: int, largest: int, unit: int = ALIGNED) -> Iterator[slice]:
    """Cut ``count`` clients into runs of nearly equal length, none above ``largest``; as far as that goes, of ``unit`` times some number.

    How products are rounded depends on where a client's rows lie in memory, which after 16 clients is as at the start: so a client's
    weights do not depend on how many are trained together, where that is at least 16.
    """
    unit = unit if largest >= unit else 1
    units = -(-count // unit)
    pieces = -(-units // (largest // unit))
    bounds = [min(count, unit * (units * piece // pieces)) for piece in range(pieces + 1)]
    return (slice(a, b) for a, b in pairwise(bounds))
