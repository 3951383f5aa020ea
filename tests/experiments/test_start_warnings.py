"""What is said of a run before its first round, and stands under its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from conftest import CommandLine
from ldpfl import api
from ldpfl.experiments.public_figures import public_caveats
from ldpfl.experiments.start_warnings import FEW_OUTCOMES

SETTINGS: dict[str, Any] = {"data.bounds": {"age": [0, 100]}, "data.classes": ["no", "yes"], "clients.count": 4, "training.rounds": 1}
HOW: dict[str, Any] = {"target": "ill", "baseline": False, "progress": False, "seed": 1}


def rows(count: int) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    return pd.DataFrame({"age": generator.integers(0, 100, count), "ill": np.where(np.arange(count) % 2, "yes", "no")})


def caveats(frame: pd.DataFrame, **settings: Any) -> list[str]:
    found = api.run(data=frame, settings={**SETTINGS, **settings}, **HOW).to_dict()["caveats"]
    return [str(line) for line in found]


@pytest.mark.thorough_except("10-each step is 10 times as long as the learning rate says, so training may diverge")
@pytest.mark.parametrize(
    ("records", "said"),
    [(10, "each step is 10 times as long as the learning rate says, so training may diverge"), (1000, "so the model hardly moves")],
)
def test_a_stated_number_of_records_that_is_far_off_is_said_with_both_numbers(records: int, said: str) -> None:
    """500 rows, of which 400 are trained on by four clients: each has 100."""
    (line,) = [line for line in caveats(rows(500), **{"mechanism.records": records}) if "mechanism.records" in line]
    assert f"mechanism.records says {records:,} records a client, and clients have 100 on average" in line
    assert said in line
    assert "set mechanism.records to 100" in line
    assert not any("mechanism.records" in line for line in caveats(rows(500), **{"mechanism.records": 90}))


@pytest.mark.thorough
def test_rows_dealt_to_a_default_number_of_clients_are_said_with_what_to_set(tmp_path: Path, ldpfl: CommandLine) -> None:
    """Who gives a number of clients, or their column, reads nothing of it; neither does who protects whole clients hear of full noise."""

    def notes(data: Any, settings: dict[str, Any] | None = None, how: dict[str, Any] = HOW) -> list[str]:
        changes = {"data.bounds": {"age": [0, 100]}, "training.rounds": 1} if isinstance(data, pd.DataFrame) else {}
        changes |= settings or {}
        found = api.run(data=data, settings=changes, **how).to_dict()["caveats"]
        return [line for line in found if "made-up clients" in line]

    (note,) = notes(rows(500))
    assert note.startswith(
        "the data name no clients, so their rows were dealt to 100 made-up clients of 4 rows on average. Each client adds "
    )
    assert note.endswith(
        "Name the column of the real clients (--client, data.client), or set clients.count to their real number (1 if one "
        "place holds all rows)"
    )
    assert not notes(rows(500), {"clients.count": 4})
    assert not notes(rows(500).assign(town=np.arange(500) % 3), how={**HOW, "client": "town"})
    (note,) = notes(rows(500), {"shuffling.channel": "secure-sum"})
    assert "adds noise" not in note
    pair = (np.zeros((500, 3), dtype=np.float32), np.arange(500) % 2)
    (note,) = notes(pair, {"training.rounds": 1}, {**HOW, "target": "", "model": "linear"})
    assert "few large ones. Set clients.count to" in note
    rows(500).to_csv(tmp_path / "rows.csv", index=False)
    changes = ("--set", "data.bounds={age=[0,100]}", "--set", "training.rounds=1")
    printed = ldpfl("run", "--data", tmp_path / "rows.csv", "--target", "ill", "--no-baseline", "--out", "run", *changes)
    for text in (printed.err, printed.out):
        assert "dealt to 100 made-up clients" in " ".join(text.split())


@pytest.mark.thorough
def test_too_few_rows_are_said_with_how_many_are_needed_at_the_start_and_under_the_result(tmp_path: Path, ldpfl: CommandLine) -> None:
    rows(5).to_csv(tmp_path / "five.csv", index=False)
    changes = ("--set", "data.bounds={age=[0,100]}", "--set", "clients.count=2", "--set", "training.rounds=1")
    printed = ldpfl("run", "--data", tmp_path / "five.csv", "--target", "ill", "--no-baseline", "--out", "run", *changes)
    assert printed.code == 0
    said = "4 rows to train on and 1 to measure on are too few: figures of a model say something from 20 test rows on"
    for text in (printed.err, printed.out, ldpfl("show", "run").out):
        assert said in " ".join(text.split())
    assert "give 100 rows in all, or a data.test_path" in " ".join(printed.out.split())
    assert printed.err.count(said.split(":", maxsplit=1)[0]) == 1
    assert not any("too few: figures" in line for line in caveats(rows(100)))
    rows(5).to_csv(tmp_path / "test.csv", index=False)
    (line,) = [line for line in caveats(rows(100), **{"data.test_path": str(tmp_path / "test.csv")}) if "too few: figures" in line]
    assert line.endswith("give a data.test_path with as many")


def test_clients_of_one_class_each_are_said_with_the_column_and_the_remedy(tmp_path: Path) -> None:
    """Sorted rows are dealt out at random, so that only the user's own division makes such clients."""
    (tmp_path / "deal.py").write_text(
        "import numpy as np\n\ndef blocks(samples, clients, seed):\n    return np.arange(samples) * clients // samples\n"
    )
    ordered = rows(400).sort_values("ill", ignore_index=True).assign(group=np.repeat(["control", "case"], 200))

    def notes(frame: pd.DataFrame, **how: Any) -> list[str]:
        settings = {**SETTINGS, "clients.count": 2 if "client" in how else 8, **how.pop("settings", {})}
        run = api.run(data=frame, settings=settings, **HOW, **how, folder=tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        found = [line for line in run.to_dict()["caveats"] if "of one class each" in line]
        assert not any("of one class each" in line for line in public_caveats(run.config, found))
        return found

    (note,) = notes(ordered, client="group")
    assert note.startswith("clients have rows of one class each, as the column 'group' names the clients: a row's client is public")
    assert note.endswith("Name a column of clients that does not follow the target (--client, data.client)")
    (note,) = notes(ordered.drop(columns="group"), settings={"data.partition": f"{tmp_path / 'deal.py'}:blocks"})
    assert note.endswith("Set data.partition to 'iid', which draws rows at random")
    assert not notes(ordered.drop(columns="group"))
    assert not notes(ordered.assign(group=np.arange(400) % 2), client="group")


@pytest.mark.parametrize(("names", "said"), [(["007", "7"], True), (["Ward A", "ward a"], True), (["7", "70"], False)])
def test_names_of_clients_that_may_be_one_client_are_said(names: list[str], said: bool) -> None:
    frame = rows(200).assign(site=np.array(names)[np.arange(200) % 2])
    run = api.run(data=frame, client="site", settings=SETTINGS, **HOW)
    found = [line for line in run.to_dict()["caveats"] if "two clients have similar names" in line]
    assert [all(repr(name) in line for name in names) for line in found] == [True] * said
    assert public_caveats(run.config, found) == []


@pytest.mark.parametrize(
    ("task", "target", "fault", "said"),
    [
        ("classification", "ill", {"ill": "no"}, "0 rows with the class 'yes'"),
        ("classification", "stage", {"stage": "b"}, "0 rows with the class 'a', 0 rows with the class 'c'"),
        ("ordinal", "stage", {"stage": "b"}, "0 rows with the class 'a', 0 rows with the class 'c'"),
        ("multilabel", ["one", "two"], {"two": 0}, "0 rows with the label 'two'"),
        ("survival", ["days", "one"], {"one": 0}, "0 rows with the event"),
        ("regression", "days", {"days": 3.0}, "0 rows with another value than the commonest"),
        ("poisson", "visits", {"visits": 2}, "0 rows with another value than the commonest"),
    ],
)
def test_test_rows_without_an_outcome_are_said(tmp_path: Path, task: str, target: Any, fault: dict[str, Any], said: str) -> None:
    """The note is private, as the rows are. Figures of two classes that compare them are left out."""
    generator, count = np.random.default_rng(1), 300
    frame = pd.DataFrame(
        {
            "age": generator.integers(0, 100, count),
            "ill": generator.choice(["no", "yes"], count),
            "stage": generator.choice(["a", "b", "c"], count),
            "one": generator.integers(0, 2, count),
            "two": generator.integers(0, 2, count),
            "days": generator.uniform(1, 50, count).round(1),
            "visits": generator.poisson(3, count),
        }
    )
    classes = {"ill": ["no", "yes"], "stage": ["a", "b", "c"]}.get(str(target), [])
    settings = {"clients.count": 3, "training.rounds": 1, "data.columns": ["age"], "data.classes": classes}
    how = {"target": target, "task": task, "baseline": False, "progress": False, "seed": 1, "target_epsilon": 20.0}
    frame.iloc[200:].assign(**fault).to_csv(tmp_path / "test.csv", index=False)
    frame.iloc[200:].to_csv(tmp_path / "sound.csv", index=False)
    notes = {}
    for file in ("test.csv", "sound.csv"):
        result = api.run(data=frame.iloc[:200], settings={**settings, "data.test_path": str(tmp_path / file)}, **how)
        notes[file] = [note for note in result.to_dict()["caveats"] if note.startswith(FEW_OUTCOMES)]
        if file == "test.csv":
            assert not any(note.startswith(FEW_OUTCOMES) for note in public_caveats(result.config, list(result.to_dict()["caveats"])))
            assert "Nobody scored the model" not in str(result)
            if target == "ill":
                assert set(result.scores) == {"Brier score", "mean predicted risk", "observed share", "specificity at 0.5"}
            assert "macro F1" not in result.scores or task == "multilabel"
    assert notes["sound.csv"] == []
    (note,) = notes["test.csv"]
    assert f"which are missing or rare among its 100 rows ({said})." in note
    assert "Give at least 10 rows of each outcome in data.test_path" in note
