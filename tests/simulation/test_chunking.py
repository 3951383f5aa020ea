"""Chunks cover the cohort once, and the probe stays within memory and cohort."""

from __future__ import annotations

import time
from collections import Counter
from math import ceil
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from ldpfl import ParameterLayout, models
from ldpfl.data import Dataset
from ldpfl.simulation import BatchSchedule, LocalTask, VectorizedTrainer, batch_schedule
from ldpfl.simulation.cohort_training import choose_chunk_size
from ldpfl.simulation.local_steps import LocalOptimiser, split_evenly
from ldpfl.util.randomness import SeededStreams


@settings(derandomize=True)
@given(st.integers(1, 3000), st.integers(1, 4000))
def test_chunks_cover_everyone_once_and_are_even(count: int, largest: int) -> None:
    pieces = list(split_evenly(count, largest))
    assert [index for piece in pieces for index in range(count)[piece]] == list(range(count))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert 1 <= min(sizes) <= max(sizes) <= largest
    unit = 16 if largest >= 16 else 1
    assert all(piece.start % unit == 0 for piece in pieces)
    assert max(sizes) - min(sizes) <= 2 * unit - 1
    assert len(pieces) == ceil(ceil(count / unit) / (largest // unit))


class Recorder:
    """Trains for real, and remembers how many clients it was given at once."""

    def __init__(self, task: LocalTask) -> None:
        self._inner = VectorizedTrainer(task)
        self.seen: list[int] = []

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        self.seen.append(schedule.clients)
        return self._inner.train(weights, schedule)


@pytest.fixture
def probed(tiny_task: Dataset) -> tuple[Recorder, Tensor, BatchSchedule]:
    module = models.create("logistic-regression", tiny_task.shape, 10, seed=0)
    layout = ParameterLayout.from_module(module)
    task = LocalTask(module, layout, tiny_task.train, tiny_task.mean, tiny_task.std, LocalOptimiser(0.1))
    schedule = batch_schedule(np.split(np.arange(200), 20), [SeededStreams.for_clients(0, 1, range(20))], batch_size=5)
    return Recorder(task), torch.zeros(layout.dimension), schedule


def test_the_choice_lies_between_one_and_the_cohort(probed: tuple[Recorder, Tensor, BatchSchedule]) -> None:
    recorder, weights, schedule = probed
    assert 1 <= choose_chunk_size(recorder, weights, schedule, torch.device("cpu")) <= 20
    assert max(recorder.seen) <= 20


def test_a_single_client_needs_no_more(probed: tuple[Recorder, Tensor, BatchSchedule]) -> None:
    recorder, weights, schedule = probed
    alone = BatchSchedule(schedule.index[:1], schedule.mask[:1])
    assert choose_chunk_size(recorder, weights, alone, torch.device("cpu")) == 1


@pytest.mark.parametrize("clients_that_fit", [0, 6])
def test_little_memory_keeps_chunks_small(
    clients_that_fit: int, probed: tuple[Recorder, Tensor, BatchSchedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of this model needs at least its weights four times over, and surely not a megabyte."""
    recorder, weights, schedule = probed
    weights_four_times = 16 * weights.numel()
    free = 2 * clients_that_fit * weights_four_times
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    chosen = choose_chunk_size(recorder, weights, schedule, torch.device("cpu"))
    assert chosen <= max(1, clients_that_fit)
    assert max(recorder.seen) <= max(2, clients_that_fit)  # two are trained to see what one needs


class Disturbed:
    """Takes a millisecond for any number of clients; but of each number above 16 the first four times are disturbed by other work."""

    def __init__(self) -> None:
        self.now, self._tried = 0.0, Counter[int]()

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        self._tried[schedule.clients] += 1
        disturbed = schedule.clients > 16 and self._tried[schedule.clients] <= 4
        self.now += 1e-4 * schedule.clients if disturbed else 1e-3
        return weights.expand(schedule.clients, -1)


def test_other_work_on_the_machine_does_not_make_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, index = Disturbed(), torch.zeros(256, 1, 1, dtype=torch.int64)
    monkeypatch.setattr(time, "perf_counter", lambda: trainer.now)
    schedule = BatchSchedule(index, torch.ones_like(index, dtype=torch.float32))
    assert choose_chunk_size(trainer, torch.zeros(10), schedule, torch.device("cpu")) == 256
