"""The examples with own data run as their pages say, for a round."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "own-data"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.py")))
def test_an_example_ends_with_a_picture_and_a_guarantee(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--rounds", "1", "--picture", "found.svg"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "whole run" in done.stdout
    assert (tmp_path / "found.svg").stat().st_size > 1000
    assert [file.name for file in tmp_path.iterdir() if file.name != "cache"] == ["found.svg"]
