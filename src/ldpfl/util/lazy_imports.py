"""Imports at first use: PyTorch and SciPy take seconds, and a help text, a plan or a ledger needs no PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch


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


@contextmanager
def importing() -> Iterator[None]:
    """Suspend garbage collection during imports, which leave no garbage. It would take 0.1 s, with PyTorch 0.3 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Late:
    """A module that is imported when something in it is first used, as ``lazy import`` of Python 3.15 does (PEP 810).

    Until then it is not in ``sys.modules``, where libraries look to find out what is in use.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        setattr(self, name, found)  # the next time it is as fast as that of a module
        return found


if not TYPE_CHECKING:
    torch = _Late("torch")
    """PyTorch, for modules that also state what a mechanism costs: what only states that starts two seconds earlier."""
