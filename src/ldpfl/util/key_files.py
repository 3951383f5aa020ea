"""Private keys in files that only their owner may read, and encryption to a public key (HPKE)."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from ldpfl.errors import ConfigError

Key = TypeVar("Key", X25519PrivateKey, Ed25519PrivateKey)

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)
"""How everything is sealed to an aggregator (HPKE)."""

SEAL_BYTES = 48
"""Number of bytes that sealing adds: a fresh public key (32) and the tag (16)."""


def sealed(plaintext: bytes, public_key: X25519PublicKey, info: bytes) -> bytes:
    """Encrypt ``plaintext`` for ``public_key``. Decryption needs the same ``info``, which binds the text to its purpose.

    Raises:
        ConfigError: the key is a point of low order, which gives no secrecy.
    """
    try:
        return SUITE.encrypt(plaintext, public_key, info)
    except ValueError:
        raise ConfigError(
            "the aggregator's public key is invalid (a point of low order): it would protect nothing. Ask the aggregator for another key"
        ) from None


def save_key(key: X25519PrivateKey | Ed25519PrivateKey, path: Path) -> None:
    """Write a private key as PEM (PKCS #8, not encrypted) to a new file that only its owner may read.

    Raises:
        ConfigError: the file exists already; a key that others rely on is not overwritten.
    """
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: choose another file, or delete this one if no round needs its key any more") from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # restores bits that the umask may have removed
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())


def load_key(path: Path, kind: type[Key]) -> Key:
    """Read a private key that :func:`save_key` wrote.

    Raises:
        ConfigError: the file holds no key of type ``kind``, or other users may read it.
    """
    try:
        with path.open("rb") as file:
            mode, pem = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        raise ConfigError(f"the private key {path} cannot be read: {error.strerror}") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"the private key {path} can be read by other users: run chmod 600 {path}, or make a new key")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, kind):
        raise ConfigError(
            f"{path}: expected an {kind.__name__.removesuffix('PrivateKey')} private key in PEM format, without a password, but found none"
        )
    return key
