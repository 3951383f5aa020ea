"""Draw accuracy against the noise of the released mean from the runs of a sweep: a point for each variant, the mean over seeds.

    ldpfl sweep optimal-ldp-fl-apart && python benchmarks/apart_plot.py runs/sweep-optimal-ldp-fl-apart --out apart.svg

Prints the table that the picture is drawn from. The noise is that of one weight of the layer that has most of it, of a round in the
middle of the run, as the server states it without looking at data.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from ldpfl.experiments.config import RunConfig, read_config
from ldpfl.mechanisms.harmony import HarmonySettings
from ldpfl.report.plots import figure_file

PUBLISHED = "one of a layer, 200 clients, radius 0.075, weights"


@dataclass(frozen=True)
class Point:
    """Runs of one setting: its noise, scores in percent by seed, and how many runs were given up."""

    noise: float
    scores: Sequence[float]
    given_up: int

    @property
    def deviation(self) -> float:
        return stdev(self.scores) if len(self.scores) > 1 else 0.0


def setting_of(config: RunConfig) -> str:
    """Return the settings in which the runs of the sweep differ, in words."""
    mechanism = config.mechanism
    if not isinstance(mechanism, HarmonySettings):
        return "no noise"
    group = "a layer" if mechanism.group == "layer" else str(mechanism.group)
    return f"one of {group}, {config.clients.count:,} clients, radius {config.ranges.radius}, {mechanism.perturbed}s".replace(
        "weightss", "weights"
    )


def noise_of(run: Path) -> float:
    """Return the standard deviation of the mean of a weight in the noisiest layer, of a round in the middle; 0 without noise."""
    rounds = [json.loads(line)["noise_std"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return median(max(layers.values(), default=0.0) for layers in rounds)


def collect(sweep: Path) -> dict[str, Point]:
    """Return the points of a sweep's finished runs by setting, the least noise first."""
    runs = defaultdict(list)
    for result in sorted(sweep.rglob("result.json")):
        runs[setting_of(read_config(result.with_name("config.toml")))].append(result.parent)
    points = {setting: _point(folders) for setting, folders in runs.items()}
    return dict(sorted(points.items(), key=lambda pair: pair[1].noise))


def _point(folders: Sequence[Path]) -> Point:
    """Return the point of the runs in ``folders``, which differ only in their seed."""
    results = [json.loads((folder / "result.json").read_text(encoding="utf-8")) for folder in folders]
    given_up = sum(result["stopped_after"] is not None for result in results)
    return Point(fmean(map(noise_of, folders)), [100 * result["score"] for result in results], given_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    points = collect(options.sweep)
    print("| | noise of a weight in the mean | accuracy, % |\n|---|---|---|")
    for setting, point in points.items():
        ended = f", {point.given_up} of {len(point.scores)} runs went to NaN" if point.given_up else ""
        print(f"| {setting} | {point.noise:.3g} | {fmean(point.scores):.1f} ± {point.deviation:.1f}{ended} |")
    draw(options.out, points)


def draw(path: Path, points: dict[str, Point]) -> None:
    """Draw mean accuracies over noise to ``path``: circles where updates are sent, squares where weights are."""
    with figure_file(path, path.suffix[1:], (9.6, 4.6)) as figure:
        axes = figure.subplots()
        for number, (setting, point) in enumerate(points.items()):
            mean = fmean(point.scores)
            if point.noise == 0:
                axes.axhline(mean, linestyle="--", linewidth=1, color="0.5", label=setting)
                continue
            as_published = " (as published)" if setting == PUBLISHED else ""
            marker = "s" if setting.endswith("weights") else "o"
            axes.errorbar(
                [point.noise],
                [mean],
                [point.deviation],
                fmt=marker,
                capsize=2,
                color=f"C{number % 10}",
                label=f"{number}: {setting}{as_published}",
            )
            axes.annotate(str(number), (point.noise, mean), (6, 4), textcoords="offset points", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlabel("standard deviation of the mean of one weight, noisiest layer")
        axes.set_ylabel("test accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
