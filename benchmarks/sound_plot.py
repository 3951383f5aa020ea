"""Draw accuracy against epsilon from the runs of sweeps: a line for each regime, the mean over seeds, the papers' recipes at the side.

    ldpfl sweep sound-mnist && python benchmarks/sound_plot.py runs/sweep-sound-mnist --out mnist.svg

Prints the table that the picture is drawn from. With --published, what others reached on MNIST stands beside it, at the epsilon that their
settings can be proved to have, by our accountants; with --bytes, accuracy is drawn against what a client sends in a round instead.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.mechanisms.rotated_sign import RotatedSignSettings
from ldpfl.privacy.accountants.clones import clone_probability, composed_clone_epsilon
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, certified_epsilon
from ldpfl.privacy.accounting import DELTA

REGIMES = {
    "sum": "a sum over two servers",
    "shuffled": "A: signs behind a shuffler, for a client",
    "local": "B: one report a client, behind a shuffler",
    "records": "C: nobody trusted, for a record",
}


ACCURACY_OF_LDP_FL = {"LDP-FL, weights": 96.20, "LDP-FL, updates": 97.82}
"""Our runs of its setting, docs/results/ldp-fl.md."""


def published() -> dict[str, list[tuple[float, float]]]:
    """Return published accuracies on MNIST with 60,000 clients of one digit, and LDP-FL's setting, each as (epsilon, accuracy)."""
    accuracy_after_rounds = {20: 50.8, 50: 67.3, 100: 71.6, 200: 76.6, 300: 79.5, 500: 81.0}
    every_round = [
        (composed_clone_epsilon(4.0, 60_000, count, DELTA, clone_probability(4.0)), accuracy)
        for count, accuracy in accuracy_after_rounds.items()
    ]
    # 80 epochs, with a report in each, among the 10,000 reports of a step.
    cldp_epsilon = composed_clone_epsilon(2.0, 10_000, 80, DELTA, clone_probability(2.0))
    ldp_fl_epsilon = certified_epsilon([ShuffledRounds(1.0, 100, 21_840, 10)], DELTA)[1]
    return {
        "LDP-SGD (Erlingsson et al. 2020, as run in FL-TEE)": every_round,
        "CLDP-SGD (Girgis et al. 2021)": [(cldp_epsilon, 87.9)],
        **{name: [(ldp_fl_epsilon, accuracy)] for name, accuracy in ACCURACY_OF_LDP_FL.items()},
    }


def regime_of(config: RunConfig) -> str:
    """Return the regime of a run, a key of ``REGIMES``."""
    if config.mechanism.name == "rotated-sign":
        return "shuffled"
    if config.mechanism.name == "dp-sgd":
        return "sum" if config.shuffling.channel == "secure-sum" else "records"
    return "local"


def collect(folders: Iterable[Path]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Return the results of all finished runs below ``folders``, by regime and target."""
    results: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for folder in folders:
        for result in sorted(folder.rglob("result.json")):
            config = read_config(result.with_name("config.toml"))
            if config.privacy.target_epsilon != "off":
                results[regime_of(config), config.privacy.target_epsilon].append(json.loads(result.read_text(encoding="utf-8")))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--bytes", action="store_true")
    options = parser.parse_args()
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ldpfl"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    if options.bytes:
        draw_bytes(axes, options.folders)
    else:
        draw_epsilon(axes, collect(options.folders), published() if options.published else {})
    axes.set_ylabel("test accuracy, %")
    axes.set_title(options.title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(options.out, metadata={"Date": None})


def draw_epsilon(axes: Any, found: dict[tuple[str, float], list[dict[str, Any]]], others: dict[str, list[tuple[float, float]]]) -> None:
    """Draw and print accuracy against epsilon: a line for each regime, and the published points ``others``."""
    for regime, label in REGIMES.items():
        points = sorted(target for regime_of_results, target in found if regime_of_results == regime)
        if points:
            draw_line(axes, points, [found[regime, target] for target in points], label, [f"epsilon {target:g}" for target in points])
    for name, points_of_paper in others.items():
        print(f"{name}: " + ", ".join(f"{accuracy:g} % at epsilon {epsilon:.4g}" for epsilon, accuracy in points_of_paper))
        axes.plot(*zip(*points_of_paper, strict=True), marker="x", linestyle=":" if len(points_of_paper) > 1 else "", label=name)
    axes.set_xscale("log", base=10 if others else 2)
    if not others:
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_xlabel("epsilon that holds for the whole run, delta 1e-5")


def draw_bytes(axes: Any, folders: Iterable[Path]) -> None:
    """Draw accuracy against bytes: a line for each target, a point for each size of the groups of which one coordinate is sent."""
    results: dict[float, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[int, int] = {}
    for result in (result for folder in folders for result in sorted(folder.rglob("result.json"))):
        config, figures = read_config(result.with_name("config.toml")), json.loads(result.read_text(encoding="utf-8"))
        if isinstance(config.mechanism, RotatedSignSettings) and config.privacy.target_epsilon != "off":
            sent = int(figures["uplink_bytes_per_client_round"])
            results[config.privacy.target_epsilon][sent].append(figures)
            groups[sent] = config.mechanism.group
    for target, by_bytes in sorted(results.items()):
        points = sorted(by_bytes)
        descriptions = [f"epsilon {target:g}, one of {groups[sent]}: {sent} bytes" for sent in points]
        draw_line(axes, points, [by_bytes[sent] for sent in points], f"epsilon {target:g}", descriptions)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes that a client sends in a round")


def draw_line(axes: Any, points: Sequence[float], runs: Sequence[list[dict[str, Any]]], label: str, descriptions: Sequence[str]) -> None:
    """Draw a line of the mean and spread over seeds at each of ``points``, and print them."""
    accuracies = [[100 * run["score"] for run in runs_of_point] for runs_of_point in runs]
    for name, values in zip(descriptions, accuracies, strict=True):
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        print(f"{label}, {name}: {fmean(values):.2f}{spread} %, {len(values)} seed{'s' * (len(values) > 1)}")
    spreads = [stdev(values) if len(values) > 1 else 0.0 for values in accuracies]
    axes.errorbar(points, [fmean(values) for values in accuracies], yerr=spreads, marker="o", capsize=3, label=label)


if __name__ == "__main__":
    main()
