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
"""Position of an infinite epsilon on the axis."""


@dataclass(frozen=True)
class Point:
    """One row of the table: accuracy and spread in per cent, and epsilon with the run's trust and with none (``local``)."""

    data: str
    system: str
    accuracy: float
    spread: float
    epsilon: float
    local: float


def points_of_table(table: Path) -> list[Point]:
    """Return the rows of ``table``, each with its epsilon."""
    with table.open(encoding="utf-8", newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: dict[str, str]) -> Point:
    """Return the point of a row, and print it. Its epsilon is the target of its runs, or else that of its recipe."""
    epsilon, local = (float(row["target"]),) * 2 if row["target"] else _epsilons_of_recipe(row["command"])
    text = f"{row['data']}, {row['system']}: {row['accuracy']} %, {row['seeds']} seed(s), epsilon {epsilon:,.4g}"
    print(text + (f", trusting nobody {local:,.4g}" if local != epsilon else "") + f"   {row['command']}")
    return Point(row["data"], row["system"], float(row["accuracy"]), float(row["spread"] or 0), epsilon, local)


def _epsilons_of_recipe(command: str) -> tuple[float, float]:
    """Return two epsilons of the recipe that ``command`` runs or sweeps: with the trust of the run, and without any trust."""
    name = command.split()[2]
    statement = ldpfl.account("ladp-fl/desk" if name == "ladp-fl-cifar10" else name)
    best, local = statement.best, statement.find("local", "run")
    return (inf if best is None else best.epsilon), (inf if local is None else local.epsilon)


def draw(points: Sequence[Point], out: Path) -> None:
    """Draw accuracy over epsilon to ``out``, with a panel for each data set."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "ldpfl"
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(point.data for point in points))
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 4.8), layout="constrained")
    for panel, panel_axes in zip(panels, axes, strict=True):
        _draw_panel(panel_axes, panel, [point for point in points if point.data == panel])
    axes[0].set_ylabel("test accuracy, %")
    labels = {label: line for panel_axes in axes for line, label in zip(*panel_axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    axes[len(panels) // 2].set_xlabel(
        "epsilon that holds for all that is sent in a run, at delta 1e-5; dotted: up to what holds where nobody is trusted"
    )
    figure.savefig(out, metadata={"Date": None})


def _draw_panel(axes: Any, title: str, points: Sequence[Point]) -> None:
    """Draw the points of one data set, a line for each system. A dotted line leads to the epsilon without trust."""
    for system in dict.fromkeys(point.system for point in points):
        color, marker = STYLES[system]
        points_of_system = sorted((point for point in points if point.system == system), key=lambda point: point.epsilon)
        positions = [_position(point.epsilon) for point in points_of_system]
        axes.errorbar(
            positions,
            [point.accuracy for point in points_of_system],
            yerr=[point.spread for point in points_of_system],
            color=color,
            marker=marker,
            linestyle="-" if len(points_of_system) > 1 else "",
            markersize=9 if marker == "*" else 6,
            markerfacecolor="white" if "reports" in system.split()[-1:] else color,
            label=system,
        )
        for point, position in zip(points_of_system, positions, strict=True):
            if point.local != point.epsilon:
                axes.plot(
                    [position, _position(point.local)], [point.accuracy] * 2, color=color, linestyle=":", linewidth=1, marker="|", zorder=0
                )
    axes.axvspan(0.5, 10, color="tab:green", alpha=0.08, linewidth=0)
    axes.axvline(INFINITE / 5, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.5, INFINITE * 4)
    axes.set_ylim(0, 100)
    axes.set_xticks([1, 10, 1e3, 1e5, 1e7, INFINITE], ["1", "10", "1,000", "100,000", "10 million", "infinite"], fontsize="x-small")
    axes.minorticks_off()
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


def _position(epsilon: float) -> float:
    """Return the position of ``epsilon`` on the axis."""
    return epsilon if isfinite(epsilon) else INFINITE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    draw(points_of_table(TABLE), parser.parse_args().out)


if __name__ == "__main__":
    main()
