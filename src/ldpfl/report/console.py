"""Terminal output: progress while a run goes on, and its closing table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_rows import Row, frontier
from ldpfl.number_format import number
from ldpfl.report.scores import cost, factor, heading, shown
from ldpfl.server import RoundMetrics
from ldpfl.tasks import ACCURACY

_SHUFFLED = "shuffled_upper_adaptive"
"""The figure behind a shuffler; a sweep in which no run has it shows no column for it."""


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
    """A bar for each phase of a run: round, score, time left. Where output is no terminal, a line a round, or nothing."""

    def __init__(self, console: Console, *, lines: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """``check`` is called with every step, and may raise to end the run. No warning is printed twice."""
        self._console = console
        self._check = check
        self._said = set[str]()
        self._lines = lines and not console.is_terminal
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
            disable=not (self._console.is_terminal or self._console.is_jupyter),
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


def result_table(result: dict[str, Any]) -> Table:
    """Return the closing table: scores, privacy, communication, time; "-" where a figure is not known."""
    table = Table(
        title=Text(result["name"] if result.get("seed_is_secret") else f"{result['name']}, seed {result['seed']}"),
        show_header=False,
        title_justify="left",
    )
    table.add_column(style="bold")
    table.add_column()
    metric, score, baseline = result["metric"], result["score"], result["noise_free_score"]
    table.add_row(Text(f"{metric} ({result['evaluated_on']})"), shown(metric, score))
    if baseline is not None and score is not None:
        # Where much was clamped, the same without noise tells the two apart.
        clamped = result.get("clamped_score")
        without = baseline if clamped is None else clamped
        costs = [cost(metric, without, score), *([] if clamped is None else [cost(metric, baseline, clamped, "clamping")])]
        table.add_row("noise-free baseline", Text(f"{shown(metric, baseline)}  ({', '.join(costs)})"))
        if clamped is not None:
            table.add_row("clamped, without noise", shown(metric, clamped))
    for name, value in result["scores"].items():
        if name != metric:
            table.add_row(Text(name), shown(name, value))
    if result["epsilon_per_unit"] is None:
        table.add_row("privacy", Text("none: values leave as they are", style="red"))
    cohort = result["clients_per_round"]
    of_all = "" if cohort == result["clients"] else f", {cohort} a round"
    table.add_row("clients, rounds", f"{result['clients']}{of_all}; {result['rounds']}")
    bits, size = result["uplink_bits_per_client_round"], result["uplink_bytes_per_client_round"]
    table.add_row("sent by a client in a round", f"{bits:,} bits ({size:,} bytes) for {result['weights']:,} weights")
    if "noise" in result:
        noise = result["noise"]
        table.add_row("noise, L2 norms added up", _number(noise["norm"], ",.4g"))
        table.add_row("weights that got noise", f"{noise['protected_fraction']:.1%}")
        table.add_row("epsilon as papers add it up", f"{_number(noise['paper_epsilon'])}: what holds is below")
    table.add_row("time", Text(f"{result['seconds']:.1f} s on {result['device']}"))
    return table


def sweep_table(sweep: SweepConfig, rows: Sequence[Row]) -> Table:
    """Return the table of a sweep: a line for each variant and point, scores with their spread over the seeds."""
    budgets = {"sum": "local_pure", "local": "local"}
    if any(row.privacy.get(_SHUFFLED) is not None for row in rows):
        budgets["shuffled"] = _SHUFFLED
    table = _by_setting(sweep, heading(rows[0].metric if rows else ACCURACY), "bytes", *budgets, "seconds")
    table.title = Text(f"{sweep.name}, {len(sweep.seeds)} seed{'s' * (len(sweep.seeds) > 1)}")
    best = {id(row) for row in frontier(rows)} if sweep.plot_against == "budget" else set()
    for row in rows:
        table.add_row(
            *_setting(sweep, row, " *" * (id(row) in best)),
            score_of(row),
            f"{row.bytes_per_client:,}" if row.bytes_per_client else "-",
            *(_figure(row, name) for name in budgets.values()),
            f"{row.seconds:.0f}",
        )
    legend = [
        "bytes: of one client in one round; sum: epsilon of its whole run, all releases added up; local: by composition, trusting nobody"
    ]
    if "shuffled" in budgets:
        legend[0] += "; shuffled: behind an ideal shuffler, or a sum that hides its terms"
    if any(row.privacy.get("protected") == "record" for row in rows):
        legend[0] += "; a record: of one record of a client, which is no promise to the client"
    if best:
        legend.append("* worth its price: none with no more bytes and local epsilon is as accurate (up to two standard errors)")
    reasons = dict.fromkeys(f"{row.variant} stopped: {reason}" for row in rows for reason in row.stopped)
    table.caption = "\n".join([*legend, *reasons])
    table.caption_justify = "left"
    return table


def noise_table(sweep: SweepConfig, rows: Sequence[Row]) -> Table:
    """Return what noise schedules did in the rows of a sweep that have one."""
    table = _by_setting(sweep, "noise", "noised weights", "papers' sum")
    for row in rows:
        if row.noise:
            table.add_row(*_setting(sweep, row), *_noise_cells(row))
    table.caption = "noise: L2 norms added up over clients and rounds; papers' sum: epsilon as LaDP-FL adds it up, no guarantee"
    table.caption_justify = "left"
    return table


def _by_setting(sweep: SweepConfig, *figures: str) -> Table:
    """Return a table with columns for variant and axes, and for ``figures``, which no terminal is too narrow for."""
    table = Table(title_justify="left")
    table.add_column("variant", overflow="fold")
    for title in (*(key.rpartition(".")[2] for key in sweep.axes), *figures):
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _setting(sweep: SweepConfig, row: Row, mark: str = "") -> list[Text]:
    values = [f"{value}" for _, value in row.point] or ["-"] * len(sweep.axes)
    return [Text(text) for text in (row.variant + mark, *values)]


def score_of(row: Row) -> str:
    """Return the score of a row of a sweep with its spread over the seeds, as it is shown."""
    if row.mean is None:
        return "stopped"
    times = factor(row.metric)
    spread = f" ± {times * row.deviation:.2f}" if len(row.score) > 1 else ""
    missing = f" ({len(row.score)} of {len(row.score) + len(row.stopped)} seeds)" if row.stopped else ""
    return f"{times * row.mean:.{2 if row.metric == ACCURACY else 4}f}{spread}{missing}"


def _figure(row: Row, name: str) -> str:
    value = row.privacy.get(name)
    of = " a record" if row.privacy.get("protected") == "record" else ""
    return "-" if value is None else f"{number(value)}{of}"


def _noise_cells(row: Row) -> tuple[str, ...]:
    norm, spread = row.noise["norm"], row.noise["norm_deviation"]
    cell = f"{norm:,.0f}" if norm >= 1000 else f"{norm:.4g}"
    if len(row.score) > 1:
        cell += f" ± {spread:,.0f}" if spread >= 100 else f" ± {spread:.2g}"
    return cell, f"{row.noise['protected_fraction']:.1%}", f"{row.noise['paper_epsilon']:.3g}"


def layer_table(result: dict[str, Any]) -> Table:
    """Return the table of layers: noise in the last round, and where values were clamped to a range, that range and clipping."""
    ranged = "noise" not in result
    table = Table(title="layers, last round", title_justify="left")
    table.add_column("layer")
    for title in ("weights", *["radius"] * ranged, "noise std of the mean", *["clipped*"] * ranged):
        table.add_column(title, justify="right")
    for name, layer in result["layers"].items():
        radius, clipped = [_number(layer["radius"])] * ranged, [_share(layer["clipped_fraction"])] * ranged
        table.add_row(Text(name), f"{layer['weights']:,}", *radius, _number(layer["noise_std"]), *clipped)
    if ranged:
        table.caption = "* known to a simulation only; a server never sees it"
        table.caption_justify = "left"
    return table


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.2%}"
