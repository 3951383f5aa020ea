"""The examples with own data run as their pages say, for a round."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

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
