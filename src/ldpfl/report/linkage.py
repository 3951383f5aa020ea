"""Terminal output and plot of the linkage attack: what arrival times give away, channel by channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ldpfl.attacks.linkage import Figure, LinkageResult, LinkageRow, LinkageSetting, LinkChannel
from ldpfl.attacks.linkage_posterior import CONFIDENCE
from ldpfl.report.plots import figure_file, require_plot
from ldpfl.util.number_format import counted, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHANNEL_NAMES: dict[LinkChannel, str] = {"direct": "direct", "unaligned": "delays", "delayed": "+ waits", "relay": "relay"}
_LEGEND: dict[LinkChannel, str] = {
    "direct": "direct: all when done",
    "unaligned": "delays U(0, T)",
    "delayed": "delays U(0, T) and waits (the paper)",
    "relay": "relay: all at once, mixed",
}
_COLOURS: dict[LinkChannel, str] = {"direct": "#000000", "unaligned": "#d55e00", "delayed": "#0072b2", "relay": "#009e73"}
"""Colours of Okabe and Ito, which colour-blind people can distinguish."""

_MARKERS: dict[LinkChannel, str] = {"unaligned": "s", "delayed": "o"}


def linkage_table(result: LinkageResult) -> Table:
    """Return the table of a linkage attack: a line for each channel and longest delay T.

    *Named after k rounds* is the share of clients that the attacker attributes to the right name after watching k rounds.
    """
    setting, watched = result.setting, result.setting.watched
    title = f"{setting.clients} clients, {setting.parameters} parameters: reports linked by when they arrive, {_trials_text(result)}"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))  # without a frame, to fit 80 columns
    table.add_column("channel", no_wrap=True)
    rounds = [f"% named after\n{counted(count, 'round')}" for count in watched]
    for heading in ("T in s", *rounds, "pairs\n(AUC)", f"linked,\nof {setting.parameters}", "epsilon"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            _CHANNEL_NAMES[row.channel],
            "-" if row.delay is None else f"{row.delay:g}",
            *(_with_deviation(row.attributed(index), lambda value: f"{100 * value:.1f}") for index in range(len(watched))),
            _with_deviation(row.auc, lambda value: f"{value:.2f}"),
            _with_deviation(row.linked, lambda value: f"{value:.0f}"),
            number(row.epsilon),
        )
    table.caption = Text("\n".join(_notes(setting)))
    table.caption_justify = "left"
    return table


def _notes(setting: LinkageSetting) -> list[str]:
    """Return the lines below the table: what the columns mean, and on which assumptions."""
    shortfall = f", T_S {setting.shortfall:g} s too low" if setting.shortfall else ""
    return [
        "direct: all reports when done; delays: each after U(0, T); + waits: and T_W, as the paper has it; relay: all at once",
        f"seconds: finishing times uniform over {setting.spread:g}, jitter of a report {setting.jitter:g}, "
        f"error of a client's wait {setting.clock:g}{shortfall},",
        f"  uncertainty about a client's usual time after one watched round {setting.uncertainty:g}",
        f"by chance: {_percent_text(1 / setting.clients)} named rightly, AUC 0.5; ±: standard deviation of one trial",
        f"linked: the largest set of one client's reports, each tied to it with a confidence of {CONFIDENCE:g}; 0 or 1 links nothing",
        f"epsilon: of the mean set, rounded up, at {setting.epsilon:g} a report and delta {setting.delta:g}; "
        "of 0 or 1: one report behind an ideal shuffler",
        "the observer knows the time windows of the round, so other observers learn less; the unlinked reports cost epsilon in addition",
    ]


def _trials_text(result: LinkageResult) -> str:
    trials = result.plan.trials
    return counted(trials, "trial")


def _percent_text(value: float) -> str:
    return f"{value:.2%}" if value < 0.1 else f"{value:.1%}"


def _with_deviation(figure: Figure, form: Callable[[float], str]) -> str:
    """Return the mean of a figure in the given form, and its deviation if there is one."""
    return form(figure.mean) + (f" ± {form(figure.deviation)}" if figure.deviation > 0 else "")


def draw_linkage(path: Path, result: LinkageResult) -> None:
    """Draw the observer's success against the longest delay T: reports named, pairs distinguished, largest linked set, and its epsilon.

    Bands are one standard deviation of a trial. Channels without a delay are horizontal lines.

    Raises:
        ConfigError: the suffix is not svg, png or pdf, or the folder does not exist.
    """
    kind, setting = require_plot(path), result.setting
    last = len(setting.watched) - 1  # index of the largest number of watched rounds; 0 if there is only one number
    with figure_file(path, kind, (10.0, 7.0)) as figure:
        named, pairs, linked, epsilon = figure.subplots(2, 2, sharex=True).flat
        _draw_channels(named, result, lambda row: row.attributed(last), scale=100)
        if last > 0:  # also after the smallest number of watched rounds
            _draw_channels(named, result, lambda row: row.attributed(0), scale=100, dotted=True)
        _draw_channels(pairs, result, lambda row: row.auc)
        _draw_channels(linked, result, lambda row: row.linked)
        _draw_channels(epsilon, result, lambda row: Figure(row.epsilon, deviation=0.0))
        dotted_note = f"\n(dotted: after {setting.watched[0]})" if last > 0 else ""
        named.set_ylabel(f"reports named rightly (%) after\n{setting.watched[-1]} watched rounds{dotted_note}")
        pairs.set_ylabel("two reports, of one client or not:\nAUC (0.5: chance)")
        linked.set_ylabel(f"largest linked set\n(of a client's {setting.parameters} reports)")
        epsilon.set_ylabel(f"epsilon of that set\n(at {setting.epsilon:g} a report, delta {setting.delta:g})")
        for panel in (linked, epsilon):
            panel.set_xlabel("longest delay T / spread of finishing times" if setting.spread else "longest delay T in seconds")
        for panel in (named, pairs, linked, epsilon):
            _scale_delays(panel, _scaled_delays(result.rows, setting))
            panel.grid(alpha=0.3)
        for panel in (named, epsilon):
            _scale_values(panel)
        figure.legend(*named.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
        figure.suptitle(
            f"{setting.clients} clients; finishing times over {setting.spread:g} s, waits wrong by {setting.clock:g} s, "
            f"jitter {setting.jitter:g} s; {_trials_text(result)}",
            fontsize=11,
        )


def _draw_channels(
    panel: Axes, result: LinkageResult, figure_of: Callable[[LinkageRow], Figure], *, scale: float = 1, dotted: bool = False
) -> None:
    """Draw a figure (mean and deviation) of each channel against the longest delay T; a horizontal line for a channel without delays."""
    for channel, colour in _COLOURS.items():
        rows = [row for row in result.rows if row.channel == channel]
        label = "" if dotted else _LEGEND[channel]
        style = ":" if dotted else "-"
        if rows and rows[0].delay is None:
            panel.axhline(scale * figure_of(rows[0]).mean, color=colour, linestyle=":" if dotted else "--", linewidth=1.5, label=label)
        elif rows:
            delays, figures = _scaled_delays(rows, result.setting), [figure_of(row) for row in rows]
            means = [scale * figure.mean for figure in figures]
            panel.plot(delays, means, color=colour, linestyle=style, marker="" if dotted else _MARKERS[channel], markersize=4, label=label)
            if not dotted:  # the band of one standard deviation
                low = [scale * figure.mean - scale * figure.deviation for figure in figures]
                high = [scale * figure.mean + scale * figure.deviation for figure in figures]
                panel.fill_between(delays, low, high, color=colour, alpha=0.15, linewidth=0)


def _scaled_delays(rows: Sequence[LinkageRow], setting: LinkageSetting) -> list[float]:
    """Return the longest delays T of rows that have one, in units of the spread of finishing times, or in seconds if that is 0."""
    return [row.delay / (setting.spread or 1.0) for row in rows if row.delay is not None]


def _scale_delays(panel: Axes, delays: Sequence[float]) -> None:
    """Make the scale of T logarithmic, with room for 0 if it was tried, and mark the values of T that were tried."""
    ticks = sorted(set(delays))
    positive = [tick for tick in ticks if tick > 0]
    if positive:
        smallest, largest = positive[0], positive[-1]
        panel.set_xscale("symlog", linthresh=smallest, linscale=0.5)  # linear below ``smallest``, because 0 has no logarithm
        left_end = -smallest / 10 if 0 in ticks else smallest / 1.2  # a little room on each side
        panel.set_xlim(left_end, largest * 1.2)
    panel.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    panel.minorticks_off()


def _scale_values(panel: Axes) -> None:
    """Make the upright scale logarithmic, with plain numbers at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
