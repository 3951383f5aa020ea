"""Explicit randomness: one seeded stream a client, round and purpose, or the operating system's secure source.

Simulated clients draw from streams that depend only on (run seed, purpose, round, client), so a result does not
depend on how many clients are handled together. A deployed client draws from :class:`SecureSource`, never from a seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ldpfl.entropy import secure_words
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Purpose(IntEnum):
    """What a stream is drawn for; keeps the streams of one client and round independent."""

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


def known(secret: int | None) -> int:
    """Return ``secret``.

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
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(int(purpose), *key))
    return np.random.Generator(np.random.PCG64DXSM(sequence))


class RandomSource(Protocol):
    """Where a mechanism gets its random bits from."""

    def int32(self, row: int, count: int) -> Tensor:
        """Return ``count`` int32 values, uniform over all 2**32, for the client in ``row``."""
        ...


class _Streams(Sequence[np.random.Generator]):
    """The streams of clients in a round, each made when it is drawn from for the first time."""

    def __init__(self, seed: int, round_number: int, clients: Sequence[int]) -> None:
        self._key, self._clients = (seed, round_number), tuple(clients)
        self._made: dict[int, np.random.Generator] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, row: Any) -> Any:
        if row not in self._made:
            seed, round_number = self._key
            self._made[row] = stream(seed, Purpose.MECHANISM, round_number, int(self._clients[row]))
        return self._made[row]


def bound_stream(seed: int, purpose: Purpose, key: tuple[int, ...], hidden: Tensor, context: bytes) -> np.random.Generator:
    """Return the stream that hides the values ``hidden``, on a CPU, of what is named by ``key``; see :meth:`SeededStreams.bound`."""
    digest = hashlib.sha256(f"{seed} {key} {hidden.dtype} {tuple(hidden.shape)} ".encode() + context)
    digest.update(hidden.contiguous().numpy().tobytes())
    return stream(int.from_bytes(digest.digest()), purpose, *key)


class SeededStreams:
    """Reproducible bits for simulated clients: row i draws from its own stream. Not for deployment."""

    def __init__(self, generators: Sequence[np.random.Generator]) -> None:
        self._generators: Sequence[np.random.Generator] = generators

    @classmethod
    def for_clients(cls, seed: int, round_number: int, clients: Sequence[int]) -> SeededStreams:
        """One stream for each of ``clients`` in ``round_number``, whatever the order they come in."""
        return cls(_Streams(seed, round_number, clients))

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
        """One stream for each row of ``values`` (k, ...), which follows from ``seed``, its key, and what is to be randomised itself.

        Two releases then have the same bits only if they are of the same values in the same ``context``, and so are one release:
        whatever else differs between two runs of one seed, nothing cancels. (So nonces are made that must not be used twice: RFC 6979.)
        ``variance`` (k, ...) of the noise, where that follows from more than ``seed`` and ``context`` do.
        """
        inside = hashlib.sha256(context).digest()
        sizes = repeat(b"") if variance is None else (hashlib.sha256(row.contiguous().numpy().tobytes()).digest() for row in variance)
        rows = zip(keys, values, sizes, strict=False)
        return cls([bound_stream(seed, purpose, key, row, inside + size) for key, row, size in rows])

    def int32(self, row: int, count: int) -> Tensor:
        words = self._generators[row].bit_generator.random_raw((count + 1) // 2)
        return torch.from_numpy(words.view(np.int32)[:count])


class SecureSource:
    """Bits of :func:`ldpfl.entropy.secure_words`; what a deployed client uses."""

    def int32(self, row: int, count: int) -> Tensor:
        return torch.from_numpy(secure_words(count))


class _TorchSource:
    """A single torch.Generator shared by all rows, for notebooks and tests. Not for deployment."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def int32(self, row: int, count: int) -> Tensor:
        words = torch.empty(count, dtype=torch.int32)
        return words.random_(-(2**31), 2**31, generator=self._generator)


def as_source(generator: RandomSource | torch.Generator) -> RandomSource:
    """Accept a CPU ``torch.Generator`` wherever a :class:`RandomSource` is wanted."""
    return _TorchSource(generator) if isinstance(generator, torch.Generator) else generator


def draw(source: RandomSource, row: int, count: int) -> Tensor:
    """Return ``count`` int32 values for ``row``, and stop if the source gives anything else.

    A source that returns too few would otherwise be broadcast: many weights would share their noise.

    Raises:
        PrivacyError: the source ran out, or returned another shape or dtype.
    """
    try:
        words = source.int32(row, count)
    except IndexError:
        raise PrivacyError(f"the random source has no stream for client row {row}; nothing was sent") from None
    if words.dtype != torch.int32 or words.shape != (count,):
        raise PrivacyError(f"the random source returned {words.dtype} {tuple(words.shape)}, expected int32 ({count},); nothing was sent")
    return words


UNIFORM_BITS = 52
"""Random bits of a uniform number. With 53 the last midpoint would round to 1."""


def uniform(source: RandomSource, row: int, count: int) -> Tensor:
    """Return ``count`` float64 values for ``row``, uniform on the 2**52 midpoints (k + 1/2) / 2**52 of (0, 1): never 0 or 1."""
    words = draw(source, row, 2 * count).to(torch.int64) & 0xFFFFFFFF
    high, low = words[0::2] >> 6, words[1::2] >> 6  # 26 bits each
    return ((high << 26) + low).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)
