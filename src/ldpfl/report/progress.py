"""Progress while something goes on: bars in a terminal or notebook, else lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ldpfl.report.scores import shown
from ldpfl.server import RoundMetrics


class _SecondsLeft(ProgressColumn):
    """Time left at the mean speed since this process began; a resumed run does not count what was there before."""

    def render(self, task: Task) -> Text:
        worked = task.completed - float(task.fields["already"])
        if worked <= 0 or task.total is None:
            return Text("--:-- left", style="cyan")
        left = (task.total - task.completed) * (time.monotonic() - float(task.fields["began"])) / worked
        minutes, seconds = divmod(round(max(left, 0.0)), 60)
        return Text(f"{minutes}:{seconds:02d} left", style="cyan")


class ProgressDisplay:
    """A bar for each phase of a run: round, score, time left. Where none can be drawn, a line a round, or nothing."""

    def __init__(self, console: Console, *, lines: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called with every step, and may raise to end the run. No warning is printed twice."""
        self._console = console
        self._check = check
        self._said = set[str]()
        can_draw = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        self._draws = can_draw and not console.quiet
        # Who looks at a notebook waits for something to be seen; the output of a script may be read by another.
        self._lines = (lines or console.is_jupyter) and not self._draws
        self._progress = self._bars()
        self._rounds = 0
        self._label, self._metric = "", ""
        self._prepared: TaskID | None = None
        self._phases: dict[str, TaskID] = {}

    def _bars(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[unit]} {task.fields[current]}/{task.total:.0f}"),
            TextColumn("{task.fields[score]}"),
            _SecondsLeft(),
            console=self._console,
            disable=not self._draws,
        )

    def next_run(self, title: str) -> None:
        """Print ``title`` above the bars of the run that begins; those of the runs before stay as they are."""
        self._progress.stop()
        self._console.print(Text(title), soft_wrap=True)
        self._progress, self._prepared, self._phases = self._bars(), None, {}
        self._progress.start()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def preparing(self, what: str, done: int, total: int) -> None:
        """Show how far something is that comes before the first round."""
        self._check()
        if self._prepared is None:
            self._prepared = self._progress.add_task(
                what, total=total, current=0, score="", already=0, began=time.monotonic(), unit="sample"
            )
            if self._lines:
                self._console.print(f"{what}: {total:,} samples, once; they are kept for later")
        self._progress.update(self._prepared, completed=done, current=done)

    def phase(self, name: str, done: int, total: int) -> None:
        """Show how far a part of an attack is."""
        self._check()
        if name not in self._phases:
            began = time.monotonic()
            self._phases[name] = self._progress.add_task(name, total=total, current=0, score="", already=0, began=began, unit="step")
        self._progress.update(self._phases[name], completed=done, current=done)

    def several(self, rounds_done: int, rounds: int, done: int, of: int) -> None:
        """Show how far runs are that go on at once."""
        self._check()
        if self._prepared is None:
            began = time.monotonic()
            self._prepared = self._progress.add_task(
                "runs", total=rounds, current=0, score="", already=rounds_done, began=began, unit="round"
            )
        self._progress.update(self._prepared, completed=rounds_done, current=rounds_done, score=f"{done}/{of} runs")

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self._label, self._rounds, self._metric = label, rounds, metric
        self._task = self._progress.add_task(
            label,
            unit="round",
            total=rounds,
            completed=len(done),
            current=min(len(done) + 1, rounds),
            score=self._score(done[-1]) if done else f"{metric} -",
            already=len(done),
            began=time.monotonic(),
        )
        self._finished = len(done)

    def clients_done(self, done: int, total: int) -> None:
        self._check()
        self._progress.update(self._task, completed=self._finished + 0.999 * done / total)

    def warn(self, message: str) -> None:
        if message not in self._said:  # what cannot be kept for later is often several things, for one reason
            self._said.add(message)
            self._console.print(Text(message, style="yellow"), soft_wrap=True)

    def round_done(self, metrics: RoundMetrics) -> None:
        self._check()
        self._finished = metrics.round
        current = min(metrics.round + 1, self._rounds)
        self._progress.update(self._task, completed=metrics.round, current=current, score=self._score(metrics))
        if self._lines:
            seconds = f"{metrics.seconds:.1f} s"
            self._console.print(f"{self._label}: round {metrics.round}/{self._rounds}, {self._score(metrics)}, {seconds}")

    def _score(self, metrics: RoundMetrics) -> str:
        return f"{self._metric} {shown(self._metric, metrics.score)}"
