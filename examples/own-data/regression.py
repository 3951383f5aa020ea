"""A survey: how long is somebody married? Ends with epsilon 4 for each person's row, trusting nobody.

    python examples/own-data/regression.py [--rounds 40] [--picture regression.svg]

6,366 answers (Fair 1978), which statsmodels ships, dealt out to 10 offices that each add their own noise.
"""

from __future__ import annotations

import argparse

import rich
from statsmodels.datasets import fair

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=40)
parser.add_argument("--picture", default="regression.svg")
options = parser.parse_args()

result = ldpfl.run(
    data=fair.load_pandas().data,
    target="yrs_married",
    task="regression",
    target_epsilon=4.0,
    seed=0,
    settings={"clients.count": 10, "data.bounds": {"yrs_married": [0, 30], "age": [15, 60]}, "training.rounds": options.rounds},
)
result.plot().save(options.picture)
rich.print(result)
