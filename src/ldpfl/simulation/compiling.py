"""Code that ``torch.compile`` makes of a step of local training: where that is possible, when it pays, and what happens when it fails."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ldpfl.errors import LdpflError

_LOG = logging.getLogger(__name__)


def has_compiler() -> bool:
    """Return whether PyTorch finds a C++ compiler: the one that ``CXX`` names, else the usual one of the system."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")) is not None


_PAYS = 6e9
"""Samples times weights of a whole run from which compiling pays: some 30 s of the two-layer CNN, against 10 s for the compiler."""

_PAYS_EACH = 1e8
"""Samples times weights for each operation of the step that is compiled."""

_MOST_OPERATIONS = 400
"""Operations of the largest step that is compiled unasked."""


def pays(samples: int, weights: int, operations: Callable[[], int]) -> bool:
    """Return whether a run is worth compiling for.

    Args:
        samples: on which all rounds together train, each time counted.
        weights: of the model.
        operations: counts those of PyTorch in the step that would be compiled; asked of long runs only.
    """
    trained = samples * weights
    return trained >= _PAYS and (steps := operations()) <= _MOST_OPERATIONS and trained >= _PAYS_EACH * steps


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that PyTorch runs within this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled within this context, and to be left out of it would import the compiler, in a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(function: Callable[[], object]) -> int:
    """Return how many operations of PyTorch a call of ``function`` runs, which is about the size of the graph that is compiled of it."""
    with _Counting() as counting:
        function()
    return counting.count


class Compiled:
    """A function that is compiled in its first call.

    PyTorch compiles a piece of code for few shapes only, so each instance compiles a copy of the function's code.

    Args:
        function: takes and returns tensors, or writes to some that it is given.
        proven: whether the function has been compiled before, as it was before the run that this process works for. Where compiling
            fails all the same, for example because the disk is full, the function then runs as it is, and a warning says so.
            A function that is not proven raises what PyTorch raises. It is proven by its first call that succeeds.
    """

    def __init__(self, function: Any, *, proven: bool = False) -> None:
        self._plain: Callable[..., Any] = function
        self._call, self._proven = compiled(function), proven

    def __call__(self, *values: Any) -> Any:
        """Return what the function makes of ``values``."""
        try:
            found = self._call(*values)
        except LdpflError:
            raise
        except Exception as error:
            if not self._proven or self._call is self._plain:
                raise
            found = self._plain(*values)  # raises an error itself if the cause is not the compiler
            self._call = self._plain
            # The error's text may hold private values.
            _LOG.warning(
                "a step is no longer compiled (%s): last bits may differ from those of a run in which it was", type(error).__name__
            )
        self._proven = True
        return found


def compiled(function: Any) -> Callable[..., Any]:
    """Return a copy of ``function`` that is compiled in its first call, and raises what PyTorch raises if that fails."""
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    return torch.compile(own, dynamic=False, fullgraph=True)
