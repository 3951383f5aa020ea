"""Draw accuracy against epsilon from the runs of sweeps: a line for each regime, the mean over seeds, the papers' recipes at the side.

    ldpfl sweep sound-mnist && python benchmarks/sound_plot.py runs/sweep-sound-mnist --out mnist.svg

Prints the table that the picture is drawn from.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ldpfl.experiments.config import RunConfig, read_config

REGIMES = {
    "trusted server": "a trusted server adds the noise",
    "shuffled": "A: signs behind a shuffler, for a client",
    "local": "B: one report a client, behind a shuffler",
    "records": "C: nobody trusted, for a record",
}


def regime_of(config: RunConfig) -> str:
    """Return which regime a run belongs to."""
    if config.mechanism.name == "rotated-sign":
        return "shuffled"
    if config.mechanism.name == "dp-sgd":
        return "trusted server" if config.shuffling.channel == "secure-sum" else "records"
    return "local"


def collect(folders: Iterable[Path]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Return the results of all finished runs below ``folders``, by regime and target."""
    found: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for result in sorted(folder.rglob("result.json")):
            config = read_config(result.with_name("config.toml"))
            if config.privacy.target != "off":
                found[regime_of(config), config.privacy.target].append(json.loads(result.read_text(encoding="utf-8")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    found = collect(options.folders)
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ldpfl"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for regime, label in REGIMES.items():
        points = sorted(target for own, target in found if own == regime)
        if not points:
            continue
        accuracies = [[100 * run["accuracy"] for run in found[regime, target]] for target in points]
        for target, values in zip(points, accuracies, strict=True):
            spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
            print(f"{regime:15} epsilon {target:g}: {fmean(values):.2f}{spread} %, {len(values)} seed{'s' * (len(values) > 1)}")
        means = [fmean(values) for values in accuracies]
        spreads = [stdev(values) if len(values) > 1 else 0.0 for values in accuracies]
        axes.errorbar(points, means, yerr=spreads, marker="o", capsize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("epsilon of the whole run, delta 1e-5")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(options.title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
