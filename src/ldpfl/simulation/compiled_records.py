"""Sum records' clipped gradients by a compiled step: one call computes gradients, norms, clipped gradients and their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from ldpfl.data.samples import Inputs
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.simulation.compiling import Compiled, Work, measured_work
from ldpfl.simulation.local_training import LocalTask
from ldpfl.util.side_effects import refuse_tensor_writes


class BlockSum(NamedTuple):
    """Result of a block of R records.

    Attributes:
        points: (d,) float64, the sum of the records' lattice points.
        norms: (R,) float64, the length of each record's gradient; 0 for a record that does not count.
        squares: (R,) float64, the squared length of each record's lattice points.
    """

    points: Tensor
    norms: Tensor
    squares: Tensor


@dataclass(frozen=True)
class CompiledSums:
    """Compiled code that sums a block of records. All blocks have the same number of records, so that it is compiled once.

    A record's lattice points depend on its own data and on its place in the block. They may differ by one in a coordinate from those that
    :meth:`~ldpfl.mechanisms.record_clipping.RecordClip.points` makes of the eager gradient, because float32 rounds differently.

    Attributes:
        compiled_before: whether the step was compiled before in another process; see :class:`~ldpfl.simulation.compiling.Compiled`.
    """

    task: LocalTask
    clip: RecordClip
    compiled_before: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy for another process lacks the compiled code. If compiling fails there, ``compiled_before`` lets it run uncompiled.
        return {"task": self.task, "clip": self.clip, "compiled_before": True}

    def block_sum(self, weights: Tensor, rows: Tensor, mask: Tensor, real: Tensor) -> BlockSum:
        """Return the sum of the clipped negative gradients of R records, as integers (lattice points).

        Rounding may make a record's clipped points longer than the clipping norm. Such a record is left out, as by
        :meth:`RecordClip.points`, and the others are summed again without it.

        Args:
            weights: (d,) weights at which gradients are taken.
            rows: (R, B) rows of each record. B is 1, unless records stand for persons.
            mask: (R, B) float32, 1 for a row that counts, else 0.
            real: (R,) bool, whether a record is real. The others pad the block.
        """
        batch = self.task.data.at(rows)
        with refuse_tensor_writes(self.task.module, {"the weights": weights}, by_value=False):
            block_sum = BlockSum(*self._summed(weights, batch.inputs, batch.targets, mask, real))
            fits = block_sum.squares <= self.clip.steps**2  # False for NaN
            if not bool(fits.all()):
                others = BlockSum(*self._summed(weights, batch.inputs, batch.targets, mask, real & fits))
                return others._replace(norms=block_sum.norms)  # the norms of all records, also of those left out
        return block_sum

    def work(self, weights: Tensor, block: int, width: int) -> Work:
        """Return the number of operations (a :class:`Work`) of a call for ``block`` records of ``width`` rows each, at ``weights`` (d,)."""
        rows = torch.zeros(block, width, dtype=torch.int64)
        batch, summed = self.task.data.at(rows), self._uncompiled_sums()
        mask, real = torch.ones(rows.shape), torch.ones(block, dtype=torch.bool)
        return measured_work(lambda: summed(weights, batch.inputs, batch.targets, mask, real))

    @cached_property
    def _summed(self) -> Callable[[Tensor, Inputs, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Compiled function that returns the fields of :class:`BlockSum`."""
        return Compiled(self._uncompiled_sums(), compiled_before=self.compiled_before)

    def _uncompiled_sums(self) -> Callable[[Tensor, Inputs, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
        """Return the function that computes the fields of :class:`BlockSum`, not compiled yet."""
        task, layout, clip_norm, scale = self.task, self.task.layout, self.clip.norm, self.clip.scale

        def loss(values: list[Tensor], inputs: Inputs, targets: Tensor, mask: Tensor) -> Tensor:
            return task.loss(dict(zip(layout.names, values, strict=True)), inputs, targets, mask)

        def summed(weights: Tensor, inputs: Inputs, targets: Tensor, mask: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return the fields of :class:`BlockSum`. A record adds its clipped negative gradient, as lattice points."""
            values = list(layout.unflatten(weights).values())
            layers = vmap(grad(loss), in_dims=(None, 0, 0, 0))(values, task.normalised(inputs), targets, mask)
            gradients = [layer.flatten(1) for layer in layers]
            # Squares of float32 values do not overflow in float64.
            norms = torch.stack([gradient.double().square().sum(dim=1) for gradient in gradients]).sum(dim=0).sqrt()
            usable = (real & norms.isfinite())[:, None]
            factors = scale / norms.clamp_min(clip_norm)[:, None]  # clips a gradient, and turns it into lattice points
            points, squares = [], []
            for gradient in gradients:
                layer_points = torch.where(usable, (gradient.double() * factors).trunc(), 0.0)
                points.append(layer_points.sum(dim=0))
                squares.append(layer_points.square().sum(dim=1))
            return -torch.cat(points), torch.where(real, norms, 0.0), torch.stack(squares).sum(dim=0)

        return summed
