"""No value of somebody's data is in an error, a warning or a log, whatever is wrong with which data; and messages say what was given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from PIL import Image

import ldpfl
from conftest import CommandLine
from grids import each
from ldpfl.errors import ConfigError, DataError, LdpflError
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import parse_config

WORD, NUMBER = "secret-4711", 4711.4711
SECRETS = (WORD, "4711")
OF_TABLE = {"training.rounds": 1}


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"age": np.arange(40) % 7, "out": ["a", "b"] * 20, **columns})


class Pairs(torch.utils.data.Dataset[Any]):
    """A data set that repeats what it holds in what it says went wrong."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: int) -> Any:
        raise ValueError(f"bad sample {WORD}")


def check(data: object, **named: Any) -> None:
    ldpfl.check(data=data, **named)


def from_csv(text: str, **named: Any) -> None:
    Path("rows.csv").write_text(text, encoding="utf-8")
    check("rows.csv", **named)


def rows(cell: str) -> str:
    return "age,out\n" + "".join(f"{place % 7},{'ab'[place % 2]}\n" for place in range(40)) + f"{cell},a\n"


REFUSED: dict[str, Callable[[], object]] = {
    "a word among numbers": lambda: check(frame(age=["1"] * 39 + [WORD]), target="out"),
    "a word among numbers of a file": lambda: from_csv(rows(WORD), target="out"),
    "infinity": lambda: from_csv(rows("inf"), target="out"),
    "a category": lambda: check(frame(kind=["x"] * 39 + [WORD]), target="out", categories={"kind": ["x"]}),
    "a class": lambda: check(frame(out=["a", "b"] * 19 + ["a", WORD]), target="out", classes=["a", "b"]),
    "a class of numbers": lambda: check((torch.zeros(4, 2), torch.tensor([0, 1, 1, 4711]))),
    "the same class": lambda: check(frame(out=[WORD] * 40), target="out"),
    "no label": lambda: check(frame(out=[0, NUMBER] * 20, more=0), target=["out", "more"], task="multilabel"),
    "a number that is a word": lambda: check(frame(out=["1"] * 39 + [WORD]), target="out", task="regression"),
    "an object": lambda: check(frame(kind=[{WORD: NUMBER}] * 40), target="out"),
    "a row of too many cells": lambda: from_csv(rows(f"{WORD},{WORD},1"), target="out"),
    "an open quotation mark": lambda: from_csv(rows(f'"{WORD}'), target="out"),
    "words as inputs": lambda: check(([[WORD], [WORD]], [0, 1])),
    "inputs of several lengths": lambda: check(([[NUMBER], [NUMBER, 1.0]], [0, 1])),
    "a list of tensors": lambda: check((torch.zeros(4, 2), [torch.full((9,), NUMBER), torch.zeros(3)])),
    "a target of tensors": lambda: check(frame(), target=[torch.full((6000,), NUMBER)] * 6),
    "a target of arrays": lambda: check(frame(), target=np.full((6, 6), NUMBER)),
    "a frame as a setting": lambda: check(frame(), target="out", settings={"data.client": frame(x=WORD)}),
    "a series as a flag": lambda: check(frame(), target="out", client=pd.Series([WORD] * 40)),
    "a list": lambda: check([[NUMBER]] * 3),
    "a dict": lambda: check({"age": [NUMBER] * 3, "out": [WORD] * 3}, target="out"),
    "an array": lambda: check(np.full((3, 2), NUMBER)),
    "a data set that raises": lambda: check(Pairs()),
    "one row": lambda: check(frame(kind=WORD)[:1], target="out"),
    "a client without a name": lambda: check(frame(kind=[WORD] * 39 + [""]), target="out", client="kind"),
    "a count": lambda: ldpfl.check(clients={"count": frame(x=WORD)}),
    "an epsilon": lambda: ldpfl.check(epsilon=[WORD] * 1000),
    "a plan": lambda: ldpfl.plan(epsilon=np.full(1000, NUMBER), clients=1, weights=1, rounds=1),
    "a model": lambda: check(frame(), target="out", model=frame(x=WORD)),
    "a folder": lambda: ldpfl.run(folder=frame(x=WORD)),
}


@pytest.mark.slow
@each("name", REFUSED)
def test_no_value_is_in_a_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.clear()
    with caplog.at_level(logging.DEBUG), pytest.raises(LdpflError) as refused:
        REFUSED[name]()
    said = [str(refused.value), caplog.text]
    assert not any(secret in text for secret in SECRETS for text in said), said
    assert len(said[0]) < 600


GIVEN: dict[str, tuple[Callable[[], object], str]] = {
    "an Arrow table": (lambda: pyarrow.table({"age": [1]}), "data are a pyarrow Table, .*data.to_pandas\\(\\) is a data frame"),
    "a dict": (lambda: {"age": [1]}, "data are a dict of 1, which cannot be used: .*pandas.DataFrame\\(data\\)"),
    "a list": (lambda: [[1.0]] * 3, "data are a list of 3, which cannot be used: give a file, a folder, a pandas data frame"),
    "an array": (lambda: np.zeros((3, 2)), "data are a numpy ndarray"),
    "a PyTorch data set": (
        lambda: torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.zeros(4)),
        "data.target has no effect where data is a PyTorch data set",
    ),
    "a pair": (lambda: (torch.zeros(4, 2), torch.zeros(4)), "data.target has no effect where data is a pair of inputs and targets"),
}


@each("name", GIVEN)
def test_what_was_given_is_called_what_it_is(name: str) -> None:
    make, said = GIVEN[name]
    with pytest.raises(ConfigError, match=said):
        check(make(), target="out")


def folder_of_images(folder: Path, classes: tuple[str, ...] = ("a", "b")) -> Path:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for place in range(6):
            Image.new("RGB", (8, 8), (place, 0, 0)).save(folder / name / f"{place}.png")
    return folder


@pytest.mark.slow
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = folder_of_images(tmp_path / "images")
    odd = folder / "b" / "3.png"
    Image.new("RGB", (9, 8)).save(odd)
    with pytest.raises(DataError, match=r"b/3\.png has 9 x 8 pixels, and the image .*a/0\.png has 8 x 8"):
        check(folder)
    Image.new("I;16", (8, 8)).save(odd)
    with pytest.raises(DataError, match=r"b/3\.png has values of more than 8 bits"):
        check(folder)
    odd.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"the image .*b/3\.png cannot be decoded .*: replace it, or remove it"):
        check(folder)


@pytest.mark.slow
def test_a_folder_of_one_class_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="have no class: put the images of each class into a separate folder, at least two folders"):
        check(folder_of_images(tmp_path / "images", ("a",)))


def test_what_looks_like_a_name_may_be_a_file_that_there_is_not(ldpfl: CommandLine) -> None:
    assert "no file or folder here has that name" in ldpfl.refused("run", "--data", "rows.csvv", "--target", "x")


def test_what_may_stand_in_a_setting_is_said_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config("", ["model.options.width=[1]", "data.feature_options.x=[1]"], origin="test")
    assert str(refused.value).count("valid number") <= 1


@pytest.mark.slow
def test_a_target_that_no_noise_keeps_says_what_is_reached() -> None:
    given = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "clients.count=10", "training.rounds=2"]
    with pytest.raises(ConfigError, match=r"target_epsilon = 1e-09 is out of reach: dp-sgd reaches about .* to .* here \(noise_multiplier"):
        resolve_settings(parse_config("", [*given, "privacy.target_epsilon=1e-9"], origin="test"))
