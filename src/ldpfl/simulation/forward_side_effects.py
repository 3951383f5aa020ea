"""Check that a model changes nothing while it runs. A change could carry samples into what is sent or kept without randomisation.

Inside ``vmap`` PyTorch counts every write to a tensor (``Tensor._version``), and forbids ``.data`` and NumPy, which write past the counter.
Outside of ``vmap`` such writes are possible, so values are compared there, bit by bit.
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
"""Attributes of a module that hold its tensors and submodules, which :func:`_snapshot` reads separately."""

VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of PyTorch's recurrent modules that hold their parameters a second time."""

_CONTAINERS = (dict, OrderedDict, list, tuple, set)
"""Types of which only the type is stored for an empty value."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each size of a number in bytes, to compare numbers bit by bit."""


@contextmanager
def refuse_state_changes(module: nn.Module, losses: Callable[..., object] | None = None) -> Iterator[None]:
    """Raise an error if the block changes ``module`` or ``losses``.

    Compared are a module's parameters, their gradients, its buffers, its other attributes and those of its class; and the attributes of a
    loss, or the variables that it takes from the functions around it.

    Raises:
        PrivacyError: something has changed; the message names it.
    """

    def state() -> dict[str, object]:
        return _snapshot(module) | _snapshot_of_losses(losses)

    before = state()
    with _refuse_changes(module, lambda: _differing_names(before, state())):
        yield


@contextmanager
def refuse_tensor_writes(module: nn.Module, trained: Mapping[str, Tensor], *, by_value: bool) -> Iterator[None]:
    """Raise an error if the block, a forward or backward pass of ``module``, writes to the ``trained`` tensors, given by name.

    Inside ``vmap`` counters show every write. Elsewhere ``by_value`` is needed: it copies all tensors and compares them.

    Raises:
        PrivacyError: a tensor was written to; the message names it.
    """
    versions = {name: tensor._version for name, tensor in trained.items()}
    copies = {name: tensor.detach().clone() for name, tensor in trained.items()} if by_value else {}

    def written_names() -> list[str]:
        by_counter = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        return by_counter or [name for name, copy in copies.items() if not _equal_bits(copy, trained[name].detach())]

    with _refuse_changes(module, written_names):
        yield


@contextmanager
def _refuse_changes(module: nn.Module, changed_names: Callable[[], list[str]]) -> Iterator[None]:
    """Raise a :class:`PrivacyError` after the block if ``changed_names`` returns any name.

    It replaces an error that the block raised, since the change may have caused that error.
    """
    try:
        yield
    except LdpflError:
        raise
    except Exception as error:
        _raise_if_changed(module, changed_names(), error)
        raise
    _raise_if_changed(module, changed_names(), None)


def _raise_if_changed(module: nn.Module, changed: list[str], cause: Exception | None) -> None:
    """Raise a PrivacyError for ``module`` if the list of ``changed`` names is not empty."""
    if changed:
        why = (
            "while it ran, which could store or send information on its samples that no mechanism has randomised: write forward and hooks "
            "so that they change nothing in the model (for embeddings: remove max_norm)"
        )
        text = f"{type(module).__name__} changed {', '.join(changed)} {why}"
        raise PrivacyError(text, advice=f"it changed its own state {why}") from cause


def _snapshot(module: nn.Module) -> dict[str, object]:
    """Return the state of ``module``, by name, in a form that can be compared: copies of tensors, and other attributes as bytes."""
    snapshot: dict[str, object] = {}
    copies: dict[int, object] = {}  # by id: all parts of a model of ``transformers`` share one config, which is copied once
    for owner in {cls: None for submodule in module.modules() for cls in type(submodule).__mro__}:
        snapshot |= _class_attributes(owner)
    for module_name, submodule in module.named_modules():
        left_out = PARTS | VIEWS if isinstance(submodule, nn.RNNBase) else PARTS
        prefix = f"{module_name}." if module_name else ""
        attributes = ((key, value) for key, value in submodule.__dict__.items() if key not in left_out)
        for key, value in chain(attributes, submodule._buffers.items(), submodule._parameters.items()):
            if id(value) not in copies:
                copies[id(value)] = _frozen_fingerprint(value) if _is_frozen(value) else _comparable_copy(value)
            snapshot[prefix + key] = copies[id(value)]
            if isinstance(value, Tensor) and isinstance(value, nn.Parameter):  # the first check is cheaper, and enough for most attributes
                snapshot[f"{prefix}{key}.grad"] = _comparable_copy(value.grad)
    return snapshot


def _class_attributes(owner: type) -> dict[str, object]:
    """Return the values, by name, that the class ``owner`` keeps for all its objects. Classes of well-known libraries are left out."""
    if owner.__module__.partition(".")[0] in _LIBRARIES_WITHOUT_CLASS_STATE:
        return {}
    values = ((key, value) for key, value in vars(owner).items() if isinstance(value, (*_MUTABLE, int, float, str, Tensor)))
    return {f"{owner.__name__}.{key}": _comparable_copy(value) for key, value in values if not key.startswith("__")}


_LIBRARIES_WITHOUT_CLASS_STATE = frozenset({"builtins", "torch", "ldpfl", "transformers", "peft", "timm"})
_MUTABLE = (dict, list, set, bytearray)


def _snapshot_of_losses(losses: Callable[..., object] | None) -> dict[str, object]:
    """Return the state of a loss, by name, in a form that can be compared."""
    if losses is None:
        return {}
    if isinstance(losses, nn.Module):
        return {f"losses.{name}": value for name, value in _snapshot(losses).items()}
    if isinstance(losses, FunctionType):  # pickle stores only its name
        state = (_closure_values(losses), losses.__defaults__, losses.__kwdefaults__, losses.__dict__)
        return {"losses": _comparable_copy(state)} if any(state) else {}
    return {"losses": _comparable_copy(losses)}


def _is_frozen(value: object) -> bool:
    """Whether ``value`` is a frozen parameter whose bits can be read."""
    return isinstance(value, nn.Parameter) and not value.requires_grad and value.layout == torch.strided and value.numel() > 0


def _frozen_fingerprint(value: Tensor) -> object:
    """Return write counter, address, shape and SHA-256 of a frozen parameter. Copies would double the memory of a pretrained model."""
    octets = value.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return value._version, value.data_ptr(), tuple(value.shape), hashlib.sha256(octets.data).digest()


def _comparable_copy(value: object) -> object:
    """Return a copy of ``value`` or bytes that stand for it, such that :func:`_equal` finds a later change of ``value``."""
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
            return (str, (_type_and_identity(value),), (_closure_values(value), value.__defaults__, value.__kwdefaults__, value.__dict__))
        with suppress(Exception):
            return value.__reduce_ex__(4)
        return (str, (_type_and_identity(value),))  # such as a nested class, or a tensor of vmap


def _closure_values(function: FunctionType) -> list[object]:
    """Return the values of the variables that ``function`` takes from the functions around it."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            values.append(cell.cell_contents)
    return values


def _type_and_identity(value: object) -> str:
    """Return the type and identity of ``value``, as text."""
    return f"{type(value).__name__} {id(value)}"


def _differing_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that are in only one of both snapshots."""
    return [name for name in {**before, **after} if name not in before or name not in after or not _equal(before[name], after[name])]


def _equal(first: object, second: object) -> bool:
    """Whether two values of :func:`_comparable_copy` are equal, tensors bit by bit."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _equal_bits(first, second)
    return type(first) is type(second) and first == second


def _equal_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit by bit. A NaN is equal to itself."""
    if first.dtype != second.dtype or first.shape != second.shape or first.device != second.device:
        return False
    bits = _BITS.get(first.element_size())
    return torch.equal(first, second) if bits is None else torch.equal(first.view(bits), second.view(bits))
