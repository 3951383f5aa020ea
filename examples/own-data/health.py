"""A health insurer's table: who will see a doctor three times a year or more? Ends with epsilon 4 for each person's row, trusting nobody.

    python examples/own-data/health.py [--rounds 40] [--picture health.svg]

20,190 rows of the RAND Health Insurance Experiment, which statsmodels ships, dealt out to 20 clinics. What is known of the columns in
public is given as bounds; the ones without are measured by noisy histograms first, as a part of the guarantee.
"""

from __future__ import annotations

import argparse

import rich
from statsmodels.datasets import randhie

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--picture", default="health.svg")
options = parser.parse_args()

rows = randhie.load_pandas().data
rows["often"] = (rows.pop("mdvis") >= 3).astype(int)
shares = {name: [0, 1] for name in ("idp", "physlm", "hlthg", "hlthf", "hlthp")}
result = ldpfl.run(
    data=rows,
    target="often",
    target_epsilon=4.0,
    seed=0,  # so that this page's figures come again; leave it out where noise is to protect
    settings={"clients.count": 20, "data.bounds": shares, "data.classes": ["0", "1"], "training.rounds": options.rounds},
)
result.plot().save(options.picture)
rich.print(result)
