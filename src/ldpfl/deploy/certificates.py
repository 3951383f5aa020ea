"""Make a certificate authority, and issue server certificates for SuperLink and relay, for deployments without an authority of their own.

The package trustme, which the demo uses, will not do: its certificates are for tests, last for centuries, and may sign code.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from ldpfl.errors import ConfigError
from ldpfl.util.file_owners import require_own
from ldpfl.util.files import make_folder, replace_atomically

_HOST_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ORGANISATION = "ldpfl deployment"

AUTHORITY_LASTS = timedelta(days=3650)  # so long that nodes seldom need a new authority

AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "server.crt", "server.key"


@dataclass(frozen=True)
class Issued:
    """A certificate that was issued.

    Attributes:
        folder: folder of the certificate and its key.
        names: host names and addresses of the server.
        until: end of the certificate's validity.
    """

    folder: Path
    names: tuple[str, ...]
    until: datetime

    @property
    def certificate(self) -> Path:
        return self.folder / CERTIFICATE

    @property
    def key(self) -> Path:
        return self.folder / KEY


def expiry_of(certificate: Path) -> datetime:
    """Return the time at which the first certificate in a PEM file expires.

    Raises:
        ConfigError: the file holds no certificate.
    """
    try:
        return x509.load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{certificate}: expected a certificate in PEM format: {getattr(error, 'strerror', None) or 'found none'}"
        ) from None


def issue(folder: Path, hosts: Sequence[str], days: int, *, renew: bool = False) -> list[Issued]:
    """Issue a certificate for each of ``hosts`` by the authority in ``folder``. The authority is created if there is none.

    Args:
        hosts: names or addresses of servers. Several names of one server are joined by commas; its folder has the first name.
        days: number of days for which the certificates are valid.
        renew: whether existing certificates are replaced, each with a new key.

    Raises:
        ConfigError: a host is not a valid name, a certificate exists already, or the authority cannot be used.
        WriteError: the system refuses to write.
    """
    servers = [tuple(name.strip() for name in host.split(",")) for host in hosts]
    for name in (name for names in servers for name in names):
        if not _is_host(name):
            raise ConfigError(f"--host takes a server's name or address (or several, joined by commas), got {name!r}")
    folders = [folder / names[0].replace(":", "-") for names in servers]  # Windows allows no colon of an IPv6 address in a folder's name
    if len(set(folders)) < len(folders):
        name = next(names[0] for place, names in enumerate(servers) if folders[place] in folders[:place])
        raise ConfigError(f"two values of --host have {name!r} as first name: give all names of one server in one --host, joined by commas")
    for server_folder in folders:
        if server_folder.exists() and not renew:
            raise ConfigError(f"{server_folder} exists already and is left as it is: give --renew to replace the certificate and its key")
    authority = _load_or_create_authority(folder)
    end = min(datetime.now(UTC) + timedelta(days=days), expiry_of(folder / AUTHORITY))  # no certificate outlives its authority
    for names, server_folder in zip(servers, folders, strict=True):
        _write_server_certificate(authority, names, server_folder, end)
    return [Issued(place, names, expiry_of(place / CERTIFICATE)) for names, place in zip(servers, folders, strict=True)]


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _load_or_create_authority(folder: Path) -> _Authority:
    """Return the authority in ``folder``; create it if there is none.

    Raises:
        ConfigError: one of the two files is missing, cannot be read or does not belong to the other, or others may read the key.
    """
    make_folder(folder, 0o700)
    certificate_path, key_path = folder / AUTHORITY, folder / AUTHORITY_KEY
    if certificate_path.exists() != key_path.exists():
        present, missing = (certificate_path, key_path) if certificate_path.exists() else (key_path, certificate_path)
        raise ConfigError(
            f"{folder} has {present.name} but not {missing.name}: restore {missing.name}, or give another folder for a new authority"
        )
    if not key_path.exists():
        new_key, new_certificate = _new_authority()
        _write_file(key_path, _private_pem(new_key), 0o600)
        _write_file(certificate_path, new_certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    require_own(key_path, "the authority's key", ConfigError, secret=True)
    try:
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except (ValueError, TypeError):
        certificate, key = None, None
    if certificate is None or not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise ConfigError(
            f"{certificate_path} and {key_path}: expected a certificate and its private key. Give another folder for a new authority"
        )
    return _Authority(certificate, key)


def _new_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new private key, and the certificate with which it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _distinguished_name(f"authority {secrets.token_hex(4)}")  # random, so that no two authorities have the same name
    certificate = (
        _certificate_builder(name, name, key.public_key(), datetime.now(UTC) + AUTHORITY_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # it may issue certificates, but no further authority
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


_LOOPBACK_NAMES = ("localhost", "127.0.0.1")
"""Names that every server has: a SuperLink starts a process of its own, which connects to it at 127.0.0.1."""


def _write_server_certificate(authority: _Authority, names: Sequence[str], folder: Path, end: datetime) -> None:
    """Write a server's new private key and its certificate into ``folder``.

    The ``authority`` signs the certificate, which is for the host ``names`` and this machine's, and valid until ``end``.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    alternatives = [_alternative_name(name) for name in dict.fromkeys((*names, *_LOOPBACK_NAMES))]  # each name once
    subject = _distinguished_name(f"server {names[0]}"[:64])  # X.509 allows 64 characters; clients check the alternatives
    certificate = (
        _certificate_builder(subject, authority.certificate.subject, key.public_key(), end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    make_folder(folder, 0o700)
    _write_file(folder / KEY, _private_pem(key), 0o600)
    _write_file(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _certificate_builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime) -> x509.CertificateBuilder:
    """Return an unsigned certificate of ``key``, valid until ``end``."""
    begin = datetime.now(UTC) - timedelta(hours=1)  # other machines' clocks may be behind, and would reject a certificate of the future
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return what a key may do: sign handshakes, and certificates if ``signs_certificates``."""
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _distinguished_name(common_name: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, _ORGANISATION), x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)]
    )


def _alternative_name(name: str) -> x509.GeneralName:
    """Return a server's name or address as a certificate holds it."""
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the private key in PEM format, not encrypted, because servers read it without anyone to type a password."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write_file(path: Path, content: bytes, mode: int) -> None:
    """Write ``content`` to ``path`` with the permissions ``mode``. A crash leaves the previous file or the new one."""
    with replace_atomically(path, mode) as temporary:
        temporary.write_bytes(content)


def _is_host(name: str) -> bool:
    """Tell whether ``name`` is an IP address or has the form of a host name."""
    try:
        ip_address(name)
        return True
    except ValueError:
        return all(_HOST_LABEL.fullmatch(label) for label in name.split("."))
