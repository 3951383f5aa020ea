"""Nothing that a server sends is imported, opened as a path, or run on a node: neither from the round's terms nor from the run config."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKING = Path(__file__).parent / "ask_a_node.py"


@pytest.mark.slow
@pytest.mark.thorough
def test_what_a_server_names_is_never_touched(tmp_path: Path) -> None:
    """Some 250 rounds, watched by the interpreter's audit hook, with a module and a file of that name where they would be found."""
    (tmp_path / "zebrafinch.py").write_text("def boom(**options): raise SystemExit\n", encoding="utf-8")
    (tmp_path / "zebrafinch").write_text("1", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "LDPFL_DATA_DIR": str(tmp_path)}
    command = [sys.executable, str(ASKING), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 250
