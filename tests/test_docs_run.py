"""Commands and code of the pages and docstrings are run as they stand, with the seeds that a reader gets.

What takes long is made smaller by ``SMALLER``, and what cannot be run here stands in ``NOT_RUN`` with the reason. The words of all
commands are checked by ``test_docs.py``, and the recipes and settings that they name here.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ldpfl as package
from conftest import TINY_TOML, CommandLine
from ldpfl import ConfigError, api
from ldpfl.data import held_out
from ldpfl.experiments.reproduction import load_reproduction
from ldpfl.experiments.sweep_config import SweepConfig, load_sweep
from test_docs import PAGES, ROOT, RUN, WITH_COMMANDS, blocks, commands, named

FEW = "--set training.rounds=1 --set clients.count=12 --set training.epochs=1 --set shuffling.channel=direct --no-baseline --no-report"

SMALLER = {
    r"run ldp-fl/mnist .*": f"{FEW} --set model.name=linear --set ranges.radius=0.1",
    r"run quickstart .*": f"{FEW} --set data.name=mnist --set model.name=linear --set ranges.radius=0.1",
    r"audit duchi": "--trials 20000",
    r"audit runs/mine": "--trials 100",
    r"attack linkage": "--trials 1",
}
"""What is added to a command, so that it takes a second: fewer rounds, clients and trials. Its data are tiny ones called ``mnist``."""

NOT_RUN = {
    r"(sweep|reproduce) .*": "trains for minutes to days; tests/experiments runs sweeps and reproductions of its own",
    r"deploy .*": "starts processes that talk over TLS; tests/deploy runs the demo",
    r"relay serve .*": "serves until it is stopped; tests/relay starts it",
    r"run quickstart --watch": "serves a page while it trains; tests/report/test_page.py watches a run",
    r"tune sum/.*": "needs features of all of MNIST; tests/api/test_tuning.py tunes on less",
    r"run (sound|sum)/.*": "needs features of all of MNIST; tests/experiments runs such settings on less",
    r"run .*\$seed.*|run .*SEED.*": "the variable of a loop, or a place to fill in, on data of full size",
    r"run .* --model \./folder .*|predict RUN new\.csv": "needs a pretrained model; tests/models/test_pretrained.py trains one",
    r"run .* --set data\.features=hf:\./folder": "needs a pretrained encoder; tests/data/features/test_frozen_encoders.py makes one",
    r"run .* --workers ray(://.*)?": "starts or needs a cluster; tests/simulation/test_ray_workers.py has one of its own",
    r"plan .*--target-central .*": "solves for half a minute; test_docs.py asks the README's figures of the planner",
    r"attack gan .*": "trains an image generator for minutes; tests/cli/test_cli_attacks.py has a shorter one",
    r"(policy key|relay token|relay rounds|relay cancel|budget) .*": "an operator's; tests/deploy/test_rotation.py runs the page's",
    r"policy init (\.|APP).*": "needs the app's folder; tests/test_examples.py and test_app_on_the_page.py run such apps",
    r"(init|audit|run) .*my-bits": "needs pip; tests/mechanisms/test_new_package.py runs the package",
    r"ledger ldp-fl/mnist": "accounts for a minute; tests/cli/test_cli_privacy.py accounts smaller recipes",
}

CODES = {r"check net\.py:Net .*": 3}
"""Exit codes of commands that show what is wrong."""

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.bn, self.tail = nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)

    def forward(self, rows):
        return self.tail(self.bn(self.head(rows)))
"""


def patients() -> pd.DataFrame:
    """The table that pages call ``patients.csv``."""
    random = np.random.default_rng(0)
    age, marker = random.integers(20, 90, 400), random.normal(30, 5, 400)
    outcome = np.where(random.random(400) < age / 100, "died", "alive")
    hospitals = np.array(["north", "south", "east", "west"])[np.arange(400) % 4]
    return pd.DataFrame({"age": age, "marker": marker, "stay": random.integers(1, 9, 400), "hospital": hospitals, "outcome": outcome})


def visits() -> pd.DataFrame:
    """The table that pages call ``visits.csv``: patients with two rows each, of a hospital."""
    return patients().assign(patient=[f"P{place % 200}" for place in range(400)])


def of_all(table: dict[str, str], command: str) -> str | None:
    found = [value for pattern, value in table.items() if re.fullmatch(pattern, command)]
    assert len(found) < 2, f"{command}: {found}"
    return found[0] if found else None


def plain(command: str) -> str:
    """A command without its comment and what a shell does afterwards."""
    return re.split(r" +#|[;&|>]", command)[0].strip()


SHELL = [page for page in WITH_COMMANDS if commands(page) and page.name != "index.md"]  # whose commands are the README's


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.thorough_for("docs/guide.md", "docs/tracking.md", "docs/own-data.md", "docs/tuning.md", "docs/record-sums.md")
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
def test_commands_of_a_page_run_from_top_to_bottom(
    page: Path, ldpfl: CommandLine, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    patients().to_csv("patients.csv", index=False)
    visits().to_csv("visits.csv", index=False)
    Path("net.py").write_text(NET)
    Path("my-config.toml").write_text(TINY_TOML.replace("count = 8", "count = 12"))
    Path("examples").symlink_to(ROOT / "examples")
    Path("DATA").symlink_to(tiny_data)
    for command in map(plain, commands(page)):
        if of_all(NOT_RUN, command) is None:
            outcome = ldpfl(*shlex.split(f"{command} {of_all(SMALLER, command) or ''}"))
            code = next((code for pattern, code in CODES.items() if re.fullmatch(pattern, command)), 0)
            assert outcome.code == code, f"{command}: {outcome.err or outcome.out}"


def test_no_line_of_the_tables_is_left_over() -> None:
    shown = {plain(command) for page in SHELL for command in commands(page)}
    for pattern in (*SMALLER, *NOT_RUN, *CODES):
        assert any(re.fullmatch(pattern, command) for command in shown), pattern


def wrong_names(command: str) -> str:
    """Why the recipe or a setting that ``command`` names is none; nothing where both are, or where it names a file of the reader's."""
    words = shlex.split(plain(command))
    name = words[1] if len(words) > 1 and not words[1].startswith("-") else ""
    changes = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--set"]
    changes = [change for change in changes if not change.partition("=")[2].isupper()]  # to be filled in
    if of_all(NOT_RUN, plain(command)) and "my-bits" in command:
        return ""
    if name.isupper() or name.endswith((".toml", ".json")) or name.startswith("runs/"):
        return ""
    try:
        if words[0] in ("run", "ledger"):
            api.configure(name or "quickstart", changes)
        elif words[0] == "sweep" and name:
            load_sweep(name)
        elif words[0] == "reproduce" and name:
            load_reproduction(name)
    except ConfigError as error:
        return str(error)
    return ""


def test_recipes_and_settings_that_pages_name_are_there() -> None:
    shown = {(page.name, command) for page in WITH_COMMANDS for command in (*commands(page), *named(page))}
    assert {place: wrong for place in shown if (wrong := wrong_names(place[1]))} == {}


@pytest.mark.parametrize("command", ["run quickstar", "sweep sound-mnis", "reproduce ldp-fl/fig55", "run --set training.round=1"])
def test_a_name_that_is_none_would_be_found(command: str) -> None:
    assert wrong_names(command)


OTHERS = {
    "docs/own-data.md": "run below, with a table for the reader's",
    "docs/examples/own-task.md": "run below, with a table for the reader's",
    "docs/tracking.md": "run in test_docs.py with services that are made up",
    "docs/adding-a-mechanism.md": "a class of the package itself, abbreviated",
    "docs/flower.md": "apps around names of the reader's; tests/flower runs such apps",
    "docs/examples/own-model.md": "trains for a minute; tests/test_examples.py runs examples/own-data/own_model.py",
}


def test_all_pages_with_code_are_run_or_say_why_not() -> None:
    with_code = {str(page.relative_to(ROOT)) for page in PAGES if blocks(page) and page.name != "index.md"}
    assert with_code == {*RUN, *OTHERS}


@pytest.mark.slow
@pytest.mark.thorough
def test_code_about_ones_own_data_runs_on_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = patients()
    names: dict[str, object] = {"frame": frame, "new_rows": frame.drop(columns="outcome")}
    monkeypatch.setattr(package, "run", _without_bar)
    for block in blocks(ROOT / "docs" / "own-data.md"):
        exec(compile(block, "own-data.md", "exec"), names)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_task_of_ones_own_is_trained_and_compared_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package, "run", _without_bar)
    file, use = blocks(ROOT / "docs" / "examples" / "own-task.md")
    Path("huber.py").write_text(file, encoding="utf-8")
    names: dict[str, Any] = {"frame": pd.concat([patients()] * 20, ignore_index=True)}  # so that noise does not hide the target
    exec(compile(use, "own-task.md", "exec"), names)
    result, frame = names["result"], names["frame"]
    test_rows = held_out(len(frame))
    error = (names["days"] - frame["stay"]).abs()[test_rows].mean()
    assert names["error_in_days"] == pytest.approx(error, rel=1e-4)
    found = result.to_dict()
    assert (found["metric"], found["lower_is_better"], found.get("intervals"), found.get("sites")) == ("mean error", True, None, None)
    assert any("the metrics of task 'huber' have no intervals" in note for note in found["caveats"])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_sweep_file_of_its_page_runs_and_names_every_key(ldpfl: CommandLine) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    Path("sweep.toml").write_text(text, encoding="utf-8")
    patients().to_csv("patients.csv", index=False)
    found = ldpfl("sweep", "sweep.toml", "--out", "out", "--json")
    assert found.code == 0, found.err
    result = json.loads(found.out)
    points = [(row["variant"], row["point"]["privacy.target_epsilon"], len(row["score"])) for row in result["rows"]]
    assert points == [("regression", 2, 2), ("network", 2, 2), ("regression", 4, 2), ("network", 4, 2)]
    assert result["together"]["runs"] == len(list(Path("out").glob("runs/*/SECRET-seed"))) == 8
    assert all(f"{name} = " in page or f"[{name}]" in page for name in SweepConfig.model_fields)


def _without_bar(*args: object, **how: object) -> object:
    return api.run(*args, **how, progress=False)  # type: ignore[arg-type]


SMALLER_CODE = {
    '"quickstart", epsilon=0.5, rounds=3': '"quickstart", epsilon=0.5, rounds=1, count=4, baseline=False',
    "seeds=3)": "seeds=1, rounds=1)",
}
CODE_NOT_RUN = {"ldpfl.reproduce": "trains for hours", "ldpfl.tune": "needs features of all of MNIST"}


def examples_in(function: object) -> Iterator[str]:
    """Code in a docstring: paragraphs that stand further in than the text, and are Python."""
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        if paragraph.startswith("    ") and "ldpfl." in paragraph:
            yield textwrap.dedent(paragraph)


@pytest.mark.slow
@pytest.mark.thorough
def test_examples_in_docstrings_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(package, "run", _without_bar)
    public = [getattr(package, name) for name in package.__all__] + [getattr(api, name) for name in api.__all__]
    found = list(dict.fromkeys(example for one in public for example in examples_in(one)))
    assert len(found) >= 3
    for example in found:
        ast.parse(example)
        if not any(example.startswith(name) for name in CODE_NOT_RUN):
            for whole, less in SMALLER_CODE.items():
                example = example.replace(whole, less)
            exec(compile(example, "a docstring", "exec"), {"ldpfl": package, "frame": patients()})
