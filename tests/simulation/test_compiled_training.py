"""Compiled steps: the eager ones but for last bits, the same whoever does a share, and only where they can be had."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ldpfl.data import Dataset
from ldpfl.errors import ConfigError
from ldpfl.experiments import trainers
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.importing import GIVEN
from ldpfl.models.images import Halved
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, VectorizedTrainer, simulate
from ldpfl.simulation.cohort_training import train_cohort
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.compiling import has_compiler, pays
from ldpfl.simulation.workers import Processes

compiles = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def federation_of(
    task: Dataset, *settings: str, warned: list[str] | None = None, given: nn.Module | None = None
) -> tuple[Federation, Checkpoint]:
    own = ["clients.count=23", "training.batch_size=4", "training.rounds=2", "shuffling.channel=direct", *settings]
    warn = (lambda message: None) if warned is None else warned.append
    return build(parse_config("", own, origin="test"), task, torch.device("cpu"), given, warn)


@compiles
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [[], ["training.momentum=0.9", "training.clip_norm=0.1"], ["training.optimiser=adam"], ["training.batch_size=100"]],
    ids=str,
)
def test_compiled_steps_are_eager_ones_but_for_last_bits(settings: list[str], tiny_task: Dataset) -> None:
    found = []
    for compiled in ("off", "on"):
        federation, start = federation_of(tiny_task, "model.name=two-layer-cnn", f"training.compile={compiled}", *settings)
        assert isinstance(federation.trainer, CompiledTrainer if compiled == "on" else VectorizedTrainer)
        found.append(train_cohort(federation, start.state, federation.cohort(1)) - start.state.weights)
    eager, compiled_ones = found
    assert float((eager - compiled_ones).norm() / eager.norm()) < (1e-2 if settings == ["training.optimiser=adam"] else 1e-4)


@compiles
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("workers")
def test_a_compiled_run_ends_in_the_same_bytes_by_two_processes_and_is_not_gone_on_with_by_eager_steps(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, "model.name=linear", "training.compile=on")
    *_, alone = simulate(federation, start, 2)
    pool = Processes(2)
    try:
        *_, together = simulate(federation, start, 2, workers=pool)
    finally:
        pool.close()
    assert torch.equal(alone.state.weights, together.state.weights)
    chunked = replace(federation, chunk_size=2)
    *_, last = simulate(chunked, start, 2)
    assert torch.equal(alone.state.weights, last.state.weights)
    assert start.origin.endswith("on cpu, compiled")


class Told(nn.Module):
    """Does what no compiler can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(400, 10)

    def forward(self, images: Tensor) -> Tensor:
        pickle.dumps(images.shape)
        return torch.as_tensor(self.layer(images.flatten(1)))


@compiles
@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_that_does_not_compile_is_trained_as_it_is_with_a_note(tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainers, "pays", lambda samples, weights, operations: True)
    federation, _ = federation_of(tiny_task, f"model.name={GIVEN}", warned=said, given=Told())
    assert isinstance(federation.trainer, VectorizedTrainer)
    assert any("cannot be compiled" in line and "trained as it is" in line for line in said)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        federation_of(tiny_task, f"model.name={GIVEN}", "training.compile=on", given=Told())


def test_short_runs_are_not_compiled_and_without_a_compiler_none_is(tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, start = federation_of(tiny_task, "model.name=linear")
    assert isinstance(federation.trainer, VectorizedTrainer)
    assert start.origin.endswith(" on cpu")
    assert not pays(100_000, 21_840, CNN)
    assert pays(600_000, 21_840, CNN)
    monkeypatch.setattr(trainers, "has_compiler", lambda: False)
    monkeypatch.setattr(trainers, "pays", lambda samples, weights, operations: True)
    federation, _ = federation_of(tiny_task, "model.name=linear")
    assert isinstance(federation.trainer, VectorizedTrainer)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        federation_of(tiny_task, "model.name=linear", "training.compile=on")


def test_what_is_not_compiled_says_so(tiny_task: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"only local steps of many clients at once"):
        federation_of(tiny_task, "model.name=linear", "mechanism.perturbed=gradient", "training.compile=on")


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_halving_is_max_pooling(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(3, 2, *size, generator=torch.Generator().manual_seed(1))
    expected = nn.functional.max_pool2d(images, 2)
    assert torch.equal(Halved()(images), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(Halved()(images), expected)
