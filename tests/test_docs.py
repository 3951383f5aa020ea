"""What the documents show runs, and what they name is there."""

from __future__ import annotations

import csv
import re
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import ldpfl
from ldpfl.experiments.shipped import recipe_names, sweep_names

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("README.md", "docs/tutorial.md", "docs/guide.md")


def blocks(page: Path) -> list[str]:
    """Python code of a page."""
    return [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S)]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
@pytest.mark.thorough_for("README.md", "docs/tutorial.md")
def test_code_on_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    code = blocks(ROOT / page)
    assert code
    for block in code:
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
def test_figures_are_handed_on_by_a_callback(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the three services' interfaces made up: that each is called with every round's score."""
    services = {name: MagicMock() for name in ("mlflow", "wandb", "torch.utils.tensorboard")}
    for name, service in services.items():
        monkeypatch.setitem(sys.modules, name, service)
    small = {"data.name": "mnist", "model.name": "linear", "clients.count": 4, "shuffling.channel": "direct"}
    quick = partial(ldpfl.run, settings=small, data_dir=tiny_data, progress=False, baseline=False)
    monkeypatch.setattr(ldpfl, "run", lambda what, *, rounds, count, on_round: quick(what, rounds=rounds, on_round=on_round))
    for block in blocks(ROOT / "docs" / "tracking.md"):
        exec(compile(block, "tracking.md", "exec"), {})
    board = services["torch.utils.tensorboard"].SummaryWriter().__enter__().add_scalar
    tracked = services["wandb"].init().__enter__()
    scores = [call.args[1] for call in board.call_args_list]
    assert [call.args[1:] for call in services["mlflow"].log_metric.call_args_list[:-1]] == [(score,) for score in scores]
    assert [call.args[0]["accuracy"] for call in tracked.log.call_args_list] == scores
    assert len(scores) == 3


def test_all_code_on_pages_is_python() -> None:
    for page in PAGES:
        for block in blocks(page):
            compile(block, str(page), "exec")


def test_the_home_page_of_the_site_is_the_readme() -> None:
    shared = [(ROOT / name).read_text(encoding="utf-8").split("## Further")[0] for name in ("README.md", "docs/index.md")]
    assert shared[0].replace("](docs/", "](") == shared[1]


def test_tests_that_pages_name_are_there() -> None:
    tests = ROOT / "tests"
    missing = [
        f"{page.name}: {file}::{name}"
        for page in PAGES
        for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
        if not (tests / file).exists() or f"def {name}(" not in (tests / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_the_picture_of_the_verdicts_shows_what_pages_say() -> None:
    results = ROOT / "docs" / "results"
    known = {*recipe_names(), *sweep_names()}
    with (results / "verdict.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert row["accuracy"] in (results / row["page"]).read_text(encoding="utf-8"), row
            assert row["command"].split()[2] in known, row


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
