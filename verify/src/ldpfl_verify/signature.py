"""Read a certificate's file, and check that its signature, if it has one, is over what the file says."""

from __future__ import annotations

from pathlib import Path

from ldpfl_verify.bounded_json import MAX_CERTIFICATE_BYTES, parse_certificate, read_bytes
from ldpfl_verify.certificate_file import Certificate
from ldpfl_verify.ed25519 import has_small_order, signature_fits
from ldpfl_verify.errors import CertificateError


def read_certificate(path: Path) -> Certificate:
    """Return the certificate in the file at ``path``, whose signature fits if it has one.

    Raises:
        CertificateError: the file cannot be read, is no certificate, or was changed after it was signed.
    """
    try:
        certificate = Certificate.from_dict(parse_certificate(read_bytes(path, MAX_CERTIFICATE_BYTES).decode()))
    except OSError as error:
        raise CertificateError(f"certificate {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CertificateError(f"{path} is not a certificate: {error}") from None
    check_signature(certificate, str(path))
    return certificate


def check_signature(certificate: Certificate, origin: str = "the certificate") -> None:
    """Raise unless ``certificate`` has no signature, or one that fits; ``origin`` names it in errors.

    Raises:
        CertificateError: the statement was changed after it was signed, or anybody can sign with the key.
    """
    signature = certificate.signature
    if signature is None:
        return
    key = bytes.fromhex(signature.public_key)
    if has_small_order(key):
        raise CertificateError(f"{origin} is signed by a key of small order, for which anybody can make up signatures: it proves no signer")
    if not signature_fits(key, certificate.statement.signed_bytes(), bytes.fromhex(signature.value)):
        raise CertificateError(f"{origin} was changed after it was signed, or is signed by another key than it names")
