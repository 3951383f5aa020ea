"""A cell is read by itself: as a number, with its limit, as a date, as no value, or not at all."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given, strategies as st

from ldpfl.data.cells import READERS, can_parse, describe_ambiguity, majority_kind, means_no_value, parse_day, parse_number

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@given(value=NUMBERS, sign=st.sampled_from(["<", ">", "<=", ">=", "=<", "=>", "≤", "≥"]), gap=st.sampled_from(["", " ", "  "]))
def test_a_value_beyond_a_limit_counts_as_the_limit(value: float, sign: str, gap: str) -> None:
    assert parse_number(f" {sign}{gap}{value!r} ") == value


@pytest.mark.parametrize("text", ["", "<", "< ", "<>5", "<<5", "<x", "5<", "<nan", "< inf", "≤ low", "1,5", "5 mg", "2020-01-01"])
def test_what_is_no_number_is_not_read_as_one(text: str) -> None:
    assert not can_parse(parse_number, text)


@given(day=st.dates())
def test_a_date_is_its_days_since_1970(day: date) -> None:
    assert parse_day(day.isoformat()) == (day - date(1970, 1, 1)).days


@given(
    moment=st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1)),
    minutes=st.integers(-23 * 60, 23 * 60),
    between=st.sampled_from(["T", " "]),
)
def test_a_moment_with_a_zone_counts_in_utc(moment: datetime, minutes: int, between: str) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    expected = (zoned - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(days=1)
    assert parse_day(zoned.isoformat(sep=between)) == pytest.approx(expected, abs=1e-9)
    assert parse_day(moment.isoformat(sep=between)) == pytest.approx((moment - datetime(1970, 1, 1)) / timedelta(days=1), abs=1e-9)


@pytest.mark.parametrize("text", ["2020-01-01T08:30Z", "2020-01-01 08:30 +00:00", "2020-01-01 08:30:00.000000000", "2020-01-01T09:30+01"])
def test_times_are_parts_of_a_day(text: str) -> None:
    assert parse_day(text) == pytest.approx(18262 + 8.5 / 24)


@pytest.mark.parametrize(
    "text", ["", "2020", "2020-1-1", "2020-02-30", "20200101", "03/04/2020", "2020-01-01T25:00", "9999-12-31T23:00-05:00"]
)
def test_what_is_no_iso_date_is_not_read_as_one(text: str) -> None:
    assert not can_parse(parse_day, text)


@pytest.mark.thorough
@given(text=st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for reader in READERS.values():
        with suppress(ValueError):
            assert isinstance(reader(text), float)
    assert isinstance(means_no_value(text, ()), bool)
    assert isinstance(describe_ambiguity([text]), str)


def test_most_cells_say_what_a_column_holds() -> None:
    assert majority_kind(["1", "2", "<3"]) == "numbers"
    assert majority_kind(["2020-01-01", "2020-01-02", "soon"]) == "dates"
    assert majority_kind(["1", "a", "b"]) == "words"
    assert majority_kind([]) == "words"
    assert majority_kind(["yes", "no"]) == "words"


def test_groups_by_a_limit_are_words() -> None:
    """Else ``<50`` and ``>=50`` would be the same number."""
    assert majority_kind(["<50", ">=50"] * 10) == "words"
    assert majority_kind(["<0.5"] * 8 + ["0.7", "12"]) == "numbers"  # most patients are below what can be measured


def test_codes_with_leading_zeros_are_words_and_a_slip_makes_no_code() -> None:
    """Else ``0012`` and ``12`` would be the same number."""
    assert majority_kind(["0012", "0471", "1233", "9001"]) == "words"
    assert majority_kind(["01067"] + ["80331"] * 19) == "words"  # postcodes, few of which begin with 0
    assert majority_kind(["07"] + ["12"] * 20) == "numbers"
    assert majority_kind(["0.5", "0", "-0.25", "<0.1", "0.05"]) == "numbers"
    assert majority_kind(["008.450", "012.100", "250.000"]) == "words"
    assert describe_ambiguity(["008.450", "012.100", "250.000"]) == ""  # no thousands separators


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["03/04/2020", "13/04/2020", "x"], "day and month"),
        (["3.4.20", "1.1.1999"], "day and month"),
        (["13.02.2020", "28.12.2020"], "dates that are not written as YEAR-MONTH-DAY: write them in this form, because"),
        (["03-04-2020 08:30"], "day and month"),
        (["1,5", "2,75", "3"], "a comma"),
        (["1.234,5"], "a comma"),
        (["1,234.56", "2,000", "-12,345,678.9", "423.88", "x"], "thousands separators"),
        (["1'234.5", "1 234", "1\u202f234.5", "1.234.567"], "thousands separators"),
        (["4.110,79", "1.234,50", "953,20"], "write 1234.5 for both"),
        (["85%", "7.5 %", "9"], "numbers with a unit"),
        (["2.6 mg/l", "3,1 mg/l", "<0.5"], "numbers with a unit"),
        (["13:45", "08:00:10"], "times"),
        (["17-Jan-21", "3 März 2020"], "dates with names of months"),
        (["1 to 2", "12E5", "3rd", "ward 7"], ""),
        (["1011 AB", "10115 Berlin", "3 West", "1:20", "1:40"], ""),
        (["12 weeks", "24 weeks"], "numbers with a unit"),
        (["1,23.4", "12,3456.7", "1,234 567.8", "1.5"], ""),
        (["12", "7", "none", "few"], ""),
        (["a", "b", "1,5"], ""),
        (["2020-01-02"], ""),
    ],
)
def test_what_can_be_read_in_two_ways_is_named(cells: list[str], said: str) -> None:
    assert said in describe_ambiguity(cells)
    assert bool(said) == bool(describe_ambiguity(cells))
