"""Make PyTorch's own random draws, such as the weights of a new model, depend on a seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ldpfl.errors import ConfigError


class SeededDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which PyTorch's random draws of this thread depend on ``seed`` alone, as after ``torch.manual_seed`` in a new process.

    The process's global generator is neither used nor changed, so other threads may draw from it, or use such a context of their own. A
    draw with an explicit generator is unchanged.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self._made = seed, dict[torch.device, torch.Generator]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled within this context, and to be left out of it would import the compiler, in a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        own = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or own.get("generator") is not None:
            return func(*args, **own)
        device = torch.device(own.get("device") or next((value.device for value in args if isinstance(value, Tensor)), "cpu"))
        if device.type == "meta":
            return func(*args, **own)
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(self._seed)
        return _with_generator(func)(*args, **own, generator=self._made[device])


def _with_generator(func: Any) -> Any:
    """Return the form of PyTorch's random ``func`` that takes a generator.

    Raises:
        ConfigError: there is none.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname.removesuffix('_dtype')}_generator"
    for found in (name, f"{name}_dtype"):
        if found in func.overloadpacket.overloads():
            return getattr(func.overloadpacket, found)
    raise ConfigError(f"{func} draws numbers that no seed decides: draw them by torch.randn or torch.rand")
