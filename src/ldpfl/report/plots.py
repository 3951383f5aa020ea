"""Plots as SVG that a second run of the same figures repeats byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ldpfl.files import replace_atomically


def draw_accuracy_curve(path: Path, result: dict[str, Any]) -> None:
    """Draw accuracy against rounds, beside the noise-free twin where there is one."""
    import matplotlib  # slow to import

    with matplotlib.rc_context({"svg.hashsalt": "ldpfl", "svg.fonttype": "none", "font.size": 10}):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        rounds = range(1, result["rounds"] + 1)
        twin = result["noise_free_accuracy_per_round"]
        if twin:
            axes.plot(rounds, [100 * a for a in twin], color="0.55", linestyle="--", marker="o", markersize=3, label="without noise")
        axes.plot(rounds, [100 * a for a in result["accuracy_per_round"]], color="tab:blue", marker="o", markersize=4, label=_label(result))
        axes.set_xlabel("round")
        axes.set_ylabel(f"accuracy on the {result['evaluated_on']} images (%)")
        axes.set_title(f"{result['name']}, n = {result['clients']}, seed {result['seed']}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        with replace_atomically(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})


def _label(result: dict[str, Any]) -> str:
    if result["epsilon_per_weight"] is None:
        return "not private"
    return f"{result['mechanism']}, ε = {result['epsilon_per_weight']:g} a weight"
