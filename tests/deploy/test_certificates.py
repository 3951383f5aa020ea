"""Certificates are accepted by who trusts the authority and by nobody else; keys are in Flower's format and their owner's alone."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ldpfl.deploy.certificates import VALID_FOR, Authority, node_key


@pytest.fixture
def issued(tmp_path: Path) -> Path:
    """A folder with an authority's and a server's certificate."""
    authority = Authority()
    authority.save(tmp_path / "ca.crt")
    authority.issue("relay", tmp_path / "server.crt", tmp_path / "server.key")
    return tmp_path


def shake_hands(folder: Path, trusted: Path, name: str) -> None:
    """Do a TLS handshake in memory: a server with the certificate in ``folder``, a client that trusts ``trusted`` and calls ``name``."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.crt", folder / "server.key")
    calling = ssl.create_default_context(cafile=str(trusted))
    calling.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        calling.wrap_bio(to_client, to_server, server_hostname=name),
        serving.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = [False, False]
    for _ in range(10):
        for place, end in enumerate(ends):
            try:
                end.do_handshake()
                done[place] = True
            except ssl.SSLWantReadError:
                continue
    assert all(done)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_who_trusts_the_authority_accepts_the_server(issued: Path, name: str) -> None:
    shake_hands(issued, issued / "ca.crt", name)


def test_no_other_name_is_accepted(issued: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for|mismatch"):
        shake_hands(issued, issued / "ca.crt", "relay.example")


def test_another_authority_is_not_accepted(issued: Path) -> None:
    Authority().save(issued / "other.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(issued, issued / "other.crt", "localhost")


def test_a_server_cannot_issue_certificates_and_both_end_soon(issued: Path) -> None:
    for name, is_authority in (("ca.crt", True), ("server.crt", False)):
        certificate = x509.load_pem_x509_certificate((issued / name).read_bytes())
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is is_authority
        assert certificate.not_valid_after_utc <= datetime.now(UTC) + VALID_FOR
        assert certificate.not_valid_after_utc > datetime.now(UTC) + VALID_FOR - timedelta(minutes=5)


def test_private_keys_are_for_their_owner_and_are_not_overwritten(issued: Path) -> None:
    public = node_key(issued / "node.key")
    assert public == issued / "node.key.pub"
    for key in (issued / "server.key", issued / "node.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = (issued / "node.key").read_bytes()
    with pytest.raises(FileExistsError):
        node_key(issued / "node.key")
    assert (issued / "node.key").read_bytes() == before


def test_a_node_has_a_key_of_the_curve_and_format_that_flower_wants(tmp_path: Path) -> None:
    public = serialization.load_ssh_public_key(node_key(tmp_path / "node.key").read_bytes())
    private = serialization.load_ssh_private_key((tmp_path / "node.key").read_bytes(), password=None)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public.curve, ec.SECP384R1)
    assert private.public_key() == public
