"""Sweeps: which runs they are made of, that equal ones are run once, that they resume, and what their table says."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ldpfl import ConfigError, DataError
from ldpfl.api.results import SweepResult
from ldpfl.experiments import Runner
from ldpfl.experiments.dataset import SIMULATION
from ldpfl.experiments.reproduction import ReproducedRow, load_reproduction
from ldpfl.experiments.shipped import sweep_names
from ldpfl.experiments.sweep_config import Cell, SweepConfig, cells, check_cells, define_same_runs, load_sweep, parse_axis, sweep_of
from ldpfl.experiments.sweep_rows import Row, curves, frontier, notes_on_runs, rows
from ldpfl.experiments.sweep_run import open_folder, run_cell
from ldpfl.privacy.guarantee import AUTHORS_CLAIM
from ldpfl.report.plots import draw_sweep
from ldpfl.report.reproduction import reproduction_table
from ldpfl.report.terminal_tables import sweep_table
from ldpfl.server import RoundMetrics

TINY = (
    *("data.name=mnist", "model.name=logistic-regression", "clients.count=4", "training.rounds=1", "training.epochs=1"),
    "shuffling.channel=direct",  # what a shuffler hides takes seconds to account
)


NOISY = (
    'mechanism.name="full-dp"',
    'mechanism.perturbed="update"',
    "mechanism.sensitivity=per_batch",
    "training.clip_norm=1.0",
    "mechanism.delta=1e-3",
    "training.rounds=3",
    "clients.fraction=0.5",
)


class Counting:
    """Counts the runs that really trained."""

    def __init__(self) -> None:
        self.rounds = 0

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...

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
        "variants": {"no noise": ['mechanism.name="none"'], "bits": []},
    }
    return SweepConfig.model_validate({**fields, **changes})


def test_every_variant_meets_every_point_and_seed() -> None:
    found = cells(sweep(), TINY)
    assert len(found) == 2 * 2 * 2
    assert {(cell.variant, cell.config.mechanism.epsilon_and_budget, cell.seed) for cell in found if cell.variant == "bits"} == {
        ("bits", (epsilon, "unit"), seed) for epsilon in (1.0, 4.0) for seed in (0, 1)
    }
    assert all(cell.config.seed == cell.seed and cell.config.clients.count == 4 for cell in found)
    # A variant that fixes a setting is not moved along the axis; its runs are the same and share a folder.
    assert len({cell.folder_name for cell in found if cell.variant == "no noise"}) == 2
    assert len({cell.folder_name for cell in found}) == 2 + 4


def test_two_axes_make_a_grid_and_none_a_single_point() -> None:
    assert len(cells(sweep(axes={"mechanism.epsilon": [1.0, 2.0], "clients.count": [2, 3, 5]}))) == 2 * 3 * 2 * 2
    assert len(cells(sweep(axes={}))) == 2 * 2


@pytest.mark.slow
@pytest.mark.thorough
def test_equal_runs_are_made_once_and_a_second_sweep_makes_none(tiny_data: Path, tmp_path: Path) -> None:
    config, todo = sweep(), cells(sweep(), TINY)
    counting = Counting()
    runner = Runner(tiny_data, torch.device("cpu"), counting, lambda path, result: None)
    results = [(cell, run_cell(cell, runner, tmp_path / "out")) for cell in todo]
    assert counting.rounds == 6
    again = [(cell, run_cell(cell, runner, tmp_path / "out")) for cell in todo]
    assert counting.rounds == 6
    assert [result["score"] for _, result in again] == [result["score"] for _, result in results]

    gathered = rows(results)
    assert [(row.variant, dict(row.point).get("mechanism.epsilon")) for row in gathered] == [
        ("no noise", None),  # it is the same at both points, and one row
        ("bits", 1.0),
        ("bits", 4.0),
    ]
    assert len(gathered[0].score) == 2
    assert gathered[0].privacy["local"] == "infinity"
    assert gathered[1].privacy["per_report"] == 1.0
    assert gathered[1].mean == pytest.approx(sum(gathered[1].score) / 2)
    assert gathered[1].deviation == pytest.approx(abs(gathered[1].score[0] - gathered[1].score[1]) / math.sqrt(2))
    json.dumps([row.to_dict() for row in gathered], allow_nan=False)
    assert sweep_table(config, gathered).row_count == 3
    draw_sweep(tmp_path / "score.svg", config, gathered)
    assert (tmp_path / "score.svg").stat().st_size > 1000


def test_a_folder_belongs_to_one_sweep_with_one_set_of_overrides(tmp_path: Path) -> None:
    open_folder(sweep(), TINY, tmp_path / "out")
    open_folder(sweep(), TINY, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "sweep.json").read_text(encoding="utf-8"))["overrides"] == list(TINY)
    for other, overrides in ((sweep(seeds=[5]), TINY), (sweep(), ("training.rounds=2",))):
        with pytest.raises(ConfigError, match="another sweep"):
            open_folder(other, overrides, tmp_path / "out")


@pytest.mark.slow
def test_a_result_of_another_version_is_not_taken_for_ones_own(tiny_data: Path, tmp_path: Path) -> None:
    cell = cells(sweep(axes={}, seeds=[0]), TINY)[1]
    runner = Runner(tiny_data, torch.device("cpu"), Counting(), lambda path, result: None)
    run_cell(cell, runner, tmp_path)
    path = tmp_path / "runs" / cell.folder_name / "result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    result["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"torch 1\.0"):
        run_cell(cell, runner, tmp_path)


@pytest.mark.slow
def test_of_a_finished_run_neither_a_written_guarantee_nor_another_config_is_believed(tiny_data: Path, tmp_path: Path) -> None:
    """The folder may be somebody else's."""
    cell, other = (cell for cell in cells(sweep(axes={}, seeds=[0, 1]), TINY) if cell.variant == "bits")
    runner = Runner(tiny_data, torch.device("cpu"), Counting(), lambda path, result: None)
    privacy = run_cell(cell, runner, tmp_path)["privacy"]
    shutil.copytree(cell.folder(tmp_path).path, other.folder(tmp_path).path)
    with pytest.raises(ConfigError, match=r"a run of another config.*seed: 0 -> 1"):
        run_cell(other, runner, tmp_path)
    path = cell.folder(tmp_path).result_path
    result = json.loads(path.read_text(encoding="utf-8"))
    result["privacy"] |= {"local": 0.0123, "verdict": "A client is protected: perfectly."}
    path.write_text(json.dumps(result), encoding="utf-8")
    found = run_cell(cell, runner, tmp_path)["privacy"]
    assert {key: found[key] for key in ("local", "verdict")} == {key: privacy[key] for key in ("local", "verdict")}
    cell.folder(tmp_path).ledger_path.unlink()  # not the same as a ledger without releases, which proves that nothing was sent
    with pytest.raises(DataError, match=r"ledger\.json is missing"):
        run_cell(cell, runner, tmp_path)


@pytest.mark.parametrize("last", [True, False], ids=["last", "all"])
@pytest.mark.slow
@pytest.mark.thorough_for("all")
def test_shipped_sweeps_are_made_of_valid_runs(last: bool) -> None:
    """Every variant of every sweep at all points of its axes, or the last variant at the last values."""
    for name in sweep_names():
        shipped = load_sweep(name)
        assert shipped.name == name
        assert shipped.description
        if last:
            axes = {key: values[-1:] for key, values in shipped.axes.items()}
            shipped = shipped.model_copy(update={"axes": axes, "variants": dict([*shipped.variants.items()][-1:])})
        check_cells(cells(without_targets(shipped)))


def without_targets(shipped: SweepConfig) -> SweepConfig:
    """Return the sweep without its targets: to find each one's noise takes seconds, and is tested by itself."""
    variants = {
        name: [own for own in settings if not own.startswith("privacy.target_epsilon")] for name, settings in shipped.variants.items()
    }
    axes = {key: values for key, values in shipped.axes.items() if key != "privacy.target_epsilon"}
    settings = [own for own in shipped.settings if not own.startswith("privacy.target_epsilon")]
    return shipped.model_copy(update={"variants": variants, "axes": axes, "settings": settings})


def test_a_variant_that_does_not_fit_is_found_before_any_training() -> None:
    late = sweep(variants={"bits": [], "wide": ['mechanism.name="harmony"', "mechanism.group=20000"]})
    with pytest.raises(ConfigError, match=r"wide, epsilon 1\.0, seed 0: .*group"):
        check_cells(cells(late, TINY))


@pytest.mark.thorough
def test_a_row_states_what_its_costliest_seed_does(tiny_data: Path, tmp_path: Path) -> None:
    """Who takes part most often follows from the seed, where a part of the clients does."""
    config = sweep().model_copy(update={"seeds": [0, 1, 2], "variants": {"bits": []}, "axes": {}})
    some = [*TINY, "shuffling.channel=ideal-shuffler", "clients.count=20", "clients.fraction=0.1", "training.rounds=4"]
    runner = Runner(tiny_data, torch.device("cpu"), Counting(), lambda path, result: None)
    results = [(cell, run_cell(cell, runner, tmp_path / "out")) for cell in cells(config, some)]
    stated = [result["privacy"] for _, result in results]
    (found,) = rows(results)
    assert len({own["local"] for own in stated}) > 1
    assert found.privacy["local"] == max(own["local"] for own in stated)
    assert found.budget == found.privacy["local"]
    worst = max(stated, key=lambda own: min(own["local"], own["shuffled_upper_adaptive"]))
    assert found.privacy["verdict"] == worst["verdict"]
    dearest = max(range(3), key=lambda place: stated[place]["local"])
    until = {key: results[dearest][1][key] for key in ("uplink_bytes_per_client_round", "seconds", "privacy")}
    stopped = [(cell, {"stopped": "round 4", **until} if place == dearest else result) for place, (cell, result) in enumerate(results)]
    assert rows(stopped)[0].privacy == found.privacy  # what was released before a run was given up is released
    assert rows([(cell, {"stopped": "round 4", **until}) for cell, _ in results])[0].score == ()
    assert found.privacy["protected"] == stated[0]["protected"]
    for place, (cell, result) in enumerate(results):  # one seed's run on a user's code is enough
        claimed = {**result, "privacy": {**result["privacy"], "status": AUTHORS_CLAIM}}
        assert rows([*results[:place], (cell, claimed), *results[place + 1 :]])[0].privacy["status"] == AUTHORS_CLAIM


def row(variant: str, accuracy: tuple[float, ...], size: int, local: float | str | None, **changes: Any) -> Row:
    return Row(variant, (("mechanism.epsilon", 1.0),), accuracy, size, {"local": local}, 1.0, **changes)


def test_the_frontier_holds_what_is_worth_its_price() -> None:
    cheap, good = row("cheap", (0.5, 0.6), 10, 1.0), row("good", (0.8, 0.9), 100, 5.0)
    dear = row("dear", (0.8, 0.9), 1000, "infinity")  # as good as the one before, and dearer in both
    worse = row("worse", (0.7, 0.8), 100, 5.0)  # same price, less accurate
    equal = row("equal", (0.8, 0.9), 100, 5.0)  # same price and accuracy: both stay
    assert frontier([dear, cheap, good, worse, equal]) == [cheap, good, equal]
    # 0.01 more at a higher price, but the two seeds disagree by 0.08: within two standard errors, not worth it.
    assert frontier([good, row("noise", (0.85, 0.87), 200, 5.0)]) == [good]
    better = row("better", (0.82, 0.92), 200, 5.0)  # 0.02 more with both seeds
    assert frontier([good, better]) == [good, better]
    # Most accurate of all, but only one of its seeds got that far.
    partial = row("partial", (0.99,), 1, 0.1, stopped=("NaN",))
    assert frontier([partial, good]) == [good]
    assert frontier([row("stopped", (), 1, 0.1, stopped=("NaN",)), good]) == [good]
    assert frontier([row("failed", (0.99,), 1, 0.1, failed=("no file",)), good]) == [good]
    far, near = (row(name, (error,), 10, 1.0, metric="own error", lower_is_better=True) for name, error in (("far", 9.0), ("near", 5.0)))
    assert frontier([far, near]) == [near]
    assert row("idle", (0.1,), 1, None).budget == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_the_table_and_the_plot_of_a_frontier_say_what_they_show(tmp_path: Path) -> None:
    config = sweep(plot_against="budget", axes={"mechanism.epsilon": [1.0]}, variants={"a": [], "b": [], "c": [], "d": []})
    gathered = [
        row("a", (0.5, 0.6), 10, 1.0),
        row("b", (0.5, 0.6), 100, 2.0),
        row("c", (0.9,), 5, 1.0, stopped=("round 2 stopped",)),
        row("d", (), 5, None, stopped=("round 1 stopped",)),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sweep_table(config, gathered))
    lines = console.export_text().splitlines()
    assert [name for name in "abcd" if any(f"│ {name} *" in line for line in lines)] == ["a"]
    assert any("│ c " in line and "(1 of 2 seeds)" in line for line in lines)
    assert any("│ d " in line and "stopped" in line for line in lines)
    assert any("c stopped: round 2 stopped" in line for line in lines)
    for name in ("budget.svg", "budget.png"):
        draw_sweep(tmp_path / name, config, gathered)
        assert (tmp_path / name).stat().st_size > 1000
    assert "epsilon of the whole run" in (tmp_path / "budget.svg").read_text(encoding="utf-8")


def test_a_sweep_marks_the_epsilons_that_rest_on_a_user_s_code() -> None:
    config = sweep(axes={"model.name": ["linear", "net.py:Net"]}, variants={"as it is": []})
    found = [
        Row("as it is", (("model.name", name),), (0.5,), 10, {"local": 1.5, "protected": "record", "status": status}, 1.0)
        for name, status in (("linear", "proved"), ("net.py:Net", AUTHORS_CLAIM))
    ]
    lines = widths(sweep_table(config, found), 200)
    assert [("1.5 a record †" in line) for line in lines if "1.5 a record" in line] == [False, True]
    assert any(line.strip().startswith("† not proved, but author's claim") for line in lines)
    assert "†" not in "".join(widths(sweep_table(config, found[:1]), 200))


def test_notes_are_listed_once_with_the_number_of_runs_that_have_them() -> None:
    """Of notes that differ in their columns or numbers, the longest is shown. A run that two rows share counts once."""
    simulated = [f"{SIMULATION}; here all noise follows from a secret", "test rows are not protected: scores on them are exact figures"]
    hidden, late = "columns left out, because their values were not seen: ", "training stopped after round {} of 9: x"
    caveats = {
        "a": [*simulated, late.format(3), f"{hidden}age, crp"],
        "b": [*simulated, late.format(12), f"{hidden}age"],
        "c": [*simulated, late.format(5), "delta 0.1 is not below 1/50"],
        "d": [*simulated],
    }
    found = [Row(name, (), (0.5,), 8, {}, 1.0, caveats={name: tuple(notes)}) for name, notes in caveats.items()]
    several = "(details are those of one run): "
    assert notes_on_runs([*found, found[0]]) == [
        f"in 3 of 4 finished runs {several}{late.format(12)}",
        f"in 2 of 4 finished runs {several}{hidden}age, crp",
        "in 1 of 4 finished runs: delta 0.1 is not below 1/50",
    ]
    assert found[0].notes == caveats["a"]
    many = replace(found[0], caveats={"a": tuple(f"{chr(97 + place)}: note" for place in range(13))})
    assert notes_on_runs([many])[0] == "in 1 of 1 finished run: a: note"
    assert notes_on_runs([many])[10:] == ["and 3 further notes, under caveats in rows.json"]
    assert notes_on_runs([Row("failed", (), (), 0, {}, 0.0, failed=("it failed",))]) == []


def test_a_sweep_over_names_is_drawn_too(tmp_path: Path) -> None:
    config = sweep(axes={"mechanism.name": ["duchi", "none"]}, variants={"as it is": []})
    found = [Row("as it is", (("mechanism.name", name),), (0.5,), 10, {"local": 1.0}, 1.0) for name in ("duchi", "none")]
    draw_sweep(tmp_path / "names.svg", config, found)
    assert "duchi" in (tmp_path / "names.svg").read_text(encoding="utf-8")


def test_a_sweep_whose_scores_have_no_value_is_shown(tmp_path: Path) -> None:
    """As the AUROC has none where all test rows are of one class. One run with a value has no spread."""
    config = sweep(axes={"privacy.target_epsilon": [1.0, 2.0]}, variants={"as it is": []})
    scores = {1.0: (math.nan, math.nan), 2.0: (0.5, math.nan)}
    found = [
        Row("as it is", (("privacy.target_epsilon", epsilon),), score, 10, {"local": epsilon}, 1.0) for epsilon, score in scores.items()
    ]
    assert [row.deviation for row in found] == [0.0, 0.0]
    assert sweep_table(config, found).row_count == 2
    draw_sweep(tmp_path / "none.svg", config, found)


@pytest.mark.parametrize("place", ["settings", "axes", "variants", "overrides"])
def test_a_seed_is_no_setting_of_a_sweep(place: str) -> None:
    fault = {"settings": ["seed = 3"], "axes": {"seed": [1, 2]}, "variants": {"a": ["seed=9"]}}
    config = sweep(**{place: fault[place]} if place in fault else {})
    with pytest.raises(ConfigError, match=r"sets seed, but each of its runs has a seed of its own.*--seeds 3"):
        cells(config, ["seed=7"] if place == "overrides" else [])


def test_each_value_of_a_second_axis_has_a_line_of_its_own(tmp_path: Path) -> None:
    """A line that joined settings of several epsilons would say nothing of the rounds."""
    config = sweep(axes={"training.rounds": [5, 40], "privacy.target_epsilon": [0.5, 4.0]}, variants={"as it is": []})
    found = [
        Row("as it is", (("training.rounds", rounds), ("privacy.target_epsilon", epsilon)), (0.5,), 10, {"local": epsilon}, 1.0)
        for rounds in (5, 40)
        for epsilon in (0.5, 4.0)
    ]
    draw_sweep(tmp_path / "two.svg", config, found)
    drawn = (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert re.findall(r">(target_epsilon [\d.]+|as it is)<", drawn) == ["target_epsilon 0.5", "target_epsilon 4.0"]


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


@pytest.mark.slow
def test_a_run_that_goes_to_nan_is_a_result_and_the_sweep_goes_on(tiny_data: Path, tmp_path: Path) -> None:
    config = sweep(seeds=[0], axes={"training.learning_rate": [0.01, 3e38]}, variants={"bits": []})
    counting = Counting()
    runner = Runner(tiny_data, torch.device("cpu"), counting, lambda path, result: None)
    todo = cells(config, [*TINY, "training.rounds=2"])
    results = [(cell, run_cell(cell, runner, tmp_path / "out")) for cell in todo]
    assert "NaN" in results[1][1]["stopped"]
    began = counting.rounds
    assert run_cell(todo[1], runner, tmp_path / "out") == results[1][1]  # and it is not tried again
    assert counting.rounds == began
    good, bad = rows(results)
    assert (len(good.score), good.stopped) == (1, ())
    assert (bad.score, bad.mean, bad.deviation) == ((), None, 0.0)
    assert len(bad.stopped) == 1
    json.dumps(bad.to_dict(), allow_nan=False)
    table = sweep_table(config, [good, bad])
    assert "stopped" in str(table.caption)
    draw_sweep(tmp_path / "score.svg", config, [good, bad])


@pytest.fixture(scope="module")
def noisy_sweep(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Cell, dict[str, Any]]]]:
    """A sweep over a noise schedule, with a variant without noise: its folder, and what came out."""
    folder = tmp_path_factory.mktemp("noisy")
    config = sweep(variants={"plain": ['mechanism.name="none"'], "noisy": []})
    config = config.model_copy(update={"settings": [text for text in NOISY if text.startswith("mechanism.")]})
    others = [text for text in NOISY if not text.startswith("mechanism.")]
    runner = Runner(tiny_data, torch.device("cpu"), Counting(), lambda path, result: None)
    return folder / "out", [(cell, run_cell(cell, runner, folder / "out")) for cell in cells(config, [*TINY, *others])]


@pytest.fixture
def noisy(noisy_sweep: tuple[Path, list[tuple[Cell, dict[str, Any]]]], tmp_path: Path) -> list[tuple[Cell, dict[str, Any]]]:
    """The same, with a copy of its folder in ``tmp_path / "out"`` that may be changed."""
    folder, results = noisy_sweep
    shutil.copytree(folder, tmp_path / "out")
    return copy.deepcopy(results)


@pytest.mark.slow
@pytest.mark.xdist_group("noisy sweep")
def test_rows_and_courses_of_a_noise_schedule_hold_the_figures_of_the_runs(
    noisy: list[tuple[Cell, dict[str, Any]]], tmp_path: Path
) -> None:
    plain, *others = gathered = rows(noisy)
    found = curves(noisy, tmp_path / "out")
    assert [curve.row for curve in found] == gathered
    assert (plain.noise, found[0].norm, found[0].paper_epsilon) == ({}, (), ())
    assert len(found[0].score) == 2
    assert len(others) == 2
    for one in others:
        own = [result for cell, result in noisy if cell.variant == "noisy" and cell.point == one.point]
        norms = [result["noise"]["norm"] for result in own]
        assert one.noise["norm"] == pytest.approx(sum(norms) / 2, rel=1e-12)
        assert one.noise["norm_deviation"] == pytest.approx(abs(norms[0] - norms[1]) / math.sqrt(2), rel=1e-9)
        assert one.noise["norm_deviation"] > 0
        assert one.noise["protected_fraction"] == 1
        assert one.noise["paper_epsilon"] == pytest.approx(own[0]["noise"]["paper_epsilon"], rel=1e-12)
        curve = next(curve for curve in found if curve.row == one)
        assert curve.score == tuple(tuple(result["score_per_round"]) for result in own)
        for result, norm, epsilon in zip(own, curve.norm, curve.paper_epsilon, strict=True):
            assert len(norm) == 3
            assert 0 < norm[0] < norm[1] < norm[2] == pytest.approx(result["noise"]["norm"], rel=1e-12)
            each = result["noise"]["paper_epsilon_per_round"]
            assert epsilon == pytest.approx([each[0], each[0] + each[1], sum(each)], rel=1e-12)
            assert epsilon[-1] == pytest.approx(result["noise"]["paper_epsilon"], rel=1e-12)
    json.dumps([one.to_dict() for one in gathered], allow_nan=False)


@pytest.mark.slow
@pytest.mark.xdist_group("noisy sweep")
def test_a_round_without_any_client_adds_nothing(noisy: list[tuple[Cell, dict[str, Any]]], tmp_path: Path) -> None:
    cell, result = next((cell, result) for cell, result in noisy if "noise" in result)
    path = tmp_path / "out" / "runs" / cell.folder_name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[1]["noise"] = {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, _, last = result["noise"]["paper_epsilon_per_round"]
    result = {**result, "noise": {**result["noise"], "paper_epsilon_per_round": [first, last]}}
    (curve,) = curves([(cell, result)], tmp_path / "out")
    assert curve.paper_epsilon == ((first, first, first + last),)
    one, three = lines[0]["noise"]["norm"], lines[2]["noise"]["norm"]
    assert curve.norm == ((one, one, one + three),)


@pytest.mark.slow
@pytest.mark.xdist_group("noisy sweep")
def test_damaged_metrics_are_one_line(noisy: list[tuple[Cell, dict[str, Any]]], tmp_path: Path) -> None:
    cell, result = next((cell, result) for cell, result in noisy if "noise" in result)
    path = tmp_path / "out" / "runs" / cell.folder_name / "metrics.jsonl"
    first = path.read_text(encoding="utf-8").splitlines()[0] + "\n"
    for damage in (
        "",
        first,
        4 * first,
        "[]\n",
        3 * '{"noise": {}}\n',
        3 * '{"noise": {"scale": 1.0}}\n',
        "not JSON\n",
        '{"round": 1}\n',
        None,
    ):
        path.unlink() if damage is None else path.write_text(damage, encoding="utf-8")
        with pytest.raises(DataError, match=f"{path} (is damaged.*remove|cannot be read: No such file)") as caught:
            curves([(cell, result)], tmp_path / "out")
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.xdist_group("noisy sweep")
def test_a_stopped_run_has_no_course_and_costs_the_others_nothing(noisy: list[tuple[Cell, dict[str, Any]]], tmp_path: Path) -> None:
    whole = curves(noisy, tmp_path / "out")
    first = next(number for number, (_, result) in enumerate(noisy) if "noise" in result)
    results = [(cell, {"stopped": "round 1: NaN"} if number == first else result) for number, (cell, result) in enumerate(noisy)]
    partly = curves(results, tmp_path / "out")
    hit = next(number for number, curve in enumerate(whole) if curve.row.point == noisy[first][0].point)
    for number, (before, after) in enumerate(zip(whole, partly, strict=True)):
        if number == hit:
            assert (after.norm, after.score, after.row.stopped) == (before.norm[1:], before.score[1:], ("round 1: NaN",))
            assert after.row.noise["norm"] == pytest.approx(before.norm[1][-1], rel=1e-12)
            assert before.norm[1][-1] == pytest.approx(noisy[first][1]["noise"]["norm"], rel=0.5)
            assert after.row.noise["norm_deviation"] == 0
        else:
            assert after == before


def printed(config: SweepConfig, gathered: list[Row], width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(SweepResult(config, tuple(gathered), (), None))
    return console.export_text()


def test_the_tables_of_noise_schedules_fit_a_terminal_of_80_columns() -> None:
    config = sweep(seeds=[0, 1, 2])
    noise = {"norm": 34001.6, "norm_deviation": 12.34, "protected_fraction": 0.998, "paper_epsilon": 0.0125}
    small = {**noise, "norm": 169.81, "norm_deviation": 0.4567}
    gathered = [
        row("Time-Varying DP", (0.1234, 0.3456, 0.2345), 87_360, "infinity", noise=noise),
        row("AdapLDP", (0.98, 0.97, 0.99), 87_360, 3751.46, noise=small),
        row("once", (0.98,), 87_360, "infinity", noise=noise, stopped=("NaN", "NaN")),
        row("plain", (0.98, 0.97, 0.99), 87_360, "infinity"),
    ]
    text = printed(config, gathered, width=80)
    assert "…" not in text
    for words in (
        ("23.45 ± 11.11", "none"),
        ("AdapLDP", "3,751.5"),
        ("34,002 ± 12", "99.8%", "0.0125"),
        ("AdapLDP", "169.8 ± 0.46"),
    ):
        assert any(all(word in line for word in words) for line in text.splitlines()), words
    assert [line.count("±") for line in text.splitlines() if "│ once " in line] == [0, 0]
    assert len([line for line in text.splitlines() if "plain" in line]) == 1  # in the first table alone
    assert "LaDP-FL adds it up, no guarantee" in text.replace("\n", " ")
    assert "noised" not in printed(config, gathered[3:])
    assert "none under local: no epsilon is known" in " ".join(printed(config, gathered[3:]).split())
    assert "none under" not in " ".join(printed(config, gathered[1:2]).split())
    pure = replace(gathered[1], privacy={"local": 4.0, "local_pure": 5.0})
    gaussian = replace(gathered[1], privacy={"local": 4.0, "local_pure": "infinity"})
    assert "none under pure: this noise has no epsilon at delta 0" in " ".join(printed(config, [pure, gaussian]).split())
    assert "pure" not in printed(config, [gaussian])  # no row has a pure epsilon
    assert "infinity" not in text


def test_a_column_for_a_shuffler_is_there_only_where_one_is() -> None:
    behind = Row("behind", (), (0.5,), 10, {"local": 1.0, "shuffled_upper_adaptive": 0.25}, 1.0)
    bare = Row("bare", (), (0.5,), 10, {"local": 1.0, "shuffled_upper_adaptive": None}, 1.0)
    config = sweep(axes={})
    both = printed(config, [behind, bare])
    assert "ideal shuffler" in " ".join(both.split())
    assert "0.25" in both
    assert "shuffle" not in printed(config, [bare])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2, 4", [1, 2, 4]),
        ("dp-sgd,duchi", ["dp-sgd", "duchi"]),
        ("{age = [0, 120]},{age = [0, 100], bmi = [1, 2]}", [{"age": [0, 120]}, {"age": [0, 100], "bmi": [1, 2]}]),
        ("[32,16],[64]", [[32, 16], [64]]),
        ("""["a,b", 'c]'],["d\\"],"]""", [["a,b", "c]"], ['d"],']]),
        ('"a,b",c', ["a,b", "c"]),
        ("true,1.5,off", [True, 1.5, "off"]),
    ],
)
def test_an_axis_is_split_at_commas_that_separate_values(text: str, values: list[Any]) -> None:
    assert parse_axis(f"data.bounds={text}") == ("data.bounds", values)
    made = sweep_of("own", [], {"data.bounds": values})
    assert made == sweep_of("own", [], dict([parse_axis(f"data.bounds={text}")]))
    assert SweepConfig.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize("text", ["data.bounds", "=1", "a=", "a=1,,2", "a=1,"])
def test_an_axis_without_a_key_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no values: give KEY=VALUE"):
        parse_axis(text)


@pytest.mark.parametrize("key", ["training.learning_rate", "training.epochs", "training.batch_size"])
def test_an_axis_without_effect_is_refused(key: str) -> None:
    """Noise alone would tell its values apart, and each run is charged."""
    records = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "shuffling.channel=direct"]
    with pytest.raises(ConfigError, match=rf"{key} changes nothing where clients send one gradient a round"):
        check_cells(cells(sweep_of("quickstart", records, {key: [1, 2]})))


def test_a_sweep_is_called_after_its_data_and_what_it_compares() -> None:
    axes: dict[str, list[Any]] = {"privacy.target_epsilon": [1], "model.name": ["mlp"]}
    assert sweep_of("own", ['data.path="/data/all patients.csv"'], axes).name == "all-patients-target_epsilon-model"
    assert sweep_of("own", ['data.name="owner/rows"'], {}).name == "rows"
    assert sweep_of("own", ['data.name="../make.py:rows"'], {}).name == "make"
    assert sweep_of("own", ['data.name="given"'], axes, 3, "mine").name == "mine"
    assert len(sweep_of("own", [f'data.path="/data/{"x" * 300}.csv"'], axes).name) <= 80


def test_settings_are_a_table_or_texts_and_the_same_sweep() -> None:
    texts = ["data.name=mnist", "clients.count=4", "training={rounds = 2, epochs = 1}"]
    table = {"data": {"name": "mnist"}, "clients.count": 4, "training": {"rounds": 2, "epochs": 1}}
    one, other = sweep(settings=texts, seeds=2), sweep(settings=table, seeds=2)
    assert define_same_runs(one, [], other, [])
    assert [cell.folder_name for cell in cells(one)] == [cell.folder_name for cell in cells(other)]
    assert cells(one)[0].config.training.epochs == 1
    as_numbers = sweep(settings=table, seeds=2, axes={"mechanism.epsilon": [1, 4]})
    assert define_same_runs(one, [], as_numbers, [])
    others: list[dict[str, object]] = [{"seeds": 1}, {"name": "x"}, {"variants": {"a": []}}, {"axes": {"mechanism.epsilon": [1.0, 5.0]}}]
    for changes in others:
        assert not define_same_runs(one, [], sweep(**{"settings": table, "seeds": 2, **changes}), [])


def widths(table: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize(("width", "form"), [(200, "whole"), (120, "fewer"), (80, "lists"), (60, "lists"), (40, "lists"), (20, "lists")])
def test_names_of_settings_are_readable_at_every_width(width: int, form: str) -> None:
    long = "bits of the largest weights, behind a shuffler"
    config = sweep(variants={"no noise": [], long: []}, axes={"training.learning_rate": [0.001, 0.0125], "model.name": ["mlp"]})
    point = (("training.learning_rate", 0.0125), ("model.name", "logistic-regression"))
    privacy = {"local": 1234.5, "local_pure": 12345.6, "shuffled_upper_adaptive": 12.5, "protected": "record"}
    found = [Row(name, point, (0.51, 0.62), 123456, privacy, 100.0) for name in config.variants]
    lines = widths(sweep_table(config, found), width)
    text = " ".join(" ".join(line.replace("│", " ").split()) for line in lines)
    assert "no noise" in text
    if width > 20:
        assert all(any(word in line for line in lines) for word in (*long.split(), "0.0125", "logistic-regression", "learning_rate"))
    assert "1,234.5" in "".join(text.split())
    assert ("no room for: " in text, "accuracy %: 56.50" in text) == (form == "fewer", form == "lists")
    assert "56.50 ± 7.78" in text


@pytest.mark.parametrize(("width", "left_out"), [(80, "seconds"), (60, "bytes, pure, seconds")])
def test_a_narrow_table_leaves_out_what_matters_least(width: int, left_out: str) -> None:
    config = sweep(variants={"as it is": []}, axes={"privacy.target_epsilon": [2.0]})
    privacy = {"local": 2.0, "local_pure": 1234567.8, "protected": "record"}
    lines = widths(sweep_table(config, [Row("as it is", (("privacy.target_epsilon", 2.0),), (0.5, 0.6), 123456, privacy, 1.0)]), width)
    assert f"no room for: {left_out}" in [line.strip() for line in lines]
    assert any("target_epsilon" in line and "accuracy %" in line and "local" in line for line in lines)


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_reproduction_names_its_settings_at_every_width(width: int) -> None:
    found = load_reproduction("ldp-fl/fig5")
    config = load_sweep(found.at_size("ldp-fl/fig5", "desk").sweep)
    rows = [ReproducedRow(None, cell.variant, cell.point, 0, 3) for cell in cells(config, resolve=False)]
    text = " ".join(" ".join(widths(reproduction_table(found, config, rows), width)).split())
    assert all(name in text for name in (*config.variants, *config.headings, "not run", "holds"))


def test_settings_of_one_last_word_have_their_whole_keys() -> None:
    assert sweep(axes={"mechanism.name": ["duchi"], "model.name": ["mlp"]}).headings == ["mechanism", "model"]
    assert sweep(axes={"training.momentum": [0.1], "mechanism.momentum": [0.2], "clients.count": [3]}).headings == [
        "training.momentum",
        "mechanism.momentum",
        "count",
    ]
