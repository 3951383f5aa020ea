"""What the documents show is true of the package, each as far as it is cheap to find out, and what they name is there.

- Python blocks of ``RUN`` are executed, each page from top to bottom; those of ``docs/tracking.md`` with made-up services; all others are
  compiled.
- Commands in shell blocks and in running text are parsed: that there is such a command, with such options, which take so many values. None
  is run, and no value is looked at.
- Of the README's figures those are computed again that need no training; its accuracies are what ``make run`` and ``ldpfl run`` print.
"""

from __future__ import annotations

import csv
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import click
import pytest
import typer

import ldpfl
from ldpfl.cli import app
from ldpfl.experiments import load_recipe
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.shipped import recipe_names, sweep_names
from ldpfl.privacy.accounting import account
from ldpfl.report.privacy import guarantee_rows

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("README.md", "docs/tutorial.md", "docs/guide.md")


def blocks(page: Path) -> list[str]:
    """Python code of a page."""
    return [textwrap.dedent(code) for code in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.M | re.S)]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
@pytest.mark.thorough_for("README.md", "docs/tutorial.md")
def test_code_on_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    code = blocks(ROOT / page)
    assert code
    for block in code:
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.thorough
def test_code_of_the_readme_passes_a_strict_type_checker(tmp_path: Path) -> None:
    (tmp_path / "readme.py").write_text("\n".join(blocks(ROOT / "README.md")), encoding="utf-8")
    checked = subprocess.run([sys.executable, "-m", "mypy", "--strict", tmp_path / "readme.py"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_callback_of_a_page_is_called(tiny_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"data.name": "mnist", "model.name": "linear", "clients.count": 4, "shuffling.channel": "direct"}
    quick = partial(ldpfl.run, settings=small, data_dir=tiny_data, progress=False, baseline=False)
    monkeypatch.setattr(ldpfl, "run", lambda what, *, rounds, count, callbacks: quick(what, rounds=rounds, callbacks=callbacks))
    for block in blocks(ROOT / "docs" / "tracking.md"):
        exec(compile(block, "tracking.md", "exec"), {})
    assert capsys.readouterr().out == "1 4\n2 4\n3 4\n"


def test_the_reference_has_all_public_names() -> None:
    """Names of modules, and of what a whole module's entry shows, are found by the module."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    shown: set[str] = set()
    for place, members in re.findall(r"^::: (\S+)$(?:\n    options:\n      members: \[(.*?)\])?", page, re.M):
        shown |= {place, place.rpartition(".")[2], *members.split(", ")}
        if place == "ldpfl.errors":
            shown |= set(vars(ldpfl.errors))
    assert set(ldpfl.__all__) - shown == {"__version__"}


def test_all_code_on_pages_is_python() -> None:
    for page in PAGES:
        for block in blocks(page):
            compile(block, str(page), "exec")


WITH_COMMANDS = sorted({*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "examples").rglob("*.md")})
SHELL = r"^ *```(?:bash|console|sh)?\n(.*?)^ *```"


def commands(page: Path) -> list[str]:
    """Commands of a page: lines that begin with ``ldpfl`` in blocks of a shell's language, or of none.

    Before it may stand a prompt or the head of a loop. Abbreviations are left out: with ``...``, brackets or ``|`` for what may be chosen.
    """
    others = r"^ *```(?!bash$|console$|sh$)\w+\n.*?^ *```"
    shell = re.findall(SHELL, re.sub(others, "", page.read_text(encoding="utf-8"), flags=re.M | re.S), re.M | re.S)
    lines = [line for code in shell for line in code.replace("\\\n", " ").splitlines()]
    return whole(match[1] for line in lines if (match := re.match(r" *(?:\$ |for [^;]*; do )?ldpfl (.*)", line)))


def named(page: Path) -> list[str]:
    """Commands in a page's running text, of which the last option may stand without its value; abbreviations are left out there, too."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return whole(re.findall(r"`ldpfl ([^`]+)`", text))


def whole(found: Iterable[str]) -> list[str]:
    return [command for command in found if not re.search(r"\.\.\.|[\[\]|]", command.split(" #")[0])]


def wrong_in(command: str) -> str:
    """Return why ``ldpfl`` would not take the words of ``command``, or nothing; what a shell does with it afterwards is not looked at."""
    reader = shlex.shlex(command, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words = list(itertools.takewhile(lambda word: not set(word) <= set(";&|<>"), reader))
    taker = typer.main.get_command(app)
    try:
        while hasattr(taker, "resolve_command") and words and not words[0].startswith("-"):
            _, taker, words = taker.resolve_command(click.Context(taker), words)
        _, left, _ = taker.make_parser(click.Context(taker)).parse_args(words)
    except click.UsageError as error:
        return error.format_message()
    return f"nothing takes {left}" if left else ""


@pytest.mark.slow
def test_commands_on_pages_are_taken_by_the_command_line() -> None:
    shown = {(page.name, command) for page in WITH_COMMANDS for command in commands(page)}
    assert len(shown) > 40
    assert {place: wrong for place in shown if (wrong := wrong_in(place[1]))} == {}
    told = {(page.name, command) for page in WITH_COMMANDS for command in named(page)}
    assert len(told) > 20
    assert {place: wrong for place in told if (wrong := wrong_in(place[1])) and wrong_in(f"{place[1]} VALUE")} == {}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("rum quickstart", "no such command"),
        ("plan --epsilom 1", "No such option"),
        ("run --seed", "requires an argument"),
        ("show a b", "b"),
    ],
)
def test_a_command_that_is_none_would_be_found(command: str, said: str) -> None:
    assert said in wrong_in(command)


def readme(pattern: str) -> list[float]:
    """The figures that stand in the one place of the README that reads like ``pattern``."""
    (found,) = re.findall(pattern.replace("#", r"([\d,.]*\d)").replace(" ", r"\s+"), (ROOT / "README.md").read_text(encoding="utf-8"))
    return [float(figure.replace(",", "")) for figure in ((found,) if isinstance(found, str) else found)]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_readme_s_guarantees_are_those_of_its_first_command() -> None:
    config = load_recipe("quickstart")
    statement = account(planned_ledger(config), config.privacy.delta)
    printed = re.findall("^│ (.*) │$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    rows = [tuple(cell.strip() for cell in line.split("│")) for line in printed]
    assert len(rows) == 4
    assert [row for row in guarantee_rows(statement.to_dict()) if row in rows] == rows
    rounds, weights, reports = readme("A run of # rounds with # weights randomises # weights")
    together, pure, clients, high = readme("have epsilon # \\(# with certainty\\); behind an ideal shuffler among # clients, at most #\\. ")
    assert (rounds, clients, reports) == (config.training.rounds, config.clients.count, rounds * weights)
    figures = statement.figures()
    found = [figures[name] for name in ("local_pure", "local", "shuffled_upper_adaptive")]
    assert found == pytest.approx([reports, together, high], abs=0.5)
    assert pure == reports
    planned = ldpfl.plan(epsilon=1.0, clients=int(clients), weights=int(weights), rounds=int(rounds), channel="direct")
    assert readme("# bytes sent by a client in a round") == [planned.bytes_per_client]


@pytest.mark.slow
@pytest.mark.thorough
def test_as_many_clients_as_the_readme_says_are_enough_and_no_fewer() -> None:
    target, solved = readme("shuffled, epsilon 1 a weight: a run has # from # clients on")  # up to 0.1 % more than needed

    def cost(count: float) -> float:
        found = ldpfl.plan(epsilon=1.0, clients=int(count), weights=21_840, rounds=10).statement.figures()["shuffled_upper_adaptive"]
        assert isinstance(found, float)
        return found

    assert cost(solved) <= target < cost(solved / 1.001)


def test_the_home_page_of_the_site_is_the_readme() -> None:
    shared = [(ROOT / name).read_text(encoding="utf-8").split("## Further")[0] for name in ("README.md", "docs/index.md")]
    assert shared[0].replace("](docs/", "](") == shared[1]


def test_tests_that_pages_name_are_there() -> None:
    tests = ROOT / "tests"
    missing = [
        f"{page.name}: {file}::{name}"
        for page in PAGES
        for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
        if not (tests / file).exists() or f"def {name}(" not in (tests / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_the_picture_of_the_verdicts_shows_what_pages_say() -> None:
    results = ROOT / "docs" / "results"
    known = {*recipe_names(), *sweep_names()}
    with (results / "verdict.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert row["accuracy"] in (results / row["page"]).read_text(encoding="utf-8"), row
            assert row["command"].split()[2] in known, row


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
