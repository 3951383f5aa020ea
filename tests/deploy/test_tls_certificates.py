"""An authority of one's own: its servers are trusted by their names, its files are private, and certificates can be renewed."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from test_site import shake_hands

from conftest import CommandLine
from ldpfl import ConfigError
from ldpfl.deploy.certificates import expiry_of, issue
from ldpfl.transport.shuffling.sealing import load_key, public_text

CA = Path("tls")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_servers_are_trusted_by_their_names_and_say_how_long(ldpfl: CommandLine) -> None:
    shown = ldpfl("deploy", "certificates", CA, "--host", "superlink.example", "--host", "relay.example,127.0.0.1", "--days", "90").out
    for name in ("relay.example", "127.0.0.1"):
        shake_hands(CA / "relay.example", CA / "ca.crt", name)
    for name in ("superlink.example", "localhost", "127.0.0.1"):  # a SuperLink's own process connects to it by the last one
        shake_hands(CA / "superlink.example", CA / "ca.crt", name)
    with pytest.raises(Exception, match=r"not valid for|mismatch"):
        shake_hands(CA / "relay.example", CA / "ca.crt", "superlink.example")
    days = (expiry_of(CA / "relay.example" / "server.crt") - datetime.now(UTC)) / timedelta(days=1)
    assert 89 < days <= 90
    assert timedelta(days=3649) < expiry_of(CA / "ca.crt") - datetime.now(UTC) <= timedelta(days=3650)
    assert {mode(path) for path in (CA / "ca.key", *CA.glob("*/server.key"))} == {0o600}
    assert {mode(path) for path in (CA / "ca.crt", *CA.glob("*/server.crt"))} == {0o644}
    assert f"{expiry_of(CA / 'relay.example' / 'server.crt'):%Y-%m-%d}" in shown
    assert "An organisation's own authority is better" in " ".join(shown.split())


def test_a_certificate_is_renewed_by_the_same_authority_and_only_on_request(ldpfl: CommandLine) -> None:
    ldpfl("deploy", "certificates", CA, "--host", "relay.example")
    authority, key = ((CA / name).read_bytes() for name in ("ca.crt", "relay.example/server.key"))
    assert "--renew" in ldpfl.refused("deploy", "certificates", CA, "--host", "relay.example")
    assert (CA / "relay.example" / "server.key").read_bytes() == key
    ldpfl("deploy", "certificates", CA, "--host", "relay.example", "--renew")
    assert (CA / "relay.example" / "server.key").read_bytes() != key
    assert (CA / "ca.crt").read_bytes() == authority
    shake_hands(CA / "relay.example", CA / "ca.crt", "relay.example")


def test_while_the_authority_is_replaced_nodes_trust_both(tmp_path: Path) -> None:
    """As the page says: the two certificates in one file, before the servers change theirs."""
    for name in ("old", "new"):
        issue(tmp_path / name, ["relay.example"], 30)
    both = tmp_path / "both.crt"
    both.write_bytes(b"".join((tmp_path / name / "ca.crt").read_bytes() for name in ("old", "new")))
    for name in ("old", "new"):
        shake_hands(tmp_path / name / "relay.example", both, "relay.example")


@pytest.mark.parametrize("host", ["", "a b", "https://relay.example", "relay..example", "../x", "relay.example,"])
def test_a_host_that_is_none_is_refused_and_nothing_is_written(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name or address"):
        issue(tmp_path / "tls", ["fine.example", host], 30)
    assert not (tmp_path / "tls").exists()


def test_an_authority_that_cannot_be_relied_on_is_refused(tmp_path: Path) -> None:
    issue(tmp_path, ["relay.example"], 30)
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        issue(tmp_path, ["other.example"], 30)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.crt but not ca\.key"):
        issue(tmp_path, ["other.example"], 30)


def test_the_public_half_of_a_key_is_shown_again(ldpfl: CommandLine) -> None:
    made = ldpfl("deploy", "key", "aggregator.key").out
    assert ldpfl("deploy", "key", "aggregator.key", "--show").out == made
    assert made.strip() == public_text(load_key(Path("aggregator.key")))
    assert "--show" in ldpfl.refused("deploy", "key", "aggregator.key")
    assert "cannot be read" in ldpfl.refused("deploy", "key", "missing.key", "--show")
