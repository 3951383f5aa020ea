"""Two shares of a vector of integers: one is uniform by itself, the other is the 32 bytes that the mask is made from.

All of it is modulo 2^m, m = 32 or 64: y = x + r, where r is the key stream of AES-256 in counter mode under the seed. Who has y alone, or
the seed alone, learns nothing of x but its length; who has the sum of many y and all the seeds learns the sum of the x.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, ProtocolError

Bits = Literal[32, 64]
"""m: how many bits a number of a share has."""

SEED_BYTES = 32

_PIECE_BYTES = 1 << 16
"""How much of a mask is in memory: what fits a processor's cache, and takes longer to make than to begin. A multiple of AES's 16."""

_ZEROS = memoryview(bytes(_PIECE_BYTES))


def shard(points: NDArray[np.int64], seed: bytes, bits: Bits) -> bytes:
    """Return the first share of ``points`` (d,), each modulo 2^``bits``, as little-endian bytes; ``seed`` is the second one.

    The share is as hard to tell from uniform bytes as AES-256 is from chance, as long as the seed was drawn for it alone and is secret.
    """
    masked = points.astype(_kind(bits))  # keeps the low bits, which is modulo 2^m
    for start, mask in _mask(seed, len(masked), bits):
        masked[start : start + len(mask)] += mask
    return masked.tobytes()


def fold(total: NDArray[np.unsignedinteger], share: bytes | memoryview) -> None:
    """Add a first share to ``total`` (d,), which is changed.

    Raises:
        ProtocolError: the share is of another length.
    """
    if len(share) != total.nbytes:
        raise ProtocolError(f"a share has {total.nbytes} bytes here, not {len(share)}")
    total += np.frombuffer(share, dtype=total.dtype)


def unshard(total: NDArray[np.unsignedinteger], seeds: Iterable[bytes]) -> NDArray[np.int64]:
    """Return the sum (d,) of the clients' points, from the sum of their first shares and all of their second ones.

    It is exact where each coordinate of the true sum lies in [-2^(m-1), 2^(m-1)), and right modulo 2^m anywhere. Memory is that of one
    vector, whatever the number of seeds.
    """
    bits: Bits = 32 if total.dtype.itemsize == 4 else 64
    left = total.copy()
    for seed in seeds:
        for start, mask in _mask(seed, len(left), bits):
            left[start : start + len(mask)] -= mask
    return left.view(f"<i{bits // 8}").astype(np.int64)


def zeros(dimension: int, bits: Bits) -> NDArray[np.unsignedinteger]:
    """Return the sum (d,) of no shares."""
    return np.zeros(dimension, dtype=_kind(bits))


def _mask(seed: bytes, dimension: int, bits: Bits) -> Iterable[tuple[int, NDArray[np.unsignedinteger]]]:
    """Yield the mask (d,) of a seed in pieces, each with the place of its first number; a piece is overwritten by the next."""
    if len(seed) != SEED_BYTES:
        raise ProtocolError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    stream, held = Cipher(AES256(seed), CTR(bytes(16))).encryptor(), np.empty(_PIECE_BYTES, dtype=np.uint8)
    step = _PIECE_BYTES * 8 // bits
    for start in range(0, dimension, step):
        length = min(step, dimension - start) * bits // 8
        stream.update_into(_ZEROS[:length], held[:length].data)
        yield start, held[:length].view(_kind(bits))


def _kind(bits: Bits) -> np.dtype[np.unsignedinteger]:
    if bits not in get_args(Bits):
        raise ConfigError(f"numbers of a share have {' or '.join(map(str, get_args(Bits)))} bits, not {bits!r}")
    return np.dtype(f"<u{bits // 8}")
