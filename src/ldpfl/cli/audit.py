"""The command that audits a mechanism or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.text import Text

from ldpfl import api
from ldpfl.api import DATA_DIR_VARIABLE, ERROR_RATE
from ldpfl.errors import ConfigError
from ldpfl.report.console import print_json, terminal
from ldpfl.report.privacy import audit_table, canary_table

AUDIT_FAILED = 3
"""Exit code when an audit finds a fault."""

_RUN_TRIALS = 400  # default number of trials, as of ldpfl.audit_run


def audit(
    what: Annotated[str, typer.Argument(metavar="MECHANISM|RUN", help="A mechanism's name, or a run's folder.")],
    epsilon: Annotated[float | None, typer.Option(help="Budget of one report, for a mechanism.", show_default="1")] = None,
    trials: Annotated[
        int | None, typer.Option(min=100, help="Trials for each input: 1000 or more for a mechanism.", show_default="by what is audited")
    ] = None,
    error_rate: Annotated[
        float | None, typer.Option(help="Probability that a sound mechanism fails.", show_default=f"{ERROR_RATE:g}")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeatable bits instead of the operating system's.")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder with data sets, for a run.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for a run.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Test a mechanism, or what a server learns from a run's pool, by experiment. Exit code 3 if a mechanism fails."""
    if not api.is_mechanism(what):
        unused = [flag for flag, value in (("--epsilon", epsilon), ("--error-rate", error_rate)) if value is not None]
        if unused:
            raise ConfigError(
                f"{what} is a run, whose settings come from its config, but {' and '.join(unused)} works only for a mechanism: leave out "
                f"{' and '.join(unused)}"
            )
        _audit_run(Path(what), data_dir, device, trials or _RUN_TRIALS, seed or 0, as_json=as_json)
        return
    if Path(what).is_dir():
        warning = f"{what} is a mechanism and also a folder here; the mechanism is audited: to audit the run in the folder, give ./{what}"
        terminal(stderr=True).print(Text(warning, style="yellow"), soft_wrap=True)
    rate = ERROR_RATE if error_rate is None else error_rate
    result = api.audit(what, epsilon=1.0 if epsilon is None else epsilon, trials=trials, error_rate=rate, seed=seed)
    if as_json:
        print_json(result.to_dict())
    else:
        terminal().print(audit_table(result))
    if not result.passed:
        raise SystemExit(AUDIT_FAILED)


def _audit_run(folder: Path, data_dir: Path | None, device: str, trials: int, seed: int, *, as_json: bool) -> None:
    """Put a canary among the run's clients, and print how well it is recognised from the pool of a round's reports."""
    api.require_run(folder)  # before a progress bar is drawn
    with Progress(console=terminal(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task("canary trials", total=trials)

        def on_trial(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        result = api.audit_run(folder, data_dir=data_dir, device=device, trials=trials, seed=seed, on_trial=on_trial)
    if as_json:
        print_json(result.to_dict())
    else:
        terminal().print(canary_table(result))
