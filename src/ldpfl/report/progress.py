"""Progress of runs, sweeps and attacks: bars in a terminal or notebook, otherwise lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from ldpfl.report.scores import format_score
from ldpfl.server import RoundMetrics
from ldpfl.util.number_format import counted, format_duration


class _SecondsLeft(ProgressColumn):
    """Time left at the mean speed since this process began. Rounds from before a resume do not count."""

    def render(self, task: Task) -> Text:
        """Return the estimated remaining time of ``task``. Its field "already" counts the steps that were done before the time "began"."""
        done_here = task.completed - float(task.fields["already"])
        if done_here <= 0 or task.total is None:
            return Text("--:-- left", style="cyan")
        seconds_left = (task.total - task.completed) * (time.monotonic() - float(task.fields["began"])) / done_here
        minutes, seconds = divmod(round(max(seconds_left, 0.0)), 60)
        return Text(f"{minutes}:{seconds:02d} left", style="cyan")


class _SweepProgress:
    """Progress of a sweep, and a forecast of its duration from timed rounds.

    The first round is not timed, because it includes reading the data and PyTorch's warm-up.
    """

    def __init__(self, rounds: int, runs: int, rounds_before: int, started_at: float) -> None:
        """``rounds`` and ``runs`` are the numbers of all rounds and runs; ``rounds_before`` were finished by an earlier process."""
        self.rounds, self.runs, self.rounds_before, self.started_at = rounds, runs, rounds_before, started_at
        self.rounds_done, self.runs_done = rounds_before, 0
        self._first_round_end: tuple[int, float] | None = None  # rounds done and time when the first round of this process ended
        self._forecast_given = False

    def record(self, rounds_done: int, runs_done: int, now: float) -> str:
        """Record the progress at the time ``now``. Return a forecast once, if the sweep takes long; empty otherwise."""
        self.rounds_done, self.runs_done = rounds_done, runs_done
        if self._first_round_end is None:
            if rounds_done > self.rounds_before:
                self._first_round_end = (rounds_done, now)
            return ""
        untimed_rounds, timed_since = self._first_round_end
        timed_rounds, seconds = rounds_done - untimed_rounds, now - timed_since
        if self._forecast_given or timed_rounds < 1 or seconds < _MIN_TIMED_S:
            return ""
        self._forecast_given = True
        seconds_left = (self.rounds - rounds_done) * seconds / timed_rounds
        runs_left = self.runs - runs_done
        if seconds_left < _MIN_FORECAST_S or not runs_left:
            return ""
        run_time = format_duration(seconds_left / runs_left)
        return f"about {format_duration(seconds_left)}: {counted(runs_left, 'run')} of some {run_time}, by the first rounds"


_MIN_FORECAST_S = 60.0
"""A forecast is printed if at least so many seconds are left."""

_MIN_TIMED_S = 5.0
"""A forecast needs rounds of so many seconds together."""


class ProgressDisplay:
    """Display of a run's progress: a bar for each phase, with round, score and time left; without a terminal, lines or nothing.

    Attributes:
        metric: name of the main metric of the run that began last; "" before any began.
    """

    def __init__(
        self,
        console: Console,
        *,
        lines: bool = True,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lines``: whether to print lines where no bars can be drawn. ``check`` is called at every step, and may raise to end the run."""
        self._console, self._clock = console, clock
        self._check = check
        self._warnings_shown = set[str]()
        can_draw = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        self._draws_bars = can_draw and not console.quiet
        # A notebook's user waits for output, whereas a script's output may be read by another program.
        self._prints_lines = (lines or console.is_jupyter) and not self._draws_bars
        self._progress = self._bars()
        self._rounds = 0
        self._label, self.metric = "", ""
        self._preparation_bar: TaskID | None = None
        self._phase_bars: dict[str, TaskID] = {}
        self._sweep: _SweepProgress | None = None
        self._sweep_bar: TaskID | None = None

    def _bars(self) -> Progress:
        """Return new progress bars, which are drawn only if the console can show them."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[unit]} {task.fields[current]}/{task.total:.0f}"),
            TextColumn("{task.fields[score]}"),
            _SecondsLeft(),
            console=self._console,
            disable=not self._draws_bars,
        )

    def next_run(self, title: str) -> None:
        """Print ``title`` and begin new bars for the next run. Earlier runs' bars stay above, and the bar of all runs moves down."""
        if self._sweep_bar is not None:
            self._progress.update(self._sweep_bar, visible=False)
        self._progress.stop()
        self._console.print(Text(title), soft_wrap=True)
        self._progress, self._phase_bars = self._bars(), {}
        self._preparation_bar = self._sweep_bar = None
        if self._sweep is not None and self._sweep.runs_done < self._sweep.runs:
            self._draw_sweep(self._sweep)
        self._progress.start()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def preparing(self, what: str, done: int, total: int) -> None:
        """Show the progress of a preparation before the first round."""
        self._check()
        if self._preparation_bar is None:
            self._preparation_bar = self._progress.add_task(
                what, total=total, current=0, score="", already=0, began=time.monotonic(), unit="sample"
            )
            if self._prints_lines:
                self._console.print(f"{what}: {total:,} samples")
        self._progress.update(self._preparation_bar, completed=done, current=done)

    def phase(self, name: str, done: int, total: int) -> None:
        """Show the progress of a phase of an attack."""
        self._check()
        if name not in self._phase_bars:
            began = time.monotonic()
            self._phase_bars[name] = self._progress.add_task(name, total=total, current=0, score="", already=0, began=began, unit="step")
        self._progress.update(self._phase_bars[name], completed=done, current=done)
        if self._prints_lines and done == total:
            self._console.print(f"{name}: done")

    def runs_progress(self, rounds_done: int, rounds: int, runs_done: int, runs: int) -> None:
        """Show the progress of all runs of a sweep. Print a forecast once, if the sweep takes long."""
        self._check()
        if self._sweep is None:
            self._sweep = _SweepProgress(rounds, runs, rounds_done, self._clock())
        forecast = self._sweep.record(rounds_done, runs_done, self._clock())
        if forecast:
            self._console.print(Text(forecast), soft_wrap=True)
        self._draw_sweep(self._sweep)

    def _draw_sweep(self, sweep: _SweepProgress) -> None:
        """Update the bar of all runs of a sweep; create it first if there is none."""
        if self._sweep_bar is None:
            self._sweep_bar = self._progress.add_task(
                "runs", total=sweep.rounds, current=0, score="", already=sweep.rounds_before, began=sweep.started_at, unit="round"
            )
        rounds_done = sweep.rounds_done
        self._progress.update(self._sweep_bar, completed=rounds_done, current=rounds_done, score=f"{sweep.runs_done}/{sweep.runs} runs")

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        """Begin a run's bar: ``rounds`` rounds in all, of which those in ``done`` are finished."""
        self._label, self._rounds, self.metric = label, rounds, metric
        self._run_bar = self._progress.add_task(
            label,
            unit="round",
            total=rounds,
            completed=len(done),
            current=min(len(done) + 1, rounds),
            score=self._score(done[-1]) if done else f"{metric} -",
            already=len(done),
            began=time.monotonic(),
        )
        self._rounds_finished = len(done)

    def clients_done(self, done: int, total: int) -> None:
        """Show how many clients of the current round are done."""
        self._check()
        # A round counts as whole only when it has its score.
        self._progress.update(self._run_bar, completed=self._rounds_finished + 0.999 * done / total)

    def warn(self, message: str) -> None:
        """Print a warning, unless it was printed before."""
        if message not in self._warnings_shown:  # several files may fail to be cached for the same reason
            self._warnings_shown.add(message)
            self._console.print(Text(message, style="yellow"), soft_wrap=True)

    def round_done(self, metrics: RoundMetrics) -> None:
        """Show that a round is finished, with its score."""
        self._check()
        self._rounds_finished = metrics.round
        current = min(metrics.round + 1, self._rounds)
        self._progress.update(self._run_bar, completed=metrics.round, current=current, score=self._score(metrics))
        if self._prints_lines:
            seconds = f"{metrics.seconds:.1f} s"
            self._console.print(f"{self._label}: round {metrics.round}/{self._rounds}, {self._score(metrics)}, {seconds}")

    def _score(self, metrics: RoundMetrics) -> str:
        return f"{self.metric} {format_score(self.metric, metrics.score)}"
