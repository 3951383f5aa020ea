"""A page about a sweep: how good each setting is, and what it protects, in one picture and one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import tomli_w

from ldpfl.experiments.sweep_config import Cell, SweepConfig
from ldpfl.experiments.sweep_rows import Row, rows
from ldpfl.experiments.sweep_run import joint_guarantee, stored_results, stored_runs
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, WHAT_IS_PROTECTED, best_figure, least_protected, worth_of
from ldpfl.report.console import score_of
from ldpfl.report.plots import panels_of, plot_sweep, plot_worth
from ldpfl.report.rendering import inline, inline_figure, rendered
from ldpfl.tasks import ACCURACY
from ldpfl.util.number_format import epsilon_text


def sweep_page(folder: Path, sweep: SweepConfig, overrides: Sequence[str], command: str) -> str:
    """Return the page of the sweep in ``folder``, as far as it has come.

    Args:
        command: goes on with it.

    Raises:
        ConfigError: its settings do not fit together.
        DataError: a file is damaged.
    """
    runs = stored_runs(sweep, overrides, folder)
    results, together = stored_results(runs), joint_guarantee(runs)
    planned = [cell for cell, _ in runs]
    found, count = rows(results), len({cell.folder_name for cell in planned})
    done = len({cell.folder_name for cell, _ in results})
    known = [(row, held[0]) for row in found if row.score and (held := best_figure(row.privacy)) is not None and isfinite(held[0])]
    without = [row.variant for row in found if row.score and row.variant not in {own.variant for own, _ in known}]
    return rendered(
        "sweep.html",
        title=sweep.name,
        description=sweep.description,
        sentence=_sentence(planned),
        state=f"{done} of {count} runs are finished.",
        command=command if done < count else "",
        metric=found[0].metric if found else ACCURACY,
        protected=WHAT_IS_PROTECTED[least_protected(row.privacy.get("protected", "client") for row in found)],
        delta=", ".join(f"{delta:g}" for delta in sorted({cell.config.privacy.delta for cell, _ in results})) or "-",
        protection=inline(lambda axes: plot_worth(axes, known, joined=len(sweep.axes) == 1), (9.0, 4.2)) if known else "",
        without=", ".join(dict.fromkeys(without)),
        axes=sweep.headings,
        rows=[_shown(row, sweep) for row in found],
        stopped=list(_stopped(found)),
        together=[] if together is None else together.sentences,
        pictures=list(_pictures(sweep, found)),
        config=tomli_w.dumps(sweep.model_dump(exclude={"seeds"} if any(cell.config.hides_seed for cell, _ in results) else None)),
    )


def _sentence(planned: Sequence[Cell]) -> str:
    """Return what is trained on what, and how often."""
    configs = [cell.config for cell in planned]
    models = _one_of([config.model.name for config in configs], "models")
    data = _one_of(["its own data" if config.data.brought else config.data.name for config in configs], "data sets")
    clients = _one_of([f"{config.clients.count:,} clients" for config in configs], "numbers of clients")
    settings, seeds = len({(cell.variant, cell.point) for cell in planned}), len({cell.seed for cell in planned})
    return f"{models} on {data} with {clients}: {settings} setting{'s' * (settings > 1)}, {seeds} seed{'s' * (seeds > 1)} each."


def _one_of(values: Sequence[str], what: str) -> str:
    """Return the one value that all have, or how many there are."""
    different = set(values)
    return values[0] if len(different) == 1 else f"{len(different)} {what}"


def _shown(row: Row, sweep: SweepConfig) -> dict[str, Any]:
    held = best_figure(row.privacy)
    others = f" ({AUTHORS_CLAIM})" if row.privacy.get("status") == AUTHORS_CLAIM else ""
    return {
        "variant": row.variant,
        "point": [str(value) for _, value in row.point] or ["-"] * len(sweep.axes),
        "score": score_of(row),
        "seeds": f"{len(row.score)} of {len(row.score) + len(row.stopped)}" if row.stopped else len(row.score),
        "epsilon": "-" if held is None else epsilon_text(held[0]),
        "worth": "" if held is None else worth_of(held[0]),
        "trusted": "" if held is None or not isfinite(held[0]) else f"{held[1]}{others}",
        "bytes": f"{row.bytes_per_client:,}" if row.bytes_per_client else "-",
    }


def _stopped(found: Sequence[Row]) -> Iterator[str]:
    yield from dict.fromkeys(f"{row.variant} was given up: {reason}" for row in found for reason in row.stopped)


def _pictures(sweep: SweepConfig, found: Sequence[Row]) -> Iterator[str]:
    if any(row.score for row in found):
        panels = panels_of(sweep)
        yield inline_figure(
            lambda figure: plot_sweep(list(figure.subplots(1, panels, squeeze=False, sharey=True)[0]), sweep, found),
            (9.2, 4.2 if panels > 1 else 3.6),
        )
