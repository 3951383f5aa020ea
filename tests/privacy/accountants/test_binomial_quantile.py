"""The quantile of a binomial distribution is the one of ``scipy.stats``, whose import is slow."""

from __future__ import annotations

import random

from scipy import stats

from ldpfl.privacy.accountants.binomial import binomial_quantile


def test_a_quantile_is_that_of_scipy() -> None:
    draw = random.Random(1)
    for _ in range(500):
        count, probability = int(10 ** draw.uniform(0, 6.5)), draw.choice([1e-30, 1e-12, 1e-6, 0.3])
        share = draw.choice([draw.random(), 10 ** draw.uniform(-8, 0)])
        assert binomial_quantile(probability, count, share) == max(0, int(stats.binom.ppf(probability, count, share)))
    assert binomial_quantile(1e-30, 0, 0.5) == 0
