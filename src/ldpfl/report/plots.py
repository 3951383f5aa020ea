"""Plots that a second run of the same figures repeats byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.errors import ConfigError
from ldpfl.files import replace_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ldpfl.experiments.sweep import Row, SweepConfig
    from ldpfl.privacy.planner import Setting

_FORMATS = ("svg", "png", "pdf")


def draw_accuracy_curve(path: Path, result: dict[str, Any]) -> None:
    """Draw accuracy against rounds, beside the noise-free twin where there is one."""
    with _figure(path, "svg") as (axes,):
        from matplotlib.ticker import MaxNLocator

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


def draw_sweep(path: Path, sweep: SweepConfig, rows: Sequence[Row]) -> None:
    """Draw accuracy against the sweep's first axis or its budget, a line a variant with its spread, and against bytes sent."""
    kind = require_plot(path)
    axis = next(iter(sweep.axes), None)
    with _figure(path, kind, panels=2 if axis else 1) as panels:
        if axis and sweep.plot_against == "budget":
            _draw_lines(panels[0], sweep, rows, lambda row: row.budget)
            panels[0].set_xlabel("epsilon of a client's whole run, trusting nobody")
        elif axis:
            _draw_lines(panels[0], sweep, rows, lambda row: float(row.point[0][1]))
            panels[0].set_xlabel(axis)
        _draw_lines(panels[-1], sweep, rows, lambda row: row.bytes_per_client, linewidth=1.0 if axis else 0.0)
        panels[-1].set_xlabel("bytes that a client sends in a round")
        panels[-1].set_xscale("log")
        panels[0].set_ylabel("accuracy (%)")
        panels[0].legend(loc="best", fontsize=8)
        panels[0].figure.suptitle(sweep.name)


def _draw_lines(panel: Axes, sweep: SweepConfig, rows: Sequence[Row], x: Callable[[Row], float], linewidth: float = 1.5) -> None:
    """Draw a line a variant; one without a finite place on the x axis, such as no noise at all, lies across the whole panel."""
    places: list[float] = []
    for number, variant in enumerate(sweep.variants):
        own = [row for row in rows if row.variant == variant and row.accuracy]
        at, means, spread = [x(row) for row in own], [100 * (row.mean or 0.0) for row in own], [100 * row.deviation for row in own]
        if at and not all(map(isfinite, at)):
            panel.axhline(means[0], color="0.4", linestyle="--", linewidth=1, label=variant)
            continue
        places += at
        panel.errorbar(at, means, spread, color=f"C{number % 10}", marker="o", markersize=4, capsize=2, linewidth=linewidth, label=variant)
    if places and min(places) > 0 and max(places) > 10 * min(places):
        panel.set_xscale("log")
    panel.grid(alpha=0.3)


def require_plot(path: Path) -> str:
    """Return the format that the suffix of ``path`` names.

    Raises:
        ConfigError: it is none of svg, png, pdf, or there is no such folder.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"the plot {path} cannot be written: there is no folder {path.parent}")
    kind = path.suffix.lstrip(".").lower()
    if kind not in _FORMATS:
        raise ConfigError(f"a plot is written as {', '.join(_FORMATS)}, not as {path.name!r}")
    return kind


def draw_epsilon_by_clients(path: Path, setting: Setting, points: Sequence[tuple[int, float, float]], target: float | None) -> None:
    """Draw the central epsilon of a whole run against the number of clients, on logarithmic scales.

    Args:
        path: its suffix chooses the format.
        points: (clients, attained, certified).
        target: drawn as a line, where there is one.

    Raises:
        ConfigError: a suffix that is none of svg, png, pdf.
    """
    kind = require_plot(path)
    counts, lower, upper = zip(*points, strict=True)
    with _figure(path, kind) as (axes,):
        axes.plot(counts, upper, color="tab:blue", marker="o", markersize=3, label="ideal shuffler, certified for training")
        axes.plot(counts, lower, color="tab:blue", linestyle=":", label="attained by a data set")
        axes.axhline(setting.epsilon, color="tab:red", linestyle="--", label="claimed by the paper")
        if target is not None:
            axes.axhline(target, color="0.4", linewidth=1, label=f"target {target:g}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("clients")
        axes.set_ylabel(f"epsilon of a client's whole run, delta {setting.delta:g}")
        axes.set_title(f"{setting.weights:,} weights, {setting.rounds} rounds, epsilon {setting.epsilon:g} a weight")
        axes.grid(alpha=0.3)
        axes.legend(loc="best")


@contextmanager
def _figure(path: Path, kind: str, panels: int = 1) -> Iterator[list[Axes]]:
    """Yield ``panels`` axes side by side to draw on, and write them to ``path`` in the end."""
    import matplotlib  # slow to import

    with matplotlib.rc_context({"svg.hashsalt": "ldpfl", "svg.fonttype": "none", "font.size": 10}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4 if panels == 1 else 11.0, 4.0 if panels == 1 else 4.8), layout="constrained")
        yield list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
        with replace_atomically(path) as temporary:
            metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
            figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)


def _label(result: dict[str, Any]) -> str:
    if result["epsilon_per_weight"] is None:
        return "not private"
    return f"{result['mechanism']}, ε = {result['epsilon_per_weight']:g} a weight"
