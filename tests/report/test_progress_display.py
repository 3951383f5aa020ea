"""How a run's progress is shown: a bar where one can be drawn, else lines, and no warning about what is not installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from io import StringIO

import pytest
from rich.console import Console
from rich.segment import Segment

from ldpfl.report.progress import ProgressDisplay
from ldpfl.server import RoundMetrics

LINES = ["private: round 1/2, accuracy 50.00%, 0.5 s", "private: round 2/2, accuracy 50.00%, 0.5 s"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows."""
    found: list[str] = []

    def display(segments: Iterable[Segment], text: str) -> None:
        found.append("".join(segment.text for segment in segments).strip())

    monkeypatch.setattr("rich.jupyter.display", display)
    return found


def installed(monkeypatch: pytest.MonkeyPatch, *, widgets: bool) -> None:
    monkeypatch.setattr("ldpfl.report.progress.find_spec", lambda name: object() if widgets else None)


def run(console: Console, *, lines: bool) -> None:
    with warnings.catch_warnings(), ProgressDisplay(console, lines=lines) as display:
        warnings.simplefilter("error")
        display.started("private", 2, (), "accuracy")
        for number in (1, 2):
            display.clients_done(1, 2)
            display.round_done(RoundMetrics(number, 0.5, 3, 1, {}, {}, {}, 0.5))


@pytest.mark.parametrize("lines", [True, False])
def test_a_notebook_without_widgets_shows_a_line_a_round_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, shown: list[str], *, lines: bool
) -> None:
    installed(monkeypatch, widgets=False)
    run(Console(force_jupyter=True, width=100), lines=lines)
    assert [text for text in shown if text] == LINES


@pytest.mark.parametrize("widgets", [True, False])
def test_who_wants_no_progress_sees_none_in_a_notebook(monkeypatch: pytest.MonkeyPatch, shown: list[str], *, widgets: bool) -> None:
    installed(monkeypatch, widgets=widgets)
    run(Console(force_jupyter=True, quiet=True), lines=False)
    assert shown == []


def test_a_notebook_with_widgets_has_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch, shown: list[str]) -> None:
    installed(monkeypatch, widgets=True)
    drawn: list[object] = []
    monkeypatch.setattr("rich.live.Live.refresh", lambda live: drawn.append(live))
    run(Console(force_jupyter=True, width=100), lines=True)
    assert drawn
    assert not set(shown) & set(LINES)


@pytest.mark.parametrize("lines", [True, False])
def test_a_script_s_output_has_lines_where_they_are_wanted(*, lines: bool) -> None:
    console = Console(file=StringIO(), width=100)
    run(console, lines=lines)
    assert console.file.getvalue().splitlines() == (LINES if lines else [])  # type: ignore[attr-defined]


def test_a_long_sweep_is_foretold_once_by_its_first_rounds() -> None:
    now = [0.0]
    console = Console(file=StringIO(), width=100)
    with ProgressDisplay(console, lines=False, clock=lambda: now[0]) as display:
        for number in range(10):
            now[0] += 100.0 if number == 1 else 8.0  # of which the first is not like the others
            display.runs_progress(number, 90, number // 10, 9)
    assert console.file.getvalue().splitlines() == ["about 12 minutes: 9 runs of some 78 s, by the first rounds"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rounds", "said"), [(30, []), (3 * 3600, ["about 3 hours: 2 runs of some 90 minutes, by the first rounds"])])
def test_what_goes_on_is_foretold_by_what_is_left_and_a_short_sweep_not_at_all(rounds: int, said: list[str]) -> None:
    now = [0.0]
    console = Console(file=StringIO(), width=100)
    with ProgressDisplay(console, lines=False, clock=lambda: now[0]) as display:
        for number in range(20):
            now[0] += 1.0
            display.runs_progress(10 + number, 10 + rounds, 1, 3)
    assert console.file.getvalue().splitlines() == said  # type: ignore[attr-defined]


def test_the_bar_of_all_runs_stays_below_those_of_each() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True)
    with ProgressDisplay(console) as display:
        for number in (1, 2):
            display.next_run(f"{number}/2: bits")
            display.runs_progress(2 * (number - 1), 4, number - 1, 2)
            run_in(display)
        display.runs_progress(4, 4, 2, 2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2/2 runs" in shown.split("2/2: bits")[1]
    assert "1/2 runs" not in shown.split("2/2: bits")[0]


def run_in(display: ProgressDisplay) -> None:
    display.started("private", 2, (), "accuracy")
    for number in (1, 2):
        display.round_done(RoundMetrics(number, 0.5, 3, 1, {}, {}, {}, 0.5))
