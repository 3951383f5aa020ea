"""Envelopes of seeds: they open for one round, one shape and one key, each node counts once, and too few are not opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, strategies as st

from ldpfl import ConfigError, ProtocolError
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, check_signed, new_seed, open_seeds, seal_seed, signer_of

AGGREGATOR = X25519PrivateKey.from_private_bytes(bytes(range(32)))
NODES = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 5)]
KNOWN = {signer_of(node.public_key()): node.public_key() for node in NODES}
NAMES = [signer_of(node.public_key()).hex() for node in NODES]
BINDING = SumBinding("run", 3, bytes(32), 10, 32)
SEEDS = [bytes([number]) * 32 for number in range(4)]


def envelopes(binding: SumBinding = BINDING) -> list[bytes]:
    return [seal_seed(seed, AGGREGATOR.public_key(), node, binding) for seed, node in zip(SEEDS, NODES, strict=True)]


def opened(
    some: list[bytes], *, known: dict[bytes, Ed25519PublicKey] = KNOWN, binding: SumBinding = BINDING, least: int = 2
) -> list[bytes]:
    return open_seeds(some, AGGREGATOR, known, binding, least)


def test_seeds_come_out_as_they_went_in() -> None:
    sent = envelopes()
    assert opened(sent) == SEEDS
    assert {len(envelope) for envelope in sent} == {ENVELOPE_BYTES} == {152}
    assert opened(sent[1:3]) == SEEDS[1:3]


OTHERS = (
    replace(BINDING, run="runs"),
    replace(BINDING, round=4),
    replace(BINDING, agreement=bytes(31) + b"\1"),
    replace(BINDING, dimension=11),
    replace(BINDING, bits=64),
)


@pytest.mark.parametrize("other", OTHERS)
def test_an_envelope_is_for_one_round_and_shape(other: SumBinding) -> None:
    with pytest.raises(ProtocolError, match="not signed for this round by the node that is named"):
        opened(envelopes(other))
    with pytest.raises(ProtocolError, match="not signed for this round"):
        check_signed(envelopes(other)[0], NODES[0].public_key(), BINDING)


def test_a_relay_that_invents_or_repeats_uploads_gets_no_sum() -> None:
    sent, stranger = envelopes(), Ed25519PrivateKey.generate()
    invented = seal_seed(new_seed(), AGGREGATOR.public_key(), stranger, BINDING)
    for some, why in (
        ([sent[0], invented], f"not known: {signer_of(stranger.public_key()).hex()} .add their lines to LDPFL_NODE_KEYS"),
        ([sent[0], sent[0]], f"in the sum more than once: {NAMES[0]}"),
        ([sent[0], seal_seed(new_seed(), AGGREGATOR.public_key(), NODES[0], BINDING)], "in the sum more than once"),
        ([sent[0]], "adds up 1 report, expected at least 2"),
        ([sent[0], sent[1][:72] + sent[2][72:]], f"not signed for this round by the node that is named: {NAMES[1]}"),
        ([sent[0], sent[2][:8] + sent[1][8:]], f"not signed for this round by the node that is named: {NAMES[2]}"),
        ([sent[0], sent[1][:-1]], "an envelope has 151 bytes, expected 152"),
    ):
        with pytest.raises(ProtocolError, match=why):
            opened(some)


def test_another_aggregator_opens_nothing() -> None:
    with pytest.raises(ProtocolError, match="no envelope can be opened: is LDPFL_AGGREGATOR_KEY the key that the round was begun with"):
        open_seeds(envelopes(), X25519PrivateKey.generate(), KNOWN, BINDING, 2)


def unopenable(node: Ed25519PrivateKey) -> bytes:
    """Return an envelope that a node has signed, of a seed that was sealed to somebody else."""
    return seal_seed(new_seed(), X25519PrivateKey.generate().public_key(), node, BINDING)


def test_all_whose_envelopes_do_not_open_are_named_and_nobody_else() -> None:
    """A relay that checks signatures takes these: only the aggregator can tell, and their nodes cannot deny them."""
    sent, stranger = envelopes(), Ed25519PrivateKey.generate()
    check_signed(unopenable(NODES[1]), NODES[1].public_key(), BINDING)
    with pytest.raises(ProtocolError) as caught:
        opened([sent[0], unopenable(NODES[1]), sent[2], unopenable(NODES[3]), unopenable(stranger)])
    text = str(caught.value)
    assert f"not sealed to this key for this round: {NAMES[1]}, {NAMES[3]} (these nodes signed them: revoke their tokens" in text
    assert f"not known: {signer_of(stranger.public_key()).hex()} (add" in text
    assert not any(name in text for name in (NAMES[0], NAMES[2]))


def test_a_message_names_no_more_nodes_than_one_reads() -> None:
    strangers = [Ed25519PrivateKey.generate() for _ in range(20)]
    with pytest.raises(ProtocolError, match=r"not known: ([0-9a-f]{16}, ){7}[0-9a-f]{16} and 12 more") as caught:
        opened([unopenable(stranger) for stranger in strangers])
    assert len(str(caught.value)) < 500


def test_whoever_checks_a_signature_learns_who_is_named_wrongly() -> None:
    sent = envelopes()
    check_signed(sent[0], NODES[0].public_key(), BINDING)
    with pytest.raises(ProtocolError, match=f"names node {NAMES[0]}, and this client signs as {NAMES[1]}"):
        check_signed(sent[0], NODES[1].public_key(), BINDING)
    for forged in (sent[1][:8] + sent[0][8:], sent[1][:72] + sent[0][72:]):
        with pytest.raises(ProtocolError, match=f"not signed for this round by node {NAMES[1]}, which it names"):
            check_signed(forged, NODES[1].public_key(), BINDING)


@given(st.integers(0, ENVELOPE_BYTES - 1), st.integers(1, 255))
def test_no_altered_envelope_is_opened(place: int, change: int) -> None:
    sent = envelopes()
    altered = bytearray(sent[1])
    altered[place] ^= change
    with pytest.raises(ProtocolError, match="the sum is not opened"):
        opened([sent[0], bytes(altered)])


def test_seeds_differ_and_so_do_envelopes_of_one() -> None:
    assert new_seed() != new_seed()
    assert not set(envelopes()) & set(envelopes())


def test_what_cannot_be_bound_or_sealed_is_refused() -> None:
    with pytest.raises(ConfigError, match="of 5 bytes: expected"):
        SumBinding("run", 1, b"short", 10, 32)
    with pytest.raises(ConfigError, match="a point of low order"):
        seal_seed(new_seed(), X25519PublicKey.from_public_bytes(bytes(32)), NODES[0], BINDING)
