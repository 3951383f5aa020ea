"""Figures and counts as people read them."""

from math import inf

from ldpfl.util.number_format import counted, epsilon_text


def test_a_count_of_one_has_its_singular() -> None:
    assert [counted(count, "report") for count in (0, 1, 2, 1000)] == ["0 reports", "1 report", "2 reports", "1,000 reports"]
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]


def test_an_infinite_epsilon_is_none_as_a_number_or_as_json_has_it() -> None:
    assert [epsilon_text(epsilon) for epsilon in (inf, "infinity", 2.0, 1405.44)] == ["none", "none", "2", "1,405.5"]
