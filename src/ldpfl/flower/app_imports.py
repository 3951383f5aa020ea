"""What Flower runs of an app when it imports it, before any wrapper is there; found by reading, without running anything."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Literal, TypeGuard

from ldpfl.errors import ConfigError
from ldpfl.util.files import from_toml, read_text

_QUIET = ("__future__", "ldpfl", "flwr", "typing")
"""Packages that touch no data when they are imported."""

_PLAIN = ("__all__", "__author__", "__license__", "__version__")
_READY = "ldpfl.flower.apps"
_WRAPPER = "LdpClientApp"
_PATHS = ("app", "records")
"""Arguments of it that are import paths."""
_SAID = ("persons",)
"""Arguments of it that are True or False."""
_WRAPPERS = {(_WRAPPER, "ldpfl.flower"), (_WRAPPER, "ldpfl.flower.client_app")}


def run_at_import(app: Path) -> Iterator[str]:
    """Yield what Flower's ClientApp process runs of the app in this folder beside making its wrapper: as ``file:line``, or in words.

    The text of an exception there reaches the server, whatever it repeats, for any message and without a charge: so the module that
    Flower imports, and the packages that it lies in, are to hold nothing but ``LdpClientApp("package.module:name")``, or that of
    records.

    Raises:
        ConfigError: the app names no client module, or that cannot be read.
    """
    module = _client_module(app)
    app = app.resolve()
    own_names = frozenset(entry.name.removesuffix(".py") for entry in app.iterdir())
    yield from _in_place_of_others(app, module.partition(".")[0])
    yield from _in_place_of_sources(app)
    for name, spec in _imported(app, module):
        if spec is None:
            yield f"{name}, which is not in this folder and cannot be checked here"
        elif spec.origin is None:
            continue  # a folder without __init__.py: nothing runs
        elif not spec.origin.endswith(".py"):
            yield f"{Path(spec.origin).relative_to(app)}, which is no source and cannot be read"
        else:
            file = Path(spec.origin)
            yield from (f"{file.relative_to(app)}:{line}" for line in _statements(file, own_names))


def gives(app: Path) -> Literal["weights", "gradients", "gradients of persons", "ready", "unknown"]:
    """Return what clients of the app in this folder give, by the call of ``LdpClientApp`` in its client module; nothing is run.

    That is ``ready`` where the client is ldpfl's own, which trains the model that a config names. Weights and gradients are those of a
    model of the app's own; gradients of persons come from an app that says whose its records are.
    """
    try:
        if (module := _client_module(app)) == _READY:
            return "ready"
        spec = list(_imported(app.resolve(), module))[-1][1]
        body = ast.parse(Path((spec and spec.origin) or "").read_bytes()).body
    except (ConfigError, OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return "unknown"
    if any(isinstance(node, ast.ImportFrom) and node.module == _READY for node in body):
        return "ready"
    for call in (node.value for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        if _calls_wrapper(call):
            named = {keyword.arg for keyword in call.keywords}
            of_persons = any(keyword.arg == "persons" and _is_true(keyword.value) for keyword in call.keywords)
            if "records" in named:
                return "gradients of persons" if of_persons else "gradients"
            return "unknown" if "gradients" in named else "weights"
    return "unknown"


def _client_module(app: Path) -> str:
    try:
        tree = from_toml(read_text(app / "pyproject.toml"))
        return str(tree["tool"]["flwr"]["app"]["components"]["clientapp"]).partition(":")[0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{app / 'pyproject.toml'} names no clientapp in [tool.flwr.app.components]") from error


def _imported(app: Path, module: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Yield the packages that ``module`` lies in, and itself, as Python would find them with ``app`` first in its path."""
    importlib.invalidate_caches()
    places: list[str] = [str(app)]
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = PathFinder.find_spec(name, places)
        yield name, spec
        if spec is None or spec.submodule_search_locations is None:
            return
        places = list(spec.submodule_search_locations)


def _in_place_of_others(app: Path, own: str) -> Iterator[str]:
    """Yield what Python imports from this folder where others, ldpfl among them, mean a module of the same name elsewhere."""
    elsewhere = (sys.stdlib_module_names | _installed() | _looked_for()) - {own}
    for entry in sorted(app.iterdir()):
        name = entry.name.partition(".")[0]
        is_module = entry.suffix in (".py", ".so", ".pyd") or (entry / "__init__.py").is_file()
        if name in elsewhere and (is_module or (entry.is_dir() and _is_open(name))):
            yield f"{entry.name}, which is imported in place of the module {name} that others mean"


@cache
def _installed() -> frozenset[str]:
    """Return the modules at the top of all packages that are installed; reading what lists their files takes half a second."""
    return frozenset(packages_distributions())


def _is_open(name: str) -> bool:
    """Tell whether a folder without ``__init__.py`` would be this package, or a part of it: where no other is, or only such ones are."""
    spec = PathFinder.find_spec(name, _path_elsewhere())
    return name not in sys.builtin_module_names and (spec is None or spec.origin is None)


def _path_elsewhere() -> list[str]:
    """Return where Python looks for modules, without the current folder, which may be the app's."""
    here = Path.cwd().resolve()
    return [str(place) for entry in sys.path if entry and (place := Path(entry).resolve()) != here]


@contextmanager
def apps_left_out() -> Iterator[None]:
    """Let no module of an app's folder be found, which Flower puts first: libraries look for some that they can do without."""
    apps = [entry for entry in sys.path if _is_app(Path(entry))]
    sys.path[:] = [entry for entry in sys.path if entry not in apps]
    try:
        yield
    finally:
        sys.path[:0] = [entry for entry in apps if entry not in sys.path]  # another thread may have put them back


def _is_app(folder: Path) -> bool:
    try:
        return "app" in from_toml(read_text(folder / "pyproject.toml"))["tool"]["flwr"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


_LOOK = """
import json, sys
seen = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        seen.append(name)
sys.meta_path.insert(0, Spy())
import ldpfl.flower.client_app, ldpfl.flower.confined_process, ldpfl.relay.clients
import contextlib, httpx
with contextlib.suppress(Exception):  # what is looked for when a node calls its relay; nobody listens there
    httpx.get("http://127.0.0.1:9", timeout=0.1, trust_env=False)
print(json.dumps(sorted({name.partition(".")[0] for name in seen})))
"""


@cache
def _looked_for() -> frozenset[str]:
    """Return the modules that are looked for, found or not, when the wrapper is imported or calls a relay, those that are not there too.

    The current folder may be the app's, of which nothing is to run: so it is nowhere in the path of the process that looks.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_path_elsewhere())}
    command = [sys.executable, "-P", "-c", _LOOK]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent).stdout
    return frozenset(json.loads(found))


def _in_place_of_sources(app: Path) -> Iterator[str]:
    """Yield what Python may run instead of the sources that are read here.

    Bytecode can say that it need not be compared with them. And libraries run what the metadata of packages name as their plug-ins.
    """
    for file in sorted(app.rglob("*.py[co]")):
        yield f"{file.relative_to(app)}, which Python may run in place of its source: delete it"
    for entry in sorted(app.iterdir()):
        if entry.suffix in (".dist-info", ".egg-info", ".egg", ".pth"):
            yield f"{entry.name}, by which libraries find code to run: delete it"


def _statements(file: Path, own: frozenset[str]) -> Iterator[int]:
    try:
        body = ast.parse(file.read_bytes()).body  # in the encoding that the file says, as Python reads it
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two of what is nested too deeply
        raise ConfigError(f"{file} cannot be read: {error or type(error).__name__}") from None
    return (node.lineno for node in body if not _is_quiet(node, own))


def _is_quiet(node: ast.stmt, own: frozenset[str]) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.asname != _WRAPPER and _touches_nothing(alias.name, own) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        # What is called like the wrapper is taken for it below.
        others = [alias for alias in node.names if (alias.asname or alias.name) == _WRAPPER and (alias.name, node.module) not in _WRAPPERS]
        return node.level == 0 and not others and _touches_nothing(node.module or "", own)
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        moving = any(name.startswith("__") and name not in _PLAIN for name in names)  # such as __path__, which says where modules lie
        return len(names) == len(node.targets) and not moving and (_is_constant(node.value) or _is_wrapper(node.value))
    return isinstance(node, ast.Expr) and _is_constant(node.value)


def _touches_nothing(module: str, own: frozenset[str]) -> bool:
    first = module.partition(".")[0]
    return first in _QUIET and first not in own  # a package of the app's own may be called as one of these


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (isinstance(value, ast.List | ast.Tuple) and all(map(_is_constant, value.elts)))


def _is_wrapper(value: ast.expr) -> bool:
    """Tell whether it is a call of ``LdpClientApp`` with one import path, of an app or of records, and no other code."""
    if not _calls_wrapper(value):
        return False
    keywords = [keyword for keyword in value.keywords if not (keyword.arg in _SAID and isinstance(keyword.value, ast.Constant))]
    given = [*value.args, *(keyword.value for keyword in keywords if keyword.arg in _PATHS)]
    alone = len(given) == len(value.args) + len(keywords) == 1
    return alone and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str)


def _calls_wrapper(value: ast.expr | None) -> TypeGuard[ast.Call]:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == _WRAPPER
