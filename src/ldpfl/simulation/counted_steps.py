"""One step, one bit a weight: clients' bits are counted in the compiled code that trains them, and no value of theirs goes to memory.

The counts are those of training and then encoding, which is what blocks get that cannot be counted in this way.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.errors import LdpflError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.coins import decided
from ldpfl.mechanisms.comparing import Comparison, comparison_of
from ldpfl.mechanisms.reports.bits import BitCounts
from ldpfl.server import ServerState
from ldpfl.simulation.cohort_training import schedule_of
from ldpfl.simulation.compiled_training import BitSums, CompiledTrainer, Counter
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.forward_side_effects import nothing_kept, nothing_written
from ldpfl.simulation.local_steps import BatchSchedule
from ldpfl.util.randomness import RandomSource, draw_block

Ends = tuple[NDArray[np.float32], NDArray[np.float32]]

TOGETHER = 2048
"""Clients, or nearly, whose schedule is made at once."""


class CountedSteps:
    """Counts the bits of clients that make one compiled step each in the round after ``state``.

    Attributes:
        clients: how many clients were counted.
        ones: how many of them set each bit, (d,) int32.
        outside: how many of them have a value outside its range, (d,) int32.
    """

    def __init__(self, federation: Federation, trainer: CompiledTrainer, state: ServerState, comparison: Comparison, ends: Ends) -> None:
        self._federation, self._trainer, self._state, self._comparison = federation, trainer, state, comparison
        self._numbers = torch.arange(trainer.block, dtype=torch.float32)[:, None]
        self._rate = torch.tensor(trainer.task.optimiser.rate(state.round + 1))
        self._told = (*map(torch.from_numpy, ends), *comparison.told)
        self.clients, dimension = 0, state.ranges.dimension
        self.ones, self.outside = np.zeros(dimension, dtype=np.int32), np.zeros(dimension, dtype=np.int32)

    @classmethod
    def of(
        cls,
        federation: Federation,
        trainer: CompiledTrainer,
        state: ServerState,
        mechanism: Mechanism,
        clients: NDArray[np.int64],
        ends: Ends,
    ) -> CountedSteps | None:
        """Return what counts the bits of ``clients``; None if their steps are several, or end in anything but bits.

        None on a user's own data as well: there the random words follow from the values.

        Args:
            ends: lowest and highest value of each range, two arrays (d,).
        """
        if federation.own_data or federation.work.full_weight is not None:
            return None
        if federation.work.epochs > 1 or int(federation.samples.sizes[clients].max()) > federation.batch_width:
            return None
        comparison = comparison_of(mechanism, state.ranges)
        return None if comparison is None else cls(federation, trainer, state, comparison, ends)

    def add(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Count the bits of ``clients``, and return which of them (k,) are left because their block could not be counted.

        That is a short block, one with a value that is not finite, and one in which the first bits of two words leave the same
        coordinate open, of 7,840 weights one in a hundred.
        """
        left, block = np.ones(len(clients), dtype=np.bool_), self._trainer.block
        schedule = schedule_of(self._federation, self._state, clients)
        step = self._trainer.counting(self._comparison.first, update=self._federation.perturbed == "update")
        if step is None or not self._trainer.takes_one_step(schedule):
            return left
        source = self._federation.public_streams(self._state, clients)
        with nothing_kept(self._trainer.task.module):
            for start in range(0, len(clients) - block + 1, block):
                own = slice(start, start + block)
                drawn = draw_block(source, range(start, start + block), -(-self.ones.size // 2)).view(np.int16)[:, : self.ones.size]
                try:
                    sums = self._summed(step, BatchSchedule(schedule.index[own], schedule.mask[own]), torch.from_numpy(drawn))
                except LdpflError:
                    raise
                except Exception as error:  # of PyTorch's compiler. If the model is the cause, training stops the round
                    self._trainer.stop_counting(error)
                    break
                left[own] = not self._counted(sums, drawn, source, range(start, start + block))
        return left

    def reports(self) -> BitCounts:
        """Return the reports of the clients that were counted."""
        return BitCounts(self.ones, self.clients)

    def _counted(self, sums: BitSums, drawn: NDArray[np.int16], source: RandomSource, rows: range) -> bool:
        """Count the bits of a block, the clients in ``rows`` of the ``source``, and return whether that was possible."""
        found = sums.open.numpy()
        if bool(sums.spoiled.isnan().any()) or found.max() > 1:
            return False
        ones = sums.ones.numpy().astype(np.int32)
        place = np.flatnonzero(found)
        row = sums.number.numpy()[place].astype(np.int64)
        order = np.lexsort((place, row))
        place, row = place[order], row[order]
        exact = self._comparison.exact(sums.value.numpy()[place], place)
        ones[place] += decided(drawn[row, place], exact, source, row + rows.start)
        self.ones += ones
        self.clients += len(rows)
        self.outside += sums.outside.numpy().astype(np.int32)
        return True

    def _summed(self, step: Counter, schedule: BatchSchedule, drawn: torch.Tensor) -> BitSums:
        task, weights = self._trainer.task, self._state.weights
        batch = task.data.at(schedule.index[:, 0])
        with nothing_written(task.module, {"the weights": weights}, by_value=False):
            own = (self._rate, batch.inputs, batch.targets, schedule.mask[:, 0], self._numbers, drawn.view(torch.bfloat16))
            return BitSums(*step(weights, *own, *self._told))
