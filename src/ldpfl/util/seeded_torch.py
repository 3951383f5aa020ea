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
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since nothing is compiled in this context. PyTorch's default would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``func``, with this context's generator if it draws random numbers."""
        options = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or options.get("generator") is not None:
            return func(*args, **options)
        device = torch.device(options.get("device") or next((value.device for value in args if isinstance(value, Tensor)), "cpu"))
        if device.type == "meta":  # such tensors have no values, so nothing is drawn
            return func(*args, **options)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return _with_generator(func)(*args, **options, generator=self._generators[device])


def _with_generator(func: Any) -> Any:
    """Return the form of PyTorch's random ``func`` that takes a generator, such as ``randint.low_generator`` for ``randint.low``.

    Raises:
        ConfigError: the function has no such form.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    # The form for ``low_dtype`` is called ``low_generator`` or ``low_generator_dtype``, by the function.
    name = "generator" if func._overloadname == "default" else f"{func._overloadname.removesuffix('_dtype')}_generator"
    for overload in (name, f"{name}_dtype"):
        if overload in func.overloadpacket.overloads():
            return getattr(func.overloadpacket, overload)
    raise ConfigError(f"{func} draws random numbers, but takes no seed or generator: use torch.randn or torch.rand instead")
