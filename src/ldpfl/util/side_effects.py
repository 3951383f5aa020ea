"""Check that a model changes nothing while it runs. Otherwise samples could reach what is sent or kept, without noise.

Inside ``vmap`` PyTorch counts every write to a tensor (``Tensor._version``), and forbids ``.data`` and NumPy, which write past the counter.
Outside of ``vmap`` such writes are possible, so values are compared there, bit by bit.

The state of a user's model or loss that ``copy.deepcopy`` does not copy is compared, too: values that classes keep, and values that
functions keep. A function keeps its default arguments, its attributes and the variables of the functions around it. One record could
change such a value, and so the vectors of the records after it, even if each record has a copy of the model to itself. Not found are
global variables, files, caches, thread-local variables, and values in objects that cannot be copied.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from itertools import chain
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ldpfl.errors import LdpflError, PrivacyError

PARTS = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that hold its tensors and submodules, which :func:`_snapshot` reads separately."""

VIEWS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes of PyTorch's recurrent modules that hold their parameters a second time."""


@contextmanager
def refuse_state_changes(
    module: nn.Module, losses: Callable[..., object] | None = None, outside: OutsideState | None = None
) -> Iterator[None]:
    """Raise an error if the block changes ``module`` or ``losses``.

    Parameters, their gradients, buffers and other attributes of the module are compared, and the attributes of the loss. So is the state
    ``outside`` that copies of the model share, such as attributes of classes. By default it is found from ``module`` and ``losses``.

    Raises:
        PrivacyError: something has changed; the message names it.
    """
    reached = OutsideState.of(module, losses) if outside is None else outside

    def state() -> dict[str, object]:
        return _snapshot(module) | _snapshot_of_losses(losses) | reached.snapshot()

    before = state()
    with _refuse_changes(module, lambda: _differing_names(before, state())):
        yield


@contextmanager
def refuse_tensor_writes(module: nn.Module, trained: Mapping[str, Tensor], *, by_value: bool) -> Iterator[None]:
    """Raise an error if the block, a forward or backward pass of ``module``, writes to the ``trained`` tensors, given by name.

    Inside ``vmap``, PyTorch counts every write to a tensor. Elsewhere it does not count those by ``.data`` or NumPy, so that ``by_value``
    is needed, which compares the tensors with copies.

    Raises:
        PrivacyError: a tensor was written to; the message names it.
    """
    versions = {name: tensor._version for name, tensor in trained.items()}
    copies = {name: tensor.detach().clone() for name, tensor in trained.items()} if by_value else {}

    def written_names() -> list[str]:
        by_counter = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        return by_counter or [name for name, copy in copies.items() if not equal_bits(copy, trained[name].detach())]

    with _refuse_changes(module, written_names):
        yield


@contextmanager
def _refuse_changes(module: nn.Module, changed_names: Callable[[], list[str]]) -> Iterator[None]:
    """Raise a :class:`PrivacyError` after the block if ``changed_names`` returns any name.

    The PrivacyError replaces another error of the block, since the change may have caused that error. An error of ldpfl passes unchanged,
    because it says what is wrong.
    """
    try:
        yield
    except LdpflError:
        raise
    except Exception as error:
        _raise_if_changed(module, changed_names(), error)
        raise
    _raise_if_changed(module, changed_names(), cause=None)


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
    for module_name, submodule in module.named_modules():
        left_out = PARTS | VIEWS if isinstance(submodule, nn.RNNBase) else PARTS
        prefix = f"{module_name}." if module_name else ""
        # A module can be replaced by None, or by one with equal attributes.
        snapshot[module_name or "its layers"] = type(submodule), [(name, id(child)) for name, child in submodule._modules.items()]
        attributes = ((key, value) for key, value in _attributes(submodule).items() if key not in left_out)
        for key, value in chain(attributes, submodule._buffers.items(), submodule._parameters.items()):
            if id(value) not in copies:
                copies[id(value)] = _frozen_fingerprint(value) if _is_frozen(value) else comparable_copy(value)
            snapshot[prefix + key] = copies[id(value)]
            if isinstance(value, Tensor) and isinstance(value, nn.Parameter):  # the first check is cheaper, and enough for most attributes
                snapshot[f"{prefix}{key}.grad"], snapshot[f"{prefix}{key}.requires_grad"] = comparable_copy(value.grad), value.requires_grad
    return snapshot


def _snapshot_of_losses(losses: Callable[..., object] | None) -> dict[str, object]:
    """Return the state of a loss, by name, in a form that can be compared."""
    if losses is None or isinstance(losses, FunctionType):  # :class:`OutsideState` has the state of functions
        return {}
    if isinstance(losses, nn.Module):
        return {f"losses.{name}": value for name, value in _snapshot(losses).items()}
    return {"losses": comparable_copy(losses)}


def _is_frozen(value: object) -> bool:
    """Whether ``value`` is a frozen parameter whose bits can be read."""
    return isinstance(value, nn.Parameter) and not value.requires_grad and value.layout == torch.strided and value.numel() > 0


def _frozen_fingerprint(value: Tensor) -> object:
    """Return what tells a later change of a frozen parameter: write counter, address, shape, SHA-256 and its Python attributes.

    Copies would double the memory of a pretrained model.
    """
    octets = value.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return (
        value._version,
        value.data_ptr(),
        tuple(value.shape),
        hashlib.sha256(octets.data).digest(),
        comparable_copy(_attributes_of_tensor(value)),
    )


def _differing_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that are in only one of both snapshots."""
    return [name for name in {**before, **after} if name not in before or name not in after or not equal(before[name], after[name])]


_LIBRARIES = frozenset({"torch", "numpy", "ldpfl", "transformers", "peft", "timm"}) | sys.stdlib_module_names
"""Top-level modules whose classes and functions keep nothing of samples."""

_WITH_OWN_CACHES = frozenset({"pandas", "pyarrow", "polars", "scipy", "sklearn", "PIL", "tokenizers", "datasets", "sentencepiece"})
"""Top-level modules whose objects fill caches when they are read, and leave these out of their pickled form."""

_CONTAINERS = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, eq=False)
class OutsideState:
    """Finds the values that users' classes and functions keep, for all classes and functions that a model or a loss uses.

    Attributes:
        classes, functions: classes and functions that are not of a library.
    """

    classes: tuple[type, ...]
    functions: tuple[FunctionType, ...]

    @classmethod
    def of(cls, *roots: object) -> OutsideState:
        """Return the users' classes and functions that ``roots`` refer to by attributes, elements of containers, classes and functions."""
        classes, functions = dict[type, None](), dict[FunctionType, None]()  # sets that keep the order
        seen, waiting = set[int](), list(roots)
        while waiting:
            value = waiting.pop()
            if type(value) in _WITHOUT_PARTS or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, FunctionType) and not _is_of_library(value):
                functions[value] = None
            elif isinstance(value, type) and not _is_of_library(value):
                classes[value] = None
            waiting += _parts(value)
        return cls(tuple(classes), tuple(functions))

    def snapshot(self) -> dict[str, object]:
        """Return all values that these classes and functions keep, by name, in a form that can be compared."""
        values: dict[str, object] = {f"{owner.__name__}.{key}": value for owner, key, value in self._class_values()}
        for function in self.functions:
            name = f"a default argument, an attribute or an enclosing variable of {function.__qualname__}"
            values[name] = [values.get(name), _kept_by_function(function)]  # two functions may have one name
        return {name: comparable_copy(value) for name, value in values.items()}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """After the block, put back all values that the classes and functions keep. A value that cannot be copied stays."""
        # Each value is kept twice: in a form that can be compared, and in one that can be put back.
        saved_attributes = {
            (owner, key): (comparable_copy(value), _attribute_restorer(owner, key, value)) for owner, key, value in self._class_values()
        }
        saved_functions = [(function, comparable_copy(_kept_by_function(function)), _restorer(function)) for function in self.functions]
        try:
            yield
        finally:
            attributes_now = {(owner, key) for owner, key, _ in self._class_values()}
            for owner, key in attributes_now - saved_attributes.keys():  # the block added them
                delattr(owner, key)
            for (owner, key), (before, put_back) in saved_attributes.items():
                if key not in vars(owner) or not equal(before, comparable_copy(vars(owner)[key])):
                    put_back()
            for function, before, put_back in saved_functions:
                if not equal(before, comparable_copy(_kept_by_function(function))):
                    put_back()

    def _class_values(self) -> list[tuple[type, str, object]]:
        """Return class, name and value of each class attribute that can hold state between calls."""
        return [(owner, key, value) for owner in self.classes for key, value in _kept_by_class(owner).items()]


_WITHOUT_PARTS = frozenset({type(None), bool, int, float, complex, str, bytes})


def _is_of_library(value: type | FunctionType) -> bool:
    """Whether a class or function is of a well-known library."""
    return _package(value) in _LIBRARIES


def _package(value: type | FunctionType) -> str:
    """Return the top-level module of a class, or that in which a function was written: ``functools.wraps`` changes its ``__module__``."""
    module = value.__globals__.get("__name__") if isinstance(value, FunctionType) else value.__module__
    return str(module).partition(".")[0]


def _parts(value: object) -> Iterable[object]:
    """Return the values that ``value`` refers to and that may keep something: attributes, elements, a class, parts of a function."""
    if isinstance(value, FunctionType):
        return [*_kept_by_function(value), *_closure_values(value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial | functools.partialmethod):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type):
        return [] if _is_of_library(value) else [type(value), *value.__mro__[1:], *vars(value).values()]
    if isinstance(value, BuiltinMethodType):  # such as the method ``append`` of a list
        return [value.__self__]
    if isinstance(value, dict):
        default = value.default_factory if isinstance(value, defaultdict) else None
        return [type(value), *value.values(), default, *_attributes_of_container(value)]
    if isinstance(value, _CONTAINERS):
        return [type(value), *value, *_attributes_of_container(value)]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, Tensor):
        return [type(value), *vars(value).values()]
    if type(value).__module__ == "functools":  # such as a function with a cache, or a cached property
        return [getattr(value, name, None) for name in ("__wrapped__", "func", "dispatcher")]
    if isinstance(value, SimpleNamespace | Namespace):
        return list(vars(value).values())
    if isinstance(value, nn.Module) or _may_keep(type(value)):
        attributes = _attributes(value).values()
        # Empty containers, such as PyTorch's many lists of hooks, refer to nothing.
        return [type(value), *(part for part in attributes if not (type(part) in _CAN_BE_EMPTY and not part))]
    return []


def _attributes_of_container(value: object) -> Iterable[object]:
    """Return the attributes of a container, which only subclasses have."""
    return () if type(value) in (*_CAN_BE_EMPTY, *_CONTAINERS) else _attributes(value).values()


def _may_keep(owner: type) -> bool:
    """Whether objects of this class may refer to a user's functions: users' classes, containers, and ldpfl's classes, which wrap losses."""
    return not _is_of_library(owner) or owner.__module__.partition(".")[0] in ("ldpfl", "collections", "weakref")


def _kept_by_class(owner: type) -> dict[str, object]:
    """Return the values, by name, that a class keeps for all its objects: all but methods, properties and what Python itself adds."""
    kept = ((key, value) for key, value in vars(owner).items() if key not in _ADDED_BY_PYTHON)
    return {key: value for key, value in kept if not _is_plain_method(value)}


def _is_plain_method(value: object) -> bool:
    """Whether a class attribute is a method or a property that keeps nothing itself. A function's values are found by the function."""
    # Python's methods and properties have ``__get__``. An object of a user's class that has it may still keep values.
    if not hasattr(type(value), "__get__") or not _is_of_library(type(value)):
        return False
    wrapped = _parts(value) if isinstance(value, classmethod | staticmethod | property | functools.partialmethod) else ()
    return all(type(part) in _WITHOUT_PARTS or isinstance(part, type | FunctionType | BuiltinFunctionType) for part in wrapped)


_ADDED_BY_PYTHON = frozenset(
    {
        *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__"),
        *("__slotnames__", "_abc_impl", "_member_map_", "_value2member_map_"),
    }
)
"""Names of attributes that Python may add to a class while the class is used, or in which it lists the members of an enum."""


def _kept_by_function(function: FunctionType) -> tuple[object, ...]:
    """Return the values that a function keeps between two calls."""
    return (*_closure_values(function), function.__defaults__, function.__kwdefaults__, function.__dict__, function.__annotations__)


def _copy_of(value: Any) -> Any:
    """Return a deep copy of ``value``, also of what a method or property wraps, or ``value`` itself if it cannot be copied."""
    if isinstance(value, classmethod | staticmethod):
        return type(value)(_copy_of(value.__func__))
    if type(value) is property:
        return property(_copy_of(value.fget), _copy_of(value.fset), _copy_of(value.fdel), value.__doc__)
    with suppress(Exception):
        return copy.deepcopy(value)
    return value


def _attribute_restorer(owner: type, key: str, value: object) -> Callable[[], None]:
    """Return a function that puts back the class attribute ``owner.key``, which is now ``value``."""
    saved = _copy_of(vars(value) if isinstance(value, Enum) else value)

    def put_back() -> None:
        if isinstance(value, Enum):  # a member of an enum cannot be replaced, but its attributes can
            vars(value).clear()
            vars(value).update(saved)
        else:
            setattr(owner, key, saved)

    return put_back


def _restorer(function: FunctionType) -> Callable[[], None]:
    """Return a function that puts back all that ``function`` keeps now."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            cells.append((cell, _copy_of(cell.cell_contents)))
    defaults, keyword_defaults, attributes, annotations = (
        _copy_of(value) for value in (function.__defaults__, function.__kwdefaults__, function.__dict__, function.__annotations__)
    )

    def put_back() -> None:
        """Restore the enclosing variables (closure cells), defaults, attributes and annotations that were copied above."""
        for cell, value in cells:
            cell.cell_contents = value
        function.__defaults__, function.__kwdefaults__, function.__annotations__ = defaults, keyword_defaults, annotations
        function.__dict__.clear()
        function.__dict__.update(attributes)

    return put_back


_CAN_BE_EMPTY = (dict, OrderedDict, list, tuple, set)
"""Types of containers. An empty container is compared by its type alone."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type for each size of a number in bytes, to compare numbers bit by bit."""


def comparable_copy(value: object) -> object:
    """Return a copy of ``value`` or bytes that stand for it, such that :func:`equal` finds a later change of ``value``."""
    if value is None or type(value) in (bool, int, str):  # most attributes: to pickle them would take most of the time
        return value
    if type(value) in _CAN_BE_EMPTY and not value:  # most other attributes: empty lists of hooks
        return type(value)
    if isinstance(value, Tensor) and _is_plain(value):
        attributes = _attributes_of_tensor(value)
        if not attributes:
            return value.detach().clone()
        value = [value.detach(), attributes]  # no clone, because a tensor is pickled with its address
    for contents in (_Contents, _AllContents):
        with suppress(Exception):
            return contents.of(value)
    return _type_and_identity(value)


def _is_plain(value: Tensor) -> bool:
    """Whether ``value`` is a dense tensor that is not wrapped by a function transform such as ``vmap``."""
    return value.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _attributes_of_tensor(value: Tensor) -> dict[str, object]:
    """Return the Python attributes of a tensor by name, without those by which PyTorch marks it."""
    return {name: attribute for name, attribute in vars(value).items() if not name.startswith(_MARKS_OF_TENSORS)}


_MARKS_OF_TENSORS = ("_dynamo", "_is_buffer", "persistent")
"""Starts of names of attributes that PyTorch gives to a tensor while it compiles a model, or makes a buffer of the tensor."""


class _Contents(pickle.Pickler):
    """A pickler for comparison.

    An object of a user's class is pickled with all its attributes, because its own way of pickling may leave some out, such as a cache.
    """

    @classmethod
    def of(cls, value: object) -> bytes:
        """Return the contents of ``value`` as bytes for comparison. They cannot be unpickled."""
        stream = BytesIO()
        cls(stream).dump(value)
        return stream.getvalue()

    def reducer_override(self, value: object) -> Any:
        """Return how to pickle ``value``: an object of a user's class by all its parts, and others as usual."""
        if not _is_of_users_class(value):
            return NotImplemented
        # The third entry, which pickle treats as a state, brings all parts into the bytes. Nobody unpickles them.
        return (str, (type(value).__name__,), (_attributes(value), _elements(value), _usually_pickled_parts(value)))


class _AllContents(_Contents):
    """A pickler for comparison that accepts every object, but is slower.

    A function that pickle refuses, such as a lambda, is pickled as its identity, defaults, attributes and enclosing variables. An
    object whose contents Python does not list, such as a lock, is pickled as its type and identity.
    """

    def reducer_override(self, value: object) -> Any:
        """Return how to pickle ``value``, by the first of the ways in the classes' descriptions that fits."""
        if _is_of_users_class(value):
            return super().reducer_override(value)
        with suppress(Exception):
            pickle.dumps(value)
            return NotImplemented  # pickle it as usual
        if isinstance(value, classmethod | staticmethod | property):
            return (str, (type(value).__name__,), _parts(value))
        if isinstance(value, FunctionType):
            return (str, (_type_and_identity(value),), _kept_by_function(value))
        with suppress(Exception):
            reduced = value.__reduce_ex__(4)
            if not isinstance(reduced, str):  # a global name, which pickle has not found above
                return reduced
        return (str, (_type_and_identity(value),))  # such as a nested class, or a tensor of vmap


def _is_of_users_class(value: object) -> bool:
    """Whether ``value`` is an object, but neither a class nor a function, whose class is not of a well-known library."""
    is_object = not isinstance(value, type | FunctionType)
    return is_object and not _is_of_library(type(value)) and _package(type(value)) not in _WITH_OWN_CACHES


def _attributes(value: object) -> dict[str, object]:
    """Return all attributes of ``value`` by name, including those in ``__slots__``."""
    attributes: dict[str, object] = {}
    with suppress(Exception):  # an object without attributes, or one that refuses to show them
        attributes |= value.__dict__
    for owner in type(value).__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # the attribute has no value yet
                    attributes[f"{owner.__name__}.{name}"] = member.__get__(value)
    return attributes


def _elements(value: object) -> list[object]:
    """Return the elements of an object of a subclass of a container, as the container itself lists them; an empty list for others."""
    if isinstance(value, dict):
        return [list(dict.items(value))]
    kind: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    return [] if kind is None else list(kind.__iter__(value))


def _usually_pickled_parts(value: object) -> list[object]:
    """Return what pickle would store of ``value``, such as the elements of a list; an empty list if pickle refuses it."""
    with suppress(Exception):
        reduced = value.__reduce_ex__(4)
        # From the fourth entry on, they are iterators over elements, which pickle refuses.
        return [reduced] if isinstance(reduced, str) else [*reduced[1:3], *(list(part) for part in reduced[3:5] if part is not None)]
    return []


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
