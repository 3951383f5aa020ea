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

from ldpfl.data.samples import Inputs
from ldpfl.simulation.compiling import Compiled, Work, compiled, measured_work
from ldpfl.simulation.local_steps import BatchSchedule, Descent
from ldpfl.simulation.local_training import LocalTask, clipped
from ldpfl.util.side_effects import refuse_state_changes, refuse_tensor_writes

_LOG = logging.getLogger(__name__)

Counter = Callable[..., Sequence[Tensor]]
"""Compiled function that trains a block of clients by one step and counts their bits; see :meth:`CompiledTrainer.counting`."""

_SAMPLES_PER_CALL = 100
"""Number of samples in one call of a compiled step. With more samples, its intermediate results exceed a core's cache."""

_WEIGHTS_PER_BLOCK = 1 << 27
"""Maximum number of weights of all clients of a block. A step holds some five arrays of this size, of 512 MiB each."""


@dataclass(frozen=True)
class CompiledTrainer:
    """Trains clients in blocks of a fixed size, with one call of compiled code for each step.

    A short block is padded, so that all calls have one shape. A client's result depends on its own data and its position in its block. Its
    last bits also depend on whether all clients of the schedule take only one step, and differ from :class:`VectorizedTrainer`'s.

    Attributes:
        width: number of samples of a client in a step.
        compiled_before: whether the steps were already compiled in another process; see :class:`~ldpfl.simulation.compiling.Compiled`.
    """

    task: LocalTask
    width: int
    compiled_before: bool = False

    @property
    def block(self) -> int:
        """Number of clients in a block, from 4 to 256: such that a step has about 100 samples, and the clients' weights fit in memory."""
        return max(4, min(256, round(_SAMPLES_PER_CALL / self.width), _WEIGHTS_PER_BLOCK // self.task.layout.dimension))

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return the weights (K, d) of the K clients of ``schedule`` after training. Every client starts from ``weights`` (d,)."""
        starts = range(0, schedule.clients, self.block)
        trained = torch.empty(len(starts) * self.block, weights.numel())
        train_into = self._step_into if self.takes_one_step(schedule) else self._train_into
        with refuse_state_changes(self.task.module, self.task.task.losses):
            for start in starts:
                rows = slice(start, start + self.block)
                block = _padded(BatchSchedule(schedule.index[rows], schedule.mask[rows]), self.block)
                train_into(trained[rows], weights, block, round_number)
        return trained[: schedule.clients]

    def takes_one_step(self, schedule: BatchSchedule) -> bool:
        """Return whether each client takes a single plain gradient step, so that all gradients are taken at the broadcast weights."""
        # Momentum does not matter, since it is 0 before the first step.
        optimiser = self.task.optimiser
        return schedule.steps == 1 and optimiser.kind == "sgd" and not optimiser.adds_to_gradient and self.task.clip_norm is None

    def _step_into(self, trained: Tensor, weights: Tensor, schedule: BatchSchedule, round_number: int) -> None:
        """Write the weights of clients after one step to ``trained`` (K, d)."""
        batch, rate = self.task.data.at(schedule.index[:, 0]), torch.tensor(self.task.optimiser.rate(round_number))
        with refuse_tensor_writes(self.task.module, {"the weights": weights}, by_value=False):
            self._one_step(trained, weights, rate, batch.inputs, batch.targets, schedule.mask[:, 0])

    def _train_into(self, trained: Tensor, weights: Tensor, schedule: BatchSchedule, round_number: int) -> None:
        """Write the weights of clients after all their steps to ``trained`` (K, d)."""
        task = self.task
        start = task.layout.unflatten(weights)
        parameters = [value.expand(schedule.clients, *value.shape).clone() for value in start.values()]
        descent = Descent(task.optimiser, parameters, round_number)
        for step in range(schedule.steps):
            index, mask = schedule.index[:, step], schedule.mask[:, step].contiguous()  # code is compiled for fixed strides, too
            with refuse_tensor_writes(task.module, dict(zip(start, parameters, strict=True)), by_value=False):
                batch = task.data.at(index)
                gradients = self._gradients(parameters, batch.inputs, batch.targets, mask)
            clipped_gradients = gradients if task.clip_norm is None else clipped(gradients, task.clip_norm)
            descent.step(clipped_gradients, active=mask.amax(dim=1))
        trained.copy_(task.layout.flatten(dict(zip(start, parameters, strict=True))))

    def __getstate__(self) -> dict[str, Any]:
        # A copy for another process lacks the compiled code. If compiling fails there, ``compiled_before`` lets it run uncompiled.
        return {"task": self.task, "width": self.width, "compiled_before": True}

    def work(self, weights: Tensor, *, sent: bool = False) -> Work:
        """Return the number of operations (a :class:`Work`) of a step of a block. ``sent`` says whether clients send the step's result."""
        index = torch.zeros(self.block, self.width, dtype=torch.int64)
        batch = self.task.data.at(index)
        parameters = [value.expand(self.block, *value.shape).clone() for value in self.task.layout.unflatten(weights).values()]
        gradients = self._gradient_code()
        work = measured_work(lambda: gradients(parameters, batch.inputs, batch.targets, torch.ones(index.shape)))
        return replace(work, sent=self.block * weights.numel()) if sent else work

    @cached_property
    def _gradients(self) -> Callable[[list[Tensor], Inputs, Tensor, Tensor], list[Tensor]]:
        """Compiled function for the gradients of a block of clients, see :meth:`_gradient_code`."""
        return Compiled(self._gradient_code(), compiled_before=self.compiled_before)

    def _gradient_code(self) -> Callable[[list[Tensor], Inputs, Tensor, Tensor], list[Tensor]]:
        """Return the function for the gradients (K, *shape) of K clients' mean losses at their parameters (K, *shape), not compiled yet."""
        task, loss = self.task, self._loss

        def gradients(values: list[Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> list[Tensor]:
            result: list[Tensor] = vmap(grad(loss))(values, task.normalised(inputs), targets, mask)
            return result

        return gradients

    @cached_property
    def _one_step(self) -> Callable[[Tensor, Tensor, Tensor, Inputs, Tensor, Tensor], None]:
        """Compiled function that writes ``weights`` (d,) minus ``rate`` times each client's gradient to its row of ``trained`` (K, d)."""
        task, loss = self.task, self._loss

        def one_step(trained: Tensor, weights: Tensor, rate: Tensor, inputs: Inputs, targets: Tensor, mask: Tensor) -> None:
            values = list(task.layout.unflatten(weights).values())
            gradients: list[Tensor] = vmap(grad(loss), in_dims=(None, 0, 0, 0))(values, task.normalised(inputs), targets, mask)
            trained.copy_(weights - rate * torch.cat([gradient.flatten(1) for gradient in gradients], dim=1))

        return Compiled(one_step, compiled_before=self.compiled_before)

    def counting(self, threshold_of: Callable[..., Tensor], *, update: bool) -> Counter | None:
        """Return a compiled function that trains a block of clients by one step and counts the bits that they would send.

        The function returns the fields of :class:`BitSums`. Its arguments are the weights (d,), the learning rate, the block's inputs,
        targets and mask, the positions (block, 1) of its clients, the first 16 bits (block, d) of their random words, the lowest and the
        highest values (d,) of the ranges, and what ``threshold_of`` takes besides the values. The result is None after
        :meth:`stop_counting`.

        Args:
            threshold_of: computes the first 16 bits of the values' thresholds; see :class:`~ldpfl.mechanisms.comparing.Comparison`.
            update: whether clients send the change of their weights instead of the weights.
        """
        if (threshold_of, update) not in self._counting:
            self._counting[threshold_of, update] = compiled(self._counting_code(threshold_of, update))
        return self._counting[threshold_of, update]

    def stop_counting(self, error: Exception) -> None:
        """Stop counting after ``error``, with a warning. From now on clients are trained and then encoded, which gives the same bits."""
        # The error's text may hold private values.
        _LOG.warning(
            "compiled code that counts bits failed (%s): from now on clients are trained and then encoded, which gives the same bits",
            type(error).__name__,
        )
        for arguments in self._counting:
            self._counting[arguments] = None

    @cached_property
    def _counting(self) -> dict[tuple[Callable[..., Tensor], bool], Counter | None]:
        """Compiled functions by the arguments of :meth:`counting`; None after :meth:`stop_counting`."""
        return {}

    def _counting_code(self, threshold_of: Callable[..., Tensor], update: bool) -> Counter:
        """Return the function that :meth:`counting` compiles; see there for all arguments.

        It trains a block of clients by one step and computes each client's values: its new weights, or with ``update`` their change. From a
        value, ``threshold_of`` computes the first 16 bits of a threshold. The client's bit is 1 if its random word is below the threshold.
        """
        task, loss = self.task, self._loss
        slices = [task.layout.slices[name] for name in task.layout.names]

        def counter(
            weights: Tensor,
            rate: Tensor,
            inputs: Inputs,
            targets: Tensor,
            mask: Tensor,
            positions: Tensor,
            first_bits: Tensor,
            low: Tensor,
            high: Tensor,
            *threshold_arguments: Tensor,
        ) -> list[Tensor]:
            """Return the fields of :class:`BitSums` for a block of clients; the arguments are those that :meth:`counting` lists."""
            parameters = list(task.layout.unflatten(weights).values())
            gradients: list[Tensor] = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, task.normalised(inputs), targets, mask)
            layers = []
            # Layer by layer, because a matrix of all values would have to be written to memory and read again.
            for layer, gradient in zip(slices, gradients, strict=True):
                values = weights[layer] - rate * gradient.flatten(1)
                values = values - weights[layer] if update else values
                threshold = threshold_of(values, *(argument[layer] for argument in threshold_arguments))
                layers.append(_bit_sums(values, threshold, first_bits[:, layer], positions, low[layer], high[layer]))
            return [torch.cat(parts) for parts in zip(*layers, strict=True)]

        return counter

    def _loss(self, values: list[Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> Tensor:
        """Return a client's mean loss at its parameters, ``values`` in the order of the layout."""
        return self.task.loss(dict(zip(self.task.layout.names, values, strict=True)), inputs, targets, mask)


class BitSums(NamedTuple):
    """Sums over a block of clients in each coordinate, float32 (d,).

    A client's bit is 1 if its random word is below the threshold of its value. The first 16 bits of both decide, unless they are equal.

    Attributes:
        ones: number of clients whose word's first bits are below the threshold's.
        outside: number of clients whose value lies outside its range.
        open: number of clients whose word's first bits equal the threshold's, so that their bit is still open.
        number: sum of the positions in the block of the clients whose bit is open. Usually only one is, and the sum is its position.
        value: sum of the values of the clients whose bit is open.
        spoiled: NaN if any client's value is NaN or infinite, else 0.
    """

    ones: Tensor
    outside: Tensor
    open: Tensor
    number: Tensor
    value: Tensor
    spoiled: Tensor


def _bit_sums(values: Tensor, threshold: Tensor, first_bits: Tensor, positions: Tensor, low: Tensor, high: Tensor) -> BitSums:
    """Return the sums over k clients for a layer of n weights.

    Args:
        values: (k, n) values of the clients.
        threshold: (k, n) first 16 bits of the values' thresholds.
        first_bits: (k, n) first bits of the random words, as integers of 16 bits that are seen as bfloat16. A bfloat16 is the upper half of
            a float32. The compiler uses vector instructions for these, and none for integers of 16 bits.
        positions: (k, 1) positions of the clients in their block.
        low, high: (n,) ends of the ranges.
    """
    words = (first_bits.float().view(torch.int32) >> 16).float()  # the 16 bits as a whole number
    is_open = words == threshold  # a bit is 1 if its word is below the threshold, and open if only the first bits are equal
    outside = (values < low) | (values > high)
    terms = ((words < threshold).float(), outside.float(), is_open.float(), is_open * positions, torch.where(is_open, values, 0.0))
    spoiled = values - values  # NaN for NaN and infinity, else 0
    return BitSums(*(term.sum(dim=0) for term in (*terms, spoiled)))  # in the order of the fields


def _padded(schedule: BatchSchedule, clients: int) -> BatchSchedule:
    """Return ``schedule`` padded to ``clients`` clients. The padding clients have no samples."""
    missing = clients - schedule.clients
    if not missing:
        return schedule
    index = torch.cat([schedule.index, schedule.index[:1].expand(missing, -1, -1)])
    return BatchSchedule(index, torch.cat([schedule.mask, schedule.mask.new_zeros(missing, *schedule.mask.shape[1:])]))
