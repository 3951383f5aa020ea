"""Check the types of arguments to the public API, with errors of one line."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from ldpfl.errors import ConfigError, shown

Settings = Mapping[str, Any] | Sequence[str] | None
"""Changes of a config: ``{"ranges.radius": 0.1}``, or ``["ranges.radius=0.1"]`` as on the command line, or a single such text."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap ``function`` to check its arguments against their annotations before each call. NumPy's numbers become Python's.

    An argument of another type raises a :class:`ConfigError`. The content of containers, and functions' signatures, are not checked.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # in the form of Python's own message about missing or unknown arguments
            raise TypeError(f"{function.__name__}() {error}") from None
        for name, value in bound.arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(_checked_value(function, parameter, item) for item in value)
            elif parameter.kind is not parameter.VAR_KEYWORD:  # further keywords are settings, which are checked with the config
                bound.arguments[name] = _checked_value(function, parameter, value)
        return function(*bound.args, **bound.kwargs)

    return call


def _checked_value(function: Callable[..., object], parameter: inspect.Parameter, value: Any) -> Any:
    """Return ``value``, with NumPy's numbers as Python's, or raise a :class:`ConfigError` if it does not fit its annotation."""
    argument = f"{function.__name__}: {parameter.name}"
    is_numpy_number = hasattr(value, "tolist") and getattr(value, "ndim", None) == 0
    python_value = value.tolist() if is_numpy_number else value
    # Annotations are texts, and may name classes that the module imports for type checkers alone.
    expected_type = eval(parameter.annotation, {}, _Names(function.__globals__))
    if isinstance(python_value, str | Path) and "\0" in str(python_value):  # as a path, it would raise an error that names no argument
        raise ConfigError(f"{argument} contains a null character: remove it")
    if _fits(python_value, expected_type):
        return python_value
    if isinstance(python_value, type):
        raise ConfigError(f"{argument} is the class {python_value.__name__}: give an instance, {python_value.__name__}(...)")
    # Only the type is named, because the value may hold private data, such as a data frame in the wrong place.
    received = shown(python_value) if isinstance(python_value, str | Path | Real | None) else f"of the type {type(python_value).__name__}"
    expected = re.sub(r"(?:\w+\.)+", "", inspect.formatannotation(expected_type))  # without the modules of classes
    raise ConfigError(f"{argument} is {received}, expected {expected}{_argument_hint(function, parameter, python_value)}")


class _NotImported(type):
    """Stand-in for a class, or a package of classes, that a module imports for type checkers alone, because it is slow to import.

    Instances of the real class are recognised by its name.
    """

    def __getattr__(cls, name: str) -> Any:
        """Return a stand-in for the class ``name``, so that an annotation such as ``torch.Tensor`` is evaluated without the import."""
        if name.startswith("__"):  # Python looks up such names itself, and expects that they are missing
            raise AttributeError(name)
        return _NotImported(name, (), {})

    def __instancecheck__(cls, value: object) -> bool:
        """Whether ``value`` is an instance of a class, or of a subclass of it, that has the stand-in's name."""
        return any(kind.__name__ == cls.__name__ for kind in type(value).__mro__)


class _Names(dict[str, Any]):
    """A module's names, to evaluate its annotations. A missing name is that of a built-in, or gets a stand-in."""

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):  # debuggers look up special names, which must not seem to exist
            raise KeyError(name)
        return getattr(builtins, name) if hasattr(builtins, name) else _NotImported(name, (), {})


def _argument_hint(function: Callable[..., object], parameter: inspect.Parameter, value: object) -> str:
    """Return a hint on the right argument if a model or data was given in place of a recipe; empty otherwise."""
    right_argument = "model" if hasattr(value, "named_parameters") else "data"
    if parameter.name != "what" or right_argument not in inspect.signature(function).parameters or isinstance(value, Real | None):
        return ""
    return f": give it as {right_argument}=..."


def _fits(value: Any, annotated: Any) -> bool:
    """Whether ``value`` is of the ``annotated`` type. Containers are checked without their content."""
    origin = get_origin(annotated)  # ``list`` for ``list[int]``; None for ``int``
    if annotated is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(annotated))
    if origin is Literal:  # the called function checks the word itself, and lists the allowed words in its error
        return isinstance(value, str)
    if annotated in (int, float):  # to Python, True is an integer, too
        return isinstance(value, Integral if annotated is int else Real) and not isinstance(value, bool)
    return value is None if annotated in (None, type(None)) else isinstance(value, origin or annotated)
