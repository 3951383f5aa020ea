"""Worker processes: the bytes of one process, whatever dies meanwhile, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ldpfl.data import Dataset
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.workers import Processes

CLIENTS = 40
RECIPES = {
    "duchi": ["mechanism.name=duchi", "mechanism.epsilon=1.0"],
    "gaussian with memory": ["mechanism.name=ladp", "mechanism.perturbed=update", "training.clip_norm=1.0"],
    "records": ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.noise_multiplier=1.0", "shuffling.channel=direct"],
    "sampled": ["mechanism.name=harmony", "mechanism.epsilon=1.0"],
    "self-sampling": ["mechanism.name=duchi", "mechanism.epsilon=1.0", "clients.self_sampling=plain"],
}


def federation_of(task: Dataset, recipe: str, *overrides: str) -> tuple[Federation, Checkpoint]:
    settings = ["model.name=linear", f"clients.count={CLIENTS}", "training.rounds=2", "training.batch_size=4", *RECIPES[recipe], *overrides]
    return build(parse_config("", settings, origin="test"), task, torch.device("cpu"))


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    pool = Processes(2)
    yield pool
    pool.close()


def same(first: Checkpoint, second: Checkpoint) -> bool:
    def timeless(checkpoint: Checkpoint) -> list[object]:
        return [replace(metrics, seconds=0.0) for metrics in checkpoint.history]

    return (
        torch.equal(first.state.weights, second.state.weights)
        and timeless(first) == timeless(second)
        and first.ledger == second.ledger
        and first.memory.keys() == second.memory.keys()
        and all(torch.equal(first.memory[name], second.memory[name]) for name in first.memory)
    )


@pytest.mark.slow
@pytest.mark.xdist_group("workers")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_end_in_the_bytes_of_one(recipe: str, tiny_task: Dataset, two: Processes) -> None:
    federation, start = federation_of(tiny_task, recipe)
    told: list[tuple[int, int]] = []
    *_, alone = simulate(federation, start, 2)
    *_, together = simulate(federation, start, 2, lambda done, total: told.append((done, total)), two)
    assert same(alone, together)
    assert told == sorted(told, key=lambda pair: pair[1]) or recipe == "self-sampling"
    assert told[-1][0] == told[-1][1]
