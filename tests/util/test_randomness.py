"""Streams that depend on nothing but their key, and sources that are uniform over all 32 bits."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ldpfl import PrivacyError, SecureSource, SeededStreams
from ldpfl.util.randomness import Purpose, RandomSource, as_source, bound_stream, draw, draw_block, draw_each, stream, stream_key, uniform

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


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_equal_numbers_are_equal_keys_whatever_their_type(kind: Callable[[int], Any]) -> None:
    hidden = torch.arange(4.0)

    def drawn(seed: int, number: int, client: int) -> list[bytes]:
        bound = SeededStreams.bound(seed, Purpose.MECHANISM, [(number, client)], hidden[None])
        return [
            stream_key(seed, Purpose.MECHANISM, number),
            stream(seed, Purpose.COHORT, number).bytes(16),
            bound_stream(seed, Purpose.MIXING, (number,), hidden, b"x").bytes(16),
            bound.int32(0, 4).numpy().tobytes(),
            SeededStreams.for_clients(seed, number, [client]).int32(0, 4).numpy().tobytes(),
        ]

    assert drawn(kind(5), kind(3), kind(7)) == drawn(5, 3, 7)


def test_uniform_numbers_of_a_client_are_its_own_and_never_0_or_1() -> None:
    """Of two clients 100,000 each: mean and mean square, |z| < 4; the seed is fixed."""
    together = uniform(SeededStreams.for_clients(1, 1, [8, 3]), range(2), 100_000)
    assert np.array_equal(together[1:], uniform(SeededStreams.for_clients(1, 1, [3]), range(1), 100_000))
    assert abs(together.mean() - 1 / 2) < 4 * (1 / 12 / together.size) ** 0.5
    assert abs(np.square(together).mean() - 1 / 3) < 4 * (4 / 45 / together.size) ** 0.5

    class Ends:
        def int32(self, row: int, count: int) -> Tensor:
            return torch.full((count,), -row, dtype=torch.int32)

    assert uniform(Ends(), range(2), 1).tolist() == [[2.0**-53], [1 - 2.0**-53]]


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


@pytest.mark.parametrize("counts", [(8, 12, 1), (4, 16, 1), (20, 1)])
def test_whole_blocks_of_the_cipher_continue_one_stream(counts: tuple[int, ...]) -> None:
    whole = SeededStreams.for_clients(3, 0, [0]).int32(0, 21)
    source = SeededStreams.for_clients(3, 0, [0])
    assert torch.equal(torch.cat([source.int32(0, count) for count in counts]), whole)


def test_words_are_the_key_stream_of_the_cipher() -> None:
    """AES-256 over the client's number in the high half and the block's in the low half of a counter."""
    key, client = stream_key(9, Purpose.MECHANISM, 4), 2**40 + 3
    encryptor = Cipher(AES256(key), ECB()).encryptor()
    blocks = b"".join(encryptor.update(number.to_bytes(8, "little") + client.to_bytes(8, "little")) for number in range(3))
    source = SeededStreams.for_clients(9, 4, [7, client])
    assert source.int32(1, 9).numpy().tobytes() == blocks[:36]


Asked = st.lists(st.tuples(st.sampled_from(["block", "each", "int32"]), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=100, derandomize=True)
@given(Asked, st.booleans())
def test_in_one_call_clients_get_what_each_gets_by_itself(asked: list[tuple[str, int]], bound: bool) -> None:
    """Whatever is asked for before: blocks, single words of some, or one client's own. With a key for all, or one for each."""
    clients = [5, 0, 2**33]
    values = torch.arange(6.0).reshape(3, 2)

    def source(rows: list[int]) -> SeededStreams:
        if not bound:
            return SeededStreams.for_clients(1, 2, [clients[row] for row in rows])
        return SeededStreams.bound(1, Purpose.MECHANISM, [(clients[row],) for row in rows], values[rows])

    together, alone = source([0, 1, 2]), [source([row]) for row in range(3)]
    for how, count in asked:
        if how == "block":
            found = draw_block(together, range(1, 3), count)
            for row in (1, 2):
                assert found[row - 1].tolist() == draw_block(alone[row], range(1), count)[0].tolist()
        elif how == "each":
            rows = np.repeat([0, 2], [count, 2])
            words = draw_each(together, rows)
            for row in (0, 2):
                assert words[rows == row].tolist() == draw_each(alone[row], np.zeros((rows == row).sum(), dtype=np.int64)).tolist()
        else:
            assert torch.equal(together.int32(2, count), alone[2].int32(0, count))


def test_blocks_of_a_source_that_knows_none_are_drawn_row_by_row() -> None:
    class Rows:
        def int32(self, row: int, count: int) -> Tensor:
            return torch.arange(count, dtype=torch.int32) + 100 * row

    assert draw_block(Rows(), range(1, 3), 2).tolist() == [[100, 101], [200, 201]]
    assert draw_each(Rows(), np.array([0, 2, 2])).tolist() == [0, 200, 201]


def test_more_clients_than_a_source_has_and_words_of_another_kind_are_refused() -> None:
    source = SeededStreams.for_clients(0, 0, [1, 2])
    for ask in (lambda: draw_block(source, range(1, 3), 4), lambda: draw_each(source, np.array([1, 2])), lambda: draw(source, 2, 4)):
        with pytest.raises(PrivacyError):
            ask()

    class Short(SecureSource):
        def block(self, rows: range, count: int) -> NDArray[np.int32]:
            return super().block(rows, count)[:, 1:]

    with pytest.raises(PrivacyError, match="expected int32"):
        draw_block(Short(), range(2), 4)


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
    """Unseeded: |z| < 8 in 64 counts, a false alarm once in 1e13 runs."""
    source = SecureSource()
    first, second = source.int32(0, WORDS), source.int32(0, WORDS)
    assert (first.dtype, tuple(first.shape)) == (torch.int32, (WORDS,))
    assert not torch.equal(first, second)
    assert int((first == second).sum()) < 20
    assert float(bit_scores(first).abs().max()) < 8
    agreeing = (first ^ second).bitwise_not()  # blocks that repeat in part would agree more often than not
    assert float(bit_scores(agreeing).abs().max()) < 8


LENGTHS = (8, 1023, 1024, 32_768)
"""Short draws, and long ones that a cipher stretches."""


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.thorough_except("1024")
def test_secure_draws_have_nothing_in_common_whoever_makes_them(count: int) -> None:
    """Draws in a row, in threads, and in forked processes: all differ in their first 32 bytes."""
    source = SecureSource()

    def start_of_a_draw(_: int = 0) -> bytes:
        return source.int32(0, count).numpy().tobytes()[:32]

    seen = [start_of_a_draw() for _ in range(20)]
    with ThreadPoolExecutor(8) as pool:
        seen += pool.map(start_of_a_draw, range(64))
    seen += [in_a_fork(start_of_a_draw) for _ in range(3)] + [start_of_a_draw()]
    assert len(set(seen)) == 88


def in_a_fork(action: Callable[[], bytes]) -> bytes:
    """Return what ``action`` returns in a copy of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: this process has threads
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, action())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.parametrize("count", LENGTHS)
def test_long_secure_draws_are_a_key_stream_under_one_fresh_key(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_chance(size: int) -> bytes:
        asked.append(size)
        return bytes(size)

    monkeypatch.setattr(os, "urandom", no_chance)
    first, second = (SecureSource().int32(0, count) for _ in range(2))
    assert torch.equal(first, second)  # nothing but what the operating system gave enters
    if count < 1024:
        assert asked == [4 * count] * 2
        assert not bool(first.any())
    else:
        assert asked == [32] * 2
        # AES-256 of the block 0 under the key 0, from the standard's published answers.
        assert first[:4].numpy().tobytes().hex() == "dc95c078a2408989ad48a21492842087"
        assert len(set(first.tolist())) > 0.99 * count


@pytest.mark.parametrize("source", [SecureSource(), SeededStreams.for_clients(0, 0, [0])], ids=["secure", "seeded"])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1023, 1024, 1025, 40_001])
def test_sources_return_exactly_what_was_asked_for(source: RandomSource, count: int) -> None:
    words = source.int32(0, count)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (count,))


def test_a_torch_generator_is_reproducible_and_other_sources_pass_unchanged() -> None:
    first, again = (as_source(torch.Generator().manual_seed(4)).int32(0, 9) for _ in range(2))
    assert torch.equal(first, again)
    source = SecureSource()
    assert as_source(source) is source


def test_bound_words_follow_from_values_context_and_the_size_of_the_noise() -> None:
    values = torch.arange(6.0).reshape(2, 3)

    def words(values: Tensor, context: bytes, variance: Tensor | None) -> list[int]:
        source = SeededStreams.bound(5, Purpose.MECHANISM, [(1, 0), (1, 1)], values, context, variance)
        return source.int32(1, 8).tolist()

    ones = torch.ones(2, 3)
    drawn = [
        words(values, b"", None),
        words(values + 1, b"", None),
        words(values, b"x", None),
        words(values, b"", ones),
        words(values, b"", 2 * ones),
    ]
    assert len(set(map(tuple, drawn))) == 5
    assert words(values, b"", ones) == words(values.clone(), b"", ones.clone())
