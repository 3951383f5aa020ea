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
    """A table and what is told of it.

    Attributes:
        task: as in a config.
        target: columns that are told.
        draw: makes rows.
        rows: to train on.
        epsilon: for each row, at delta 1e-5.
    """

    task: str
    target: tuple[str, ...]
    draw: Callable[[int, np.random.Generator], pd.DataFrame]
    rows: int
    epsilon: float


def patients(rows: int, generator: np.random.Generator) -> tuple[pd.DataFrame, Floats]:
    """Return made-up rows, and how ill each of them is."""
    age, crp = generator.normal(66, 15, rows).clip(18, 104), generator.lognormal(2, 1.2, rows)
    pressure, group = generator.normal(135, 20, rows), generator.choice(4, rows, p=[0.4, 0.3, 0.2, 0.1])
    ill = 0.03 * (age - 66) + 0.35 * (np.log(crp) - 2) - 0.01 * (pressure - 135) + np.array([0, 0.3, -0.3, 0.8])[group]
    columns = {"age": age, "crp": crp, "pressure": pressure, "noise": generator.normal(size=rows), "group": [f"g{own}" for own in group]}
    return pd.DataFrame(columns), ill


def counts(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with a count that spreads more than a Poisson variable does."""
    frame, ill = patients(rows, generator)
    return frame.assign(visits=generator.poisson(1.2 * np.exp(0.6 * ill) * generator.gamma(2, 0.5, rows)))


def grades(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with five ordered grades, of which the highest is rare."""
    frame, ill = patients(rows, generator)
    return frame.assign(grade=np.digitize(ill + generator.logistic(size=rows), [-0.5, 0.6, 1.8, 3.2]))


def times(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with a time to an event; some leave early, and all are left alone after a year. ``whole`` is the time without that."""
    frame, ill = patients(rows, generator)
    whole = 300 * generator.weibull(1.3, rows) * np.exp(-0.7 * ill)
    left = np.minimum(generator.uniform(0, 900, rows), 365)
    return frame.assign(days=np.minimum(whole, left).round(1), event=(whole <= left).astype(int), whole=whole)


def labels(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return rows with four labels, 2 % to 15 % of them set."""
    frame, ill = patients(rows, generator)
    logits = {"a": ill - 4.3, "b": -ill - 3.6, "c": 0.8 * frame["noise"] + 0.5 * ill - 3, "d": 1.2 * ill - 2.4}
    return frame.assign(**{name: (generator.random(rows) < 1 / (1 + np.exp(-own))).astype(int) for name, own in logits.items()})


def visits(rows: int, generator: np.random.Generator) -> pd.DataFrame:
    """Return real rows: visits to a doctor in a year."""
    return randhie.load_pandas().data.sample(rows, random_state=int(generator.integers(2**31))).reset_index(drop=True)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    return {
        "counts, 5,000 rows": Case("poisson", ("visits",), counts, 5_000, 4),
        "counts, 50,000 rows": Case("poisson", ("visits",), counts, 50_000, 2),
        "counts (real, randhie), 16,190 rows": Case("poisson", ("mdvis",), visits, 16_190, 2),
        "ordered grades, 5,000 rows": Case("ordinal", ("grade",), grades, 5_000, 4),
        "ordered grades, 50,000 rows": Case("ordinal", ("grade",), grades, 50_000, 2),
        "survival, 5,000 rows": Case("survival", ("days", "event"), times, 5_000, 4),
        "survival, 50,000 rows": Case("survival", ("days", "event"), times, 50_000, 2),
        "rare labels, 5,000 rows": Case("multilabel", ("a", "b", "c", "d"), labels, 5_000, 4),
        "rare labels, 50,000 rows": Case("multilabel", ("a", "b", "c", "d"), labels, 50_000, 2),
    }


def split(case: Case, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return rows to train on and rows to measure on."""
    if case.draw is visits:
        whole = visits(20_190, np.random.default_rng(seed))
        return whole[: case.rows], whole[case.rows :].reset_index(drop=True)
    return case.draw(case.rows, np.random.default_rng(100 + seed)), case.draw(_TEST_ROWS, np.random.default_rng(10))


def private(case: Case, train: pd.DataFrame, test: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return what a private run on the training rows says of the test rows."""
    sites = np.random.default_rng(seed).choice(_SITES, len(train), p=(0.4, 0.25, 0.15, 0.15, 0.05))
    target = case.target[0] if len(case.target) == 1 else list(case.target)
    rows = train.drop(columns="whole", errors="ignore").assign(site=[f"site {own}" for own in sites])
    result = ldpfl.run(
        data=rows, target=target, client="site", task=case.task, target_epsilon=case.epsilon, seed=seed, baseline=False, progress=False
    )
    return result.predict(test)


def pooled(case: Case, train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
    """Return the same of a model without noise on all training rows."""
    numbers = (QuantileTransformer(output_distribution="normal"), make_column_selector(dtype_include="number"))
    words = (OneHotEncoder(drop="first", sparse_output=False), make_column_selector(dtype_exclude="number"))
    bring, told = make_column_transformer(numbers, words), [*case.target, "whole"]
    own, new = bring.fit_transform(train.drop(columns=told, errors="ignore")), bring.transform(test.drop(columns=told, errors="ignore"))
    if case.task == "poisson":
        name = case.target[0]
        return pd.DataFrame({name: PoissonRegressor(alpha=0, max_iter=1000).fit(own, train[name]).predict(new)})
    if case.task == "ordinal":
        fitted = OrderedModel(train["grade"], own, distr="logit").fit(method="bfgs", disp=False)
        chances = np.asarray(fitted.predict(new))
        return pd.DataFrame({"grade": (chances.cumsum(axis=1) < 0.5).sum(axis=1)})
    if case.task == "multilabel":
        models = {name: LogisticRegression(max_iter=3000).fit(own, train[name]) for name in case.target}
        return pd.DataFrame({name: model.predict_proba(new)[:, 1] for name, model in models.items()})
    fitted = PHReg(train["days"], own, status=train["event"]).fit()
    when, hazard, _ = fitted.baseline_cumulative_hazard[0]
    risk = np.exp(new @ fitted.params)
    return pd.DataFrame({f"beyond {cut:g}": np.exp(-np.interp(cut, when, hazard) * risk) for cut in (30.0, 90.0, _HORIZON, 300.0)})


def figures(case: Case, test: pd.DataFrame, said: pd.DataFrame) -> dict[str, float]:
    """Return how good what is ``said`` of the test rows is."""
    if case.task == "poisson":
        true, found = test[case.target[0]], said.iloc[:, 0]
        return {"deviance explained": d2_tweedie_score(true, found, power=1), "mean / true": found.mean() / true.mean()}
    if case.task == "ordinal":
        true, found = test["grade"], said["grade"].astype(int)
        error = (true - found).abs().mean()
        return {
            "quadratic kappa": cohen_kappa_score(true, found, weights="quadratic"),
            "class error": error,
            "mean / true": found.mean() / true.mean(),
        }
    if case.task == "multilabel":
        by_label = [roc_auc_score(test[name], said[name]) for name in case.target]
        ratios = [said[name].mean() / test[name].mean() for name in case.target]
        return {"mean AUROC": np.mean(by_label), "least mean / true": min(ratios), "greatest mean / true": max(ratios)}
    cuts = np.array([float(name.rsplit(" ", 1)[1]) for name in said])
    beyond = np.array([np.interp(_HORIZON, [0, *cuts], [1.0, *row]) for row in said.to_numpy()])
    lasted = (test["whole"] > _HORIZON).to_numpy()
    return {
        "concordance": concordance(test["days"].to_numpy(), test["event"].to_numpy() > 0, beyond),
        f"Brier at {_HORIZON:g}": float(((beyond - lasted) ** 2).mean()),
        "mean / true": beyond.mean() / lasted.mean(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CASE")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    table = Table("", "", "pooled, no privacy", "a row protected", title=f"means of {options.seeds} seeds (lowest .. highest)")
    for name, case in cases().items():
        if options.words and not any(word in name for word in options.words):
            continue
        reference, found = [], []
        for seed in range(options.seeds):
            train, test = split(case, seed)
            reference.append(figures(case, test, pooled(case, train, test)))
            found.append(figures(case, test, private(case, train, test, seed)))
        for number, figure in enumerate(found[0]):
            table.add_row(
                f"{name}, epsilon {case.epsilon:g}" if not number else "", figure, *(_shown(own, figure) for own in (reference, found))
            )
        table.add_section()
    Console(width=140).print(table)


def _shown(seeds: list[dict[str, float]], figure: str) -> str:
    values = [own[figure] for own in seeds]
    return f"{np.mean(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


if __name__ == "__main__":
    main()
