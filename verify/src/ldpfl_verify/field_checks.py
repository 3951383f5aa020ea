"""Checks of the fields of a file's objects, so that no later step meets a value that it does not expect.

A check takes a value as JSON gives it, returns the value as a dataclass keeps it, and raises ``ValueError`` for any other.
The message begins with the place of the value, as in ``statement.charged.0.rounds``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from typing import Any, TypeVar

from ldpfl_verify.errors import printable, quoted

MAX_FIELDS = 1 << 14
"""Number of fields of the largest object, such as the list of software versions."""

MAX_TEXT_CHARACTERS = 2000
MAX_COUNT = 10**12

Check = Callable[[object], Any]
Kind = TypeVar("Kind")


def text(value: object) -> str:
    """Check that ``value`` is a text. Return it with unprintable characters spelled out, since they could steer a terminal."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARACTERS:
        raise ValueError(f"got {quoted(value)}, expected a text of at most {MAX_TEXT_CHARACTERS:,} characters")
    return printable(value)


def flag(value: object) -> bool:
    """Check that ``value`` is true or false, and return it."""
    if not isinstance(value, bool):
        raise ValueError(f"got {quoted(value)}, expected true or false")
    return value


def count(value: object) -> int:
    """Check that ``value`` is a whole number from 1 to 10^12, and return it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise ValueError(f"got {quoted(value)}, expected a whole number from 1 to {MAX_COUNT:,}")
    return value


def number(accepts: Callable[[float], bool], expected: str) -> Check:
    """Return a check for finite numbers for which ``accepts`` is true; ``expected`` describes such numbers in the message."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"got {quoted(value)}, expected a number {expected}")
        try:
            converted = float(value)
        except OverflowError:
            raise ValueError(f"got a number above 1e308, expected a number {expected}") from None
        if not isfinite(converted) or not accepts(converted):
            raise ValueError(f"got {quoted(value)}, expected a number {expected}")
        return converted

    return check


def one_of(*choices: str | int) -> Check:
    """Return a check for one of ``choices``."""

    def check(value: object) -> str | int:
        if isinstance(value, bool) or not isinstance(value, str | int) or value not in choices:
            raise ValueError(f"got {quoted(value)}, expected {' or '.join(map(repr, choices))}")
        return value

    return check


def hexadecimal(digits: int) -> Check:
    """Return a check for a text of so many hexadecimal ``digits``."""
    pattern = re.compile(rf"[0-9a-f]{{{digits}}}")

    def check(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(f"got {quoted(value)}, expected {digits} hexadecimal digits")
        return value

    return check


def optional(inner: Check) -> Check:
    """Return a check that accepts null, and all values that ``inner`` accepts."""
    return lambda value: None if value is None else inner(value)


def either(first: Check, second: Check) -> Check:
    """Return a check that applies ``first`` to texts, and ``second`` to all other values."""
    return lambda value: first(value) if isinstance(value, str) else second(value)


def list_of(inner: Check, least: int = 0, most: int = MAX_COUNT) -> Check:
    """Return a check for a list of ``least`` to ``most`` entries, which is kept as a tuple. It stops at the first wrong entry."""

    def check(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"got {quoted(value)}, expected a list")
        if not least <= len(value) <= most:
            raise ValueError(f"got a list of {len(value):,} entries, expected {least:,} to {most:,}")
        return tuple(_checked_at(str(position), inner, entry) for position, entry in enumerate(value))

    return check


def texts_by_name(value: object) -> Mapping[str, str]:
    """Check that ``value`` is an object whose fields are texts, and return it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"got {quoted(value)}, expected an object")
    _check_field_count(value)
    return {text(name): _checked_at(text(name), text, entry) for name, entry in value.items()}


def object_of(kind: type[Kind]) -> Check:
    """Return a check for an object that has the fields of the dataclass ``kind``."""
    return lambda value: value if isinstance(value, kind) else from_tree(kind, value)


def from_tree(kind: type[Kind], tree: object) -> Kind:
    """Return the dataclass ``kind`` with the fields of ``tree``, an object of JSON.

    Raises:
        ValueError: ``tree`` is no object, lacks a field, has one that ``kind`` does not know, or ``kind`` refuses a value.
    """
    if not isinstance(tree, dict):
        raise ValueError(f"got {quoted(tree)}, expected an object")
    _check_field_count(tree)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # it is a dataclass
    unknown = [name for name in tree if name not in known]
    if unknown:
        raise ValueError(f"unknown field {quoted(unknown[0])}")
    missing = [name for name, field in known.items() if name not in tree and field.default is MISSING]
    if missing:
        raise ValueError(f"lacks the field {missing[0]!r}")
    return kind(**tree)


def check_fields(instance: object, checks: Mapping[str, Check]) -> None:
    """Replace each field of a frozen dataclass with the value that its check returns; call this from ``__post_init__``."""
    for name, check in checks.items():
        object.__setattr__(instance, name, _checked_at(name, check, getattr(instance, name)))


def to_tree(value: Any) -> Any:
    """Return a dataclass as JSON takes it: an object, with lists for tuples, and without the fields that its ``left_out`` names."""
    if is_dataclass(value):
        left_out = getattr(value, "left_out", ())
        return {field.name: to_tree(getattr(value, field.name)) for field in fields(value) if field.name not in left_out}
    if isinstance(value, tuple):
        return [to_tree(entry) for entry in value]
    return dict(value) if isinstance(value, Mapping) else value


def _check_field_count(tree: Mapping[str, object]) -> None:
    """Raise a ``ValueError`` if the object ``tree`` has more than :data:`MAX_FIELDS` fields."""
    if len(tree) > MAX_FIELDS:
        raise ValueError(f"expected at most {MAX_FIELDS:,} names, got {len(tree):,}")


def _checked_at(place: str, check: Check, value: object) -> Any:
    """Return the value that ``check`` returns for ``value``. The message of its error begins with ``place``."""
    try:
        return check(value)
    except _FieldError as error:
        raise _FieldError(f"{place}.{error.place}", error.reason) from None
    except ValueError as error:
        raise _FieldError(place, str(error)) from None


class _FieldError(ValueError):
    """A wrong value, with its place in the file, to which each enclosing object adds its own."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason
