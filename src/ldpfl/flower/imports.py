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
    files = [app.joinpath(*packages[: depth + 1], "__init__.py") for depth in range(len(packages))]
    own = app.joinpath(*packages, f"{last}.py")
    for file in (*files, own if own.is_file() else app.joinpath(*packages, last, "__init__.py")):
        if file.is_file():
            yield from (f"{file.relative_to(app)}:{line}" for line in _statements(file))


def _statements(file: Path) -> Iterator[int]:
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    return (node.lineno for node in body if not _is_quiet(node))


def _is_quiet(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in _QUIET for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").partition(".")[0] in _QUIET
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
        return node.value is None or isinstance(node.value, ast.Constant) or _is_wrapper(node.value) or isinstance(node.value, ast.List)
    return False


def _is_wrapper(value: ast.expr) -> bool:
    """Tell whether it is a call of ``LdpClientApp`` with an import path."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    first = value.args[0] if value.args else None
    return name == "LdpClientApp" and isinstance(first, ast.Constant) and isinstance(first.value, str)
