"""Secret random words of the operating system, many at once. It needs no PyTorch, and so a relay needs none."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.int32]]
"""Gives as many words as it is asked for, uniform over all 2**32."""

_LONG = 4096
"""Bytes from which on a cipher is faster than the operating system."""

_ZEROS = memoryview(bytes(1 << 18))
"""What is enciphered, as a rule: fresh memory costs half as much as the cipher."""


def secure_words(count: int) -> NDArray[np.int32]:
    """Return ``count`` words of the operating system's cryptographic generator, many of them stretched by a cipher.

    A long draw is the key stream of AES-256 in counter mode under 32 bytes of the operating system, drawn for it alone. That
    is how the operating system makes its own bits (Linux: ChaCha20 under a key of 32 bytes), so both rest on a cipher that
    nobody tells from chance: n blocks of AES differ from uniform bits by n^2 / 2^129 at most (2^-103 for 128 KiB), plus what
    breaks AES-256 itself. No key and no position outlives a call: threads and forked processes have nothing to share.
    """
    if 4 * count < _LONG:
        return np.frombuffer(bytearray(os.urandom(4 * count)), dtype=np.int32)  # PyTorch's own refuses to read nothing
    words = np.empty(count, dtype=np.int32)
    key_stream = Cipher(AES256(os.urandom(32)), CTR(bytes(16))).encryptor()  # the counter starts at 0: a key is used once
    zeros = _ZEROS[: 4 * count] if 4 * count <= len(_ZEROS) else bytes(4 * count)
    key_stream.update_into(zeros, words.data.cast("B"))
    return words
