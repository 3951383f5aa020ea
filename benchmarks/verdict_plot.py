"""Draw accuracy against the epsilon that really holds: the papers' systems as published, and the regimes that keep a small one.

    python benchmarks/verdict_plot.py --out docs/results/verdict.svg

Reads ``docs/results/verdict.csv``: a row a run or sweep, its accuracy in per cent with spread and seeds, the command that gives it,
and the page where it stands with its settings. Where a target was asked for, that is its epsilon; of a recipe it is accounted here, anew.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

import ldpfl

TABLE = Path(__file__).parents[1] / "docs" / "results" / "verdict.csv"
STYLES = {
    "LDP-FL": ("tab:red", "s"),
    "LDP-FL, as its paper reports": ("tab:red", "s"),
    "LDP-FL, by updates": ("tab:red", "D"),
    "Optimal LDP-FL": ("tab:orange", "v"),
    "LaDP-FL, small": ("tab:purple", "^"),
    "A: a client, many reports; shuffler": ("tab:green", "o"),
    "A, with features from ImageNet": ("tab:green", "*"),
    "B: a client, one report; shuffler": ("tab:blue", "o"),
    "C: a record; nobody trusted": ("black", "o"),
}
INFINITE = 10.0**9
"""Where "infinity" stands on the axis."""


@dataclass(frozen=True)
class Point:
    """One row: its accuracy in per cent, and epsilon as the run trusts and where nobody is trusted."""

    data: str
    system: str
    accuracy: float
    spread: float
    epsilon: float
    local: float


def points(table: Path) -> list[Point]:
    """Return the rows with the epsilon that holds for each."""
    with table.open(encoding="utf-8", newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: dict[str, str]) -> Point:
    epsilon, local = (float(row["target"]),) * 2 if row["target"] else _holding(row["command"])
    shown = f"{row['data']}, {row['system']}: {row['accuracy']} %, {row['seeds']} seed(s), epsilon {epsilon:,.4g}"
    print(shown + (f", trusting nobody {local:,.4g}" if local != epsilon else "") + f"   {row['command']}")
    return Point(row["data"], row["system"], float(row["accuracy"]), float(row["spread"] or 0), epsilon, local)


def _holding(command: str) -> tuple[float, float]:
    """Return epsilon of the recipe that ``command`` runs, with the trust of the run and with none; of a sweep, of its recipe."""
    name = command.split()[2]
    statement = ldpfl.account("ladp-fl/desk" if name == "ladp-fl-cifar10" else name)
    best, local = statement.best, statement.find("local", "run")
    return (inf if best is None else best.epsilon), (inf if local is None else local.epsilon)


def draw(found: Sequence[Point], out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ldpfl"
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(point.data for point in found))
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.8), layout="constrained")
    for panel, own in zip(panels, axes, strict=True):
        _panel(own, panel, [point for point in found if point.data == panel])
    axes[0].set_ylabel("test accuracy, %")
    labels = {label: line for own in axes for line, label in zip(*own.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    axes[len(panels) // 2].set_xlabel(
        "epsilon that holds for all that is sent in a run, at delta 1e-5; dotted: up to what holds where nobody is trusted"
    )
    figure.savefig(out, metadata={"Date": None})


def _panel(axes: Any, title: str, found: Sequence[Point]) -> None:
    for system in dict.fromkeys(point.system for point in found):
        color, marker = STYLES[system]
        own = sorted((point for point in found if point.system == system), key=lambda point: point.epsilon)
        places = [_place(point.epsilon) for point in own]
        axes.errorbar(
            places,
            [point.accuracy for point in own],
            yerr=[point.spread for point in own],
            color=color,
            marker=marker,
            linestyle="-" if len(own) > 1 else "",
            markersize=9 if marker == "*" else 6,
            markerfacecolor="white" if "reports" in system.split()[-1:] else color,
            label=system,
        )
        for point, place in zip(own, places, strict=True):
            if point.local != point.epsilon:
                axes.plot([place, _place(point.local)], [point.accuracy] * 2, color=color, linestyle=":", linewidth=1, marker="|", zorder=0)
    axes.axvspan(0.5, 10, color="tab:green", alpha=0.08, linewidth=0)
    axes.axvline(INFINITE / 5, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.5, INFINITE * 4)
    axes.set_ylim(0, 100)
    axes.set_xticks([1, 10, 1e3, 1e5, 1e7, INFINITE], ["1", "10", "1,000", "100,000", "10 million", "infinite"], fontsize="x-small")
    axes.minorticks_off()
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


def _place(epsilon: float) -> float:
    return epsilon if isfinite(epsilon) else INFINITE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    draw(points(TABLE), parser.parse_args().out)


if __name__ == "__main__":
    main()
