"""Opening the records of a round: by processes or not, the same batches come, in order, and few are in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from ldpfl.transport.shuffling import opening
from ldpfl.transport.shuffling.opening import open_in_batches
from ldpfl.transport.shuffling.sealing import UNREADABLE, Binding, generate_key, seal

KEY, BINDING = generate_key(), Binding("run", 1, bytes(32))
SIZE = 16


def sealed(count: int) -> list[bytes]:
    rows = np.arange(count, dtype=np.uint64).repeat(2).view(np.uint8).reshape(count, SIZE)
    return [seal(row[None], KEY.public_key(), BINDING) for row in rows]


def plaintexts(records: list[bytes], workers: int) -> tuple[list[bytes], int]:
    expected = opening.MIN_RECORDS_FOR_WORKERS if workers > 1 else 0
    found = list(open_in_batches(records, SIZE, KEY, BINDING, expected=expected, workers=workers))
    refused = [entry for _, left_out in found for entry in left_out]
    assert {entry.reason for entry in refused} <= {UNREADABLE}
    return [batch.tobytes() for batch, _ in found], sum(entry.count for entry in refused)


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_give_the_batches_that_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_MAX_BATCH_RECORDS", 10)
    records = sealed(95)
    records[7] = bytes(64)
    alone = plaintexts(records, 1)
    assert plaintexts(records, 2) == alone
    assert len(alone[0]) == 10
    assert alone[1] == 1
    numbers = np.frombuffer(b"".join(alone[0]), dtype=np.uint64)[::2]
    assert numbers.tolist() == [number for number in range(95) if number != 7]


def test_no_record_gives_nothing() -> None:
    assert plaintexts([], 1) == ([], 0)


def test_records_are_asked_for_as_they_are_opened() -> None:
    size, asked = 1 << 20, 0
    record = seal(np.zeros((1, size), dtype=np.uint8), KEY.public_key(), BINDING)

    def records() -> Iterator[bytes]:
        nonlocal asked
        for _ in range(50):
            asked += 1
            yield bytes(record)

    tracemalloc.start()
    try:
        for taken, (batch, left_out) in enumerate(open_in_batches(records(), size, KEY, BINDING, expected=50, workers=8), start=1):
            assert len(batch) == 1
            assert not left_out
            assert asked == taken
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()
    assert asked == 50
