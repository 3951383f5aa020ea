"""Signatures of RFC 8032, section 7.1, fit; and none that differs in a bit. The tests of ldpfl compare with another implementation."""

from __future__ import annotations

import pytest

from ldpfl_verify.ed25519 import has_small_order, signature_fits

VECTORS = (
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
)
ORDER = 2**252 + 27742317777372353535851937790883648493


@pytest.mark.parametrize(("key", "message", "signature"), VECTORS)
def test_a_signature_of_the_standard_fits_and_no_changed_one_does(key: str, message: str, signature: str) -> None:
    parts = [bytes.fromhex(part) for part in (key, message, signature)]
    assert signature_fits(parts[0], parts[1], parts[2])
    assert not signature_fits(parts[0], parts[1] + b"\0", parts[2])
    for place in range(0, 64, 7):
        changed = bytearray(parts[2])
        changed[place] ^= 1
        assert not signature_fits(parts[0], parts[1], bytes(changed))


def test_a_number_that_is_not_reduced_does_not_fit() -> None:
    """Otherwise anybody could make a second signature out of one."""
    key, message, signature = (bytes.fromhex(part) for part in VECTORS[0])
    larger = int.from_bytes(signature[32:], "little") + ORDER
    assert not signature_fits(key, message, signature[:32] + larger.to_bytes(32, "little"))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_or_a_signature_of_another_length_does_not_fit(length: int) -> None:
    key, message, signature = (bytes.fromhex(part) for part in VECTORS[0])
    assert not signature_fits(key[:1] * length, message, signature)
    assert not signature_fits(key, message, signature[:1] * length)


@pytest.mark.parametrize("key", [b"\x01" + bytes(31), bytes(32), b"\xec" + b"\xff" * 30 + b"\x7f", b"\xed" + b"\xff" * 30 + b"\x7f"])
def test_keys_of_small_order_are_known(key: bytes) -> None:
    assert has_small_order(key)
    assert not has_small_order(bytes.fromhex(VECTORS[0][0]))
