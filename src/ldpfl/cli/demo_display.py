"""Terminal output of a demo: its progress, and at its end the results and what each party saw."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ldpfl.deploy.demo import DemoOutcome
from ldpfl.deploy.demo_settings import LINKED
from ldpfl.flower.round_kinds import PlannedRound, planned_round
from ldpfl.report.privacy import print_guarantees
from ldpfl.report.terminal_tables import at_clients_tables, result_table
from ldpfl.tasks import ACCURACY
from ldpfl.util.number_format import counted, number


class Display:
    """Display of a demo: a line for each event, with the seconds since the start, and on a terminal a spinner."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console, self._rounds = console, rounds
        self._status = console.status("starting")
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._status.stop()

    def step(self, text: str) -> None:
        """Print a step of the demo, and show it beside the spinner."""
        self._print_line(text)
        self._status.update(Text(text))

    def asked(self, round_: PlannedRound, names: tuple[str, ...]) -> None:
        """Print which nodes a round asks, to train or to measure the model."""
        round_name, task = f"{round_}/{self._rounds}", "train"
        if not round_.is_training:  # measuring rounds are not among the `rounds` of training
            round_name, task = str(round_), "measure the model"
        self._print_line(f"{round_name}: asked {', '.join(names)}")
        self._status.update(Text(f"{round_name}: nodes {task} and upload; the relay waits for all"))

    def round_done(self, round_: int, reports: int, accuracy: float) -> None:
        self._print_line(f"round {round_}/{self._rounds}: {counted(reports, 'report')}, accuracy {accuracy:.2%}")

    def _print_line(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self._console.print(Text(f"{time.monotonic() - self._started_at:5.1f} s  {text}"), soft_wrap=True)


def print_outcome(console: Console, outcome: DemoOutcome) -> None:
    """Print accuracy by round, the guarantees of the run, what each party saw, and where the files are."""
    result = outcome.result
    console.print(result_table(result))
    console.print(_rounds_table(outcome))
    for table in at_clients_tables(result):
        console.print(table)
    print_guarantees(console, result["privacy"], result.get("target"))
    console.print(_parties_table(outcome))
    for text in (
        f"run folder: {outcome.site.run} (ldpfl show, ldpfl ledger)",
        f"policies, budgets and logs, a folder for each party: {outcome.site.path}",
        f"the commands that were run: {outcome.site.path / 'commands.txt'}",
    ):
        console.print(Text(text), soft_wrap=True)


def _rounds_table(outcome: DemoOutcome) -> Table:
    """Return the table of rounds: uploads, records or numbers, and accuracy."""
    table = Table(title="rounds", title_justify="left")
    size_key = "dimension" if _is_sum(outcome) else "records_per_upload"
    relayed_headings = ("vectors summed", "numbers") if _is_sum(outcome) else ("uploads mixed", "records")
    for heading in ("round", *relayed_headings, "accuracy"):
        table.add_column(heading, justify="right")
    upload_sizes = [terms[size_key] for terms in outcome.relayed.terms]
    for released, size in zip(outcome.relayed.released, upload_sizes, strict=True):
        planned = planned_round(outcome.config, released["round"])
        name, accuracy = _name_and_accuracy(planned, outcome.result)
        table.add_row(name, f"{released['uploads']}", f"{released['uploads'] * size:,}", accuracy)
    return table


def _name_and_accuracy(planned: PlannedRound, result: dict[str, Any]) -> tuple[str, str]:
    """Return a round's name and accuracy for the table of rounds.

    A training round has the accuracy on the server's test rows, a measuring round the accuracy that clients measured.
    """
    if planned.is_training:
        return f"{planned.trained + 1}", f"{result['score_per_round'][planned.trained]:.2%}"
    figure = next((measured["figures"][ACCURACY] for measured in result["at_clients"] if measured["round"] == planned.trained), None)
    if figure is None:
        return str(planned), "no figures"
    return str(planned), f"{figure['value']:.2%} ({figure['low']:.2%} to {figure['high']:.2%})"


def _is_sum(outcome: DemoOutcome) -> bool:
    """Whether the relay added the reports up, instead of mixing them. Only the terms of a sum have a dimension."""
    return "dimension" in outcome.relayed.terms[0]


def _server_rows(outcome: DemoOutcome) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """Return a row for the relay and one for the aggregator: the party, what it saw, and what it did not see."""
    relayed = outcome.relayed
    if _is_sum(outcome):
        uploads = sum(event["uploads"] for event in relayed.released)
        numbers = " or ".join(f"{length:,}" for length in dict.fromkeys(terms["dimension"] for terms in relayed.terms))
        vectors = f"{uploads} masked vectors of {numbers} numbers, each of which alone looks random ({relayed.received:,} bytes received)"
        return (
            ("relay", f"who uploaded in each round; {vectors}", "the masks, without which it learns nothing of a vector or of the sum"),
            (
                "SuperLink, aggregator",
                f"who was asked, who answered, and when; {len(relayed.released)} sums, and the masks of their vectors",
                "any one node's vector, as long as the relay keeps it secret",
            ),
        )
    records = sum(event["uploads"] * terms["records_per_upload"] for event, terms in zip(relayed.released, relayed.terms, strict=True))
    sealed = f"{records:,} sealed records of {relayed.terms[0]['record_bytes']} bytes, deleted since ({relayed.received:,} bytes received)"
    return (
        ("relay", f"who uploaded in each round; {sealed}", "what is in them"),
        (
            "SuperLink, aggregator",
            f"who was asked, who answered, and when; {records:,} mixed records of {LINKED} weights each",
            "whose a record is, as long as the relay keeps it secret",
        ),
    )


def _parties_table(outcome: DemoOutcome) -> Table:
    """Return the table of what each party saw, with the figures of this run."""
    table = Table(title="what each party saw", title_justify="left", show_lines=True)
    table.add_column("party", style="bold", no_wrap=True)
    table.add_column("saw")
    table.add_column("did not see")
    for row in _server_rows(outcome):
        table.add_row(*row)
    nodes_by_charge: dict[str, list[str]] = {}
    for name, books in outcome.books.items():
        spent, limit = number(books.spent(books.limit.delta)), number(books.limit.epsilon)
        charged = f"charged for {counted(books.charges, 'report')}: epsilon {spent} of {limit} at delta {books.limit.delta:g}"
        nodes_by_charge.setdefault(charged, []).append(name)
    for charged, names in nodes_by_charge.items():
        table.add_row("\n".join(names), f"its own data, and each round's model; {charged}", "other nodes' reports")
    table.add_row("network", "who talks to whom, when, and how many bytes", "all else: TLS")
    return table
