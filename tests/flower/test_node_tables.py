"""Clients that train on tables of their own, of which the server knows what is public and nothing else."""

from __future__ import annotations

import datetime
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import torch
from flower_parts import instruction, terms_of
from flwr.app import Context, RecordDict, UserConfig
from test_same_model import SimulatedNode, simulator_source

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api
from ldpfl.data.nodes import read_node_table, server_view_of_node_tables
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.config import toml_value
from ldpfl.experiments.dataset import target_kind_of
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, apps
from ldpfl.flower.policy_init import offer_of
from ldpfl.simulation import Federation
from ldpfl.util.randomness import SeededStreams

CLIENTS = 3
PUBLIC: dict[str, Any] = {
    "data.target": "outcome",
    "data.columns": ["age", "ward", "town"],
    "data.bounds": {"age": [0, 100]},
    "data.categories": {"ward": ["cardio", "icu"]},
    "data.words": ["town"],
    "data.buckets": 8,
    "data.classes": ["alive", "died"],
    "mechanism.records": 40,
    "mechanism.noise_multiplier": 2.0,
    "privacy.target_epsilon": "off",
    "clients.count": CLIENTS,
    "training.rounds": 3,
    "seed": 4,
}


def rows(count: int, seed: int) -> pd.DataFrame:
    """One age, one ward and one outcome are not there, or out of bounds."""
    generator = np.random.default_rng(seed)
    age, ward = generator.integers(20, 90, count).astype(float), generator.choice(["cardio", "icu"], count)
    died = generator.random(count) < 1 / (1 + np.exp(-(age - 60) / 8))
    frame = pd.DataFrame(
        {"name": [f"P{place}" for place in range(count)], "ward": ward, "town": generator.choice(list("abc"), count), "age": age}
    )
    frame["outcome"] = np.where(died, "died", "alive")
    frame.loc[1, "age"], frame.loc[2, "age"], frame.loc[3, "ward"] = np.nan, 120.0, None
    return frame


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A table a node, of different sizes, and the server's own."""
    for node in range(CLIENTS):
        rows(30 + 10 * node, node).to_csv(tmp_path / f"{node}.csv", index=False)
    rows(100, 9).to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


def listed(*more: dict[str, Any]) -> list[str]:
    """Return the public settings with ``more``; those that are None then are left out."""
    settings = {key: value for own in (PUBLIC, *more) for key, value in own.items()}
    return [f"{key}={toml_value(value)}" for key, value in settings.items() if value is not None]


def deployed(tables: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> RunFolder:
    monkeypatch.setenv("LDPFL_DATA", str(tables / "{partition}.csv"))
    changes = listed({"data.name": "node", **{key.replace("__", "."): value for key, value in more.items()}})
    settings: UserConfig = {"ldpfl.recipe": "own", "ldpfl.set": ";".join(changes), "ldpfl.out": str(tables / "run")}
    client = LdpClientApp(apps.train, node=lambda context: SimulatedNode(), source=simulator_source)
    grid = InProcessGrid(client, CLIENTS, run_config=settings)
    apps.server_app(grid, grid.server_context())
    return RunFolder(tables / "run")


@pytest.mark.slow
@pytest.mark.thorough
def test_they_end_in_the_model_of_a_simulation_on_all_their_rows(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: what a node reads of its rows is what anybody would who saw all of them."""
    folder = deployed(tables, monkeypatch, data__test_path=str(tables / "test.csv"))
    together = pd.concat([pd.read_csv(tables / f"{node}.csv").assign(hospital=node) for node in range(CLIENTS)])
    together.to_csv(tables / "together.csv", index=False)
    own = {
        "data.scaling": "bounds",
        "data.path": str(tables / "together.csv"),
        "data.test_path": str(tables / "test.csv"),
        "data.client": "hospital",
    }
    # As these nodes draw; what a simulation on own data draws follows from what it hides as well.
    plain = lambda self, state, clients, values, mechanism: SeededStreams.for_clients(self.seed, state.round + 1, clients.tolist())  # noqa: E731
    monkeypatch.setattr(Federation, "streams", plain)
    simulated = api.run("own", settings=listed(own), baseline=False, progress=False)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    ours, theirs = checkpoint.state.model, torch.cat([value.flatten() for value in simulated.module().state_dict().values()])
    assert torch.equal(ours, theirs)
    assert [metrics.score for metrics in checkpoint.history] == [metrics.score for metrics in simulated.history]
    assert folder.ledger() == simulated.ledger
    assert "test.csv" not in folder.config_path.read_text()  # which is what the nodes get


@pytest.mark.thorough
def test_a_server_without_rows_of_its_own_measures_nothing(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = deployed(tables, monkeypatch).result()
    assert result is not None
    assert result["score"] is None
    assert result["rounds"] == 3


def test_a_node_s_log_says_that_its_rows_cannot_be_used_and_its_report_does_not(
    tables: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None of node 0's rows, where it wrote numbers in place of classes, and a third of node 1's; node 2's rows are fine."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for node, spoilt in ((0, 1.0), (1, 2 / 3)):
        frame = pd.read_csv(tables / f"{node}.csv")
        frame.loc[: spoilt * len(frame), "outcome"] = "0"
        frame.to_csv(tables / f"{node}.csv", index=False)
    with caplog.at_level(logging.INFO, "flwr.ldpfl"):
        folder = deployed(tables, monkeypatch, training__rounds=1)
    unusable = [message for message in caplog.messages if message.startswith("unusable: ")]
    assert [message.partition(" of this node's rows")[0] for message in unusable] == ["unusable: none", "unusable: fewer than half"]
    assert all("To see what does not fit, run ldpfl deploy check-node --app APP --try" in message for message in unusable)
    assert [event.cohort for event in folder.ledger().events] == [CLIENTS]


def config_of(**more: Any) -> RunConfig:
    return load_recipe("own", listed({"data.name": "node", **more}))


def test_a_node_without_a_table_says_so_to_its_operator(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LDPFL_DATA", raising=False)
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(DataError, match="name its file in LDPFL_DATA"):
        apps.train(instruction(terms_of(config=config_of())), context)


def test_nothing_of_an_app_s_folder_is_found_while_the_ready_app_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, libraries look for what they can do without, and where they find it, that could take the noise for small."""
    app_in(tmp_path / "app", {})
    (tmp_path / "app" / "ldpfl_optional.py").write_text("raise SystemExit('run')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "app"), *sys.path])
    assert find_spec("ldpfl_optional") is not None
    found = []

    def looking(*_: object) -> None:
        found.append(find_spec("ldpfl_optional"))
        raise DataError("seen")

    monkeypatch.setattr(apps, "data_dir_of", looking)
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    path = list(sys.path)
    with pytest.raises(DataError, match="seen"):
        apps.train(instruction(terms_of(config=config_of())), context)
    assert found == [None]
    assert sys.path == path


def app_in(folder: Path, changes: dict[str, Any]) -> str:
    changed = ";".join(listed({"data.name": "node", **changes}))
    folder.mkdir()
    text = f"[tool.flwr.app.config.ldpfl]\nrecipe = 'own'\nset = '{changed}'\n"
    (folder / "pyproject.toml").write_text(f"[tool.flwr.app.components]\nclientapp = 'ldpfl.flower.apps:client_app'\n{text}")
    return str(folder)


def test_what_others_write_into_a_node_s_config_leads_to_no_other_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LDPFL_DATA", "{partition}.csv")
    context = Context(run_id=0, node_id=1, node_config={"partition-id": "../other"}, state=RecordDict(), run_config={})
    with pytest.raises(DataError, match="this node has no partition number"):
        apps.train(instruction(terms_of(config=config_of())), context)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data.columns": []}, "data.columns is empty"),
        ({"data.columns": ["age", "name"]}, "cannot see the nodes' column 'name'"),
        ({"data.classes": []}, "data.classes is empty"),
        ({"data.client": "hospital"}, "leave data.path, data.client and data.evaluate_on out"),
        ({"task.name": "regression", "data.target": "stay", "data.classes": []}, "data.bounds lacks the target 'stay'"),
    ],
)
def test_what_nobody_else_sees_has_to_be_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        offer_of(app_in(tmp_path / "app", {**changes, "privacy.target_epsilon": 4.0, "mechanism.noise_multiplier": None}))


def test_no_simulation_has_such_data() -> None:
    with pytest.raises(ConfigError, match="for a simulation give a table with --data"):
        api.run("own", settings=listed({"data.name": "node"}), progress=False)


@pytest.mark.slow
@pytest.mark.xdist_group("imports-of-apps")
def test_an_operator_sees_whether_the_table_fits(tables: Path, ldpfl: CommandLine) -> None:
    """And what the server measures on is not looked for here."""
    asked = app_in(tables / "app", {"data.test_path": "/nowhere.csv"})
    files: list[str | Path] = ["--out", tables / "policy.toml", "--budget", tables / "budget.sqlite"]
    outcome = ldpfl("policy", "init", asked, "--data", tables / "0.csv", *files)
    assert "All 30 rows" in outcome.out, outcome.err
    assert "LDPFL_DATA=" in outcome.out
    (tables / "0.csv").write_text((tables / "0.csv").read_text().replace("cardio", "cardiology", 1))
    (tables / "policy.toml").unlink()
    said = " ".join(ldpfl("policy", "init", asked, "--data", tables / "0.csv", *files).out.split())
    assert "30 rows can be trained on, some with missing values. The first: " in said
    assert "the value in the column 'ward' is not in data.categories.ward" in said
    assert "cardiology" not in said
    (tables / "0.csv").write_text((tables / "0.csv").read_text().replace("died", "gone", 1))
    (tables / "policy.toml").unlink()
    said = " ".join(ldpfl("policy", "init", asked, "--data", tables / "0.csv", *files).out.split())
    assert "1 of the 30 rows cannot be trained on. The first: " in said


RULES: dict[str, list[dict[str, Any]]] = {
    "a category is left out": [
        {"data.categories": {"ward": ["cardio", "zzz"]}},
        {"data.categories": {"ward": ["zzz"], "town": ["a", "b"]}, "data.words": []},
    ],
    "a class is left out": [{"data.classes": ["alive", "zzz"]}, {"data.classes": ["hiv", "alive", "gone"]}],
    "words as numbers": [
        {"data.bounds": {"age": [0, 100], "town": [0, 1]}, "data.words": []},
        {"data.bounds": {"age": [0, 100], "name": [0, 1]}, "data.columns": ["age", "name"]},
    ],
    "what is missing is refused": [{"data.missing": "refuse"}, {"data.missing": "indicator"}],
    "another target": [
        {
            "data.target": "ward",
            "data.columns": ["age", "outcome"],
            "data.words": ["outcome"],
            "data.categories": {},
            "data.classes": ["icu", "x"],
        }
    ],
    "a number of it": [
        {
            "task.name": "regression",
            "data.target": "age",
            "data.columns": ["ward"],
            "data.words": ["ward"],
            "data.categories": {},
            "data.classes": [],
        },
        {
            "task.name": "regression",
            "data.target": "town",
            "data.bounds": {"age": [0, 100], "town": [0, 1]},
            "data.columns": ["age"],
            "data.words": [],
            "data.categories": {},
            "data.classes": [],
        },
    ],
    "labels": [
        {
            "task.name": "multilabel",
            "data.target": ["age", "town"],
            "data.columns": ["ward"],
            "data.words": ["ward"],
            "data.categories": {},
            "data.classes": [],
        }
    ],
    "texts": [{"data.text": "town", "data.columns": [], "data.words": [], "data.categories": {}, "model.name": "embedding-bag"}],
}
CELLS: dict[str, Sequence[Any]] = {
    "age": ("", "x", "1e400", "nan", "-7", "0", "1"),
    "ward": ("", "icu", "hiv", "NA", "x;y"),
    "town": ("", "a", "0", "1", "zz"),
    "outcome": ("", "alive", "died", "hiv", "none"),
}


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.slow
@pytest.mark.thorough_except("csv-another target", "csv-texts")
def test_no_row_of_a_node_decides_about_another_whatever_rules_a_server_makes(case: str, suffix: str, tmp_path: Path) -> None:
    """Each row of a pair of tables that differ in one is read alike in all others, and none stops the node."""
    place = 5
    for changes in RULES[case]:
        config = config_of(**changes)
        before: list[torch.Tensor] = []
        for name, cells in CELLS.items():
            for cell in cells:
                frame = rows(30, 1).astype({"age": object})
                frame.loc[place, name] = cell
                frame["age"] = frame["age"].astype(str)
                path = tmp_path / f"rows.{suffix}"
                frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
                read = read_node_table(config.data, target_kind_of(config), path).train
                assert len(read) == len(frame)
                others = torch.arange(len(read)) != place
                answers = read.targets[others]
                now = [read.tensor[others], answers.nan_to_num(-7.0) if answers.is_floating_point() else answers]
                before = before or now
                assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))


@pytest.mark.parametrize(
    ("task", "changes", "cells", "expected"),
    [
        ("poisson", {"data.target": "stays", "data.bounds": {"age": [0, 100], "stays": [0, 8]}}, [4, -1, "x", 99], [2.0, None, None, 4.0]),
        ("ordinal", {"data.target": "stays", "data.classes": ["low", "high"]}, ["high", "low", "huge", ""], [1, 0, -100, -100]),
        ("survival", {"data.target": ["stays", "died"], "data.cut_points": [3.0]}, [1, -1, "x", 4], [1.0, None, None, 0.0]),
    ],
)
def test_a_row_without_an_answer_that_can_be_read_teaches_nothing(
    task: str, changes: dict[str, Any], cells: list[Any], expected: list[Any], tmp_path: Path
) -> None:
    config = config_of(**{"task.name": task, "data.classes": [], **changes})
    frame = rows(4, 1).assign(stays=cells, died=[1, 1, 1, 0])
    frame.to_csv(tmp_path / "rows.csv", index=False)
    targets = read_node_table(config.data, target_kind_of(config), tmp_path / "rows.csv").train.targets.flatten()
    assert [None if value != value else value for value in targets.tolist()] == expected


def test_a_cell_of_any_kind_stops_no_node(tmp_path: Path) -> None:
    """In columns that are named and in others: infinities, dates, bytes, lists, and rows of too many cells."""
    config, place = config_of(), 5
    before: list[torch.Tensor] = []
    for column, cell in (
        ("age", np.inf),
        ("other", datetime.date(2026, 1, 2)),
        ("other", b"x"),
        ("town", ["a"]),
        ("town", b"x"),
        ("more", -np.inf),
    ):
        frame = rows(30, 1).astype({"town": object}).assign(other=None, more=1.0)
        frame.at[place, column] = cell
        path = tmp_path / "rows.parquet"
        try:
            frame.to_parquet(path)
        except (TypeError, ValueError, pyarrow.ArrowException):  # such a column cannot be in a file
            continue
        read = read_node_table(config.data, target_kind_of(config), path).train
        others = torch.arange(30) != place
        now = [read.tensor[others], read.targets[others]]
        before = before or now
        assert all(torch.equal(*pair) for pair in zip(before, now, strict=True))
    lines = rows(30, 1).to_csv(index=False).splitlines()
    for line in (lines[place + 1] + ",and,more", "x", '"' + "y" * 200_000 + '",b,c,1,alive'):
        (tmp_path / "rows.csv").write_text("\n".join([*lines[: place + 1], line, *lines[place + 2 :]]))
        read = read_node_table(config.data, target_kind_of(config), tmp_path / "rows.csv").train
        assert len(read) == 30
        assert torch.equal(read.tensor[others], before[0])


def _cells(kind: pyarrow.DataType, values: list[int], width: type) -> pyarrow.Array:
    """Return an array whose bytes are those of ``values``, whether the type allows them or not."""
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(np.array(values, dtype=width).tobytes())])


UNREADABLE: dict[str, Callable[[bool], pyarrow.Array]] = {
    "a date beyond the year 9999": lambda odd: _cells(pyarrow.date32(), [1, 2**31 - 1 if odd else 3, 2], np.int32),
    "a long date beyond it": lambda odd: _cells(pyarrow.date64(), [0, 86_400_000 * (2**31 - 8 if odd else 3), 0], np.int64),
    "a time beyond it": lambda odd: _cells(pyarrow.timestamp("us"), [1, 2**63 - 1 if odd else 3, 2], np.int64),
    "an hour beyond the day": lambda odd: _cells(pyarrow.time64("us"), [1, 2**60 if odd else 3, 2], np.int64),
    "a text that is none": lambda odd: pyarrow.array([b"a", b"\xff\xfe" if odd else b"b", b"c"]).view(pyarrow.string()),
    "a long text that is none": lambda odd: pyarrow.array([b"a", b"\xff" if odd else b"b", b"c"], pyarrow.large_binary()).view(
        pyarrow.large_string()
    ),
    "a number of very many digits": lambda odd: pyarrow.array(["1", "7" * (5000 if odd else 3), "2"]),
    "a list": lambda odd: pyarrow.array([[1], None if odd else [2], [3]]),
    "a whole number among gaps": lambda odd: pyarrow.array([1, None if odd else 7, 2]),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_cell_of_a_parquet_file_that_cannot_be_read_is_without_a_value(kind: str, tmp_path: Path) -> None:
    config, read = config_of(), []
    for odd in (False, True):
        columns = {"age": pyarrow.array([50.0, 51.0, 52.0]), "ward": ["icu"] * 3, "town": UNREADABLE[kind](odd), "outcome": ["alive"] * 3}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
        read.append(read_node_table(config.data, target_kind_of(config), tmp_path / "rows.parquet").train)
    others = torch.tensor([0, 2])
    assert torch.equal(read[0].tensor[others], read[1].tensor[others])
    assert torch.equal(read[0].targets, read[1].targets)


@pytest.mark.parametrize(
    "rule", [{"data.words": ["town"]}, {"data.text": "town", "data.columns": [], "data.words": [], "model.name": "embedding-bag"}]
)
def test_a_file_without_any_value_changes_no_other_file_s_rows(rule: dict[str, object], tmp_path: Path) -> None:
    """A table may be a folder of files: where one of them has nothing in a column, its type is another than in the others."""
    if "data.text" in rule:
        rule = {**rule, "data.categories": {}, "data.bounds": {}}
    config, read = config_of(**rule), []
    for odd in (False, True):
        (tmp_path / "rows").mkdir(exist_ok=True)
        several: list[list[float | None]] = [[1234567890123456789.0, 0.1 + 0.2, 7.0], [None if odd else 5.0]]
        for number, towns in enumerate(several):
            columns = {"age": pyarrow.array([50.0] * len(towns)), "ward": ["icu"] * len(towns), "outcome": ["alive"] * len(towns)}
            table = pyarrow.table({**columns, "town": pyarrow.array(towns, pyarrow.null() if towns == [None] else pyarrow.float64())})
            pyarrow.parquet.write_table(table, tmp_path / "rows" / f"{number}.parquet")
        read.append(read_node_table(config.data, target_kind_of(config), tmp_path / "rows").train.tensor[:3])
    assert torch.equal(*read)


def test_a_gap_in_a_column_of_numbers_that_a_server_calls_texts_stops_no_node(tmp_path: Path) -> None:
    config = config_of(
        **{
            "data.text": "age",
            "data.columns": [],
            "data.words": [],
            "data.categories": {},
            "data.bounds": {},
            "model.name": "embedding-bag",
        }
    )
    read = []
    for gap in (False, True):
        frame = rows(30, 1).assign(age=range(30)).astype({"age": object if gap else int})
        frame.loc[5, "age"] = None if gap else 5
        frame.to_parquet(tmp_path / "rows.parquet")
        read.append(read_node_table(config.data, target_kind_of(config), tmp_path / "rows.parquet").train.tensor)
    others = torch.arange(30) != 5
    assert torch.equal(read[0][others], read[1][others])


def test_no_row_decides_whether_others_have_decimal_commas(tmp_path: Path) -> None:
    config, read = config_of(), []
    for cell in ("61,5", "unknown"):
        ages = ["50,5", "51,5", "x", "y", cell]
        lines = ["age;ward;town;outcome", *(f"{age};icu;a;alive" for age in ages)]
        (tmp_path / "rows.csv").write_text("\n".join(lines))
        read.append(read_node_table(config.data, target_kind_of(config), tmp_path / "rows.csv").train.tensor[:4])
    assert torch.equal(*read)


def test_bounds_without_a_width_are_refused() -> None:
    config = config_of(**{"data.bounds": {"age": [-1.797e308, 1.797e308]}})
    with pytest.raises(ConfigError, match=r"data\.bounds\.age"):
        server_view_of_node_tables(config.data, target_kind_of(config))


@pytest.mark.xdist_group("imports-of-apps")
def test_the_app_on_the_page_is_one(tmp_path: Path, ldpfl: CommandLine) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```toml\n(# in pyproject.toml of the ready app.*?)^```", page, re.M | re.S)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text(f"[tool.flwr.app.components]\nclientapp = 'ldpfl.flower.apps:client_app'\n{code}")
    rows(30, 1).to_csv(tmp_path / "patients.csv", index=False)
    files: list[str | Path] = ["--out", tmp_path / "policy.toml", "--budget", tmp_path / "budget.sqlite"]
    outcome = ldpfl("policy", "init", tmp_path / "app", "--data", tmp_path / "patients.csv", *files)
    assert "any one of this client's records" in outcome.out, outcome.err
    assert "All 30 rows" in outcome.out
