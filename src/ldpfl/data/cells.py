"""Read one cell of a table as a number or a date. No other cell has a say in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from math import nan
from typing import Literal

Kind = Literal["numbers", "dates", "words"]
"""What a column holds."""

MISSING_WORDS = ("na", "n/a", "#n/a", "nan", "null", "none", "?", "-", ".")
"""Texts that stand for no value by default, in any case."""

_LIMIT = re.compile(r"(?:[<>≤≥]=?|=[<>])\s*(?=[\d.+-])")  # as laboratories write them
"""Sign of a value below or above what a laboratory can measure."""
_PLAIN_NUMBERS = 10
"""A column of numbers holds one without a sign among so many cells at least."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?\s?(Z|[+-]\d{2}(:?\d{2})?)?)?", re.ASCII)
_EITHER_ORDER = re.compile(r"\d{1,2}([/.-])\d{1,2}\1(\d{4}|\d{2})([T ].*)?")
_WITH_COMMA = re.compile(r"[+-]?\d+([.' ]\d{3})*,\d+")
_EPOCH = datetime(1970, 1, 1)  # a moment without a zone is taken as it stands
_SECONDS_A_DAY = 86_400


def number_in(text: str) -> float:
    """Return the number that a cell holds; a value beyond a limit, such as ``<0.5`` or ``>= 200``, counts as the limit.

    Raises:
        ValueError: the cell holds no number.
    """
    text = text.strip()
    sign = _LIMIT.match(text)
    return float(text[sign.end() :] if sign else text)


def day_in(text: str) -> float:
    """Return the days from 1970-01-01 to the ISO date, or date and time, that a cell holds; a moment with a zone counts in UTC.

    Raises:
        ValueError: the cell holds no such date.
    """
    text = text.strip()
    if not _DATE.fullmatch(text):
        raise ValueError("no ISO date")
    moment = datetime.fromisoformat(text.replace(" +", "+").replace(" -", "-").replace(" Z", "Z"))
    if moment.tzinfo is not None:
        try:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
        except OverflowError:
            raise ValueError("a moment beyond the first or the last year") from None
    return (moment - _EPOCH).total_seconds() / _SECONDS_A_DAY


READERS: dict[Kind, Callable[[str], float]] = {"numbers": number_in, "dates": day_in}
"""How a cell of each kind of column becomes a number."""


def reads(reader: Callable[[str], float], text: str) -> bool:
    """Tell whether ``reader`` knows what ``text`` is."""
    try:
        reader(text)
    except ValueError:
        return False
    return True


def kind_of(texts: Collection[str]) -> Kind:
    """Return what most of ``texts``, cells that hold a value, are; words where they are neither numbers nor dates for the most part."""
    for kind, reader in READERS.items():
        if 2 * sum(reads(reader, text) for text in texts) > len(texts) and not (kind == "numbers" and _are_groups(texts)):
            return kind
    return "words"


def _are_groups(texts: Collection[str]) -> bool:
    """Tell whether hardly a number stands without a sign: ``<50`` and ``>=50`` are then words for groups."""
    return _PLAIN_NUMBERS * sum(reads(float, text) for text in texts) < len(texts)


def unclear(texts: Collection[str]) -> str:
    """Return in which way most of ``texts`` can be read as two different numbers or dates, and what to do; "" where they cannot."""
    for pattern, said in (
        (_EITHER_ORDER, "dates whose day and month cannot be told apart: write them as YEAR-MONTH-DAY"),
        (_WITH_COMMA, "numbers with a comma, which may stand for a decimal point or for thousands: write a point, or no comma"),
    ):
        if 2 * sum(pattern.fullmatch(text.strip()) is not None for text in texts) > len(texts):
            return said
    return ""


def no_value(text: str, missing: Collection[str]) -> bool:
    """Tell whether a cell stands for no value: it is empty, or one of the words ``missing``, which are in lower case."""
    bare = text.strip().lower()
    return not bare or bare in missing


def numbers_among(words: Collection[str]) -> list[float]:
    """Return those of ``words`` that are numbers, such as 999 for a value that was not taken."""
    found = [number_in(word) if reads(number_in, word) else nan for word in words]
    return [number for number in found if number == number]  # NaN is no number
