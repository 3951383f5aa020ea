"""A run's model of a table as an estimator of scikit-learn: what it says is what the run says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.metrics import accuracy_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.validation import check_is_fitted

import ldpfl
from grids import each
from ldpfl import ConfigError, DataError, RunResult

pytestmark = pytest.mark.slow

ROWS = 120
FRAME = pd.DataFrame(
    {
        "age": [20.0 + place % 50 for place in range(ROWS)],
        "sex": ["f", "m", "m"] * (ROWS // 3),
        "sick": ["no", "yes", "yes", "no"] * (ROWS // 4),
        "stage": [0, 1, 2] * (ROWS // 3),
        "weight": [50.0 + place % 30 for place in range(ROWS)],
        "visits": [place % 4 for place in range(ROWS)],
        "cough": [0, 1] * (ROWS // 2),
        "fever": [1, 1, 0] * (ROWS // 3),
    }
)
INPUTS = FRAME[["age", "sex"]]


def run(target: str | list[str], task: str = "classification", **bounds: list[int]) -> RunResult:
    settings: dict[str, Any] = {"data.columns": ["age", "sex"], "data.bounds": {"age": [0, 100], **bounds}, "training.rounds": 2}
    settings |= {"data.target": target, "task.name": task}
    return ldpfl.run(data=FRAME, settings=settings, count=4, seed=1, baseline=False, progress=False)


@pytest.fixture(scope="module")
def of_classes() -> RunResult:
    return run("sick")


@pytest.fixture(scope="module")
def binary() -> dict[Any, RunResult]:
    """Return runs whose target of two classes has each type."""
    how: dict[str, Any] = {"settings": {"training.rounds": 1}, "count": 2, "seed": 1, "baseline": False, "progress": False}
    return {kind: ldpfl.run(data=INPUTS.assign(ill=FRAME["cough"].astype(kind)), target="ill", **how) for kind in (int, str, bool)}


def test_a_classifier_predicts_what_the_run_does(of_classes: RunResult) -> None:
    model = of_classes.to_sklearn()
    told = of_classes.predict(FRAME)
    assert is_classifier(model)
    assert np.asarray(model.classes_).tolist() == ["no", "yes"]
    assert model.predict(FRAME).tolist() == told["sick"].tolist()
    np.testing.assert_array_equal(model.predict_proba(FRAME), told[["probability of no", "probability of yes"]])
    assert model.score(FRAME, FRAME["sick"]) == accuracy_score(FRAME["sick"], told["sick"])
    assert model.feature_names_in_.tolist() == ["age", "sex"]
    assert model.n_features_in_ == 2


@pytest.mark.parametrize("form", [lambda: INPUTS.to_dict("records"), lambda: INPUTS.to_numpy(), lambda: INPUTS.to_numpy().tolist()])
def test_rows_may_be_records_or_arrays(of_classes: RunResult, form: Callable[[], Any]) -> None:
    model = of_classes.to_sklearn()
    np.testing.assert_array_equal(model.predict_proba(form()), model.predict_proba(INPUTS))


@pytest.mark.parametrize("wrong", [[1, 2], np.zeros((3, 3)), []], ids=["one row", "too many columns", "nothing"])
def test_an_array_without_the_columns_is_refused(of_classes: RunResult, wrong: Any) -> None:
    with pytest.raises(DataError, match=r"expected 2 columns \(age, sex\)"):
        of_classes.to_sklearn().predict(wrong)
    with pytest.raises(DataError, match="sex"):
        of_classes.to_sklearn().predict([{"age": 1.0}])


def test_an_estimator_is_cloned_pickled_and_put_into_a_pipeline(of_classes: RunResult) -> None:
    model = of_classes.to_sklearn()
    check_is_fitted(model)
    chances = model.predict_proba(INPUTS)
    for other in (clone(model), pickle.loads(pickle.dumps(model)), model.fit(INPUTS, FRAME["sick"]), model.set_params(threshold=None)):
        np.testing.assert_array_equal(other.predict_proba(INPUTS), chances)
    older = FunctionTransformer(lambda rows: rows.assign(age=rows["age"] + 1))
    pipeline = make_pipeline(older, model).fit(INPUTS, FRAME["sick"])
    np.testing.assert_array_equal(pipeline.predict_proba(INPUTS), model.predict_proba(INPUTS.assign(age=INPUTS["age"] + 1)))
    assert set(model.get_params()) == {"encoder", "module", "threshold"}
    assert repr(model)


def test_a_threshold_decides_between_two_classes(of_classes: RunResult) -> None:
    least = of_classes.to_sklearn(threshold=1e-9)
    assert set(least.predict(INPUTS)) == {"yes"}
    assert clone(least).threshold == 1e-9


def test_classes_that_are_whole_numbers_are_numbers() -> None:
    result = run("stage")
    model = result.to_sklearn()
    assert np.asarray(model.classes_).tolist() == [0, 1, 2]
    assert model.predict(INPUTS).tolist() == result.predict(INPUTS)["stage"].astype(int).tolist()
    assert 0 <= model.score(INPUTS, FRAME["stage"]) <= 1
    with pytest.raises(ConfigError, match="threshold"):
        result.to_sklearn(threshold=0.5)


@each("kind", (int, bool, float, str, object, "Int64", "boolean", "category"))
@each("trained", (int, str, bool))
def test_labels_of_any_type_are_scored_by_the_classes_that_they_name(kind: Any, trained: Any, binary: dict[Any, Any]) -> None:
    model, labels = binary[trained].to_sklearn(), FRAME["cough"].astype(kind)
    expected = np.mean(model.predict(INPUTS) == FRAME["cough"])
    assert model.score(INPUTS, labels) == model.score(INPUTS, labels.tolist()) == expected
    assert cross_val_score(model, INPUTS, labels, cv=2).mean() == pytest.approx(expected)
    weights = np.arange(ROWS)
    weighted = np.average(model.predict(INPUTS) == FRAME["cough"], weights=weights)
    assert model.score(INPUTS, labels, sample_weight=weights) == pytest.approx(weighted)


def test_labels_that_are_no_classes_are_wrong_or_refused(of_classes: RunResult) -> None:
    model = of_classes.to_sklearn()
    assert model.score(INPUTS[:2], [model.predict(INPUTS)[0], "other"]) == 0.5
    with pytest.raises(DataError, match=r"none of the targets is a class of the model \(no, yes\): give these names"):
        model.score(INPUTS, FRAME["cough"])


def test_ordered_classes_labels_numbers_and_counts() -> None:
    result = run("stage", "ordinal")
    assert result.to_sklearn().predict_proba(INPUTS).shape == (ROWS, 3)
    assert result.to_sklearn().predict(INPUTS).tolist() == result.predict(INPUTS)["stage"].astype(int).tolist()

    result = run(["cough", "fever"], "multilabel")
    np.testing.assert_array_equal(result.to_sklearn().predict_proba(INPUTS), result.predict(INPUTS))
    np.testing.assert_array_equal(result.to_sklearn().predict(INPUTS), result.predict(INPUTS) > 0.5)

    for target, task in (("weight", "regression"), ("visits", "poisson")):
        result = run(target, task, **{target: [0, 100]})
        model = result.to_sklearn()
        assert is_regressor(model)
        np.testing.assert_array_equal(model.predict(INPUTS), result.predict(INPUTS)[target])


def test_what_scikit_learn_has_no_estimator_for_is_refused(tiny_data: Any) -> None:
    with pytest.raises(ConfigError, match="the target 'survival', for which scikit-learn has no estimator"):
        run(["visits", "cough"], "survival", visits=[0, 10]).to_sklearn()
    small = {"data.name": "mnist", "model.name": "linear", "shuffling.channel": "direct"}
    images = ldpfl.run("quickstart", settings=small, count=4, rounds=1, data_dir=tiny_data, baseline=False, progress=False)
    with pytest.raises(ConfigError, match="trained on data other than a table"):
        images.to_sklearn()
