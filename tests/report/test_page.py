"""The page about runs: what is in it, what is not, and that it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from conftest import CommandLine
from ldpfl import api
from ldpfl.report.page import page


class Reader(HTMLParser):
    """Collects the text of a page, its tags, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.fetched, self.open = "", [""], [""], [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href") and not str(value).startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture(scope="module")
def folder(tiny_data: Path, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "run"
    api.run(config_file, folder=path, data_dir=tiny_data, progress=False)
    return path


def test_it_says_how_good_and_what_is_protected_and_needs_nothing_else(folder: Path, tiny_data: Path) -> None:
    read, result = Reader(page([folder])), api.load_run(folder, data_dir=tiny_data)
    said = " ".join(read.words.split())
    assert result.privacy.verdict in said
    assert f"{result.accuracy:.2%}" in said
    for layer in result.to_dict()["layers"]:
        assert layer in said
    assert "What the rounds so far cost together" in said
    assert 'name = "duchi"' in said
    assert not {"script", "img", "link", "iframe"} & set(read.tags)
    assert [place for place in read.fetched if place] == []
    assert read.tags.count("svg") == 3
    assert read.tags.count("main") == read.tags.count("h1") == 1


def test_equal_runs_have_equal_pages(folder: Path) -> None:
    assert page([folder]) == page([folder])


def test_runs_stand_beside_each_other(folder: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    outcome = ldpfl("report", folder, folder, "--out", tmp_path / "both.html")
    assert outcome.code == 0, outcome.err
    read = Reader((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert "2 runs" in read.words
    assert read.tags.count("article") == 2


def test_a_run_s_page_lies_in_its_folder(folder: Path, ldpfl: CommandLine) -> None:
    assert "report.html" in ldpfl("report", folder).out
    assert (folder / "report.html").read_text(encoding="utf-8") == page([folder])


def test_colours_follow_the_reader_s_mode(folder: Path) -> None:
    """No picture keeps a colour of its own, which may be that of the paper."""
    pictures = re.findall(r"<svg.*?</svg>", page([folder]), re.S)
    assert [re.findall(r"#[0-9a-fA-F]{6}\b", picture) for picture in pictures] == [[], [], []]


def test_the_seed_of_own_data_is_not_in_it(tmp_path: Path) -> None:
    rows = pd.DataFrame({"age": range(40), "hospital": [0, 1] * 20, "outcome": ["a", "b", "b", "a"] * 10})
    settings = {"data.bounds": {"age": [0, 40]}, "training.rounds": 2}
    api.run(data=rows, target="outcome", client="hospital", seed=987654321, settings=settings, folder=tmp_path / "own", progress=False)
    text = page([tmp_path / "own"])
    assert "987654321" not in text
    assert "seed" not in (tmp_path / "own" / "curve.svg").read_text(encoding="utf-8")
    assert "One record" in text


@pytest.mark.parametrize(("what", "said"), [("nothing", "holds no run"), ("begun", "not finished")])
def test_what_is_no_finished_run_is_named(what: str, said: str, folder: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    place = tmp_path / what
    place.mkdir()
    if what == "begun":
        (place / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    assert said in ldpfl.refused("report", place)


def test_what_a_foreign_run_is_called_is_no_markup(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "foreign"
    place.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    result = (place / "result.json").read_text(encoding="utf-8")
    (place / "result.json").write_text(result.replace('"name": "', '"name": "<script>alert(1)</script>', 1), encoding="utf-8")
    assert "<script" not in page([place])
