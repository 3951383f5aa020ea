"""Searches ask for few figures, and what they find keeps the target."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, exp, inf

import pytest

from ldpfl.experiments.planning.search import smallest_argument, smallest_argument_of_slow, smallest_count


def counted(function: Callable[[float], float]) -> tuple[Callable[[float], float], list[float]]:
    """Return ``function``, and a list of the arguments that it is asked for."""
    asked: list[float] = []

    def call(x: float) -> float:
        asked.append(x)
        return function(x)

    return call, asked


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0, 2.0])
def test_the_fewest_is_exact_whatever_the_slope_and_the_guess(power: float) -> None:
    for guess in (1.0, 900.0, 1e6):
        value, asked = counted(lambda n: 1000.0 / n**power)
        wanted = next(n for n in range(max(1, int(2000 ** (1 / power)) - 1), 10**12) if 1000.0 / n**power <= 0.5)
        assert smallest_count(value, guess, 0.5, 10**12, 1e-12) == wanted
        assert len(asked) < 40
    value, asked = counted(lambda n: 1000.0 / n**power)
    assert smallest_count(value, wanted * 1.003, 0.5, 10**12, 1e-12) == wanted
    assert len(asked) <= 6


def test_the_fewest_of_a_staircase_and_at_the_ends() -> None:
    assert smallest_count(lambda n: 10.0 - ceil(n / 700), 5.0, 4.5, 10_000, 1e-9) == 3501
    assert smallest_count(lambda n: 1.0, 5.0, 2.0, 100, 1e-9) == 1
    assert smallest_count(lambda n: 1.0, 5.0, 0.5, 100, 1e-9) is None
    assert smallest_count(lambda n: 1.0 if n < 100 else 0.1, 5.0, 0.5, 100, 1e-9) == 100


def test_a_figure_that_takes_long_is_asked_for_once_or_twice() -> None:
    for factor in (1.0005, 1.002, 1.006, 1.05):
        value, asked = counted(lambda x, factor=factor: factor * 3 / x**0.7)  # type: ignore[misc]
        start = smallest_argument(lambda x: 3 / x**0.7, 5.0, 0.1, 1.0, 1e6, 1e-6)
        assert start is not None
        found = smallest_argument_of_slow(value, lambda x: 3 / x**0.7, start, 0.1, 1.0, 1e6, 1e-3)
        root = (factor * 30) ** (1 / 0.7)
        assert found is not None
        assert root <= found <= root * exp(1e-3)
        assert len(asked) <= 2


def test_the_target_is_kept_however_wrong_the_guide_is() -> None:
    guides: tuple[Callable[[float], float], ...] = (lambda x: 3 / x**0.7, lambda x: 1.0, lambda x: x, lambda x: 1 / x**4)
    for near in guides:
        for start in (1.0, 40.0, 1e5, 1e6):
            found = smallest_argument_of_slow(lambda x: 3 / x, near, start, 0.1, 1.0, 1e6, 1e-3)
            assert found is not None
            assert 3 / found <= 0.1 * (1 + 1e-12), (near(2.0), start)
    assert smallest_argument_of_slow(lambda x: inf, lambda x: 3 / x, 30.0, 0.1, 1.0, 1e6, 1e-3) is None
