"""Code that ``torch.compile`` makes of a step of local training: where that is possible, when it pays, and what happens when it fails."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ldpfl.errors import LdpflError

_LOG = logging.getLogger(__name__)


def has_compiler() -> bool:
    """Return whether PyTorch finds a C++ compiler: the one that ``CXX`` names, else the usual one of the system."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")) is not None


@dataclass(frozen=True)
class Work:
    """What one call of a step does, counted in operations of PyTorch.

    Attributes:
        operations: how many there are, which is about the size of the graph that is compiled.
        flops: floating-point operations of products and convolutions.
        values: numbers that operations write.
        sent: weights of clients that send after the step: training and encoding pass over them several times, compiled code does not.
    """

    operations: int
    flops: int
    values: int
    sent: int = 0

    @property
    def saved(self) -> float:
        """About how many seconds a call takes less when it is compiled."""
        written = self.values * _EACH_VALUE_S + self.sent * _EACH_SENT_S
        return self.operations * _EACH_OPERATION_S + self.flops * _EACH_FLOP_S + written

    @property
    def cost(self) -> float:
        """About how many seconds compiling takes."""
        return _BEGIN_S + self.operations * _COMPILE_EACH_S


_BEGIN_S, _COMPILE_EACH_S = 5.0, 0.09
_EACH_OPERATION_S, _EACH_FLOP_S, _EACH_VALUE_S, _EACH_SENT_S = 0.4e-6, 1.3e-12, 0.13e-9, 3e-9
"""Two thirds of what ``benchmarks/compiling.py`` and ``benchmarks/clients.py`` measured on one core, so that nearly all runs gain."""

_MOST_OPERATIONS = 1000
"""Operations of the largest step that is compiled unasked: larger ones take minutes."""

_FEWEST_CALLS = 500
"""Calls below which no step pays: one would have to save 10 ms a call."""


def pays(calls: float, work: Callable[[], Work]) -> bool:
    """Return whether ``calls`` of a step, of so much ``work`` each, are expected to save more time than compiling takes.

    Nothing is timed, so that a run is compiled or not whatever else the machine does.
    """
    if calls < _FEWEST_CALLS:
        return False
    each = work()
    return each.operations <= _MOST_OPERATIONS and calls * each.saved >= each.cost


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work that PyTorch does within this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work(0, 0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled within this context, and to be left out of it would import the compiler, in a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        written = () if func.is_view else found if isinstance(found, tuple | list) else (found,)
        values = sum(part.numel() for part in written if isinstance(part, Tensor))
        formula = flop_registry.get(func.overloadpacket)
        flops = int(formula(*args, **(kwargs or {}), out_val=found)) if formula else 0
        self.work = Work(self.work.operations + 1, self.work.flops + flops, self.work.values + values)
        return found


def work_of(function: Callable[[], object]) -> Work:
    """Return the work of a call of ``function``, which is made."""
    counting = _Counting()
    with counting:
        function()
    return counting.work


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
