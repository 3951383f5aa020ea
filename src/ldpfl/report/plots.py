"""Reproducible plots: the same figures give the same bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.errors import ConfigError
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, FAIR, GOOD, IN_SHORT, PROTECTED, Worth
from ldpfl.report.privacy import best_over_run
from ldpfl.report.scores import display_factor, metric_heading, part_of, seed_text
from ldpfl.tasks import ACCURACY
from ldpfl.util.files import check_suffix, replace_atomically, write_text
from ldpfl.util.number_format import epsilon_text, number as figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ldpfl.experiments.planning.planner import Setting
    from ldpfl.experiments.sweep_config import SweepConfig
    from ldpfl.experiments.sweep_rows import Row
    from ldpfl.privacy.guarantee import Guarantee, Statement

_FORMATS = ("svg", "png", "pdf")


@dataclass(frozen=True)
class Picture:
    """A drawing that a notebook shows.

    Attributes:
        svg: text of the drawing, as SVG.
    """

    svg: str

    def save(self, path: Path | str) -> None:
        """Write the drawing to ``path`` as SVG.

        Raises:
            ConfigError: the suffix names another format.
        """
        check_suffix(Path(path), "a drawing in SVG", ".svg")
        write_text(Path(path), self.svg)

    def _repr_svg_(self) -> str:
        return self.svg


def draw_score_curve(path: Path, result: dict[str, Any]) -> None:
    """Draw the score against rounds, and the noise-free baseline if there is one. Rounds without a score leave a gap."""
    with _saved_panels(path, "svg") as (axes,):
        plot_scores(axes, result)
        axes.set_title(f"{literal(result['name'])}, n = {result['clients']}{seed_text(result)}")


def plot_scores(axes: Axes, result: dict[str, Any]) -> None:
    """Draw the score against rounds on ``axes``, and the noise-free baseline if there is one."""
    from matplotlib.ticker import MaxNLocator

    rounds = range(1, result["rounds"] + 1)
    baseline, scale = result.get("noise_free_score_per_round"), display_factor(result["metric"])
    if baseline:
        baseline_scores = [nan if score is None else scale * score for score in baseline]
        axes.plot(rounds, baseline_scores, color="0.55", linestyle="--", marker="o", markersize=3, label="without noise")
    scores = [nan if score is None else scale * score for score in result["score_per_round"]]
    axes.plot(rounds, scores, color="tab:blue", marker="o", markersize=4, label=_run_label(result))
    axes.set_xlabel("round")
    axes.set_ylabel(literal(f"{metric_heading(result['metric'])}, {result['evaluated_on']}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def plot_calibration(axes: Axes, result: Mapping[str, Any]) -> None:
    """Draw the observed over the predicted mean of each tenth of the scored rows. On the diagonal, which is drawn too, both are equal."""
    tenths, predicts_risks = result["calibration"], result.get("event") is not None
    predicted, observed = ([tenth[name] for tenth in tenths] for name in ("predicted", "observed"))
    distances = [[tenth["observed"] - tenth["low"] for tenth in tenths], [tenth["high"] - tenth["observed"] for tenth in tenths]]
    low = min(0.0, *predicted) if predicts_risks else min(predicted)
    high = max([*predicted, *observed])
    axes.plot([low, high], [low, high], color="0.55", linestyle="--", label="predicted as observed")
    # An observed value may lie outside its interval, and Matplotlib refuses negative lengths.
    error_bars = [[max(0.0, distance) for distance in side] for side in distances]
    label = f"a tenth of the {part_of(result)} rows"
    axes.errorbar(predicted, observed, error_bars, fmt="o", color="tab:blue", markersize=4, capsize=2, label=label)
    axes.set_xlabel("mean predicted risk" if predicts_risks else "mean prediction")
    axes.set_ylabel("observed share" if predicts_risks else "observed")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def plot_risks(axes: Axes, result: Mapping[str, Any]) -> None:
    """Draw a histogram of the predicted risks of the scored rows."""
    edges, rows = result["risks"]["edges"], result["risks"]["rows"]
    axes.bar(edges[:-1], rows, width=[high - low for low, high in pairwise(edges)], align="edge", color="tab:blue")
    axes.set_xlabel("predicted risk")
    axes.set_ylabel(f"{part_of(result)} rows")


def plot_spent(axes: Axes, points: Sequence[tuple[int, float]], measuring: int) -> None:
    """Draw the cumulative epsilon by round; each of ``points`` is (round, epsilon). The first ``measuring`` rounds measured columns."""
    from matplotlib.ticker import MaxNLocator

    axes.plot(*zip(*points, strict=True), color="tab:blue", marker="o", markersize=4)
    axes.set_ylim(bottom=0)
    if measuring:
        axes.axvline(measuring + 0.5, color="0.55", linestyle="--")
        axes.annotate(" training", (measuring + 0.5, 0.02), xycoords=("data", "axes fraction"), va="bottom")
    axes.set_xlabel(f"round: {measuring} of measuring, then those of training" if measuring else "round")
    axes.set_ylabel("epsilon so far")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def plot_protection(axes: Axes, statement: Statement) -> None:
    """Draw the epsilons of a whole run on one logarithmic scale: proved bounds, and a paper's claims."""
    marks = [
        (row.epsilon, f"{IN_SHORT[row.trust_model]}: {figure(row.epsilon)}{_claim_note(row)}", True) for row in _run_guarantees(statement)
    ]
    claim = next((row for row in statement.rows if row.status == "claimed"), None)
    if claim is not None:
        marks.append((claim.epsilon, f"the paper's claim: {figure(claim.epsilon)}", False))
    finite_marks = sorted((epsilon, text, is_bound) for epsilon, text, is_bound in marks if isfinite(epsilon))
    low, high = _scale_of_epsilon(axes, [epsilon for epsilon, _, _ in finite_marks], room=30)
    axes.set_ylim(-0.6, max(1, len(finite_marks)) - 0.4)
    for height, (epsilon, text, is_bound) in enumerate(reversed(finite_marks)):  # the smallest epsilon is highest
        axes.plot([epsilon], [height], marker="o" if is_bound else "x", markersize=8, color="tab:blue" if is_bound else "tab:red")
        # A mark in the left half of the scale has its text on the right, and one in the right half on the left.
        side, offset = ("left", 9) if epsilon < (low * high) ** 0.5 else ("right", -9)
        axes.annotate(text, (epsilon, height), (offset, 0), textcoords="offset points", ha=side, va="center")
    axes.set_yticks([])
    axes.set_xlabel("epsilon")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _claim_note(row: Guarantee) -> str:
    """Return a note that a guarantee rests on code that is not ldpfl's, empty if it is proved."""
    return f", {AUTHORS_CLAIM}" if row.status == AUTHORS_CLAIM else ""


def _scale_of_epsilon(axes: Axes, epsilons: Sequence[float], *, room: float) -> tuple[float, float]:
    """Make the horizontal axis a logarithmic scale of epsilon, with zones of protection in the background. Return its ends.

    The scale reaches to ``room`` times the largest epsilon, to leave space for a text beside its mark.
    """
    low = min([0.1, *(epsilon / 3 for epsilon in epsilons)])
    high = max([1000.0, *(epsilon * room for epsilon in epsilons)])
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for (start, end), colour in zip(((low, GOOD), (GOOD, FAIR), (FAIR, high)), ZONES.values(), strict=True):
        axes.axvspan(start, end, color=colour, linewidth=0)
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.10g}")
    return low, high


def plot_worth(axes: Axes, rows: Sequence[tuple[Row, float]], sweep: SweepConfig) -> None:
    """Draw scores of a sweep against proved epsilons, from pairs (row, epsilon). Rows that differ in the first axis alone are joined."""
    _scale_of_epsilon(axes, [epsilon for _, epsilon in rows], room=3)
    epsilon_of_row = {id(row): epsilon for row, epsilon in rows}
    for number, (label, series) in enumerate(_series_of([row for row, _ in rows], sweep).items()):
        points = sorted(((epsilon_of_row[id(row)], row) for row in series), key=lambda pair: pair[0])
        means, deviations = _means_and_deviations([row for _, row in points])
        epsilons = [epsilon for epsilon, _ in points]
        marker = _MARKERS[number // 10 % len(_MARKERS)]
        axes.errorbar(
            epsilons,
            means,
            deviations,
            fmt=f"{marker}-",
            color=f"C{number % 10}",
            markersize=5,
            capsize=2,
            linewidth=1,
            label=literal(label),
        )
    axes.set_xlabel("epsilon that holds for a whole run")
    axes.set_ylabel(literal(metric_heading(rows[0][0].metric)))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


_MARKERS = "osD^vPX*"
"""Markers of the first ten lines, of the next ten, and so on: Matplotlib has ten colours, "C0" to "C9"."""

ZONES: Mapping[Worth, str] = {"good": "#d9f0dd", "fair": "#f7ecc9", "bad": "#fbdcd8"}
"""Background colours of good, fair and bad protection."""


def _run_guarantees(statement: Statement) -> list[Guarantee]:
    """Return the guarantees over the whole run, behind what hides a client and against everybody, if they are known."""
    guarantees = [statement.find(trust, "run") for trust in ("hidden", "local")]
    return [row for row in guarantees if row is not None]


def draw_sweep(path: Path, sweep: SweepConfig, rows: Sequence[Row]) -> None:
    """Draw a sweep's scores against the first axis or the budget, and all rows against the bytes that a client sends."""
    kind = require_plot(path)
    with _saved_panels(path, kind, panels=panels_of(sweep)) as panels:
        plot_sweep(panels, sweep, rows)
        panels[0].figure.suptitle(literal(sweep.name))


def panels_of(sweep: SweepConfig) -> int:
    """Return how many panels :func:`plot_sweep` draws on: one against bytes, and one against the first axis if there is one."""
    return 2 if sweep.axes else 1


def plot_sweep(panels: Sequence[Axes], sweep: SweepConfig, rows: Sequence[Row]) -> None:
    """Draw a sweep's scores on ``panels``: against the first axis, if any, and all rows against the bytes that are sent."""
    axis = next(iter(sweep.axes), None)
    drawn = [row for row in rows if row.score]
    if axis:
        _draw_lines(panels[0], sweep, drawn, axis)
        panels[0].legend(loc="best", fontsize=8)
    _draw_bytes(panels[-1], sweep, drawn, axis)
    panels[-1].legend(loc="best", fontsize=8)
    panels[0].set_ylabel(literal(metric_heading(drawn[0].metric if drawn else ACCURACY)))
    for panel in panels:
        panel.grid(alpha=0.3)


def _series_of(rows: Sequence[Row], sweep: SweepConfig) -> dict[str, list[Row]]:
    """Return the rows of each line of a plot by the line's label. Rows of one variant that differ in the first axis alone share a line."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        values = [f"{name} {value}" for name, (_, value) in zip(sweep.headings, row.point, strict=False)][1:]
        named_variant = [row.variant] if len(sweep.variants) > 1 or not values else []  # a single one need not be named
        series.setdefault(", ".join([*named_variant, *values]), []).append(row)
    return series


def _draw_lines(panel: Axes, sweep: SweepConfig, rows: Sequence[Row], axis: str) -> None:
    """Draw a line for each of :func:`_series_of`. It is horizontal if its variant does not depend on ``axis``, or has no finite budget."""
    by_budget, values = sweep.plot_against == "budget", list(sweep.points[axis])
    positions_of_values = [float(value) if isinstance(value, int | float) else number for number, value in enumerate(values)]
    if not by_budget and any(isinstance(value, str) for value in values):
        panel.set_xticks(positions_of_values, [literal(str(value)) for value in values])
    all_positions = []
    for number, (name, series) in enumerate(_series_of(rows, sweep).items()):
        rows_at_points = [row for row in series if row.point]
        if by_budget:
            positions = [row.budget for row in rows_at_points]
        else:
            positions = [positions_of_values[values.index(dict(row.point)[axis])] for row in rows_at_points]
        means, deviations = _means_and_deviations(series)
        label = literal(name)
        if len(positions) < len(series) or not all(map(isfinite, positions)):
            panel.axhline(means[0], color="0.4", linestyle="--", linewidth=1, label=label)
        else:
            marker = _MARKERS[number // 10 % len(_MARKERS)]
            panel.errorbar(positions, means, deviations, color=f"C{number % 10}", marker=marker, markersize=4, capsize=2, label=label)
            all_positions += positions
    if by_budget and all_positions and min(all_positions) > 0 and max(all_positions) > 10 * min(all_positions):
        panel.set_xscale("log")
    elif not by_budget and not any(isinstance(value, str) for value in values):
        mark_numbers(panel, positions_of_values)
    panel.set_xlabel("epsilon of the whole run, trusting nobody" if by_budget else named_axis(axis))


_AXIS_NAMES = {
    "clients.count": "clients",
    "clients.fraction": "part of the clients that takes part in a round",
    "mechanism.epsilon": "epsilon of a report's unit",
    "mechanism.group": "weights in a group",
    "training.rounds": "rounds",
}


def named_axis(key: str) -> str:
    """Return the name of the setting ``key`` for a plot's axis; the key itself if it has no other name."""
    return _AXIS_NAMES.get(key, key)


def mark_numbers(axes: Axes, values: Sequence[float]) -> None:
    """Label ``values`` on the horizontal axis. The scale is logarithmic if they span more than a factor of 10."""
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,.10g}" for value in values])
    axes.minorticks_off()


def _draw_bytes(panel: Axes, sweep: SweepConfig, rows: Sequence[Row], axis: str | None) -> None:
    """Draw each row's score against its bytes, in its variant's colour, and join the rows of each value of the first ``axis`` by a line."""
    if axis is not None:
        _join_equal_values(panel, rows, axis, sweep.points[axis])
    for number, variant in enumerate(sweep.variants):
        variant_rows = [row for row in rows if row.variant == variant]
        label = "" if axis else literal(variant)
        bytes_sent = [row.bytes_per_client for row in variant_rows]
        means, deviations = _means_and_deviations(variant_rows)
        panel.errorbar(bytes_sent, means, deviations, color=f"C{number % 10}", fmt="o", markersize=4, capsize=2, label=label)
    panel.set_xscale("log")
    panel.set_xlabel("bytes that a client sends in a round")


def _join_equal_values(panel: Axes, rows: Sequence[Row], axis: str, values: Sequence[object]) -> None:
    """Join the rows of each of the ``values`` of ``axis`` by a line in grey, from light for the first value to dark for the last."""
    for index, value in enumerate(values):
        joined = sorted((row for row in rows if dict(row.point).get(axis) == value), key=lambda row: row.bytes_per_client)
        means, _ = _means_and_deviations(joined)
        grey = str(0.8 - 0.6 * index / max(1, len(values) - 1))
        label = literal(f"{axis.rpartition('.')[2]} {value}")
        panel.plot([row.bytes_per_client for row in joined], means, color=grey, linewidth=1, label=label)


def _means_and_deviations(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return the means and the deviations of the rows' scores, shares in per cent."""
    factors = [display_factor(row.metric) for row in rows]
    means = [factor * (row.mean or 0.0) for factor, row in zip(factors, rows, strict=True)]
    return means, [factor * row.deviation for factor, row in zip(factors, rows, strict=True)]


def require_plot(path: Path) -> str:
    """Return the format that the suffix of ``path`` names.

    Raises:
        ConfigError: the suffix is not svg, png or pdf, or the folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"the plot {path} cannot be written, because there is no folder {path.parent}: create it, or give another path")
    kind = path.suffix.lstrip(".").lower()
    if kind not in _FORMATS:
        raise ConfigError(f"the plot is called {path.name!r}, expected a name that ends in .{', .'.join(_FORMATS)}")
    return kind


def draw_epsilon_by_clients(path: Path, setting: Setting, points: Sequence[tuple[int, float, float]], target: float | None) -> None:
    """Draw the central epsilon of a whole run against the number of clients, on logarithmic scales.

    Args:
        path: its suffix chooses the format.
        points: number of clients, lower bound of epsilon or NaN, and upper bound.
        target: epsilon to draw as a line; None for no line.

    Raises:
        ConfigError: the suffix is not svg, png or pdf.
    """
    kind = require_plot(path)
    counts, lower, upper = zip(*points, strict=True)
    with _saved_panels(path, kind) as (axes,):
        axes.plot(counts, upper, color="tab:blue", marker="o", markersize=3, label="ideal shuffler, certified for training")
        if all(map(isfinite, lower)):
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
def _saved_panels(path: Path, kind: str, panels: int = 1) -> Iterator[list[Axes]]:
    """Yield ``panels`` axes side by side to draw on, and write them to ``path`` at the end of the block."""
    with figure_file(path, kind, (6.4 if panels == 1 else 11.0, 4.0 if panels == 1 else 4.8)) as figure:
        yield list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])


@contextmanager
def figure_file(path: Path, kind: str, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure of ``size`` (width, height) in inches, and write it to ``path`` as ``kind`` at the end of the block."""
    with styled_figure(size) as figure:
        yield figure
        with replace_atomically(path) as temporary:
            metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]  # a date would change the bytes
            figure.savefig(temporary, format=kind, dpi=150, metadata=metadata)


_STYLE_LOCK = threading.RLock()
"""Lock for Matplotlib's style, which all threads share: a page may be drawn while a run draws its curve."""


@contextmanager
def styled_figure(size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure of ``size`` (width, height) in inches, to be saved within the block. Its style makes the bytes reproducible."""
    import matplotlib  # slow to import

    with _STYLE_LOCK, matplotlib.rc_context({"svg.hashsalt": "ldpfl", "svg.fonttype": "none", "font.size": 10}):
        from matplotlib.figure import Figure

        yield Figure(figsize=size, layout="constrained")


def literal(text: str) -> str:
    """Return ``text`` so that Matplotlib draws it as it is: text between dollars would be a formula."""
    return text.replace("$", r"\$")


def _run_label(result: dict[str, Any]) -> str:
    """Return the legend's text for a run: its mechanism and epsilon.

    If records, persons or clients get noise as a whole, this is the best epsilon of the run, else that of a part of one report.
    """
    if result["epsilon_per_unit"] is None:
        return "not private"
    best = best_over_run(result["privacy"]) if result["unit"] in PROTECTED else None
    if best is not None:
        trusted = "" if best["trust_model"] == "local" else f", {IN_SHORT[best['trust_model']]}"
        delta = f", δ = {best['delta']:g}" if best["delta"] else ""
        return literal(f"{result['mechanism']}, ε = {epsilon_text(best['epsilon'])} for one {best['unit']}, whole run{trusted}{delta}")
    has_pure_epsilon = result["privacy"]["local_pure"] != "infinity"  # an epsilon at delta 0
    delta = "" if has_pure_epsilon else f", δ = {result['privacy']['delta']:g}"
    return literal(f"{result['mechanism']}, ε = {epsilon_text(result['epsilon_per_unit'])} for one {result['unit']}, one round{delta}")
