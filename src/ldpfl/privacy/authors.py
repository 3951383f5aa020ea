"""Which mechanisms are this project's own, and whose code a mechanism is.

No mechanism is imported to say which are ours, so that policies know their names too. Guarantees are proved of this project's code; of
other code they are what its author claims.

The author is found from the code that will run, never from what this code says of itself: not from a name, a file name, ``__module__``
or ``__wrapped__``. A class is this project's if it is as the file of its module defines it. To find that out, the file is run once
more, beside the module that is in use, and the two classes are compared member by member. An instance is this project's if its class
and all classes above it are, if it hides no method, property or class variable of theirs, and if all that it holds is this project's
or plain data. It is judged before and after it is asked, and a mechanism whose name is none of ours is never ours.

Out of reach: code in the same process can rewrite this module, or the functions and modules that mechanisms call. Code that can write
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

from ldpfl.privacy.events import OURS, BinaryRelease, GaussianRelease, PureRelease, Release, UnprotectedRelease

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
"""By name, where its settings are."""


def is_built_in(name: str) -> bool:
    """Whether the mechanism called ``name`` is one of ours; others come with packages, whose code runs when they are looked up."""
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
"""By name, the kinds of releases that it makes, as a ledger names them."""


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
"""By name, what one unit of a release stands for; of all others it is the whole vector."""


def may_release(name: str, kind: str, unit: str) -> bool:
    """Whether the mechanism called ``name`` is one of ours, and makes releases of this kind, by this unit."""
    return kind in _RELEASES.get(name, ()) and unit in _UNITS.get(name, ("vector",))


_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS: tuple[type[Release], ...] = (BinaryRelease, PureRelease, GaussianRelease, UnprotectedRelease)
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_BASES: tuple[object, ...] = (object, tuple, ABC, Protocol, Generic)
"""Classes of the standard library from which classes of ours are derived."""

_DATA = ("decimal:Decimal", "fractions:Fraction", "numpy:ndarray", "numpy:float64", "numpy:int64", "torch:Tensor", "torch:dtype")
"""Classes of libraries whose instances hold data; what else a library has, as ``numpy.vectorize`` or a module, may hold code."""

_PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    CellType: ("cell_contents",),
    property: ("fget", "fset", "fdel"),
    cached_property: ("func",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    GetSetDescriptorType: ("__name__", "__objclass__"),
    MemberDescriptorType: ("__name__", "__objclass__"),
}
"""The parts in which two members of a class may differ."""

_NOT_COMPARED = frozenset({"_abc_impl", "__annotations__", "__slotnames__"})
"""Members that Python keeps for itself: a cache of ``isinstance``, annotations, which it may evaluate late, and a cache of ``copy``."""

_PLAIN: dict[str, tuple[type, ...]] = {
    "float": (float, int, np.float64),
    "float | None": (float, int, np.float64, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "str": (str,),
}
"""Kinds of values that fields of ours may have, by what they are said to be."""

_LONGEST = 100
_RUNNING = RLock()
"""Held while a file is run once more: two copies of one module would not be the same one."""


class Releasing(Protocol):
    """A mechanism, as far as it states what it releases."""

    def release(self, ranges: Any) -> Release:
        """Say what one client's report of a round is, in these ranges."""
        ...


def released(mechanism: Releasing, ranges: Any, chosen_by: object = None) -> Release:
    """Return what ``mechanism`` releases, with its author as it is found here; the ledger, a plan and a policy use nothing else.

    Args:
        chosen_by: the mechanism that returned this one for a round, if any: then both have to be this project's.
    """
    before = author_of(mechanism, chosen_by)
    stated = mechanism.release(ranges)
    kind = next((kind for kind in _KINDS if issubclass(type(stated), kind)), None)
    if kind is None:
        return stated  # a kind of its own, of which no accountant here knows, has no author either
    # A class of somebody else's may answer accountants in its own way: only the values of the fields are taken.
    plain: Any = {field.name: getattr(stated, field.name) for field in fields(kind)}
    # What runs while it is judged could be of one class before and of another after.
    author = next((found for found in (before, author_of(mechanism, chosen_by)) if found != OURS), OURS)
    named = plain["mechanism"]
    if author == OURS and not (type(named) is str and is_built_in(named)):
        author = f"{_printable(str(named))}, no mechanism of {OURS}"
    return replace(kind(**plain), author=author)


def author_of(*things: object) -> str:
    """Return :data:`OURS` if all code of ``things``, and of what they hold, is this project's; else the first class that is not."""
    waiting, seen = list(things), dict[int, object]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or _is_any(type(thing), _VALUES):
            continue
        seen[id(thing)] = thing
        if type(thing) is dict:
            waiting += [*thing.keys(), *thing.values()]
        elif _is_any(type(thing), _CONTAINERS):
            waiting += thing  # type: ignore[arg-type]  # a container, which mypy does not see
        elif type(thing) is MethodType:
            waiting += [thing.__func__, thing.__self__]
        elif not _is_data(thing):
            foreign = _foreign(thing)
            if foreign is not None:
                return _named(foreign)
            waiting += _held_by(thing)
    return OURS


def _is_any(kind: type, kinds: Sequence[object]) -> bool:
    """Whether ``kind`` is one of ``kinds`` itself: what it says of ``==`` is a foreign class's own matter, and ``in`` would ask."""
    return any(kind is one for one in kinds)


def _is_data(thing: object) -> bool:
    """Whether ``thing`` is a library's object that holds numbers alone: no objects, and no attributes that somebody gave it."""
    for place in _DATA:
        module, _, name = place.partition(":")
        if type(thing) is getattr(sys.modules.get(module), name, None):
            return not getattr(thing, "__dict__", None) and not getattr(getattr(thing, "dtype", None), "hasobject", False)
    return False


def _foreign(thing: Any) -> object | None:
    """Return what of ``thing`` is somebody else's code: a function, a class it is derived from, or itself; None if nothing is."""
    if type(thing) is FunctionType:
        return None if _is_own(thing) else thing
    is_class = issubclass(type(thing), type)  # isinstance would ask the object itself
    lineage = type.mro(thing if is_class else type(thing))
    foreign = next((kind for kind in lineage if not (_is_any(kind, _BASES) or _is_own(kind))), None)
    if foreign is not None or is_class:
        return foreign
    hides = any(_hides(thing, name, lineage) for name in getattr(thing, "__dict__", ()))
    return thing if hides or _is_of_odd_kinds(thing) else None


def _is_of_odd_kinds(thing: Any) -> bool:
    """Whether a field that is to be a number or a text is something else, such as an array whose small integers wrap around."""
    told = ((_PLAIN.get(str(field.type)), type(getattr(thing, field.name, None))) for field in fields(thing)) if is_dataclass(thing) else ()
    return any(kinds is not None and not _is_any(kind, kinds) for kinds, kind in told)


def _hides(thing: Any, name: str, lineage: list[type]) -> bool:
    """Whether the attribute ``name`` of an instance stands in the place of a method, property or class variable."""
    defined = next((vars(kind)[name] for kind in lineage if name in vars(kind)), None)
    if defined is None or type(defined) is cached_property:
        return False
    names = {field.name for field in fields(thing)} if is_dataclass(thing) else set()
    return callable(defined) or hasattr(defined, "__get__") or name not in names


def _held_by(thing: object) -> Iterator[object]:
    """Yield what an instance of this project's classes holds, and classes that these name."""
    if isinstance(thing, type | FunctionType):
        return
    lineage = type(thing).__mro__
    yield from getattr(thing, "__dict__", {}).values()
    yield from (getattr(thing, name) for kind in lineage for name in vars(kind).get("__slots__", ()) if hasattr(thing, name))
    yield from thing if isinstance(thing, tuple) else ()
    yield from (member for kind in lineage if not _is_any(kind, _BASES) for member in vars(kind).values() if isinstance(member, type))


def _is_own(code: type | FunctionType) -> bool:
    """Tell whether a class or function is where it says it is, in a module of ours, and is what this module's file defines there."""
    module = str(code.__module__)
    written = _as_written(module) if _found(code, sys.modules.get(module)) is code else None
    if written is None:
        return False
    other = _found(code, written)
    if not isinstance(code, type):
        return _same(code, other)
    if type(code) is not type(other) or not _same(code.__bases__, other.__bases__):
        return False
    members, others = ({name: kept for name, kept in vars(each).items() if name not in _NOT_COMPARED} for each in (code, other))
    return _same(members, others)


def _as_written(name: str) -> ModuleType | None:
    with _RUNNING:
        return _run_again(name)


@lru_cache(maxsize=256)
def _run_again(name: str) -> ModuleType | None:
    """Run the file of a module of ours once more, which takes some 10 ms; None if the name is not that of a module of ours."""
    file = _file_of(name)
    spec = None if file is None else spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file_of(name: str) -> Path | None:
    """Return the file of the module ``name`` of ours, which is compiled already where sources were left out; None if there is none."""
    first, *parts = name.split(".")
    if first != OURS or not all(part.isidentifier() for part in parts):
        return None
    path = _PACKAGE.joinpath(*parts)
    path = path / "__init__" if path.is_dir() else path
    return next((file for ending in (".py", ".pyc") if (file := path.with_name(path.name + ending)).is_file()), None)


def _found(code: Any, module: object) -> Any:
    """Return what is found in ``module`` where ``code`` says that it is defined."""
    for name in code.__qualname__.split("."):
        module = getattr(module, name, None)
    return module


def _same(live: Any, written: Any) -> bool:
    """Tell whether a member of a class in use is what the file defines: the same bytecode, or the same value."""
    if live is written:
        return True
    if type(live) is not type(written):
        return False
    if isinstance(live, type):  # of a class that is named here, the code is looked at on its own
        place = (live.__module__, live.__qualname__)
        return place == (written.__module__, written.__qualname__) and _found(live, sys.modules.get(live.__module__)) is live
    if isinstance(live, dict | MappingProxyType):
        return live.keys() == written.keys() and all(_same(live[key], written[key]) for key in live)
    if isinstance(live, tuple | list):
        return len(live) == len(written) and all(map(_same, live, written))
    if type(live) is FunctionType and not _same_globals(live.__globals__, written.__globals__):
        return False
    parts = _PARTS.get(type(live), type(live).__slots__ if type(live).__module__ == "dataclasses" else ())
    return all(_same(getattr(live, part), getattr(written, part)) for part in parts) if parts else bool(live == written)


def _same_globals(live: dict[str, Any], written: dict[str, Any]) -> bool:
    """Tell whether two functions look up names in the same module, or in one in use and in the same one as written."""
    name = str(written.get("__name__"))
    return live is written or (written is vars(_as_written(name) or sys) and live is vars(sys.modules.get(name, sys)))


def _named(code: Any) -> str:
    kind = code if isinstance(code, type | FunctionType | MethodType) else type(code)
    name = f"{kind.__module__}:{kind.__qualname__}"
    name = _printable(name)
    if not name.startswith((f"{OURS}.", f"{OURS}:")):
        return name
    return f"{name} ({'changed' if _file_of(str(kind.__module__)) else 'its file is not there to compare it with'})"


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in text)[:_LONGEST]
