"""Which mechanisms are built in, and who wrote the code of a mechanism object.

The built-in mechanisms are listed by name, without importing them, so that policies can check names. Guarantees are proved for this
project's code. For other code they are only what its author claims.

The author is derived from the code that will run. The code's own statements are not trusted: its name, file name, ``__module__`` and
``__wrapped__``. A class is this project's if it equals the class that the file of its module defines. To check this, the file is run
once more, beside the imported module, and the two classes are compared member by member. An instance is this project's if three things
hold: its class and all base classes are this project's; no attribute of the instance hides a method, property or class variable; and
every value it holds is this project's or plain data. The check runs before and after the mechanism states its release. A mechanism whose
name is not a built-in one is never this project's.

Not covered: code in the same process can rewrite this module, or the functions and modules that mechanisms call. Code that can write
to this project's files can change a class in both places. Whoever runs such code has to judge it.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import CellType, FunctionType, GetSetDescriptorType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Generic, Protocol

import numpy as np

from ldpfl.privacy.events import KINDS, OURS, USERS_CODE, Release

BUILT_IN: Mapping[str, str] = {
    "duchi": "ldpfl.mechanisms.duchi:DuchiSettings",
    "harmony": "ldpfl.mechanisms.harmony:HarmonySettings",
    "laplace": "ldpfl.mechanisms.scalar:LaplaceSettings",
    "piecewise": "ldpfl.mechanisms.scalar:PiecewiseSettings",
    "hybrid": "ldpfl.mechanisms.scalar:HybridSettings",
    "duchi-vector": "ldpfl.mechanisms.duchi_vector:DuchiVectorSettings",
    "privunit-g": "ldpfl.mechanisms.privunit:PrivUnitGSettings",
    "full-dp": "ldpfl.mechanisms.gaussian.fixed:FullDPSettings",
    "nbafl": "ldpfl.mechanisms.gaussian.fixed:NbAFLSettings",
    "time-varying": "ldpfl.mechanisms.gaussian.fixed:TimeVaryingSettings",
    "sensitive-dp": "ldpfl.mechanisms.gaussian.history:SensitiveDPSettings",
    "dpa": "ldpfl.mechanisms.gaussian.fixed:DpaSettings",
    "adapldp": "ldpfl.mechanisms.gaussian.history:AdapLDPSettings",
    "ladp": "ldpfl.mechanisms.gaussian.ladp:LadpSettings",
    "ladp-sound": "ldpfl.mechanisms.gaussian.ladp:LadpSoundSettings",
    "rotated-sign": "ldpfl.mechanisms.rotated_sign:RotatedSignSettings",
    "dp-sgd": "ldpfl.mechanisms.dp_sgd:DpSgdSettings",
    "dp-fedavg": "ldpfl.mechanisms.dp_fedavg:DpFedAvgSettings",
    "none": "ldpfl.mechanisms.identity:IdentitySettings",
}
"""Import path of each built-in mechanism's settings, by the mechanism's name."""


def is_built_in(name: str) -> bool:
    """Whether ``name`` is a built-in mechanism. Other mechanisms come with packages; looking one up runs the package's code."""
    return name in BUILT_IN


_RELEASES: Mapping[str, tuple[str, ...]] = {
    "duchi": ("binary",),
    "harmony": ("binary",),
    "rotated-sign": ("binary",),
    "laplace": ("pure",),
    "piecewise": ("pure",),
    "hybrid": ("pure",),
    "duchi-vector": ("pure",),
    "privunit-g": ("pure",),
    "full-dp": ("gaussian", "unprotected"),
    "nbafl": ("gaussian",),
    "time-varying": ("gaussian", "unprotected"),
    "sensitive-dp": ("gaussian", "unprotected"),
    "dpa": ("gaussian", "unprotected"),
    "adapldp": ("unprotected",),
    "ladp": ("unprotected",),
    "ladp-sound": ("gaussian",),
    "dp-sgd": ("gaussian",),
    "dp-fedavg": ("gaussian",),
    "none": ("unprotected",),
}
"""Kinds of release that each built-in mechanism makes, by its name. The kinds are named as in a ledger."""


_UNITS: Mapping[str, tuple[str, ...]] = {
    "duchi": ("weight",),
    "harmony": ("weight", "group", "layer"),
    "rotated-sign": ("coordinate",),
    "laplace": ("weight", "vector"),
    "piecewise": ("weight", "vector"),
    "hybrid": ("weight", "vector"),
    "dp-sgd": ("record", "person"),
    "none": ("weight",),
}
"""What one unit of a mechanism's release can be, by the mechanism's name. A mechanism that is not listed releases a whole vector."""


def may_release(name: str, kind: str, unit: str) -> bool:
    """Whether ``name`` is a built-in mechanism that makes releases of this ``kind`` with this ``unit``."""
    return kind in _RELEASES.get(name, ()) and unit in _UNITS.get(name, ("vector",))


_PACKAGE = Path(__file__).resolve().parents[1]
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_BASES: tuple[object, ...] = (object, tuple, ABC, Protocol, Generic)
"""Classes of the standard library that this project's classes inherit from."""

_DATA = ("decimal:Decimal", "fractions:Fraction", "numpy:ndarray", "numpy:float64", "numpy:int64", "torch:Tensor", "torch:dtype")
"""Library classes whose instances hold data only. Other library objects, such as ``numpy.vectorize`` or a module, may hold code."""

_COMPARED_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    CellType: ("cell_contents",),
    property: ("fget", "fset", "fdel"),
    cached_property: ("func",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    GetSetDescriptorType: ("__name__", "__objclass__"),
    MemberDescriptorType: ("__name__", "__objclass__"),
}
"""Attributes to compare when two members of a class are compared, by the member's type."""

_NOT_COMPARED = frozenset({"_abc_impl", "__annotations__", "__slotnames__"})
"""Members that Python itself maintains: the ``isinstance`` cache, annotations (which may be evaluated late) and the ``copy`` cache."""

_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "float": (float, int, np.float64),
    "float | None": (float, int, np.float64, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
}
"""Types that a field's value may have, by the field's annotation."""

MAX_NAME_LENGTH = 100
"""Number of characters of an author's name that are kept."""

_RERUN_LOCK = RLock()
"""Held while a file is run once more. Two threads would otherwise create two copies of one module, whose classes differ."""


class Releasing(Protocol):
    """A mechanism that states what it releases."""

    def release(self, ranges: Any) -> Release:
        """Return the privacy-relevant description of one client's report in a round with these ``ranges``."""
        ...


def released(mechanism: Releasing, ranges: Any, chosen_by: object = None) -> Release:
    """Return the release that ``mechanism`` states, with the author that :func:`author_of` finds.

    The ledger, plans and policies get releases only from here, so that none of them relies on a stated author. One exception: this
    project's own mechanism may state :data:`~ldpfl.privacy.events.USERS_CODE`, because only the run knows whose model it trains.

    Args:
        chosen_by: the mechanism that returned ``mechanism`` for a round, if any. Then both have to be this project's.
    """
    author_before = author_of(mechanism, chosen_by)
    stated = mechanism.release(ranges)
    kind = next((kind for kind in KINDS.values() if issubclass(type(stated), kind)), None)
    if kind is None:
        return stated  # a foreign kind of release: no accountant composes it, so its author does not matter
    # A foreign subclass may answer accountants in its own way, so only the values of the fields are copied.
    field_values: Any = {field.name: getattr(stated, field.name) for field in fields(kind)}
    # The mechanism's code ran in ``release`` and may have replaced classes, so the author is determined before and after.
    author_after = author_of(mechanism, chosen_by)
    author = author_before if author_before != OURS else author_after
    mechanism_name = field_values["mechanism"]
    if author == OURS and not (type(mechanism_name) is str and is_built_in(mechanism_name)):
        author = f"{_printable(str(mechanism_name))}, no mechanism of {OURS}"
    if author == OURS and field_values["author"] == USERS_CODE:
        author = USERS_CODE
    return replace(kind(**field_values), author=author)


def author_of(*things: object) -> str:
    """Return :data:`OURS` if all code of ``things``, and of the objects they hold, is this project's; else name the first foreign code."""
    waiting = list(things)
    seen: dict[int, object] = {}  # it holds the objects too: the id of an object that was freed could be given to another one
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or _is_one_of(type(thing), _VALUES):
            continue
        seen[id(thing)] = thing
        if type(thing) is dict:
            waiting += [*thing.keys(), *thing.values()]
        elif _is_one_of(type(thing), _CONTAINERS):
            waiting += thing  # type: ignore[arg-type]  # a container, which mypy does not see
        elif type(thing) is MethodType:
            waiting += [thing.__func__, thing.__self__]
        elif not _is_data(thing):
            foreign = _first_foreign_part(thing)
            if foreign is not None:
                return _describe_foreign(foreign)
            waiting += _values_held_by(thing)
    return OURS


def _is_one_of(kind: type, kinds: Sequence[object]) -> bool:
    """Whether ``kind`` is identical to one of ``kinds``. ``in`` would call ``==``, which a foreign class can override."""
    return any(kind is other for other in kinds)


def _is_data(thing: object) -> bool:
    """Whether ``thing`` is a library object that holds only numbers: no Python objects, and no attributes that were added to it."""
    for import_path in _DATA:
        module, _, name = import_path.partition(":")
        if type(thing) is getattr(sys.modules.get(module), name, None):
            return not getattr(thing, "__dict__", None) and not getattr(getattr(thing, "dtype", None), "hasobject", False)
    return False


def _first_foreign_part(thing: Any) -> object | None:
    """Return the foreign code in ``thing``: one of its classes, or ``thing`` itself. None if all its code is this project's.

    An instance counts as foreign if one of its attributes hides a class member, or one of its dataclass fields has an unexpected type.
    :func:`author_of` checks the values that it holds.
    """
    if type(thing) is FunctionType:
        return None if _is_ours(thing) else thing
    is_class = issubclass(type(thing), type)  # isinstance would ask the object itself
    lineage = type.mro(thing if is_class else type(thing))
    foreign = next((kind for kind in lineage if not (_is_one_of(kind, _BASES) or _is_ours(kind))), None)
    if foreign is not None or is_class:
        return foreign
    hides = any(_hides_member(thing, name, lineage) for name in getattr(thing, "__dict__", ()))
    return thing if hides or _has_unexpected_types(thing) else None


def _has_unexpected_types(thing: Any) -> bool:
    """Whether a field annotated as number or text holds another type. Bounds could be wrong: small NumPy integers, say, wrap around."""
    if not is_dataclass(thing):
        return False
    expected_and_type = ((_FIELD_TYPES.get(str(field.type)), type(getattr(thing, field.name, None))) for field in fields(thing))
    return any(expected is not None and not _is_one_of(kind, expected) for expected, kind in expected_and_type)


def _hides_member(thing: Any, name: str, lineage: list[type]) -> bool:
    """Whether the instance attribute ``name`` hides a method, property or class variable of a class in ``lineage``.

    Two attributes are allowed: the stored value of a cached property, and a dataclass field, whose default is a class variable.
    """
    member = next((vars(kind)[name] for kind in lineage if name in vars(kind)), None)
    if member is None or type(member) is cached_property:
        return False
    field_names = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
    return callable(member) or hasattr(member, "__get__") or name not in field_names  # a property has ``__get__``


def _values_held_by(thing: object) -> Iterator[object]:
    """Yield the values that an instance of this project's classes holds, and the classes that are members of its classes."""
    if isinstance(thing, type | FunctionType):  # _is_ours compared its members with its file
        return
    lineage = type(thing).__mro__
    yield from getattr(thing, "__dict__", {}).values()
    yield from (getattr(thing, name) for kind in lineage for name in vars(kind).get("__slots__", ()) if hasattr(thing, name))
    yield from thing if isinstance(thing, tuple) else ()
    yield from (member for kind in lineage if not _is_one_of(kind, _BASES) for member in vars(kind).values() if isinstance(member, type))


def _is_ours(code: type | FunctionType) -> bool:
    """Whether a class or function is this project's.

    It must be found under its stated name in a module of this project, and equal the definition in that module's file.
    """
    module = str(code.__module__)
    is_found = _look_up(code, sys.modules.get(module)) is code
    module_copy = _module_from_file(module) if is_found else None
    if module_copy is None:
        return False
    code_copy = _look_up(code, module_copy)
    if not isinstance(code, type):
        return _is_equal(code, code_copy)
    if type(code) is not type(code_copy) or not _is_equal(code.__bases__, code_copy.__bases__):
        return False
    members, copied = ({name: value for name, value in vars(kind).items() if name not in _NOT_COMPARED} for kind in (code, code_copy))
    return _is_equal(members, copied)


def _module_from_file(name: str) -> ModuleType | None:
    """Return a copy of this project's module ``name``, made by running its file again; None if this project has no such module."""
    with _RERUN_LOCK:
        return _rerun_module(name)


@lru_cache(maxsize=256)
def _rerun_module(name: str) -> ModuleType | None:
    """Run the file of this project's module ``name`` (some 10 ms), and return the copy, cached. None if this project has no such module."""
    file = _file_of(name)
    spec = None if file is None else spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file_of(name: str) -> Path | None:
    """Return the source file of this project's module ``name``, or its bytecode if sources were not installed; None if it has neither."""
    first, *parts = name.split(".")
    if first != OURS or not all(part.isidentifier() for part in parts):
        return None
    path = _PACKAGE.joinpath(*parts)
    path = path / "__init__" if path.is_dir() else path
    return next((file for ending in (".py", ".pyc") if (file := path.with_name(path.name + ending)).is_file()), None)


def _look_up(code: Any, module: object) -> Any:
    """Return the object that has the qualified name of ``code`` in ``module``; None if ``module`` has none."""
    found = module
    for name in code.__qualname__.split("."):  # such as Class.method
        found = getattr(found, name, None)
    return found


def _is_equal(imported: Any, from_file: Any) -> bool:
    """Whether a member of an imported class equals the member that the class's file defines: the same bytecode, or the same value."""
    if imported is from_file:
        return True
    if type(imported) is not type(from_file):
        return False
    if isinstance(imported, type):  # only a reference to a class; author_of checks the class itself
        has_same_name = (imported.__module__, imported.__qualname__) == (from_file.__module__, from_file.__qualname__)
        return has_same_name and _look_up(imported, sys.modules.get(imported.__module__)) is imported
    if isinstance(imported, dict | MappingProxyType):
        return imported.keys() == from_file.keys() and all(_is_equal(imported[key], from_file[key]) for key in imported)
    if isinstance(imported, tuple | list):
        return len(imported) == len(from_file) and all(map(_is_equal, imported, from_file))
    kind = type(imported)
    if kind is FunctionType and not _have_same_globals(imported.__globals__, from_file.__globals__):
        return False
    # The dataclasses module's own objects, such as fields, have no ``==``: their slots are compared.
    attributes = _COMPARED_ATTRIBUTES.get(kind, kind.__slots__ if kind.__module__ == "dataclasses" else ())
    if not attributes:
        return bool(imported == from_file)
    return all(_is_equal(getattr(imported, name), getattr(from_file, name)) for name in attributes)


def _have_same_globals(imported: dict[str, Any], from_file: dict[str, Any]) -> bool:
    """Whether two functions look up global names in the same module, or in the imported and the re-run copy of one module."""
    if imported is from_file:
        return True
    name = str(from_file.get("__name__"))
    # ``sys`` stands for a module that is missing: its variables are neither dictionary.
    return from_file is vars(_module_from_file(name) or sys) and imported is vars(sys.modules.get(name, sys))


def _describe_foreign(code: Any) -> str:
    """Return the name of foreign code for a message. If the name is one of this project's, also say why the code is foreign."""
    kind = code if isinstance(code, type | FunctionType | MethodType) else type(code)
    name = _printable(f"{kind.__module__}:{kind.__qualname__}")
    if not name.startswith((f"{OURS}.", f"{OURS}:")):
        return name
    return f"{name} ({'changed' if _file_of(str(kind.__module__)) else 'its file is not there to compare it with'})"


def _printable(text: str) -> str:
    """Return ``text`` without characters that may steer a terminal, cut to ``MAX_NAME_LENGTH``."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:MAX_NAME_LENGTH]
