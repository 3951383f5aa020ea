"""``ldpfl attack linkage``: a table, figures that repeat, a plot, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import CommandLine
from ldpfl.attacks.linkage import LinkagePlan, LinkageSetting, linkage
from ldpfl.errors import ConfigError
from ldpfl.report.linkage import draw_linkage, linkage_table

QUICK = ("attack", "linkage", "--clients", "10", "--parameters", "20", "--trials", "2", "--delays", "0,30")


def test_the_table_has_a_line_for_each_channel_and_says_how_to_read_it(ldpfl: CommandLine) -> None:
    outcome = ldpfl(*QUICK)
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines()]
    assert [
        line[0] for line in lines if len(line) > 6 and line[0] in ("direct", "delays", "+", "relay") and line[-1].replace(".", "").isdigit()
    ] == ["direct", "delays", "+", "+", "relay"]
    assert max(map(len, outcome.out.splitlines())) <= 80
    for word in ("10 clients, 20 parameters", "2 trials", "10.0% named rightly", "confidence of 0.9", "delta 1e-05", "100 rounds"):
        assert word in outcome.out, word
    assert outcome.err == ""
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_figures_and_plot_are_written_and_repeat(ldpfl: CommandLine) -> None:
    first = ldpfl(*QUICK, "--out", "a/b", "--json")
    second = ldpfl(*QUICK, "--out", "c")
    assert first.code == second.code == 0, first.err
    assert "figures: c/linkage.json; plot: c/linkage.svg" in second.out
    assert first.out == Path("a/b/linkage.json").read_text(encoding="utf-8") == Path("c/linkage.json").read_text(encoding="utf-8")
    assert Path("a/b/linkage.svg").read_bytes() == Path("c/linkage.svg").read_bytes()
    figures = json.loads(first.out)
    assert figures["setting"]["clients"] == 10
    assert [(row["channel"], row["delay"]) for row in figures["rows"]] == [
        ("direct", None),
        ("unaligned", 30.0),
        ("delayed", 0.0),
        ("delayed", 30.0),
        ("relay", None),
    ]
    assert ldpfl(*QUICK, "--json", "--seed", "1").out != first.out


def test_every_option_reaches_the_attack(ldpfl: CommandLine) -> None:
    changes = {"spread": 9.0, "jitter": 0.5, "clock": 2.0, "shortfall": 3.0, "uncertainty": 4.0, "epsilon": 0.5, "delta": 1e-6}
    options = [part for name, value in changes.items() for part in (f"--{name}", str(value))]
    setting = json.loads(ldpfl(*QUICK, *options, "--watched", "2,7", "--json").out)["setting"]
    assert setting == {"clients": 10, "parameters": 20, "watched": [2, 7], **changes}


def test_mistakes_get_one_line_and_write_nothing(ldpfl: CommandLine) -> None:
    assert "--delays is '1,two', expected numbers" in ldpfl.refused(*QUICK, "--delays", "1,two", "--out", "out")
    assert "--watched is '1.5', expected" in ldpfl.refused(*QUICK, "--watched", "1.5", "--out", "out")
    assert "delays must be" in ldpfl.refused(*QUICK, "--delays", "-1")
    assert "clients must be" in ldpfl.refused(*QUICK, "--clients", "1", "--out", "out")
    assert "jitter must be" in ldpfl.refused(*QUICK, "--jitter", "nan", "--out", "out")
    assert "trials must be" in ldpfl.refused(*QUICK, "--trials", "0")
    assert not Path("out").exists()
    Path("file").touch()
    assert "cannot be written" in ldpfl.refused(*QUICK, "--out", "file/out")


@pytest.mark.parametrize(
    ("setting", "kinds"),
    [
        (LinkageSetting(5, 6, spread=0.0), ("svg", "png", "pdf")),
        (LinkageSetting(5, 6, shortfall=9.0, watched=(1,)), ("svg", "png", "pdf")),
        (LinkageSetting(5, 6, shortfall=9.0, watched=(1,)), ("png",)),
    ],
)
@pytest.mark.slow
@pytest.mark.thorough_for("setting0-kinds0", "setting1-kinds1")
def test_a_plot_of_one_watched_number_of_no_spread_and_of_one_delay(
    setting: LinkageSetting, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    result = linkage(setting, LinkagePlan((0.0,), 1))
    for kind in kinds:
        draw_linkage(tmp_path / f"plot.{kind}", result)
        assert (tmp_path / f"plot.{kind}").stat().st_size > 1_000
    assert linkage_table(result).row_count == 3
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf"):
        draw_linkage(tmp_path / "plot.gif", result)
