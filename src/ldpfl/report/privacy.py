"""Terminal output of guarantees: proved figures beside a paper's claims, one line for each unit and trust model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ldpfl.errors import printable
from ldpfl.experiments.planning.planner import LARGEST_EPSILON, Plan
from ldpfl.privacy.guarantee import AUTHORS_CLAIM, HOLDS, IF_TRUSTED, PROTECTED, TRUSTED, WHAT_IS_PROTECTED, Statement
from ldpfl.util.displays import look
from ldpfl.util.number_format import NO_EPSILON, counted, epsilon_text, number

if TYPE_CHECKING:
    from ldpfl.attacks.canary import RunAudit
    from ldpfl.auditing import MechanismAudit

CLAIM = "paper's claim"
"""Status of a figure that a paper claims and that is not proved."""

_SCOPES = {"round": "one round", "run": "whole run"}
_SHUFFLER_LEGEND = "shuffler: an ideal one, which shows how often each value was sent for each weight, and nothing else"
_SUM_LEGEND = "sum: one that shows nothing but the total over all clients, as a secure aggregation does"
_FIXED_LEGEND = "fixed inputs: valid only if no input depends on earlier rounds. In training they do, so the line below applies"

_SCHEDULE_LEGEND = "whole run: for rounds and epsilons fixed beforehand; the epsilon of a client's own budget is valid for any choice"


def print_guarantees(console: Console, privacy: dict[str, Any], target: float | None = None) -> None:
    """Print the table of guarantees and its notes; before them, whether the ``target`` epsilon is kept, if one is given."""
    if target is not None:
        is_kept, text = _target_verdict(privacy, target)
        console.print(Text(text, style="bold green" if is_kept else "bold red"), soft_wrap=True)
    if privacy.get("verdict"):
        console.print(Text(privacy["verdict"], style="bold"), soft_wrap=True)
    console.print(guarantee_table(privacy))
    for line in notes_on(privacy):
        console.print(line, soft_wrap=True)


def guarantees(privacy: dict[str, Any]) -> Group:
    """Return the table of guarantees and its notes as one renderable; the notes are wrapped to the table's width."""
    verdict = [Text(privacy["verdict"], style="bold")] if privacy["verdict"] else []
    return Group(*verdict, guarantee_table(privacy), *notes_on(privacy))


look.register(Statement, lambda statement: guarantees(statement.to_dict()))
look.register(Plan, lambda plan: Group(plan_table(plan.to_dict()), plan.statement))


def notes_on(privacy: dict[str, Any]) -> Iterator[Text]:
    """Yield the notes on the table of guarantees."""
    yield from (Text(note) for note in privacy["notes"])
    yield from (Text(f"warning: {warning}", style="yellow") for warning in privacy["warnings"])


def best_over_run(privacy: dict[str, Any]) -> dict[str, Any] | None:
    """Return the line with the smallest epsilon of the whole run, in the form of ``Statement.to_dict``; None if no epsilon is known."""
    over_run = [row for row in privacy["guarantees"] if row["scope"] == "run" and row["unit"] in PROTECTED]
    # A guarantee that is not adaptive does not cover training, in which later inputs depend on earlier reports. An infinite epsilon is
    # the text "infinity" here.
    valid = [row for row in over_run if row["status"] in HOLDS and row["adaptive"] and isinstance(row["epsilon"], float | int)]
    return min(valid, key=lambda row: float(row["epsilon"]), default=None)


def _target_verdict(privacy: dict[str, Any], target: float) -> tuple[bool, str]:
    """Return whether the best guarantee over the whole run keeps the target, and a sentence that says so."""
    best = best_over_run(privacy)
    if best is None:
        return False, f"guarantee missed: no epsilon is known, and {target:g} was asked for"
    is_kept = best["epsilon"] <= target
    protected = "everything of a client" if privacy["protected"] == "client" else WHAT_IS_PROTECTED[privacy["protected"]]
    guarantee = f"epsilon {number(best['epsilon'])} for {protected}, over all that is ever sent, {IF_TRUSTED[best['trust_model']]}"
    guarantee += "" if best["status"] == "proved" else " (the author's claim)"
    return is_kept, f"guarantee {'met' if is_kept else 'missed'}: {guarantee}; {target:g} was asked for"


def guarantee_table(privacy: dict[str, Any]) -> Table:
    """Return the table of a statement in the form of ``Statement.to_dict``."""
    table = Table(title=f"privacy: epsilon at delta {privacy['delta']:g}", title_justify="left")
    table.add_column("protected")
    table.add_column("trusted")
    table.add_column("epsilon", justify="right")
    table.add_column("status")
    for protected, trusted, epsilon, status in guarantee_rows(privacy):
        epsilon_style, status_style = "", "yellow" if AUTHORS_CLAIM in status else ""
        if status == CLAIM:
            epsilon_style, status_style = "strike", "red"
        table.add_row(protected, trusted, Text(epsilon, epsilon_style), Text(status, status_style))
    table.caption = "\n".join(_legend(privacy["guarantees"]))
    table.caption_justify = "left"
    return table


def guarantee_rows(privacy: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the protected unit, trust model, epsilon and status of each line, in order. Lines of status :data:`CLAIM` are struck out.

    A line without an epsilon has the status "-": there is nothing that could be proved.
    """
    # The sort keeps the order of lines with equal keys, so a bound at delta 0 stays before the one that shares its line.
    rows = _table_rows(sorted(privacy["guarantees"], key=_sort_key))
    return [(protected, trusted, epsilon, "-" if epsilon == NO_EPSILON else status) for protected, trusted, epsilon, status in rows]


def _sort_key(row: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Return the sort key of a line: bounds over the whole run come first, a paper's claim last."""
    return row["status"] == "claimed", row["scope"] != "run", row["unit"] not in PROTECTED


def _legend(guarantees: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines below the table of guarantees that explain the terms in it."""
    if any(epsilon == NO_EPSILON for _, _, epsilon, _ in _table_rows(guarantees)):
        yield f"{NO_EPSILON}: no epsilon is known, for example because no noise is added: nothing is guaranteed"
    if any(row["delta"] == 0 and row["status"] in HOLDS for row in guarantees):
        yield "pure: with delta = 0; nobody: against a server that sees who sent what"
    shuffled = [row for row in guarantees if row["trust_model"] in ("shuffled", "summed") and row["status"] in HOLDS]
    if shuffled:  # the last assumption is on what the other clients do
        yield f"{_SUM_LEGEND if shuffled[0]['trust_model'] == 'summed' else _SHUFFLER_LEGEND}; {shuffled[0]['assumptions'][-1]}"
    if any(not row["adaptive"] for row in shuffled):
        yield _FIXED_LEGEND
    if any(row["status"] in HOLDS and row["scope"] == "run" for row in guarantees):
        yield _SCHEDULE_LEGEND
    claims = [row["source"] for row in guarantees if row["status"] == "claimed" and row["source"]]
    for claim in dict.fromkeys(claims):  # each source once
        yield f"struck out, because it does not hold: {printable(claim)}"  # the ledger may be somebody else's


def plan_table(plan: dict[str, Any]) -> Table:
    """Return the table of a plan in the form of ``Plan.to_dict``: setting, noise, bytes, and solutions."""
    return lines_table(plan_title(plan), plan_lines(plan))


def regime_table(plan: dict[str, Any]) -> Table:
    """Return the table of a regime's plan in the form of ``RegimePlan.to_dict``."""
    return lines_table(regime_title(plan), regime_lines(plan))


def lines_table(title: str, lines: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for line in lines:
        table.add_row(*line)
    return table


def plan_title(plan: dict[str, Any]) -> str:
    """Return the title of a plan."""
    budget = "nothing is protected" if plan["epsilon"] is None else f"epsilon {number(plan['epsilon'], ROUND_FLOOR)} a report"
    return f"plan: {plan['mechanism']}, {budget}"


def plan_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each figure of a plan."""
    secrecy = "secret" if plan["self_sampling"] else "seen by others"
    cohort = "" if plan["participation"] == 1 else f", {plan['cohort']:,} a round ({secrecy})"
    colluding = f", {plan['colluding']:,} of them collude" if plan["colluding"] else ""
    yield "clients", f"{plan['clients']:,}{cohort}{colluding}"
    layers = "" if plan["layers"] is None else f" in {plan['layers']:,} layers"
    yield "weights, rounds", f"{plan['weights']:,}{layers}; {plan['rounds']:,}"
    yield "noise in the mean of a weight", f"std {plan['noise_std']:.4g} (radius {plan['radius']:g})"
    yield "sent by a client in a round", f"{plan['bytes_per_client']:,} bytes"
    if "target_central" in plan:
        yield from _solution_lines(plan)


def regime_title(plan: dict[str, Any]) -> str:
    """Return the title of a regime's plan."""
    return f"plan: {plan['regime']}, epsilon {plan['target']:g} for all that is sent"


def regime_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each figure of a plan for a training regime. A regime says who is protected from whom."""
    by_record = plan["regime"].startswith("records")
    records_each = f", {counted(plan['records'], plan['part'])} each" if by_record else ""
    hint = "; --records sets how many" if by_record and plan["records"] == 1 else ""
    yield "clients", f"{plan['clients']:,}{records_each}{hint}"
    yield "weights, rounds", f"{plan['weights']:,}; {plan['rounds']:,}"
    value = number(plan["value"], ROUND_FLOOR if plan["parameter"] == "epsilon" else ROUND_CEILING)  # towards more noise
    # The figures of the regime local assume these options, which are not the mechanism's defaults.
    options = ", norm 1, magnitude_share 0" if plan["regime"] == "local" else ""
    yield "mechanism", f"{plan['mechanism']}, {plan['parameter']} {value}{options}"
    noise_ratio = plan["noise"] / plan["trusted_noise"]
    sent = "gradient" if by_record else "update"
    yield (
        "noise in the mean",
        f"{plan['noise']:.3g} of the length of {'a' if by_record else 'an'} {sent}, {noise_ratio:.3g} times a trusted server's",
    )
    units = f"{plan['part']}s a client" if by_record else "clients"
    yield f"for noise of 0.1 {sent} lengths", f"about {plan['wanted']:,} {units}"
    round_bytes = plan["bytes_per_client"]
    yield "sent by a client", f"{round_bytes:,} bytes a round, {round_bytes * plan['reports']:,} in all"
    if plan["evaluation_epsilon"]:
        yield "measuring at clients", f"epsilon {number(plan['evaluation_epsilon'])} of the total"
    if plan["regime"] == "shuffled":
        yield "over a relay", f"{plan['relay_records']:,} records a round"


def audit_table(audit: MechanismAudit) -> Table:
    """Return the table of a mechanism's audit, with one line for each check."""
    table = Table(title=Text(audit.verdict), title_justify="left")
    table.add_column("check")
    table.add_column("found", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for check in audit.checks:
        mark = {True: Text("ok", style="green"), False: Text("FAILED", style="red"), None: Text("-")}[check.passed]
        table.add_row(Text(check.name), f"{check.figure:.4g}", f"{check.bound:.4g}", mark)
    failed = [check.sentence for check in audit.failures]
    table.caption = Text("\n".join(failed) or f"a sound mechanism fails with probability at most {audit.error_rate:g}")
    table.caption_justify = "left"
    return table


def canary_table(audit: RunAudit) -> Table:
    """Return the table of a run's audit: how well the canary is recognised from a number of weights of one round."""
    table = Table(title=Text(f"{audit.name}: what a round's pool of {audit.clients} clients reveals of a canary"), title_justify="left")
    for heading in ("weights seen", "guessed right", f"{audit.confidence:.0%} interval", "epsilon at least", "at most, if the claim held"):
        table.add_column(heading, justify="right")
    for row in audit.rows:  # ends of intervals are rounded outwards, to a tenth of a per cent
        table.add_row(
            f"{row.weights:,}",
            f"{row.accuracy:.1%}",
            f"{floor(1000 * row.accuracy_low) / 10:.1f}% .. {ceil(1000 * row.accuracy_high) / 10:.1f}%",
            number(row.epsilon_lower, ROUND_FLOOR),
            f"{ceil(1000 * row.best_possible_if_claim_held) / 10:.1f}%",
        )
    best = max(audit.rows, key=lambda row: row.accuracy)
    is_chance = " Its interval includes 50%, so this may be chance." if best.accuracy_low <= 0.5 else ""
    table.caption = (
        f"In the best of {len(audit.rows)} rows an adversary guesses right in {best.accuracy:.0%} of trials, "
        f"where the claim allows {best.best_possible_if_claim_held:.0%}.{is_chance} "
        f"{audit.trials} trials, epsilon at delta {audit.delta:g}; the canary holds one of two known patterns, "
        "the server knows what all others hold. "
        "The last column is the most that anyone could guess right if all that a client sends in a round cost the claimed epsilon."
    )
    table.caption_justify = "left"
    return table


def _solution_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a plan was solved for: the number of clients, or the epsilon of a report, that keep the target."""
    target = f"central epsilon {plan['target_central']:g}"
    if plan["clients_needed"] is not None:
        needed, necessary = plan["clients_needed"], plan["clients_necessary"]
        too_few = "" if necessary is None else f"; with fewer than {necessary:,} some data exceed it"
        yield f"clients for {target}", f"{needed:,} are enough{too_few}"
    if plan["epsilon_allowed"] is not None:
        allowed = plan["epsilon_allowed"]
        yield f"epsilon a report for {target}", number(allowed, ROUND_FLOOR) + (" or more" if allowed >= LARGEST_EPSILON else "")


def _table_rows(guarantees: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield unit, trust model, epsilon and status of each line. A bound at delta 0 is shown in the line of the next bound of its kind."""
    pure_epsilons: dict[tuple[str, str, str], str] = {}
    for row in guarantees:
        line_key = (row["trust_model"], row["scope"], row["unit"])
        protected = f"one {row['unit']}, {_SCOPES[row['scope']]}"
        trusted = TRUSTED[row["trust_model"]]
        if row["status"] == "claimed":
            at_delta = f" at delta {row['delta']:g}" if row["delta"] else ""
            yield protected, trusted, f"{epsilon_text(row['epsilon'])}{at_delta}", CLAIM
        elif row["status"] == "estimate":
            yield protected, trusted, f"~ {epsilon_text(row['epsilon'])}", "estimate"
        elif row["delta"] == 0 and row["unit"] in PROTECTED:  # kept for the next bound's line
            pure_epsilons[line_key] = epsilon_text(row["epsilon"])
        elif not row["adaptive"]:  # holds for inputs that are fixed beforehand
            claim = "" if row["status"] == "proved" else f", {row['status']}"
            yield protected, trusted, interval(row["lower"], row["epsilon"]), f"fixed inputs{claim}"
        else:
            yield protected, trusted, _epsilon_cell(row, pure_epsilons.get(line_key)), row["status"]


def _epsilon_cell(row: dict[str, Any], pure: str | None) -> str:
    """Return a proved epsilon as text, with ``pure``, the epsilon at delta 0 as text, if the two differ."""
    if row["delta"] == 0:
        text = epsilon_text(row["epsilon"])
        return text if text == NO_EPSILON else f"{text} (pure)"
    bounds = interval(row["lower"], row["epsilon"])
    if pure is None or pure == bounds:
        return bounds
    return f"{bounds} (no pure bound)" if pure == NO_EPSILON else f"{bounds} ({pure} pure)"


def interval(lower: float | None, upper: float | str) -> str:
    """Return ``lower .. upper``, or one number if both look the same; ``lower or more`` if no upper bound is known."""
    low_text = "" if lower is None else number(lower, ROUND_FLOOR)
    high_text = epsilon_text(upper)
    if low_text and high_text == NO_EPSILON:
        return f"{low_text} or more"
    return f"{low_text} .. {high_text}" if low_text and low_text != high_text else high_text
