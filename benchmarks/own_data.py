"""What a guarantee costs on a table: rows of made-up patients at 20 hospitals, beside scikit-learn on all rows together.

    python benchmarks/own_data.py [--rows 26000] [--hospitals 20] [--seeds 3]

Seven columns of numbers on their own scales (none has bounds: all are measured by the run), three of words, some cells empty.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from sklearn.compose import make_column_selector, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import ldpfl
from ldpfl.data.holding_out import held_out


def patients(rows: int, hospitals: int) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    age, weight, pressure = (
        generator.normal(62, 14, rows).round(),
        generator.normal(27, 5, rows).round(1),
        generator.normal(135, 18, rows).round(),
    )
    creatinine, protein = generator.lognormal(0, 0.35, rows).round(2), generator.lognormal(1.5, 1.1, rows).round(1)
    year, visits = generator.integers(2005, 2024, rows), generator.poisson(3, rows)
    sex, smoker = generator.choice(["f", "m"], rows), generator.choice(["never", "former", "current"], rows, p=[0.5, 0.3, 0.2])
    ward = generator.choice(["cardiology", "oncology", "surgery", "general", "icu"], rows)
    logit = -1.2 + 0.05 * (age - 62) + 0.06 * (weight - 27) + 0.02 * (pressure - 135) + 1.1 * np.log(creatinine + 0.01)
    logit += 0.4 * (np.log(protein + 0.1) - 1.5) + 0.5 * (smoker == "current") + 0.9 * (ward == "icu") - 0.3 * (ward == "surgery")
    frame = pd.DataFrame({"age": age, "bmi": weight, "pressure": pressure, "creatinine": creatinine, "protein": protein, "year": year})
    frame = frame.assign(
        visits=visits, sex=sex, smoker=smoker, ward=ward, hospital=[f"H{own:02d}" for own in generator.integers(0, hospitals, rows)]
    )
    frame.loc[generator.random(rows) < 0.02, "bmi"] = np.nan
    return frame.assign(outcome=np.where(generator.random(rows) < 1 / (1 + np.exp(-logit)), "died", "alive"))


def pooled(frame: pd.DataFrame) -> tuple[float, float]:
    """Return accuracy and AUROC of a logistic regression on all training rows."""
    test = held_out(len(frame), 5)
    rows, outcome = frame.drop(columns=["outcome", "hospital"]), frame["outcome"]
    numbers = (make_pipeline(SimpleImputer(), StandardScaler()), make_column_selector(dtype_include="number"))
    words = (OneHotEncoder(), make_column_selector(dtype_exclude="number"))
    model = make_pipeline(make_column_transformer(numbers, words), LogisticRegression(max_iter=1000)).fit(rows[~test], outcome[~test])
    return float(model.score(rows[test], outcome[test])), float(
        roc_auc_score(outcome[test] == "died", model.predict_proba(rows[test])[:, 1])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=26_000)
    parser.add_argument("--hospitals", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    frame = patients(options.rows, options.hospitals)
    table = Table(title=f"{options.rows:,} rows, {options.hospitals} hospitals, {options.seeds} seeds")
    for heading in ("", "accuracy %", "AUROC"):
        table.add_column(heading, justify="right")
    accuracy, area = pooled(frame)
    table.add_row("scikit-learn, all rows", f"{100 * accuracy:.2f}", f"{area:.4f}")
    without: list[float] = []
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        runs = [
            ldpfl.run(data=frame, target="outcome", client="hospital", target_epsilon=epsilon, seed=seed, progress=False)
            for seed in range(options.seeds)
        ]
        without += [run.baseline[-1] for run in runs if run.baseline is not None]
        areas = [run.scores["AUROC"] or 0.0 for run in runs]
        table.add_row(f"epsilon {epsilon:g} a row", _spread([100 * run.accuracy for run in runs], 2), _spread(areas, 4))
    table.add_row("without noise", _spread([100 * score for score in without], 2), "")
    Console().print(table)


def _spread(values: list[float], digits: int) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
