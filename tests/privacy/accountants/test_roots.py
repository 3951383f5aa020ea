"""What is computed here in place of slow imports is digit by digit what the libraries say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from scipy import optimize, stats

from ldpfl.privacy.accountants.binomial import binomial_quantile
from ldpfl.privacy.accountants.roots import brentq


def outcome(find: Callable[..., float], *arguments: object, **settings: float) -> object:
    try:
        return float(find(*arguments, **settings)).hex()
    except (ValueError, RuntimeError) as error:
        return type(error)


def test_a_root_is_that_of_scipy() -> None:
    draw, found = random.Random(3), set()
    for case in range(800):
        a, b, c, d = (draw.gauss(0, 1) for _ in range(4))
        functions: tuple[Callable[[float], float], ...] = (
            lambda x, a=a, b=b, c=c: a * x**3 + b * x + c,  # type: ignore[misc]
            lambda x, a=a, b=b, c=c: math.tanh(a * x + b) + c / 3,  # type: ignore[misc]
            lambda x, c=c: (1 if x > c else -1) * (abs(x) + 0.1),  # type: ignore[misc]
            lambda x, a=a, b=b: max(math.atan(x - b) * abs(a) ** 9, -1e-300),  # type: ignore[misc]
        )
        low, high = -abs(d) * 10 ** draw.uniform(-2, 3) - 0.01, abs(c) * 10 ** draw.uniform(-2, 3) + 0.01
        settings: dict[str, Any] = draw.choice(
            [{}, {"xtol": 1e-6}, {"xtol": 1e-3, "rtol": 1e-3}, {"xtol": 1e-300, "rtol": 1e-14}, {"maxiter": 6}]
        )
        for function in functions:
            theirs = outcome(optimize.brentq, function, low, high, **settings)
            assert outcome(brentq, function, low, high, **settings) == theirs, (case, settings)
            found.add(theirs if isinstance(theirs, type) else float)
    assert found == {float, ValueError, RuntimeError}


def test_a_function_without_a_value_has_no_root() -> None:
    with pytest.raises(ValueError, match="has no value at 0"):
        brentq(lambda x: math.nan, 0.0, 1.0)
    with pytest.raises(ValueError, match="the same sign at 0 and 1"):
        brentq(lambda x: 1.0, 0.0, 1.0)


def test_a_quantile_is_that_of_scipy() -> None:
    draw = random.Random(1)
    for _ in range(500):
        count, probability = int(10 ** draw.uniform(0, 6.5)), draw.choice([1e-30, 1e-12, 1e-6, 0.3])
        share = draw.choice([draw.random(), 10 ** draw.uniform(-8, 0)])
        assert binomial_quantile(probability, count, share) == max(0, int(stats.binom.ppf(probability, count, share)))
    assert binomial_quantile(1e-30, 0, 0.5) == 0
