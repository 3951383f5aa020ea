"""Weights of classes and the focal loss: where they come from, what they change, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ldpfl
from ldpfl import ConfigError
from ldpfl.experiments.emphasis import emphasis_of, weighted_shares
from ldpfl.experiments.recipes import load_recipe
from ldpfl.report.page import page
from ldpfl.tasks import NO_EMPHASIS, Emphasis


def emphasis(*settings: str, outputs: int = 2, shares: tuple[float, ...] = ()) -> Emphasis:
    return emphasis_of(load_recipe("own", ["privacy.target_epsilon='off'", *settings]), outputs, shares)


def test_weights_are_given_or_balance_the_stated_or_measured_shares() -> None:
    assert emphasis() == NO_EMPHASIS
    assert emphasis("task.class_weights=[1, 3.5]") == Emphasis((1.0, 3.5))
    assert emphasis("task.class_weights=balanced", "data.class_shares=[0.8, 0.2]", shares=(0.6, 0.4)) == Emphasis((0.25, 1.0))
    assert emphasis("task.class_weights=balanced", "task.focusing=2", shares=(0.5, 0.25, 0.25), outputs=3) == Emphasis((0.5, 1.0, 1.0), 2.0)


def test_balanced_classes_have_equal_shares_in_the_loss() -> None:
    shares, mean = weighted_shares([0.9, 0.1], Emphasis((1 / 9, 1.0)))
    assert (shares, mean) == (pytest.approx([0.5, 0.5]), pytest.approx(0.2))  # type: ignore[comparison-overlap]
    assert weighted_shares([0.9, 0.1], NO_EMPHASIS) == ([0.9, 0.1], 1.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["task.class_weights=[1, 2, 3]"], "has 3 values, but there are 2 classes"),
        (["task.class_weights=balanced"], "data.class_shares"),
        (["task.focusing=2", "task.name=regression"], "'regression'"),
        (["task.class_weights=[1, 2]", "training.method=least-squares"], "'least-squares'"),
    ],
)
def test_what_cannot_be_weighed_is_refused(settings: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        emphasis(*settings)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_rare_class_is_predicted_as_often_as_it_is_weighed() -> None:
    """Without noise to speak of: recall of a class of one in ten grows, and the probabilities are no longer those of the data."""
    draw = np.random.default_rng(5)
    age = draw.normal(size=3000)
    frame = pd.DataFrame({"age": age, "ill": (draw.random(3000) < 1 / (1 + np.exp(3.0 - 1.5 * age))).astype(int)})

    def flagged(**task: Any) -> float:
        settings = {"data.bounds": {"age": [-4, 4]}, "clients.count": 20, "training.rounds": 60, "task": task}
        run = ldpfl.run("own", settings=settings, data=frame, target="ill", target_epsilon=50, baseline=False, seed=1)
        return float((run.predict(frame).iloc[:, 0].astype(str) == "1").mean())

    share = float(frame.ill.mean())
    assert flagged() < share
    assert flagged(class_weights="balanced") > 2 * share


@pytest.mark.thorough_except("task0-trained with class weights (task.class_weights): predicted probabilities are not frequencies")
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"class_weights": [1.0, 5.0]}, "trained with class weights (task.class_weights): predicted probabilities are not frequencies"),
        ({"focusing": 2.0}, "trained with the focal loss (task.focusing): predicted probabilities are not frequencies"),
        ({}, ""),
    ],
)
def test_who_receives_the_model_learns_that_its_probabilities_are_no_frequencies(task: dict[str, Any], said: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"age": np.linspace(-1, 1, 200), "ill": np.arange(200) % 2})
    settings = {"data.bounds": {"age": [-1, 1]}, "clients.count": 2, "training.rounds": 1, "task": task}
    ldpfl.run("own", settings=settings, data=frame, target="ill", target_epsilon=8, baseline=False, folder=tmp_path / "run", progress=False)
    ldpfl.export(tmp_path / "run", tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text().replace("\\", "")
    for text in (card, page([tmp_path / "run"], public=True)):
        assert ("are not frequencies" in text) == bool(said)
        assert said in text
