"""Clients that are late, repeat themselves, lie or have a wrong clock: their own reports may be lost, those of others count, each once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from faults_parts import WEIGHTS, Relay, World, everyone, expected, records_of, sealed
from flower_parts import start_vector
from numpy.typing import NDArray

from ldpfl.flower import Ask, OperatorNode
from ldpfl.privacy import budget_file
from ldpfl.relay import RelayRefused, RelayRoundOver

LIAR = 2
HALF = WEIGHTS // 2

pytestmark = pytest.mark.xdist_group("faults")  # whose processes fork from one that has PyTorch loaded


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Relay]:
    """One relay for all tests here, each with clients and runs of its own: none of them ends it."""
    with Relay(tmp_path_factory.mktemp("relay")) as running:
        yield running


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    return caplog


def assert_mean(weights: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(weights, reference, atol=1e-5, rtol=0)


class Twice(OperatorNode):
    """Sends its report again: under the same id, under another one, and sealed anew."""

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        run, number = ask.terms.run, ask.terms.round
        with self.connect() as relay:
            for _ in range(2):
                relay.upload(run, number, "upload-of-mine-0123456789", sealed, within_s=within_s)
            for again in (sealed, sealed[::-1]):
                with pytest.raises(RelayRefused, match="it may make one in each round"):
                    relay.upload(run, number, "another-upload-0123456789", again, within_s=within_s)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_client_that_uploads_twice_counts_once(relay: Relay, tmp_path: Path) -> None:
    world = World.new(tmp_path, relay)
    world.nodes = {0: Twice}
    last = world.run(2)
    assert_mean(last.state.weights, expected(everyone(5), everyone(5)))
    assert world.charges() == [2] * 5


@pytest.mark.slow
@pytest.mark.thorough
def test_a_client_that_is_late_or_sends_what_it_sealed_for_the_round_before(
    relay: Relay, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    earlier: dict[str, bytes] = {}
    refused: list[int] = []

    class Late(OperatorNode):
        """Comes when four others have closed the round, and tries to upload all the same, to the round before as well."""

        def admit(self, ask: Ask) -> float:
            for number in range(1, ask.terms.round + 1):
                with self.connect() as relay:
                    blob = bytes(relay.round_status(ask.terms.run, number).terms.upload_bytes)
                    with pytest.raises(RelayRoundOver):
                        relay.upload(ask.terms.run, number, f"late-upload-{number:012d}", blob, within_s=60.0)
                refused.append(number)
            return super().admit(ask)

    class Replays(OperatorNode):
        def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
            super().upload(ask, earlier.setdefault(ask.terms.run, sealed), within_s)

    world = World.new(tmp_path, relay, min_clients=4)
    world.nodes = {3: Replays, 4: Late}
    last = world.run(2)
    assert_mean(last.state.weights, expected(everyone(5, but=[4]), everyone(5, but=[3, 4])))
    assert [event.cohort for event in last.ledger.events] == [4, 3]  # an upload that nobody can read is not counted on
    assert world.charges() == [2, 2, 2, 2, 0]  # who is told beforehand that it is too late has sent nothing
    assert refused == [1, 1, 2]
    assert f"left out 1: {WEIGHTS} records: not sealed to this key for this round and plan, or altered" in log.text


class WithOtherRecords(OperatorNode):
    """Sends other records than its report has."""

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        return sealed(ask, self.changed(records_of(ask, payload)))

    def changed(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return records


class OtherKey(OperatorNode):
    def seal(self, ask: Ask, payload: bytes) -> bytes:
        return sealed(ask, records_of(ask, payload), X25519PrivateKey.generate().public_key().public_bytes_raw())


class Altered(OperatorNode):
    """Flips a bit in three of its records: in the key, the content and the tag."""

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        records = [bytearray(sealed(ask, record[None])) for record in records_of(ask, payload)]
        for number, place in ((1, 0), (5, 40), (WEIGHTS - 1, -1)):
            records[number][place] ^= 1
        return b"".join(records)


class OutsideTheModel(WithOtherRecords):
    def changed(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        for place, number in ((0, WEIGHTS), (3, 2**31), (4, 2**32 - 1)):
            records[place, :4] = np.frombuffer(number.to_bytes(4, "big"), dtype=np.uint8)
        return records


class Stuffed(WithOtherRecords):
    """Sends the first half of its records twice instead of the second half: more than that it has no room for."""

    def changed(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        records[HALF : 2 * HALF] = records[:HALF]
        return records


def arrived_but(*places: int) -> NDArray[np.bool_]:
    arrived = everyone(5)
    arrived[LIAR, list(places)] = False
    return arrived


def stuffed() -> NDArray[np.bool_]:
    arrived = arrived_but(*range(HALF, 2 * HALF))
    arrived[:, :HALF] = False  # of nobody: which of six reports of five clients is false cannot be told
    return arrived


CASES = {
    "another key": (OtherKey, everyone(5, but=[LIAR]), f"{WEIGHTS} records: not sealed to this key"),
    "altered ciphertext": (Altered, arrived_but(1, 5, WEIGHTS - 1), "3 records: not sealed to this key"),
    "ids outside the model": (OutsideTheModel, arrived_but(0, 3, 4), "3 records: a record id that this round's plan does not have"),
    "excess ids": (Stuffed, stuffed(), f"{6 * HALF} records: a record id that came more often than there are uploads"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough_except("altered ciphertext")
def test_false_records_are_left_out_and_all_others_count_by_weight(
    case: str, relay: Relay, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    liar, arrived, reason = CASES[case]
    world = World.new(tmp_path, relay)
    world.nodes = {LIAR: liar}
    last = world.run(1)
    assert_mean(last.state.weights, expected(arrived))
    counts = arrived.sum(axis=0)
    assert [event.cohort for event in last.ledger.events] == [counts[counts > 0].min()]
    silent = torch.from_numpy(counts == 0)
    assert torch.equal(last.state.weights[silent], start_vector()[silent])
    assert reason in log.text


@contextmanager
def clock_off_by(seconds: float) -> Iterator[None]:
    """Put this process's clocks wrong; how time passes stays right, as on a machine whose date is wrong."""
    right = time.time

    def wrong() -> float:
        return right() + seconds

    class Wrong(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Wrong:
            return cls.fromtimestamp(wrong(), tz)

    with mock.patch("time.time", wrong), mock.patch.object(budget_file, "datetime", Wrong):
        yield


def node_off_by(seconds: float) -> type[OperatorNode]:
    class Skewed(OperatorNode):
        """Does all that it does by a wrong clock."""

        def admit(self, ask: Ask) -> float:
            with clock_off_by(seconds):
                return super().admit(ask)

        def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
            with clock_off_by(seconds):
                super().upload(ask, sealed, within_s)

    return Skewed


@pytest.mark.slow
@pytest.mark.thorough
def test_clients_whose_clocks_are_a_minute_off_count_as_all_others(relay: Relay, tmp_path: Path) -> None:
    """By their clocks the round is over or has not begun; the last one comes too late, though its clock says otherwise."""
    world = World.new(tmp_path, relay, min_clients=4)
    world.nodes = {0: node_off_by(60.0), 1: node_off_by(-60.0), 4: node_off_by(-60.0)}
    last = world.run(2)
    assert_mean(last.state.weights, expected(*[everyone(5, but=[4])] * 2))
    assert [event.cohort for event in last.ledger.events] == [4, 4]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_relay_alone_says_when_a_round_is_over(relay: Relay, tmp_path: Path) -> None:
    """An aggregator whose clock is a minute ahead waits as long as the relay says, in seconds that pass."""
    world = World.new(tmp_path, relay)
    world.window_s = 1.5
    began = time.monotonic()
    with clock_off_by(60.0):
        last = world.run(1)
    assert 1.5 <= time.monotonic() - began < 50
    assert_mean(last.state.weights, expected(everyone(5)))
