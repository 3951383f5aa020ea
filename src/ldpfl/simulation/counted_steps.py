"""Count clients' bits in the compiled code that trains them, so that no value of a client is written to memory.

This works for clients that make one step and send one bit for each weight. The counts are equal to those of training and then encoding,
which is done for blocks of clients that cannot be counted in this way.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ldpfl.errors import LdpflError
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.coins import compare_remaining_bits
from ldpfl.mechanisms.comparing import Comparison, comparison_of
from ldpfl.mechanisms.reports.bits import BitCounts
from ldpfl.server import ServerState
from ldpfl.simulation.cohort_training import schedule_of
from ldpfl.simulation.compiled_training import BitSums, CompiledTrainer, Counter
from ldpfl.simulation.federation import Federation
from ldpfl.simulation.local_steps import BatchSchedule
from ldpfl.util.randomness import RandomSource, draw_block
from ldpfl.util.side_effects import refuse_state_changes, refuse_tensor_writes

Ends = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Lowest and highest value (d,) of the clipping range of each weight."""

CLIENTS_PER_SCHEDULE = 2048
"""Approximate number of clients whose batch schedule is made at once."""


class CountedSteps:
    """Counts the bits of clients that make one compiled step each in the round after ``state``.

    Attributes:
        clients: number of clients that were counted.
        ones: (d,) int32, number of clients whose bit is 1.
        outside: (d,) int32, number of clients whose value is outside its range.
    """

    def __init__(self, federation: Federation, trainer: CompiledTrainer, state: ServerState, comparison: Comparison, ends: Ends) -> None:
        self._federation, self._trainer, self._state, self._comparison = federation, trainer, state, comparison
        self._positions = torch.arange(trainer.block, dtype=torch.float32)[:, None]  # of the clients in a block
        self._rate = torch.tensor(trainer.task.optimiser.rate(state.round + 1))
        self._arguments = (*map(torch.from_numpy, ends), *comparison.arguments)  # of the compiled step, the same for all blocks
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
        """Return a counter for the bits of ``clients``, or None if their bits cannot be counted in the compiled step.

        ``ends`` are the lowest and the highest value (d,) of each weight's range.
        """
        if federation.own_data or federation.work.full_weight is not None:
            return None  # random words depend on the values, or clients are weighted by their sizes
        if federation.work.epochs > 1 or int(federation.samples.sizes[clients].max()) > federation.batch_width:
            return None  # a client makes several steps
        comparison = comparison_of(mechanism, state.ranges)  # None if the mechanism does not send one bit for each weight
        return None if comparison is None else cls(federation, trainer, state, comparison, ends)

    def add(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Count the bits of ``clients``, and return a mask (k,) of the clients whose block could not be counted.

        A block is not counted in four cases: it has too few clients; a client takes several steps; a value is not finite; or two clients'
        bits of one coordinate are still open after the first bits of their random words. The last occurs in one block of a hundred, for a
        model with 7,840 weights. After an error of the compiler no block is counted.
        """
        uncounted, block = np.ones(len(clients), dtype=np.bool_), self._trainer.block
        schedule = schedule_of(self._federation, self._state, clients)
        step = self._trainer.counting(self._comparison.first_bits, update=self._federation.perturbed == "update")
        if step is None or not self._trainer.takes_one_step(schedule):
            return uncounted
        source = self._federation.public_streams(self._state, clients)
        with refuse_state_changes(self._trainer.task.module, self._trainer.task.task.losses):
            for start in range(0, len(clients) - block + 1, block):
                rows, block_slice = range(start, start + block), slice(start, start + block)
                # Two coordinates share a random word of 32 bits: each has 16 first bits.
                first_bits = draw_block(source, rows, -(-self.ones.size // 2)).view(np.int16)[:, : self.ones.size]
                try:
                    block_schedule = BatchSchedule(schedule.index[block_slice], schedule.mask[block_slice])
                    sums = self._sums_of(step, block_schedule, torch.from_numpy(first_bits))
                except LdpflError:
                    raise
                except Exception as error:  # of PyTorch's compiler, or of the model, which then also stops the uncompiled training
                    self._trainer.stop_counting(error)
                    break
                uncounted[block_slice] = not self._count(sums, first_bits, source, rows)
        return uncounted

    def reports(self) -> BitCounts:
        """Return the reports of the clients that were counted."""
        return BitCounts(self.ones, self.clients)

    def _count(self, sums: BitSums, first_bits: NDArray[np.int16], source: RandomSource, rows: range) -> bool:
        """Count the bits of a block, the clients in ``rows`` of the ``source``, and return whether that was possible.

        Bits that the first bits of a random word leave open are decided here, from the exact threshold and more random bits. They are
        sorted by client and coordinate, since encoding draws the additional bits in that order.
        """
        open_bits = sums.open.numpy()
        if bool(sums.spoiled.isnan().any()) or open_bits.max() > 1:  # a value is not finite, or a sum hides which two bits are open
            return False
        ones = sums.ones.numpy().astype(np.int32)
        coordinates = np.flatnonzero(open_bits)
        # One bit is open in each of these coordinates, so the sums over open bits are the position and the value of its client.
        clients = sums.number.numpy()[coordinates].astype(np.int64)
        order = np.lexsort((coordinates, clients))
        coordinates, clients = coordinates[order], clients[order]
        thresholds = self._comparison.exact_thresholds(sums.value.numpy()[coordinates], coordinates)
        ones[coordinates] += compare_remaining_bits(first_bits[clients, coordinates], thresholds, source, clients + rows.start)
        self.ones += ones
        self.clients += len(rows)
        self.outside += sums.outside.numpy().astype(np.int32)
        return True

    def _sums_of(self, step: Counter, schedule: BatchSchedule, first_bits: torch.Tensor) -> BitSums:
        """Train a block of k clients by ``step``, and return its sums. ``first_bits`` (k, d) int16 are the first bits of random words."""
        task, weights = self._trainer.task, self._state.weights
        batch = task.data.at(schedule.index[:, 0])
        with refuse_tensor_writes(task.module, {"the weights": weights}, by_value=False):
            samples = (batch.inputs, batch.targets, schedule.mask[:, 0])
            return BitSums(*step(weights, self._rate, *samples, self._positions, first_bits.view(torch.bfloat16), *self._arguments))
