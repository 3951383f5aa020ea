"""Compile a step of local training by ``torch.compile``: whether it is possible, whether it saves time, and what happens if it fails."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ldpfl.errors import LdpflError
from ldpfl.simulation.local_steps import without_vmap_warning
from ldpfl.simulation.local_training import ManyAtOnce, named_batching_rule

_LOG = logging.getLogger(__name__)


def has_compiler() -> bool:
    """Return whether PyTorch finds a C++ compiler: the one that ``CXX`` names, else the usual one of the system."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")) is not None


@dataclass(frozen=True)
class Work:
    """The work of one call of a step.

    Attributes:
        operations: number of PyTorch's operations, which is about the size of the graph that is compiled.
        flops: number of floating-point operations in products and convolutions.
        values: number of values that operations write.
        sent: number of values that clients send after the step. Uncompiled training and encoding pass over them several times.
    """

    operations: int
    flops: int
    values: int
    sent: int = 0

    @property
    def saved(self) -> float:
        """Estimated number of seconds that compiling saves in each call."""
        memory = self.values * _SAVED_PER_VALUE_S + self.sent * _SAVED_PER_SENT_S
        return self.operations * _SAVED_PER_OPERATION_S + self.flops * _SAVED_PER_FLOP_S + memory

    @property
    def cost(self) -> float:
        """Estimated number of seconds that compiling takes."""
        return _START_S + self.operations * _COMPILE_OPERATION_S


_START_S, _COMPILE_OPERATION_S = 5.0, 0.09
"""Number of seconds that the compiler takes to start, and for each operation."""
_SAVED_PER_OPERATION_S, _SAVED_PER_FLOP_S, _SAVED_PER_VALUE_S, _SAVED_PER_SENT_S = 0.4e-6, 1.3e-12, 0.13e-9, 3e-9
"""Two thirds of the seconds that ``benchmarks/compiling.py`` and ``benchmarks/clients.py`` measured on one core: nearly all runs gain."""

_MAX_OPERATIONS = 1000
"""Number of operations of the largest step that is compiled by default. Larger steps take minutes to compile."""

_MIN_CALLS = 500
"""Minimum number of calls for compiling by default. With fewer, a step would have to save 10 ms in each call."""


def is_worth_compiling(calls: float, work: Callable[[], Work]) -> bool:
    """Return whether compiling a step is expected to save time in a run of ``calls`` calls. ``work`` counts a call's operations.

    Nothing is timed, so that the decision does not depend on other work on the machine.
    """
    if calls < _MIN_CALLS:
        return False
    call_work = work()
    return call_work.operations <= _MAX_OPERATIONS and calls * call_work.saved >= call_work.cost


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work that PyTorch does within this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work(operations=0, flops=0, values=0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since nothing is compiled in this context. PyTorch's default would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operation of PyTorch and add its work. A view writes no values."""
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else (result,)
        values = 0 if func.is_view else sum(output.numel() for output in outputs if isinstance(output, Tensor))
        formula = flop_registry.get(func.overloadpacket)
        flops = int(formula(*args, **(kwargs or {}), out_val=result)) if formula else 0
        self.work = Work(self.work.operations + 1, self.work.flops + flops, self.work.values + values)
        return result


def measured_work(function: Callable[[], object]) -> Work:
    """Call ``function`` once, and return the number of operations that it did, as a :class:`Work`."""
    counting = _WorkCounter()
    with counting, without_vmap_warning():
        function()
    return counting.work


class Compiled:
    """A function that is compiled in its first call.

    PyTorch compiles a piece of code for few shapes only, so each instance compiles a copy of the function's code.

    Args:
        function: takes tensors, and returns tensors or writes to those that it takes.
        compiled_before: whether the function was compiled successfully before, such as in the process that started the run. If compiling it
            fails now, for example because the disk is full, the function runs uncompiled, with a warning. A function that was never
            compiled raises PyTorch's error instead, since the cause may be the function.
    """

    def __init__(self, function: Any, *, compiled_before: bool = False) -> None:
        self._plain: Callable[..., Any] = function
        self._call, self._is_compiled, self._compiled_before = compiled(function), True, compiled_before

    def __call__(self, *values: Any) -> Any:
        """Return the function's result for ``values``. If compiling fails but succeeded before, it runs uncompiled from now on."""
        try:
            result = self._call(*values)
        except LdpflError:
            raise
        except Exception as error:
            if not self._compiled_before or not self._is_compiled:
                raise
            result = self._uncompiled(*values)  # raises the error again if the compiler is not its cause
            self._call, self._is_compiled = self._uncompiled, False
            # The error's text may hold private values.
            _LOG.warning(
                "a compiled step failed (%s): it is run uncompiled from now on, so results may differ in their last bits from other runs",
                type(error).__name__,
            )
        self._compiled_before = True
        return result

    def _uncompiled(self, *values: Any) -> Any:
        """Return the function's result for ``values``, and refuse what could mix samples, as the compiler's check does."""
        with ManyAtOnce(patches=False):
            return self._plain(*values)


def compiled(function: Any) -> Callable[..., Any]:
    """Return a copy of ``function`` that is compiled in its first call. If that fails, the call raises PyTorch's error.

    The call raises a :class:`RuntimeError` if the model calls something that could mix samples, even if it does so only when compiled.
    """
    # PyTorch compiles one code object for few shapes only, so each result has a code object of its own.
    copy = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    step = torch.compile(copy, backend=_checked_inductor, dynamic=False, fullgraph=True)

    def call(*values: Any) -> Any:
        try:
            return step(*values)
        except RuntimeError as error:
            cause = getattr(error, "inner_exception", None)  # PyTorch wraps errors of a backend
            if isinstance(cause, _MixingError):
                raise cause from None
            raise

    return call


class _MixingError(RuntimeError):
    """A step calls something that could mix samples."""


def _checked_inductor(traced: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile ``traced`` by PyTorch's own backend, unless it calls something that could mix samples.

    A context such as :class:`~ldpfl.simulation.local_training.ManyAtOnce` sees no call of compiled code, so the calls are looked at here.

    Raises:
        _MixingError: the step calls such a thing.
    """
    from torch._inductor.compile_fx import compile_fx

    parts = [part for part in traced.modules() if isinstance(part, torch.fx.GraphModule)]  # the step, and functions in it
    for part in parts:
        for node in part.graph.nodes:
            if name := _unknown_call(part, node):
                raise _MixingError(f"its compiled step calls {name}, which could mix samples")
    return cast(Callable[..., Any], compile_fx(traced, inputs))


def _unknown_call(part: torch.fx.GraphModule, node: torch.fx.Node) -> str:
    """Return the name of what the ``node`` of ``part`` calls, unless it is a function of PyTorch that mixes no samples; then "".

    Operators that take functions, such as those for hooks and for functions with their own backward pass, are named, too.
    """
    if node.op == "call_module":
        called: Any = type(part.get_submodule(str(node.target)))
    elif node.op == "call_function":
        called = node.target
    else:  # a method of a tensor, or no call
        return ""
    if isinstance(called, torch._ops.HigherOrderOperator):
        return str(called)
    module = str(getattr(called, "__module__", None))
    if module.partition(".")[0] not in _KNOWN_PACKAGES or module.startswith(_MODULE_OF_WRAPPERS):
        return str(getattr(called, "__name__", called))
    return named_batching_rule(called, node.args)


_KNOWN_PACKAGES = frozenset({"torch", "_operator", "math", "builtins"})
_MODULE_OF_WRAPPERS = "torch._dynamo."
"""Module whose functions wrap others, such as functions that the compiler is told not to look into."""
