"""Personal heads against one head for all, where each of 300 clients holds two classes of MNIST: accuracy on clients' own records.

    python benchmarks/personal.py --data-dir DATA [--seeds 3] [--without-noise]

A client holds back a fifth of its 200 digits. What it sends in ten rounds is protected by ``dp-fedavg`` at a central epsilon of 8 behind a
secure sum, for everything of the client. *Alone* is a logistic regression at each client, on its own digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

import ldpfl
from ldpfl.data import Samples
from ldpfl.experiments.build import build
from ldpfl.experiments.dataset import load_dataset

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


def accuracies_of_local_models(seed: int, data_dir: Path) -> list[float]:
    """Return the accuracy of each client's own logistic regression on the records that it holds back, in ascending order."""
    config = ldpfl.configure(settings=SETTINGS | PROTECTED | {"seed": seed})
    federation, _ = build(config, load_dataset(config, data_dir), torch.device("cpu"))
    evaluation, accuracies = federation.evaluation, []
    for client, samples_of_client in enumerate(federation.samples):
        rows, targets = _arrays(federation.task.data.take(torch.from_numpy(samples_of_client)))
        held_back_rows, held_back_targets = _arrays(evaluation.samples.take(torch.from_numpy(np.flatnonzero(evaluation.clients == client))))
        if len(set(targets)) == 1:  # scikit-learn refuses to fit a single class
            accuracies.append(float((held_back_targets == targets[0]).mean()))
        else:
            accuracies.append(LogisticRegression().fit(rows, targets).score(held_back_rows, held_back_targets))
    return sorted(accuracies)


def _arrays(samples: Samples) -> tuple[Any, Any]:
    """Return the pixels of each sample, from 0 to 1, and the targets, as NumPy arrays."""
    return samples.tensor.flatten(1).numpy() / 255, samples.targets.numpy()


def main() -> None:
    options = parser.parse_args()
    noise = {"mechanism": {"name": "none", "perturbed": "update"}} if options.without_noise else PROTECTED
    for seed in range(options.seeds):
        for name, layers in HEADS.items():
            settings = SETTINGS | noise | {"seed": seed, "model.personal": layers}
            result = ldpfl.run(settings=settings, data_dir=options.data_dir, baseline=False, progress=False)
            accuracy = result.site_means_to_dataframe().loc["accuracy"]
            print(
                f"seed {seed}, {name}: mean {accuracy['mean']:.1%}, worst tenth {accuracy['worst']:.1%}, {result.bytes_per_client:,} bytes"
            )
        scores = accuracies_of_local_models(seed, options.data_dir)
        print(f"seed {seed}, alone: mean {np.mean(scores):.1%}, worst tenth {np.mean(scores[: len(scores) // 10]):.1%}")


if __name__ == "__main__":
    main()
