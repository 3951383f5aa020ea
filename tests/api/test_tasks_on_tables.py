"""Counts, ordered classes and times to an event from a data frame to predictions, in the target's own unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ldpfl
from ldpfl import ConfigError, DataError
from ldpfl.data import held_out
from ldpfl.experiments.figures import OFF_MEAN
from ldpfl.simulation.measuring import NOT_SEEN_TO_VARY

pytestmark = pytest.mark.slow

GENERATOR = np.random.default_rng(0)
AGE = GENERATOR.normal(60, 10, 3000)
ILL = (AGE - 60) / 10
LASTING = 200 * GENERATOR.exponential(np.exp(-ILL))
FRAME = pd.DataFrame(
    {
        "age": AGE,
        "site": GENERATOR.choice(["a", "b", "c", "d"], 3000),
        "visits": GENERATOR.poisson(3 * np.exp(0.5 * ILL)),
        "grade": np.array(["low", "middle", "high"])[np.digitize(1.5 * ILL + GENERATOR.logistic(size=3000), [-0.5, 2.0])],
        "days": np.minimum(LASTING, 365.0),
        "died": (LASTING <= 365).astype(int),
    }
)
ROWS = pd.DataFrame({"age": [40.0, 60.0, 80.0]})


def run(task: str, target: str | list[str], **more: Any) -> ldpfl.RunResult:
    given = {"data": FRAME, "columns": ["age"], "client": "site", "target_epsilon": 8.0, "seed": 1, "baseline": False, "progress": False}
    return ldpfl.run(target=target, task=task, **{**given, **more})


@pytest.mark.thorough
def test_counts(tmp_path: Path) -> None:
    result = run("poisson", "visits", folder=tmp_path / "run")
    found = result.predict(ROWS)["visits"]
    assert found.tolist() == pytest.approx([3 * np.exp(-1), 3, 3 * np.exp(1)], rel=0.3)
    assert result.metric == "deviance explained"
    assert result.score > 0.2
    pd.testing.assert_frame_equal(ldpfl.predict(ldpfl.export(tmp_path / "run", tmp_path / "out"), ROWS), result.predict(ROWS))


@pytest.mark.thorough
def test_ordered_words() -> None:
    result = run("ordinal", "grade", settings={"data.classes": ["low", "middle", "high"]})
    found = result.predict(ROWS)
    assert found["grade"].tolist() == ["low", "middle", "high"]
    assert list(found) == ["grade", "probability of low", "probability of middle", "probability of high"]
    assert found.iloc[:, 1:].sum(axis=1).tolist() == pytest.approx([1.0] * 3)
    assert result.score > 0.3
    with pytest.raises(ConfigError, match=r"list them in data.classes, the lowest first"):
        run("ordinal", "grade")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("task", "target", "settings", "judged_by"),
    [
        ("poisson", "visits", {}, {"deviance explained", "MAE", "mean prediction", "observed mean"}),
        ("ordinal", "grade", {"data.classes": ["low", "middle", "high"]}, {"quadratic kappa", "accuracy", "mean class error"}),
        ("multilabel", ["often", "died"], {}, {"AUROC", "macro F1", "exact match"}),
    ],
)
def test_each_task_has_intervals_and_a_pooled_reference(task: str, target: Any, settings: dict[str, Any], judged_by: set[str]) -> None:
    frame = FRAME.assign(often=(FRAME["visits"] > 3).astype(int))
    result = run(task, target, data=frame, settings=settings, baseline=True)
    figures = result.to_dict()
    assert set(figures["pooled_scores"]) == set(result.intervals) == judged_by
    low, high = result.intervals[result.metric]
    assert low < result.score < high
    assert figures["pooled_scores"][result.metric] > low  # nothing is better than all rows without noise, but by luck
    assert result.metric in result.sites_to_dataframe()


@pytest.mark.thorough
def test_a_pooled_count_is_scikit_learn_s() -> None:
    from sklearn.linear_model import PoissonRegressor
    from sklearn.metrics import d2_tweedie_score

    result, test = run("poisson", "visits", baseline=True), held_out(len(FRAME))
    fitted = PoissonRegressor(alpha=0.0).fit(FRAME[["age"]][~test], FRAME["visits"][~test])
    expected = d2_tweedie_score(FRAME["visits"][test], fitted.predict(FRAME[["age"]][test]), power=1)
    # Ages are brought to normal deviates of their quantiles, which of normal ones changes little.
    assert result.to_dict()["pooled_scores"]["deviance explained"] == pytest.approx(expected, abs=0.03)


@pytest.mark.thorough
def test_rare_counts_have_no_interval_and_the_reason_is_said() -> None:
    frame = FRAME.assign(rare=(np.arange(len(FRAME)) % 400 == 3).astype(int))
    result = run("poisson", "rare", data=frame)
    assert set(result.intervals) == {"MAE"}
    assert "Some figures have no interval: too few rows with a count above 0: figures need 10." in " ".join(str(result).split())


def harrell(times: pd.Series[float], events: pd.Series[int], risks: pd.Series[float]) -> float:
    """Share of the comparable pairs of rows in which the one that died first had the higher risk; equal risks count a half."""
    right = pairs = 0.0
    for time, risk in zip(times[events == 1], risks[events == 1], strict=True):
        later = risks[times > time]  # at the end of the year all are left alone, and nobody dies then
        right, pairs = right + float((risk > later).sum() + (risk == later).sum() / 2), pairs + len(later)
    return right / pairs


@pytest.mark.thorough
@pytest.mark.parametrize("cuts", [[], [50.0, 100.0, 200.0]])
def test_times_to_an_event(cuts: list[float]) -> None:
    result = run("survival", ["days", "died"], settings={"data.cut_points": cuts}, baseline=True)
    found = result.predict(ROWS)
    ends = [float(name.removeprefix("probability of days beyond ")) for name in found]
    assert ends == cuts or len(ends) == 8
    expected = np.exp(-np.outer(np.exp([-2, 0, 2]), ends) / 200)
    assert np.abs(found.to_numpy() - expected).max() < 0.2
    assert np.abs(found.to_numpy()[1] - expected[1]).max() < 0.1
    assert result.metric == "concordance"
    held = FRAME[held_out(len(FRAME))]
    risks = -result.predict(held).sum(axis=1).set_axis(held.index)
    assert result.score == pytest.approx(harrell(held["days"], held["died"], risks), abs=1e-4)
    figures = result.to_dict()
    assert figures["pooled_scores"]["concordance"] == pytest.approx(result.score, abs=0.01)
    assert 0 < figures["pooled_scores"]["integrated Brier"] <= figures["scores"]["integrated Brier"] + 0.01
    assert set(figures["intervals"]) == set(figures["scores"]) == set(figures["noise_free_scores"]) == {"concordance", "integrated Brier"}
    low, high = figures["intervals"]["concordance"]
    assert low < result.score < high


@pytest.mark.parametrize(
    ("task", "target", "settings", "said"),
    [
        ("survival", "days", {}, "It names 'days' alone: give them as a list, --set 'data.target=[\"days\", \"EVENT\"]'"),
        ("survival", ["days", "died", "age"], {}, 'It names 3 columns: give them as a list, --set \'data.target=["TIME", "EVENT"]\''),
        ("survival", ["died", "days"], {}, 'name the time first, give them as a list, --set \'data.target=["days", "died"]\''),
        ("multilabel", "died", {}, "which names 'died' alone: give them as a list, --set 'data.target=[\"died\", \"OTHER\"]'"),
        ("classification", ["days", "died"], {}, "and for a time and an event to 'survival' (--task survival)"),
        ("survival", ["days", "age"], {}, "the label in the column 'age' must be 0 or 1"),
        ("poisson", "below", {}, "the target 'below' is below 0, and this task expects 0 or more"),
        (
            "poisson",
            "visits",
            {"data.bounds": {"visits": [-1, 9]}},
            "data.bounds.visits begins at -1, but counts and times are never negative",
        ),
        ("survival", ["days", "died"], {"data.cut_points": [9, 3]}, "expected numbers in ascending order, none twice"),
    ],
)
def test_what_does_not_fit_is_refused(task: str, target: str | list[str], settings: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=re.escape(said)):
        run(task, target, data=FRAME.assign(below=FRAME["age"] - 60), settings=settings)


@pytest.mark.thorough_except("poisson-visits")
@pytest.mark.parametrize(("task", "target"), [("poisson", "visits"), ("ordinal", "visits"), ("survival", ["days", "died"])])
def test_nothing_is_measured_where_bounds_say_all(task: str, target: str | list[str]) -> None:
    bounds = {"age": [20, 100], "visits": [0, 12], "days": [0, 400]}
    frame = FRAME.assign(visits=FRAME["visits"].clip(0, 4)) if task == "ordinal" else FRAME
    result = run(task, target, data=frame, settings={"data.scaling": "bounds", "data.bounds": bounds, "training.rounds": 10})
    assert not any(event.histograms for event in result.ledger.events)
    assert result.score > 0.1
    assert result.predict(ROWS).notna().to_numpy().all()


@pytest.mark.thorough
def test_counts_far_above_their_spread_are_learnt() -> None:
    """A mean of some 27 spreads: clipped at 6 spreads, the model would predict a fifth of each count."""
    frame = FRAME.assign(visits=GENERATOR.poisson(1000 * np.exp(0.02 * ILL)))
    found = run("poisson", "visits", data=frame, target_epsilon=50.0).predict(frame)["visits"]
    assert found.mean() == pytest.approx(frame["visits"].mean(), rel=0.1)


def test_a_constant_target_is_not_said_to_be_predicted_wrongly() -> None:
    """Prediction and target differ in the fourth decimal, and both intervals have hardly a width."""
    result = run("regression", "visits", data=FRAME.assign(visits=7.0), target_epsilon=50.0)
    assert any(NOT_SEEN_TO_VARY in caveat for caveat in result.to_dict()["caveats"])
    assert not any(OFF_MEAN in caveat for caveat in result.to_dict()["caveats"])
