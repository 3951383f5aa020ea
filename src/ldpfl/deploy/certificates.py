"""An authority of one's own, and certificates of it for SuperLink and relay, where no organisation's authority is at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import trustme
from cryptography import x509

from ldpfl.errors import ConfigError
from ldpfl.file_owners import require_own
from ldpfl.files import make_folder, replace_atomically

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_ORGANISATION = "ldpfl deployment"

AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "server.crt", "server.key"


@dataclass(frozen=True)
class Issued:
    """A certificate that was written.

    Attributes:
        names: under which the server is reached.
        until: end of its validity.
    """

    folder: Path
    names: tuple[str, ...]
    until: datetime


def end_of(certificate: Path) -> datetime:
    """Return when the first certificate in a file of PEM ends.

    Raises:
        ConfigError: there is none.
    """
    try:
        return x509.load_pem_x509_certificates(certificate.read_bytes())[0].not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate} holds no certificate in PEM: {getattr(error, 'strerror', None) or 'nothing was found'}") from None


def issue(folder: Path, hosts: Sequence[str], days: int, *, renew: bool = False) -> list[Issued]:
    """Write a certificate for each of ``hosts``, by the authority in ``folder``, which is made if there is none.

    ``hosts`` are names or addresses; several of one server are joined by commas, and its folder is called like the first of them.

    Args:
        days: for which the certificates are valid.
        renew: whether certificates that are there are replaced, each with a new key.

    Raises:
        ConfigError: a host is no name, a certificate is there, or the authority cannot be used.
        WriteError: the system refuses to write.
    """
    servers = [tuple(name.strip() for name in host.split(",")) for host in hosts]
    for name in (name for names in servers for name in names):
        if not _is_host(name):
            raise ConfigError(f"--host takes a name or an address, or several of one server joined by commas, not {name!r}")
    places = [folder / names[0].replace(":", "-") for names in servers]
    if len(set(places)) < len(places):
        raise ConfigError("two of the hosts begin with the same name: join the names of one server by commas")
    for place in places:
        if place.exists() and not renew:
            raise ConfigError(f"{place} is there and is left as it is: give --renew to replace the certificate and its key")
    authority = _authority(folder)
    end = min(datetime.now(UTC) + timedelta(days=days), end_of(folder / AUTHORITY))
    for names, place in zip(servers, places, strict=True):
        _issue(authority, names, place, end)
    return [Issued(place, names, end_of(place / CERTIFICATE)) for names, place in zip(servers, places, strict=True)]


def _authority(folder: Path) -> trustme.CA:
    """Return the authority in ``folder``; make one if there is none."""
    make_folder(folder, 0o700)
    certificate, key = folder / AUTHORITY, folder / AUTHORITY_KEY
    if certificate.exists() != key.exists():
        here, missing = (certificate, key) if certificate.exists() else (key, certificate)
        raise ConfigError(f"{folder} has {here.name} and no {missing.name}: put it back, or give another folder for a new authority")
    if not key.exists():
        made = trustme.CA(organization_name=_ORGANISATION)
        _write(key, made.private_key_pem.bytes(), 0o600)
        _write(certificate, made.cert_pem.bytes(), 0o644)
        return made
    require_own(key, "the authority's key", ConfigError, secret=True)
    try:
        return trustme.CA.from_pem(certificate.read_bytes(), key.read_bytes())
    except (ValueError, TypeError):
        raise ConfigError(f"{certificate} and {key} are no authority that this command has made") from None


def _issue(authority: trustme.CA, names: Sequence[str], place: Path, end: datetime) -> None:
    """Write a server's private key, and its certificate after it: servers read both when they start."""
    begin = datetime.now(UTC) - timedelta(hours=1)  # clocks of other machines may be behind
    issued = authority.issue_cert(*names, organization_name=_ORGANISATION, not_before=begin, not_after=end)
    make_folder(place, 0o700)
    _write(place / KEY, issued.private_key_pem.bytes(), 0o600)
    _write(place / CERTIFICATE, b"".join(pem.bytes() for pem in issued.cert_chain_pems), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    with replace_atomically(path, mode) as temporary:
        temporary.write_bytes(content)


def _is_host(name: str) -> bool:
    try:
        ip_address(name)
        return True
    except ValueError:
        return all(_LABEL.fullmatch(label) for label in name.split("."))
