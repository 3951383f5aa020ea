"""The steps of local training: the samples of each step, the local optimiser, the split of clients into chunks, and their losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from ldpfl.data.samples import Division, Places
from ldpfl.server.round_aggregation import Schedule, scheduled_rate
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
        """Number K of clients."""
        return int(self.index.shape[0])

    @property
    def steps(self) -> int:
        """Number S of steps."""
        return int(self.index.shape[1])

    def head(self, steps: int) -> BatchSchedule:
        """Return the first ``steps`` steps."""
        return BatchSchedule(self.index[:, :steps], self.mask[:, :steps])

    def to(self, device: torch.device) -> BatchSchedule:
        """Return a copy on ``device``."""
        return BatchSchedule(self.index.to(device), self.mask.to(device))


def batch_schedule(samples: Sequence[Places], orders: Sequence[BlockSource], *, batch_size: int) -> BatchSchedule:
    """Return a schedule in which each client's samples are shuffled for every epoch and cut into batches.

    The last batch of an epoch may be smaller. Clients with fewer samples finish earlier, and their remaining steps are
    masked. A client's order depends on its own random words alone.

    Args:
        samples: for each client, positions (n_k,) in the training set.
        orders: for each epoch the source of random words by which samples are ordered; its row i is client i's.
        batch_size: width B of the schedule. It must be the same for all cohorts of a federation: see :attr:`Federation.batch_width`.
    """
    table, is_real = Division.of(samples).table()  # (K, n) positions, and a mask of those that are not padding
    clients, most_samples = table.shape
    steps = -(-is_real.sum(axis=1, keepdims=True) // batch_size)  # of each client in an epoch, rounded up
    # The width must not depend on the other clients: another width uses other kernels, which round differently. Padding repeats each
    # client's first sample.
    index = np.repeat(table[:, :1], len(orders) * int(steps.max(initial=0)) * batch_size, axis=1).reshape(clients, -1, batch_size)
    mask = np.zeros(index.shape, dtype=np.float32)
    row, column = np.nonzero(is_real)
    step, place_in_batch = column // batch_size, column % batch_size
    for epoch, source in enumerate(orders):
        shuffled = table if most_samples == 1 else np.take_along_axis(table, _random_orders(source, is_real), axis=1)
        index[row, step + epoch * steps[row, 0], place_in_batch] = shuffled[row, column]
        mask[row, step + epoch * steps[row, 0], place_in_batch] = 1.0
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def _random_orders(source: BlockSource, is_real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return a random order (K, n) of each row's entries, by 64 random bits for each. Entries that are not ``is_real`` come last."""
    clients, width = is_real.shape
    keys = source.block(range(clients), 2 * width).view(np.uint64)
    return np.where(is_real, keys, np.iinfo(np.uint64).max).argsort(axis=1)


def full_batch(samples: Sequence[Places], width: int) -> BatchSchedule:
    """Return a schedule of one step over all samples of each client, in order. ``width`` is B of :class:`BatchSchedule`."""
    table, is_real = Division.of(samples).table()  # (K, n) positions, and a mask of those that are not padding
    index = np.repeat(table[:, None, :1], width, axis=2)  # padding repeats each client's first sample
    index[:, 0, : table.shape[1]] = table
    mask = np.zeros(index.shape, dtype=np.float32)
    mask[:, 0, : table.shape[1]] = is_real
    return BatchSchedule(torch.from_numpy(index), torch.from_numpy(mask))


def poisson_batch(whole: BatchSchedule, rate: float, coins: BlockSource) -> BatchSchedule:
    """Return ``whole`` with each sample kept independently. The probability is ``rate``, rounded down to a multiple of 2^-32."""
    drawn = coins.block(range(whole.clients), whole.mask[0].numel()).view(np.uint32)
    taken = torch.from_numpy(drawn < int(rate * 2**32)).reshape(whole.mask.shape)
    return BatchSchedule(whole.index, whole.mask * taken)


Kind = Literal["sgd", "adam"]

ADAM_BETA_1, ADAM_BETA_2, ADAM_EPSILON = 0.9, 0.999, 1e-8
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
        return scheduled_rate(self.learning_rate, self.schedule, round_number, self.rounds)

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD at a constant learning rate, with at most momentum."""
        return self.kind == "sgd" and self.schedule == "constant" and not self.adds_to_gradient

    @property
    def adds_to_gradient(self) -> bool:
        """Whether weight decay or the proximal term adds to the gradient of the loss."""
        return bool(self.weight_decay or self.proximal)


class Descent:
    """The local optimiser of K clients during one round. It changes ``parameters``, each (K, *shape), in place."""

    def __init__(self, optimiser: LocalOptimiser, parameters: Sequence[Tensor], round_number: int) -> None:
        self._optimiser, self._parameters, self._rate = optimiser, parameters, optimiser.rate(round_number)
        moments = 2 if optimiser.kind == "adam" else int(optimiser.momentum != 0)  # tensors that are kept for each parameter
        self._moments = [tuple(torch.zeros_like(parameter) for _ in range(moments)) for parameter in parameters]
        self._start = [parameter.detach().clone() for parameter in parameters] if optimiser.proximal else []
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], active: Tensor) -> None:
        """Take one step. ``active`` (K,) is 0 for a client that has finished: neither momentum nor weight decay may move its weights."""
        self._steps += 1
        for number, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if self._optimiser.adds_to_gradient:
                gradient = self._with_decay_and_proximal_term(number, gradient)
            if not self._moments[number]:  # plain SGD
                # A finished client has a gradient of 0, unless decay or the proximal term adds to it.
                direction = gradient * factor_per_client(active, gradient) if self._optimiser.adds_to_gradient else gradient
                parameter.sub_(direction, alpha=self._rate)
            else:
                direction = self._direction(self._moments[number], gradient)
                parameter.sub_(direction * factor_per_client(active, direction), alpha=self._rate)

    def _with_decay_and_proximal_term(self, number: int, gradient: Tensor) -> Tensor:
        """Return the ``gradient`` of parameter ``number``, plus the gradients of weight decay and of the proximal term."""
        parameter = self._parameters[number]
        gradient = gradient + self._optimiser.weight_decay * parameter
        return gradient + self._optimiser.proximal * (parameter - self._start[number]) if self._start else gradient

    def _direction(self, moments: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """Update the ``moments`` of a parameter by ``gradient``, and return the step for a learning rate of 1."""
        if self._optimiser.kind == "sgd":
            return moments[0].mul_(self._optimiser.momentum).add_(gradient)
        first, second = (
            moments[0].lerp_(gradient, 1 - ADAM_BETA_1),
            moments[1].mul_(ADAM_BETA_2).addcmul_(gradient, gradient, value=1 - ADAM_BETA_2),
        )
        root = second.sqrt() / sqrt(1 - ADAM_BETA_2**self._steps)  # both moments are corrected for their start at 0
        return first / (1 - ADAM_BETA_1**self._steps) / (root + ADAM_EPSILON)


def factor_per_client(factors: Tensor, values: Tensor) -> Tensor:
    """Return ``factors`` (K,), a number for each client, in the shape (K, 1, ...) that multiplies ``values`` (K, *shape) by client."""
    return factors.view(-1, *[1] * (values.dim() - 1))


def split_evenly(count: int, largest: int, unit: int = ALIGNED) -> Iterator[slice]:
    """Cut ``count`` clients into pieces of nearly equal length, at most ``largest``.

    Lengths are multiples of ``unit``, except the last, and except if ``largest`` is smaller than ``unit``. The rounding of products depends
    on the alignment of a client's rows in memory, which repeats after 16 clients. So a client's weights do not depend on the number of
    clients that are trained together, if that number is at least 16.
    """
    unit = unit if largest >= unit else 1
    unit_count = -(-count // unit)  # rounded up, as the next number is
    piece_count = -(-unit_count // (largest // unit))
    bounds = [min(count, unit * (unit_count * piece // piece_count)) for piece in range(piece_count + 1)]
    return (slice(start, stop) for start, stop in pairwise(bounds))


_ONE_AFTER_ANOTHER = "There is a performance drop because we have not yet implemented the batching rule"
"""Start of PyTorch's warning that it computes an operation of one client after another. It asks users to report that to PyTorch."""


@contextmanager
def without_vmap_warning() -> Iterator[None]:
    """Suppress PyTorch's warning that it computes an operation for one client after another: results are right all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ONE_AFTER_ANOTHER, UserWarning)
        yield


def for_many_clients_at_once(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that computes ``loss`` for many clients: each argument has a further dimension in front, that of clients."""
    losses = vmap(loss)

    def quiet_losses(*arguments: object) -> Tensor:
        with without_vmap_warning():
            result: Tensor = losses(*arguments)
        return result

    return quiet_losses
