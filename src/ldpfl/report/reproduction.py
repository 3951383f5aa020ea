"""A reproduced table or figure: a tidy table, a picture and a table for the terminal, the paper's figures beside ours."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.experiments.reproduction import ReproducedRow, Reproduction, Shows
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.report.fitted_table import Column, FittedTable
from ldpfl.report.plots import figure_file, literal, mark_numbers, named_axis
from ldpfl.report.scores import display_factor, metric_heading
from ldpfl.report.terminal_tables import CLAIM_LEGEND, claim_mark
from ldpfl.tasks import ACCURACY
from ldpfl.util.number_format import NO_EPSILON, epsilon_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADINGS: dict[Shows, str] = {
    "score": "",
    "noise": "noise, L2 norms added up",
    "paper_epsilon": "epsilon as the paper adds it up",
    "seconds": "seconds of a run",
    "distance": "Fréchet distance of reconstructed images",
}
_SHORT_HEADINGS: dict[Shows, str] = {"noise": "noise", "paper_epsilon": "added up", "seconds": "seconds", "distance": "distance"}
"""Short headings for a terminal's narrow columns."""

_PAPER_COLOUR = "0.45"  # gray
_MOST_LINES_INSIDE = 5
"""Maximum number of variants whose legend lies inside a picture."""


def compared_heading(results: Sequence[ReproducedRow], shows: Shows) -> str:
    """Return the heading of the figure that is compared."""
    metric = next((result.row.metric for result in results if result.row), ACCURACY)
    return metric_heading(metric) if shows == "score" else _HEADINGS[shows]


def tidy(reproduction: Reproduction, sweep: SweepConfig, results: Sequence[ReproducedRow]) -> list[dict[str, Any]]:
    """Return one line for each result: figures as they are shown (accuracies in per cent), None for an unknown one."""
    lines = []
    for result in results:
        stored_row, paper_figure = result.row, _paper_figure(reproduction, result)
        our_figure, spread = _our_figure(reproduction.shows, result), _our_spread(reproduction.shows, result)
        best_epsilon, trusted = result.best_guarantee or (None, None)
        lines.append(
            {
                "setting": result.variant,
                **{key: dict(result.point).get(key) for key in sweep.axes},
                "ours": None if our_figure is None else round(our_figure, 4),
                "spread": None if spread is None else round(spread, 4),
                "paper": paper_figure,
                "seeds": result.seeds,
                "seeds_wanted": result.wanted,
                "epsilon_claimed": _for_json(stored_row.privacy.get("paper_claim")) if stored_row else None,
                "epsilon_that_holds": _for_json(best_epsilon),
                "trusting": trusted,
                "protects": stored_row.privacy.get("protected") if stored_row else None,
                "bytes_a_client_and_round": stored_row.bytes_per_client if stored_row else None,
                "seconds_a_run": round(stored_row.seconds, 1) if stored_row else None,
                "state": _state_text(result),
                "changed": reproduction.changed or None,
            }
        )
    return lines


def to_csv(lines: Sequence[dict[str, Any]]) -> str:
    """Return ``lines`` as CSV; an unknown figure is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else ["setting"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def reproduction_table(reproduction: Reproduction, sweep: SweepConfig, results: Sequence[ReproducedRow]) -> FittedTable:
    """Return the table for a terminal: our figures beside the paper's, claimed and proved epsilons."""
    lines = tidy(reproduction, sweep, results)
    form = ",.2f" if reproduction.shows == "score" else ",.4g"
    columns = [
        Column("setting", [result.variant for result in results], is_name=True),
        *(
            Column(title, ["-" if line[key] is None else str(line[key]) for line in lines], is_name=True)
            for title, key in zip(sweep.headings, sweep.axes, strict=True)
        ),
        Column(
            _SHORT_HEADINGS.get(reproduction.shows, compared_heading(results, reproduction.shows)),
            [_our_cell(line, form) for line in lines],
        ),
        Column("paper", ["-" if line["paper"] is None else f"{line['paper']:{form}}" for line in lines]),
        Column("claimed", [_epsilon_or_dash(line["epsilon_claimed"]) for line in lines], dropped=2),
        Column("holds", list(map(_best_epsilon_cell, results))),
        Column("seeds", [f"{result.seeds}/{result.wanted}" for result in results], dropped=1),
    ]
    if reproduction.shows != "seconds":
        columns.append(Column("seconds", ["-" if result.row is None else f"{result.row.seconds:.0f}" for result in results], dropped=1))
    legend = (
        "claimed: epsilon as the paper counts it; holds: the smallest proved epsilon of all that a client, or one record of it, sends; "
        "seconds: mean of a run"
    )
    reasons = dict.fromkeys(f"{result.variant} {_state_text(result)}" for result in results if _all_stopped(result))
    claim_legend = CLAIM_LEGEND if any(result.row and claim_mark(result.row) for result in results) else ""
    caption = "\n".join(filter(None, [legend, claim_legend, *reasons, reproduction.differs, reproduction.changes_note]))
    return FittedTable(f"{reproduction.source}: {reproduction.title}", columns, caption)


def _best_epsilon_cell(result: ReproducedRow) -> str:
    """Return the smallest proved epsilon of a result's runs, with a mark if it rests on an author's claim; "-" if there is none."""
    if result.row is None or result.best_guarantee is None:
        return "-"
    epsilon, _ = result.best_guarantee
    return epsilon_text(epsilon) + claim_mark(result.row)


def _our_cell(line: dict[str, Any], form: str) -> str:
    """Return our figure with its spread, or the state of the runs if there is no figure."""
    if line["ours"] is None:
        return str(line["state"]).partition(":")[0]  # without the reason why runs stopped
    spread = "" if line["spread"] is None else f" ± {line['spread']:{form}}"
    return f"{line['ours']:{form}}{spread}"


def draw_reproduction(path: Path, reproduction: Reproduction, sweep: SweepConfig, results: Sequence[ReproducedRow]) -> None:
    """Draw our figures and the paper's: lines against the first axis if its values are numbers, else bars. The paper's are diamonds."""
    axis = next(iter(sweep.axes), None)
    is_numeric = axis is not None and all(isinstance(value, int | float) for value in sweep.points[axis])
    height = 4.4 if is_numeric else 1.4 + 0.5 * len(results)
    legend_is_outside = is_numeric and len(sweep.variants) > _MOST_LINES_INSIDE  # so many names would cover points
    with figure_file(path, "svg", (9.6 if legend_is_outside else 7.2, height)) as figure:
        axes = figure.subplots()
        if is_numeric:
            _draw_lines(axes, str(axis), reproduction, sweep, results)
        else:
            _draw_bars(axes, reproduction, results)
        title = "\n".join(filter(None, [f"{reproduction.source}: {reproduction.title}", reproduction.changes_note]))
        axes.set_title(literal(title), fontsize=10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # none if no run is finished
            outside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
            axes.legend(fontsize=8, **(outside if legend_is_outside else {"loc": "best"}))


def _draw_lines(axes: Axes, axis: str, reproduction: Reproduction, sweep: SweepConfig, results: Sequence[ReproducedRow]) -> None:
    """Draw a line for each variant against ``axis``, with marks for the paper's figures and for stopped runs."""
    values = [float(value) for value in sweep.points[axis]]
    for number, variant in enumerate(sweep.variants):
        variant_results = [result for result in results if result.variant == variant]
        colour = f"C{number % 10}"
        _draw_our_line(axes, axis, reproduction.shows, variant_results, colour)
        # Results that do not depend on the axis are marked at its first value.
        positions = [float(dict(result.point).get(axis, values[0])) for result in variant_results]
        paper_figures = [_paper_figure(reproduction, result) for result in variant_results]
        marks = [(position, figure) for position, figure in zip(positions, paper_figures, strict=True) if figure is not None]
        if marks:
            paper_label = literal(f"{variant}, paper")
            axes.plot(*zip(*marks, strict=True), color=colour, marker="D", fillstyle="none", linestyle="none", label=paper_label)
        stopped = [position for position, result in zip(positions, variant_results, strict=True) if _all_stopped(result)]
        if stopped:  # on the lower edge, whatever the scale is
            on_lower_edge = axes.get_xaxis_transform()
            axes.plot(stopped, [0.02] * len(stopped), "x", color=colour, transform=on_lower_edge, label=literal(f"{variant}, stopped"))
    mark_numbers(axes, values)
    axes.set_xlabel(named_axis(axis))
    axes.set_ylabel(compared_heading(results, reproduction.shows))


def _draw_our_line(axes: Axes, axis: str, shows: Shows, results: Sequence[ReproducedRow], colour: str) -> None:
    """Draw our figures of one variant against ``axis``; a horizontal line if the variant does not depend on it."""
    known = [(result, float(figure)) for result in results if (figure := _our_figure(shows, result)) is not None]
    if not known:
        return
    first_result, first_figure = known[0]
    label = literal(first_result.variant)
    if not first_result.point:  # the variant does not depend on the axis
        axes.axhline(first_figure, color=colour, linestyle="--", linewidth=1, label=label)
        return
    positions, heights = [float(dict(result.point)[axis]) for result, _ in known], [figure for _, figure in known]
    spreads = [_our_spread(shows, result) or 0.0 for result, _ in known]
    axes.errorbar(positions, heights, spreads, color=colour, marker="o", markersize=4, capsize=2, label=label)


def _draw_bars(axes: Axes, reproduction: Reproduction, results: Sequence[ReproducedRow]) -> None:
    """Draw a bar for each result, with a mark for the paper's figure."""
    names = [", ".join([result.variant, *(str(value) for _, value in result.point)]) for result in results]
    heights = [float(height) for height in range(len(results))]
    our_figures = [_our_figure(reproduction.shows, result) for result in results]
    axes.barh(
        heights,
        [value or 0.0 for value in our_figures],
        xerr=[_our_spread(reproduction.shows, result) or 0.0 for result in results],
        height=0.6,
        color="C0",
        label="ours",
    )
    paper_figures = [_paper_figure(reproduction, result) for result in results]
    marks = [(value, height) for height, value in zip(heights, paper_figures, strict=True) if value is not None]
    if marks:
        axes.plot(*zip(*marks, strict=True), marker="D", linestyle="none", color=_PAPER_COLOUR, label="paper")
    for height, result, value in zip(heights, results, our_figures, strict=True):
        if value is None:
            axes.annotate(literal(_state_text(result)), (0, height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(heights, list(map(literal, names)), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(compared_heading(results, reproduction.shows))


def _our_figure(shows: Shows, result: ReproducedRow) -> float | None:
    """Return our value of the figure that ``shows`` names, such as score or noise, shares in per cent; None if it is not known."""
    value = result.figure(shows)
    scale = display_factor(result.row.metric) if result.row is not None and shows == "score" else 1.0
    return None if value is None or not isfinite(value) else scale * value


def _our_spread(shows: Shows, result: ReproducedRow) -> float | None:
    """Return the deviation over the seeds of the figure that ``shows`` names; None for fewer than two seeds, or if it is not measured."""
    if result.row is None:
        return None
    if shows == "distance":
        return statistics.stdev(result.distances) if len(result.distances) >= 2 else None
    if len(result.row.score) < 2:
        return None
    if shows == "score":
        return display_factor(result.row.metric) * result.row.deviation
    return result.row.noise.get("norm_deviation") if shows == "noise" else None


def _paper_figure(reproduction: Reproduction, result: ReproducedRow) -> float | None:
    return reproduction.paper_figure(result.variant, result.point)


def _state_text(result: ReproducedRow) -> str:
    """Return how many of a result's runs are finished, or why they stopped, as text."""
    if result.row is None:
        return "not run"
    if result.row.stopped:
        return f"stopped: {result.row.stopped[0]}" if _all_stopped(result) else f"{len(result.row.stopped)} stopped"
    return "run" if result.seeds == result.wanted else f"{result.seeds} of {result.wanted} seeds run"


def _all_stopped(result: ReproducedRow) -> bool:
    """Whether all runs of a result stopped before they had a score."""
    return result.row is not None and bool(result.row.stopped) and not result.row.score


def _for_json(epsilon: Any) -> float | str | None:
    """Return an epsilon with six digits; an infinite one as a word, because JSON has no infinity."""
    if epsilon is None:
        return None
    if epsilon == "infinity" or not isfinite(epsilon):
        return "infinity"
    return float(f"{epsilon:.6g}")


def _epsilon_or_dash(epsilon: float | str | None) -> str:
    return "-" if epsilon is None else NO_EPSILON if isinstance(epsilon, str) else f"{epsilon:g}"
