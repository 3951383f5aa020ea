"""Estimate how long a simulated run takes and how much memory it needs, from a few of its steps on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ldpfl.data.samples import Division, tensors_by_name
from ldpfl.experiments.config import RunConfig
from ldpfl.mechanisms import payload_bits
from ldpfl.mechanisms.base import record_rate_of
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.cohort_training import bytes_in_training, bytes_of_sum, chunk_size_for
from ldpfl.simulation.federation import LocalWork
from ldpfl.simulation.gradients import RecordGradientTrainer
from ldpfl.simulation.local_steps import ALIGNED, BatchSchedule
from ldpfl.simulation.local_training import AT_ONCE, LocalTask, LoopTrainer, evaluated
from ldpfl.simulation.personal_layers import PersonalTrainer
from ldpfl.simulation.shares import one_thread
from ldpfl.simulation.workers import cores
from ldpfl.util.number_format import counted, format_duration, size_text

_QUICK_S = 4.0
"""A measurement that takes less is repeated with more samples, up to all of a client's."""
_MOST_RECORDS = 256
"""Number of records of a client in the first measurement, if a step takes all of them."""
_MOST_ROUNDS = 1000
"""Number of rounds whose cohorts are counted. Others are taken to be like them on average."""
_DEVICE_RATE = 1e13
"""Operations a second of the device whose time is stated as an example."""


@dataclass(frozen=True)
class TrainingCost:
    """Estimated time and memory of a simulated run, without its noise-free baseline.

    Attributes:
        rounds: number of rounds.
        clients: number of clients of a round, on average.
        weights: number of weights that a client sends.
        samples: number of samples that all clients train on in the run, counted with repetition.
        evaluated: number of samples that the run evaluates its model on, counted with repetition.
        operations: number of floating-point operations of the run: products and sums of its matrix products and convolutions.
        device: device on which steps were timed.
        processes: number of processes of such a run on this machine.
        seconds: time of the run on this machine.
        data_bytes: size of the samples.
        client_bytes: size of what a client keeps while it trains: weights, gradients, and tensors for the backward pass.
        together: number of clients that a process trains at once, by the free memory here.
        report_bytes: size of a round's reports; of a single one if they are added up.
    """

    rounds: int
    clients: int
    weights: int
    samples: int
    evaluated: int
    operations: float
    device: str
    processes: int
    seconds: float
    data_bytes: int
    client_bytes: int
    together: int
    report_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield name and value of each figure."""
        yield "rounds", f"{self.rounds:,}, of {counted(self.clients, 'client')} each; a client sends {counted(self.weights, 'weight')}"
        yield "samples of the run", f"{self.samples:,} to train on, {self.evaluated:,} to evaluate on"
        where = f"{counted(self.processes, 'process', 'processes')} on the device {self.device}"
        yield "time on this machine", f"{format_duration(self.seconds)}, by {where}"
        on_device = format_duration(self.operations / _DEVICE_RATE)
        yield "operations", f"{self.operations:.2g}: {on_device} on a device that does {_DEVICE_RATE:.0e} a second"
        yield "memory for data", size_text(self.data_bytes)
        yield "memory for training", f"{size_text(self.client_bytes)} for each client; a process trains {self.together:,} at once here"
        yield "memory for reports", size_text(self.report_bytes)
        yield "figures", "from a few steps here, where other work slows them down; without a noise-free baseline"


def training_cost(config: RunConfig, federation: Federation, start: Checkpoint) -> TrainingCost:
    """Estimate the cost of the run of ``config``, from its federation and the state before its first round.

    A round of a few clients with few samples is run, and its time is multiplied. Nothing of it is kept.

    Raises:
        PrivacyError: values of a client cannot be randomised.
    """
    samples, rounds = federation.samples, config.training.rounds
    cohort = federation.cohort(1)
    cohort = cohort if cohort.size else np.arange(1)  # clients that decide for themselves may all stay away
    with one_thread(federation.device):
        together = federation.chunk_size or chunk_size_for(federation, start.state, cohort)
        client_s, unit_s = _training_seconds(federation, start, cohort[:together])
        task, weights = _whole_model(federation, start.state.weights)
        evaluation_s = _evaluation_seconds(federation, task, weights)
        train_operations, evaluation_operations = _operations_per_sample(task, weights)
        client_bytes = _bytes_of_client(federation, task, weights)
    epochs = 1 if federation.perturbed == "gradient" else federation.work.epochs
    cohorts = [federation.cohort(number) for number in range(1, min(rounds, _MOST_ROUNDS) + 1)]
    clients = float(np.mean([len(members) for members in cohorts]))
    # Records, or persons if they are protected, on which a round trains.
    units = float(np.mean([samples.sizes[members].sum() for members in cohorts])) * epochs * record_rate_of(federation.mechanism)
    persons = federation.persons
    rows_per_unit = 1.0 if persons is None else float(np.minimum(persons.counts, persons.most).mean())
    evaluated_samples = len(federation.evaluation.samples)
    # A worker process takes at least ALIGNED clients at once, so that rounding does not depend on the number of processes.
    processes = max(1, min(cores(), ceil(clients / ALIGNED))) if federation.device.type == "cpu" else 1
    reports = 1 if federation.mechanism.properties.adds_up else ceil(clients)
    return TrainingCost(
        rounds=rounds,
        clients=round(clients),
        weights=start.state.weights.numel(),
        samples=round(rounds * units * rows_per_unit),
        evaluated=rounds * evaluated_samples,
        operations=rounds * (units * rows_per_unit * train_operations + evaluated_samples * evaluation_operations),
        device=str(federation.device),
        processes=processes,
        seconds=rounds * (client_s * clients + unit_s * units + evaluation_s) / processes,
        data_bytes=sum(_size(part) for part in (*tensors_by_name(task.data.inputs).values(), task.data.targets)),
        client_bytes=client_bytes,
        together=max(1, min(together, round(clients))),
        report_bytes=reports * ((payload_bits(federation.mechanism, start.state.ranges) + 7) // 8),  # whole bytes of a report
    )


def _whole_model(federation: Federation, weights: Tensor) -> tuple[LocalTask, Tensor]:
    """Return the task and weights of the whole model: the shared ``weights`` (d,), with initial personal layers if it has any."""
    trainer = federation.trainer
    if isinstance(trainer, PersonalTrainer):
        return trainer.whole.task, trainer.whole_models(weights, trainer.initial[None])[0]
    return federation.task, weights


def _training_seconds(federation: Federation, start: Checkpoint, clients: NDArray[np.int64]) -> tuple[float, float]:
    """Return how many seconds a round takes for each client, and for each unit (a sample, or a protected person) that it trains on.

    Both follow from rounds of ``clients`` (k,) with few and with many units: a round takes a time for each client, plus one for each unit.
    """
    largest = int(federation.samples.sizes[clients].max())
    rate = record_rate_of(federation.mechanism)

    def measured(most: int) -> tuple[float, float]:
        """Return the number of units, and the seconds, of a round in which each client has at most ``most`` units."""
        cut = Division.of([federation.samples[int(client)][:most] for client in clients])
        small = replace(
            federation,
            samples=cut,
            chunk_size=len(clients),
            participation=replace(federation.participation, fraction=1.0, self_sampling=None, once_over=None),
            work=LocalWork(1, federation.work.batch_size, federation.work.full_weight),
            evaluation=replace(federation.evaluation, samples=federation.evaluation.samples.take(slice(0, 0)), clients=None),
            judged=None,
            stopping=None,
        )
        personal = None if start.personal is None else start.personal[torch.from_numpy(clients)]
        return int(cut.sizes.sum()) * rate, _seconds(lambda: next(simulate(small, replace(start, personal=personal), 1)))

    few = min(largest, federation.batch_width, _MOST_RECORDS)
    measured(few)  # the first round prepares what later ones use again
    few_units, few_s = measured(few)
    many, many_units, many_s = few, few_units, few_s
    while many < largest and many_s < _QUICK_S:
        many = min(largest, 4 * many)
        many_units, many_s = measured(many)
    if many_s <= few_s:  # units cost too little to be seen beside the rest of a round
        return many_s / len(clients), 0.0
    unit_s = (many_s - few_s) / (many_units - few_units)
    return max(0.0, few_s - unit_s * few_units) / len(clients), unit_s


def _evaluation_seconds(federation: Federation, task: LocalTask, weights: Tensor) -> float:
    """Return the seconds of the evaluation after a round, by the first batch of its samples; ``weights`` are those of the whole model."""
    samples = federation.evaluation.samples
    some = samples.take(slice(0, AT_ONCE))
    seconds = min(_seconds(lambda: list(evaluated(task, weights, some))) for _ in range(2))
    return seconds * len(samples) / max(1, len(some))


def _operations_per_sample(task: LocalTask, weights: Tensor) -> tuple[int, int]:
    """Return how many floating-point operations it takes to train on a sample, and to evaluate one, as PyTorch counts them."""
    with FlopCounterMode(display=False) as training:
        LoopTrainer(task).train(weights, _first_samples(task, 1))
    with FlopCounterMode(display=False) as evaluation:
        list(evaluated(task, weights, task.data.take(slice(0, 1))))
    return training.get_total_flops(), evaluation.get_total_flops()


def _bytes_of_client(federation: Federation, task: LocalTask, weights: Tensor) -> int:
    """Return the size of what a client keeps while it trains: copies of its weights, and tensors for the backward pass of a batch."""
    if isinstance(federation.trainer, RecordGradientTrainer):  # it goes through its records in small blocks
        return bytes_of_sum(weights)
    return int(bytes_in_training(LoopTrainer(task), weights, _first_samples(task, federation.batch_width)))


def _first_samples(task: LocalTask, count: int) -> BatchSchedule:
    """Return a schedule of one client and one step, over the first ``count`` samples, or over all if there are fewer."""
    index = torch.arange(min(count, len(task.data))).expand(1, 1, -1)
    return BatchSchedule(index, torch.ones(index.shape)).to(task.data.device)


def _seconds(work: Callable[[], object]) -> float:
    """Return how many seconds ``work`` takes. Its result must be on the CPU, so that a GPU has finished."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _size(tensor: Tensor) -> int:
    """Return the size of ``tensor`` in bytes."""
    return tensor.numel() * tensor.element_size()
