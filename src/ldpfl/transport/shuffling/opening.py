"""Open many sealed records, with several processes if there are enough records."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from loky import ProcessPoolExecutor
from loky.backend import get_context
from numpy.typing import NDArray

from ldpfl.transport.shuffling.partial import RefusedRecords
from ldpfl.transport.shuffling.sealing import Binding, open_records

Opened = tuple[NDArray[np.uint8], tuple[RefusedRecords, ...]]

MIN_RECORDS_FOR_WORKERS = 50_000
"""Smallest number of records for worker processes: one core opens a record in 35 microseconds, and processes take a second to start."""
_MAX_RECORD_BYTES = 1 << 14
"""Largest record, in bytes, for worker processes. Sending longer ones to a process and back takes longer than opening them."""

_MAX_BATCH_RECORDS = 8192
"""Largest number of records in a batch."""
_BATCH_BYTES = 1 << 20
"""A batch that has reached this number of bytes gets no more records."""
_BATCHES_AHEAD = 2
"""Number of waiting batches for each worker process."""


def open_in_batches(
    records: Iterable[bytes], plaintext_bytes: int, private_key: X25519PrivateKey, binding: Binding, *, expected: int, workers: int
) -> Iterator[Opened]:
    """Open ``records`` in batches, in their order. Yield the result of :func:`~ldpfl.transport.shuffling.sealing.open_records` for each.

    The batches do not depend on ``workers``, and few are in memory at a time. Worker processes get the private key. Threads would not be
    faster, because opening a record holds Python's lock.

    Args:
        plaintext_bytes: length of each record after it is opened.
        expected: approximate number of records.
        workers: number of worker processes, used if there are enough records.
    """
    batches = _join_to_batches(records)
    if workers == 1 or expected < MIN_RECORDS_FOR_WORKERS or plaintext_bytes > _MAX_RECORD_BYTES:
        yield from (open_records(batch, plaintext_bytes, private_key, binding) for batch in batches)
        return
    context = get_context("loky")  # new processes: none is forked, and none imports the main module again
    key = private_key.private_bytes_raw()
    # Workers get this process's id, and exit when this process has ended.
    pool = ProcessPoolExecutor(workers, context=context, initializer=_start_worker, initargs=(os.getpid(),))
    waiting: deque[Future[Opened]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_open_batch, batch, plaintext_bytes, key, binding))
            if len(waiting) > _BATCHES_AHEAD * workers:  # limits the memory for batches
                yield waiting.popleft().result()  # the oldest, so that results keep the order of the records
        while waiting:
            yield waiting.popleft().result()
    finally:  # also if the caller stops iterating before the end
        pool.shutdown(wait=True, kill_workers=True)


def _open_batch(batch: bytes, plaintext_bytes: int, key: bytes, binding: Binding) -> Opened:
    """Open a batch in a worker process. Keys cannot be pickled, so it gets the key's bytes."""
    return open_records(batch, plaintext_bytes, X25519PrivateKey.from_private_bytes(key), binding)


def _join_to_batches(records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the records, concatenated to batches of limited number and size."""
    batch: list[bytes] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record)
        if len(batch) == _MAX_BATCH_RECORDS or size >= _BATCH_BYTES:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)


def _start_worker(parent: int) -> None:
    """Prepare a worker process: it ignores interrupts, which its parent handles, and exits when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_when_parent_ends, args=(parent,), daemon=True).start()


def _exit_when_parent_ends(parent: int) -> None:
    """Exit this process when its ``parent`` has ended. The system then gives this process another parent, with another id."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
