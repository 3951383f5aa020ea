"""Sweeps: which runs they are made of, that equal ones are run once, that they resume, and what their table says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ldpfl import ConfigError
from ldpfl.experiments import Runner
from ldpfl.experiments.sweep import SweepConfig, cells, load_sweep, rows, run_cell, sweep_names
from ldpfl.report.console import sweep_table
from ldpfl.report.plots import draw_sweep
from ldpfl.simulation import RoundMetrics

TINY = ("data.name=mnist", "model.name=logistic-regression", "clients.count=4", "training.rounds=1", "training.epochs=1")


class Counting:
    """Counts the runs that really trained."""

    def __init__(self) -> None:
        self.rounds = 0

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...]) -> None: ...

    def clients_done(self, done: int, total: int) -> None: ...

    def round_done(self, metrics: RoundMetrics) -> None:
        self.rounds += 1

    def warn(self, message: str) -> None:
        raise AssertionError(message)


def sweep(**changes: object) -> SweepConfig:
    fields: dict[str, object] = {
        "name": "try",
        "recipe": "quickstart",
        "seeds": [0, 1],
        "axes": {"mechanism.epsilon": [1.0, 4.0]},
        "variants": {"no noise": ['mechanism.name="none"', "mechanism.epsilon=1.0"], "bits": []},
    }
    return SweepConfig.model_validate({**fields, **changes})


def test_every_variant_meets_every_point_and_seed() -> None:
    found = cells(sweep(), TINY)
    assert len(found) == 2 * 2 * 2
    assert {(cell.variant, cell.config.mechanism.epsilon, cell.seed) for cell in found if cell.variant == "bits"} == {
        ("bits", epsilon, seed) for epsilon in (1.0, 4.0) for seed in (0, 1)
    }
    assert all(cell.config.seed == cell.seed and cell.config.clients.count == 4 for cell in found)
    # A variant that fixes a setting is not moved along the axis; its runs are the same and share a folder.
    assert len({cell.folder_name for cell in found if cell.variant == "no noise"}) == 2
    assert len({cell.folder_name for cell in found}) == 2 + 4


def test_two_axes_make_a_grid_and_none_a_single_point() -> None:
    assert len(cells(sweep(axes={"mechanism.epsilon": [1.0, 2.0], "clients.count": [2, 3, 5]}))) == 2 * 3 * 2 * 2
    assert len(cells(sweep(axes={}))) == 2 * 2


def test_equal_runs_are_made_once_and_a_second_sweep_makes_none(tiny_data: Path, tmp_path: Path) -> None:
    config, todo = sweep(), cells(sweep(), TINY)
    counting = Counting()
    runner = Runner(tiny_data, torch.device("cpu"), counting, lambda path, result: None)
    results = [(cell, run_cell(config, cell, runner, tmp_path / "out")) for cell in todo]
    assert counting.rounds == 6
    again = [(cell, run_cell(config, cell, runner, tmp_path / "out")) for cell in todo]
    assert counting.rounds == 6
    assert [result["accuracy"] for _, result in again] == [result["accuracy"] for _, result in results]

    gathered = rows(results)
    assert [(row.variant, dict(row.point)["mechanism.epsilon"]) for row in gathered] == [
        ("no noise", 1.0),
        ("bits", 1.0),
        ("no noise", 4.0),
        ("bits", 4.0),
    ]
    assert gathered[0].accuracy == gathered[2].accuracy
    assert gathered[0].privacy["local"] == "infinity"
    assert gathered[1].privacy["per_report"] == 1.0
    assert gathered[1].mean == pytest.approx(sum(gathered[1].accuracy) / 2)
    assert gathered[1].deviation == pytest.approx(abs(gathered[1].accuracy[0] - gathered[1].accuracy[1]) / math.sqrt(2))
    json.dumps([row.to_dict() for row in gathered], allow_nan=False)
    assert sweep_table(config, gathered).row_count == 4
    for name in ("accuracy.svg", "accuracy.png"):
        draw_sweep(tmp_path / name, config, gathered)
        assert (tmp_path / name).stat().st_size > 1000

    with pytest.raises(ConfigError, match="another sweep"):
        run_cell(sweep(seeds=[5]), todo[0], runner, tmp_path / "out")


def test_shipped_sweeps_are_made_of_valid_runs() -> None:
    for name in sweep_names():
        shipped = load_sweep(name)
        assert shipped.name == name
        assert shipped.description
        assert cells(shipped)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not valid TOML"),
        ('name = "x"\n', "recipe"),
        ('name = "x"\nrecipe = "quickstart"\nseeds = []\n', "seeds"),
        ('name = "x"\nrecipe = "quickstart"\nseed = 1\n', "seed"),
        ('name = "x"\nrecipe = "quickstart"\n[axes]\n"mechanism.epsilon" = []\n', "axes"),
    ],
)
def test_a_bad_sweep_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as caught:
        load_sweep(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_sweeps_recipes_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no sweep 'nothing'"):
        load_sweep("nothing")
    with pytest.raises(ConfigError, match="no recipe"):
        cells(sweep(recipe="nothing"))
    with pytest.raises(ConfigError, match="epsilom"):
        cells(sweep(axes={"mechanism.epsilom": [1.0]}))


def test_a_run_that_goes_to_nan_is_a_result_and_the_sweep_goes_on(tiny_data: Path, tmp_path: Path) -> None:
    config = sweep(seeds=[0], axes={"training.learning_rate": [0.01, 3e38]}, variants={"bits": []})
    counting = Counting()
    runner = Runner(tiny_data, torch.device("cpu"), counting, lambda path, result: None)
    todo = cells(config, [*TINY, "training.rounds=2"])
    results = [(cell, run_cell(config, cell, runner, tmp_path / "out")) for cell in todo]
    assert "NaN" in results[1][1]["stopped"]
    began = counting.rounds
    assert run_cell(config, todo[1], runner, tmp_path / "out") == results[1][1]  # and it is not tried again
    assert counting.rounds == began
    good, bad = rows(results)
    assert (len(good.accuracy), good.stopped) == (1, ())
    assert (bad.accuracy, bad.mean, bad.deviation) == ((), None, 0.0)
    assert len(bad.stopped) == 1
    json.dumps(bad.to_dict(), allow_nan=False)
    table = sweep_table(config, [good, bad])
    assert "stopped" in str(table.caption)
    draw_sweep(tmp_path / "accuracy.svg", config, [good, bad])
