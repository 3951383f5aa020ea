"""Envelopes of second shares: a seed sealed to the aggregator and signed by the node, which the relay passes on and cannot open.

An envelope consists of the signer's name (8 bytes), the signature (Ed25519, 64) and the sealed seed (HPKE, 80). Seal and signature are
bound to one round of one run, to what all clients were asked there, and to the shape of the sum: an envelope is valid nowhere else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.transport.sums.masks import SEED_BYTES, Bits
from ldpfl.util import key_files
from ldpfl.util.number_format import counted

_SIGNER_BYTES, _SIGNATURE_BYTES = 8, 64
_MAX_NAMES = 8
ENVELOPE_BYTES = _SIGNER_BYTES + _SIGNATURE_BYTES + SEED_BYTES + key_files.SEAL_BYTES


@dataclass(frozen=True)
class SumBinding:
    """The sum that an envelope was made for. It cannot be opened for another sum, and its signature is not valid there.

    Attributes:
        run: name of the run.
        round: number of the round, from 1 to 2^64 - 1.
        agreement: SHA-256 of all that the clients were asked in this round. It is the same for all clients.
        dimension: how many numbers a share has.
        bits: width of each number.
    """

    run: str
    round: int
    agreement: bytes
    dimension: int
    bits: Bits

    def __post_init__(self) -> None:
        if not (1 <= self.round < 1 << 64 and 1 <= self.dimension < 1 << 64 and len(self.agreement) == 32):
            raise ConfigError(
                f"a sum has round {self.round}, dimension {self.dimension} and an agreement (SHA-256 of what clients were asked) of "
                f"{len(self.agreement)} bytes: expected round and dimension from 1 to 2^64 - 1, and 32 bytes"
            )

    def info(self, purpose: bytes) -> bytes:
        """Return the binding as bytes for one ``purpose``. The run comes last, so that different bindings have different bytes."""
        numbers = b"".join(number.to_bytes(8, "big") for number in (self.round, self.dimension, self.bits))
        return b"ldpfl sum 1 " + purpose + b"\0" + numbers + self.agreement + self.run.encode()


def new_seed() -> bytes:
    """Return a fresh second share from the operating system's secure source."""
    return os.urandom(SEED_BYTES)


def signer_of(key: Ed25519PublicKey) -> bytes:
    """Return the name of a node's key in envelopes: the first 8 bytes of its SHA-256."""
    return hashlib.sha256(key.public_bytes_raw()).digest()[:_SIGNER_BYTES]


def seal_seed(seed: bytes, aggregator: X25519PublicKey, node: Ed25519PrivateKey, binding: SumBinding) -> bytes:
    """Return the envelope of ``seed``: only ``aggregator`` can open it, and ``node`` vouches for it.

    Raises:
        ConfigError: no secret can be shared with the aggregator's key, because it has small order.
    """
    sealed = key_files.sealed(seed, aggregator, binding.info(b"seal"))
    return signer_of(node.public_key()) + node.sign(binding.info(b"sign") + sealed) + sealed


def check_signed(envelope: bytes, node: Ed25519PublicKey, binding: SumBinding) -> None:
    """Raise unless ``envelope`` names ``node`` and is signed by it for ``binding``. Only the aggregator can check that its seed opens.

    Raises:
        ProtocolError: the envelope names another node, is not signed by ``node``, or has the wrong length.
    """
    signer, signature, sealed = _split_envelope(envelope)
    if signer != signer_of(node):
        raise ProtocolError(f"the envelope names node {signer.hex()}, and this client signs as {signer_of(node).hex()}")
    if not _is_signed(node, signature, sealed, binding):
        raise ProtocolError(f"the envelope is not signed for this round by node {signer.hex()}, which it names")


def open_seeds(
    envelopes: Iterable[bytes], aggregator: X25519PrivateKey, nodes: Mapping[bytes, Ed25519PublicKey], binding: SumBinding, min_nodes: int
) -> list[bytes]:
    """Return the seeds of all ``envelopes``, which must come from at least ``min_nodes`` different known nodes.

    If one envelope is bad, no seed is returned, because a sum with one mask left in it would be random. A minimum is needed because a sum
    over few nodes would reveal what one node sent, if an attacker chose or invented the other nodes.

    Args:
        nodes: public keys of the nodes that may take part, by :func:`signer_of`.

    Raises:
        ProtocolError: an envelope comes from an unknown node, is a node's second one, was made for another round or shape, or has the wrong
            length; or there are too few. The message names the nodes whose envelopes cannot be opened.
    """
    seeds, faults = dict[bytes, bytes](), _Faults()
    for envelope in envelopes:
        signer, signature, sealed = _split_envelope(envelope)
        if signer not in nodes:
            faults.unknown.append(signer)
        elif not _is_signed(nodes[signer], signature, sealed, binding):
            faults.unsigned.append(signer)
        elif signer in seeds:
            faults.repeated.append(signer)
        else:
            try:
                seeds[signer] = key_files.SUITE.decrypt(sealed, aggregator, binding.info(b"seal"))
            except InvalidTag:
                seeds[signer] = b""  # so that a second envelope of this node is noticed; with a fault, no seed is returned
                faults.unopened.append(signer)
    if faults_text := faults.describe(len(seeds)):
        raise ProtocolError(f"the sum is not opened: {faults_text}")
    if len(seeds) < min_nodes:
        raise ProtocolError(f"the sum is not opened: it adds up {counted(len(seeds), 'report')}, expected at least {min_nodes}")
    return list(seeds.values())


@dataclass(frozen=True)
class _Faults:
    """Names of the nodes whose envelopes are not opened, by the reason."""

    unknown: list[bytes] = field(default_factory=list)
    unsigned: list[bytes] = field(default_factory=list)
    repeated: list[bytes] = field(default_factory=list)
    unopened: list[bytes] = field(default_factory=list)

    def describe(self, signed: int) -> str:
        """Return which envelopes cannot be opened, and what to do; "" if all can. ``signed`` counts the nodes with a valid signature."""
        reasons = []
        if self.unknown:
            advice = "add their lines to LDPFL_NODE_KEYS, as ldpfl deploy node-key FILE --show prints them on the nodes"
            reasons.append(f"nodes that are not known: {_node_names(self.unknown)} ({advice})")
        if self.unsigned:
            blame = (
                "an honest relay refuses this: the relay has altered the envelope, or checks it by another key than LDPFL_NODE_KEYS lists"
            )
            reasons.append(f"envelopes not signed for this round by the node that is named: {_node_names(self.unsigned)} ({blame})")
        if self.repeated:
            reasons.append(f"nodes in the sum more than once: {_node_names(self.repeated)} (an honest relay counts each node once)")
        if self.unopened:
            revoke = "these nodes signed them: revoke their tokens, whose names ldpfl relay token list shows"
            wrong_key = "no envelope can be opened: is LDPFL_AGGREGATOR_KEY the key that the round was begun with?"
            # If none of several envelopes opens, the aggregator's key is probably wrong. If there is only one, its node may be at fault.
            advice = wrong_key if signed > 1 and len(self.unopened) == signed else revoke
            reasons.append(f"envelopes not sealed to this key for this round: {_node_names(self.unopened)} ({advice})")
        return "; ".join(reasons)


def _node_names(nodes: Collection[bytes]) -> str:
    """Return the first few nodes' names, as text."""
    first = ", ".join(node.hex() for node in list(nodes)[:_MAX_NAMES])
    return first if len(nodes) <= _MAX_NAMES else f"{first} and {len(nodes) - _MAX_NAMES} more"


def _is_signed(node: Ed25519PublicKey, signature: bytes, sealed: bytes, binding: SumBinding) -> bool:
    """Return whether ``node`` has made the ``signature`` for this binding and sealed seed."""
    try:
        node.verify(signature, binding.info(b"sign") + sealed)
    except InvalidSignature:
        return False
    return True


def _split_envelope(envelope: bytes) -> tuple[bytes, bytes, bytes]:
    """Return an envelope's signer, signature and sealed seed. Raise a :class:`ProtocolError` if its length is wrong."""
    if len(envelope) != ENVELOPE_BYTES:
        raise ProtocolError(f"an envelope has {len(envelope)} bytes, expected {ENVELOPE_BYTES}")
    signature_at, sealed_at = _SIGNER_BYTES, _SIGNER_BYTES + _SIGNATURE_BYTES
    return envelope[:signature_at], envelope[signature_at:sealed_at], envelope[sealed_at:]
