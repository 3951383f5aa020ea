"""Find the code that Flower runs when it imports an app, before ``LdpClientApp`` protects anything. Sources are parsed, never run."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Literal, TypeGuard

from ldpfl.errors import ConfigError
from ldpfl.privacy.events import OURS
from ldpfl.util.files import from_toml, read_text

_QUIET_PACKAGES = ("__future__", "ldpfl", "flwr", "typing")
"""Packages whose import reads no data."""

_ALLOWED_SPECIAL_NAMES = ("__all__", "__author__", "__license__", "__version__")
_READY_MODULE = "ldpfl.flower.apps"
_WRAPPER = "LdpClientApp"
_PATH_ARGUMENTS = ("app", "records")
"""Arguments of ``LdpClientApp`` that are import paths."""
_FLAG_ARGUMENTS = ("persons",)
"""Arguments of ``LdpClientApp`` that are True or False."""
_UNREADABLE = (ConfigError, OSError, SyntaxError, ValueError, MemoryError, RecursionError)
"""Errors of a module that cannot be found, read or parsed. The last two are for code that is nested too deeply."""

_MAX_PLACES = 5
"""Maximum number of places that a message names."""

_WRAPPERS = {(_WRAPPER, "ldpfl.flower"), (_WRAPPER, "ldpfl.flower.client_app")}


def unwrapped_code(app: Path) -> Iterator[str]:
    """Yield each place in the app whose code Flower's ClientApp process runs outside the wrapper, as ``file:line`` or in words.

    Such code is dangerous. Flower sends the text of its exceptions to the server, whatever data the text repeats, and no budget is
    charged. So the module that Flower imports, and the packages that contain it, may hold nothing but
    ``LdpClientApp("package.module:name")`` or ``LdpClientApp(records="package.module:name")``.

    Raises:
        ConfigError: the app names no client module, or the module cannot be read. It is raised only while the places are iterated over.
    """
    module = _client_module(app)
    app = app.resolve()
    app_modules = frozenset(entry.name.removesuffix(".py") for entry in app.iterdir())
    yield from _find_shadowing_modules(app, module.partition(".")[0])
    yield from _find_code_beside_sources(app)
    for name, spec in _find_specs(app, module):
        if spec is None and name == OURS:
            continue  # ldpfl's own client, which lies where ldpfl is installed
        if spec is None:
            yield f"{name}, which is not in this folder and cannot be checked here"
        elif spec.origin is None:
            continue  # a folder without __init__.py: nothing runs
        elif not spec.origin.endswith(".py"):
            yield f"{Path(spec.origin).relative_to(app)}, which is not a Python source file (.py) and cannot be checked"
        else:
            file = Path(spec.origin)
            yield from (f"{file.relative_to(app)}:{line}" for line in _active_lines(file, app_modules))


def unwrapped_code_text(places: Sequence[str]) -> str:
    """Return a warning of the ``places`` that :func:`unwrapped_code` found."""
    named = f"{', '.join(places[:_MAX_PLACES])}{' and more' if len(places) > _MAX_PLACES else ''}"
    return (
        f"Flower runs {named} of this app outside of the policy's control: what this code replies, and the text of its errors, reach the "
        'server without noise. Only LdpClientApp("package.module:name") belongs there (docs/flower.md)'
    )


def bare_client(app: Path) -> str:
    """Return the import path of the app's client if it is certainly Flower's ClientApp without a wrapper; else "".

    Nothing is run. To be certain, only one statement of the module may assign the client's name, and it must assign a call. Likewise, only
    one import may bind the first part of the called name, such as ``flwr``. It must import from Flower, and the call must be of ClientApp.
    """
    try:
        path = _component(app, "clientapp")
        module, _, name = path.partition(":")
        body = _body_of(app, module)
    except _UNREADABLE:
        return ""
    assigned = [node.value for node in body if isinstance(node, ast.Assign | ast.AnnAssign) and _only_target(node) == name]
    if len(assigned) != 1 or sum(_may_bind(node, name) for node in body) != 1 or not isinstance(assigned[0], ast.Call):
        return ""
    first, _, rest = ast.unparse(assigned[0].func).partition(".")  # such as ClientApp and "", or flwr and clientapp.ClientApp
    sources = [  # what the module's imports bind to the name `first`
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if first == (alias.asname or alias.name.partition(".")[0])
    ]
    if len(sources) != 1 or sum(_may_bind(node, first) for node in body) != 1:
        return ""
    is_flowers = sources[0].partition(".")[0] == "flwr"
    return path if is_flowers and (rest or sources[0]).endswith("ClientApp") else ""


def _may_bind(node: ast.stmt, name: str) -> bool:
    """Tell whether the statement may assign ``name`` in its module, at whatever depth."""
    for part in ast.walk(node):
        if isinstance(part, ast.alias):  # an imported name; "*" may import any
            found = (part.asname or part.name.partition(".")[0]) in (name, "*")
        elif isinstance(part, ast.Name):
            found = part.id == name and not isinstance(part.ctx, ast.Load)
        else:  # a function, a class, a pattern, or a `global` statement
            found = name == getattr(part, "name", None) or name in getattr(part, "names", ())
        if found:
            return True
    return False


def client_output(app: Path) -> Literal["weights", "gradients", "gradients of persons", "ready", "unknown"]:
    """Return what clients of the app in this folder hand to ldpfl, judged by the object that its ``pyproject.toml`` names as clientapp.

    Nothing is run. ``ready`` means that the client is ldpfl's own, which trains the model that a config names. Weights and gradients belong
    to a model that the app defines itself. Gradients of persons come from an app that says to whom each record belongs.
    """
    definition = _definition_of(app, "clientapp")  # the import path of an imported object, or the assigned expression
    if definition == f"{_READY_MODULE}:client_app":
        return "ready"
    if isinstance(definition, str) or not _calls_wrapper(definition):
        return "unknown"
    arguments = {keyword.arg for keyword in definition.keywords}
    names_persons = any(keyword.arg == "persons" and _is_true(keyword.value) for keyword in definition.keywords)
    if "records" in arguments:  # given in place of an app that trains: then ldpfl computes the gradients of the records
        return "gradients of persons" if names_persons else "gradients"
    return "weights"


def has_ready_server(app: Path) -> bool:
    """Tell whether the app in this folder certainly has ldpfl's own ServerApp. Nothing is run."""
    return _definition_of(app, "serverapp") == f"{_READY_MODULE}:server_app"


def _definition_of(app: Path, component: str) -> ast.expr | str | None:
    """Return how the module of the app's ``component`` defines it: the import path of an imported object, or the assigned expression.

    None if this is not known: the module cannot be read or does not have the name, or the last statement with the name does something
    else, such as a relative import.
    """
    try:
        module, _, name = _component(app, component).partition(":")
        if module == _READY_MODULE:
            return f"{module}:{name}"
        body = _body_of(app, module)
    except _UNREADABLE:
        return None
    definition: ast.expr | str | None = None
    for node in body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) in (name, "*"):
                    definition = f"{node.module}:{alias.name}" if node.level == 0 else None
        elif isinstance(node, ast.Assign | ast.AnnAssign) and _only_target(node) == name:
            definition = node.value
        elif any(name in (getattr(part, field, None) for field in ("id", "name", "asname")) for part in ast.walk(node)):
            definition = None  # the statement may define the name, such as a function, or change the object
    return definition


def _body_of(app: Path, module: str) -> list[ast.stmt]:
    """Return the statements of ``module`` in the folder ``app``. Errors are those of :data:`_UNREADABLE`."""
    spec = [spec for _, spec in _find_specs(app.resolve(), module)][-1]  # the module's own, or that of a missing package: None
    if spec is None or spec.origin is None:
        raise FileNotFoundError(module)
    return ast.parse(Path(spec.origin).read_bytes()).body


def _only_target(node: ast.Assign | ast.AnnAssign) -> str:
    """Return the name to which the statement assigns; "" if it assigns to several names, or to something else than a name."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def _client_module(app: Path) -> str:
    """Return the name of the module that the app's ``pyproject.toml`` names as its clientapp."""
    return _component(app, "clientapp").partition(":")[0]


def _component(app: Path, component: str) -> str:
    """Return the import path that the app's ``pyproject.toml`` names as its ``component``: serverapp or clientapp."""
    try:
        tree = from_toml(read_text(app / "pyproject.toml"))
        return str(tree["tool"]["flwr"]["app"]["components"][component])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{app / 'pyproject.toml'} has no `{component}` in [tool.flwr.app.components]: add it") from error


def _find_specs(app: Path, module: str) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Yield name and spec of each package that contains ``module``, then of ``module``, as found in ``app``.

    If one of them is missing, its spec is None, and the others are not looked for.
    """
    importlib.invalidate_caches()
    search_path = [str(app)]
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = PathFinder.find_spec(name, search_path)
        yield name, spec
        if spec is None or spec.submodule_search_locations is None:
            return
        search_path = list(spec.submodule_search_locations)


def _find_shadowing_modules(app: Path, client_package: str) -> Iterator[str]:
    """Yield a message for each entry of the folder ``app`` that Python would import in place of another module of the same name.

    The other module is a standard or installed one, or one that other code looks for in vain.
    """
    names_other_code_imports = sys.stdlib_module_names | _installed_modules() | _modules_the_wrapper_looks_for()
    names_other_code_imports -= {client_package}  # the app's own package, which may be installed as well
    for entry in sorted(app.iterdir()):
        name = entry.name.partition(".")[0]
        if name not in names_other_code_imports:
            continue
        is_module = entry.suffix in (".py", ".so", ".pyd") or (entry / "__init__.py").is_file()
        # A folder without __init__.py takes the place of the other module only if that one is missing, or such a folder itself.
        if is_module or (entry.is_dir() and _folder_would_be_imported(name)):
            yield f"{entry.name}, which Python imports instead of the module {name} that other code needs: rename it"


@cache
def _installed_modules() -> frozenset[str]:
    """Return the top-level modules of all installed packages. Cached, because reading the packages' file lists takes half a second."""
    return frozenset(packages_distributions())


def _folder_would_be_imported(name: str) -> bool:
    """Tell whether Python would import a folder called ``name`` without ``__init__.py``.

    It does if no other module has this name, or only other folders without ``__init__.py``.
    """
    spec = PathFinder.find_spec(name, _path_without_current_folder())
    return name not in sys.builtin_module_names and (spec is None or spec.origin is None)


def _path_without_current_folder() -> list[str]:
    """Return the folders of ``sys.path`` without the current folder, which may be the app's."""
    here = Path.cwd().resolve()
    return [str(place) for entry in sys.path if entry and (place := Path(entry).resolve()) != here]


@contextmanager
def app_folders_off_path() -> Iterator[None]:
    """Take app folders out of ``sys.path`` within the block.

    Flower puts app folders first in the path. A library's optional import could then run a module of the app instead.
    """
    apps = [entry for entry in sys.path if _is_app(Path(entry))]
    sys.path[:] = [entry for entry in sys.path if entry not in apps]
    try:
        yield
    finally:
        sys.path[:0] = [entry for entry in apps if entry not in sys.path]  # another thread may have put them back


def _is_app(folder: Path) -> bool:
    """Tell whether ``folder`` holds a Flower app, by its ``pyproject.toml``."""
    try:
        return "app" in from_toml(read_text(folder / "pyproject.toml"))["tool"]["flwr"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


_IMPORT_SPY = """
import json, sys
seen = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        seen.append(name)
sys.meta_path.insert(0, Spy())
import ldpfl.flower.client_app, ldpfl.flower.confined_process, ldpfl.relay.clients
import contextlib, httpx
with contextlib.suppress(Exception):  # a request makes the imports of a call to the relay; no server listens on this port
    httpx.get("http://127.0.0.1:9", timeout=0.1, trust_env=False)
print(json.dumps(sorted({name.partition(".")[0] for name in seen})))
"""


@cache
def _modules_the_wrapper_looks_for() -> frozenset[str]:
    """Return the top-level modules that Python looks for when the wrapper is imported or calls a relay, even in vain.

    An app's module of such a name would run there. To list the names, a process imports the wrapper. Its search path leaves out the current
    folder, which may be the app's.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_path_without_current_folder())}
    command = [sys.executable, "-P", "-c", _IMPORT_SPY]
    names = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent).stdout
    return frozenset(json.loads(names))


def _find_code_beside_sources(app: Path) -> Iterator[str]:
    """Yield each file of the app's folder that could run beside or instead of the sources that are read here.

    Python runs bytecode in place of its source if the bytecode says that it need not be compared. Libraries run the plug-ins that a
    package's metadata list.
    """
    for file in sorted(app.rglob("*.py[co]")):
        yield f"{file.relative_to(app)}, which Python may run in place of its source: delete it"
    for entry in sorted(app.iterdir()):
        if entry.suffix in (".dist-info", ".egg-info", ".egg", ".pth"):
            yield f"{entry.name}, in which libraries look for code to run: delete it"


def _active_lines(file: Path, app_modules: frozenset[str]) -> Iterator[int]:
    """Yield the line of each top-level statement in ``file`` that may do more than import, assign a constant or make the wrapper."""
    try:
        body = ast.parse(file.read_bytes()).body  # as bytes, so that the encoding declared in the file counts, as for Python
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two for code that is nested too deeply
        raise ConfigError(f"{file} cannot be read: {error or type(error).__name__}") from None
    return (node.lineno for node in body if not _reads_no_data(node, app_modules))


def _reads_no_data(node: ast.stmt, app_modules: frozenset[str]) -> bool:
    """Tell whether a top-level statement reads no data. ``app_modules`` are the names of the modules in the app's folder."""
    if isinstance(node, ast.Import):
        return all(alias.asname != _WRAPPER and _is_quiet_package(alias.name, app_modules) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        # _calls_wrapper recognises the wrapper by its name alone, so no other object may be imported under that name.
        imposters = [
            alias for alias in node.names if (alias.asname or alias.name) == _WRAPPER and (alias.name, node.module) not in _WRAPPERS
        ]
        return node.level == 0 and not imposters and _is_quiet_package(node.module or "", app_modules)
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        # A special name may change imports: __path__, for example, says where submodules are looked for.
        sets_special = any(name.startswith("__") and name not in _ALLOWED_SPECIAL_NAMES for name in names)
        return len(names) == len(node.targets) and not sets_special and (_is_constant(node.value) or _is_wrapper(node.value))
    return isinstance(node, ast.Expr) and _is_constant(node.value)


def _is_quiet_package(module: str, app_modules: frozenset[str]) -> bool:
    """Tell whether importing ``module`` reads no data. ``app_modules`` are the names of the modules in the app's folder."""
    package = module.partition(".")[0]
    return package in _QUIET_PACKAGES and package not in app_modules  # the app's folder may hold a package with one of these names


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _is_constant(value: ast.expr) -> bool:
    """Tell whether ``value`` is a literal, or a list or tuple of literals."""
    return isinstance(value, ast.Constant) or (isinstance(value, ast.List | ast.Tuple) and all(map(_is_constant, value.elts)))


def _is_wrapper(value: ast.expr) -> bool:
    """Tell whether ``value`` is a call of ``LdpClientApp`` with one import path, of an app or of records, and no other code."""
    if not _calls_wrapper(value):
        return False
    keywords = [keyword for keyword in value.keywords if not (keyword.arg in _FLAG_ARGUMENTS and isinstance(keyword.value, ast.Constant))]
    if len(value.args) + len(keywords) != 1:  # besides flags, there must be one argument: the path
        return False
    if keywords and keywords[0].arg not in _PATH_ARGUMENTS:
        return False
    path = value.args[0] if value.args else keywords[0].value
    return isinstance(path, ast.Constant) and isinstance(path.value, str)


def _calls_wrapper(value: ast.expr | None) -> TypeGuard[ast.Call]:
    """Tell whether ``value`` is a call of ``LdpClientApp``, with whatever arguments."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == _WRAPPER
