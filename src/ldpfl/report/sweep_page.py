"""A page about a sweep: how good each setting is, and what it protects, in one picture and one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import tomli_w

from ldpfl.experiments.sweep_config import Cell, SweepConfig
from ldpfl.experiments.sweep_rows import Row, metric_of, notes_on_runs, rows
from ldpfl.experiments.sweep_run import joint_guarantee, stored_results, stored_runs
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, WHAT_IS_PROTECTED, best_figure, least_protected, worth_of
from ldpfl.report.plots import panels_of, plot_sweep, plot_worth
from ldpfl.report.rendering import inline, inline_figure, rendered
from ldpfl.report.terminal_tables import score_with_spread
from ldpfl.util.number_format import epsilon_text


def sweep_page(folder: Path, sweep: SweepConfig, overrides: Sequence[str], command: str) -> str:
    """Return the page of the sweep in ``folder``, as far as it has come.

    Args:
        command: shell command that resumes the sweep.

    Raises:
        ConfigError: the sweep's settings do not fit together.
        DataError: a file is damaged.
    """
    runs = stored_runs(sweep, overrides, folder)
    results, joint = stored_results(runs), joint_guarantee(runs)
    planned_cells = [cell for cell, _ in runs]
    sweep_rows, count = rows(results), len({cell.folder_name for cell in planned_cells})
    finished = len({cell.folder_name for cell, _ in results})
    scored_rows = [row for row in sweep_rows if row.score]
    with_epsilon = [(row, epsilon) for row in scored_rows if (epsilon := _best_epsilon(row)) is not None and isfinite(epsilon)]
    known_variants = {row.variant for row, _ in with_epsilon}
    without_epsilon = [row.variant for row in scored_rows if row.variant not in known_variants]
    return rendered(
        "sweep.html",
        title=sweep.name,
        description=sweep.description,
        sentence=_summary_sentence(planned_cells),
        state=f"{finished} of {count} runs are finished.",
        command=command if finished < count else "",
        metric=metric_of(sweep_rows),
        protected=WHAT_IS_PROTECTED[least_protected(row.privacy.get("protected", "client") for row in sweep_rows)],
        delta=", ".join(f"{delta:g}" for delta in sorted({cell.config.privacy.delta for cell, _ in results})) or "-",
        protection=inline(lambda axes: plot_worth(axes, with_epsilon, sweep), (9.0, 4.2)) if with_epsilon else "",
        without=", ".join(dict.fromkeys(without_epsilon)),
        axes=sweep.headings,
        rows=[_row_values(row, sweep) for row in sweep_rows],
        stopped=list(_stopped_reasons(sweep_rows)),
        together=[] if joint is None else joint.sentences,
        notes=notes_on_runs(sweep_rows),
        pictures=list(_pictures(sweep, sweep_rows)),
        config=tomli_w.dumps(sweep.model_dump(exclude={"seeds"} if any(cell.config.hides_seed for cell, _ in results) else None)),
    )


def _summary_sentence(planned_cells: Sequence[Cell]) -> str:
    """Return the sentence on a sweep's models, data, clients, settings and seeds."""
    configs = [cell.config for cell in planned_cells]
    models = _common_value([config.model.name for config in configs], "models")
    data = _common_value(["its own data" if config.data.brought else config.data.name for config in configs], "data sets")
    clients = _common_value([f"{config.clients.count:,} clients" for config in configs], "numbers of clients")
    settings = len({(cell.variant, cell.point) for cell in planned_cells})
    seeds = len({cell.seed for cell in planned_cells})
    setting_noun, seed_noun = "setting" if settings == 1 else "settings", "seed" if seeds == 1 else "seeds"
    return f"{models} on {data} with {clients}: {settings} {setting_noun}, {seeds} {seed_noun} each."


def _common_value(values: Sequence[str], plural: str) -> str:
    """Return the value that all ``values`` have in common, or how many different ones there are."""
    different = set(values)
    return values[0] if len(different) == 1 else f"{len(different)} {plural}"


def _best_epsilon(row: Row) -> float | None:
    """Return the smallest epsilon of a row's whole runs, whoever has to be trusted for it; None if there is none."""
    epsilon, _trusted = best_figure(row.privacy) or (None, "")
    return epsilon


def _row_values(row: Row, sweep: SweepConfig) -> dict[str, Any]:
    """Return the template's values for a row of the sweep's table: the runs of one variant at one point of the axes."""
    epsilon, trusted = best_figure(row.privacy) or (None, "")
    claim = f" ({AUTHORS_CLAIM})" if row.privacy.get("status") == AUTHORS_CLAIM else ""
    return {
        "variant": row.variant,
        "point": [str(value) for _, value in row.point] or ["-"] * len(sweep.axes),
        "score": score_with_spread(row),
        "seeds": f"{len(row.score)} of {len(row.score) + len(row.stopped)}" if row.stopped else len(row.score),
        "epsilon": "-" if epsilon is None else epsilon_text(epsilon),
        "worth": "" if epsilon is None else worth_of(epsilon),
        "trusted": "" if epsilon is None or not isfinite(epsilon) else f"{trusted}{claim}",
        "bytes": f"{row.bytes_per_client:,}" if row.bytes_per_client else "-",
    }


def _stopped_reasons(sweep_rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each variant that was given up and each different reason."""
    yield from dict.fromkeys(f"{row.variant} was given up: {reason}" for row in sweep_rows for reason in row.stopped)


def _pictures(sweep: SweepConfig, sweep_rows: Sequence[Row]) -> Iterator[str]:
    """Yield the sweep's plot; nothing if no run has a score."""
    if any(row.score for row in sweep_rows):
        panels = panels_of(sweep)
        yield inline_figure(
            lambda figure: plot_sweep(list(figure.subplots(1, panels, squeeze=False, sharey=True)[0]), sweep, sweep_rows),
            (9.2, 4.2 if panels > 1 else 3.6),
        )
