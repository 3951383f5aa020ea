"""Texts: which package of Python's own library does a line of documentation come from? Ends with epsilon 8 for each line, trusting nobody.

    python examples/own-data/text.py [--rounds 20] [--picture text.svg]

The lines of comments and documentation in the sources of asyncio, email, tkinter and unittest, as your Python has them, dealt out to ten
offices. The learning rate was chosen on held-out training lines (--set data.evaluate_on=holdout in a shell).
"""

from __future__ import annotations

import argparse
import io
import sysconfig
import tokenize
from pathlib import Path

import pandas as pd
import rich

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--picture", default="text.svg")
options = parser.parse_args()

KINDS = (tokenize.STRING, tokenize.COMMENT)
rows = []
for package in ("asyncio", "email", "tkinter", "unittest"):
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        said = [part.string for part in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline) if part.type in KINDS]
        rows += [(line.strip(), package) for text in said for line in text.splitlines() if len(line.split()) > 4]
result = ldpfl.run(
    data=pd.DataFrame(rows, columns=["line", "package"]),
    target="package",
    model="embedding-bag",
    target_epsilon=8.0,
    seed=0,
    settings={
        "clients.count": 10,
        "data.text": "line",
        "data.length": 16,
        "data.vocabulary": 1024,
        "data.classes": ["asyncio", "email", "tkinter", "unittest"],
        "model.options.width": 8,
        "training.rounds": options.rounds,
        "training.server_learning_rate": 30.0,
    },
)
result.plot().save(options.picture)
rich.print(result)
