"""The examples run as their pages say, for a round or two."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from ldpfl.experiments.run_folder import RunFolder

NOTEBOOKS = ("health.ipynb",)
EXAMPLES = Path(__file__).parents[1] / "examples" / "own-data"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.py")))
@pytest.mark.thorough_for("text", "own_model", "regression")
def test_an_example_ends_with_a_picture_and_a_guarantee(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--rounds", "1", "--picture", "found.svg"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "whole run" in capsys.readouterr().out
    assert (tmp_path / "found.svg").stat().st_size > 1000
    assert [file.name for file in tmp_path.iterdir() if file.name != "cache"] == ["found.svg"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.thorough
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # of somebody's rows, in other notebooks
            exec(compile("".join(cell["source"]), name, "exec"), names)
    assert names["result"].score > 0.6  # type: ignore[attr-defined]


HOSPITALS = EXAMPLES.parent / "flower-hospitals"


@pytest.mark.slow
@pytest.mark.thorough
def test_three_hospitals_train_a_network_of_their_own_with_each_row_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Their policy, budgets and processes as on machines of their own."""
    app, made = tmp_path / "app", tmp_path / "made"
    shutil.copytree(HOSPITALS, app, ignore=shutil.ignore_patterns("__pycache__"))
    config = app / "flower_hospitals" / "config.toml"
    config.write_text(config.read_text(encoding="utf-8").replace("rounds = 30", "rounds = 2"), encoding="utf-8")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["simulate.py", str(made)])
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setenv("COLUMNS", "120")
    runpy.run_path(str(app / "simulate.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "This node may send 2 reports of dp-sgd (direct)" in shown
    assert "any one of this client's records" in shown
    assert "one record, whole run" in shown
    checkpoint = RunFolder(made / "run").checkpoint()
    assert checkpoint is not None
    assert [metrics.clients for metrics in checkpoint.history] == [3, 3]
    assert {event.release.unit for event in checkpoint.ledger.events} == {"record"}
    assert "replaced" not in caplog.text
    assert len(list((made / "budgets").glob("client-?.sqlite"))) == 3


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pretrained_model_is_fine_tuned_in_three_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    small = ["--rounds", "1", "--epochs", "1", "--clients", "2", "--texts", "10", "--seeds", "1", "--rates", "0.1", "1.0"]
    monkeypatch.setattr(sys, "argv", ["fine_tuning.py", *small])
    runpy.run_path(str(EXAMPLES.parent / "adapters" / "fine_tuning.py"), run_name="__main__")
    table = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == ["head", "lora", "none"]
    kept = Path("adapters", "figures.jsonl").read_text()
    runpy.run_path(str(EXAMPLES.parent / "adapters" / "fine_tuning.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-3:] == table
    assert Path("adapters", "figures.jsonl").read_text() == kept
