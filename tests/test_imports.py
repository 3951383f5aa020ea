"""Arrows point downwards only, and importing the package stays cheap."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Set
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import click
import pytest
import typer

import ldpfl
from ldpfl.cli import app
from ldpfl.cli.commands import Commands, command
from ldpfl.privacy import BinaryRelease, Ledger, RoundEvent
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.events import OURS

PACKAGE = Path(ldpfl.__file__).parent
SLOW = ("flwr", "matplotlib", "datasets")


def loaded_by(module: str) -> set[str]:
    """Names of all modules that a fresh interpreter holds after importing ``module``."""
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_relay_needs_neither_pytorch_nor_scipy() -> None:
    assert not loaded_by("ldpfl.relay.serve") & {"torch", "scipy"}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_decides_without_scipy_s_slow_parts_and_without_a_server_s() -> None:
    """Each message to a node starts a process, and who trains waits for what it imports."""
    slow = {"scipy.stats", "scipy.signal", "scipy.optimize", "dp_accounting", "torchmetrics"}
    assert not loaded_by("ldpfl.flower.apps") & {
        *slow,
        "ldpfl.flower.strategy",
        "ldpfl.flower.relay_collection",
        "ldpfl.experiments.runner",
    }


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_makes_a_model_without_pytorch_s_compiler() -> None:
    code = (
        "import sys, ldpfl.models; ldpfl.models.create('two-layer-cnn', (1, 28, 28), 10, seed=0); sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_starts_without_plots_and_data_sets() -> None:
    assert not loaded_by("ldpfl.cli") & set(SLOW)


WITHOUT_EXTRAS = """
import sys

EXTRAS = "flwr httpx mlflow onnx onnxscript peft psycopg ray sqlalchemy starlette tensorboard transformers uvicorn wandb".split()

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import ldpfl
for name in ldpfl.__all__:
    getattr(ldpfl, name)
ldpfl.plan(epsilon=1.0, clients=100, weights=50, rounds=2)
from ldpfl.cli import main
sys.argv = ["ldpfl", "plan", "--epsilon", "1", "--clients", "100", "--weights", "50", "--rounds", "2", "--cost"]
main()
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_the_front_door_and_a_plan_need_no_extra() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


FLOORS = (
    ("errors", "version"),
    ("util",),
    ("models", "tasks"),
    ("data", "privacy"),
    ("mechanisms",),
    ("transport",),
    ("auditing", "relay", "server"),
    ("simulation",),
    ("experiments",),
    ("attacks", "flower"),
    ("report",),
    ("deploy",),
    ("api",),
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


VERIFIER = PACKAGE.parents[1] / "verify" / "src" / "ldpfl_verify"


def test_the_verifier_imports_nothing_of_the_package_and_no_accountant_imports_the_verifier() -> None:
    """Else a fault of one implementation could be a fault of the other."""
    files = sorted(VERIFIER.rglob("*.py"))
    assert len(files) > 10
    used = {name for file in files for name in imported(ast.parse(file.read_bytes()), f"ldpfl_verify.{file.stem}", {})}
    assert {name for name in used if name.split(".")[0] == "ldpfl"} == set()
    assert {name.split(".")[0] for name in used} - sys.stdlib_module_names == {"ldpfl_verify", "mpmath", "numpy", "scipy"}
    users = {
        module_of(file)
        for file in PACKAGE.rglob("*.py")
        if b"ldpfl_verify" in (text := file.read_bytes())  # to parse all modules takes seconds
        and any(name.split(".")[0] == "ldpfl_verify" for name in imported(ast.parse(text), module_of(file), {}))
    }
    assert users == {"ldpfl.api.certified_lines", "ldpfl.api.certifying", "ldpfl.api.verifying", "ldpfl.cli.certificates"}


COMMAND_LINE_MAY_USE = ("api", "cli", "errors", "report.console", "util")
"""What the command line imports of the package beside tables and progress bars: the front door, errors, and helpers."""

FORMATS = tuple(f"report.{name}" for name in ("attacks", "linkage", "privacy", "progress", "terminal_tables", "scores"))
"""Modules that format figures for a terminal."""

NOT_YET_BY_THE_FRONT_DOOR: Mapping[str, Set[str]] = {
    "demo_display": {"deploy.demo", "deploy.demo_settings", "flower.round_kinds", "tasks"},
    "runs": {"experiments.run_folder", "report.watching"},
}
"""Modules of the package that commands still import themselves, by command. Remove what is mended; add nothing."""


@pytest.mark.slow
def test_commands_use_the_front_door() -> None:
    """A command parses, calls a function of ``api``, and prints: what it does is there for Python as well."""
    allowed = tuple(f"ldpfl.{name}" for name in (*COMMAND_LINE_MAY_USE, *FORMATS))
    found = {}
    for file in sorted((PACKAGE / "cli").glob("*.py")):
        names = imported(ast.parse(file.read_bytes()), module_of(file), {}, file.stem == "__init__")
        modules = {name for name in names if name.startswith("ldpfl.") and name in modules_of_the_package()}
        others = {name for name in modules if not any(name == one or name.startswith(f"{one}.") for one in allowed)}
        bases = {name for name in others if any(other.startswith(f"{name}.") for other in others)}
        if others - bases:
            found[file.stem] = {name.removeprefix("ldpfl.") for name in others - bases}
    assert found == NOT_YET_BY_THE_FRONT_DOOR


@cache
def modules_of_the_package() -> frozenset[str]:
    return frozenset(map(module_of, PACKAGE.rglob("*.py")))


def room_of(module: str) -> str:
    return module.split(".")[1]


@cache
def graph() -> dict[str, set[str]]:
    """Which modules of the package each of them imports, the packages that it lies in aside."""
    texts = {file: file.read_bytes() for file in PACKAGE.rglob("*.py")}
    trees = {module_of(file): (ast.parse(text), file.stem == "__init__") for file, text in texts.items()}
    lazy = [module_of(file) for file, text in texts.items() if b"lazy_imports" in text]  # to look through every module takes seconds
    lazily = {module: homes for module in lazy if (homes := exported(trees[module][0]))}
    return {
        module: {
            name
            for name in imported(tree, module, lazily, package)
            if name in trees and name != module and not module.startswith(f"{name}.")
        }
        for module, (tree, package) in trees.items()
    }


def module_of(file: Path) -> str:
    parts = ["ldpfl", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


Homes = Mapping[str, str]
"""Of each name that a lazy package exports, the module."""


def exported(tree: ast.Module) -> Homes:
    """Return what a package exports when it is first used; nothing of one that does not call ``lazy_imports.exports``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == ["lazy_imports", "exports"]:
            names: Mapping[str, Collection[str]] = ast.literal_eval(node.args[1])
            return {name: module for module, exports in names.items() for name in exports}
    return {}


def imported(tree: ast.Module, module: str, lazily: Mapping[str, Homes], package: bool = False) -> set[str]:
    """Return what a module imports: at its head, in functions, relative to itself, by the name of a lazy export, or by a string.

    What a lazy package exports it names for type checkers only.
    """
    all_nodes = [*ast.walk(tree)]
    for_type_checkers = {
        inner
        for node in all_nodes
        if module in lazily and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = [node for node in all_nodes if node not in for_type_checkers]
    roots = {"ldpfl"} | {alias.asname for node in nodes if isinstance(node, ast.Import) for alias in node.names if alias.name == "ldpfl"}
    names = {name for node in nodes for name in named(node, module if package else module.rpartition(".")[0], roots, lazily)}
    return names | {homes[name] for lazy, homes in lazily.items() for name in homes if f"{lazy}.{name}" in names}


def named(node: ast.AST, package: str, roots: Set[str | None], lazily: Mapping[str, Homes]) -> set[str]:
    """Return the modules, or what of them, that a part of a module in ``package`` names, where ``roots`` stand for ours."""
    match node:
        case ast.Import(names=aliases):
            return {alias.name for alias in aliases}
        case ast.ImportFrom(module=said, names=aliases, level=level):
            base = resolve_name("." * level + (said or ""), package)
            found = {alias.name for alias in aliases}
            return {base, *(f"{base}.{name}" for name in (lazily.get(base, {}) if "*" in found else found))}
        case ast.Attribute() if (parts := dotted(node)) and parts[0] in roots:
            return {".".join(["ldpfl", *parts[1:]])}
        case ast.Call(args=[ast.Constant(value=str(said)), *_]) if dotted(node.func)[-1:] in (["import_module"], ["__import__"]):
            return {resolve_name(said, package)}
    return set()


def dotted(node: ast.AST) -> list[str]:
    """Return the parts of ``a.b.c``; none of what is no chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


LAZY = {"ldpfl": {"plan": "ldpfl.api", "mechanisms": "ldpfl.mechanisms"}}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ldpfl.mechanisms.base", "ldpfl.mechanisms.base"),
        ("import ldpfl.mechanisms.base as base", "ldpfl.mechanisms.base"),
        ("from ldpfl.mechanisms.base import Mechanism", "ldpfl.mechanisms.base"),
        ("from ldpfl.mechanisms import base", "ldpfl.mechanisms.base"),
        ("def late():\n    from ldpfl.mechanisms import base", "ldpfl.mechanisms.base"),
        ("from ..mechanisms.base import Mechanism", "ldpfl.mechanisms.base"),
        ("from .. import mechanisms", "ldpfl.mechanisms"),
        ("from . import events", "ldpfl.privacy.events"),
        ("from .events import Release", "ldpfl.privacy.events"),
        ("from ldpfl import plan", "ldpfl.api"),
        ("from ldpfl import plan as foreseen", "ldpfl.api"),
        ("from ldpfl import *", "ldpfl.api"),
        ("import ldpfl\nldpfl.mechanisms.create", "ldpfl.mechanisms"),
        ("import ldpfl\nldpfl.plan(epsilon=1.0)", "ldpfl.api"),
        ("import ldpfl as ours\nours.plan(epsilon=1.0)", "ldpfl.api"),
        ('from importlib import import_module\nimport_module("ldpfl.mechanisms.base")', "ldpfl.mechanisms.base"),
        ('import importlib\nimportlib.import_module("..mechanisms.base", __package__)', "ldpfl.mechanisms.base"),
        ('__import__("ldpfl.mechanisms")', "ldpfl.mechanisms"),
        ("from ldpfl.mechanisms import base  # not for lazy_imports.exports", "ldpfl.mechanisms.base"),
        ("if TYPE_CHECKING:\n    from ldpfl.mechanisms import base", "ldpfl.mechanisms.base"),
    ],
)
def test_every_way_to_import_is_seen(source: str, found: str) -> None:
    assert found in imported(ast.parse(source), "ldpfl.privacy.ledger", LAZY)
    assert "ldpfl.api" not in imported(ast.parse(source.replace("ldpfl", "other")), "ldpfl.privacy.ledger", LAZY)


def test_of_a_lazy_package_only_what_is_for_type_checkers_is_not_imported() -> None:
    call = '__getattr__, __dir__ = lazy_imports.exports(__name__, {"ldpfl.api": ("plan",)})'
    head = "from ldpfl.util import lazy_imports"
    tree = ast.parse(f"{head}\nif TYPE_CHECKING:\n    from ldpfl.api import plan\n{call}\nfrom .privacy import Ledger")
    assert exported(tree) == {"plan": "ldpfl.api"}
    assert exported(ast.parse(f"# {call}")) == {}
    found = imported(tree, "ldpfl", {"ldpfl": exported(tree)}, package=True)
    assert found == {"ldpfl.util", "ldpfl.util.lazy_imports", "ldpfl.privacy", "ldpfl.privacy.Ledger"}


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


HEAVY = {"torch", "matplotlib", "pandas", "pyarrow", "datasets", "PIL", "sklearn", "flwr"}


@pytest.mark.slow
@pytest.mark.thorough
def test_planning_and_accounting_need_no_pytorch(tmp_path: Path) -> None:
    """All in one process, for each takes most of a second: the first that loads something heavy is named."""
    ledger = Ledger().charge(RoundEvent(1, BinaryRelease("duchi", 1.0, 1, author=OURS), 10, 10, 1))
    ledger.save(tmp_path / "ledger.json")
    set_limit(tmp_path / "budget.db", 1.0, 1e-5)
    arguments = {"epsilon": 1.0, "clients": 100, "weights": 1, "rounds": 1}
    plan = ["plan", "--weights", "1", "--rounds", "1"]
    code = f"""
import json, os, sys
import ldpfl
import ldpfl.experiments.planning.planner
from ldpfl.cli import app

loaded = {{}}
def look(name):
    loaded[name] = sorted({HEAVY} & set(sys.modules))

def run(*arguments):
    try:
        app(list(arguments), standalone_mode=False)
    except SystemExit as stop:
        loaded["exit code of " + arguments[0]] = [stop.code] if stop.code else []
    look(arguments[0] + " " + arguments[-1])

out, sys.stdout = sys.stdout, open(os.devnull, "w")
run(*{[*plan, "--epsilon", "1", "--clients", "100"]})
loaded["slow parts of SciPy"] = sorted({{"scipy.stats", "dp_accounting"}} & set(sys.modules))
run(*{[*plan, "--epsilon", "1", "--target-central", "0.5"]})
run(*{[*plan, "--clients", "100", "--target-central", "0.5", "--json"]})
for name in ("harmony", "duchi-vector", "rotated-sign", "privunit-g", "laplace", "piecewise", "none"):
    planned = ldpfl.experiments.planning.planner.Setting(1.0, 100, 10, 2, mechanism=name, layers=2)
    planned.build().noise(planned.ranges()).largest_std(100), planned.release
look("of other mechanisms")
run("ledger", "ledger.json")
run("budget", "show", "--file", "budget.db")
ldpfl.plan(**{arguments})
ldpfl.plan_regime
print(ldpfl.account("ledger.json"))
look("in Python")
print(json.dumps(loaded), file=out)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name: found for name, found in json.loads(done.stdout.splitlines()[-1]).items() if found} == {}


@pytest.mark.slow
def test_a_certificate_is_verified_without_pytorch(tmp_path: Path) -> None:
    ledger = Ledger().charge(RoundEvent(1, BinaryRelease("duchi", 1.0, 1, author=OURS), 10, 10, 1))
    ledger.save(tmp_path / "ledger.json")
    (tmp_path / "certificate.json").write_text(ldpfl.certify(tmp_path / "ledger.json").to_json())
    verify = ["verify", "certificate.json", "--ledger", "ledger.json", "--json"]
    code = f"import json, sys; from ldpfl.cli import app; app({verify}, standalone_mode=False); print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert not set(json.loads(done.stdout.splitlines()[-1])) & HEAVY


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
