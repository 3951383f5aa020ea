"""What Flower runs of an app when it imports it, before any wrapper is there; found by reading, without running anything."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ldpfl.errors import ConfigError

_QUIET = ("__future__", "ldpfl", "flwr", "typing")
"""Packages that touch no data when they are imported."""


def run_at_import(app: Path) -> Iterator[str]:
    """Yield, as ``file:line``, what Flower's ClientApp process runs of the app in this folder beside making its wrapper.

    The text of an exception there reaches the server, whatever it repeats, for any message and without a charge: so the module that
    Flower imports, and the packages that it lies in, are to hold nothing but ``LdpClientApp("package.module:name")``.

    Raises:
        ConfigError: the app names no client module, or that cannot be read.
    """
    try:
        tree = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        module = str(tree["tool"]["flwr"]["app"]["components"]["clientapp"]).partition(":")[0]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{app / 'pyproject.toml'} names no clientapp in [tool.flwr.app.components]") from error
    *packages, last = module.split(".")
    own_names = frozenset(entry.name.removesuffix(".py") for entry in app.iterdir())
    files = [app.joinpath(*packages[: depth + 1], "__init__.py") for depth in range(len(packages))]
    own = app.joinpath(*packages, f"{last}.py")
    for file in (*files, own if own.is_file() else app.joinpath(*packages, last, "__init__.py")):
        if file.is_file():
            yield from (f"{file.relative_to(app)}:{line}" for line in _statements(file, own_names))


def _statements(file: Path, own: frozenset[str]) -> Iterator[int]:
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return (node.lineno for node in body if not _is_quiet(node, own))


def _is_quiet(node: ast.stmt, own: frozenset[str]) -> bool:
    if isinstance(node, ast.Import):
        return all(_touches_nothing(alias.name, own) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and _touches_nothing(node.module or "", own)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets) and (_is_constant(node.value) or _is_wrapper(node.value))
    return isinstance(node, ast.Expr) and _is_constant(node.value)


def _touches_nothing(module: str, own: frozenset[str]) -> bool:
    first = module.partition(".")[0]
    return first in _QUIET and first not in own  # a package of the app's own may be called as one of these


def _is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) or (isinstance(value, ast.List | ast.Tuple) and all(map(_is_constant, value.elts)))


def _is_wrapper(value: ast.expr) -> bool:
    """Tell whether it is a call of ``LdpClientApp`` with an import path and nothing else."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "LdpClientApp"
        and len(value.args) == 1
        and not value.keywords
        and isinstance(value.args[0], ast.Constant)
        and isinstance(value.args[0].value, str)
    )
