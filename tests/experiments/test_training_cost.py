"""``ldpfl plan RECIPE --cost``: counts are exact, times are measured, and every kind of training has an estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from conftest import CommandLine
from ldpfl import api
from ldpfl.data import held_out_by_person
from ldpfl.experiments.build import build
from ldpfl.experiments.dataset import load_dataset

TRAIN, TEST, PIXELS, CLASSES, BATCH = 200, 50, 400, 10, 10


def test_counts_are_those_of_the_run(config_file: Path, tiny_data: Path, ldpfl: CommandLine) -> None:
    """Of logistic regression: 2 operations for each weight and sample forward, and as many for the weights' gradient."""
    arguments = ("plan", config_file, "--cost", "--data-dir", tiny_data, "--set", "training.epochs=2")
    found = json.loads(ldpfl(*arguments, "--json").out)
    assert found["rounds"] == 3
    assert found["clients"] == 8
    assert found["weights"] == (PIXELS + 1) * CLASSES
    assert found["samples"] == 3 * 2 * TRAIN
    assert found["evaluated"] == 3 * TEST
    assert found["operations"] == 2 * PIXELS * CLASSES * (2 * found["samples"] + found["evaluated"])
    assert found["data_bytes"] == TRAIN * (PIXELS + 8)  # a byte for a pixel, an int64 for a class
    assert found["report_bytes"] == found["weights"] // 8 + 1  # one bit a weight, added up
    copies = 4 * 4 * found["weights"]
    assert copies < found["client_bytes"] < copies + 20 * 4 * BATCH * PIXELS
    assert found["seconds"] > 0
    text = ldpfl(*arguments).out
    assert f"{found['samples']:,} to train on, {found['evaluated']:,} to evaluate on" in text


def test_all_rounds_are_counted_where_clients_differ_in_size(config_file: Path, tiny_data: Path) -> None:
    settings = {"clients.fraction": 0.3, "data.partition": "quantity", "training.rounds": 5}
    config = api.configure(config_file, settings)
    federation, _ = build(config, load_dataset(config, tiny_data), torch.device("cpu"))
    true = sum(int(federation.samples.sizes[federation.cohort(number)].sum()) for number in range(1, 6))
    assert api.training_cost(config_file, settings, data_dir=tiny_data).samples == true


def test_rows_of_persons_are_counted(tmp_path: Path) -> None:
    """Of 60 persons with 10 rows each, 8 rows count in a round."""
    frame = pd.DataFrame(
        {"pid": [f"p{row // 10}" for row in range(600)], "x": [row % 7 for row in range(600)], "y": [row % 2 for row in range(600)]}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    settings = {"data.path": str(tmp_path / "t.csv"), "data.target": "y", "data.person": "pid", "clients.count": 3, "training.rounds": 2}
    cost = api.training_cost("own", {**settings, "data.bounds": {"x": [0, 6]}, "mechanism.sample_rate": 1.0})
    trained_on = 60 - len({name for name, out in zip(frame["pid"], held_out_by_person(frame["pid"]), strict=True) if out})
    assert cost.samples == 2 * 8 * trained_on


SETTINGS: dict[str, dict[str, Any]] = {
    "a fraction": {"clients.fraction": 0.5},
    "secret choice": {"clients.self_sampling": "plain"},
    "gradients": {"mechanism.perturbed": "gradient"},
    "records": {"mechanism.name": "dp-sgd", "mechanism.perturbed": "gradient"},
    "noise by layer": {"mechanism.name": "ladp", "mechanism.delta": 0.02, "shuffling.channel": "direct"},
    "reports that do not add up": {"mechanism.name": "harmony"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_kind_of_training_has_an_estimate(name: str, config_file: Path, tiny_data: Path) -> None:
    state = torch.random.get_rng_state()
    cost = api.training_cost(config_file, SETTINGS[name], data_dir=tiny_data)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert cost.seconds > 0
    assert cost.operations > 0
    assert 1 <= cost.together <= cost.clients


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("quickstart",), ("quickstart", "--cost", "ldpfl ledger")),
        (("quickstart", "--cost", "--epsilon", "1", "--rounds", "2"), ("--epsilon", "--rounds", "--set")),
        (("--epsilon", "1", "--clients", "9", "--set", "training.rounds=2"), ("--set", "--cost")),
        (("sum/least-squares-mnist", "--cost"), ("least squares",)),
        (("quickstrat", "--cost"), ("quickstrat", "quickstart")),
        (("own", "--cost"), ("--set data.path=FILE",)),
    ],
)
def test_what_is_refused_names_what_to_do(arguments: tuple[str, ...], named: tuple[str, ...], ldpfl: CommandLine) -> None:
    line = ldpfl.refused("plan", *arguments)
    assert [text for text in named if text not in line] == []
