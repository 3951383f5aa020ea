"""Compute one gradient for each client at the broadcast weights: of its mean loss, or the sum of its clipped per-record gradients.

A model that measures its center takes the samples themselves instead of gradients in the round whose broadcast has no center yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ldpfl.data.persons import Persons
from ldpfl.data.samples import normalise
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models import CenteredLinear
from ldpfl.models.adapters import is_of_transformers
from ldpfl.simulation.compiled_records import CompiledSums
from ldpfl.simulation.local_steps import ALIGNED, BatchSchedule, for_many_clients_at_once
from ldpfl.simulation.local_training import LocalTask, ManyAtOnce, Trainer
from ldpfl.util.side_effects import refuse_state_changes, refuse_tensor_writes

_LOG = logging.getLogger(__name__)

_MAX_GRADIENT_VALUES = 1 << 19
"""Maximum number of per-record gradient values in memory: 4 MiB in float64, which fits a processor's cache."""

_TEXTS, _MAX_TEXT_GRADIENT_VALUES = 16, 1 << 23
"""Number of texts that a pretrained model processes together, and the maximum number of their gradients' values (64 MiB in float64).

Fewer texts are slower. More texts take more memory than Opacus (a library for DP-SGD) does for 32."""

_MAX_ROWS = 1 << 13
"""Maximum number of rows of persons in memory. A server may choose the number of rows of a person, so it must not decide on the memory."""


@dataclass(frozen=True)
class GradientTrainer:
    """Computes the negative gradient of each client's mean loss over its samples (FedSGD, McMahan et al. 2017), (K, d) float32.

    All clients share one copy of the weights. A schedule has one step, over all samples of each client.

    Attributes:
        at_once: whether the model can process many clients at once.
    """

    task: LocalTask
    at_once: bool = True

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        with refuse_state_changes(self.task.module, self.task.task.losses):
            return _negative_gradients(self.task, _weight_copies(self.task, weights), *_only_step(schedule), at_once=self.at_once)


@dataclass(frozen=True)
class RecordGradientTrainer:
    """Computes the sum of each client's negative per-record gradients, each clipped by ``clip``: (K, d) int64 lattice points.

    With adaptive clipping, a sum has one more number: the number of gradients that were not clipped minus that of clipped ones.

    The values are integers, so the sums are exact: replacing a record moves a sum by at most 2 C, without any rounding error.

    With ``persons``, schedules hold persons instead of records. A person's vector is the gradient of the mean loss over its rows that
    count in the round, clipped once. So replacing all rows of a person, by more or fewer rows, moves the sum by at most 2 C.

    Attributes:
        at_once: whether the model can process many records at once.
        confined: whether a record for which the model or the loss raises contributes nothing. Otherwise the round stops. That shows a
            mistake to the user of a simulation, but on a node it would reveal to the server that such a record exists.
        watch: called with a mask of the records whose gradients were clipped, in simulations.
        left_out: called with the indices of records, or persons, that contribute nothing. They are private, for the node's operator only.
        persons: which rows belong to which person, if persons are protected; None if single records are.
        compiled: compiled code that sums blocks of records; None if steps are not compiled.
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
        with refuse_state_changes(self.task.module, self.task.task.losses):
            return self._train(weights, schedule, round_number)

    def in_round(self, ranges: LayerRanges) -> RecordGradientTrainer:
        """Return the trainer that clips as in the round with these public ``ranges``."""
        return replace(self, clip=self.clip.in_round(ranges))

    def _train(self, weights: Tensor, schedule: BatchSchedule, round_number: int) -> Tensor:
        """Return each client's sum (K, d) of clipped negative gradients, as integers (lattice points), block by block."""
        index, mask = _only_step(schedule)
        sums = torch.zeros(schedule.clients, self.clip.width(weights.numel()), dtype=torch.float64)  # sums of integers, exact below 2^53
        lanes = self.block(weights)  # a record's lane, its position in a block, decides how its gradient is rounded
        records_at_once = self._max_records(weights) // lanes * lanes if self.compiled is None else lanes
        ordered, is_real = _ordered_by_lane(mask, self._lanes(index, lanes), lanes)  # (N, 2) client and position of each record
        for start in range(0, len(ordered), records_at_once):
            places, real = ordered[start : start + records_at_once], is_real[start : start + records_at_once].cpu()
            clients, positions = places[:, 0], places[:, 1]
            records = index[clients, positions]
            rows, counted = self._rows(records, round_number)
            if self.compiled is not None and self.left_out is None:  # compiled code cannot tell which records it leaves out
                block_sum = self.compiled.block_sum(weights, rows, counted, real)
                sums[clients[0]] += block_sum.points  # all records of a block belong to one client
                self._report_clipped_records(block_sum.norms[real])
                continue
            descents, usable = self._negative_gradients_and_usable(weights, rows, counted)
            if self.left_out is not None:
                is_left_out = real & ~(usable & torch.linalg.vector_norm(descents.double(), dim=1).isfinite())
                self.left_out(records.cpu()[is_left_out])
            added = real & usable
            sums.index_add_(0, clients.cpu()[added], self.clip.points(descents[added], self.watch))
        return sums.to(torch.int64)

    def _max_records(self, weights: Tensor) -> int:
        """Return the maximum number of records whose gradients are in memory at once, at least 2."""
        most = _MAX_GRADIENT_VALUES // weights.numel()
        if is_of_transformers(self.task.module):
            most = max(most, min(_TEXTS, _MAX_TEXT_GRADIENT_VALUES // weights.numel()))
        return max(2, most if self.persons is None else min(most, _MAX_ROWS // self.persons.most))

    def block(self, weights: Tensor) -> int:
        """Return the number of records in a block. All records of a block belong to one client; a compiled step processes one block."""
        return min(self._max_records(weights), ALIGNED)

    def _report_clipped_records(self, norms: Tensor) -> None:
        """Call ``watch`` with a mask of the gradients, of the given ``norms`` (R,), that are clipped."""
        if self.watch is not None:
            self.watch(norms[norms.isfinite()] > self.clip.norm)

    def _lanes(self, records: Tensor, lanes: int) -> Tensor:
        """Return the lane, below ``lanes``, of each of ``records`` (K, B): by its position in its client's data, or its person's name.

        A lane is a gradient's position in a block of the computation, and decides how the gradient is rounded. So it must not depend on
        which other records or persons take part. Otherwise one record or person would change the vectors of others.
        """
        if self.persons is None:
            return (torch.arange(records.shape[1], device=records.device) % lanes).expand(records.shape)
        # A person's lane is stored as a share of all lanes in [0, 1).
        return torch.from_numpy((self.persons.lanes[records.cpu().numpy()] * lanes).astype(np.int64)).to(records.device)

    def _rows(self, records: Tensor, round_number: int) -> tuple[Tensor, Tensor]:
        """Return the rows (R, B) of each of ``records`` (R,), and a mask (R, B) of the rows that count. A person has several rows."""
        if self.persons is not None:
            return self.persons.rows_in_round(records, round_number)
        return records[:, None], torch.ones(len(records), 1, device=records.device)

    def _negative_gradients_and_usable(self, weights: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the negative gradient (R, d) of each record with ``rows`` (R, B), and a mask (R,) of the records that raise no error."""
        usable = torch.ones(len(rows), dtype=torch.bool)
        try:
            return self._negative_gradients_of(weights, rows, mask), usable
        except (Exception, SystemExit) as error:  # a user's model may also exit
            if not self.confined:  # the user of a simulation should see the error
                raise
            kind = type(error).__name__
            usable = torch.tensor([self._runs_without_error(weights, rows[i : i + 1], mask[i : i + 1]) for i in range(len(rows))])
            if bool(usable.all()):  # no single record causes the error
                raise
        if self.left_out is None:  # else the operator is told which records they are
            _LOG.warning(
                "some records add nothing to training, because the model or its loss raises %s for them: make both accept every record",
                kind,
            )
        if not bool(usable.any()):
            return torch.zeros(len(rows), weights.numel()), usable
        # A usable record replaces each failing one, so that the others keep their lanes, on which their rounding depends.
        on_device = usable.to(rows.device)
        replaced = (torch.where(on_device[:, None], part, part[on_device][0]) for part in (rows, mask))
        return self._negative_gradients_of(weights, *replaced), usable

    def _negative_gradients_of(self, weights: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return the negative gradient (R, d) of each record with ``rows`` (R, B), or raise if any record fails."""
        shared = _weight_copies(self.task, weights)  # new copies each time, since a failing record's pass may have written to them
        return _negative_gradients(self.task, shared, rows, mask, at_once=self.at_once).cpu()

    def _runs_without_error(self, weights: Tensor, rows: Tensor, mask: Tensor) -> bool:
        """Whether the gradients of these records can be computed: neither the model nor the loss raises."""
        try:
            self._negative_gradients_of(weights, rows, mask)
        except (Exception, SystemExit):
            return False
        return True


def confined(trainer: Trainer) -> Trainer:
    """Return ``trainer`` as nodes use it: if records are protected, a record for which the model or its loss raises contributes nothing.

    The result is not compiled, since compiled code processes blocks of records and cannot say which record caused an error.
    """
    return replace(trainer, confined=True, compiled=None) if isinstance(trainer, RecordGradientTrainer) else trainer


def _ordered_by_lane(mask: Tensor, lane_of: Tensor, lanes: int) -> tuple[Tensor, Tensor]:
    """Order the records in ``mask`` (K, B) so that each stands in its lane. Return their indices (N, 2), and a mask (N,) of real records.

    A record's position modulo ``lanes`` is its lane, ``lane_of`` (K, B). Each client starts at a multiple of ``lanes``. Gaps are filled
    with copies of some record, which the returned mask leaves out.

    A product's rounding depends on the position modulo ``lanes``, because of memory alignment. With fixed lanes, a record's rounding does
    not depend on which or how many other records take part.
    """
    places = mask.nonzero()  # (client, position) of each record
    clients, record_lanes = places[:, 0], lane_of[places[:, 0], places[:, 1]]
    group = clients * lanes + record_lanes  # records of one client and lane
    group_sizes = torch.bincount(group, minlength=len(mask) * lanes)
    order = group.argsort(stable=True)
    before = torch.empty_like(order)  # number of earlier records of the same client and lane
    before[order] = torch.arange(len(order), device=mask.device) - (group_sizes.cumsum(0) - group_sizes)[group[order]]
    lengths = group_sizes.view(len(mask), lanes).amax(dim=1) * lanes  # positions of each client, padding included
    ordered = places[:1].expand(int(lengths.sum()), 2).clone()
    is_real = torch.zeros(len(ordered), dtype=torch.bool, device=mask.device)
    positions = (lengths.cumsum(0) - lengths)[clients] + before * lanes + record_lanes
    ordered[positions], is_real[positions] = places, True
    return ordered, is_real


def _only_step(schedule: BatchSchedule) -> tuple[Tensor, Tensor]:
    """Return the samples (K, B) of the schedule's only step, and a mask (K, B) of those that count."""
    if schedule.steps != 1:
        raise ValueError(f"a gradient is taken in one step, but the schedule of batches has {schedule.steps}: give a schedule of one step")
    return schedule.index[:, 0], schedule.mask[:, 0]


def _weight_copies(task: LocalTask, weights: Tensor) -> dict[str, Tensor]:
    """Return a copy of each layer of ``weights`` (d,), so that no forward pass can change the broadcast weights."""
    return {name: value.clone() for name, value in task.layout.unflatten(weights.to(task.data.device)).items()}


def _negative_gradients(task: LocalTask, shared: dict[str, Tensor], index: Tensor, mask: Tensor, *, at_once: bool) -> Tensor:
    """Return (K, d): for each row of samples in ``index`` (K, B), minus the gradient of their mean loss at the ``shared`` weights.

    Only samples that ``mask`` (K, B) marks count. ``at_once`` says whether the model can process all rows together.
    """
    if len(index) == 1:  # taken twice, because a batch of one uses other kernels, which round differently
        return _negative_gradients_of_rows(task, shared, index.expand(2, -1), mask.expand(2, -1), at_once=at_once)[:1]
    return _negative_gradients_of_rows(task, shared, index, mask, at_once=at_once)


def _negative_gradients_of_rows(task: LocalTask, shared: dict[str, Tensor], index: Tensor, mask: Tensor, *, at_once: bool) -> Tensor:
    """Return what :func:`_negative_gradients` returns, for two or more rows."""
    if isinstance(task.module, CenteredLinear) and not bool(shared["center"].any()):  # the round that measures the center
        return _center_means(task, index, mask)
    if not at_once:  # the model cannot process all rows together
        return torch.cat([_negative_gradient_of_row(task, shared, *row) for row in zip(index, mask, strict=True)])
    names = list(shared)
    # Each row has its own view of the parameters, without a copy. So the gradient of the sum holds each row's own gradient.
    parameters = [shared[name].expand(len(index), *shared[name].shape).requires_grad_() for name in names]
    losses = for_many_clients_at_once(lambda values, *batch: task.loss(dict(zip(names, values, strict=True)), *batch))
    with refuse_tensor_writes(task.module, shared, by_value=False), ManyAtOnce():
        total = losses(parameters, *task.batch(index), mask).sum()
        # Weights without a gradient, such as a measured center, get zeros.
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
    return task.layout.flatten(dict(zip(names, gradients, strict=True))).neg_()


def _negative_gradient_of_row(task: LocalTask, shared: dict[str, Tensor], index: Tensor, mask: Tensor) -> Tensor:
    """Return minus the gradient of the mean loss over the samples ``index`` (B,), as (1, d), by copies of the model and the loss."""
    parameters = {name: value.clone().requires_grad_() for name, value in shared.items()}
    inputs, targets = task.batch(index)
    with task.isolated() as own, refuse_tensor_writes(own.module, parameters, by_value=True):
        loss = own.loss(parameters, inputs, targets, mask)
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return task.layout.flatten(dict(zip(parameters, gradients, strict=True))).neg_()[None]


def _center_means(task: LocalTask, index: Tensor, mask: Tensor) -> Tensor:
    """Return vectors (K, d) for the round that measures the samples' center: each row's mean sample there, and 0 at all trained weights."""
    inputs = normalise(task.data.at(index).tensor, task.mean, task.std).flatten(2).float()
    means = (inputs * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)
    rows = torch.zeros(len(index), task.layout.dimension, device=means.device)
    rows[:, task.layout.slices["center"]] = means
    return rows
