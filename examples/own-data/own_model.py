"""A network of one's own, on images. Ends with no guarantee worth having for a client: as in LDP-FL, one bit a weight and round.

    python examples/own-data/own_model.py [--data fashion_mnist] [--rounds 5] [--picture own-model.svg]

What keeps a network from private training is told by ``ldpfl.check``, and mended: batch normalisation mixes samples of a client.
"""

from __future__ import annotations

import argparse

import rich
import torch
from torch import nn

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="mnist-5k")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--picture", default="own-model.svg")
options = parser.parse_args()

torch.manual_seed(0)
network = nn.Sequential(
    *(nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.Conv2d(16, 32, 5, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 4 * 4, 10)),
)
found = ldpfl.check("quickstart", data=options.data, model=network)
for change in found.changes:
    print(f"{change.place}: {change.before} -> {change.after}")
result = ldpfl.run("quickstart", data=options.data, model=found.module, rounds=options.rounds, epsilon=2.0, seed=0)
result.plot().save(options.picture)
rich.print(result)
