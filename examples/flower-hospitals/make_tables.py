"""Make up the tables of three hospitals, and public rows to measure on: python make_tables.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas

NAMES = ("hospital-0", "hospital-1", "hospital-2", "public")


def made_up(rows: int, seed: int) -> pandas.DataFrame:
    """Return made-up patients, one a row; some cells are empty."""
    draw = np.random.default_rng(seed)
    age, pulse = draw.normal(62, 15, rows).clip(18, 100), draw.normal(85, 18, rows).clip(30, 200)
    lactate, days = draw.gamma(2, 1.1, rows).clip(0, 15), draw.gamma(2, 3, rows).clip(0, 60)
    ward = draw.choice(["cardiology", "intensive care", "surgery"], rows, p=[0.4, 0.25, 0.35])
    odds = (age - 62) / 15 + (pulse - 85) / 25 + (lactate - 2.2) * 0.6 + np.where(ward == "intensive care", 1.2, -0.4)
    table = {"age": age.round(), "pulse": pulse.round(), "lactate": lactate.round(1), "days": days.round(), "ward": ward}
    frame = pandas.DataFrame({**table, "readmitted": np.where(odds + draw.logistic(0, 1, rows) > 0, "yes", "no")})
    frame.loc[draw.random(rows) < 0.02, "lactate"] = np.nan
    return frame


def write(folder: Path) -> None:
    """Write a table for each of ``NAMES``."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, rows) in enumerate(zip(NAMES, (1500, 2000, 2500, 2000), strict=True)):
        made_up(rows, seed).to_csv(folder / f"{name}.csv", index=False)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
