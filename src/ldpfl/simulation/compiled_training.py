"""Local training with a compiled step. It is twice as fast as the eager step, and needs a C++ compiler and a long enough run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from ldpfl.data.inputs import Inputs
from ldpfl.simulation.compiling import Compiled, Work, compiled, work_of
from ldpfl.simulation.forward_side_effects import nothing_kept, nothing_written
from ldpfl.simulation.local_steps import BatchSchedule, Descent
from ldpfl.simulation.local_training import LocalTask, clipped

_LOG = logging.getLogger(__name__)

Counter = Callable[..., Sequence[Tensor]]

_SAMPLES_PER_CALL = 100
"""Number of samples in one call of a compiled step. With more samples, its intermediate results exceed a core's cache."""


@dataclass(frozen=True)
class CompiledTrainer:
    """Trains clients in blocks of a fixed size, with one call of compiled code for each step.

    A short block is padded, so that all calls have one shape. A client's result depends on its own data and its position in its block. Its
    last bits also depend on whether all clients of the schedule take only one step, and differ from :class:`VectorizedTrainer`'s.

    Attributes:
        width: number of samples of a client in a step.
        proven: whether the steps were already compiled in another process; see :class:`~ldpfl.simulation.compiling.Compiled`.
    """

    task: LocalTask
    width: int
    proven: bool = False

    @property
    def block(self) -> int:
        """Number of clients in a block: such that a step has about 100 samples, and at least 4."""
        return max(4, min(256, round(_SAMPLES_PER_CALL / self.width)))

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return (K, d) trained weights, as :class:`~ldpfl.simulation.local_training.Trainer` says."""
        places = range(0, schedule.clients, self.block)
        trained = torch.empty(len(places) * self.block, weights.numel())
        train_into = self._step_into if self.takes_one_step(schedule) else self._train_into
        with nothing_kept(self.task.module):
            for start in places:
                own = slice(start, start + self.block)
                block = _filled(BatchSchedule(schedule.index[own], schedule.mask[own]), self.block)
                train_into(trained[own], weights, block, round_number)
        return trained[: schedule.clients]

    def takes_one_step(self, schedule: BatchSchedule) -> bool:
        """Return whether each client takes a single plain gradient step, so that all gradients are taken at the broadcast weights."""
        optimiser = self.task.optimiser
        return schedule.steps == 1 and optimiser.kind == "sgd" and not optimiser.pulls and self.task.clip_norm is None

    def _step_into(self, trained: Tensor, weights: Tensor, schedule: BatchSchedule, round_number: int) -> None:
        """Write the weights of clients after one step to ``trained`` (K, d)."""
        batch, rate = self.task.data.at(schedule.index[:, 0]), torch.tensor(self.task.optimiser.rate(round_number))
        with nothing_written(self.task.module, {"the weights": weights}, by_value=False):
            self._one_step(trained, weights, rate, batch.inputs, batch.targets, schedule.mask[:, 0])

    def _train_into(self, trained: Tensor, weights: Tensor, schedule: BatchSchedule, round_number: int) -> None:
        """Write the weights of clients after all their steps to ``trained`` (K, d)."""
        task = self.task
        start = task.layout.unflatten(weights)
        parameters = [value.expand(schedule.clients, *value.shape).clone() for value in start.values()]
        descent = Descent(task.optimiser, parameters, round_number)
        for step in range(schedule.steps):
            index, mask = schedule.index[:, step], schedule.mask[:, step].contiguous()  # code is compiled for its strides, too
            with nothing_written(task.module, dict(zip(start, parameters, strict=True)), by_value=False):
                batch = task.data.at(index)
                gradients = self._gradients(parameters, batch.inputs, batch.targets, mask)
            found = gradients if task.clip_norm is None else clipped(gradients, task.clip_norm)
            descent.step(found, mask.amax(dim=1))
        trained.copy_(task.layout.flatten(dict(zip(start, parameters, strict=True))))

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task, "width": self.width, "proven": True}  # without compiled code, which another process compiles again

    def work(self, weights: Tensor, *, sent: bool = False) -> Work:
        """Return the work of a step of a block at ``weights`` (d,). ``sent`` says whether clients make no other step in a round."""
        index = torch.zeros(self.block, self.width, dtype=torch.int64)
        batch = self.task.data.at(index)
        parameters = [value.expand(self.block, *value.shape).clone() for value in self.task.layout.unflatten(weights).values()]
        gradients = self._gradient_code()
        work = work_of(lambda: gradients(parameters, batch.inputs, batch.targets, torch.ones(index.shape)))
        return replace(work, sent=self.block * weights.numel()) if sent else work

    @cached_property
    def _gradients(self) -> Callable[[list[Tensor], Inputs, Tensor, Tensor], list[Tensor]]:
        return Compiled(self._gradient_code(), proven=self.proven)

    def _gradient_code(self) -> Callable[[list[Tensor], Inputs, Tensor, Tensor], list[Tensor]]:
        """Return what computes the gradients (K, *shape) of K clients' mean losses at their parameters (K, *shape)."""
        task, loss = self.task, self._loss

        def gradients(values: list[Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> list[Tensor]:
            found: list[Tensor] = vmap(grad(loss))(values, task.normalised(inputs), targets, mask)
            return found

        return gradients

    @cached_property
    def _one_step(self) -> Callable[[Tensor, Tensor, Tensor, Inputs, Tensor, Tensor], None]:
        """Return what writes ``weights`` (d,), less ``rate`` times each client's gradient there, to the rows of ``trained`` (K, d)."""
        task, loss = self.task, self._loss

        def one_step(trained: Tensor, weights: Tensor, rate: Tensor, inputs: Inputs, targets: Tensor, mask: Tensor) -> None:
            values = list(task.layout.unflatten(weights).values())
            found: list[Tensor] = vmap(grad(loss), in_dims=(None, 0, 0, 0))(values, task.normalised(inputs), targets, mask)
            trained.copy_(weights - rate * torch.cat([gradient.flatten(1) for gradient in found], dim=1))

        return Compiled(one_step, proven=self.proven)

    def counting(self, first: Callable[..., Tensor], *, update: bool) -> Counter | None:
        """Return a function that trains a block of clients by one step and returns the fields of :class:`BitSums`.

        None if :meth:`stop_counting` was called.

        It is called with the weights (d,), the rate, inputs, targets and mask of the block, the numbers (block, 1) of its clients, the
        first 16 bits (block, d) of their random words, the ends of the ranges, two tensors (d,), and what ``first`` is told.

        Args:
            first: as in :class:`~ldpfl.mechanisms.comparing.Comparison`.
            update: whether clients send the change of their weights, and not these themselves.
        """
        if (first, update) not in self._counting:
            self._counting[first, update] = compiled(self._counter(first, update))
        return self._counting[first, update]

    def stop_counting(self, error: Exception) -> None:
        """Warn that counting was stopped by ``error``. Clients are trained and then encoded from now on, which gives the same bits."""
        # The error's text may hold private values.
        _LOG.warning(
            "bits are not counted in compiled code (%s): clients are trained and then encoded, to the same bits", type(error).__name__
        )
        self._counting.update(dict.fromkeys(self._counting))

    @cached_property
    def _counting(self) -> dict[tuple[Callable[..., Tensor], bool], Counter | None]:
        return {}

    def _counter(self, first: Callable[..., Tensor], update: bool) -> Counter:
        task, loss = self.task, self._loss
        slices = [task.layout.slices[name] for name in task.layout.names]

        def counter(
            weights: Tensor,
            rate: Tensor,
            inputs: Inputs,
            targets: Tensor,
            mask: Tensor,
            numbers: Tensor,
            drawn: Tensor,
            low: Tensor,
            high: Tensor,
            *told: Tensor,
        ) -> list[Tensor]:
            parameters = list(task.layout.unflatten(weights).values())
            found: list[Tensor] = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, task.normalised(inputs), targets, mask)
            layers = []
            # Layer by layer: as one matrix they would be written to memory.
            for own, gradient in zip(slices, found, strict=True):
                values = weights[own] - rate * gradient.flatten(1)
                values = values - weights[own] if update else values
                threshold = first(values, *(part[own] for part in told))
                layers.append(_sums(values, threshold, drawn[:, own], numbers, low[own], high[own]))
            return [torch.cat(parts) for parts in zip(*layers, strict=True)]

        return counter

    def _loss(self, values: list[Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> Tensor:
        return self.task.loss(dict(zip(self.task.layout.names, values, strict=True)), inputs, targets, mask)


class BitSums(NamedTuple):
    """Sums over a block of clients in each coordinate, float32 (d,).

    A client's bit is 1 if its random word is below the threshold of its value. The first 16 bits of both decide, unless they are equal.

    Attributes:
        ones: number of clients whose word's first bits are below the threshold's.
        outside: number of clients whose value lies outside its range.
        open: number of clients whose word's first bits equal the threshold's, so that their bit is still open.
        number: sum of the numbers of these clients. As a rule there is only one of them.
        value: sum of the values of these clients.
        spoiled: NaN if any client's value is NaN or infinite, else 0.
    """

    ones: Tensor
    outside: Tensor
    open: Tensor
    number: Tensor
    value: Tensor
    spoiled: Tensor


def _sums(values: Tensor, threshold: Tensor, drawn: Tensor, numbers: Tensor, low: Tensor, high: Tensor) -> BitSums:
    """Return the sums of ``values`` (k, n), the first bits of whose thresholds and words are ``threshold`` and ``drawn`` (k, n).

    Args:
        drawn: integers of 16 bits that are seen as bfloat16, which are the first 16 bits of a float32: the compiler has vectors of these,
            and none of short integers.
        numbers: of the clients, (k, 1).
    """
    words = (drawn.float().view(torch.int32) >> 16).float()
    is_open = words == threshold
    outside = (values < low) | (values > high)
    counted = ((words < threshold).float(), outside.float(), is_open.float(), is_open * numbers, torch.where(is_open, values, 0.0))
    return BitSums(*(part.sum(dim=0) for part in (*counted, values - values)))


def _filled(schedule: BatchSchedule, clients: int) -> BatchSchedule:
    """Return ``schedule`` padded to ``clients`` clients. The padding clients have no samples."""
    missing = clients - schedule.clients
    if not missing:
        return schedule
    index = torch.cat([schedule.index, schedule.index[:1].expand(missing, -1, -1)])
    return BatchSchedule(index, torch.cat([schedule.mask, schedule.mask.new_zeros(missing, *schedule.mask.shape[1:])]))
