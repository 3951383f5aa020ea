"""Products in bfloat16: updates are nearly those of float32, and everything that leaves the model is float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ldpfl.data import Dataset
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, LoopTrainer
from ldpfl.simulation.cohort_training import train_cohort
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.compiling import has_compiler

RECORDS = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.noise_multiplier=1.0"]
UPDATES, GRADIENTS = ["mechanism.perturbed=update"], ["mechanism.perturbed=gradient"]


def federation_of(task: Dataset, *settings: str) -> tuple[Federation, Checkpoint]:
    own = ["clients.count=23", "training.batch_size=4", "training.rounds=2", "shuffling.channel=direct", *settings]
    return build(parse_config("", own, origin="test"), task, torch.device("cpu"))


@pytest.mark.thorough_except("mlp-records")
@pytest.mark.parametrize("settings", [UPDATES, GRADIENTS, RECORDS], ids=["updates", "gradients", "records"])
@pytest.mark.parametrize("model", ["mlp", "two-layer-cnn"])
def test_values_are_nearly_those_of_float32(model: str, settings: list[str], tiny_task: Dataset) -> None:
    found = {}
    for precision in ("float32", "bf16"):
        federation, start = federation_of(tiny_task, f"model.name={model}", f"training.precision={precision}", *settings)
        values = train_cohort(federation, start.state, federation.cohort(1))
        assert values.dtype == (torch.int64 if settings == RECORDS else torch.float32)
        found[precision] = values.double()
    assert not torch.equal(found["float32"], found["bf16"])
    assert float((found["float32"] - found["bf16"]).norm() / found["float32"].norm()) < 0.05


@pytest.mark.thorough
def test_clients_one_by_one_and_the_evaluation(tiny_task: Dataset) -> None:
    """A loop over clients trains with the same precision; the model is judged with that of float32."""
    federation, start = federation_of(tiny_task, "model.name=mlp", "training.precision=bf16", *UPDATES)
    loop = replace(federation, trainer=LoopTrainer(federation.task))
    updates = [train_cohort(each, start.state, federation.cohort(1)) for each in (federation, loop)]
    assert float((updates[0] - updates[1]).norm() / updates[0].norm()) < 0.05
    exact, _ = federation_of(tiny_task, "model.name=mlp", *UPDATES)
    assert federation.score(start.state.weights) == exact.score(start.state.weights)


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_steps_are_of_the_same_precision(tiny_task: Dataset) -> None:
    found = []
    for compiled in ("off", "on"):
        federation, start = federation_of(tiny_task, "model.name=mlp", "training.precision=bf16", f"training.compile={compiled}", *UPDATES)
        found.append(train_cohort(federation, start.state, federation.cohort(1)))
    assert isinstance(federation.trainer, CompiledTrainer)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.05


@pytest.mark.parametrize("precision", ["fp16", "fp16-mixed"])
def test_float16_is_refused_with_the_reason(precision: str) -> None:
    with pytest.raises(ConfigError, match="overflow or vanish without a loss scale"):
        parse_config("", [f"training.precision={precision}"], origin="test")
