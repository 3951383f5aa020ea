"""Streams that depend on nothing but their key, and sources that are uniform over all 32 bits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ldpfl import SecureSource, SeededStreams
from ldpfl.randomness import Purpose, RandomSource, as_source, stream

WORDS = 200_000


def bit_scores(words: Tensor) -> Tensor:
    """Return, for each of the 32 bit positions, how many standard deviations its count of ones lies off a half."""
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(32)]).double()
    return (ones - len(words) / 2) / (math.sqrt(len(words)) / 2)


def test_equal_keys_give_equal_streams() -> None:
    first, again = (stream(5, Purpose.COHORT, 3, 1).random(8) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_streams_differ_in_every_part_of_their_key() -> None:
    keys = itertools.product((0, 1, 2**40), Purpose, (0, 1, 7), (0, 1, 2**33))
    drawn = {stream(seed, purpose, number, client).bytes(16) for seed, purpose, number, client in keys}
    assert len(drawn) == 3 * len(Purpose) * 3 * 3


def test_streams_do_not_touch_global_generators() -> None:
    before = torch.random.get_rng_state()
    legacy = np.random.get_state(legacy=False)
    SeededStreams.for_clients(1, 1, [1]).int32(0, 100)
    stream(1, Purpose.MODEL).random()
    assert torch.equal(before, torch.random.get_rng_state())
    assert str(legacy) == str(np.random.get_state(legacy=False))


def test_a_client_draws_the_same_words_in_any_company() -> None:
    together = SeededStreams.for_clients(9, 4, [10, 20, 30])
    rows = [together.int32(row, 50) for row in (2, 0, 1)]
    for client, words in zip((30, 10, 20), rows, strict=True):
        assert torch.equal(SeededStreams.for_clients(9, 4, [client]).int32(0, 50), words)
    assert len({tuple(words.tolist()) for words in rows}) == 3


def test_seeded_words_depend_on_seed_and_round() -> None:
    draws = [SeededStreams.for_clients(seed, number, [1]).int32(0, 4).tolist() for seed, number in ((1, 1), (2, 1), (1, 2))]
    assert draws[0] != draws[1] != draws[2] != draws[0]


@pytest.mark.parametrize("counts", [(10, 10, 1), (2, 18, 1), (20, 1)])
def test_even_blocks_continue_one_stream(counts: tuple[int, ...]) -> None:
    whole = SeededStreams.for_clients(3, 0, [0]).int32(0, 21)
    source = SeededStreams.for_clients(3, 0, [0])
    assert torch.equal(torch.cat([source.int32(0, count) for count in counts]), whole)


@pytest.mark.parametrize(
    "source", [SeededStreams.for_clients(1, 0, [0]), as_source(torch.Generator().manual_seed(1))], ids=["seeded", "torch"]
)
def test_reproducible_sources_are_uniform_in_every_bit(source: RandomSource) -> None:
    """|z| < 4 in 64 bit positions over both sources: a false alarm once in 250 seeds; the seeds are fixed."""
    words = source.int32(0, WORDS)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (WORDS,))
    assert float(bit_scores(words).abs().max()) < 4
    # A source of 31 or 53 bits, or one that stops short of an end, would leave a gap here (chance 1e-42 each).
    assert int(words.min()) < -(2**31) + 2**31 // 1000
    assert int(words.max()) > 2**31 - 1 - 2**31 // 1000


def test_secure_source_is_fresh_and_balanced() -> None:
    """The only unseeded test: |z| < 8 in 33 counts, a false alarm once in 2e13 runs."""
    source = SecureSource()
    first, second = source.int32(0, WORDS), source.int32(0, WORDS)
    assert (first.dtype, tuple(first.shape)) == (torch.int32, (WORDS,))
    assert not torch.equal(first, second)
    assert int((first == second).sum()) < 20
    assert float(bit_scores(first).abs().max()) < 8
    agreeing = (first ^ second).bitwise_not()  # blocks that repeat in part would agree more often than not
    assert float(bit_scores(agreeing).abs().max()) < 8


@pytest.mark.parametrize("source", [SecureSource(), SeededStreams.for_clients(0, 0, [0])], ids=["secure", "seeded"])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_sources_return_exactly_what_was_asked_for(source: RandomSource, count: int) -> None:
    words = source.int32(0, count)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (count,))


def test_a_torch_generator_is_reproducible_and_other_sources_pass_unchanged() -> None:
    first, again = (as_source(torch.Generator().manual_seed(4)).int32(0, 9) for _ in range(2))
    assert torch.equal(first, again)
    source = SecureSource()
    assert as_source(source) is source
