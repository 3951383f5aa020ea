"""A language model of Python's own manual, byte by byte. Ends with epsilon 8 for each line, trusting nobody.

    python examples/own-data/text.py [--rounds 30] [--picture text.svg]

Each chapter of the manual that Python ships is a client, and each line a record. The lines of one chapter are few, so what they
teach is modest: the point is how texts are brought. Perplexity is over the bytes of lines that nobody trained on; 257 is to know nothing.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import pandas as pd
import rich

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--picture", default="text.svg")
options = parser.parse_args()

lines = [(chapter, line.strip()) for chapter, text in topics.items() for line in text.splitlines() if len(line.strip()) > 20]
settings = {"data.text": "line", "data.length": 32, "training.rounds": options.rounds, "training.server_learning_rate": 4.0}
result = ldpfl.run(
    data=pd.DataFrame(lines, columns=["chapter", "line"]),
    client="chapter",
    task="language-model",
    model="gru",
    target_epsilon=8.0,
    settings={**settings, "model.options.width": 16, "model.options.hidden": 32},
)
result.plot().save(options.picture)
rich.print(result)
