"""Whose code a mechanism is. Guarantees are proved of this project's code; of other code they are what its author claims.

The author is found from the code that will run, never from anything that this code says of itself. Code in the same process that
rewrites this module, or functions that mechanisms call, is not found: whoever runs such code has to judge it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

from ldpfl.privacy.events import OURS, BinaryRelease, GaussianRelease, PureRelease, Release, UnprotectedRelease

_ROOT = str(Path(__file__).resolve().parents[1])
_KINDS: tuple[type[Release], ...] = (BinaryRelease, PureRelease, GaussianRelease, UnprotectedRelease)
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (tuple, list, set, frozenset, dict)
_LIBRARIES = frozenset({"abc", "builtins", "collections", "decimal", "enum", "fractions", "numpy", "torch", "typing"})
_WRITERS = frozenset({"abc", "dataclasses", "reprlib", "typing"})
"""Modules of the standard library that write methods of our classes."""

_LONGEST = 100


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
    stated = mechanism.release(ranges)
    kind = next((kind for kind in _KINDS if issubclass(type(stated), kind)), None)
    if kind is None:
        return stated  # a kind of its own, of which no accountant here knows, has no author either
    # A class of somebody else's may answer accountants in its own way: only the values of the fields are taken.
    plain: Any = {field.name: getattr(stated, field.name) for field in fields(kind)}
    return replace(kind(**plain), author=author_of(mechanism, chosen_by))


def author_of(*things: object) -> str:
    """Return :data:`OURS` if all code of ``things``, and of what they hold, is this project's; else the first class that is not."""
    waiting, seen = list(things), dict[int, object]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or type(thing) in _VALUES:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, _CONTAINERS) and type(thing) in _CONTAINERS:
            waiting += [*thing.keys(), *thing.values()] if isinstance(thing, dict) else thing
            continue
        foreign = _foreign(thing)
        if foreign is not None:
            return _named(foreign)
        waiting += _held_by(thing)
    return OURS


def _foreign(thing: object) -> object | None:
    """Return what of ``thing`` is somebody else's code: a function, a class it derives from, or itself; None if nothing is."""
    if isinstance(thing, FunctionType | MethodType):
        return None if _is_own_code(thing) else thing
    lineage = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
    return next((kind for kind in lineage if not (_is_library(kind) or _is_own(kind))), None)


def _held_by(thing: object) -> Iterator[object]:
    """Yield what an object of this project holds; what a library's object holds is data."""
    if isinstance(thing, MethodType):
        yield thing.__self__
    elif type(thing).__module__.partition(".")[0] == OURS:
        yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
        yield from (
            getattr(thing, name) for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(thing, name)
        )
        yield from thing if isinstance(thing, tuple) else ()


def _is_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES and _found(kind) is kind


def _is_own(kind: type) -> bool:
    """Tell whether the class is where it says it is, in this project's files, with all its methods."""
    module = sys.modules.get(kind.__module__)
    return _is_ours(module) and _found(kind) is kind and all(map(_is_own_code, _code_in(vars(kind).values())))


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and module.__name__.partition(".")[0] == OURS and _lies_here(module.__file__ or "")


@lru_cache(maxsize=1024)
def _lies_here(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_ROOT)


def _found(kind: type) -> object:
    """Return what is found where ``kind`` says that it is defined."""
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _code_in(members: Any) -> Iterator[object]:
    """Yield what of a class's members may run."""
    for member in members:
        if isinstance(member, property):
            yield from (each for each in (member.fget, member.fset, member.fdel) if each is not None)
        elif isinstance(member, cached_property):
            yield member.func
        elif isinstance(member, classmethod | staticmethod):
            yield member.__func__
        elif callable(member) and not isinstance(member, type):
            yield member


def _is_own_code(code: Any) -> bool:
    code = getattr(code, "__wrapped__", code)
    code = code.__func__ if isinstance(code, MethodType) else code
    if not isinstance(code, FunctionType):
        return type(code).__module__ == "builtins" and getattr(code, "__objclass__", None) is not None
    module = sys.modules.get(str(code.__globals__.get("__name__")))
    if module is None or vars(module) is not code.__globals__:
        return False
    file = code.__code__.co_filename
    return module.__name__ in _WRITERS or (_is_ours(module) and (file == "<string>" or _lies_here(file)))


def _named(code: Any) -> str:
    kind = code if isinstance(code, type | FunctionType | MethodType) else type(code)
    name = f"{kind.__module__}:{kind.__qualname__}"
    name = "".join(sign if sign.isprintable() else "?" for sign in name)[:_LONGEST]
    return f"{name} (changed)" if name.startswith((f"{OURS}.", f"{OURS}:")) else name
