"""Who signed a certificate: Ed25519 over its statement, made and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from ldpfl.errors import DataError
from ldpfl.files import MAX_CERTIFICATE_BYTES, from_json, read_text
from ldpfl.verifying.certificate_file import Certificate, Signature, Statement


def signed(statement: Statement, key: Ed25519PrivateKey | None) -> Certificate:
    """Return the certificate of ``statement``, signed by ``key`` if there is one."""
    if key is None:
        return Certificate(statement=statement)
    made = Signature(public_key=key.public_key().public_bytes_raw().hex(), value=key.sign(_bytes(statement)).hex())
    return Certificate(statement=statement, signature=made)


def read(path: Path) -> Certificate:
    """Read a certificate, and see that its signature, if it has one, is that of what stands there.

    Raises:
        DataError: it is none, or was changed; one line.
    """
    try:
        tree: Any = from_json(read_text(path, MAX_CERTIFICATE_BYTES))
        certificate = Certificate.model_validate(tree)
    except OSError as error:
        raise DataError(f"certificate {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(f"{path} is no certificate: {place}: {first['msg']}") from None
    except ValueError as error:
        raise DataError(f"{path} is no certificate: {error}") from None
    signature = certificate.signature
    if signature is not None:
        try:
            if _has_small_order(signature.public_key):
                raise DataError(f"{path} is signed by a key that fits whatever is signed: it is nobody's")
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
            key.verify(bytes.fromhex(signature.value), _bytes(certificate.statement))
        except (InvalidSignature, ValueError):
            raise DataError(f"{path} was changed after it was signed, or is signed by another key than it says") from None
    return certificate


_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P


def _has_small_order(public_key: str) -> bool:
    """Tell whether a key of Ed25519 is one of the points of order 1, 2, 4 or 8, under which signatures of anything can be made up.

    Their second coordinate is 1, -1 or 0, or one whose point doubled has it 0: d y^4 + 2 y^2 = 1.
    """
    y = int.from_bytes(bytes.fromhex(public_key), "little") % 2**255 % _P
    return y in (0, 1, _P - 1) or (_D * pow(y, 4, _P) + 2 * y * y - 1) % _P == 0


def _bytes(statement: Statement) -> bytes:
    return json.dumps(statement.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
