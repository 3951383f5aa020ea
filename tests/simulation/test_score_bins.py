"""Bins of scores: how many pairs of scores they leave tied, where they lie for a model of a table, and what stands for each bin."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit
from scipy.stats import rankdata

import ldpfl
from ldpfl.simulation.score_bins import BINS, EQUAL_STEPS, ScoreBins
from ldpfl.tasks.weighted_metrics import AUROC, MEASURED_AT_CLIENTS


def tied(bins: ScoreBins, log_odds: np.ndarray) -> float:
    """Return the share of pairs of scores that share a bin."""
    shares = np.bincount(bins.places(expit(log_odds)), minlength=BINS) / len(log_odds)
    return float((shares**2).sum())


@pytest.mark.parametrize("spread", [0.01, 0.5, 20.0])
@pytest.mark.parametrize("center", [-4.0, 1.0])
def test_bins_of_a_model_tie_few_scores_however_narrow_they_are(spread: float, center: float) -> None:
    """22 bins with equally many scores would tie 4.5 % of pairs. Columns that rise and fall together spread scores up to twice as far."""
    normal = np.random.default_rng(0).normal(size=(2, 4000))
    bins = ScoreBins.for_log_odds(center + spread * normal[0], columns=4)
    assert tied(bins, center + spread * normal[1]) < 0.085
    assert spread > 1 or tied(bins, center + 2 * spread * normal[1]) < 0.06
    assert tied(bins, center + spread / 2 * normal[1]) < 0.13
    assert spread > 1 or tied(EQUAL_STEPS, center + spread * normal[1]) > 0.2


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.42, 0.28, 0.18, 0.12), (0.4, 0.1, 0.24, 0.06, 0.16, 0.04)])
def test_the_few_scores_of_a_table_of_words_have_bins_of_their_own(shares: tuple[float, ...]) -> None:
    """And the middle of a bin is near its score."""
    scores = expit(np.linspace(-2.0, 1.0, len(shares)))
    random = np.random.default_rng(0)
    bins = ScoreBins.for_log_odds(random.choice(logit(scores), 1000), columns=2)
    places = bins.places(scores)
    assert len({*places.tolist()}) == len(shares)
    np.testing.assert_allclose(bins.middles[places], scores, atol=0.03)


@pytest.mark.parametrize("columns", [4, 30, 100])
def test_scores_that_spread_as_far_as_columns_may_correlate_are_resolved(columns: int) -> None:
    """The examples' columns are independent, and those of the rows all nearly the same: scores spread sqrt(columns) times as far."""
    random = np.random.default_rng(0)
    bins = ScoreBins.for_log_odds(-1 + random.normal(size=1000) / sqrt(columns), columns)
    rows = -1 + random.normal(size=4000)
    assert tied(bins, rows) < 0.12 < tied(EQUAL_STEPS, rows)
    places = bins.places(expit(rows))
    counts = np.bincount(places, minlength=BINS)
    means = np.bincount(places, weights=expit(rows), minlength=BINS) / np.maximum(counts, 1)
    assert np.abs(bins.middles - means)[counts > 100].max() < 0.04


@pytest.mark.parametrize("examples", [[1.0, 1.0, 1.0], [0.0, np.nan], [0.0, np.inf]])
def test_examples_that_tell_nothing_give_the_default(examples: list[float]) -> None:
    assert ScoreBins.for_log_odds(np.array(examples), 2) == EQUAL_STEPS


@pytest.mark.parametrize("bins", [EQUAL_STEPS, ScoreBins.for_log_odds(np.random.default_rng(0).normal(-2, 0.3, 1000), 3)])
def test_each_score_has_the_bin_between_its_edges_and_a_middle_lies_in_its_bin(bins: ScoreBins) -> None:
    assert bins.places(np.array([0.0, 1.0])).tolist() == [0, BINS - 1]
    assert bins.places(bins.middles).tolist() == [*range(BINS)]
    edges = np.array(bins.edges)
    assert bins.places(expit(edges)).tolist() == [*range(1, BINS)]  # an edge belongs to the bin above it
    np.testing.assert_allclose(logit(bins.middles[1:-1]), (edges[1:] + edges[:-1]) / 2)


def measured_and_exact(table: pd.DataFrame, rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what clients measure with next to no noise, and the scores of the same rows without noise and bins."""
    result = ldpfl.run(
        data=table,
        target="event",
        seed=1,
        baseline=False,
        progress=False,
        settings={
            "clients.count": 3,
            "data.classes": ["0", "1"],
            "data.evaluate_on": "clients",
            "training.rounds": rounds,
            "evaluation.epsilon": 1e4,
            "evaluation.share": 0.5,
            "mechanism.noise_multiplier": 0.1,
            "privacy.target_epsilon": "off",
            "shuffling.channel": "secure-sum",
        },
    ).to_dict()
    (measured,) = result["at_clients"]
    return measured, result["scores"]


@pytest.mark.slow
def test_clients_measure_the_model_of_a_table_of_hashed_words() -> None:
    """Most inputs of such a column are never used, so scores follow from few of its slopes."""
    random = np.random.default_rng(0)
    table = pd.DataFrame({name: random.choice(list(words), 4000) for name, words in (("sex", "mf"), ("ward", "abcd"), ("payer", "pqs"))})
    log_odds = -2 + 1.5 * (table["sex"] == "m") + 1.2 * (table["ward"] == "a") - (table["payer"] == "q")
    table["event"] = (random.random(4000) < expit(log_odds)).astype(int)
    measured, scores = measured_and_exact(table, rounds=15)
    figure = measured["figures"][AUROC]
    assert figure["high"] - figure["low"] < 0.18  # with equal steps 0.21
    assert figure["value"] == pytest.approx(scores[AUROC], abs=0.02)
    rows = [row for row in measured["calibration"] if row["rows"] > 100]
    assert len(rows) > 4
    assert sum(row["low"] <= row["predicted"] <= row["high"] for row in rows) >= len(rows) - 2  # the model itself is not quite calibrated


@pytest.mark.slow
@pytest.mark.parametrize(("slope", "base"), [(0.25, -1.0), (0.8, -3.5)])
def test_clients_measure_the_auroc_of_a_table_s_model(slope: float, base: float) -> None:
    """Scores that lie close together, and a rare outcome. With next to no noise, only binning is left."""
    random = np.random.default_rng(0)
    values = random.normal(size=(4000, 3)) * [10, 1, 0.1] + 5
    ward = random.choice(list("abc"), 4000)
    log_odds = base + slope * ((values[:, 0] - 5) / 10 + (values[:, 1] - 5) + (ward == "a"))
    table = pd.DataFrame(values, columns=["x", "y", "z"]).assign(ward=ward, event=(random.random(4000) < expit(log_odds)).astype(int))
    measured, scores = measured_and_exact(table, rounds=3)
    figure = measured["figures"][AUROC]
    assert figure["high"] - figure["low"] - 2 * 1.96 * np.hypot(figure["noise"], figure["sampling"]) < 0.1  # twice the bound on binning
    assert figure["low"] < scores[AUROC] < figure["high"]
    assert figure["value"] == pytest.approx(scores[AUROC], abs=0.05)
    assert f"{AUROC}{MEASURED_AT_CLIENTS}" in scores
    assert rankdata([row["predicted"] for row in measured["calibration"]]).tolist() == [*range(1, len(measured["calibration"]) + 1)]
