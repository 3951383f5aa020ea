"""Copies of any Python values that show later whether a value has changed."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from contextlib import suppress
from io import BytesIO
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
"""Types of which only the type is stored for an empty value."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each size of a number in bytes, to compare numbers bit by bit."""


def comparable_copy(value: object) -> object:
    """Return a copy of ``value`` or bytes that stand for it, such that :func:`equal` finds a later change of ``value``."""
    if value is None or type(value) in (bool, int, str):  # most attributes: to pickle them would take most of the time
        return value
    if type(value) in _CONTAINERS and not value:  # most other attributes: empty lists of hooks
        return type(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value):
        return value.detach().clone()
    with suppress(Exception):
        return pickle.dumps(value)
    with suppress(Exception):
        return _Contents.of(value)
    return _type_and_identity(value)


class _Contents(pickle.Pickler):
    """A pickler for comparison that accepts every object.

    A function that pickle refuses, such as a lambda, is pickled as its identity, defaults, attributes and enclosing variables. An
    object whose contents Python does not list, such as a lock, is pickled as its type and identity.
    """

    @classmethod
    def of(cls, value: object) -> bytes:
        """Return the contents of ``value`` as bytes for comparison. They cannot be unpickled."""
        stream = BytesIO()
        cls(stream).dump(value)
        return stream.getvalue()

    def reducer_override(self, value: object) -> Any:
        """Return how to pickle ``value``: as usual if that works, else as the docstring of the class says."""
        with suppress(Exception):
            pickle.dumps(value)
            return NotImplemented  # pickle it as usual
        if isinstance(value, FunctionType):
            return (str, (_type_and_identity(value),), (closure_values(value), value.__defaults__, value.__kwdefaults__, value.__dict__))
        with suppress(Exception):
            return value.__reduce_ex__(4)
        return (str, (_type_and_identity(value),))  # such as a nested class, or a tensor of vmap


def closure_values(function: FunctionType) -> list[object]:
    """Return the values of the variables that ``function`` takes from the functions around it."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            values.append(cell.cell_contents)
    return values


def _type_and_identity(value: object) -> str:
    """Return the type and identity of ``value``, as text."""
    return f"{type(value).__name__} {id(value)}"


def equal(first: object, second: object) -> bool:
    """Whether two values of :func:`comparable_copy` are equal, tensors bit by bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return equal_bits(first, second)
    return type(first) is type(second) and first == second


def equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit by bit. A NaN is equal to itself."""
    if first.dtype != second.dtype or first.shape != second.shape or first.device != second.device:
        return False
    bits = _BITS.get(first.element_size())
    return torch.equal(first, second) if bits is None else torch.equal(first.view(bits), second.view(bits))
