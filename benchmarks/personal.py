"""Personal heads against one head for all, where each of 300 clients holds two classes of MNIST: accuracy on clients' own records.

    python benchmarks/personal.py --data-dir DATA [--seeds 3] [--without-noise]

A client holds back a fifth of its 200 digits. What it sends in ten rounds is protected by ``dp-fedavg`` at a central epsilon of 8 behind a
secure sum, for everything of the client.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ldpfl

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data-dir", type=Path, required=True)
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--without-noise", action="store_true")

SETTINGS: dict[str, Any] = {
    "data.name": "mnist",
    "data.partition": "labels",
    "data.labels_per_client": 2,
    "data.evaluate_on": "clients",
    "clients.count": 300,
    "evaluation.share": 0.2,
    "model.name": "mlp",
    "model.options": {"hidden": 32},
    "training.rounds": 10,
    "training.epochs": 2,
    "training.batch_size": 20,
    "training.learning_rate": 0.1,
    "training.compile": "off",
}
PROTECTED = {
    "mechanism": {"name": "dp-fedavg", "perturbed": "update", "clip_norm": 0.5},
    "shuffling.channel": "secure-sum",
    "privacy.target_epsilon": 8.0,
}
HEADS: dict[str, list[str]] = {"one head": [], "personal heads": ["3"]}


def main() -> None:
    given = parser.parse_args()
    noise = {"mechanism": {"name": "none", "perturbed": "update"}} if given.without_noise else PROTECTED
    for seed in range(given.seeds):
        for name, layers in HEADS.items():
            settings = SETTINGS | noise | {"seed": seed, "model.personal": layers}
            result = ldpfl.run(settings=settings, data_dir=given.data_dir, baseline=False, progress=False)
            found = result.site_means_to_dataframe().loc["accuracy"]
            print(f"seed {seed}, {name}: mean {found['mean']:.1%}, worst tenth {found['worst']:.1%}, {result.bytes_per_client:,} bytes")


if __name__ == "__main__":
    main()
