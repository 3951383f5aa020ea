"""A label can be kept from client 0 by config, and what does not fit is refused before anything is written."""

from __future__ import annotations

import pytest
import torch

from conftest import TINY_TOML
from ldpfl.data import CURIOUS_CLIENT, Dataset, Isolation
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config


def parse(*overrides: str) -> RunConfig:
    return parse_config(TINY_TOML, overrides, origin="test")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_no_label_is_private_by_default() -> None:
    assert parse().data.isolated is None


def test_a_private_label_is_written_and_read_back() -> None:
    config = parse("data.private_label=0", "data.private_alpha=0.25")
    assert config.data.isolated == Isolation(0, 0.25)
    assert parse_config(config.to_toml(), (), origin="test") == config


@pytest.mark.parametrize("value", ["-1", "1.5", "true", "dog", "nan"])
def test_a_private_label_is_a_whole_number(value: str) -> None:
    assert "data.private_label" in refusal(f"data.private_label={value}")


@pytest.mark.parametrize("value", ["0.0", "-1.0", "nan", "inf"])
def test_its_alpha_is_positive_and_finite(value: str) -> None:
    assert "data.private_alpha" in refusal(f"data.private_alpha={value}")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.partition=labels", "data.labels_per_client=4"],
        ["data.partition=dirichlet", "data.alpha=0.3"],
        ["data.partition=quantity"],
        ["data.evaluate_on=holdout"],
    ],
)
def test_a_federation_keeps_the_label_from_client_0_only(overrides: list[str], tiny_task: Dataset) -> None:
    federation, _ = build(parse("data.private_label=3", *overrides), tiny_task, torch.device("cpu"))
    holds = [bool((federation.task.data.targets[torch.from_numpy(part)] == 3).any()) for part in federation.samples]
    assert not holds[CURIOUS_CLIENT]
    assert any(holds[1:])


def test_both_concentrations_reach_the_division(tiny_task: Dataset) -> None:
    """20 private samples over 7 clients: all with one of them, or two to four each."""
    for private_alpha, most in (("1e-9", 20), ("1e9", 3)):
        config = parse("data.private_label=3", "data.partition=dirichlet", f"data.private_alpha={private_alpha}")
        federation, _ = build(config, tiny_task, torch.device("cpu"))
        labels = tiny_task.train.targets
        assert max(int((labels[torch.from_numpy(part)] == 3).sum()) for part in federation.samples) == most


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.private_label=10"], "data.private_label is 10, but the training data has 10 labels"),
        (["data.private_label=3", "clients.count=1"], "set clients.count to 2 or more"),
        (["data.private_label=3", "data.partition=labels", "data.labels_per_client=1"], "labels_per_client"),
    ],
)
def test_a_label_that_cannot_be_private_is_refused_in_one_line(overrides: list[str], told: str, tiny_task: Dataset) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        build(parse(*overrides), tiny_task, torch.device("cpu"))
    assert len(str(caught.value).splitlines()) == 1
