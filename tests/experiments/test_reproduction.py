"""Tables and figures of the papers: what is shipped fits together, runs at once, can be stopped, and says what was not run."""

from __future__ import annotations

import csv
import io
import json
import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from conftest import TINY_TOML, CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.api.reproducing import AttackTitles
from ldpfl.experiments import load_recipe, read_config
from ldpfl.experiments.reproduction import Published, ReproducedRow, Reproduction, Shows, load_reproduction
from ldpfl.experiments.shipped import reproduction_files
from ldpfl.experiments.sweep_config import SweepConfig, cells, load_sweep
from ldpfl.experiments.sweep_rows import Row
from ldpfl.report.progress import ProgressDisplay
from ldpfl.report.reproduction import tidy
from ldpfl.simulation import workers

RESULTS = Path(__file__).parents[2] / "results"
SWEEP = """
name = "tiny-table"
recipe = "RECIPE"
settings = []
seeds = [0]

[axes]
"mechanism.epsilon" = [1.0, 4.0]

[variants]
"no noise" = ['mechanism.name="none"']
"with" = []
"""
TABLE = """
title = "A table"
source = "A paper, Table 7"
differs = "It is made up."
desk = { sweep = "SWEEP" }
published = [{ variant = "with", at = { "mechanism.epsilon" = 4.0 }, value = 55.5 }]
"""


@pytest.mark.parametrize("name", sorted(reproduction_files()))
def test_what_the_papers_report_is_of_runs_that_are_made(name: str) -> None:
    found = load_reproduction(name)
    for size in ("desk", "paper"):
        if getattr(found, size) is None:
            continue
        chosen = found.at_size(name, size)
        made = cells(load_sweep(chosen.sweep), chosen.settings, resolve=False)
        assert made
        if size == "paper":
            for one in found.published:
                assert any(cell.variant == one.variant and one.at.items() <= dict(cell.point).items() for cell in made), one
    assert found.desk or found.paper


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A table of three runs on the tiny digits."""
    recipe, sweep, table = tmp_path / "recipe.toml", tmp_path / "sweep.toml", tmp_path / "table.toml"
    recipe.write_text(TINY_TOML)
    sweep.write_text(SWEEP)
    table.write_text(TABLE.replace("SWEEP", str(sweep)))
    files: dict[str, Traversable] = {"a/table7": table}
    monkeypatch.setattr("ldpfl.experiments.reproduction.reproduction_files", lambda: files)
    monkeypatch.setattr("ldpfl.experiments.sweep_config.load_recipe", lambda name, *overrides: read_config(recipe, *overrides))
    return "a/table7"


@pytest.mark.slow
@pytest.mark.thorough
def test_runs_go_on_at_once_and_the_paper_stands_beside_them(
    own: str, tiny_data: Path, tmp_path: Path, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "numpy.py").write_text("raise SystemExit('nothing of the folder that one is in is imported')\n")
    monkeypatch.chdir(tmp_path / "here")
    before = ldpfl("reproduce", own, "--out", out, "--no-train", "--json")
    assert [line["state"] for line in json.loads(before.out)] == ["not run"] * 3
    result = api.reproduce(own, folder=out, data_dir=tiny_data, jobs=2, progress=False)
    assert result.is_finished
    logs = [log.read_text() for log in (out / "configs").glob("*.log")]
    assert logs
    assert not any("is imported" in log for log in logs)
    lines = list(csv.DictReader(io.StringIO((out / "table.csv").read_text())))
    assert [(line["setting"], line["mechanism.epsilon"], line["paper"]) for line in lines] == [
        ("no noise", "", ""),
        ("with", "1.0", ""),
        ("with", "4.0", "55.5"),
    ]
    free, one, four = result.rows
    assert free.row is not None
    assert free.row.mean is not None
    assert float(lines[0]["ours"]) == pytest.approx(100 * free.row.mean, abs=1e-3)
    assert lines[0]["epsilon_that_holds"] == "infinity"
    assert one.best_guarantee is not None
    assert four.best_guarantee is not None
    assert (one.best_guarantee[1], lines[1]["epsilon_claimed"]) == ("nobody", "1.0")  # eight clients hide nobody
    assert one.best_guarantee[0] < four.best_guarantee[0]
    assert "A paper, Table 7" in (out / "plot.svg").read_text()
    about = json.loads((out / "about.json").read_text())
    assert about["command"] == "ldpfl reproduce a/table7 --size desk"
    shown = ldpfl("reproduce", own, "--out", out, "--data-dir", tiny_data)  # nothing is run again
    assert "55.5" in shown.out
    assert "1/1" in shown.out
    assert [float(line["seconds_a_run"]) for line in lines] == [round(line.row.seconds, 1) for line in result.rows if line.row]
    assert "seconds: mean of a run" in " ".join(shown.out.split())
    # One thread each, as one run after the other has them: the same bytes.
    alone = api.reproduce(own, folder=tmp_path / "alone", data_dir=tiny_data, jobs=1, progress=False)
    assert [row.row.score for row in alone.rows if row.row] == [row.row.score for row in result.rows if row.row]


def test_attacks_say_how_long_the_others_will_take(own: str, tmp_path: Path) -> None:
    console, seconds = Console(file=io.StringIO(), width=120), iter([0.0, 90.0, 180.0])
    (cell, *_) = cells(load_sweep(str(tmp_path / "sweep.toml")), [], resolve=False)
    attacks = AttackTitles(ProgressDisplay(console, lines=False), lambda: next(seconds))
    for number in (1, 2, 3):
        attacks.begins(number, 3, cell)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert ["left" in line for line in said] == [False, True, True]
    assert said[1].endswith(", about 3 minutes left")
    assert said[2].endswith(", about 90 s left")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_table_of_distances_attacks_each_run_once(own: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shows the mean over a row's runs; without training it shows what was attacked before."""
    table = tmp_path / "table.toml"
    text = TABLE.replace("SWEEP", str(tmp_path / "sweep.toml")).replace("desk = {", 'shows = "distance"\ndesk = { steps = 2,')
    table.write_text(text)
    out, changed = tmp_path / "out", ["data.private_label=4"]
    made = api.reproduce(own, folder=out, settings=changed, data_dir=tiny_data, jobs=1, progress=False)
    assert made.is_finished
    lines = made.to_dict()
    assert [line["state"] for line in lines] == ["run"] * 3
    found = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*/attacks/gan-4/attack.json"))]
    own_kind = [row for attack in found for row in attack["rows"] if row["kind"] == ("protected" if attack["epsilon"] else "unprotected")]
    assert sorted(line["ours"] for line in lines) == pytest.approx(sorted(row["distances"][0]["value"] for row in own_kind), abs=1e-3)
    monkeypatch.setattr("ldpfl.attacks.on_run.Attacker.run", lambda *told: pytest.fail("attacked again"))
    assert api.reproduce(own, folder=out, settings=changed, data_dir=tiny_data, progress=False).to_dict() == lines
    (out / "runs" / found_in(out) / "attacks" / "gan-4" / "attack.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        api.reproduce(own, folder=out, settings=changed, train=False, progress=False)


def found_in(out: Path) -> str:
    return next(path.name for path in (out / "runs").iterdir())


@pytest.mark.slow
def test_whoever_stops_it_finds_what_was_finished_and_leaves_nothing_behind(
    own: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks = tmp_path / "out", iter(range(1000))

    def stop(*progress: int) -> None:
        if next(looks) > 1:
            raise KeyboardInterrupt

    before = psutil.Process().children(recursive=True)
    monkeypatch.setattr("ldpfl.report.progress.ProgressDisplay.runs_progress", lambda self, *progress: stop(*progress))
    with pytest.raises(KeyboardInterrupt):
        api.reproduce(own, folder=out, data_dir=tiny_data, jobs=2, settings=["training.rounds=400"], progress=False)
    assert not [child for child in psutil.Process().children(recursive=True) if child not in before]
    lines = list(csv.DictReader(io.StringIO((out / "table.csv").read_text())))
    assert [line["state"] for line in lines] == ["not run"] * 3


def test_nothing_is_written_into_the_folder_of_another_sweep_nor_made_of_own_data(own: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    api.reproduce(own, folder=out, train=False, progress=False)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="holds another sweep"):
        api.reproduce(own, folder=out, train=False, settings=["training.rounds=2"], progress=False)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    with pytest.raises(ConfigError, match="for your own"):
        api.reproduce(own, folder=tmp_path / "mine", settings=[f"data.path={str(tmp_path)!r}"], progress=False)
    assert not (tmp_path / "mine").exists()


def test_a_table_that_is_not_made_at_a_size_says_so(ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "choose the size desk" in ldpfl.refused("reproduce", "ladp-fl/table5", "--size", "paper")
    assert "did you mean 'ldp-fl/table1'" in ldpfl.refused("reproduce", "ldp-fl/table")
    assert "desk or paper" in ldpfl.refused("reproduce", "ldp-fl/table1", "--size", "large")
    assert "ldp-fl/table1" in ldpfl("reproduce").out
    with pytest.raises(ConfigError, match="choose the size paper"):
        Reproduction(title="t", source="s").at_size("x", "desk")


def test_the_paper_s_figure_is_that_of_its_variant_and_point() -> None:
    found = Reproduction(
        title="t", source="s", published=[Published(variant="a", at={"x": 1.0}, value=3.0), Published(variant="b", value=4.0)]
    )
    assert found.paper_figure("a", (("x", 1.0), ("y", 2))) == 3.0
    assert found.paper_figure("a", (("x", 2.0),)) is None
    assert found.paper_figure("b", ()) == 4.0


@pytest.mark.parametrize(("shows", "ours", "spread"), [("score", 85.0, 7.0711), ("noise", 5.0, 0.5), ("seconds", 3.0, None)])
def test_the_spread_is_that_of_the_figure_that_is_compared(shows: Shows, ours: float, spread: float | None) -> None:
    noise = {"norm": 5.0, "norm_deviation": 0.5, "protected_fraction": 1.0, "paper_epsilon": 0.1}
    row = Row("a", (), (0.9, 0.8), 1, {}, 3.0, (), noise)
    sweep = SweepConfig(name="s", recipe="quickstart")
    (line,) = tidy(Reproduction(title="t", source="s", shows=shows), sweep, [ReproducedRow(row, "a", (), 2, 2)])
    assert (line["ours"], line["spread"]) == (ours, spread)


def test_as_many_at_once_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert workers.cores() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert workers.cores() >= 1


def kept() -> list[Path]:
    return sorted(path.parent for path in RESULTS.rglob("about.json"))


def test_kept_results_name_what_made_them() -> None:
    """Recipe, commit, seeds and command; a table whose rows are run or said not to be; and the picture."""
    assert kept()
    for folder in kept():
        about: dict[str, Any] = json.loads((folder / "about.json").read_text())
        assert about["recipe"]
        assert about["seeds"]
        assert re.fullmatch(r"[0-9a-f]{40}", about["commit"]), folder
        assert about["command"].startswith(f"ldpfl reproduce {about['name']} --size {about['size']}")
        load_reproduction(about["name"])
        lines = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
        assert lines
        assert all(line["ours"] or line["state"] for line in lines)
        assert (folder / "plot.svg").read_text().startswith("<?xml")


def test_what_a_user_changed_stands_beside_the_papers_figures(own: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    changed = ["--set", "training.rounds=2"]
    shown = " ".join(ldpfl("reproduce", own, *changed, "--out", tmp_path / "out", "--no-train").out.split())
    assert "Not the paper's setting. Changed by --set: training.rounds=2" in shown
    lines = list(csv.DictReader(io.StringIO((tmp_path / "out" / "table.csv").read_text())))
    assert {line["changed"] for line in lines} == {"training.rounds=2"}
    assert "Changed by --set: training.rounds=2" in (tmp_path / "out" / "plot.svg").read_text()


def test_the_table_of_accuracies_runs_what_the_recipes_run() -> None:
    """The page of results gives its figures by recipe."""
    made = {cell.variant: cell.config for cell in cells(load_sweep("ldp-fl-accuracy"), resolve=False) if cell.config.seed == 0}
    weights = ["mechanism.perturbed=weights", "ranges.rule=denoised", "ranges.radius=initial"]
    recipes: list[tuple[str, list[str]]] = [(name, []) for name in ("mnist", "mnist-update", "fmnist", "fmnist-update")]
    recipes += [("cifar10-pixels", weights), ("cifar10-pixels", [])]
    for (name, settings), config in zip(recipes, made.values(), strict=True):
        recipe = load_recipe(f"ldp-fl/{name}", settings)
        assert config.differences(recipe.model_copy(update={"name": config.name, "description": config.description})) == [], name
