"""Seal records to the aggregator's key, so that a relay can mix them but not read them (HPKE, RFC 9180, base mode)."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from numpy.typing import NDArray

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.transport.shuffling.partial import RefusedRecords
from ldpfl.util import key_files

OVERHEAD = key_files.SEAL_BYTES
"""Number of bytes that sealing adds to a record."""

UNREADABLE = "not sealed to this key for this round and plan, or altered on the way"
CUT_OFF = "cut off: shorter than a record"


@dataclass(frozen=True)
class Binding:
    """The round and plan that a record was made for. The record cannot be opened for any other round or plan.

    Attributes:
        run: name of the run.
        round: number of the round, from 1.
        fingerprint: fingerprint of the :class:`ldpfl.transport.shuffling.RecordPlan`.

    Raises:
        ConfigError: the round is not a number from 1 to 2^64 - 1, or the fingerprint does not have 32 bytes.
    """

    run: str
    round: int
    fingerprint: bytes

    def __post_init__(self) -> None:
        if isinstance(self.round, bool) or not isinstance(self.round, int) or not 1 <= self.round < 1 << 64:
            raise ConfigError(f"a round must be a whole number from 1 on, got {self.round!r}")
        if len(self.fingerprint) != 32:
            raise ConfigError(f"a plan's fingerprint has {len(self.fingerprint)} bytes, expected 32")

    @property
    def info(self) -> bytes:
        """HPKE's ``info``. The run comes last, being the only part of variable length, so that different bindings have different bytes."""
        return b"ldpfl chunk 1\0" + self.round.to_bytes(8, "big") + self.fingerprint + self.run.encode()


def generate_key() -> X25519PrivateKey:
    """Return a new private key for the aggregator, from the operating system's secure source."""
    return X25519PrivateKey.generate()


def load_key(path: Path) -> X25519PrivateKey:
    """Read a private key that :func:`ldpfl.util.key_files.save_key` wrote.

    Raises:
        ConfigError: the file holds no such key, or others than its owner may read it.
    """
    return key_files.load_key(path, X25519PrivateKey)  # type: ignore[type-abstract]  # the class is abstract, its instances are not


def public_text(key: X25519PrivateKey | X25519PublicKey) -> str:
    """Return the public key as one line of text: base64 of its 32 bytes. Clients need it."""
    public = key.public_key() if isinstance(key, X25519PrivateKey) else key
    return base64.b64encode(public.public_bytes_raw()).decode()


def read_public(text: str) -> X25519PublicKey:
    """Read a public key that :func:`public_text` wrote.

    Raises:
        ConfigError: ``text`` is no X25519 public key.
    """
    try:
        raw = base64.b64decode(text.strip(), validate=True)
        return X25519PublicKey.from_public_bytes(raw)
    except (binascii.Error, ValueError):
        raise ConfigError(f"a public key must be 32 bytes in base64 (44 characters), got {len(text.strip())} characters") from None


def seal(plaintexts: NDArray[np.uint8], public_key: X25519PublicKey, binding: Binding) -> bytes:
    """Seal each of the ``plaintexts``, (m, p) uint8. Return the m sealed records, of p + 48 bytes each, in a new random order.

    The order comes from the operating system's secure source. Otherwise a record's place would tell the relay which weights it is about.

    Raises:
        ConfigError: no secret can be shared with the key, because it has small order.
    """
    rows = [row.tobytes() for row in plaintexts]
    secrets.SystemRandom().shuffle(rows)
    info = binding.info
    return b"".join(key_files.sealed(row, public_key, info) for row in rows)


def open_records(
    blob: bytes, plaintext_bytes: int, private_key: X25519PrivateKey, binding: Binding
) -> tuple[NDArray[np.uint8], tuple[RefusedRecords, ...]]:
    """Open the sealed records in ``blob``, of ``plaintext_bytes`` + 48 bytes each, which were made for the round and plan in ``binding``.

    Return the plaintexts (R, plaintext_bytes) of the R records that can be opened, in their order, and the numbers of refused records. A
    record is refused as :data:`UNREADABLE` if it was altered, or sealed to another key or for another run, round or plan. An incomplete
    last record is refused as :data:`CUT_OFF`.

    Raises:
        ProtocolError: ``plaintext_bytes`` is not positive.
    """
    if plaintext_bytes < 1:
        raise ProtocolError(f"plaintext_bytes must be at least 1, got {plaintext_bytes}")
    count, remainder = divmod(len(blob), plaintext_bytes + OVERHEAD)
    opened = list(_decrypted(blob, plaintext_bytes + OVERHEAD, private_key, binding.info))
    refused = (RefusedRecords(count - len(opened), UNREADABLE), RefusedRecords(int(remainder > 0), CUT_OFF))
    plaintexts = np.frombuffer(b"".join(opened), dtype=np.uint8).reshape(-1, plaintext_bytes)
    return plaintexts, tuple(entry for entry in refused if entry.count)


def _decrypted(blob: bytes, size: int, private_key: X25519PrivateKey, info: bytes) -> Iterator[bytes]:
    """Yield the plaintexts of those records of ``size`` bytes that can be decrypted. ``info`` is HPKE's, see :attr:`Binding.info`."""
    records = memoryview(blob)
    for start in range(0, len(blob) - size + 1, size):
        try:
            yield key_files.SUITE.decrypt(records[start : start + size], private_key, info)
        except InvalidTag:
            continue
