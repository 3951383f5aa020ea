"""Imports at first use: PyTorch and SciPy take seconds, and a help text, a plan or a ledger needs no PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from scipy import optimize as optimize


def exports(package: str, names: Mapping[str, Collection[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``, which import each exported name when it is first used.

    ``names`` maps a module to the names that it defines, or a submodule to its own name. Type checkers do not understand this: the package
    must contain the imports as well, below ``if TYPE_CHECKING``.
    """
    homes = {name: module for module, exported in names.items() for name in exported}

    def get_exported(name: str) -> Any:
        """Import the module that defines ``name``, and return the exported object."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get_exported, lambda: sorted(homes)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection during imports, which leave no garbage. It would take 0.1 s, with PyTorch 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _LateModule:
    """A module that is imported when something in it is first used, as ``lazy import`` of Python 3.15 does (PEP 810).

    Until then it is not in ``sys.modules``, where libraries look to find out what is in use.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # later look-ups are as fast as in a module
        return value


if not TYPE_CHECKING:
    torch = _LateModule("torch")
    """PyTorch, for modules that are also used without it, to state a mechanism's cost: such programs start two seconds earlier."""
    optimize = _LateModule("scipy.optimize")
    """Roots of functions. Its import takes a tenth of the time of a plan, and not every plan needs a root."""
