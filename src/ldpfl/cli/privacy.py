"""Commands about privacy: plan a federation, account a ledger, audit a mechanism or a run."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.text import Text

from ldpfl import mechanisms
from ldpfl.auditing import audit_mechanism, default_trials
from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.canary import audit_run
from ldpfl.experiments.forecast import planned_ledger
from ldpfl.experiments.recipes import recipe_or_file
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.planning.planner import MOST_CLIENTS, Setting, Solution, check_central, cohorts, epsilon_among, solve
from ldpfl.planning.planner import plan as plan_setting
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import DELTA, account
from ldpfl.privacy.events import Channel
from ldpfl.report.plots import draw_epsilon_by_clients, require_plot
from ldpfl.report.privacy import audit_table, canary_table, plan_table, print_guarantees
from ldpfl.suggestions import did_you_mean

AUDIT_FAILED = 3
"""Exit code when an audit finds a fault."""


def ledger(
    what: Annotated[str, typer.Argument(metavar="RUN|RECIPE", help="A run's folder, a ledger file, a recipe's name, or a config file.")],
    delta: Annotated[float | None, typer.Option(help="Failure probability.", show_default="the run's")] = None,
    colluding: Annotated[int, typer.Option(min=0, help="Clients that tell the adversary what they sent.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of a recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Account what a run released, or what a recipe would release, and print what holds."""
    events, chosen = _ledger_of(what, set_ or [])
    if not events.events:
        raise ConfigError(f"{what}: the ledger is empty, nothing was released yet")
    statement = account(events, chosen if delta is None else delta, colluding)
    if as_json:
        print(json.dumps({"name": what, "rounds": len(events.events), "colluding": colluding, **statement.to_dict()}, indent=2))
        return
    console = Console()
    console.print(Text(f"{what}: {len(events.events)} rounds"), soft_wrap=True)
    print_guarantees(console, statement.to_dict())


def _ledger_of(what: str, overrides: list[str]) -> tuple[Ledger, float]:
    """Return the events, and the delta that was chosen for them."""
    path = Path(what)
    is_file = path.suffix == ".json" or (path.is_file() and path.suffix != ".toml")
    if path.is_dir() or is_file:
        if overrides:
            raise ConfigError("--set changes a recipe, not a run that was made")
        if is_file:
            return Ledger.load(path), DELTA
        folder = RunFolder(path)
        chosen = folder.config().privacy.delta  # says so if there is no run
        if not folder.ledger_path.exists():
            raise ConfigError(f"{path} has released nothing yet: no round is finished")
        return Ledger.load(folder.ledger_path), chosen
    config = recipe_or_file(what, overrides)
    return planned_ledger(config), config.privacy.delta


def plan(
    epsilon: Annotated[float | None, typer.Option(help="Budget of one weight in one round.")] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    weights: Annotated[int, typer.Option(help="Parameters of the model.")] = 21_840,
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 10,
    delta: Annotated[float, typer.Option(help="Failure probability; it should be below 1 / clients.")] = DELTA,
    mechanism: Annotated[str, typer.Option(help="What clients do to their values.")] = "duchi",
    participation: Annotated[float, typer.Option(help="Part of the clients that takes part in a round.")] = 1.0,
    self_sampling: Annotated[
        bool, typer.Option("--self-sampling", help="Each client decides for itself, in secret, whether it takes part.")
    ] = False,
    radius: Annotated[float, typer.Option(help="Half-width of the range that weights are clamped to.")] = 0.075,
    channel: Annotated[str, typer.Option(help="ideal-shuffler, random-delay or direct.")] = "ideal-shuffler",
    colluding: Annotated[int, typer.Option(min=0, help="Clients that tell the adversary what they sent.")] = 0,
    target_central: Annotated[float | None, typer.Option(help="Solve for the clients, or the epsilon, that reach this.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw epsilon against the number of clients into this file (svg, png, pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print what a federation would guarantee and cost, before anything is run.

    With --target-central and without --clients (or --epsilon), it solves for the one that is missing.
    """
    if target_central is None and (epsilon is None or clients is None):
        raise ConfigError("give --epsilon and --clients, or --target-central and one of them")
    if target_central is not None and epsilon is None and clients is None:
        raise ConfigError("--target-central needs --epsilon (to find the clients) or --clients (to find the epsilon)")
    if not 0 < participation <= 1:
        raise ConfigError(f"--participation must lie in (0, 1], got {participation:g}")
    setting = Setting(
        epsilon=1.0 if epsilon is None else epsilon,
        clients=ceil((colluding + 1) / participation) if clients is None else clients,
        weights=weights,
        rounds=rounds,
        delta=delta,
        mechanism=mechanism,
        participation=participation,
        self_sampling=self_sampling,
        radius=radius,
        channel=_channel(channel),
        colluding=colluding,
    )
    if plot is not None:  # before the work, not after it
        require_plot(plot)
        check_central(setting)
    found = None
    with Console(stderr=True).status("accounting ..."):  # seconds, for large settings half a minute
        if target_central is not None:
            both = epsilon is not None and clients is not None
            found = solve(setting, target_central, clients=clients is None or both, epsilon=epsilon is None or both)
            setting = _solved(setting, found, clients_given=clients is not None, epsilon_given=epsilon is not None)
        planned = plan_setting(setting)
    if plot is not None:
        counts = track(cohorts(setting), "epsilon against clients", console=Console(stderr=True), disable=as_json)
        draw_epsilon_by_clients(plot, setting, [(count, *epsilon_among(setting, count)) for count in counts], target_central)
    if as_json:
        print(json.dumps({**planned.to_dict(), **(found.to_dict() if found else {})}, indent=2))
        return
    console = Console()
    console.print(plan_table(planned.to_dict(), found.to_dict() if found else None))
    print_guarantees(console, planned.to_dict())
    if plot is not None:
        console.print(Text(f"plot: {plot}"), soft_wrap=True)


def _channel(name: str) -> Channel:
    for known in get_args(Channel):
        if name == known:
            return cast(Channel, known)
    raise ConfigError(f"unknown channel {name!r}: {did_you_mean(name, get_args(Channel))}")


def _solved(setting: Setting, found: Solution, *, clients_given: bool, epsilon_given: bool) -> Setting:
    """Return the setting with what was missing put in."""
    if not clients_given:
        if found.clients is None:
            raise ConfigError(
                f"no number of clients up to {MOST_CLIENTS:.0e} reaches a central epsilon of {found.target:g}: lower --epsilon"
            )
        return replace(setting, clients=found.clients)
    if not epsilon_given:
        if found.epsilon is None:
            raise ConfigError(f"no useful --epsilon reaches a central epsilon of {found.target:g} with {setting.clients} clients")
        return replace(setting, epsilon=found.epsilon)
    return setting


def audit(
    what: Annotated[str, typer.Argument(metavar="MECHANISM|RUN", help="A mechanism's name, or a run's folder.")],
    epsilon: Annotated[float, typer.Option(help="Budget of one report, for a mechanism.")] = 1.0,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials for each input.", show_default="by what is audited")] = None,
    error_rate: Annotated[float, typer.Option(help="Probability that a sound mechanism fails.")] = 1e-4,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeatable bits instead of the operating system's.")] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar=DATA_DIR_VARIABLE, help="Folder with data sets, for a run.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda, for a run.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Test a mechanism, or what a server learns from a run's pool, by experiment. Exit code 3 if a mechanism fails."""
    if Path(what).is_dir():
        _audit_run(RunFolder(Path(what)), data_dir, device, trials or 400, seed or 0, as_json=as_json)
        return
    if what not in mechanisms.names(alone=True):
        raise ConfigError(f"{what!r} is neither a run's folder nor a mechanism: {did_you_mean(what, mechanisms.names(alone=True))}")
    mechanism = mechanisms.with_defaults(what, epsilon)
    result = audit_mechanism(mechanism, trials=trials or default_trials(mechanism), seed=seed, error_rate=error_rate)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        Console().print(audit_table(result))
    if not result.passed:
        raise SystemExit(AUDIT_FAILED)


def _audit_run(folder: RunFolder, data_dir: Path | None, device: str, trials: int, seed: int, *, as_json: bool) -> None:
    """Put a canary among the run's clients and print what its pool gives away."""
    folder.config()  # says so if there is no run, before a progress bar is drawn
    with Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task("canary trials", total=trials)
        result = audit_run(
            folder,
            data_dir,
            choose_device(device),
            trials=trials,
            seed=seed,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        Console().print(canary_table(result))
