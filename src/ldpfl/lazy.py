"""Packages that import what they export when it is first used: PyTorch and SciPy take seconds, and a help text needs neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``; ``homes`` names the module of each name, or that it stands for.

    Type checkers do not see these: give them the imports as well, below ``if TYPE_CHECKING``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get, lambda: sorted(homes)
