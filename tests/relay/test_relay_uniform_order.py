"""Mixing: nothing is lost or doubled, every order is equally likely, memory does not grow with the round."""

from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from relay_support import records, seeded
from scipy import stats

from ldpfl.relay import uniform_order as module
from ldpfl.relay.uniform_order import MAX_PARTS, PART_BYTES, part_count, scatter, uniform_order
from ldpfl.util.entropy import Words, secure_words

FALSE_ALARM = 1e-6  # of each chi-square test below, were its seed not fixed


def mixed(stream: list[bytes], record_bytes: int, parts: int, words: Words) -> list[bytes]:
    scattered = scatter(stream, record_bytes, parts, words, io.BytesIO())
    return [scattered.part(number) for number in range(parts)]


def numbered(count: int, record_bytes: int) -> bytes:
    return b"".join(index.to_bytes(4, "big").rjust(record_bytes, b"-") for index in range(count))


@pytest.mark.thorough
@given(
    count=st.integers(0, 300),
    record_bytes=st.integers(4, 70),
    parts=st.sampled_from([1, 2, 8, 64]),
    cuts=st.lists(st.integers(0, 20_000), max_size=10),
    batch=st.integers(1, 3000),
    seed=st.integers(0, 100),
)
def test_nothing_is_lost_or_doubled_however_the_stream_is_cut(
    count: int, record_bytes: int, parts: int, cuts: list[int], batch: int, seed: int
) -> None:
    data = numbered(count, record_bytes)
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    stream = [data[start:end] for start, end in pairwise(ends)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_BYTES", batch)
        result = mixed(stream, record_bytes, parts, seeded(seed))
    assert records(b"".join(result), record_bytes) == records(data, record_bytes)
    assert all(len(part) % record_bytes == 0 for part in result)


@pytest.mark.parametrize("draws", [2400, 6000])
@pytest.mark.parametrize(("parts", "batch"), [(1, 100), (2, 8), (4, 12)])
@pytest.mark.slow
@pytest.mark.thorough_except("2-8-2400")
def test_every_order_is_equally_likely(parts: int, batch: int, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 24 orders of four records, through parts and batches that are smaller than the round.

    Probabilities that are off by a quarter are seen by 2400 draws, by a seventh of 6000.
    """
    monkeypatch.setattr(module, "BATCH_BYTES", batch)
    data, source = numbered(4, 4), seeded(1)
    seen = Counter(b"".join(mixed([data], 4, parts, source)) for _ in range(draws))
    orders = [b"".join(order) for order in permutations([data[start : start + 4] for start in range(0, 16, 4)])]
    assert set(seen) <= set(orders)
    assert stats.chisquare([seen[order] for order in orders]).pvalue > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("draws", [1500, 6000])
@pytest.mark.thorough_for("6000")
def test_a_record_may_end_up_anywhere_and_beside_any_other(draws: int) -> None:
    """Places of the first record, and distances of the first two, in a round of several parts."""
    data, source, count = numbered(30, 4), seeded(2), 30
    places, distances = np.zeros(count), np.zeros(count)
    for _ in range(draws):
        order = np.frombuffer(b"".join(mixed([data], 4, 8, source)), dtype=">u4")
        first, second = int(np.flatnonzero(order == 0)[0]), int(np.flatnonzero(order == 1)[0])
        places[first] += 1
        distances[(second - first) % count] += 1
    assert stats.chisquare(places).pvalue > FALSE_ALARM
    assert stats.chisquare(distances[1:]).pvalue > FALSE_ALARM


def test_lengths_of_parts_are_binomial_for_each_uploads_records() -> None:
    """How many of one upload's 200 records land in each of 8 parts: multinomial, as for any other upload."""
    source, total = seeded(3), np.zeros(8)
    spread = []
    for _ in range(300):
        counts = np.array([len(part) // 4 for part in mixed([numbered(200, 4)], 4, 8, source)])
        total += counts
        spread.append(float(((counts - 25) ** 2 / 25).sum()))
    assert stats.chisquare(total).pvalue > FALSE_ALARM
    # Each statistic is chi-square with 7 degrees of freedom, up to 1/200: their sum has 2100.
    assert FALSE_ALARM < stats.chi2.cdf(sum(spread), 2100) < 1 - FALSE_ALARM


def test_the_secure_source_mixes_differently_each_time() -> None:
    data = numbered(100, 4)
    assert len({tuple(mixed([data], 4, 4, secure_words)) for _ in range(5)}) == 5


def test_equal_keys_are_drawn_again() -> None:
    low_words_first = iter([[9, 0, 5, 0, 9, 0], [3, 0, 2, 0, 1, 0]])
    assert uniform_order(3, lambda count: np.array(next(low_words_first), dtype=np.int32)).tolist() == [2, 1, 0]
    assert uniform_order(0, seeded(0)).tolist() == []


def test_parts_are_as_many_as_memory_asks_for() -> None:
    assert [part_count(size) for size in (0, 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES)] == [1, 1, 1, 2, 8]
    assert part_count(10**15) == MAX_PARTS


def test_half_a_record_and_odd_numbers_of_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="the last record of the uploads is incomplete"):
        mixed([b"12345"], 4, 1, seeded(0))
    for parts in (0, 3, 2 * MAX_PARTS):
        with pytest.raises(ValueError, match="power of two"):
            scatter([], 4, parts, seeded(0), io.BytesIO())
