"""Shares of a vector: that their sum is exact, that each alone is uniform, and that another implementation can be held against them."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, strategies as st
from scipy.stats import chi2

from ldpfl import ConfigError, ProtocolError
from ldpfl.transport.sums import Bits, fold, shard, unshard
from ldpfl.transport.sums.masks import zeros

VECTORS = Path(__file__).parent / "vectors.json"
BITS: tuple[Bits, ...] = (32, 64)


def seed(number: int) -> bytes:
    return hashlib.sha256(f"seed {number}".encode()).digest()


def total_of(shares: list[bytes], dimension: int, bits: Bits) -> Any:
    total = zeros(dimension, bits)
    for share in shares:
        fold(total, share)
    return total


@pytest.mark.parametrize("bits", BITS)
@given(st.lists(st.lists(st.integers(-(2**24), 2**24), min_size=5, max_size=5), min_size=1, max_size=20))
def test_the_sum_is_exact(bits: Bits, rows: list[list[int]]) -> None:
    points = np.array(rows, dtype=np.int64)
    seeds = [seed(place) for place in range(len(rows))]
    shares = [shard(row, own, bits) for row, own in zip(points, seeds, strict=True)]
    assert unshard(total_of(shares, 5, bits), seeds).tolist() == points.sum(axis=0).tolist()


@pytest.mark.parametrize("bits", BITS)
def test_a_sum_at_the_edges_is_exact_and_beyond_them_right_modulo_2_to_the_bits(bits: Bits) -> None:
    edge = 2 ** (bits - 1)
    for whole, found in ((edge - 1, edge - 1), (-edge, -edge), (edge, -edge)):
        rows = [np.array([whole // 2], dtype=np.int64), np.array([whole - whole // 2], dtype=np.int64)]
        shares = [shard(row, seed(place), bits) for place, row in enumerate(rows)]
        assert unshard(total_of(shares, 1, bits), [seed(0), seed(1)]).tolist() == [found]


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_a_sum_of_full_size_is_exact(bits: Bits) -> None:
    """100 nodes with 100,000 numbers each, as large as 100 of them may be. ``benchmarks/sum.py --sums 2000`` makes 2,000 such sums."""
    most, source = 2 ** (bits - 1) // 100, np.random.default_rng(bits)
    total, expected = zeros(100_000, bits), np.zeros(100_000, np.int64)
    for place in range(100):
        points = source.integers(-most, most, 100_000, endpoint=True)
        points[:2] = most, -most
        expected += points
        fold(total, shard(points, seed(place), bits))
    assert expected[0] > 0.99 * 2 ** (bits - 1)
    assert np.array_equal(unshard(total, [seed(place) for place in range(100)]), expected)


@pytest.mark.parametrize("bits", BITS)
def test_a_long_vector_has_no_seams(bits: Bits) -> None:
    """Longer than the pieces that a mask is made in; the mask is that of AES on each counter, one by one."""
    dimension = 70_001
    share = np.frombuffer(shard(np.zeros(dimension, dtype=np.int64), seed(7), bits), dtype=f"<u{bits // 8}")
    cipher = Cipher(AES256(seed(7)), ECB()).encryptor()
    blocks = -(-dimension * bits // 8 // 16)
    stream = b"".join(cipher.update(counter.to_bytes(16, "big")) for counter in range(blocks))
    assert share.tobytes() == stream[: len(share) * bits // 8]


def test_vectors_for_other_implementations() -> None:
    for vector in json.loads(VECTORS.read_text()):
        points, seeds = np.array(vector["points"], dtype=np.int64), [bytes.fromhex(text) for text in vector["seeds"]]
        shares = [shard(row, own, vector["bits"]) for row, own in zip(points, seeds, strict=True)]
        assert [share.hex() for share in shares] == vector["shares"]
        total = total_of(shares, points.shape[1], vector["bits"])
        assert total.tobytes().hex() == vector["total"]
        assert unshard(total, seeds).tolist() == vector["sum"]


@pytest.mark.parametrize("bits", BITS)
def test_a_share_says_nothing_of_its_points(bits: Bits) -> None:
    """Bytes of the shares of 0 and of the largest points are uniform: false alarm in one of 2 x 10^6 such tests."""
    for whole in (0, 2 ** (bits - 1) - 1):
        share = shard(np.full(100_000, whole, dtype=np.int64), seed(3), bits)
        counts = np.bincount(np.frombuffer(share, dtype=np.uint8), minlength=256)
        expected = len(share) / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(5e-7, 255)


def test_memory_is_that_of_one_vector() -> None:
    dimension = 1_000_000
    total = zeros(dimension, 32)
    tracemalloc.start()
    unshard(total, (seed(place) for place in range(20)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3.5 * 4 * dimension  # a copy of 4 bytes a number, and the result of 8


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a share has 39 bytes, expected 40"):
        fold(zeros(10, 32), bytes(39))
    with pytest.raises(ProtocolError, match="a seed has 31 bytes, expected 32"):
        shard(np.zeros(3, dtype=np.int64), bytes(31), 32)
    with pytest.raises(ConfigError, match="32 or 64 bits, not 16"):
        shard(np.zeros(3, dtype=np.int64), bytes(32), 16)  # type: ignore[arg-type]
