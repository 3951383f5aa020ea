"""A loop over settings tries them all, and says which of them fail."""

from __future__ import annotations

import pytest

from grids import each


def test_every_setting_is_tried_and_those_that_fail_are_named() -> None:
    seen: list[tuple[int, int]] = []

    @each("first", [1, 2])
    @each(("second", "wanted"), [(3, True), (4, False), (5, True), (6, False)])
    def fails(first: int, second: int, wanted: bool) -> None:
        seen.append((first, second))
        if not wanted:
            raise ValueError(second) if second == 4 else pytest.fail.Exception("no")

    with pytest.raises(BaseExceptionGroup, match="2 of 2 settings") as failed:
        fails()
    assert seen == [(first, second) for first in (1, 2) for second in (3, 4, 5, 6)]
    inner = [error for error in failed.value.exceptions if isinstance(error, BaseExceptionGroup)]
    assert [error.__notes__ for error in inner] == [["with {'first': 1}"], ["with {'first': 2}"]]
    told = [error.__notes__ for group in inner for error in group.exceptions]
    assert told == 2 * [["with {'second': 4, 'wanted': False}"], ["with {'second': 6, 'wanted': False}"]]


def test_one_that_fails_fails_as_it_is() -> None:
    @each("value", [1, 0, 2])
    def divides(value: int) -> None:
        assert 1 // value < 3

    with pytest.raises(ZeroDivisionError) as failed:
        divides()
    assert failed.value.__notes__ == ["with {'value': 0}"]


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a grid over value needs a value"):
        each("value", [])
