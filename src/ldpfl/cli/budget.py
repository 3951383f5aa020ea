"""Commands about a client's own lifetime budget: show it, set it, export what was charged."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ldpfl.api import policies
from ldpfl.api.policies import (
    Books,
    Budget,
    Charged,
    Policy,
    PolicySpend,
    Release,
    charge_lost,
    json_number,
    move_budget,
    read_budget,
    set_limit,
)
from ldpfl.cli.commands import Group
from ldpfl.errors import printable
from ldpfl.report.console import print_json, terminal
from ldpfl.util.number_format import counted, number

_HOLDS = (
    "for each report that this client was about to send: when, run, round, mechanism, its parameter, number and kind of units, cohort "
    "(among how many it counts as hidden, whatever was mixed), how it left, the column that names persons, and a digest that stands for "
    "the node; no data, no report, and nothing computed from either"
)

_REPLACED = {
    "client": "all its data",
    "person": "all records of any one person, which promises little to the client as a whole",
    "record": "any one of its records, which promises little to the client as a whole",
}
"""For each protected unit, the data whose replacement the epsilon hides."""

app = typer.Typer(cls=Group, no_args_is_help=True, help="A client's lifetime budget: its limit, and how much is spent.")

File = Annotated[Path, typer.Option("--file", help="The client's budget file.", show_default=False)]


class Format(StrEnum):
    """How charges are written."""

    JSON = "json"
    CSV = "csv"


@app.command()
def show(
    file: File,
    policy: Annotated[
        Path | None,
        typer.Option(envvar="LDPFL_POLICY", show_envvar=True, help="The client's policy: shows what was spent of each of its bounds, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs that watch over this node.")] = False,
) -> None:
    """Print what was spent, what is left, and why something was refused last."""
    client_policy = None if policy is None else policies.read_policy(policy)
    budget, console = read_budget(file, client_policy), terminal()
    books = budget.books
    spends = () if client_policy is None else policies.spent_of_policy(file, client_policy)
    rounds_left = policies.rounds_left(file, client_policy)
    if as_json:
        print_json(_budget_as_json(books, budget.charges, client_policy, spends, rounds_left))
        return
    console.print(_summary(file, budget, client_policy, spends, rounds_left))
    if budget.charges:
        console.print(_runs_table(budget))
    if books.refusals is not None:
        last = books.refusals
        times = f", {last.times:,} refusals in all" if last.times > 1 else ""
        console.print(Text(f"last refused {printable(last.at)}{times}: {printable(last.reason)}", style="yellow"), soft_wrap=True)


@app.command(name="set")
def set_(
    file: File,
    epsilon: Annotated[float, typer.Option(help="Maximum epsilon of all that this client ever sends, trusting nobody.")],
    delta: Annotated[float | None, typer.Option(help="Failure probability; 0 counts pure sums.", show_default="as it was, or 1e-5")] = None,
) -> None:
    """Set the lifetime budget. Makes the file if there is none. From the first report on, earlier budgets stay on record."""
    books = set_limit(file, epsilon, delta)
    spent = books.spent(books.limit.delta)
    before = f" (before: {_limit_text(books, index=-2)})" if len(books.granted) > 1 else ""
    protected_unit = "" if books.protected == "client" else f" for a {books.protected}"
    terminal().print(Text(f"budget: {_limit_text(books, index=-1)}{before}; spent: {number(spent)}{protected_unit}"), soft_wrap=True)
    is_raised = len(books.granted) > 1 and books.limit.epsilon > books.granted[-2].limit.epsilon
    if books.charges and is_raised and isfinite(books.order):  # an infinite order means pure sums, which count the same for any limit
        note = (
            "reports are still counted by a bound that is tight near the budget at the first report, "
            f"{_limit_text(books, index=0)}. Under a far larger budget it exceeds the epsilon that ldpfl ledger computes (docs/budget.md). "
            "ldpfl budget show prints how many rounds are left"
        )
        terminal().print(Text(note), soft_wrap=True)


@app.command()
def move(file: File, to: Annotated[Path, typer.Option(help="New file. From now on, only this file counts.", show_default=False)]) -> None:
    """Move the budget, with all that was charged, to a new file, as to another machine. The old file allows nothing any more."""
    books = move_budget(file, to)
    new_budget = f"{to} holds the budget: {_limit_text(books, index=-1)}, {counted(books.charges, 'report')} charged"
    message = f"{new_budget}. The budget in {file} is 0 from now on, and the file may be removed"
    terminal().print(Text(message), soft_wrap=True)


@app.command(name="charge-lost")
def charge_lost_(
    file: File,
    rounds: Annotated[int, typer.Option(help="Rounds that ran since the backup, and the one before: rather too many than too few.")],
    nodes: Annotated[int, typer.Option(help="Nodes that share the budget's file: 1 if a single node uses it.")],
    like: Annotated[
        int | None, typer.Option(help="Number of the charge that the lost ones are like (ldpfl budget export).", show_default="the last")
    ] = None,
) -> None:
    """Charge to the backup of a lost file the reports that only the lost file counted, for the budget and all bounds of the policy."""
    books = charge_lost(file, rounds, nodes, like)
    delta = books.limit.delta
    text = f"{counted(books.charges, 'report')} charged; spent: epsilon {number(books.spent(delta))} of {_limit_text(books, index=-1)}"
    terminal().print(Text(text), soft_wrap=True)


@app.command()
def export(
    file: File,
    form: Annotated[Format, typer.Option("--format", help="csv holds the charges; json also the budgets that were set.")] = Format.JSON,
) -> None:
    """Print every charge, a line or object each: no data, no report, nothing computed from either."""
    budget = read_budget(file)
    books, rows = budget.books, [_charge_row(charge) for charge in budget.charges]
    if form is Format.CSV:
        writer = csv.DictWriter(sys.stdout, _charge_fields(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return
    granted = [{"at": grant.at, "epsilon": grant.limit.epsilon, "delta": grant.limit.delta} for grant in books.granted]
    delta = books.limit.delta
    spent = {
        "protected": books.protected,
        "delta": delta,
        "epsilon": json_number(books.spent(delta)),
        "pure_sum": json_number(books.spent(0.0)),
    }
    print(json.dumps({"holds": _HOLDS, "spent": spent, "budgets": granted, "charges": rows}, indent=2))


def _budget_as_json(
    books: Books, charges: Sequence[Charged], policy: Policy | None, spends: Sequence[PolicySpend], rounds_left: int | None
) -> dict[str, Any]:
    """Return what ``ldpfl budget show --json`` prints: what was spent, what is left and the last refusal."""
    limit = books.limit
    last = charges[-1] if charges else None
    refused = books.refusals
    return {
        "protected": books.protected if charges else None,
        "delta": limit.delta,
        "budget": limit.epsilon,
        "spent": json_number(books.spent(limit.delta)),
        "reports": books.charges,
        "last_charge": None if last is None else {"at": printable(last.at), "run": printable(last.run), "round": last.round},
        "rounds_left": rounds_left,
        "refusals": 0 if refused is None else refused.times,
        "last_refusal": None if refused is None else {"at": printable(refused.at), "reason": printable(refused.reason)},
        "policy": None if policy is None else _policy_as_json(policy, spends),
    }


def _policy_as_json(policy: Policy, spends: Sequence[PolicySpend]) -> dict[str, Any]:
    """Return the policy's lifetime bounds, and what was spent of each."""
    bounds = {spend.setting: {"allowed": spend.allowed, "spent": json_number(spend.epsilon)} for spend in spends}
    return {"delta": policy.delta, "rounds": policy.rounds, **bounds}


def _summary(file: Path, budget: Budget, policy: Policy | None, spends: Sequence[PolicySpend], rounds_left: int | None) -> Table:
    """Return the table of the spent and the remaining budget.

    Budget and policy together allow ``rounds_left`` more rounds like the last one; None if no epsilon bounds them.
    """
    books, charges = budget.books, budget.charges
    limit = books.limit
    spent = books.spent(limit.delta)
    table = Table(title=Text(f"budget {file}"), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("budget", f"{_limit_text(books, index=-1)}, set {printable(books.granted[-1].at)}")
    style = "red" if spent > limit.epsilon else ""
    pure = books.spent(0.0)
    at_delta_0 = "no pure bound" if pure == inf else f"{number(pure)} pure"
    table.add_row("spent", Text(f"epsilon {number(spent)} at delta {limit.delta:g} ({at_delta_0})", style=style))
    allowed = "" if policy is None else f" of the policy's rounds = {policy.rounds:,}"
    table.add_row("reports charged", f"{books.charges:,}{allowed}")
    for spend in spends:
        style_if_spent = "red" if spend.epsilon > spend.allowed else ""
        text = f"epsilon {number(spend.epsilon)} of {spend.allowed:g} at delta {spend.delta:g}, for {spend.against}"
        table.add_row(f"policy's {spend.setting}", Text(text, style=style_if_spent))
    if charges:
        allowed_by_budget = policies.rounds_left(file) or 0  # without the policy
        last_release = _release_text(charges[-1].release)
        table.add_row(Text(f"rounds left like the last ({last_release})"), _rounds_left_text(rounds_left, allowed_by_budget))
    if budget.claims:
        text = f"counted as if code that is not ldpfl's did what its authors claim, which is not proved: {', '.join(budget.claims)}"
        table.add_row("author's claim", Text(printable(text), style="yellow"))
    replaced = f"for replacing {_REPLACED[books.protected]}" if charges else "which is nothing so far; the policy says what is protected"
    hint = "" if policy else "; the policy may allow less: --policy FILE shows what was spent of its bounds"
    validity = ""
    if charges:
        validity = ". The epsilon is valid for any rounds that a server chooses, so it exceeds a ledger's until the budget is nearly used"
    table.caption = f"against whoever keeps all that this client ever sent, {replaced}{hint}{validity}{_two_bounds_note(spent, spends)}"
    table.caption_justify = "left"
    return table


def _two_bounds_note(spent: float, spends: Sequence[PolicySpend]) -> str:
    """Return a note on why the epsilon ``spent`` of the budget differs from that of the policy's ``lifetime_epsilon``; empty if equal."""
    spent_by_policy = next((spend.epsilon for spend in spends if spend.setting == "lifetime_epsilon"), spent)
    if number(spent_by_policy) == number(spent):
        return ""
    if spent_by_policy == inf:
        return ". The policy's bounds show inf: the reports protected less than the policy does, or persons of another column"
    return (
        f". Both epsilon {number(spent)} and epsilon {number(spent_by_policy)} are upper bounds for the same reports: each is computed to "
        "be tight near its own limit, the budget or lifetime_epsilon (decision 0022). A report leaves only if it keeps both limits"
    )


def _rounds_left_text(rounds_left: int | None, allowed_by_budget: int) -> Text:
    """Return the number of ``rounds_left`` as text, None meaning without bound. Add the budget's number if the policy allows fewer."""
    if rounds_left is None:
        return Text("not bounded by an epsilon: values leave without protection", style="red")
    by_policy = f" by the policy; the budget alone would allow {allowed_by_budget:,}" if rounds_left < allowed_by_budget else ""
    if rounds_left:
        return Text(f"{rounds_left:,}{by_policy}")
    return Text(f"0{by_policy}" if by_policy else "0: exhausted", style="red")


def _runs_table(budget: Budget) -> Table:
    """Return the table of runs, in the order of their first charge."""
    table = Table(title="by run", title_justify="left")
    for heading in ("run", "mechanism"):
        table.add_column(heading)
    for heading in ("rounds", "reports", f"epsilon at delta {budget.books.limit.delta:g}", "pure sum"):
        table.add_column(heading, justify="right")
    for run_charges in budget.by_run():
        names = Text(printable(", ".join(run_charges.mechanisms)))
        figures = (f"{run_charges.rounds:,}", f"{run_charges.reports:,}", number(run_charges.epsilon), number(run_charges.pure_sum))
        table.add_row(Text(printable(run_charges.run)), names, *figures)
    return table


def _limit_text(books: Books, index: int) -> str:
    """Return the budget at ``index`` in the list of budgets that were set, as text: 0 is the first one, -1 the one in force."""
    limit = books.granted[index].limit
    return f"epsilon {limit.epsilon:g} at delta {limit.delta:g}"


def _release_text(release: Release) -> str:
    """Return the mechanism of ``release`` with its parameter and number of units."""
    name, parameter = _parameter(release)
    units = "" if release.units == 1 else f" x {release.units:,} {release.unit}s"
    return printable(f"{release.mechanism}, {name} {parameter:g}{units}")


def _parameter(release: Release) -> tuple[str, float]:
    """Return name and value of the privacy parameter of ``release``: mu for Gaussian noise (Gaussian DP), else epsilon."""
    return "mu" if release.by_round else "epsilon", release.parameter


def _charge_row(charge: Charged) -> dict[str, Any]:
    """Return a charge's values by the names of :func:`_charge_fields`, which lists them in the same order."""
    name, value = _parameter(charge.release)
    release = charge.release
    release_values = (release.mechanism, name, json_number(value), release.units, release.unit, release.author)
    sending_values = (charge.cohort, charge.transport, charge.linked, charge.person, charge.node)
    values = (charge.number, charge.at, charge.run, charge.round, *release_values, *sending_values)
    # Texts are made printable: a server chose some of them, and the file may be somebody else's.
    printable_values = [printable(value) if isinstance(value, str) else value for value in values]
    return dict(zip(_charge_fields(), printable_values, strict=True))


def _charge_fields() -> tuple[str, ...]:
    """Return the names of an exported charge's values, which are the columns of the CSV."""
    release_fields = ("mechanism", "parameter", "value", "units", "unit", "author")
    return ("number", "at", "run", "round", *release_fields, "cohort", "transport", "linked", "person", "node")
