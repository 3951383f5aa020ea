"""The aggregator's list of nodes: who is in it counts, and nobody else can write to it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ldpfl import ConfigError
from ldpfl.transport.sums import read_nodes, signer_of
from ldpfl.transport.sums.node_keys import load_key, make_key, public_text

TEXTS = [public_text(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(3)]


def listed(folder: Path, text: str) -> Path:
    path = folder / "nodes.txt"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_list_holds_keys_and_names(tmp_path: Path) -> None:
    nodes = read_nodes(listed(tmp_path, f"# the clinics\n{TEXTS[0]} north\n\n{TEXTS[1]}\n"))
    assert list(nodes) == [signer_of(key) for key in nodes.values()]
    assert [public.public_bytes_raw() for public in nodes.values()] == [
        Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32).public_key().public_bytes_raw() for number in range(2)
    ]


def test_a_key_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    assert make_key(path) == public_text(load_key(path))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="exists already"):
        make_key(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lists no node"),
        (f"{TEXTS[0]}\nnorth {TEXTS[1]}\n", "line 2 .* does not begin with a node's public key"),
        (f"{TEXTS[0][:-2]}\n", "line 1 .* does not begin"),
        (f"{TEXTS[0]} a\n{TEXTS[0]} b\n", "line 2 .* repeats the key of an earlier line"),
        ("\N{GREEK SMALL LETTER ALPHA}\n", "line 1 .* does not begin"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        read_nodes(listed(tmp_path, text))


def test_a_list_that_others_can_change_is_refused(tmp_path: Path) -> None:
    path = listed(tmp_path, TEXTS[0])
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="list of nodes' keys"):
        read_nodes(path)
    with pytest.raises(ConfigError, match="list of nodes' keys"):
        read_nodes(tmp_path / "none.txt")


SMALL = [
    "01" + 31 * "00",
    "ec" + 30 * "ff" + "7f",
    32 * "00",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
]
"""Encodings of the points of small order, without those of the other sign."""


@pytest.mark.parametrize("raw", [*map(bytes.fromhex, SMALL), *(bytes.fromhex(text)[:31] + b"\x80" for text in (SMALL[0], SMALL[2]))])
def test_a_key_by_which_anybody_signs_anything_is_refused(raw: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not begin with a node's public key"):
        read_nodes(listed(tmp_path, f"{base64.b64encode(raw).decode()} north\n"))
