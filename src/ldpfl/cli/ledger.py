"""The command that accounts what was released."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.text import Text

from ldpfl import api
from ldpfl.report.console import terminal
from ldpfl.report.privacy import print_guarantees
from ldpfl.util.number_format import counted


def ledger(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|RECIPE...",
            help="A run's folder, a ledger file, a recipe's name, or a config file. Several on the same data are added up.",
        ),
    ],
    delta: Annotated[float | None, typer.Option(help="Failure probability.", show_default="the run's")] = None,
    colluding: Annotated[int, typer.Option(min=0, help="Clients that tell the adversary what they sent.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of a recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compute the privacy guarantee of a run or a recipe.

    Code that a config file names is not run: if its model is code that you trust, name it, --set model.name=file.py:Class.
    """
    ledgers_and_deltas = [api.released(run_or_recipe, set_ or ()) for run_or_recipe in what]
    chosen_delta = max(configured_delta for _, configured_delta in ledgers_and_deltas) if delta is None else delta
    joint_statement = api.account(*(ledger for ledger, _ in ledgers_and_deltas), delta=chosen_delta, colluding=colluding)
    statement = api.warned(joint_statement, what)
    name, events = " + ".join(what), [event for ledger, _ in ledgers_and_deltas for event in ledger.events]
    measuring = sum(event.histograms for event in events)
    rounds = {"rounds": len(events) - measuring, "measuring_rounds": measuring}
    if as_json:
        print(json.dumps({"name": name, **rounds, "colluding": colluding, **statement.to_dict()}, indent=2))
        return
    console = terminal()
    training_rounds = counted(rounds["rounds"], "round")
    all_rounds = f"{training_rounds} of training and {measuring:,} of measuring" if measuring else training_rounds
    console.print(Text(f"{name}: {all_rounds}"), soft_wrap=True)
    print_guarantees(console, statement.to_dict())
