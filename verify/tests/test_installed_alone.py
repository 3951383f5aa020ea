"""The package works where nothing else is installed: no ldpfl, no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from golden_files import CERTIFICATE, LEDGER

PACKAGE = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_an_auditor_needs_one_pip_install(tmp_path: Path) -> None:
    """It downloads NumPy, SciPy, mpmath and the build system unless pip has them."""
    venv.create(tmp_path / "venv", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    programs = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")

    def run_program(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([programs / program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)

    installed = run_program("python", "-m", "pip", "install", "--quiet", PACKAGE)
    assert installed.returncode == 0, installed.stderr
    checked = run_program("ldpfl-verify", CERTIFICATE, "--ledger", LEDGER)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count("  confirmed  ") == 3
    without = run_program("python", "-c", "import ldpfl")
    assert without.returncode == 1
    assert "No module named 'ldpfl'" in without.stderr
    names = set(run_program("python", "-m", "pip", "list", "--format", "freeze").stdout.lower().replace("_", "-").split())
    assert {name.split("==")[0] for name in names} <= {"ldpfl-verify", "mpmath", "numpy", "scipy", "pip", "setuptools"}
