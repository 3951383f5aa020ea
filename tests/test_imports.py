"""Arrows point downwards only, and importing the package stays cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest
import typer

import ldpfl
from ldpfl.cli import app
from ldpfl.cli.commands import Commands, command

PACKAGE = Path(ldpfl.__file__).parent
SLOW = ("flwr", "matplotlib", "datasets")


def loaded_by(module: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after importing ``module``."""
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout))


@pytest.mark.slow
def test_a_relay_needs_neither_pytorch_nor_scipy() -> None:
    assert not loaded_by("ldpfl.relay.serve") & {"torch", "scipy"}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_decides_without_scipy_s_slow_parts() -> None:
    """Each message to a node starts a process, and who trains waits for what it imports."""
    assert not loaded_by("ldpfl.flower.apps") & {"scipy.stats", "scipy.signal", "dp_accounting", "torchmetrics"}


def test_the_command_line_starts_without_plots_and_data_sets() -> None:
    assert not loaded_by("ldpfl.cli") & set(SLOW)


FLOORS = (
    ("entropy", "errors", "number_format", "suggestions", "supervisor", "lazy", "version"),
    ("file_owners", "files", "importing", "keys", "layout", "quantities", "randomness", "ranges"),
    ("cache", "models", "tasks", "verifying"),
    ("data", "privacy", "relay"),
    ("features", "mechanisms"),
    ("auditing", "planning", "shuffling"),
    ("server",),
    ("simulation",),
    ("experiments",),
    ("attacks", "flower"),
    ("report",),
    ("api", "deploy"),
    ("cli",),
    ("__main__",),
)
"""Rooms, from the lowest floor up: a room imports lower floors only, and none beside it."""


@pytest.mark.slow
@pytest.mark.xdist_group("arrows")  # all modules are read once a process
def test_arrows_point_downwards_only() -> None:
    """Also those of imports inside functions, which would escape a look at what is loaded."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert floor.keys() == {room_of(module) for module in graph() if module != "ldpfl"}
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if "ldpfl" not in (module, other) and room_of(other) != room_of(module) and floor[room_of(other)] >= floor[room_of(module)]
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.xdist_group("arrows")
def test_no_module_imports_itself_by_way_of_others() -> None:
    assert len(tuple(TopologicalSorter(graph()).static_order())) == len(graph())  # raises a CycleError otherwise


def room_of(module: str) -> str:
    return module.split(".")[1]


@cache
def graph() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, the packages that it lies in aside."""
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    return {
        module: {name for name in imported(file) if name in files and name != module and not module.startswith(f"{name}.")}
        for module, file in files.items()
    }


def module_of(file: Path) -> str:
    parts = ["ldpfl", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> set[str]:
    """Return what a file imports. What a lazy package exports it names for type checkers only."""
    text = file.read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and "lazy.exports" not in text:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_the_public_names_of_the_design_are_there() -> None:
    for name in ("mechanisms", "LayerRanges", "ParameterLayout", "LdpflError", "ConfigError", "DataError", "PrivacyError"):
        assert hasattr(ldpfl, name)
    for error in (ldpfl.ConfigError, ldpfl.DataError, ldpfl.PrivacyError, ldpfl.BudgetExhausted, ldpfl.ProtocolError):
        assert issubclass(error, ldpfl.LdpflError)


@pytest.mark.slow
def test_a_help_text_and_a_list_of_recipes_load_nothing_that_computes() -> None:
    for arguments in (["--help"], ["--version"], ["recipes"]):
        run = f"from ldpfl.cli import app; app({arguments!r}, standalone_mode=False)"
        code = f"import json, sys; {run}; print(json.dumps(list(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        loaded = set(json.loads(done.stdout.splitlines()[-1]))
        assert "ldpfl.cli.commands" in loaded
        assert not loaded & {"torch", "scipy", "numpy", "pydantic", *SLOW}, arguments


def test_importing_the_package_computes_nothing_and_gives_all_that_it_names() -> None:
    assert not loaded_by("ldpfl") & {"torch", "scipy", "numpy", "pydantic", *SLOW}
    assert set(dir(ldpfl)) <= {*ldpfl.__all__, *vars(ldpfl)}
    for name in ldpfl.__all__:
        assert getattr(ldpfl, name) is getattr(ldpfl, name), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ldpfl.nothing  # noqa: B018


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    context = click.Context(group)
    for name in group.list_commands(context):
        shown = group.get_command(context, name)
        assert shown is not None
        own = (command(name).help or "").replace("\b", "").strip().split("\n\n")[0]
        assert shown.help == " ".join(own.split()), name
    assert group.get_command(context, "nothing") is None
