"""Figures and counts as people read them."""

from ldpfl.util.number_format import counted


def test_a_count_of_one_has_its_singular() -> None:
    assert [counted(count, "report") for count in (0, 1, 2, 1000)] == ["0 reports", "1 report", "2 reports", "1,000 reports"]
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]
