"""Read one cell of a table as a number or a date. The result depends on no other cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from math import nan
from typing import Literal
from unicodedata import normalize

Kind = Literal["numbers", "dates", "words"]
"""What a column holds."""

MISSING_WORDS = ("na", "n/a", "#n/a", "nan", "null", "none", "?", "-", ".")
"""Texts that mean "no value" by default, in upper or lower case."""

_LIMIT = re.compile(r"(?:[<>≤≥]=?|=[<>])\s*(?=[\d.+-])")
"""Sign of a value below or above what a laboratory can measure."""
_MAX_CELLS_PER_PLAIN_NUMBER = 10
"""At least one cell in 10 of a column of numbers must be a number without ``<`` or ``>``; else the cells name groups."""
_LEADING_ZERO = re.compile(r"\s*0\d")
_MAX_CELLS_PER_CODE = 20
"""At least one cell in 20 of a column of codes begins with a zero and a further digit.

About one in 10 codes of a fixed width, such as postcodes, begins with 0 if their first digits are equally frequent. Half of that leaves
room for chance, and for codes that seldom begin with 0. Numbers are written so only by mistake.
"""
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?\s?(Z|[+-]\d{2}(:?\d{2})?)?)?", re.ASCII)
_DATE_IN_UNCLEAR_ORDER = re.compile(r"\d{1,2}([/.-])\d{1,2}\1(\d{4}|\d{2})([T ].*)?")
_DATE_WITH_NAME = re.compile(r"\d{1,2}[-/. ]+[^\W\d]{3,}[-/. ]+(\d{4}|\d{2})")
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?")
_NUMBER_WITH_UNIT = re.compile(
    r"[+-]?\d+([.,]\d+)?\s?(%|°[CF]|([munkdcµ]?(g|l|L|mol|m|s|IU|U|Eq)|mmHg|bpm|min|h|(hour|day|week|month|year)s?)(/\S+)?)"
)
"""A number with a unit that is usual in medicine. Other words behind a number, such as that of a ward, may be a part of a name."""
_NUMBER_WITH_COMMA = re.compile(r"[+-]?\d+([.' ]\d{3})*,\d+")
_NUMBER_IN_GROUPS = re.compile(r"[+-]?\d{1,3}([,.'\u2019 \u00a0\u202f])\d{3}(\1\d{3})*([.,]\d+)?")
"""A number with thousands separators."""
_PLAIN_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_EPOCH = datetime(1970, 1, 1)  # a moment without a zone is taken as it stands
_SECONDS_A_DAY = 86_400


def parse_number(text: str) -> float:
    """Return the number in the cell ``text``. A value beyond a detection limit, such as ``<0.5`` or ``>= 200``, counts as the limit.

    Raises:
        ValueError: ``text`` is not a number.
    """
    text = text.strip()
    sign = _LIMIT.match(text)
    return float(text[sign.end() :] if sign else text)


def parse_day(text: str) -> float:
    """Return the days from 1970-01-01 to the ISO date, or date and time, in the cell ``text``. A time with a zone is converted to UTC.

    Raises:
        ValueError: ``text`` is not an ISO date.
    """
    text = text.strip()
    if not _ISO_DATE.fullmatch(text):
        raise ValueError("no ISO date")
    moment = datetime.fromisoformat(text.replace(" +", "+").replace(" -", "-").replace(" Z", "Z"))  # it takes no space before a zone
    if moment.tzinfo is not None:
        try:
            moment = moment.astimezone(UTC).replace(tzinfo=None)
        except OverflowError:
            raise ValueError("a moment beyond the first or the last year") from None
    return (moment - _EPOCH).total_seconds() / _SECONDS_A_DAY


READERS: dict[Kind, Callable[[str], float]] = {"numbers": parse_number, "dates": parse_day}
"""How a cell of each kind of column becomes a number."""


def can_parse(reader: Callable[[str], float], text: str) -> bool:
    """Return whether ``reader`` can parse ``text``."""
    try:
        reader(text)
    except ValueError:
        return False
    return True


def majority_kind(texts: Collection[str]) -> Kind:
    """Return the kind of most of ``texts``, the cells of a column that hold a value: words if most are neither numbers nor dates.

    Codes of digits, such as ``0471``, are words: see :func:`are_codes`.
    """
    for kind, reader in READERS.items():
        are_words = kind == "numbers" and (_are_groups(texts) or are_codes(texts))  # such as "<50" and ">=50", or "0471"
        is_majority = 2 * sum(can_parse(reader, text) for text in texts) > len(texts)
        if is_majority and not are_words:
            return kind
    return "words"


def are_codes(texts: Collection[str]) -> bool:
    """Return whether ``texts`` are codes such as postcodes, because enough of them begin with a zero and a further digit."""
    return _MAX_CELLS_PER_CODE * sum(_LEADING_ZERO.match(text) is not None for text in texts) >= max(1, len(texts))


def _are_groups(texts: Collection[str]) -> bool:
    """Return whether ``texts``, which are mostly numbers, name groups such as ``<50`` and ``>=50``: nearly all have such a sign."""
    return _MAX_CELLS_PER_PLAIN_NUMBER * sum(can_parse(float, text) for text in texts) < len(texts)


def describe_ambiguity(texts: Collection[str]) -> str:
    """Return what is ambiguous in a column whose cells are ``texts``, and what to do; "" if nothing is.

    A column is ambiguous if most of its cells are numbers or dates that can be read in two ways, or numbers with thousands separators.
    """
    for pattern, problem in (
        (
            _DATE_IN_UNCLEAR_ORDER,
            "dates that are not written as YEAR-MONTH-DAY: write them in this form, because the order of day and month differs between "
            "countries",
        ),
        (_DATE_WITH_NAME, "dates with names of months: write them as YEAR-MONTH-DAY"),
        (_TIME, "times: write them as a number, such as 13.75 hours"),
        (_NUMBER_WITH_UNIT, "numbers with a unit: write the number alone"),
        (_NUMBER_WITH_COMMA, "numbers with a comma, which may stand for a decimal point or for thousands: write 1234.5 for both"),
    ):
        if 2 * sum(pattern.fullmatch(text.strip()) is not None for text in texts) > len(texts):
            return problem
    grouped = sum(_NUMBER_IN_GROUPS.fullmatch(text.strip()) is not None for text in texts)
    plain = sum(_PLAIN_NUMBER.fullmatch(text.strip()) is not None for text in texts)  # those below 1,000 have no separator
    if grouped and 2 * (grouped + plain) > len(texts) and not are_codes(texts):
        return "numbers with thousands separators, which are not read as numbers: write 1234.56 for 1,234.56"
    return ""


def means_no_value(text: str, missing: Collection[str]) -> bool:
    """Return whether the cell ``text`` means "no value": it is empty, or one of ``missing``, which are in lower case and one form (NFC)."""
    word = normalize("NFC", text.strip().lower())
    return not word or word in missing


def numeric_words(words: Collection[str]) -> list[float]:
    """Return the numbers among ``words``, which mean "no value". Tables use numbers such as 999 for a value that was not measured."""
    numbers = [parse_number(word) if can_parse(parse_number, word) else nan for word in words]
    return [number for number in numbers if number == number]  # only NaN differs from itself; the word "nan" parses as NaN, too
