"""``ldpfl attack linkage``: what arrival times tell about who sent which report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import Progress
from rich.text import Text

from ldpfl.api.attacking import FIGURES, PLOT, LinkagePlan, LinkageResult, LinkageSetting, attack_linkage
from ldpfl.cli.interrupts import Interrupts
from ldpfl.errors import ConfigError
from ldpfl.report.console import terminal
from ldpfl.report.linkage import linkage_table

_Number = TypeVar("_Number", int, float)


def linkage(
    clients: Annotated[int, typer.Option(help="Clients of a round.")] = LinkageSetting.clients,
    parameters: Annotated[int, typer.Option(help="Reports that each client sends.")] = LinkageSetting.parameters,
    spread: Annotated[float, typer.Option(help="Seconds over which clients finish when nobody waits.")] = LinkageSetting.spread,
    jitter: Annotated[
        float, typer.Option(help="Standard deviation of the network's part in an arrival, in seconds.")
    ] = LinkageSetting.jitter,
    clock: Annotated[float, typer.Option(help="Standard deviation of the error in a client's wait, seconds.")] = LinkageSetting.clock,
    shortfall: Annotated[
        float, typer.Option(help="Seconds by which the common time T_S, to which clients wait, is set too early: slower clients are late.")
    ] = LinkageSetting.shortfall,
    uncertainty: Annotated[
        float, typer.Option(help="Standard deviation of the observer's estimate of a client's usual time by one watched round, seconds.")
    ] = LinkageSetting.uncertainty,
    watched: Annotated[str, typer.Option(metavar="N,N,...", help="Earlier rounds that the observer has seen.")] = "1,100",
    delays: Annotated[
        str, typer.Option(metavar="T,T,...", help="Longest random delays to try, in seconds; 0: clients only wait for T_S.")
    ] = "0,1,5,20,60,200",
    epsilon: Annotated[float, typer.Option(help="Budget of one report.")] = LinkageSetting.epsilon,
    delta: Annotated[float, typer.Option(help="Failure probability.")] = LinkageSetting.delta,
    trials: Annotated[int, typer.Option(help="Rounds that are simulated for each line.")] = LinkagePlan.trials,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal figures.")] = LinkagePlan.seed,
    out: Annotated[Path | None, typer.Option(help=f"Folder for {FIGURES} and {PLOT}.", show_default="nothing is written")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Link reports to clients by when they arrive: sent directly, after random delays, or through a relay.

    A simulation; it needs no run. With delays a client's reports are unlinkable only while all clients wait exactly alike.
    """
    counts = tuple(_numbers("watched", watched, int))
    setting = LinkageSetting(clients, parameters, spread, jitter, clock, shortfall, uncertainty, counts, epsilon, delta)
    plan = LinkagePlan(tuple(_numbers("delays", delays, float)), trials, seed)
    result = _attack_with_progress(setting, plan, out)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    console = terminal()
    console.print(linkage_table(result))
    if out is not None:
        console.print(Text(f"figures: {out / FIGURES}; plot: {out / PLOT}"), soft_wrap=True)


def _attack_with_progress(setting: LinkageSetting, plan: LinkagePlan, out: Path | None) -> LinkageResult:
    """Run the attack with a progress bar. Ctrl-C ends it with a KeyboardInterrupt, without a result."""
    console = terminal(stderr=True)
    with Interrupts() as interrupts, Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("rounds", total=None)

        def show_progress(done: int, total: int) -> None:
            interrupts.check()
            progress.update(task, completed=done, total=total)

        return attack_linkage(setting, plan, out=out, progress=show_progress)


def _numbers(option: str, text: str, parse: Callable[[str], _Number]) -> list[_Number]:
    """Return the numbers in ``text``, which commas separate; ``option`` is named in the error."""
    try:
        return [parse(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option} is {text!r}, expected numbers with commas between them, such as 1,10,50") from None
