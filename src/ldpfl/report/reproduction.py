"""A reproduced table or figure: a tidy table, a picture and a table for the terminal, the paper's figures beside ours."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ldpfl.experiments.reproduction import Reached, Reproduction, Shows
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.report.fitted_table import Column, FittedTable
from ldpfl.report.plots import figure_file, literal, mark_numbers, named_axis
from ldpfl.report.scores import factor, heading
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
_SHORT: dict[Shows, str] = {"noise": "noise", "paper_epsilon": "added up", "seconds": "seconds", "distance": "distance"}
"""Headings in a terminal, where a column has little room; the title says the rest."""

_PAPER = "0.45"


def shown_as(found: Sequence[Reached], shows: Shows) -> str:
    """Return the heading of the figure that is compared."""
    metric = next((one.row.metric for one in found if one.row), ACCURACY)
    return heading(metric) if shows == "score" else _HEADINGS[shows]


def tidy(reproduction: Reproduction, sweep: SweepConfig, found: Sequence[Reached]) -> list[dict[str, Any]]:
    """Return a line for each row, figures as they are shown (accuracy in per cent), None where nothing is known."""
    lines = []
    for one in found:
        row, reported = one.row, _reported(reproduction, one)
        ours, spread = _ours(reproduction.shows, one), _spread(reproduction.shows, one)
        holds = one.holds
        lines.append(
            {
                "setting": one.variant,
                **{key: dict(one.point).get(key) for key in sweep.axes},
                "ours": None if ours is None else round(ours, 4),
                "spread": None if spread is None else round(spread, 4),
                "paper": reported,
                "seeds": one.seeds,
                "seeds_wanted": one.wanted,
                "epsilon_claimed": _printed(row.privacy.get("paper_claim")) if row else None,
                "epsilon_that_holds": None if holds is None else _printed(holds[0]),
                "trusting": None if holds is None else holds[1],
                "protects": row.privacy.get("protected") if row else None,
                "bytes_a_client_and_round": row.bytes_per_client if row else None,
                "seconds_a_run": round(row.seconds, 1) if row else None,
                "state": _state(one),
                "changed": reproduction.changed or None,
            }
        )
    return lines


def to_csv(lines: Sequence[dict[str, Any]]) -> str:
    """Return ``lines`` as CSV; an empty cell where nothing is known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(lines[0]) if lines else ["setting"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def reproduction_table(reproduction: Reproduction, sweep: SweepConfig, found: Sequence[Reached]) -> FittedTable:
    """Return the table for a terminal."""
    lines = tidy(reproduction, sweep, found)
    form = ",.2f" if reproduction.shows == "score" else ",.4g"
    holds = [one.holds for one in found]
    columns = [
        Column("setting", [one.variant for one in found], is_name=True),
        *(
            Column(title, ["-" if line[key] is None else str(line[key]) for line in lines], is_name=True)
            for title, key in zip(sweep.headings, sweep.axes, strict=True)
        ),
        Column(_SHORT.get(reproduction.shows, shown_as(found, reproduction.shows)), [_shown_ours(line, form) for line in lines]),
        Column("paper", ["-" if line["paper"] is None else f"{line['paper']:{form}}" for line in lines]),
        Column("claimed", [_text(line["epsilon_claimed"]) for line in lines], dropped=2),
        Column("holds", ["-" if held is None else epsilon_text(held[0]) for held in holds]),
        Column("seeds", [f"{one.seeds}/{one.wanted}" for one in found], dropped=1),
    ]
    if reproduction.shows != "seconds":
        columns.append(Column("seconds", ["-" if one.row is None else f"{one.row.seconds:.0f}" for one in found], dropped=1))
    said = (
        "claimed: epsilon as the paper counts it; holds: the smallest that is proved of all that a client, or one record of it, sends; "
        "seconds: mean of a run"
    )
    reasons = dict.fromkeys(f"{one.variant} {_state(one)}" for one in found if _gave_up(one))
    caption = "\n".join(filter(None, [said, *reasons, reproduction.differs, reproduction.changes_said]))
    return FittedTable(f"{reproduction.source}: {reproduction.title}", columns, caption)


def _shown_ours(line: dict[str, Any], form: str) -> str:
    if line["ours"] is None:
        return str(line["state"]).partition(":")[0]
    spread = "" if line["spread"] is None else f" ± {line['spread']:{form}}"
    return f"{line['ours']:{form}}{spread}"


def draw_reproduction(path: Path, reproduction: Reproduction, sweep: SweepConfig, found: Sequence[Reached]) -> None:
    """Draw ours against the first axis, a line a variant, the paper's figures as open marks; bars where there is no axis."""
    axis = next(iter(sweep.axes), None)
    numbers = axis is not None and all(isinstance(value, int | float) for value in sweep.points[axis])
    height = 4.4 if numbers else 1.4 + 0.5 * len(found)
    with figure_file(path, "svg", (7.2, height)) as figure:
        axes = figure.subplots()
        _draw_lines(axes, str(axis), reproduction, sweep, found) if numbers else _draw_bars(axes, reproduction, found)
        title = "\n".join(filter(None, [f"{reproduction.source}: {reproduction.title}", reproduction.changes_said]))
        axes.set_title(literal(title), fontsize=10)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="best", fontsize=8)


def _draw_lines(axes: Axes, axis: str, reproduction: Reproduction, sweep: SweepConfig, found: Sequence[Reached]) -> None:
    values = [float(value) for value in sweep.points[axis]]
    for place, variant in enumerate(sweep.variants):
        own = [one for one in found if one.variant == variant and _ours(reproduction.shows, one) is not None]
        heights, colour = [float(_ours(reproduction.shows, one) or 0.0) for one in own], f"C{place % 10}"
        if own and not own[0].point:
            axes.axhline(heights[0], color=colour, linestyle="--", linewidth=1, label=literal(variant))
        elif own:
            at = [float(dict(one.point)[axis]) for one in own]
            axes.errorbar(
                at,
                heights,
                [_spread(reproduction.shows, one) or 0.0 for one in own],
                color=colour,
                marker="o",
                markersize=4,
                capsize=2,
                label=literal(variant),
            )
        paper = [(one, _reported(reproduction, one)) for one in found if one.variant == variant]
        marks = [(float(dict(one.point).get(axis, values[0])), value) for one, value in paper if value is not None]
        if marks:
            axes.plot(*zip(*marks, strict=True), color=colour, marker="D", fillstyle="none", linestyle="none", label=f"{variant}, paper")
        lost = [float(dict(one.point).get(axis, values[0])) for one in found if one.variant == variant and _gave_up(one)]
        if lost:  # on the lower edge, whatever the scale is
            below = axes.get_xaxis_transform()
            axes.plot(lost, [0.02] * len(lost), "x", color=colour, transform=below, label=literal(f"{variant}, stopped"))
    mark_numbers(axes, values)
    axes.set_xlabel(named_axis(axis))
    axes.set_ylabel(shown_as(found, reproduction.shows))


def _draw_bars(axes: Axes, reproduction: Reproduction, found: Sequence[Reached]) -> None:
    names = [", ".join([one.variant, *(str(value) for _, value in one.point)]) for one in found]
    places = [float(place) for place in range(len(found))]
    ours = [_ours(reproduction.shows, one) for one in found]
    axes.barh(
        places,
        [value or 0.0 for value in ours],
        xerr=[_spread(reproduction.shows, one) or 0.0 for one in found],
        height=0.6,
        color="C0",
        label="ours",
    )
    marks = [(value, place) for place, one in zip(places, found, strict=True) if (value := _reported(reproduction, one)) is not None]
    if marks:
        axes.plot(*zip(*marks, strict=True), marker="D", linestyle="none", color=_PAPER, label="paper")
    for place, one, value in zip(places, found, ours, strict=True):
        if value is None:
            axes.annotate(literal(_state(one)), (0, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, list(map(literal, names)), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(shown_as(found, reproduction.shows))


def _ours(shows: Shows, one: Reached) -> float | None:
    value = one.figure(shows)
    times = factor(one.row.metric) if one.row is not None and shows == "score" else 1.0
    return None if value is None or not isfinite(value) else times * value


def _spread(shows: Shows, one: Reached) -> float | None:
    """Return the standard deviation over the seeds of the figure that is compared; None where it is not known."""
    if one.row is None or len(one.distances if shows == "distance" else one.row.score) < 2:
        return None
    if shows == "distance":
        return statistics.stdev(one.distances)
    return (
        factor(one.row.metric) * one.row.deviation
        if shows == "score"
        else one.row.noise.get("norm_deviation")
        if shows == "noise"
        else None
    )


def _reported(reproduction: Reproduction, one: Reached) -> float | None:
    return reproduction.reported(one.variant, one.point)


def _state(one: Reached) -> str:
    if one.row is None:
        return "not run"
    if one.row.stopped:
        return f"stopped: {one.row.stopped[0]}" if _gave_up(one) else f"{len(one.row.stopped)} stopped"
    return "run" if one.seeds == one.wanted else f"{one.seeds} of {one.wanted} seeds run"


def _gave_up(one: Reached) -> bool:
    """Tell whether all of its runs stopped before they came to a score."""
    return one.row is not None and bool(one.row.stopped) and not one.row.score


def _printed(epsilon: Any) -> float | str | None:
    if epsilon is None or epsilon == "infinity" or not isfinite(epsilon):
        return None if epsilon is None else "infinity"
    return float(f"{epsilon:.6g}")


def _text(epsilon: float | str | None) -> str:
    return "-" if epsilon is None else NO_EPSILON if isinstance(epsilon, str) else f"{epsilon:g}"
