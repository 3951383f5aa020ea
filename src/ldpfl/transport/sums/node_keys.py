"""Keys by which nodes sign what they add to a sum, and the aggregator's list of them. The relay keeps each one with its node's token."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ldpfl.errors import ConfigError, shown
from ldpfl.transport.sums.envelopes import signer_of
from ldpfl.util import key_files
from ldpfl.util.file_owners import require_own

_FIELD_PRIME = 2**255 - 19  # p of Curve25519
_ORDER_8_Y = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")


def make_key(path: Path) -> str:
    """Write a new signing key to a file that only its owner may read, and return its public half as text.

    Raises:
        ConfigError: the file exists.
    """
    key = Ed25519PrivateKey.generate()
    key_files.save_key(key, path)
    return public_text(key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key that :func:`make_key` wrote.

    Raises:
        ConfigError: the file holds no such key, or others than its owner may read it.
    """
    return key_files.load_key(path, Ed25519PrivateKey)  # type: ignore[type-abstract]  # the class is abstract, its instances are not


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public half as base64 of its 32 bytes (44 characters). A line of the aggregator's list begins with it."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def public_key(line: str) -> Ed25519PublicKey:
    """Return the key that a node's ``line`` begins with, see :func:`line_of`. Text after the key and a blank is ignored.

    Raises:
        ConfigError: the line does not begin with a key.
    """
    key = _parse_key(line)
    if key is None:
        raise ConfigError(f"{shown(line)} does not begin with a node's public key: give the line that ldpfl deploy node-key prints")
    return key


def line_of(key: Ed25519PrivateKey) -> str:
    """Return a line for the aggregator's list: the public half, and the node's name in messages, of 16 hexadecimal digits."""
    return f"{public_text(key)} {signer_of(key.public_key()).hex()}"


def read_nodes(path: Path) -> dict[bytes, Ed25519PublicKey]:
    """Return the public keys in the aggregator's list, by :func:`~ldpfl.transport.sums.signer_of`.

    A line holds a key and, after a blank, any note, such as the node's name. Empty lines and those that begin with # are skipped. Other
    users may not write to the list: by adding keys of their own, they could be all nodes but one, and so learn what that one sent.

    Raises:
        ConfigError: the list cannot be read, other users can change it, or a line holds no key or a key of an earlier line.
    """
    checked_path = require_own(path, "the list of nodes' keys", ConfigError, secret=False)
    try:
        lines = checked_path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the list of nodes' keys {path} cannot be read: {error}") from None
    nodes = dict[bytes, Ed25519PublicKey]()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key = _parse_key(line)
        if key is None:
            raise ConfigError(f"line {number} of {path} does not begin with a node's public key, as ldpfl deploy node-key prints it")
        if signer_of(key) in nodes:
            raise ConfigError(f"line {number} of {path} repeats the key of an earlier line: each node needs a separate key")
        nodes[signer_of(key)] = key
    if not nodes:
        raise ConfigError(f"{path} lists no node: put a line there for each node that may take part, as ldpfl deploy node-key prints it")
    return nodes


def _parse_key(line: str) -> Ed25519PublicKey | None:
    """Return the key that ``line`` begins with; None if it begins with none, or with one for which signatures can be forged."""
    try:
        raw = base64.b64decode((line.split() or [""])[0], validate=True)  # an empty line has no first word
        return None if _has_small_order(raw) else Ed25519PublicKey.from_public_bytes(raw)
    except (binascii.Error, ValueError):
        return None


def _has_small_order(raw: bytes) -> bool:
    """Return whether ``raw`` encodes a point of order 1, 2, 4 or 8 (RFC 8032). For such a key, signatures of any message can be forged.

    These points have y = 1, -1 or 0 modulo p = 2^255 - 19, or the y of order 8 or its negative; y may be written with p added.
    """
    y = (int.from_bytes(raw, "little") & ((1 << 255) - 1)) % _FIELD_PRIME  # without the highest bit, the sign of x
    return y in (0, 1, _FIELD_PRIME - 1, _ORDER_8_Y, _FIELD_PRIME - _ORDER_8_Y)
