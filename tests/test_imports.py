"""Arrows point downwards only, and importing the package stays cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ldpfl

PACKAGE = Path(ldpfl.__file__).parent
SLOW = ("flwr", "matplotlib", "datasets")


def loaded_by(module: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after importing ``module``."""
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout))


def test_importing_the_package_loads_nothing_slow() -> None:
    loaded = loaded_by("ldpfl")
    assert "ldpfl.mechanisms" in loaded
    assert not loaded & set(SLOW)
    assert all(find_spec(name) for name in ("matplotlib", "datasets"))  # they are installed, so the line above means something


def test_the_command_line_starts_without_plots_and_data_sets() -> None:
    assert not loaded_by("ldpfl.cli") & set(SLOW)


@pytest.mark.parametrize("package", ["mechanisms", "privacy"])
def test_the_lower_floors_load_nothing_of_the_upper_ones(package: str) -> None:
    upper = {f"ldpfl.{name}" for name in ("simulation", "flower", "report", "cli", "experiments", "data", "server", "models")}
    assert not loaded_by(f"ldpfl.{package}") & upper


@pytest.mark.parametrize("package", ["mechanisms", "privacy"])
def test_the_lower_floors_import_nothing_of_the_upper_ones_later_either(package: str) -> None:
    """An import inside a function would escape the test above."""
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for file in files:
        for name in imported(file):
            assert name.split(".")[:2] not in [["ldpfl", upper] for upper in ("simulation", "flower", "report", "cli", "experiments")], file


def imported(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_the_public_names_of_the_design_are_there() -> None:
    for name in ("mechanisms", "LayerRanges", "ParameterLayout", "LdpflError", "ConfigError", "DataError", "PrivacyError"):
        assert hasattr(ldpfl, name)
    for error in (ldpfl.ConfigError, ldpfl.DataError, ldpfl.PrivacyError, ldpfl.BudgetExhausted, ldpfl.ProtocolError):
        assert issubclass(error, ldpfl.LdpflError)
