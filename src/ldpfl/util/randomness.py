"""Explicit randomness: seeded words by client, round and purpose, or the operating system's secure source.

The words of a simulated client depend only on (run seed, purpose, round, client), so a result does not depend on how many clients are
processed together. A deployed client draws from :class:`SecureSource`, never from a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import repeat
from operator import index
from typing import TYPE_CHECKING, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.util.entropy import secure_words
from ldpfl.util.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


class Purpose(IntEnum):
    """Purpose of a random stream. Different purposes make the streams of one client and round independent."""

    PARTITION = 1
    COHORT = 2
    BATCH_ORDER = 3
    MECHANISM = 4
    MIXING = 5
    HOLDOUT = 6
    MODEL = 7
    PARTICIPATION = 8
    RECORDS = 9
    MEASURING = 10
    LEAST_SQUARES = 11
    EVALUATION = 12
    TUNING = 13


WORDS = "aes-256 counters, 2"
"""Version of how seeded words are made. A run must be resumed with the version that it was begun with."""


def require_secret(secret: int | None) -> int:
    """Return ``secret``, the seed of a run's noise, if there is one.

    Raises:
        ConfigError: the secret is None, because the run's folder no longer has it.
    """
    if secret is None:
        raise ConfigError(
            "the noise of this run cannot be drawn again, because the file SECRET-seed is not in its folder: put the file back, or begin "
            "another run"
        )
    return secret


def stream(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """Return the generator for ``(seed, purpose, *key)``; equal arguments give equal streams."""
    sequence = np.random.SeedSequence(entropy=index(seed), spawn_key=(int(purpose), *map(index, key)))
    return np.random.Generator(np.random.PCG64DXSM(sequence))


class RandomSource(Protocol):
    """Source of a mechanism's random bits."""

    def int32(self, row: int, count: int) -> Tensor:
        """Return ``count`` int32 values, uniform over all 2**32, for the client in ``row``."""
        ...


class BlockSource(RandomSource, Protocol):
    """A source that serves many clients in one call. Each client gets the same words as in a call of its own."""

    def block(self, rows: range, count: int) -> NDArray[np.int32]:
        """Return ``count`` words for each of the clients in ``rows``, (k, count)."""
        ...

    def each(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return one word for each entry of ``rows`` (m,), which are in ascending order and may repeat: (m,)."""
        ...


def stream_key(seed: int, purpose: Purpose, *key: int) -> bytes:
    """Return the AES-256 key (32 bytes) that determines the words of all clients for ``(purpose, *key)``."""
    return hashlib.sha256(f"ldpfl words {index(seed)} {int(purpose)} {_python_integers(key)}".encode()).digest()


def bound_key(seed: int, purpose: Purpose, key: tuple[int, ...], hidden: Tensor, context: bytes) -> bytes:
    """Return the AES-256 key for the noise on the values ``hidden`` (on the CPU). If any argument differs, the noise differs."""
    name = f"{index(seed)} {int(purpose)} {_python_integers(key)} {hidden.dtype} {tuple(hidden.shape)} "
    digest = hashlib.sha256(name.encode() + context)
    digest.update(hidden.contiguous().numpy().data)
    return digest.digest()


def _python_integers(key: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``key`` as Python integers. NumPy's integers have another repr, which would give another key for the same numbers."""
    return tuple(map(index, key))


def bound_stream(seed: int, purpose: Purpose, key: tuple[int, ...], hidden: Tensor, context: bytes) -> np.random.Generator:
    """Return the random generator for the noise on the values ``hidden`` (on the CPU). If any argument differs, the noise differs."""
    return stream(int.from_bytes(bound_key(seed, purpose, key, hidden, context)), purpose, *key)


class SeededStreams:
    """Reproducible words for simulated clients. A client's words depend on a key and its number alone. Not for deployment.

    The words are AES-256 blocks of counters. A counter's high half is the client's number; its low half is the number of 16-byte blocks
    that the client has drawn before. So a client's words do not depend on the other clients of a call, and thousands of clients are served
    in one call. Each draw begins at a new block.

    Args:
        keys: one key for all clients (from :func:`stream_key`), or one for each client.
        clients: the clients' numbers (K,); row i belongs to ``clients[i]``.
    """

    def __init__(self, keys: bytes | Sequence[bytes], clients: Sequence[int] | NDArray[np.int64]) -> None:
        self._clients = np.asarray(clients, dtype=np.uint64)
        self._blocks_used = np.zeros(len(self._clients), dtype=np.uint64)  # number of AES blocks that each client has drawn
        self._shared_encryptor = _encryptor(keys) if isinstance(keys, bytes) else None  # one key for all clients
        self._keys: Sequence[bytes] = () if isinstance(keys, bytes) else keys

    @classmethod
    def of(cls, clients: Sequence[int] | NDArray[np.int64], seed: int, purpose: Purpose, *key: int) -> SeededStreams:
        """Return the words of ``clients`` for ``(seed, purpose, *key)``."""
        return cls(stream_key(seed, purpose, *key), clients)

    @classmethod
    def for_clients(cls, seed: int, round_number: int, clients: Sequence[int] | NDArray[np.int64]) -> SeededStreams:
        """Return the words with which each of ``clients`` randomises in ``round_number``. They do not depend on the clients' order."""
        return cls.of(clients, seed, Purpose.MECHANISM, round_number)

    @classmethod
    def bound(
        cls,
        seed: int,
        purpose: Purpose,
        keys: Sequence[tuple[int, ...]],
        values: Tensor,
        context: bytes = b"",
        variance: Tensor | None = None,
    ) -> SeededStreams:
        """Return words with one key for each row of ``values`` (k, ...), derived from ``seed``, the row's name in ``keys`` and its values.

        Two releases have the same noise only if they have the same values and the same ``context``, and then they are one release. So
        between two runs of one seed, noise never cancels. (RFC 6979 derives nonces that must not repeat in the same way.)

        Args:
            variance: variance (k, ...) of the noise, if it does not follow from ``seed`` and ``context`` alone.
        """
        context_digest = hashlib.sha256(context).digest()
        variance_digests = (
            repeat(b"") if variance is None else (hashlib.sha256(row.contiguous().numpy().tobytes()).digest() for row in variance)
        )
        contexts = (context_digest + variance_digest for variance_digest in variance_digests)
        # Without a variance ``contexts`` has no end, and where a sum draws all noise ``keys`` is empty, so lengths may differ.
        named_values = zip(keys, values, contexts, strict=False)
        # Each row has a key of its own, so all rows can have the client number 0.
        return cls([bound_key(seed, purpose, key, row, row_context) for key, row, row_context in named_values], [0] * len(keys))

    def int32(self, row: int, count: int) -> Tensor:
        """Return ``count`` words for the client in ``row``."""
        return torch.from_numpy(self.block(range(row, row + 1), count)[0])

    def block(self, rows: range, count: int) -> NDArray[np.int32]:
        """Return ``count`` words for each of the clients in ``rows``, (k, count)."""
        row_slice = self._row_slice(rows.start, rows.stop)
        blocks = -(-count // _WORDS_PER_BLOCK)  # blocks of each client, rounded up
        blocks_used, clients = self._blocks_used[row_slice, None], self._clients[row_slice, None]
        words = np.empty(len(rows) * blocks * _BLOCK_BYTES + _SPARE_BYTES, dtype=np.uint8)  # the library requires spare room
        # AES encrypts a counter of two halves: the blocks used so far, and the client. Few rows at a time fit a core's cache.
        rows_at_once = max(1, _BLOCKS_AT_ONCE // max(1, blocks))
        counters = np.empty((min(rows_at_once, len(rows)), blocks, 2), dtype="<u8")
        block_numbers = np.arange(blocks, dtype=np.uint64)
        for start in range(0, len(rows), rows_at_once):
            batch = slice(start, min(start + rows_at_once, len(rows)))
            batch_counters = counters[: batch.stop - start]
            np.add(blocks_used[batch], block_numbers, out=batch_counters[:, :, 0])
            batch_counters[:, :, 1] = clients[batch]
            batch_rows = range(row_slice.start + batch.start, row_slice.start + batch.stop)
            self._encrypt_rows(batch_counters, batch_rows, [blocks] * len(batch_rows), words[start * blocks * _BLOCK_BYTES :])
        blocks_used += np.uint64(blocks)  # a view: the next draw of these clients begins behind these blocks
        return words[:-_SPARE_BYTES].view("<i4").reshape(len(rows), blocks * _WORDS_PER_BLOCK)[:, :count]

    def each(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return one word for each entry of ``rows`` (m,), which are in ascending order and may repeat: (m,)."""
        row_slice = self._row_slice(int(rows[0]), int(rows[-1]) + 1)
        # Each word is the first of a block of its own: to use all four words of a block would take longer.
        blocks_of_client = np.bincount(rows - row_slice.start)
        counters = np.empty((len(rows), 2), dtype="<u8")
        first_of_client = np.searchsorted(rows, rows)  # for each entry, the index of its client's first entry
        np.add(self._blocks_used[rows], np.arange(len(rows)) - first_of_client, out=counters[:, 0], casting="unsafe")
        counters[:, 1] = self._clients[rows]
        self._blocks_used[row_slice] += blocks_of_client.astype(np.uint64)
        words = np.empty(counters.nbytes + _SPARE_BYTES, dtype=np.uint8)  # the library requires spare room
        self._encrypt_rows(counters, range(row_slice.start, row_slice.stop), blocks_of_client.tolist(), words)
        return words[:-_SPARE_BYTES].view("<i4")[::_WORDS_PER_BLOCK].copy()

    def _row_slice(self, start: int, stop: int) -> slice:
        """Return the slice of rows ``start`` to ``stop``. Raise an IndexError if there are fewer: NumPy would cut the slice silently."""
        if not 0 <= start <= stop <= len(self._clients):
            raise IndexError(stop)
        return slice(start, stop)

    def _encrypt_rows(self, counters: NDArray[np.uint64], rows: range, blocks: Sequence[int], words: NDArray[np.uint8]) -> None:
        """Encrypt ``counters`` (..., 2) to the beginning of ``words``. ``blocks`` says how many counters each of ``rows`` has, in order."""
        if self._shared_encryptor is not None:  # all clients have one key
            _encrypt(self._shared_encryptor, counters, words)
            return
        start = 0
        for row, row_counters in zip(rows, np.split(counters.reshape(-1, 2), np.cumsum(blocks)[:-1]), strict=True):
            if len(row_counters):
                _encrypt(_encryptor(self._keys[row]), row_counters, words[start:])
                start += row_counters.nbytes


_WORDS_PER_BLOCK = 4
"""Words in a block of AES."""


def _encryptor(key: bytes) -> CipherContext:
    """Return AES-256 under ``key``, which encrypts each block on its own."""
    return Cipher(AES256(key), ECB()).encryptor()


def _encrypt(encryptor: CipherContext, counters: NDArray[np.uint64], words: NDArray[np.uint8]) -> None:
    """Encrypt ``counters`` (..., 2) to the beginning of ``words``, which must have at least ``_SPARE_BYTES`` bytes more."""
    encryptor.update_into(counters.reshape(-1).view(np.uint8).data, words.data)


_SPARE_BYTES = 15
"""Bytes of room that the library requires after its output."""

_BLOCK_BYTES = 16
"""Bytes in a block of AES."""

_BLOCKS_AT_ONCE = 1 << 14
"""Number of blocks that are encrypted in one call: their counters take 256 KiB."""


class SecureSource:
    """Random bits of :func:`ldpfl.util.entropy.secure_words`, for deployed clients. They are the same source for all rows."""

    def int32(self, row: int, count: int) -> Tensor:
        return torch.from_numpy(secure_words(count))

    def block(self, rows: range, count: int) -> NDArray[np.int32]:
        return secure_words(len(rows) * count).reshape(len(rows), count)

    def each(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return secure_words(len(rows))


class _TorchSource:
    """A single torch.Generator shared by all rows, for notebooks and tests. Not for deployment."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def int32(self, row: int, count: int) -> Tensor:
        words = torch.empty(count, dtype=torch.int32)
        return words.random_(-(2**31), 2**31, generator=self._generator)


def as_source(generator: RandomSource | torch.Generator) -> RandomSource:
    """Return ``generator`` as a :class:`RandomSource`: a ``torch.Generator``, which must be on the CPU, is wrapped."""
    return _TorchSource(generator) if isinstance(generator, torch.Generator) else generator


_NO_STREAM = "the random source has no stream for client number {} (from 0): pass a source with a stream for each client. Nothing was sent"


def draw(source: RandomSource, row: int, count: int) -> Tensor:
    """Return ``count`` int32 values for ``row``, and check them.

    If a source returned too few values, PyTorch would broadcast them, and many weights would share their noise.

    Raises:
        PrivacyError: the source has no stream for a row, or returned another shape or dtype.
    """
    try:
        words = source.int32(row, count)
    except IndexError:
        raise PrivacyError(_NO_STREAM.format(row)) from None
    if words.dtype != torch.int32 or words.shape != (count,):
        raise PrivacyError(f"the random source returned {words.dtype} {tuple(words.shape)}, expected int32 ({count},); nothing was sent")
    return words


def draw_block(source: RandomSource, rows: range, count: int) -> NDArray[np.int32]:
    """Return ``count`` random words, int32 uniform over all values, for each of the clients in ``rows``: (k, count).

    They are drawn in one call if the source supports it.

    Raises:
        PrivacyError: as for :func:`draw`.
    """
    block: Callable[[range, int], NDArray[np.int32]] | None = getattr(source, "block", None)
    if block is None:
        return np.stack([draw(source, row, count).numpy() for row in rows])
    return _checked_words(lambda: block(rows, count), (len(rows), count), rows.stop - 1)


def draw_each(source: RandomSource, rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return one word for each entry of ``rows`` (m,), which are in ascending order and may repeat: (m,).

    Raises:
        PrivacyError: as for :func:`draw`.
    """
    if not len(rows):
        return np.empty(0, dtype=np.int32)
    each: Callable[[NDArray[np.int64]], NDArray[np.int32]] | None = getattr(source, "each", None)
    if each is None:
        distinct, counts = np.unique(rows, return_counts=True)
        words = [draw(source, row, count).numpy() for row, count in zip(distinct.tolist(), counts.tolist(), strict=True)]
        return np.concatenate(words)
    return _checked_words(lambda: each(rows), rows.shape, int(rows[-1]))


def _checked_words(draw_words: Callable[[], NDArray[np.int32]], shape: tuple[int, ...], last_row: int) -> NDArray[np.int32]:
    """Return the words of ``draw_words``, which must be int32 of ``shape``. It draws them for client rows up to ``last_row``.

    Raises:
        PrivacyError: the source has no stream for a row, or returned another shape or dtype.
    """
    try:
        words = draw_words()
    except IndexError:
        raise PrivacyError(_NO_STREAM.format(last_row)) from None
    if words.dtype != np.int32 or words.shape != shape:
        raise PrivacyError(f"the random source returned {words.dtype} {words.shape}, expected int32 {shape}; nothing was sent")
    return words


UNIFORM_BITS = 52
"""Random bits of a uniform number. With 53 the last midpoint would round to 1."""


def uniform(source: RandomSource, rows: range, count: int) -> NDArray[np.float64]:
    """Return ``count`` numbers for each of the clients in ``rows``, (k, count), uniform on the 2**52 midpoints (j + 1/2) / 2**52 of (0, 1).

    None of them is 0 or 1.
    """
    half_bits = UNIFORM_BITS // 2  # two words make a number, and each gives the upper 26 of its 32 bits
    words = draw_block(source, rows, 2 * count).view(np.uint32) >> (32 - half_bits)
    high, low = words[:, 0::2].astype(np.float64), words[:, 1::2]
    return np.asarray((high * 2.0**half_bits + low + 0.5) * 2.0**-UNIFORM_BITS)


COORDINATE_BLOCK = 1 << 15
"""Coordinates handled at once: their working set stays inside a core's cache. Clients draw random bits in the order of these blocks."""


def coordinate_blocks(dimension: int) -> Iterator[slice]:
    """Cut ``dimension`` coordinates into blocks of ``COORDINATE_BLOCK``."""
    return (slice(start, min(start + COORDINATE_BLOCK, dimension)) for start in range(0, dimension, COORDINATE_BLOCK))


def blocks(clients: int, dimension: int, values: int = 4 * COORDINATE_BLOCK) -> Iterator[tuple[range, slice]]:
    """Cut a matrix (``clients``, ``dimension``) into blocks (rows, columns) of about ``values`` numbers, all first columns first."""
    for columns in coordinate_blocks(dimension):
        yield from ((rows, columns) for rows in client_blocks(clients, columns.stop - columns.start, values=values))


def client_blocks(clients: int, width: int, most: int = 1 << 30, values: int = 4 * COORDINATE_BLOCK) -> Iterator[range]:
    """Cut ``clients`` rows of ``width`` values into blocks of rows.

    A block has as many rows as hold about ``values`` values, at least one and at most ``most``. Rows are whole, so a client draws the same
    bits whichever clients share its block.
    """
    rows_per_block = min(most, max(1, values // max(1, width)))
    return (range(row, min(row + rows_per_block, clients)) for row in range(0, clients, rows_per_block))
