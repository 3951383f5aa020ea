"""The plot of a sweep over noise schedules: what it says, how many panels it has, and when there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ldpfl.errors import ConfigError
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_rows import Curve, Point, Row
from ldpfl.report.noise_plot import draw_noise

SWEEP = SweepConfig.model_validate(
    {
        "name": "try",
        "recipe": "quickstart",
        "seeds": [0, 1],
        "axes": {"mechanism.epsilon": [0.05, 0.2]},
        "variants": {"no noise": [], "Full DP": [], "LaDP-FL": [], "stopped": []},
    }
)
LOW, HIGH = ((("mechanism.epsilon", 0.05),), (("mechanism.epsilon", 0.2),))


def curve(variant: str, point: Point, *, norm: float = 0.0, local: float | str = "infinity", **changes: Any) -> Curve:
    """Three rounds of two seeds; noise and epsilon that grow by ``norm`` and a hundredth of it, if that is not 0."""
    scores = ((0.1, 0.3, 0.5), (0.2, 0.4, 0.6))
    row = Row(variant, point, (0.5, 0.6), 10, {"local": local}, 1.0, **changes)
    steps = tuple(tuple(norm * (count + seed / 10) for count in (1, 2, 3)) for seed in (0, 1)) if norm else ()
    return Curve(row, scores, steps, tuple(tuple(value / 100 for value in run) for run in steps))


PLAIN = curve("no noise", ())
STOPPED = Curve(Row("stopped", LOW, (), 10, {"local": "infinity"}, 1.0, ("NaN", "NaN")), ())
COURSES = [
    PLAIN,
    curve("Full DP", LOW, norm=100.0, local=3751.46),
    curve("LaDP-FL", LOW, norm=101.0),
    STOPPED,
    curve("Full DP", HIGH, norm=25.0, local=55816.6),
    curve("LaDP-FL", HIGH, norm=1.0),
]


def drawn(path: Path, curves: list[Curve], sweep: SweepConfig = SWEEP) -> str:
    assert draw_noise(path, sweep, curves)
    return path.read_text(encoding="utf-8")


def panels(text: str) -> int:
    assert ElementTree.fromstring(text).tag.endswith("svg")
    return len(re.findall(r'<g id="axes_\d+"', text))


def bands(text: str) -> int:
    return len(re.findall(r'<g id="FillBetweenPolyCollection_\d+"', text))


@pytest.mark.slow
@pytest.mark.thorough
def test_it_has_three_panels_a_point_and_says_what_is_no_guarantee(tmp_path: Path) -> None:
    text = drawn(tmp_path / "noise.svg", COURSES)
    assert panels(text) == 6
    assert bands(text) == 2 * 4  # two panels for each of four lines
    for word in (
        "NOT a guarantee",
        "what holds is in the table",
        "no guarantee)",
        "L2 norms",
        "accuracy (%)",
        "round",
        "epsilon 0.05",
        "epsilon 0.2",
        "Full DP (ledger: 3,751.5)",
        "Full DP (ledger: 55,817)",
        "LaDP-FL (ledger: infinite)",
    ):
        assert word in text, word
    assert text.count("no noise (ledger: infinite)</text>") == 2  # it lies in the panels of both points
    assert "stopped" not in text


@pytest.mark.slow
@pytest.mark.thorough
def test_figures_are_drawn(tmp_path: Path) -> None:
    """Each of the three kinds moves something; the same ones give the same bytes."""
    before = drawn(tmp_path / "noise.svg", COURSES)
    assert drawn(tmp_path / "again.svg", COURSES) == before
    full = COURSES[1]
    moved = ((2.0, 3.0, 9.0), full.norm[1])
    scores = ((0.1, 0.2, 0.9), full.score[1])
    for changed in (replace(full, norm=moved), replace(full, paper_epsilon=moved), replace(full, score=scores)):
        assert drawn(tmp_path / "other.svg", [PLAIN, changed, *COURSES[2:]]) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.svg", "noise.svg", "other.svg"]


@pytest.mark.slow
@pytest.mark.thorough
def test_lines_that_coincide_differ_in_colour_style_width_and_markers(tmp_path: Path) -> None:
    names = [f"method {number}" for number in range(7)]
    sweep = SWEEP.model_copy(update={"variants": {name: [] for name in names}, "axes": {}})
    text = drawn(tmp_path / "noise.svg", [curve(name, (), norm=1.0) for name in names], sweep)
    legend = text[text.index('id="legend_1"') :]
    looks = re.findall(r'<g id="line2d_\d+">\s*<path d="[^"]*"[^>]*style="([^"]*)"', legend)
    assert len(set(looks)) == 7
    for what in (r"stroke: #(\w+)", r"stroke-width: ([\d.]+)"):
        assert len({re.findall(what, look)[0] for look in looks}) == 7
    assert len({tuple(re.findall(r"stroke-dasharray: ([\d., ]+)", look)) for look in looks}) >= 4
    assert len(set(re.findall(r'<use xlink:href="#(\w+)"', legend))) == 7


@pytest.mark.slow
@pytest.mark.thorough
def test_seeds_that_stopped_are_counted(tmp_path: Path) -> None:
    partly = curve("LaDP-FL", LOW, norm=1.0, stopped=("NaN",))
    partly = Curve(partly.row, partly.score[:1], partly.norm[:1], partly.paper_epsilon[:1])
    text = drawn(tmp_path / "noise.svg", [PLAIN, partly, COURSES[4]])
    assert "LaDP-FL (ledger: infinite; 1 of 2 seeds)" in text
    assert bands(text) == 2  # one seed has no spread


@pytest.mark.slow
def test_a_point_at_which_no_noisy_run_was_finished_is_left_out(tmp_path: Path) -> None:
    text = drawn(tmp_path / "noise.svg", [PLAIN, STOPPED, COURSES[4]])
    assert panels(text) == 3
    assert "epsilon 0.05" not in text


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.slow
@pytest.mark.thorough
def test_few_rounds_and_no_axes_are_drawn_too(rounds: int, tmp_path: Path) -> None:
    def begin(whole: Curve) -> Curve:
        kept = [tuple(run[:rounds] for run in runs) for runs in (whole.score, whole.norm, whole.paper_epsilon)]
        return Curve(whole.row, *kept)

    curves = [PLAIN, curve("Full DP", (), norm=100.0), curve("LaDP-FL", (), norm=1.0), curve("stopped", (), norm=1e-9)]
    text = drawn(tmp_path / "noise.svg", list(map(begin, curves)), SWEEP.model_copy(update={"axes": {}}))
    assert panels(text) == 3


@pytest.mark.slow
def test_noise_that_is_zero_throughout_is_a_line_at_the_bottom(tmp_path: Path) -> None:
    quiet = curve("LaDP-FL", LOW, norm=1.0)
    nothing = ((0.0, 0.0, 0.0),) * 2
    assert panels(drawn(tmp_path / "noise.svg", [replace(quiet, norm=nothing, paper_epsilon=nothing), COURSES[1]])) == 3


def test_a_private_mechanism_without_a_schedule_has_an_accuracy_only(tmp_path: Path) -> None:
    text = drawn(tmp_path / "noise.svg", [PLAIN, curve("Full DP", LOW, local=2.5), curve("LaDP-FL", LOW, norm=1.0)])
    assert "Full DP (ledger: 2.5)" in text
    assert bands(text) == 2


@pytest.mark.parametrize("curves", [[], [PLAIN], [PLAIN, STOPPED]])
def test_without_a_noise_schedule_nothing_is_written(curves: list[Curve], tmp_path: Path) -> None:
    assert not draw_noise(tmp_path / "noise.svg", SWEEP, curves)
    assert list(tmp_path.iterdir()) == []


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf"):
        draw_noise(tmp_path / "noise.jpg", SWEEP, COURSES)
