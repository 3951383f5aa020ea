"""The plot of a sweep over noise schedules: budget as the papers count it, noise and score, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ldpfl.report.plots import figure_file, literal, require_plot
from ldpfl.util.number_format import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

    from ldpfl.experiments.sweep_config import SweepConfig
    from ldpfl.experiments.sweep_rows import Curve, Point, Rounds

_COLOURS = ("#e69f00", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#000000")
"""Colours of Okabe and Ito, which colour-blind people can distinguish; without yellow, which is too pale on white."""

_STYLES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2)))
_MARKERS = "osD^vPX*"
_UNPROTECTED_STYLE = {"color": "0.5", "linestyle": "--", "marker": "."}
"""Style of the line of a variant that protects nothing."""

_TITLE = """{name}: lines are means over the seeds, bands go from the lowest to the highest
Left: epsilon as the papers add it up, which is NOT a guarantee; what holds is in the table and, as "ledger", in the legend"""


_LEGEND_WIDTH, _SAMPLE_WIDTH = 225, 15
"""Width of the legend below the panels, and of a line's sample in it, in letters."""


def draw_noise(path: Path, sweep: SweepConfig, curves: Sequence[Curve]) -> bool:
    """Draw a row of panels for each point of the axes: the papers' epsilon, noise and accuracy after each round.

    Lines are means over the finished seeds. Bands of the first two panels reach from the lowest to the highest seed. These panels are
    LaDP-FL's Figure 5 and, round by round, the sums of its Table III. "Ledger" in the legend is the proved local epsilon of a client's
    whole run.

    Args:
        path: its suffix chooses the format.

    Returns:
        Whether there is anything to draw; if no finished run had a noise schedule, nothing is written.

    Raises:
        ConfigError: the suffix is not svg, png or pdf.
    """
    kind = require_plot(path)
    drawn = [curve for curve in curves if curve.score]
    # A curve without a point does not depend on the axes, and is drawn at each point.
    points = list(dict.fromkeys(curve.row.point for curve in drawn if curve.row.point)) or [()]
    all_curves_at = {point: [curve for curve in drawn if curve.row.point in ((), point)] for point in points}
    # Only points with a noise schedule are drawn.
    curves_at = {point: point_curves for point, point_curves in all_curves_at.items() if any(curve.norm for curve in point_curves)}
    if not curves_at:
        return False
    private_variants = [variant for variant in sweep.variants if any(_is_private(curve) for curve in drawn if curve.row.variant == variant)]
    with figure_file(path, kind, (12.0, 0.6 + 4.0 * len(curves_at))) as figure:
        figure.suptitle(_TITLE.format(name=literal(sweep.name)), fontsize=11)
        subfigures = figure.subfigures(len(curves_at), 1, squeeze=False)[:, 0]
        for subfigure, (point, point_curves) in zip(subfigures, curves_at.items(), strict=True):
            _draw_point(subfigure, private_variants, point, point_curves)
    return True


def _draw_point(figure: SubFigure, private_variants: Sequence[str], point: Point, curves: Sequence[Curve]) -> None:
    """Draw the three panels of one point, and a legend below them."""
    budget, noise, accuracy = figure.subplots(1, 3)
    for curve in curves:
        index = private_variants.index(curve.row.variant) if _is_private(curve) else None
        first_seed_scores, *_ = curve.score
        rounds = len(first_seed_scores)
        style = _UNPROTECTED_STYLE if index is None else _line_style(index, len(private_variants), rounds)
        if curve.norm:
            _draw_mean_and_range(budget, curve.paper_epsilon, style)
            _draw_mean_and_range(noise, curve.norm, style)
        percent = [100 * statistics.fmean(values) for values in zip(*curve.score, strict=True)]
        accuracy.plot(range(1, rounds + 1), percent, label=_label(curve), **style)
    budget.set_ylabel("epsilon so far, the papers' count\n(mean client, no guarantee)")
    noise.set_ylabel("noise so far\n(L2 norms, all clients added up)")
    accuracy.set_ylabel("accuracy (%)")
    for panel in (budget, noise):
        _scale_values(panel)
    _finish_panels(figure, (budget, noise, accuracy))
    if point:
        figure.suptitle(literal(", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point)), fontsize=10, fontweight="bold")


def _finish_panels(figure: SubFigure, panels: Sequence[Axes]) -> None:
    """Label the panels, and draw their common legend below them."""
    from matplotlib.ticker import MaxNLocator

    for panel in panels:
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    handles, labels = panels[-1].get_legend_handles_labels()
    columns = max(1, min(4, _LEGEND_WIDTH // (max(map(len, labels)) + _SAMPLE_WIDTH)))  # as many as fit, at most 4
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, handlelength=6)


def _is_private(curve: Curve) -> bool:
    """Whether the curve's variant protects something: it has noise, or a finite epsilon."""
    return bool(curve.norm) or not isinf(curve.row.budget)


def _line_style(index: int, count: int, rounds: int) -> dict[str, Any]:
    """Return the style of variant ``index`` of ``count``. Lines that coincide differ in width, and have markers in different rounds."""
    marker_step = max(count, rounds // 4)  # some four markers on a line, or fewer with many variants
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _STYLES[index % len(_STYLES)],
        "linewidth": 3.0 - 2.0 * index / count,
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 5,
        "markevery": (index * marker_step // count % rounds, marker_step),  # index of the first marked round, and the step
    }


def _draw_mean_and_range(panel: Axes, runs: Sequence[Rounds], style: dict[str, Any]) -> None:
    """Draw the mean of ``runs`` by round, and a band from the lowest to the highest."""
    by_round = list(zip(*runs, strict=True))
    rounds = range(1, len(by_round) + 1)
    panel.plot(rounds, [statistics.fmean(values) for values in by_round], **style)
    if len(runs) > 1:
        lowest, highest = [min(values) for values in by_round], [max(values) for values in by_round]
        panel.fill_between(rounds, lowest, highest, color=style["color"], alpha=0.15)


def _scale_values(panel: Axes) -> None:
    """Make the vertical scale logarithmic if the lines' last values differ by more than a factor of 10."""
    ends = [float(np.asarray(line.get_ydata())[-1]) for line in panel.get_lines()]
    if min(ends) > 0 and max(ends) > 10 * min(ends):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0.0)


def _label(curve: Curve) -> str:
    """Return the legend's text for a curve: its variant, the epsilon of its ledger, and how many seeds are finished."""
    budget, seeds = curve.row.budget, len(curve.score)
    ledger = "infinite" if isinf(budget) else number(budget)
    without_score = len(curve.row.stopped) + len(curve.row.failed)
    finished = f"; {seeds} of {seeds + without_score} seeds" if without_score else ""
    return f"{literal(curve.row.variant)} (ledger: {ledger}{finished})"
