"""Split a vector of integers into two shares: a masked vector, which looks uniform, and a 32-byte seed, from which the mask is computed.

The arithmetic is modulo 2^m, m = 32 or 64. The first share of x is y = x + r, where r is the key stream of AES-256 in counter mode under
the seed. A party that has only y, or only the seed, learns nothing of x but its length. A party that has the sum of many y, and all seeds,
learns the sum of the x.
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
"""m: width of a number of a share, in bits."""

SEED_BYTES = 32

_PIECE_BYTES = 1 << 16
"""Number of bytes of a mask that are in memory at a time: they fit a cache. A multiple of AES's block of 16 bytes."""

_ZEROS = memoryview(bytes(_PIECE_BYTES))  # encrypted zeros are the key stream


def shard(points: NDArray[np.int64], seed: bytes, bits: Bits) -> bytes:
    """Return the first share of the integers ``points`` (d,): masked, each modulo 2^``bits``, as little-endian bytes.

    The mask is computed from ``seed``, which is the second share.

    The share is indistinguishable from uniform bytes if AES-256 is secure, and the seed is secret and used for this share only.
    """
    masked = points.astype(_number_type(bits))  # keeps the low m bits, which is the value modulo 2^m
    for start, mask in _mask_pieces(seed, len(masked), bits):
        masked[start : start + len(mask)] += mask
    return masked.tobytes()


def fold(total: NDArray[np.unsignedinteger], share: bytes | memoryview) -> None:
    """Add a first share, a masked vector (d,) as little-endian bytes, to ``total`` (d,) in place.

    Raises:
        ProtocolError: the share has another length than ``total``.
    """
    if len(share) != total.nbytes:
        raise ProtocolError(f"a share has {len(share)} bytes, expected {total.nbytes}")
    total += np.frombuffer(share, dtype=total.dtype)


def unshard(total: NDArray[np.unsignedinteger], seeds: Iterable[bytes]) -> NDArray[np.int64]:
    """Return the sum (d,) of the clients' integer vectors: the sum ``total`` (d,) of their masked vectors, less all masks.

    The masks are computed from the clients' ``seeds``. With numbers of m bits, the sum is right modulo 2^m. So it is exact if each
    coordinate of the true sum lies in [-2^(m-1), 2^(m-1)). Memory does not grow with the number of seeds.
    """
    bits: Bits = 32 if total.dtype.itemsize == 4 else 64
    unmasked = total.copy()
    for seed in seeds:
        for start, mask in _mask_pieces(seed, len(unmasked), bits):
            unmasked[start : start + len(mask)] -= mask
    return unmasked.view(f"<i{bits // 8}").astype(np.int64)


def zeros(dimension: int, bits: Bits) -> NDArray[np.unsignedinteger]:
    """Return a zero vector of ``dimension`` numbers, to which :func:`fold` can add shares."""
    return np.zeros(dimension, dtype=_number_type(bits))


def _mask_pieces(seed: bytes, dimension: int, bits: Bits) -> Iterable[tuple[int, NDArray[np.unsignedinteger]]]:
    """Yield pieces of a seed's mask of ``dimension`` numbers, as (first number's index, numbers). A piece overwrites the one before."""
    if len(seed) != SEED_BYTES:
        raise ProtocolError(f"a seed has {len(seed)} bytes, expected {SEED_BYTES}")
    # The counter may start at 0 each time, because each seed masks only one vector.
    stream = Cipher(AES256(seed), CTR(bytes(16))).encryptor()
    buffer = np.empty(_PIECE_BYTES, dtype=np.uint8)
    numbers_per_piece = _PIECE_BYTES * 8 // bits
    for start in range(0, dimension, numbers_per_piece):
        length = min(numbers_per_piece, dimension - start) * bits // 8
        stream.update_into(_ZEROS[:length], buffer[:length].data)
        yield start, buffer[:length].view(_number_type(bits))


def _number_type(bits: Bits) -> np.dtype[np.unsignedinteger]:
    """Return the little-endian type of the numbers of a share."""
    if bits not in get_args(Bits):
        raise ConfigError(f"numbers of a share have {' or '.join(map(str, get_args(Bits)))} bits, not {bits!r}")
    return np.dtype(f"<u{bits // 8}")
