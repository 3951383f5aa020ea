"""A model that mixes the samples of a batch is refused by a trial on made-up samples, and one that does not is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ldpfl import PrivacyError, api
from ldpfl.experiments.build import build
from ldpfl.experiments.dataset import CallerObjects, load_dataset

SEQUENCES = (torch.randn(48, 4, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 2)
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
    "no numbers": lambda: Net(nn.Linear(6, 6), lambda part, rows: part(rows).log()),
}


def begin(module: nn.Module, settings: dict[str, Any]) -> list[str]:
    named = {"data.name": "given", "model.name": "given", "clients.count": 4, "privacy.target_epsilon": "off", **settings}
    config, notes = api.configure("own", settings=named), list[str]()
    task = load_dataset(config, None, caller_objects=CallerObjects(SEQUENCES, module))
    build(config, task, torch.device("cpu"), module, notes.append, secret=1)
    return notes


@pytest.mark.parametrize(("name", "settings"), [*((name, RECORDS) for name in MIXING), ("mean", UPDATES)])
def test_a_model_that_mixes_the_samples_of_a_batch_is_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=r"it mixes the samples of a batch.* without batch_first=True"):
        begin(MIXING[name](), settings)


@pytest.mark.parametrize("name", HONEST)
def test_a_model_that_treats_each_sample_by_itself_is_trained(name: str) -> None:
    module = HONEST[name]()
    module.eval()
    module.get_submodule("last").train()
    begin(module, RECORDS)
    assert [part.training for part in (module, module.get_submodule("last"))] == [False, True]
