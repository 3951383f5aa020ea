"""Keys and certificates for a trial on one machine: an authority that lives as long as this process, and SuperNodes' keys."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

VALID_FOR = timedelta(days=1)
_CLOCKS_DIFFER = timedelta(hours=1)


class Authority:
    """A certificate authority for this machine's loopback. Its private key is never written, so no certificate can follow later."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ldpfl demo authority")])
        uses = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        self._own = (
            _begun(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA384())
        )

    def save(self, path: Path) -> None:
        """Write the authority's certificate, PEM: what everybody has to be given."""
        path.write_bytes(self._own.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, certificate: Path, key: Path) -> None:
        """Write a server's certificate for localhost and 127.0.0.1, PEM, and its private key, which only its owner may read.

        Raises:
            FileExistsError: there is a key already.
        """
        own = ec.generate_private_key(ec.SECP256R1())
        places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        issued = (
            _begun(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), self._name, own.public_key())
            .add_extension(x509.SubjectAlternativeName(places), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA384())
        )
        write_private(key, _private(own, serialization.PrivateFormat.PKCS8))
        certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))


def node_key(private: Path) -> Path:
    """Write a new key of a SuperNode as Flower wants it, P-384 in OpenSSH's format; return the file of its public half, beside it.

    Raises:
        FileExistsError: there is a key already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(private, _private(key, serialization.PrivateFormat.OpenSSH))
    public = private.with_name(private.name + ".pub")
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n")
    return public


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` to a new file that only its owner may read.

    Raises:
        FileExistsError: there is a file already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + VALID_FOR)
    )


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
