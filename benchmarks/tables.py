"""What a guarantee costs on tables: one for each row, trusting nobody, beside scikit-learn on all rows together.

    python benchmarks/tables.py [--seeds 5] [--bounds FACTOR ...] [--set KEY=VALUE ...] [CASE ...]

Cases whose names contain one of the words given are run. Made-up tables are drawn anew for each seed; real ones are divided anew into
rows to train on and rows to measure on. No bounds, categories or class shares are given, so that all is measured within the guarantee.
With --bounds each table is also run with data.bounds that are FACTOR times as wide as its values lie; below 1 they cut values off.
The pooled model sees all training rows and has no noise: scikit-learn's logistic regression on standardised and one-hot columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from statsmodels.datasets import fair, randhie

import ldpfl

Split = tuple[pd.DataFrame, pd.DataFrame]
"""Rows to train on and rows to measure on, with columns ``outcome`` (yes or no) and ``site``."""

_TEST_ROWS = 20_000
_UNEQUAL = (0.4, 0.25, 0.15, 0.15, 0.05)


@dataclass(frozen=True)
class Case:
    """A table, and the settings of its private run.

    Attributes:
        split: function that makes the rows, given a seed.
        epsilon: epsilon of each row, at delta 1e-5.
        model: model of the private run.
    """

    split: Callable[[int], Split]
    epsilon: float
    model: str = "logistic-regression"


def rows_with_rare_outcome(rows: int, sites: int) -> Callable[[int], Split]:
    """Return splits, by seed, of made-up patients, of whom some 5 % have the outcome. Columns are skewed, and have different scales."""

    def draw(rows: int, generator: np.random.Generator) -> pd.DataFrame:
        age, pressure = generator.normal(66, 15, rows).clip(18, 104), generator.normal(135, 20, rows)
        crp, creatinine = generator.lognormal(2, 1.2, rows), generator.lognormal(0, 0.4, rows)
        stays, group = generator.poisson(1.3, rows), generator.choice(6, rows, p=[0.25, 0.2, 0.2, 0.1, 0.2, 0.05])
        logit = -5.1 + 0.045 * (age - 66) + 0.6 * np.log(crp) + 0.9 * np.log(creatinine) - 0.012 * (pressure - 135) + 0.25 * stays
        logit += 1.2 * (group == 5) + 0.7 * (group == 3)
        columns = {"age": age, "crp": crp, "creatinine": creatinine, "pressure": pressure, "stays": stays}
        return _with_outcome(pd.DataFrame({**columns, "group": [f"g{value}" for value in group]}), logit, generator)

    return _split_of_drawn_rows(draw, rows, sites)


def rows_of_numbers_and_words(rows: int, sites: int) -> Callable[[int], Split]:
    """Return splits, by seed, of made-up rows with two columns of numbers and two of words. Half of the rows have the outcome."""

    def draw(rows: int, generator: np.random.Generator) -> pd.DataFrame:
        age, income = generator.normal(50, 12, rows), generator.lognormal(10, 0.8, rows)
        ward, smoker = generator.choice(4, rows), generator.choice(3, rows, p=[0.6, 0.3, 0.1])
        logit = 0.09 * (age - 50) + 0.8 * (np.log(income) - 10) + np.array([-0.8, 0, 0.5, 1.0])[ward] + np.array([0, 0.6, -0.9])[smoker]
        words = {"ward": [f"w{value}" for value in ward], "smoker": [f"s{value}" for value in smoker]}
        return _with_outcome(pd.DataFrame({"age": age, "income": income, **words}), logit - 0.15, generator)

    return _split_of_drawn_rows(draw, rows, sites)


def rows_of_many_words(rows: int, sites: int) -> Callable[[int], Split]:
    """Return splits, by seed, of made-up rows with a number, one of five wards, and one of 200 diagnoses, of which few are frequent."""

    def draw(rows: int, generator: np.random.Generator) -> pd.DataFrame:
        share, effect = 1 / np.arange(1, 201), np.random.default_rng(7).normal(0, 0.7, 200)
        age, ward = generator.normal(50, 12, rows), generator.choice(5, rows)
        diagnosis = generator.choice(200, rows, p=share / share.sum())
        logit = 0.07 * (age - 50) + np.array([-0.8, 0, 0.5, 1.0, 0.2])[ward] + effect[diagnosis]
        words = {"ward": [f"w{value}" for value in ward], "diagnosis": [f"d{value}" for value in diagnosis]}
        return _with_outcome(pd.DataFrame({"age": age, **words}), logit, generator)

    return _split_of_drawn_rows(draw, rows, sites)


def rows_with_interactions(rows: int, sites: int) -> Callable[[int], Split]:
    """Return splits, by seed, of made-up rows whose outcome depends mainly on a product and a distance, which are not linear."""

    def draw(rows: int, generator: np.random.Generator) -> pd.DataFrame:
        first, second, third, fourth = generator.normal(size=(4, rows))
        logit = 1.5 * first * second + 1.6 * np.abs(third) + 0.4 * fourth - 1.3
        return _with_outcome(pd.DataFrame({"a": 50 + 12 * first, "b": np.exp(second), "c": third, "d": fourth}), logit, generator)

    return _split_of_drawn_rows(draw, rows, sites)


def bounds_around(train: pd.DataFrame, factor: float) -> dict[str, list[float]]:
    """Return bounds of each column of numbers, ``factor`` times as wide as the range of its values."""
    numbers = train.select_dtypes("number")
    middle, half_width = (numbers.max() + numbers.min()) / 2, factor * (numbers.max() - numbers.min()) / 2
    return {name: [float(middle[name] - half_width[name]), float(middle[name] + half_width[name])] for name in numbers.columns}


def _split_of_drawn_rows(draw: Callable[[int, np.random.Generator], pd.DataFrame], rows: int, sites: int) -> Callable[[int], Split]:
    """Return a function of the seed that draws four fifths of ``rows`` to train on, and the same test rows for all seeds."""
    return lambda seed: (
        _with_sites(draw(rows * 4 // 5, np.random.default_rng(100 + seed)), sites, seed),
        _with_sites(draw(_TEST_ROWS, np.random.default_rng(10)), sites, 0),
    )


def _with_outcome(frame: pd.DataFrame, logit: np.ndarray, generator: np.random.Generator) -> pd.DataFrame:
    """Return ``frame`` with a random outcome, yes or no, whose log-odds are ``logit``."""
    return frame.assign(outcome=np.where(generator.random(len(frame)) < 1 / (1 + np.exp(-logit)), "yes", "no"))


def _with_sites(frame: pd.DataFrame, sites: int, seed: int) -> pd.DataFrame:
    """Return ``frame`` with a random site for each row. Five sites have unequal shares."""
    shares = _UNEQUAL if sites == len(_UNEQUAL) else None
    return frame.assign(site=[f"site {number}" for number in np.random.default_rng(seed).choice(sites, len(frame), p=shares)])


def split_of_real_table(frame: pd.DataFrame, outcome: np.ndarray, sites: int) -> Callable[[int], Split]:
    """Return a function of the seed that splits a real table at random: four fifths to train on, and a fifth to measure on."""
    whole = frame.assign(outcome=np.where(outcome, "yes", "no"))

    def split(seed: int) -> Split:
        mixed_up = _with_sites(whole.sample(frac=1, random_state=seed, ignore_index=True), sites, seed)
        cut = len(mixed_up) * 4 // 5
        return mixed_up[:cut], mixed_up[cut:].reset_index(drop=True)

    return split


def cases_by_name() -> dict[str, Case]:
    """Return all cases by name."""
    affairs, visits, cells = fair.load_pandas().data, randhie.load_pandas().data, load_breast_cancer(as_frame=True).frame
    return {
        "rare outcome, 50,000 rows, 5 sites": Case(rows_with_rare_outcome(50_000, 5), 2),
        "numbers and words, 6,000 rows, 20 sites": Case(rows_of_numbers_and_words(6_000, 20), 4),
        "200 words, 6,000 rows, 20 sites": Case(rows_of_many_words(6_000, 20), 4),
        "200 words, 50,000 rows, 5 sites": Case(rows_of_many_words(50_000, 5), 2),
        "rare outcome, 3,000 rows, 5 sites": Case(rows_with_rare_outcome(3_000, 5), 4),
        "MLP, rare outcome, 3,000 rows, 5 sites": Case(rows_with_rare_outcome(3_000, 5), 4, "mlp"),
        "MLP, numbers and words, 6,000 rows, 20 sites": Case(rows_of_numbers_and_words(6_000, 20), 4, "mlp"),
        "MLP, interactions, 20,000 rows, 5 sites": Case(rows_with_interactions(20_000, 5), 4, "mlp"),
        "interactions, 20,000 rows, 5 sites": Case(rows_with_interactions(20_000, 5), 4),
        "rare outcome, 400 rows, 4 sites": Case(rows_with_rare_outcome(400, 4), 8),
        "numbers and words, 400 rows, 4 sites": Case(rows_of_numbers_and_words(400, 4), 8),
        "randhie (real), 20,190 rows, 5 sites": Case(split_of_real_table(visits.drop(columns="mdvis"), visits["mdvis"] >= 8, 5), 2),
        "fair (real), 6,366 rows, 5 sites": Case(split_of_real_table(affairs.drop(columns="affairs"), affairs["affairs"] > 0, 5), 2),
        "breast cancer (real), 569 rows, 4 sites": Case(split_of_real_table(cells.drop(columns="target"), cells["target"] == 1, 4), 8),
    }


def pooled_risks(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Return the risks that a logistic regression on all training rows gives the test rows."""
    numbers = (StandardScaler(), make_column_selector(dtype_include="number"))
    words = (OneHotEncoder(handle_unknown="ignore"), make_column_selector(dtype_exclude="number"))
    model = make_pipeline(make_column_transformer(numbers, words), LogisticRegression(max_iter=3000))
    model.fit(train.drop(columns=["outcome", "site"]), train["outcome"] == "yes")
    risks: np.ndarray = model.predict_proba(test.drop(columns=["outcome", "site"]))[:, 1]
    return risks


def private_risks(train: pd.DataFrame, test: pd.DataFrame, epsilon: float, seed: int, settings: dict[str, object]) -> np.ndarray:
    """Return the risks that a private run on the training rows gives the test rows."""
    result = ldpfl.run(
        data=train, target="outcome", client="site", target_epsilon=epsilon, seed=seed, baseline=False, progress=False, settings=settings
    )
    risks: np.ndarray = result.predict(test)["probability of yes"].to_numpy()
    return risks


def quality_figures(test: pd.DataFrame, risks: np.ndarray) -> tuple[float, float, float, float]:
    """Return AUROC, mean risk divided by the share of rows with the outcome, Brier score, and accuracy."""
    outcome = (test["outcome"] == "yes").to_numpy()
    return (
        roc_auc_score(outcome, risks),
        risks.mean() / outcome.mean(),
        brier_score_loss(outcome, risks),
        ((risks > 0.5) == outcome).mean(),
    )


def parsed_setting(change: str) -> tuple[str, object]:
    """Return key and value of the text ``key=value``. A value that is not JSON is returned as text."""
    key, _, value = change.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CASE")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bounds", type=float, nargs="*", default=[], metavar="FACTOR")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the private runs")
    options = parser.parse_args()
    table = Table(title=f"means of {options.seeds} seeds (lowest .. highest)")
    for heading in ("", "AUROC", "largest gap", "mean risk / true", "Brier", "accuracy"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, case in cases_by_name().items():
        if options.words and not any(word in name for word in options.words):
            continue
        figures_by_factor: dict[float | None, list[tuple[float, ...]]] = {factor: [] for factor in (None, *options.bounds)}
        reference = []
        for seed in range(options.seeds):
            train, test = case.split(seed)
            reference.append(quality_figures(test, pooled_risks(train, test)))
            for factor, rows in figures_by_factor.items():
                settings: dict[str, object] = {"model.name": case.model, **dict(parsed_setting(change) for change in options.set)}
                if factor is not None:
                    settings["data.bounds"] = bounds_around(train, factor)
                rows.append(quality_figures(test, private_risks(train, test, case.epsilon, seed, settings)))
        pooled_figures = np.array(reference)
        table.add_row(name)
        table.add_row("  pooled, no privacy", *_mean_and_range(pooled_figures, pooled_figures))
        for factor, rows in figures_by_factor.items():
            bounds_text = "" if factor is None else f", bounds x {factor:g}"
            table.add_row(f"  epsilon {case.epsilon:g} a row{bounds_text}", *_mean_and_range(np.array(rows), pooled_figures))
        table.add_section()
    Console(width=140).print(table)


def _mean_and_range(figures: np.ndarray, reference: np.ndarray) -> tuple[str, ...]:
    """Return the cells of a row: mean and range over seeds of each figure, and the largest gap in AUROC to the ``reference``."""
    means, minima, maxima = figures.mean(axis=0), figures.min(axis=0), figures.max(axis=0)
    spread = [f"{mean:.4f} ({lowest:.4f} .. {highest:.4f})" for mean, lowest, highest in zip(means, minima, maxima, strict=True)]
    gap = "" if figures is reference else f"{(reference[:, 0] - figures[:, 0]).max():.4f}"
    return spread[0], gap, spread[1], spread[2], spread[3]


if __name__ == "__main__":
    main()
