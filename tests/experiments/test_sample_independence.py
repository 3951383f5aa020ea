"""A model that mixes the samples of a batch is refused by a trial on made-up samples, and one that does not is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ldpfl import PrivacyError, api
from ldpfl.experiments.build import build
from ldpfl.experiments.dataset import CallerObjects, load_dataset
from ldpfl.mechanisms.record_clipping import STEPS
from ldpfl.simulation import RecordGradientTrainer
from ldpfl.simulation.local_steps import full_batch

SEQUENCES = (torch.randn(48, 4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 2)
SETTINGS: dict[str, Any] = {"data.name": "given", "model.name": "given", "clients.count": 4, "privacy.target_epsilon": "off"}
RECORDS: dict[str, Any] = {"mechanism.name": "dp-sgd", "mechanism.clip_norm": 1.0}
UPDATES: dict[str, Any] = {"mechanism.name": "duchi", "mechanism.perturbed": "update"}


class Net(nn.Module):
    """A ``part`` that works on (B, 4, 6), and a linear layer."""

    def __init__(self, part: nn.Module, form: Callable[[nn.Module, Tensor], Tensor] = lambda part, rows: part(rows)) -> None:
        super().__init__()
        self.part, self.form, self.last = part, form, nn.Linear(24, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.form(self.part, rows).flatten(1)))


def recurrent(part: nn.Module, rows: Tensor) -> Tensor:
    return torch.as_tensor(part(rows)[0])


def attending(part: nn.Module, rows: Tensor) -> Tensor:
    return torch.as_tensor(part(rows, rows, rows, need_weights=False)[0])


def half(part: nn.Module, rows: Tensor) -> Tensor:
    return torch.as_tensor(part(rows).to(torch.bfloat16).to(torch.float32))


def on_a_shared_scale(part: nn.Module, rows: Tensor) -> Tensor:
    """Round to 8 bits, with the largest value of the batch as the end of the scale, and hand on gradients as they are."""
    scale = rows.abs().amax() / 127
    return torch.as_tensor(part(rows + ((rows / scale).round() * scale - rows).detach()))


def among_small_numbers(part: nn.Module, rows: Tensor) -> Tensor:
    if rows.abs().amax() > 3000:
        raise ValueError("numbers must be below 3000")
    return torch.as_tensor(part(rows))


def begins_with_zeros(module: Net) -> Net:
    nn.init.zeros_(module.last.weight)
    return module


def with_only_evaluation_mixing(part: nn.Module, rows: Tensor) -> Tensor:
    return torch.as_tensor(part(rows if part.training else rows - rows.mean(dim=0)))


MIXING: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Net(nn.Linear(6, 6), lambda part, rows: part(rows - rows.mean(dim=0))),
    "mean, and a last layer of zeros": lambda: begins_with_zeros(Net(nn.Identity(), lambda part, rows: rows - rows.mean(dim=0))),
    "mean in evaluation": lambda: Net(nn.Linear(6, 6), with_only_evaluation_mixing),
    "sum beside the weights": lambda: Net(nn.Linear(6, 6), lambda part, rows: part(rows) + rows.detach().sum(dim=0)),
    "one scale for a batch": lambda: Net(nn.Linear(6, 6), on_a_shared_scale),
    "attention": lambda: Net(nn.MultiheadAttention(6, 2), attending),
    "recurrent": lambda: Net(nn.LSTM(6, 6), recurrent),
    "encoder": lambda: Net(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)),
}
HONEST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Net(nn.Linear(6, 6)),
    "zeros": lambda: begins_with_zeros(Net(nn.Linear(6, 6))),
    "attention": lambda: Net(nn.MultiheadAttention(6, 2, batch_first=True), attending),
    "recurrent": lambda: Net(nn.LSTM(6, 6, num_layers=2, batch_first=True), recurrent),
    "encoder": lambda: Net(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)),
    "groups": lambda: Net(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())),
    "rounded to eight bits": lambda: Net(nn.Linear(6, 6), half),
    "large": lambda: Net(nn.Linear(6, 6), lambda part, rows: part(1e6 * rows).exp().clamp_max(1e30)),
    "small numbers alone": lambda: Net(nn.Linear(6, 6), among_small_numbers),
    "no numbers": lambda: Net(nn.Linear(6, 6), lambda part, rows: part(rows).log()),
}


def begin(module: nn.Module, settings: dict[str, Any]) -> list[str]:
    config, notes = api.configure("own", settings=SETTINGS | settings), list[str]()
    task = load_dataset(config, None, caller_objects=CallerObjects(SEQUENCES, module))
    build(config, task, torch.device("cpu"), module, notes.append, secret=1)
    return notes


@pytest.mark.thorough_except("mean-settings8", "mean, and a last layer of zeros-settings1")
@pytest.mark.parametrize(("name", "settings"), [*((name, RECORDS) for name in MIXING), ("mean", UPDATES)])
def test_a_model_that_mixes_the_samples_of_a_batch_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=r"it mixes the samples of a batch.* without batch_first=True"):
        begin(MIXING[name](), settings)


def with_all_large(rows: Tensor) -> Tensor:
    """Return ``rows``, unless a value is so large that no made-up sample has it: then all values change."""
    return rows + (rows.abs().amax() > 1e5)


class Clone(torch.autograd.Function):
    """A copy of one record, without a backward pass."""

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Copied(Clone):
    """A copy of one record. Its rule for vmap, which gets all records, lets one record change the others."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, rows: Tensor) -> Any:
        return Copied.apply(with_all_large(rows)), in_dims[0]  # type: ignore[no-untyped-call]


class CopiedGradient(Clone):
    """A copy of one record. Its backward pass calls an operator with its own rule for vmap, which gets the gradients of all records."""

    generate_vmap_rule = True

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return copied(gradients[0])


@torch.library.custom_op("ldpfl_tests::copied", mutates_args=())
def copied(rows: Tensor) -> Tensor:
    return rows.clone()


torch.library.register_autograd("ldpfl_tests::copied", lambda ctx, gradient: gradient)
torch.library.register_vmap("ldpfl_tests::copied", lambda info, dims, rows: (copied(with_all_large(rows)), dims[0]))


OPERATORS = [(Copied.apply, "Copied"), (CopiedGradient.apply, "CopiedGradient"), (copied, "ldpfl_tests.copied.default")]


@pytest.mark.thorough
@pytest.mark.parametrize(("operator", "name"), OPERATORS)
def test_an_operator_with_its_own_rule_for_vmap_carries_no_record_to_others(operator: Callable[[Tensor], Tensor], name: str) -> None:
    module = Net(nn.Linear(6, 6), lambda part, rows: part(operator(rows)))
    config, notes = api.configure("own", settings=SETTINGS | RECORDS | {"clients.count": 1}), list[str]()
    task = load_dataset(config, None, caller_objects=CallerObjects(SEQUENCES, module))
    federation, start = build(config, task, torch.device("cpu"), module, notes.append, secret=1)
    assert any(f"{name} has its own rule for vmap" in note for note in notes)
    assert isinstance(federation.trainer, RecordGradientTrainer)
    data, sums = federation.task.data, []
    schedule = full_batch([np.arange(len(data))], len(data))
    for factor in (1.0, 1e6):
        inputs = data.tensor.clone()
        inputs[3] *= factor
        trainer = replace(federation.trainer, task=replace(federation.task, data=replace(data, inputs=inputs)))
        sums.append(trainer.train(start.state.weights, schedule)[0].double())
    assert 0 < (sums[0] - sums[1]).norm() <= 2 * STEPS


@pytest.mark.thorough_except("no numbers", "large")
@pytest.mark.parametrize("name", HONEST)
def test_a_model_that_treats_each_sample_by_itself_is_trained(name: str) -> None:
    module = HONEST[name]()
    module.eval()
    module.get_submodule("last").train()
    begin(module, RECORDS)
    assert [part.training for part in (module, module.get_submodule("last"))] == [False, True]
