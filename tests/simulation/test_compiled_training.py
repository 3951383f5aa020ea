"""Compiled steps: the eager ones but for last bits, the same whoever does a share, and only where they can be had."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from ldpfl import ParameterLayout
from ldpfl.data import Dataset, Samples
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.experiments import trainers
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.trainers import is_compiled
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.models.images import Halved
from ldpfl.models.texts import GRU
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, LocalTask, RecordGradientTrainer, Trainer, VectorizedTrainer, simulate
from ldpfl.simulation.cohort_training import train_cohort
from ldpfl.simulation.compiled_records import CompiledSums
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.compiling import has_compiler, is_worth_compiling
from ldpfl.simulation.local_steps import BatchSchedule, LocalOptimiser, full_batch
from ldpfl.simulation.shared_objects import read_shared, write_shared
from ldpfl.simulation.workers import Processes
from ldpfl.util.user_code import GIVEN

RECORDS = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.noise_multiplier=1.0"]
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
@pytest.mark.xdist_group("ray")
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
    monkeypatch.setattr(trainers, "is_worth_compiling", lambda calls, work: True)
    federation, _ = federation_of(tiny_task, f"model.name={GIVEN}", warned=said, given=Told())
    assert isinstance(federation.trainer, VectorizedTrainer)
    assert any("cannot be compiled" in line and "trained uncompiled" in line for line in said)
    with pytest.raises(ConfigError, match="cannot be compiled"):
        federation_of(tiny_task, f"model.name={GIVEN}", "training.compile=on", given=Told())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Hide the compiler, and what it has made before: on disk and in this process, by whichever test.

    Steps are compiled in this process: PyTorch's pool keeps the path it began with.
    """
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with torch._inductor.config.patch(compile_threads=1), fresh_cache(dir=str(tmp_path)):
        yield


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("no_compiler")
def test_a_compiler_that_is_not_found_after_all_is_done_without(tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_compiler()
    said: list[str] = []
    monkeypatch.setattr(trainers, "is_worth_compiling", lambda calls, work: True)
    monkeypatch.setattr(trainers, "has_compiler", lambda: True)
    for settings in ([], RECORDS):
        federation, start = federation_of(tiny_task, "model.name=linear", *settings, warned=said)
        assert not trainers.is_compiled(federation.trainer)
        assert start.origin.endswith(" on cpu")
    assert len(said) == 2
    assert all("cannot be compiled" in line and "trained uncompiled" in line for line in said)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("settings", [["training.epochs=1"], ["training.epochs=2"], RECORDS], ids=["one step", "steps", "records"])
def test_a_worker_without_a_compiler_trains_as_it_is_and_says_so_once(
    settings: list[str], tiny_task: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation, start = federation_of(tiny_task, "model.name=linear", "training.batch_size=20", "training.compile=off", *settings)
    trainer, task = federation.trainer, federation.task
    compiled: Trainer = CompiledTrainer(task, federation.batch_width)
    if isinstance(trainer, RecordGradientTrainer):
        compiled = replace(trainer, compiled=CompiledSums(task, trainer.clip))
    write_shared(compiled, tmp_path / "sent")
    cohort, sent = federation.cohort(1), read_shared(tmp_path / "sent")
    with pytest.raises(PrivacyError, match="PyTorch could not run the model"):  # before the run somebody would be told why
        train_cohort(replace(federation, trainer=compiled), start.state, cohort)
    eager = train_cohort(federation, start.state, cohort).double()
    for _ in range(2):
        found = train_cohort(replace(federation, trainer=sent), start.state, cohort).double()
        assert float((found - eager).norm() / eager.norm()) < 1e-6
    (note,) = (record.message for record in caplog.records if record.name.startswith("ldpfl"))
    assert "is run uncompiled from now on" in note


@compiles
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("settings", [[], RECORDS], ids=["updates", "records"])
def test_no_value_of_a_sample_decides_whether_a_step_is_compiled(settings: list[str], tiny_task: Dataset) -> None:
    """A refusal shows outside: it may depend on no sample, whatever compiled code makes of it."""
    inputs = tiny_task.train.tensor.float()
    inputs[0] = nan  # results are NaN, and so never equal
    odd = replace(tiny_task, train=Samples(inputs, tiny_task.train.targets))
    federation, _ = federation_of(odd, "model.name=linear", "training.compile=on", *settings)
    assert is_compiled(federation.trainer)


def test_gradients_of_records_are_compiled_in_float32_alone(tiny_task: Dataset) -> None:
    with pytest.raises(ConfigError, match="another precision than float32"):
        federation_of(tiny_task, "model.name=linear", "training.compile=on", "training.precision=bf16", *RECORDS)


@compiles
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("model", ["linear", "two-layer-cnn"])
def test_compiled_sums_of_records_are_eager_ones_but_for_last_bits(model: str, tiny_task: Dataset) -> None:
    """Records that are too long, and those that are not; clients of different size."""
    for norm in (0.02, 1e3):
        settings = [*RECORDS, f"mechanism.clip_norm={norm}", "data.partition=quantity"]
        federation, start = federation_of(tiny_task, f"model.name={model}", *settings, "training.compile=on")
        trainer = federation.trainer
        assert isinstance(trainer, RecordGradientTrainer)
        assert start.origin.endswith("on cpu, compiled")
        watched: list[Tensor] = []
        plain = replace(federation, trainer=replace(trainer, compiled=None, watch=watched.append))
        eager = train_cohort(plain, start.state, federation.cohort(1))
        long, records = sum(int(part.sum()) for part in watched), sum(len(part) for part in watched)
        watched.clear()
        found = train_cohort(replace(federation, trainer=replace(trainer, watch=watched.append)), start.state, federation.cohort(1))
        assert int((found - eager).abs().max()) <= 3  # of 2^20 to the norm, in a sum over some nine records
        assert (sum(int(part.sum()) for part in watched), sum(len(part) for part in watched)) == (long, records)
        assert long == (records if norm == 0.02 else 0)


@compiles
@pytest.mark.slow
@pytest.mark.thorough
def test_a_step_is_compiled_once_however_many_steps_clients_make(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch compiles for strides as well, and gives up after eight of them."""
    module = nn.Linear(20, 2)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: value.detach() for name, value in module.named_parameters()})
    samples = Samples(torch.randn(50, 20, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 2)
    trainer = CompiledTrainer(LocalTask(module, layout, samples, (), (), LocalOptimiser(0.1)), 5)
    for steps in range(2, 13):
        index = torch.arange(4 * steps * 5).reshape(4, steps, 5) % 50
        trainer.train(weights, BatchSchedule(index, torch.ones(index.shape)))
    assert not [record for record in caplog.records if record.name.startswith("ldpfl")]


@compiles
@pytest.mark.slow
def test_a_record_without_a_usable_gradient_adds_nothing_to_compiled_sums() -> None:
    inputs = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    module = nn.Linear(30, 3)
    layout = ParameterLayout.from_module(module)
    weights = layout.flatten({name: value.detach() for name, value in module.named_parameters()})
    samples, clip = Samples(inputs, torch.arange(40) % 3), RecordClip(0.01)
    task = LocalTask(module, layout, samples, (), (), LocalOptimiser(1.0))
    trainer = RecordGradientTrainer(task, clip, compiled=CompiledSums(task, clip))
    clean = trainer.train(weights, full_batch([np.arange(40)], 40))
    inputs[3], inputs[20] = float("nan"), 1e38
    spoiled = trainer.train(weights, full_batch([np.arange(40)], 40))
    without = trainer.train(weights, full_batch([np.setdiff1d(np.arange(40), [3, 20])], 38))
    eager = replace(trainer, compiled=None).train(weights, full_batch([np.arange(40)], 40))
    assert not torch.equal(clean, spoiled)
    assert int((spoiled - eager).abs().max()) <= 3
    assert float((spoiled - without).double().norm() / eager.double().norm()) < 0.2  # the record of 1e38 is clipped, and counts


def test_short_runs_are_not_compiled_and_without_a_compiler_none_is(tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, start = federation_of(tiny_task, "model.name=linear")
    assert isinstance(federation.trainer, VectorizedTrainer)
    assert start.origin.endswith(" on cpu")
    monkeypatch.setattr(trainers, "has_compiler", lambda: False)
    monkeypatch.setattr(trainers, "is_worth_compiling", lambda calls, work: True)
    federation, _ = federation_of(tiny_task, "model.name=linear")
    assert isinstance(federation.trainer, VectorizedTrainer)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        federation_of(tiny_task, "model.name=linear", "training.compile=on")


def test_a_step_is_compiled_unasked_where_it_is_called_often_enough_for_its_work(tiny_task: Dataset) -> None:
    """The CNN after some millions of small images; a small model, of which a call saves little, later; and an unrolled recurrence never."""
    work = {}
    for model in ("two-layer-cnn", "mlp"):
        federation, start = federation_of(tiny_task, f"model.name={model}")
        work[model] = CompiledTrainer(federation.task, 10).work(start.state.weights)
    assert not is_worth_compiling(100_000 / 100, lambda: work["two-layer-cnn"])
    assert is_worth_compiling(4_000_000 / 100, lambda: work["two-layer-cnn"])
    assert not is_worth_compiling(4_000_000 / 100, lambda: work["mlp"])
    assert is_worth_compiling(1e9 / 100, lambda: work["mlp"])
    federation, start = federation_of(tiny_task, "model.name=linear")
    record = CompiledTrainer(federation.task, 1)
    assert is_worth_compiling(1e6 / 100, partial(record.work, start.state.weights, sent=True))  # many clients of one record
    assert not is_worth_compiling(1e6 / 100, partial(record.work, start.state.weights))
    tokens = torch.randint(1, 50, (20, 40))
    for length, expected in ((4, True), (40, False)):
        gru = GRU(50, 2, by_place=False)
        layout = ParameterLayout.from_module(gru)
        weights = layout.flatten({name: value.detach() for name, value in gru.named_parameters()})
        samples = Samples(tokens[:, :length], torch.zeros(20, dtype=torch.int64))
        trainer = CompiledTrainer(LocalTask(gru, layout, samples, (), (), LocalOptimiser(0.1)), 10)
        assert is_worth_compiling(1e9, partial(trainer.work, weights)) is expected


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
