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
