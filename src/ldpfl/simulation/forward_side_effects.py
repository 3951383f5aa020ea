"""What a model must leave as it is while it runs: what is sent comes from gradients, and from nothing that a pass wrote.

Inside ``vmap`` PyTorch counts every write to a tensor (``Tensor._version``), and forbids ``.data`` and NumPy, which write past the counter.
Outside of it such writes are possible, so values are compared there, bit by bit.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ldpfl.errors import LdpflError, PrivacyError

PARTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that hold its tensors and its parts."""

VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of PyTorch's recurrent modules that hold their parameters once more."""

_CONTAINERS = (dict, OrderedDict, list, tuple, set)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type for each number of bytes, to compare bits by."""


@contextmanager
def nothing_kept(module: nn.Module) -> Iterator[None]:
    """Raise an error if ``module`` holds anything else at the end than at the beginning: parameters, buffers, their gradients, attributes.

    Raises:
        PrivacyError: something has changed; the message names it.
    """
    before = _held(module)
    with _refused(module, lambda: _differing(before, _held(module))):
        yield


@contextmanager
def nothing_written(module: nn.Module, trained: Mapping[str, Tensor], *, by_value: bool) -> Iterator[None]:
    """Raise an error if a forward or backward pass of ``module`` writes to the ``trained`` tensors, by name, that it runs with.

    Inside ``vmap`` their counters tell of every write. Elsewhere ask for a comparison ``by_value``, which reads and copies all of them.

    Raises:
        PrivacyError: something was written to; the message names it.
    """
    versions = {name: tensor._version for name, tensor in trained.items()}
    copies = {name: tensor.detach().clone() for name, tensor in trained.items()} if by_value else {}

    def written() -> list[str]:
        counted = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        return counted or [name for name, copy in copies.items() if not _equal_bits(copy, trained[name].detach())]

    with _refused(module, written):
        yield


@contextmanager
def _refused(module: nn.Module, changed: Callable[[], list[str]]) -> Iterator[None]:
    """Raise an error that names what has ``changed`` at the end, also where something else fails, for which that may be the cause."""
    try:
        yield
    except LdpflError:
        raise
    except Exception as error:
        _refuse(module, changed(), error)
        raise
    _refuse(module, changed(), None)


def _refuse(module: nn.Module, changed: list[str], cause: Exception | None) -> None:
    if changed:
        why = (
            "while it ran: that would keep or send something of its samples that no mechanism has randomised; let forward and hooks change "
            "nothing (of embeddings: leave max_norm out)"
        )
        text = f"{type(module).__name__} changed {', '.join(changed)} {why}"
        raise PrivacyError(text, advice=f"it changed its own state {why}") from cause


def _held(module: nn.Module) -> dict[str, object]:
    """Return all that ``module`` holds, by name, in a form that can be compared: copies of tensors, and other attributes as bytes."""
    found: dict[str, object] = {}
    shared: dict[int, object] = {}  # one config stands in each part of a model of ``transformers``
    for prefix, part in module.named_modules():
        left_out = PARTS | VIEWS if isinstance(part, nn.RNNBase) else PARTS
        start = f"{prefix}." if prefix else ""
        own = ((key, value) for key, value in part.__dict__.items() if key not in left_out)
        for key, value in chain(own, part._buffers.items(), part._parameters.items()):
            if id(value) not in shared:
                shared[id(value)] = _told_of_frozen(value) if _is_frozen(value) else _copied(value)
            found[start + key] = shared[id(value)]
            if isinstance(value, Tensor) and isinstance(value, nn.Parameter):  # of most attributes the first question is the cheaper one
                found[f"{start}{key}.grad"] = _copied(value.grad)
    return found


def _is_frozen(value: object) -> bool:
    """Whether ``value`` is a frozen parameter whose bits can be read."""
    return isinstance(value, nn.Parameter) and not value.requires_grad and value.layout == torch.strided and value.numel() > 0


def _told_of_frozen(value: Tensor) -> object:
    """Return the write counter, place, shape and SHA-256 of a frozen parameter. A copy of a large base would double its memory."""
    octets = value.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return value._version, value.data_ptr(), tuple(value.shape), hashlib.sha256(octets.data).digest()


def _copied(value: object) -> object:
    if value is None or type(value) in (bool, int, str):  # most attributes: pickling them would take most of the time
        return value
    if type(value) in _CONTAINERS and not value:  # most of the others: places for hooks
        return type(value)
    if isinstance(value, Tensor) and value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value):
        return value.detach().clone()
    with suppress(Exception):
        return pickle.dumps(value)
    with suppress(Exception):
        return _Contents.of(value)
    return _named(value)


class _Contents(pickle.Pickler):
    """A pickler that fails at nothing.

    A function of one's own is pickled as its defaults and the variables of the functions around it. An object whose contents Python does
    not list, such as a lock, is pickled as its type and identity.
    """

    @classmethod
    def of(cls, value: object) -> bytes:
        """Return all that ``value`` holds as bytes, to compare and not to read."""
        cls(found := BytesIO()).dump(value)
        return found.getvalue()

    def reducer_override(self, value: object) -> Any:
        """Return how to pickle ``value``: as usual if that works, else as the class says."""
        with suppress(Exception):
            pickle.dumps(value)
            return NotImplemented
        if isinstance(value, FunctionType):
            return (str, (_named(value),), (_cells(value), value.__defaults__, value.__kwdefaults__, value.__dict__))
        with suppress(Exception):
            return value.__reduce_ex__(4)
        return (str, (_named(value),))  # such as a class within a function, or a tensor that is none outside of vmap


def _cells(function: FunctionType) -> list[object]:
    """Return what ``function`` has of the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            found.append(cell.cell_contents)
    return found


def _named(value: object) -> str:
    return f"{type(value).__name__} {id(value)}"


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or which only one of both has."""
    return [name for name in {**before, **after} if name not in before or name not in after or not _equal(before[name], after[name])]


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _equal_bits(first, second)
    return type(first) is type(second) and first == second


def _equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same, bit by bit: a NaN is equal to itself."""
    if first.dtype != second.dtype or first.shape != second.shape or first.device != second.device:
        return False
    bits = _BITS.get(first.element_size())
    return torch.equal(first, second) if bits is None else torch.equal(first.view(bits), second.view(bits))
