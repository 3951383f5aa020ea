"""Draw many secret random words from the operating system. This module needs no PyTorch, so that a relay needs none either."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.int32]]
"""Function that returns the given number of random words, uniform over all 2**32 values."""

_CIPHER_FROM_BYTES = 4096
"""Number of bytes from which on a cipher is faster than the operating system."""

_ZEROS = memoryview(bytes(1 << 18))
"""Zeros to encrypt in most draws. To fill fresh memory with zeros would take half as long as the cipher."""


def secure_words(count: int) -> NDArray[np.int32]:
    """Return ``count`` words of the operating system's cryptographic generator; a long draw is expanded by a cipher.

    A long draw is the key stream of AES-256 in counter mode, under a key of 32 bytes that the operating system draws for this call alone.
    The operating system makes its own bits in the same way (Linux: ChaCha20 under a key of 32 bytes), so both rest on the security of a
    cipher. The distance of n AES blocks from uniform bits is at most n^2 / 2^129 (2^-103 for 128 KiB), plus the advantage of an attack on
    AES-256 itself. No key and no position is kept after a call, so threads and forked processes share no state.
    """
    if 4 * count < _CIPHER_FROM_BYTES:
        return np.frombuffer(bytearray(os.urandom(4 * count)), dtype=np.int32)  # unlike torch.frombuffer, NumPy's takes an empty buffer
    words = np.empty(count, dtype=np.int32)
    key_stream = Cipher(AES256(os.urandom(32)), CTR(bytes(16))).encryptor()  # the counter starts at 0: a key is used once
    zeros = _ZEROS[: 4 * count] if 4 * count <= len(_ZEROS) else bytes(4 * count)
    key_stream.update_into(zeros, words.data.cast("B"))
    return words
