"""Tables of runs and sweeps on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ldpfl.data.holding_out import scored_part
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_rows import Row, frontier, metric_of
from ldpfl.privacy.guarantee import AUTHORS_CLAIM
from ldpfl.report import client_figures
from ldpfl.report.fitted_table import Column, FittedTable
from ldpfl.report.scores import (
    chosen_settings,
    clients_a_round,
    clipped_records,
    display_factor,
    event_sentence,
    figure_columns,
    figure_rows,
    format_score,
    horizon_sentence,
    intervals_sentence,
    metric_heading,
    no_score_sentence,
    no_slope_sentence,
    noise_unit_sentence,
    part_of,
    score_change,
    seed_text,
    site_columns,
    site_heading,
    site_notes,
    site_rows,
    site_spread,
    with_interval,
    zero_f1_sentence,
)
from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import COMMONEST
from ldpfl.util.number_format import NO_EPSILON, counted, epsilon_text

_SHUFFLED = "shuffled_upper_adaptive"
"""Key of the epsilon behind a shuffler. A sweep has a column for it only if a run has this figure."""


def result_table(result: dict[str, Any]) -> Table:
    """Return the table at the end of a run: scores, privacy, communication, time; "-" for a figure that is not known."""
    table = Table(title=Text(f"{result['name']}{seed_text(result)}"), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    metric, score, baseline = result["metric"], result["score"], result["noise_free_score"]
    table.add_row(Text(f"{metric} ({result['evaluated_on']})"), with_interval(metric, score, result.get("intervals", {}).get(metric)))
    if COMMONEST in result["scores"]:
        if metric != ACCURACY:
            table.add_row(ACCURACY, format_score(ACCURACY, result["scores"][ACCURACY]))
        table.add_row("commonest class, always", format_score(COMMONEST, result["scores"][COMMONEST]))
    if baseline is not None and score is not None:
        # A score with clipped ("clamped") values and without noise, if there is one, separates the loss by clipping from that by noise.
        clamped_score = result.get("clamped_score")
        without_noise = baseline if clamped_score is None else clamped_score
        costs = [score_change(metric, without_noise, score)]
        if clamped_score is not None:
            costs.append(score_change(metric, baseline, clamped_score, "clamping"))
        table.add_row("noise-free baseline", Text(f"{format_score(metric, baseline)}  ({', '.join(costs)})"))
        if clamped_score is not None:
            table.add_row("clamped, without noise", format_score(metric, clamped_score))
    if result["epsilon_per_unit"] is None:
        table.add_row("privacy", Text("none: values leave as they are", style="red"))
    table.add_row("clients, rounds", f"{result['clients']}{clients_a_round(result)}; {result['rounds']}")
    bits, size = result["uplink_bits_per_client_round"], result["uplink_bytes_per_client_round"]
    table.add_row("sent by a client in a round", f"{bits:,} bits ({size:,} bytes) for {result['weights']:,} weights")
    if "noise" in result:
        noise = result["noise"]
        table.add_row("noise, L2 norms added up", _number_or_dash(noise["norm"], ",.4g"))
        table.add_row("weights that got noise", f"{noise['protected_fraction']:.1%}")
        table.add_row("epsilon as papers add it up", f"{_number_or_dash(noise['paper_epsilon'])}: the guarantee is below")
    if clipped := clipped_records(result):
        table.add_row("gradients clipped", clipped)
    if settings := chosen_settings(result):
        table.add_row("chosen by auto", settings)
    table.add_row("time", Text(f"{result['seconds']:.1f} s on {result['device']}"))
    return table


def quality_tables(result: dict[str, Any]) -> list[Table]:
    """Return the table of all figures with their references, and the table of clients; each is left out if it would show too little."""
    tables = []
    if len(result["scores"]) > 1:
        pooled = POOLED if result.get("pooled_scores") else ""
        notes = (
            no_score_sentence(result),
            event_sentence(result),
            zero_f1_sentence(result),
            no_slope_sentence(result),
            horizon_sentence(result),
            intervals_sentence(result),
            pooled,
        )
        caption = " ".join(filter(None, notes))
        tables.append(_table_of_cells(f"figures on {part_of(result)} rows", figure_columns(result), figure_rows(result), caption))
    tables += at_clients_tables(result)
    if result.get("sites"):
        rows = site_rows(result)
        more = max(0, len(rows) - _MAX_SITES)
        not_shown = f"and {counted(more, 'client')} more, in result.json and report.html." if more else ""
        caption = " ".join(filter(None, (not_shown, site_spread(result), site_notes(result))))
        tables.append(_table_of_cells(site_heading(result).lower(), site_columns(result), rows[:_MAX_SITES], caption))
    return tables


def at_clients_tables(result: dict[str, Any]) -> list[Table]:
    """Return the tables of figures that clients measured; empty if they measured nothing."""
    rows = list(client_figures.figure_rows(result))
    return [_table_of_cells("measured at clients", client_figures.COLUMNS, rows, client_figures.how_measured(result))] if rows else []


_SPREAD_OVER_SEEDS = {
    "test": "which says nothing about the choice of test rows",
    "holdout": "each of which draws its holdout rows, unless names of persons or files choose them",
}
"""End of the caption on the spread over seeds: whether the spread includes the choice of the scored rows."""

POOLED = "Pooled: a regression on all rows together, which nobody could make outside of a simulation."
_MAX_SITES = 20


def _table_of_cells(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Table:
    """Return a table of texts: the first column is aligned left, the others right."""
    table = Table(title=title, title_justify="left", caption=caption or None, caption_justify="left")
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def sweep_table(sweep: SweepConfig, rows: Sequence[Row]) -> FittedTable:
    """Return the table of a sweep: a line for each variant and point, scores with their spread over the seeds."""
    epsilon_keys = {"local": "local"}  # by column title
    if any(_epsilon_cell(row, "local_pure") not in ("-", NO_EPSILON) for row in rows):
        epsilon_keys = {"pure": "local_pure", **epsilon_keys}
    if any(row.privacy.get(_SHUFFLED) is not None for row in rows):
        epsilon_keys["shuffled"] = _SHUFFLED
    # Rows are recognised by identity, because they hold dicts and so cannot be members of a set.
    frontier_ids = {id(row) for row in frontier(rows)} if sweep.plot_against == "budget" else set()
    columns = [
        *_identifying_columns(sweep, rows, [" *" if id(row) in frontier_ids else "" for row in rows]),
        Column(metric_heading(metric_of(rows)), [score_with_spread(row) for row in rows]),
        Column("bytes", [f"{row.bytes_per_client:,}" if row.bytes_per_client else "-" for row in rows], dropped=2),
        *(
            Column(title, [_epsilon_cell(row, key) for row in rows], dropped=3 if title == "pure" else 0)
            for title, key in epsilon_keys.items()
        ),
        Column("seconds", [f"{row.seconds:.0f}" for row in rows], dropped=1),
    ]
    terms = ["bytes: of one client in one round", "local: epsilon of its whole run, trusting nobody"]
    if "pure" in epsilon_keys:
        terms.append("pure: this epsilon at delta 0")
    if "shuffled" in epsilon_keys:
        terms.append("shuffled: behind an ideal shuffler, or a sum that hides its terms")
    terms += _no_epsilon_terms(rows, with_pure="pure" in epsilon_keys)
    protected = {row.privacy.get("protected") for row in rows}
    if "record" in protected:
        terms.append("a record: the epsilon protects one record of a client, not the client as a whole")
    if "person" in protected:
        terms.append("a person: the epsilon protects all records of one person at a client, not the client as a whole")
    seeds = len(sweep.each_seed)
    if seeds > 1:
        part = scored_part(*(row.evaluated_on for row in rows))
        terms.append(f"±: standard deviation over {seeds} seeds, {_SPREAD_OVER_SEEDS[part]}")
    legend = ["; ".join(terms)]
    if any(map(claim_mark, rows)):
        legend.append(CLAIM_LEGEND)
    if frontier_ids:
        legend.append("* worth its price: no other row with at most its bytes and local epsilon is as accurate (up to two standard errors)")
    reasons = dict.fromkeys(f"{row.variant} stopped: {reason}" for row in rows for reason in row.stopped)
    reasons |= dict.fromkeys(f"failed: {reason}" for row in rows for reason in row.failed)
    return FittedTable(f"{sweep.name}, {seeds} {'seed' if seeds == 1 else 'seeds'}", columns, "\n".join([*legend, *reasons]))


def noise_table(sweep: SweepConfig, rows: Sequence[Row]) -> FittedTable:
    """Return the table of noise schedules, for the rows of a sweep that have one."""
    noisy = [row for row in rows if row.noise]
    cells = zip(*map(_noise_figures, noisy), strict=True)  # by column
    figures = [Column(title, column_cells) for title, column_cells in zip(("noise", "noised weights", "papers' sum"), cells, strict=True)]
    legend = "noise: L2 norms added up over clients and rounds; papers' sum: epsilon as LaDP-FL adds it up, no guarantee"
    return FittedTable("", [*_identifying_columns(sweep, noisy, [""] * len(noisy)), *figures], legend)


def _identifying_columns(sweep: SweepConfig, rows: Sequence[Row], marks: Sequence[str]) -> list[Column]:
    """Return the columns that identify a row: variant with mark, unless it is the same in all rows, and the value of each axis."""
    variants = [row.variant + mark for row, mark in zip(rows, marks, strict=True)]
    points = [[str(value) for _, value in row.point] or ["-"] * len(sweep.axes) for row in rows]
    axes = [Column(title, [point[index] for point in points], is_name=True) for index, title in enumerate(sweep.headings)]
    variants_are_equal = len(sweep.variants) == 1 and len(axes) > 0 and not any(marks)
    return [*([] if variants_are_equal else [Column("variant", variants, is_name=True)]), *axes]


def score_with_spread(row: Row) -> str:
    """Format the score of a row of a sweep, with its spread over the seeds."""
    if row.mean is None:
        return "failed" if row.failed else "stopped"
    factor = display_factor(row.metric)
    digits = 2 if factor > 1 else 4
    spread = f" ± {factor * row.deviation:.{digits}f}" if len(row.score) > 1 else ""
    without_score = len(row.stopped) + len(row.failed)
    missing = f" ({len(row.score)} of {len(row.score) + without_score} seeds)" if without_score else ""
    return f"{factor * row.mean:.{digits}f}{spread}{missing}"


def _epsilon_cell(row: Row, key: str) -> str:
    """Return the epsilon ``key`` of a row, with the protected unit if it is not the client; "-" if the epsilon is not known."""
    value = row.privacy.get(key)
    per_unit = f" a {row.privacy['protected']}" if row.privacy.get("protected") in ("record", "person") else ""
    if value is None:
        return "-"
    text = epsilon_text(value)
    return text if text == NO_EPSILON else f"{text}{per_unit}{claim_mark(row)}"


def claim_mark(row: Row) -> str:
    """Return the mark of epsilons that rest on code that is not ldpfl's, which :data:`CLAIM_LEGEND` explains; empty if all is proved."""
    return " †" if row.privacy.get("status") == AUTHORS_CLAIM else ""


CLAIM_LEGEND = f"† not proved, but {AUTHORS_CLAIM}: it rests on code that is not ldpfl's"


def _no_epsilon_terms(rows: Sequence[Row], *, with_pure: bool) -> Iterator[str]:
    """Yield the terms of the legend that explain rows without an epsilon. ``with_pure``: the table has a column of pure epsilons."""
    is_unprotected = [_epsilon_cell(row, "local") == NO_EPSILON for row in rows]
    is_without_pure = [_epsilon_cell(row, "local_pure") == NO_EPSILON for row in rows]
    if any(is_unprotected):
        yield f"{NO_EPSILON} under local: no epsilon is known, for example because values leave without noise: nothing is guaranteed"
    if with_pure and any(pure and not local for pure, local in zip(is_without_pure, is_unprotected, strict=True)):
        yield f"{NO_EPSILON} under pure: this noise has no epsilon at delta 0"


def _noise_figures(row: Row) -> tuple[str, ...]:
    """Return the cells of a row: norm of the noise with its spread, share of noised weights, and the papers' epsilon."""
    norm, spread = row.noise["norm"], row.noise["norm_deviation"]
    cell = f"{norm:,.0f}" if norm >= 1000 else f"{norm:.4g}"
    if len(row.score) > 1:
        cell += f" ± {spread:,.0f}" if spread >= 100 else f" ± {spread:.2g}"
    return cell, f"{row.noise['protected_fraction']:.1%}", f"{row.noise['paper_epsilon']:.3g}"


def layer_table(result: dict[str, Any]) -> Table:
    """Return the table of layers: the noise in the last round. If values are clipped to ranges, also the radius and the clipped share."""
    has_ranges = any(layer["radius"] is not None for layer in result["layers"].values())
    table = Table(title="layers, last round", title_justify="left")
    table.add_column("layer")
    titles = ["weights", "radius", "noise std of the mean", "clipped*"] if has_ranges else ["weights", "noise std of the mean"]
    for title in titles:
        table.add_column(title, justify="right")
    for name, layer in result["layers"].items():
        radius = [_number_or_dash(layer["radius"])] if has_ranges else []
        clipped = [_percent_or_dash(layer["clipped_fraction"])] if has_ranges else []
        table.add_row(Text(name), f"{layer['weights']:,}", *radius, _number_or_dash(layer["noise_std"]), *clipped)
    table.caption = "* known only in a simulation; a server never sees it" if has_ranges else noise_unit_sentence(result) or None
    table.caption_justify = "left"
    return table


def _number_or_dash(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def _percent_or_dash(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.2%}"
