"""Sealed records: opened by their key for their round alone, refused one by one, in an order that says nothing."""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import replace
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy import stats

from grids import each
from ldpfl import ConfigError, LayerRanges, ProtocolError, SeededStreams
from ldpfl.mechanisms import create
from ldpfl.transport.shuffling import RecordPlan, ReportPool
from ldpfl.transport.shuffling.sealing import (
    OVERHEAD,
    Binding,
    generate_key,
    load_key,
    open_records,
    public_text,
    read_public,
    seal,
)
from ldpfl.util.key_files import save_key

KEY = generate_key()
BINDING = Binding("mnist-1", 3, bytes(range(32)))
RECORD = 16 + OVERHEAD


def texts(count: int, size: int = 16) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, size), dtype=np.uint8)


def rows(plaintexts: NDArray[np.uint8]) -> Counter[bytes]:
    return Counter(row.tobytes() for row in plaintexts)


def refused(blob: bytes, key: X25519PrivateKey = KEY, binding: Binding = BINDING) -> tuple[int, dict[str, int]]:
    """Return how many records were opened, and how many refused, by reason."""
    opened, refusals = open_records(blob, 16, key, binding)
    return len(opened), {entry.reason: entry.count for entry in refusals}


@pytest.mark.parametrize(("count", "size"), [(1, 16), (40, 16), (3, 1), (2, 5000), (0, 16)])
def test_what_was_sealed_is_opened(count: int, size: int) -> None:
    blob = seal(texts(count, size), KEY.public_key(), BINDING)
    assert len(blob) == count * (size + OVERHEAD)
    opened, refusals = open_records(blob, size, KEY, BINDING)
    assert opened.shape == (count, size)
    assert rows(opened) == rows(texts(count, size))
    assert refusals == ()


def test_a_record_of_one_weight_takes_64_bytes() -> None:
    assert RECORD == 64


def test_equal_records_do_not_look_equal() -> None:
    blob = seal(np.zeros((20, 16), dtype=np.uint8), KEY.public_key(), BINDING)
    records = [blob[start : start + RECORD] for start in range(0, len(blob), RECORD)]
    for part in (slice(0, 32), slice(32, 48), slice(48, 64)):  # fresh key, content, tag
        assert len({record[part] for record in records}) == 20


@pytest.mark.slow
def test_the_order_of_records_is_drawn_anew_and_uniform() -> None:
    """Chi-square over the 6 orders of 3 records in 400 uploads, secure randomness: a false alarm once in 10^9 runs."""
    plaintexts = texts(3)
    seen = Counter(open_records(seal(plaintexts, KEY.public_key(), BINDING), 16, KEY, BINDING)[0].tobytes() for _ in range(400))
    assert len(seen) == factorial(3)
    assert stats.chisquare(list(seen.values())).pvalue > 1e-9


def test_sealing_leaves_the_records_alone() -> None:
    plaintexts = texts(30)
    seal(plaintexts, KEY.public_key(), BINDING)
    np.testing.assert_array_equal(plaintexts, texts(30))


@pytest.mark.parametrize(
    "other",
    [replace(BINDING, run="mnist-2"), replace(BINDING, round=4), replace(BINDING, fingerprint=bytes(32)), replace(BINDING, run="")],
)
def test_records_of_another_run_round_or_plan_are_refused(other: Binding) -> None:
    ours, theirs = seal(texts(3), KEY.public_key(), BINDING), seal(texts(2), KEY.public_key(), other)
    opened, reasons = refused(ours + theirs)
    assert opened == 3
    [(reason, count)] = reasons.items()
    assert "for this round and plan" in reason
    assert count == 2


def test_bindings_that_share_their_bytes_differ() -> None:
    left = Binding("run", 1, bytes(31) + b"a")
    assert left.info != Binding("arun", 1, bytes(32)).info
    assert len({Binding(run, number, bytes(32)).info for run in ("", "1", "11") for number in (1, 11, 111)}) == 9


def test_records_sealed_to_another_key_are_refused() -> None:
    other = generate_key()
    blob = seal(texts(3), KEY.public_key(), BINDING) + seal(texts(2), other.public_key(), BINDING)
    assert refused(blob)[0] == 3
    assert refused(blob, other)[0] == 2
    assert list(refused(blob)[1].values()) == [2]


@each("place", range(RECORD))
def test_every_byte_of_a_record_is_protected(place: int) -> None:
    blob = bytearray(seal(texts(3), KEY.public_key(), BINDING))
    blob[RECORD + place] ^= 1
    opened, reasons = refused(bytes(blob))
    assert (opened, list(reasons.values())) == (2, [1])


def test_records_of_low_order_keys_are_refused() -> None:
    assert refused(bytes(RECORD) + seal(texts(1), KEY.public_key(), BINDING)) == (1, refused(bytes(RECORD))[1])


@pytest.mark.parametrize("missing", [1, 16, 48, 63])
def test_a_piece_at_the_end_is_refused_and_the_rest_kept(missing: int) -> None:
    opened, reasons = refused(seal(texts(4), KEY.public_key(), BINDING)[:-missing])
    assert opened == 3
    assert list(reasons) == ["cut off: shorter than a record"]


@settings(max_examples=50)
@given(st.binary(max_size=5 * RECORD))
def test_noise_is_refused(blob: bytes) -> None:
    opened, reasons = refused(blob)
    assert opened == 0
    assert sum(reasons.values()) == -(-len(blob) // RECORD)


def test_a_record_holds_something() -> None:
    with pytest.raises(ProtocolError, match="plaintext_bytes must be at least 1"):
        open_records(b"", 0, KEY, BINDING)


@pytest.mark.parametrize(
    ("number", "fingerprint"), [(0, bytes(32)), (-1, bytes(32)), (1 << 64, bytes(32)), (True, bytes(32)), (1.0, bytes(32))]
)
def test_rounds_count_from_one(number: Any, fingerprint: bytes) -> None:
    with pytest.raises(ConfigError, match="round must be"):
        Binding("run", number, fingerprint)


def test_a_fingerprint_has_32_bytes() -> None:
    with pytest.raises(ConfigError, match="31 bytes, expected 32"):
        Binding("run", 1, bytes(31))


def test_a_round_of_five_clients_through_a_mixing_relay() -> None:
    """Split, seal, mix, open, join: the same mean as from the reports, with one upload altered on the way."""
    mechanism = create("duchi", epsilon=1.0)
    ranges = LayerRanges(torch.tensor([0.0, 0.1]), torch.tensor([0.5, 0.5]), (11, 6))
    plan = RecordPlan(mechanism, ranges)
    binding = Binding("run", 1, plan.fingerprint)
    values = torch.linspace(-0.5, 0.5, 5 * 17).reshape(5, 17)
    reports = mechanism.encode(values, ranges, SeededStreams.for_clients(0, 1, range(5)))
    uploads = [seal(plan.split(payload), read_public(public_text(KEY)), binding) for payload in reports.payloads()]
    size = plan.plaintext_bytes + OVERHEAD
    assert {len(upload) for upload in uploads} == {17 * size}
    blob = b"".join(uploads)
    mixed = np.random.default_rng(0).permutation(np.frombuffer(blob, dtype=np.uint8).reshape(-1, size)).tobytes()
    opened, refusals = open_records(mixed, plan.plaintext_bytes, KEY, binding)
    joined = plan.join(opened, len(mixed) // size // plan.records)
    assert (refusals, joined.refused) == ((), ())
    assert isinstance(joined.pool, ReportPool)
    assert torch.equal(joined.pool.aggregate(mechanism, ranges).mean, mechanism.aggregate([reports], ranges))

    opened, refusals = open_records(bytes([mixed[0] ^ 1]) + mixed[1:], plan.plaintext_bytes, KEY, binding)
    assert [entry.count for entry in refusals] == [1]
    assert plan.join(opened, 5).pool is not None


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_a_private_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.pem"
    save_key(KEY, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_text(load_key(path)) == public_text(KEY)
    assert refused(seal(texts(2), KEY.public_key(), BINDING), load_key(path)) == (2, {})


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "aggregator.pem"
    save_key(KEY, path)
    with pytest.raises(ConfigError, match="exists already"):
        save_key(generate_key(), path)
    assert public_text(load_key(path)) == public_text(KEY)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "aggregator.pem"
    save_key(KEY, path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="can be read by other users"):
        load_key(path)


def test_files_that_hold_no_such_key_are_refused(tmp_path: Path) -> None:
    other = Ed25519PrivateKey.generate()
    pem = other.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    locked = KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"pw"))
    for number, content in enumerate((b"", b"no key", pem, locked)):
        path = tmp_path / str(number)
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="expected an X25519 private key in PEM format"):
            load_key(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key(tmp_path / "none")


def test_public_keys_travel_as_one_line() -> None:
    text = public_text(KEY)
    assert len(text) == 44
    assert public_text(KEY.public_key()) == text
    assert public_text(read_public(f" {text}\n")) == text


@pytest.mark.parametrize("text", ["", "short", "?" * 44, "A" * 40, "Ä" * 44])
def test_text_that_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="public key must be 32 bytes in base64"):
        read_public(text)


def test_nothing_is_sealed_to_a_key_that_anyone_could_open() -> None:
    with pytest.raises(ConfigError, match="low order"):
        seal(texts(1), X25519PublicKey.from_public_bytes(bytes(32)), BINDING)
