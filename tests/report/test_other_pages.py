"""Pages about sweeps and plans: what they say is computed from what lies there, and they need nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_page import Reader

from conftest import CommandLine
from ldpfl import api
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_run import open_folder


def small_sweep() -> SweepConfig:
    variants = {
        "sent <b>apart</b>": ["shuffling.channel=direct"],
        "nothing": ["mechanism.name=none"],
        "kept": ["privacy.target_epsilon=50"],
    }
    settings = ['data.name="mnist"', 'model.name="logistic-regression"', "clients.count=4", "training.epochs=1"]
    axes = {"training.rounds": [1, 2]}
    tree = {"name": "tiny", "recipe": "quickstart", "settings": settings, "seeds": [0, 1], "axes": axes, "variants": variants}
    return SweepConfig.model_validate(tree)


@pytest.fixture(scope="module")
def swept(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept") / "sweep"
    api.sweep(small_sweep(), folder=folder, data_dir=tiny_data, progress=False)
    return folder


def text_of(page: Path) -> tuple[Reader, str]:
    read = Reader(page.read_text(encoding="utf-8"))
    assert not {"script", "img", "link", "iframe", "b"} & set(read.tags)
    assert [place for place in read.fetched if place] == []
    assert read.tags.count("main") == read.tags.count("h1") == 1
    return read, " ".join(read.words.split())


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_has_a_page_of_every_setting(swept: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """Also of those whose noise was set by a target, and those that protect nothing; whatever a result's file says it holds."""
    for result in (swept / "runs").glob("*/result.json"):
        result.write_text(json.dumps({**json.loads(result.read_text()), "privacy": {"local": 0.001, "shuffled_upper_adaptive": 0.001}}))
    assert "report.html" in ldpfl("report", swept).out
    read, said = text_of(swept / "report.html")
    assert "12 of 12 runs are finished." in said
    assert all(name in said for name in ("sent <b>apart</b>", "nothing", "kept", "epsilon that holds"))
    assert "Not drawn, for no epsilon is known of them: nothing" in said
    assert "0.001" not in said
    assert read.tags.count("svg") == 2
    assert (swept / "report.html").read_text(encoding="utf-8").count(">none</td>") == 2
    assert "only one sweep or one plan" in ldpfl.refused("report", swept, swept, "--out", tmp_path / "x.html")


@pytest.mark.slow
def test_a_sweep_whose_runs_are_exchanged_has_no_page(swept: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    exchanged = shutil.copytree(swept, tmp_path / "exchanged")
    names = json.loads((exchanged / "runs.json").read_text())
    (exchanged / "runs.json").write_text(json.dumps(names[::-1]))
    assert "and the sweep lists it as the run with" in ldpfl.refused("report", exchanged)


def test_a_sweep_that_goes_on_says_how_far_it_is(ldpfl: CommandLine, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    open_folder(small_sweep(), [], begun)
    assert ldpfl("report", begun).code == 0
    said = text_of(begun / "report.html")[1]
    assert "logistic-regression on mnist with 4 clients: 6 settings, 2 seeds each. 0 of 12 runs are finished." in said
    assert "Go on with: ldpfl sweep --resume --out" in said


@pytest.mark.parametrize(
    "asked",
    [
        ("--epsilon", 0.1, "--clients", 100, "--rounds", 2, "--weights", 10, "--participation", 0.5),
        ("--epsilon", 1, "--clients", 50, "--rounds", 1, "--weights", 5, "--mechanism", "none"),
        ("--regime", "records", "--target", 2, "--clients", 10, "--records", 60, "--rounds", 5, "--weights", 20, "--colluding", 2),
    ],
)
@pytest.mark.thorough_for("asked0")
def test_a_plan_has_a_page(asked: tuple[object, ...], ldpfl: CommandLine, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    planned = ldpfl("plan", *map(str, asked), "--json").out
    plan.write_text(planned)
    assert ldpfl("report", plan, "--out", page).code == 0
    first = page.read_bytes()
    plan.write_text(json.dumps({**json.loads(planned), "local": 1e-9, "guarantees": []}))  # what the file says of them is not repeated
    assert ldpfl("report", plan, "--out", page).code == 0
    assert page.read_bytes() == first
    said = text_of(page)[1]
    assert "What holds" in said
    assert f"{json.loads(planned)['weights']};" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '"regime"', '{"regime": "records"}', '{"epsilon": "x"}'])
def test_what_is_no_plan_is_one_line(text: str, ldpfl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert "is not a" in ldpfl.refused("report", tmp_path / "plan.json", "--out", tmp_path / "x.html")


@pytest.mark.slow
def test_a_plan_of_impossible_figures_is_one_line(ldpfl: CommandLine, tmp_path: Path) -> None:
    one_bit = ["--clients", "20", "--rounds", "1", "--weights", "1"]  # accounted at once
    plan = json.loads(ldpfl("plan", "--epsilon", "1", *one_bit, "--json").out)
    for name, wrong in (("clients", 10**400), ("clients", "x"), ("epsilon", -1), ("channel", "post"), ("mechanism", "a.b:c")):
        (tmp_path / "plan.json").write_text(json.dumps({**plan, name: wrong}))
        assert ldpfl.refused("report", tmp_path / "plan.json", "--out", tmp_path / "x.html")
