"""One gradient a client, at the broadcast weights: of its mean loss, or the sum of its records' own, each of bounded length.

Where the model measures a center first, a round whose broadcast has none asks for the samples themselves in a gradient's place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ldpfl.data.persons import Persons
from ldpfl.data.samples import normalise
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models import CenteredLinear
from ldpfl.models.adapters import is_of_transformers
from ldpfl.simulation.compiled_records import CompiledSums
from ldpfl.simulation.forward_side_effects import nothing_kept, nothing_written
from ldpfl.simulation.local_steps import ALIGNED, BatchSchedule
from ldpfl.simulation.local_training import LocalTask, PatchConvolutions, Trainer

_LOG = logging.getLogger(__name__)

_AT_ONCE = 1 << 19
"""Values of per-record gradients held at once: 4 MiB in float64, which a cache holds."""

_TEXTS_AT_ONCE, _ADAPTED_AT_ONCE = 16, 1 << 23
"""Records that a pretrained model is given together, and the most values that their gradients may have. Products of fewer texts are slower;
more texts take more memory than Opacus does for 32."""

_ROWS_AT_ONCE = 1 << 13
"""Rows of persons held at once, whatever number of rows a person has: a server may choose that number for a node."""


@dataclass(frozen=True)
class GradientTrainer:
    """The direction of steepest descent of each client's mean loss over its samples (FedSGD, McMahan et al. 2017), (K, d) float32.

    Clients share the weights, so none is copied for each of them. A schedule has one step, over all samples of each client.
    """

    task: LocalTask
    at_once: bool = True

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        with nothing_kept(self.task.module):
            return _descents(self.task, _own_copies(self.task, weights), *_step(schedule), at_once=self.at_once)


@dataclass(frozen=True)
class RecordGradientTrainer:
    """The sum of the directions of steepest descent of each client's records, each shortened by ``clip``: (K, d) int64 lattice points.

    Integers, so that a sum of bounded vectors is exactly that: replacing a record moves it by 2 C at most, whatever rounds.

    With ``persons``, schedules point at persons in the place of records. A person's vector is the gradient of the mean loss over those of
    its rows that count in the round, shortened once: replacing all rows of a person, by more or fewer, moves the sum by 2 C at most.

    Attributes:
        at_once: whether the model has a form for many records at once.
        confined: whether a record for which the model or the loss raises adds nothing. Otherwise the round stops, which shows a mistake
            to a simulation's user. On a node it would show the server that there is such a record.
        watch: told which records' gradients are too long, in simulations.
        left_out: told the places of records, or persons, that add nothing: that is private, and for a look at a node by its operator.
        persons: whose the rows are, where persons are protected; None where single records are.
        compiled: what sums up blocks of records in compiled code; None where steps are not compiled.
    """

    task: LocalTask
    clip: RecordClip
    at_once: bool = True
    confined: bool = False
    watch: Callable[[Tensor], None] | None = None
    left_out: Callable[[Tensor], None] | None = None
    persons: Persons | None = None
    compiled: CompiledSums | None = None

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        with nothing_kept(self.task.module):
            return self._train(weights, schedule, round_number)

    def _train(self, weights: Tensor, schedule: BatchSchedule, round_number: int) -> Tensor:
        index, mask = _step(schedule)
        sums = torch.zeros(schedule.clients, weights.numel(), dtype=torch.float64)  # of integers, exact below 2^53
        together = self.block(weights)
        at_once = self._at_once(weights) // together * together if self.compiled is None else together
        places, counts = _apart(mask, self._lanes(index, together), together)
        for start in range(0, len(places), at_once):
            some, real = places[start : start + at_once], counts[start : start + at_once].cpu()
            rows, counting = self._rows(index[some[:, 0], some[:, 1]], round_number)
            if self.compiled is not None and self.left_out is None:
                found = self.compiled.of(weights, rows, counting, real)
                sums[some[0, 0]] += found.points  # a block is one client's
                self._tell(found.norms[real])
                continue
            descents, usable = self._descents(weights, rows, counting)
            if self.left_out is not None:
                nothing = real & ~(usable & torch.linalg.vector_norm(descents.double(), dim=1).isfinite())
                self.left_out(index[some[:, 0], some[:, 1]].cpu()[nothing])
            real = real & usable
            sums.index_add_(0, some[:, 0].cpu()[real], self.clip.points(descents[real], self.watch))
        return sums.to(torch.int64)

    def _at_once(self, weights: Tensor) -> int:
        """Return how many records' gradients are held at once."""
        most = _AT_ONCE // weights.numel()
        if is_of_transformers(self.task.module):
            most = max(most, min(_TEXTS_AT_ONCE, _ADAPTED_AT_ONCE // weights.numel()))
        return max(2, most if self.persons is None else min(most, _ROWS_AT_ONCE // self.persons.most))

    def block(self, weights: Tensor) -> int:
        """Return how many places in a row are one client's, and the records of a block where steps are compiled."""
        return min(self._at_once(weights), ALIGNED)

    def _tell(self, norms: Tensor) -> None:
        """Tell who watches which gradients of these ``norms`` (R,) are too long."""
        if self.watch is not None:
            self.watch(norms[norms.isfinite()] > self.clip.norm)

    def _lanes(self, records: Tensor, together: int) -> Tensor:
        """Return the lane, below ``together``, of each of ``records`` (K, B): by its place in its client's data, or its person's name.

        A gradient's lane decides how the gradient is rounded. So the lane must not depend on which other records take part, by their
        coins, or on who the other persons are: else one record or person would move the vectors of others.
        """
        if self.persons is None:
            return (torch.arange(records.shape[1], device=records.device) % together).expand(records.shape)
        return torch.from_numpy((self.persons.lanes[records.cpu().numpy()] * together).astype(np.int64)).to(records.device)

    def _rows(self, records: Tensor, round_number: int) -> tuple[Tensor, Tensor]:
        """Return the rows (R, B) of each of ``records`` (R,), one or those of a person, and a mask (R, B) of those that count."""
        if self.persons is not None:
            return self.persons.turn(records, round_number)
        return records[:, None], torch.ones(len(records), 1, device=records.device)

    def _descents(self, weights: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the direction for each of ``rows`` (R, B), (R, d), and which of them have one (R,), on the CPU."""
        usable = torch.ones(len(rows), dtype=torch.bool)
        try:
            return self._descents_of(weights, rows, mask), usable
        except (Exception, SystemExit) as error:
            if not self.confined:
                raise
            kind = type(error).__name__
            usable = torch.tensor([self._has_descent(weights, rows[i : i + 1], mask[i : i + 1]) for i in range(len(rows))])
            if bool(usable.all()):  # not because of a record, then
                raise
        if self.left_out is None:
            _LOG.warning("some records add nothing, because the model or its loss raises %s for them", kind)
        if not bool(usable.any()):
            return torch.zeros(len(rows), weights.numel()), usable
        # All others keep their places, on which the rounding of their gradients depends.
        kept = usable.to(rows.device)
        instead = (torch.where(kept[:, None], part, part[kept][0]) for part in (rows, mask))
        return self._descents_of(weights, *instead), usable

    def _descents_of(self, weights: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        shared = _own_copies(self.task, weights)  # each time: where a record was left out, its pass may have written to them
        return _descents(self.task, shared, rows, mask, at_once=self.at_once).cpu()

    def _has_descent(self, weights: Tensor, rows: Tensor, mask: Tensor) -> bool:
        try:
            self._descents_of(weights, rows, mask)
        except (Exception, SystemExit):
            return False
        return True


def confined(trainer: Trainer) -> Trainer:
    """Return ``trainer`` as nodes use it: a record for which the model or its loss raises adds nothing, where records are protected.

    It is not compiled: compiled code takes records by blocks, and does not say which of them an error is about.
    """
    return replace(trainer, confined=True, compiled=None) if isinstance(trainer, RecordGradientTrainer) else trainer


def _apart(mask: Tensor, lanes: Tensor, together: int) -> tuple[Tensor, Tensor]:
    """Return places (N, 2) of records in ``mask`` (K, B), client by client, and which of them count (N,).

    Each client begins at a multiple of ``together``, and each record stands so far behind such a multiple as its lane says, of ``lanes``
    (K, B). What lies between are copies of some record. How a product is rounded depends on where its factors lie in memory, which is the
    same for all multiples, and must not depend on who else is there, or on how many.
    """
    places = mask.nonzero()
    clients, own = places[:, 0], lanes[places[:, 0], places[:, 1]]
    group = clients * together + own
    sizes = torch.bincount(group, minlength=len(mask) * together)
    order = group.argsort(stable=True)
    before = torch.empty_like(order)  # records of the same client and lane that come first
    before[order] = torch.arange(len(order), device=mask.device) - (sizes.cumsum(0) - sizes)[group[order]]
    rooms = sizes.view(len(mask), together).amax(dim=1) * together
    spread = places[:1].expand(int(rooms.sum()), 2).clone()
    counts = torch.zeros(len(spread), dtype=torch.bool, device=mask.device)
    at = (rooms.cumsum(0) - rooms)[clients] + before * together + own
    spread[at], counts[at] = places, True
    return spread, counts


def _step(schedule: BatchSchedule) -> tuple[Tensor, Tensor]:
    """Return the samples (K, B) of the only step, and which of them count."""
    if schedule.steps != 1:
        raise ValueError(f"a gradient is taken in one step, the schedule has {schedule.steps}")
    return schedule.index[:, 0], schedule.mask[:, 0]


def _own_copies(task: LocalTask, weights: Tensor) -> dict[str, Tensor]:
    """Return the layers of ``weights`` (d,), copied one by one: no pass can reach the broadcast, and what one writes to has a name."""
    return {name: value.clone() for name, value in task.layout.unflatten(weights.to(task.data.device)).items()}


def _descents(task: LocalTask, shared: dict[str, Tensor], index: Tensor, mask: Tensor, *, at_once: bool) -> Tensor:
    """Return minus the gradient of the mean loss over each row of ``index`` (K, B), (K, d), at the same ``shared`` weights for all."""
    twin = len(index) == 1  # a batch of one takes other kernels, whose rounding differs
    if twin:
        index, mask = index.expand(2, -1), mask.expand(2, -1)
    if isinstance(task.module, CenteredLinear) and not bool(shared["center"].any()):
        flat = _means(task, index, mask)
        return flat[:1] if twin else flat
    if not at_once:
        return torch.cat([_descent(task, shared, own, counts) for own, counts in zip(index, mask, strict=True)])[: 1 if twin else None]
    names = list(shared)
    # A view for each row, without a copy: rows share no parameter, so the gradient of the sum is each row's own.
    parameters = [shared[name].expand(len(index), *shared[name].shape).requires_grad_() for name in names]
    losses = vmap(lambda values, *batch: task.loss(dict(zip(names, values, strict=True)), *batch))
    with nothing_written(task.module, shared, by_value=False):
        with PatchConvolutions():
            total = losses(parameters, *task.batch(index), mask).sum()
        found = torch.autograd.grad(total, parameters, materialize_grads=True)  # what is measured has none
    flat = task.layout.flatten(dict(zip(names, found, strict=True))).neg_()
    return flat[:1] if twin else flat


def _descent(task: LocalTask, shared: dict[str, Tensor], index: Tensor, mask: Tensor) -> Tensor:
    """Return minus the gradient of the mean loss over one row (B,), as (1, d)."""
    parameters = {name: value.clone().requires_grad_() for name, value in shared.items()}
    inputs, targets = task.batch(index)
    with nothing_written(task.module, parameters, by_value=True):
        loss = task.loss(parameters, inputs, targets, mask)
        found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return task.layout.flatten(dict(zip(parameters, found, strict=True))).neg_()[None]


def _means(task: LocalTask, index: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's samples (K, d) in the center's place, and nothing in that of what is trained."""
    inputs = normalise(task.data.at(index).tensor, task.mean, task.std).flatten(2).float()
    means = (inputs * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)
    rows = torch.zeros(len(index), task.layout.dimension, device=means.device)
    rows[:, task.layout.slices["center"]] = means
    return rows
