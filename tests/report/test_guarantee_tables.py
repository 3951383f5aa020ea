"""The tables of guarantees say what the statement says, and name what it rests on."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from ldpfl.experiments.planning.planner import Setting, Solution, plan
from ldpfl.privacy import BinaryRelease, Ledger, RoundEvent, UnprotectedRelease
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Statement
from ldpfl.report.privacy import guarantee_table, interval, plan_table, print_guarantees
from ldpfl.util.number_format import number


def printed(*things: Table) -> str:
    console = Console(file=io.StringIO(), width=160)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def row(epsilon: float, delta: float, unit: str, trust: str, status: str, **more: Any) -> Guarantee:
    return Guarantee(epsilon, delta, unit, 1, REPLACE_ONE, trust, status, **more)  # type: ignore[arg-type]


def statement() -> Statement:
    shuffler = ("the other 99 clients are honest",)
    return Statement(
        1e-5,
        (
            row(1.0, 0.0, "client", "shuffled", "claimed", scope="run"),
            row(1.0, 0.0, "weight", "local", "proved"),
            row(218_400.0, 0.0, "client", "local", "proved", scope="run"),
            row(102_690.0, 1e-5, "client", "local", "proved", scope="run"),
            row(1406.2, 1e-5, "client", "shuffled", "proved", scope="run", lower=1405.4, adaptive=False, assumptions=shuffler),
            row(1411.9, 1e-5, "client", "shuffled", "proved", scope="run", lower=1405.4, assumptions=shuffler),
            row(1392.9, 1e-5, "client", "shuffled", "estimate", scope="run"),
        ),
        ("no shuffled number: because",),
        ("delta is too large",),
    )


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def test_a_line_without_an_epsilon_is_not_called_proved() -> None:
    nothing = Statement(1e-5, (row(float("inf"), 1e-5, "client", "local", "proved", scope="run"),), (), ())
    assert cells(printed(guarantee_table(nothing.to_dict()))) == [["one client, whole run", "nobody", "none", "-"]]


def test_the_table_has_what_holds_of_the_run_first_and_the_claim_last() -> None:
    assert cells(printed(guarantee_table(statement().to_dict()))) == [
        ["one client, whole run", "nobody", "102,690 (218,400 pure)", "proved"],
        ["one client, whole run", "shuffler", "1,405.4 .. 1,406.2", "fixed inputs"],
        ["one client, whole run", "shuffler", "1,405.4 .. 1,411.9", "proved"],
        ["one client, whole run", "shuffler", "~ 1,392.9", "estimate"],
        ["one weight, one round", "nobody", "1 (pure)", "proved"],
        ["one client, whole run", "shuffler", "1", "paper's claim"],
    ]


def test_the_caption_says_what_a_shuffler_and_fixed_inputs_are() -> None:
    text = printed(guarantee_table(statement().to_dict()))
    assert "epsilon at delta 1e-05" in text
    assert "the other 99 clients are honest" in " ".join(text.split())
    assert "fixed inputs: valid only if no input depends on earlier rounds" in " ".join(text.split())
    local = Statement(1e-5, statement().rows[1:4])
    assert "shuffler" not in printed(guarantee_table(local.to_dict()))


def test_notes_and_warnings_are_printed_below() -> None:
    console = Console(file=io.StringIO(), width=160)
    print_guarantees(console, statement().to_dict())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[-2:] == ["no shuffled number: because", "warning: delta is too large"]


def test_what_is_not_protected_has_no_epsilon() -> None:
    nothing = Ledger((RoundEvent(1, UnprotectedRelease("none", "values leave as they are", author=OURS), 5, 5, 1),))
    text = printed(guarantee_table(account(nothing).to_dict()))
    assert [line.split("│")[3].strip() for line in text.splitlines() if "│ nobody" in line] == ["none"] * 3
    assert "none: no epsilon is known" in " ".join(text.split())
    assert "infinity" not in text
    assert "shuffler" not in text


def test_names_from_a_file_are_no_markup() -> None:
    release = UnprotectedRelease("[red]x[/blue]", "[bold]y[/italic]", author=OURS)
    console = Console(file=io.StringIO(), width=160)
    print_guarantees(console, account(Ledger((RoundEvent(1, release, 5, 5, 1),))).to_dict())
    assert "[bold]y[/italic]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_plan_s_table_names_its_setting_and_its_answers() -> None:
    setting = Setting(2.0, 1000, 300, 4, channel="direct", participation=0.1, colluding=7)
    text = printed(plan_table(replace(plan(setting), solution=Solution(4.0, 264, 258, 0.5)).to_dict()))
    for word in ("duchi, epsilon 2 a report", "1,000, 100 a round (seen by others), 7 of them collude", "300; 4", "38 bytes"):
        assert word in text, word
    for word in ("264 are enough", "fewer than 258", "0.5"):
        assert word in text, word
    assert "are enough" not in printed(plan_table(plan(setting).to_dict()))


def test_a_plan_without_noise_names_no_budget() -> None:
    """There is none; an epsilon in its title would be read as a guarantee."""
    assert "epsilon 1" not in printed(plan_table(plan(Setting(1.0, 10, 3, 1, mechanism="none")).to_dict()))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.40781789, "0.4079"),
        (1.0, "1"),
        (99.982, "99.99"),
        (185.12, "185.2"),
        (1405.44, "1,405.5"),
        (10_647.8, "10,648"),
        (218_400.0, "218,400"),
        (9999.97, "10,000"),
        (4.6e9, "4.6e+09"),
    ],
)
def test_figures_are_short_and_thousands_apart(value: float | str, text: str) -> None:
    assert number(value) == text


def test_an_interval_whose_ends_read_the_same_is_one_number() -> None:
    assert interval(None, 3.0) == "3"
    assert interval(3.0, 3.0) == "3"
    assert interval(2.99999, 3.0) == "2.999 .. 3"
    assert interval(185.0976, 185.0976) == "185.0 .. 185.1"  # outward, both
    assert number(0.1 + 0.2) == "0.3"
    assert interval(2.9, 3.0) == "2.9 .. 3"
    assert interval(2.9, "infinity") == "2.9 or more"


def test_a_certified_figure_is_never_rounded_below_itself_by_much() -> None:
    """Four digits: what is printed is within half a unit of the last."""
    release = BinaryRelease("duchi", 1.0, 1, author=OURS)
    found = account(Ledger((RoundEvent(1, release, 50, 50, 1),))).figures()["shuffled_upper"]
    assert isinstance(found, float)
    assert float(number(found)) == pytest.approx(found, rel=5e-4)


@pytest.mark.parametrize(
    ("target", "begins"),
    [
        (
            1500.0,
            "guarantee met: epsilon 1,411.9 for everything of a client, over all that is ever sent, if a shuffler hides who sent what;",
        ),
        (1411.0, "guarantee missed: eps"),
    ],
)
def test_what_was_asked_for_is_held_against_what_is_proved_before_all_else(target: float, begins: str) -> None:
    """Not against the paper's claim, the estimate, or what holds for fixed inputs alone."""
    console = Console(file=io.StringIO(), width=160)
    print_guarantees(console, statement().to_dict(), target)
    assert console.file.getvalue().startswith(begins)  # type: ignore[attr-defined]


def test_nothing_proved_is_a_guarantee_missed() -> None:
    console = Console(file=io.StringIO(), width=160)
    unproved = replace(statement(), rows=(row(1.0, 0.0, "client", "shuffled", "claimed", scope="run"),))
    print_guarantees(console, unproved.to_dict(), 3.0)
    assert console.file.getvalue().startswith("guarantee missed")  # type: ignore[attr-defined]


def test_what_one_round_costs_is_no_guarantee_met() -> None:
    """A target between the two lines: the whole run costs more than it."""
    console = Console(file=io.StringIO(), width=160)
    lines = row(0.5, 1e-5, "client", "local", "proved"), row(8.0, 1e-5, "client", "local", "proved", scope="run")
    print_guarantees(console, replace(statement(), rows=lines).to_dict(), 2.0)
    assert console.file.getvalue().startswith("guarantee missed: epsilon 8 ")  # type: ignore[attr-defined]
