"""What a guarantee costs on tables where something else than one class is told, beside statsmodels and scikit-learn on all rows together.

    python benchmarks/table_tasks.py [--seeds 5] [CASE ...]

Tables are made up, drawn anew for each seed, but that of visits to a doctor (randhie), which is divided anew. Each row is protected at the
stated epsilon, trusting nobody; nothing is given as public, so that all is measured within the guarantee. The pooled model sees all
training rows and has no noise; its numbers are brought to normal deviates, as those of the private one are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from sklearn.metrics import cohen_kappa_score, d2_tweedie_score, roc_auc_score
from sklearn.preprocessing import OneHotEncoder, QuantileTransformer
from statsmodels.datasets import randhie
from statsmodels.duration.hazard_regression import PHReg
from statsmodels.miscmodels.ordinal_model import OrderedModel

import ldpfl
from ldpfl.tasks.survival import concordance

Floats = NDArray[np.float64]

_TEST_ROWS, _SITES = 10_000, 5
_HORIZON = 180.0
"""Time at which survival is measured, in days."""


@dataclass(frozen=True)
class Case:
    """A table, and the columns that are predicted.

    Attributes:
        task: as in a config.
        target: names of the columns that are predicted.
        draw: function that makes rows, given their number and a random generator.
        rows: number of rows to train on.
        epsilon: epsilon of each row, at delta 1e-5.
    """

    task: str
    target: tuple[str, ...]
    draw: Callable[[int, np.random.Generator], pd.DataFrame]
    rows: int
    epsilon: float


def made_up_patients(rows: int, generator: np.random.Generator) -> tuple[pd.DataFrame, Floats]:
    """Return made-up rows, and the risk of each row, on which its target depends."""
    age, crp = generator.normal(66, 15, rows).clip(18, 104), generator.lognormal(2, 1.2, rows)
    pressure, group = generator.normal(135, 20, rows), generator.choice(4, rows, p=[0.4, 0.3, 0.2, 0.1])
    risk = 0.03 * (age - 66) + 0.35 * (np.log(crp) - 2) - 0.01 * (pressure - 135) + np.array([0, 0.3, -0.3, 0.8])[group]
    columns = {
        "age": age,
        "crp": crp,
        "pressure": pressure,
        "noise": generator.normal(size=rows),
        "group": [f"g{group_number}" for group_number in group],
    }
    return pd.DataFrame(columns), risk


def rows_with_counts(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with a count that spreads more than a Poisson variable does."""
    frame, risk = made_up_patients(rows, generator)
    return frame.assign(visits=generator.poisson(1.2 * np.exp(0.6 * risk) * generator.gamma(2, 0.5, rows)))


def rows_with_grades(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with five ordered grades, of which the highest is rare."""
    frame, risk = made_up_patients(rows, generator)
    return frame.assign(grade=np.digitize(risk + generator.logistic(size=rows), [-0.5, 0.6, 1.8, 3.2]))


def rows_with_times(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with a time to an event. Some leave early, and after a year nobody is watched. ``whole`` is the time in any case."""
    frame, risk = made_up_patients(rows, generator)
    whole = 300 * generator.weibull(1.3, rows) * np.exp(-0.7 * risk)
    last_seen = np.minimum(generator.uniform(0, 900, rows), 365)
    return frame.assign(days=np.minimum(whole, last_seen).round(1), event=(whole <= last_seen).astype(int), whole=whole)


def rows_with_labels(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with four labels, 2 % to 15 % of them set."""
    frame, risk = made_up_patients(rows, generator)
    logits = {"a": risk - 4.3, "b": -risk - 3.6, "c": 0.8 * frame["noise"] + 0.5 * risk - 3, "d": 1.2 * risk - 2.4}
    return frame.assign(**{name: (generator.random(rows) < 1 / (1 + np.exp(-logit))).astype(int) for name, logit in logits.items()})


def rows_with_visits(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows of the real data set randhie, with the number of visits to a doctor in a year."""
    return randhie.load_pandas().data.sample(rows, random_state=int(generator.integers(2**31))).reset_index(drop=True)


def cases_by_name() -> dict[str, Case]:
    """Return all cases by name."""
    return {
        "counts, 5,000 rows": Case("poisson", ("visits",), rows_with_counts, 5_000, 4),
        "counts, 50,000 rows": Case("poisson", ("visits",), rows_with_counts, 50_000, 2),
        "counts (real, randhie), 16,190 rows": Case("poisson", ("mdvis",), rows_with_visits, 16_190, 2),
        "ordered grades, 5,000 rows": Case("ordinal", ("grade",), rows_with_grades, 5_000, 4),
        "ordered grades, 50,000 rows": Case("ordinal", ("grade",), rows_with_grades, 50_000, 2),
        "survival, 5,000 rows": Case("survival", ("days", "event"), rows_with_times, 5_000, 4),
        "survival, 50,000 rows": Case("survival", ("days", "event"), rows_with_times, 50_000, 2),
        "rare labels, 5,000 rows": Case("multilabel", ("a", "b", "c", "d"), rows_with_labels, 5_000, 4),
        "rare labels, 50,000 rows": Case("multilabel", ("a", "b", "c", "d"), rows_with_labels, 50_000, 2),
    }


def train_and_test_rows(case: Case, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return rows to train on and rows to measure on."""
    if case.draw is rows_with_visits:
        whole = rows_with_visits(20_190, np.random.default_rng(seed))
        return whole[: case.rows], whole[case.rows :].reset_index(drop=True)
    return case.draw(case.rows, np.random.default_rng(100 + seed)), case.draw(_TEST_ROWS, np.random.default_rng(10))


def private_predictions(case: Case, train: pd.DataFrame, test: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the predictions for the test rows by a private run on the training rows."""
    sites = np.random.default_rng(seed).choice(_SITES, len(train), p=(0.4, 0.25, 0.15, 0.15, 0.05))
    target = case.target[0] if len(case.target) == 1 else list(case.target)
    rows = train.drop(columns="whole", errors="ignore").assign(site=[f"site {site}" for site in sites])
    result = ldpfl.run(
        data=rows, target=target, client="site", task=case.task, target_epsilon=case.epsilon, seed=seed, baseline=False, progress=False
    )
    return result.predict(test)


def pooled_predictions(case: Case, train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
    """Return the predictions for the test rows by a model without noise on all training rows together, in the form of a private run's."""
    numbers = (QuantileTransformer(output_distribution="normal"), make_column_selector(dtype_include="number"))
    words = (OneHotEncoder(drop="first", sparse_output=False), make_column_selector(dtype_exclude="number"))
    preprocess, targets = make_column_transformer(numbers, words), [*case.target, "whole"]
    train_inputs = preprocess.fit_transform(train.drop(columns=targets, errors="ignore"))
    test_inputs = preprocess.transform(test.drop(columns=targets, errors="ignore"))
    if case.task == "poisson":
        name = case.target[0]
        return pd.DataFrame({name: PoissonRegressor(alpha=0, max_iter=1000).fit(train_inputs, train[name]).predict(test_inputs)})
    if case.task == "ordinal":
        fitted = OrderedModel(train["grade"], train_inputs, distr="logit").fit(method="bfgs", disp=False)
        class_probabilities = np.asarray(fitted.predict(test_inputs))
        return pd.DataFrame({"grade": (class_probabilities.cumsum(axis=1) < 0.5).sum(axis=1)})
    if case.task == "multilabel":
        models = {name: LogisticRegression(max_iter=3000).fit(train_inputs, train[name]) for name in case.target}
        return pd.DataFrame({name: model.predict_proba(test_inputs)[:, 1] for name, model in models.items()})
    fitted = PHReg(train["days"], train_inputs, status=train["event"]).fit()
    times, hazard, _ = fitted.baseline_cumulative_hazard[0]
    risk = np.exp(test_inputs @ fitted.params)
    return pd.DataFrame({f"beyond {cut:g}": np.exp(-np.interp(cut, times, hazard) * risk) for cut in (30.0, 90.0, _HORIZON, 300.0)})


def quality_figures(case: Case, test: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, float]:
    """Return figures of how good the ``predicted`` values of the test rows are, by name."""
    if case.task == "poisson":
        actual, predictions = test[case.target[0]], predicted.iloc[:, 0]
        return {"deviance explained": d2_tweedie_score(actual, predictions, power=1), "mean / true": predictions.mean() / actual.mean()}
    if case.task == "ordinal":
        actual, predictions = test["grade"], predicted["grade"].astype(int)
        error = (actual - predictions).abs().mean()
        return {
            "quadratic kappa": cohen_kappa_score(actual, predictions, weights="quadratic"),
            "class error": error,
            "mean / true": predictions.mean() / actual.mean(),
        }
    if case.task == "multilabel":
        by_label = [roc_auc_score(test[name], predicted[name]) for name in case.target]
        ratios = [predicted[name].mean() / test[name].mean() for name in case.target]
        return {"mean AUROC": np.mean(by_label), "least mean / true": min(ratios), "greatest mean / true": max(ratios)}
    cuts = np.array([float(name.rsplit(" ", 1)[1]) for name in predicted])
    survival_probabilities = np.array([np.interp(_HORIZON, [0, *cuts], [1.0, *row]) for row in predicted.to_numpy()])
    survived = (test["whole"] > _HORIZON).to_numpy()
    return {
        "concordance": concordance(test["days"].to_numpy(), test["event"].to_numpy() > 0, survival_probabilities),
        f"Brier at {_HORIZON:g}": float(((survival_probabilities - survived) ** 2).mean()),
        "mean / true": survival_probabilities.mean() / survived.mean(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CASE")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    table = Table("", "", "pooled, no privacy", "a row protected", title=f"means of {options.seeds} seeds (lowest .. highest)")
    for name, case in cases_by_name().items():
        if options.words and not any(word in name for word in options.words):
            continue
        pooled_figures, private_figures = [], []
        for seed in range(options.seeds):
            train, test = train_and_test_rows(case, seed)
            pooled_figures.append(quality_figures(case, test, pooled_predictions(case, train, test)))
            private_figures.append(quality_figures(case, test, private_predictions(case, train, test, seed)))
        for number, figure in enumerate(private_figures[0]):
            table.add_row(
                f"{name}, epsilon {case.epsilon:g}" if not number else "",
                figure,
                *(_mean_and_range(figures_of_model, figure) for figures_of_model in (pooled_figures, private_figures)),
            )
        table.add_section()
    Console(width=140).print(table)


def _mean_and_range(seeds: list[dict[str, float]], figure: str) -> str:
    values = [figures_of_seed[figure] for figures_of_seed in seeds]
    return f"{np.mean(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


if __name__ == "__main__":
    main()
