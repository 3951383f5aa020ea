"""Mix all records of a round in an order that is exactly uniform, in bounded memory.

Every record is sent to one of B parts, uniformly and independently (``scatter``); each part is then put in uniformly
random order (``Scattered.part``); the parts, one after the other, are the mixed round.

Why the order is exactly uniform: give record i a part P_i, uniform on 0..B-1, and a real number U_i, uniform on (0, 1),
all independent. Sorting by (P_i, U_i) is sorting by V_i = P_i + U_i. The V_i are independent and have the same
continuous distribution, so all n! orders are equally likely. Given the P_i, the order inside a part is that of its U_i:
uniform and independent of the other parts, which is what ``part`` draws. Nothing else enters, not who sent a record nor
when. The length of a part is binomial, and as independent of the senders as the order is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ldpfl.util.entropy import Words

PART_BYTES = 4 * 2**20
"""The mean length of a part is between half of this and this."""

BATCH_BYTES = 8 * 2**20  # of records that are in memory and sorted at a time
MAX_PARTS = 2**16  # a part's number has to fit into the 16 bits that are sorted by

Records = NDArray[np.uint8]


def part_count(round_bytes: int) -> int:
    """Return how many parts a round of ``round_bytes`` bytes has: a power of two, so that random bits give each part the same chance."""
    count = 1
    while count * PART_BYTES < round_bytes and count < MAX_PARTS:
        count *= 2
    return count


@dataclass(frozen=True, eq=False)
class Scattered:
    """Records in a spool file, batch after batch, each sorted by part; ``counts`` (batches, parts) are the numbers of records."""

    spool: BinaryIO
    record_bytes: int
    counts: NDArray[np.int32]
    words: Words

    @property
    def records(self) -> int:
        """How many records there are in all parts."""
        return int(self.counts.sum())

    def part(self, number: int) -> bytes:
        """Return the records of one part in uniformly random order. Each call draws another order, so call it once for each part."""
        # Where each batch starts in the spool file: the number of records in all batches before it.
        batch_starts = np.concatenate(([0], self.counts.sum(axis=1).cumsum()[:-1]))
        starts = batch_starts + self.counts[:, :number].sum(axis=1)  # within a batch, records of lower part numbers come first
        part_counts = self.counts[:, number]
        records = np.empty((int(part_counts.sum()), self.record_bytes), dtype=np.uint8)
        filled = 0
        for start, count in zip(starts.tolist(), part_counts.tolist(), strict=True):
            self.spool.seek(start * self.record_bytes)
            data = self.spool.read(count * self.record_bytes)
            records[filled : filled + count] = np.frombuffer(data, dtype=np.uint8).reshape(count, self.record_bytes)
            filled += count
        return records[uniform_order(len(records), self.words)].tobytes()


def scatter(stream: Iterable[bytes], record_bytes: int, parts: int, words: Words, spool: BinaryIO) -> Scattered:
    """Assign every record of ``stream`` to one of ``parts`` parts, uniformly and independently, and write it to the empty file ``spool``.

    All pieces of ``stream`` together are whole records of ``record_bytes`` bytes; one piece may end inside a record. ``words(n)`` returns n
    random words of 32 bits. The call takes a few times 8 MiB of memory, or a few records.

    Raises:
        OSError: the disk below ``spool`` is full.
        ValueError: the stream ends inside a record, or ``parts`` is not a power of two up to 65,536.
    """
    if not 1 <= parts <= MAX_PARTS or parts & (parts - 1):
        raise ValueError(f"the number of parts must be a power of two up to {MAX_PARTS}, not {parts}")
    counts = []  # for each batch, the number of records in each part
    for records in _batches(stream, record_bytes):
        part_of_record = (words(len(records)) & (parts - 1)).astype(np.uint16)  # uniform, since parts is a power of two
        order = np.argsort(part_of_record, kind="stable")  # for 16 bits a radix sort, the fastest one
        spool.write(records[order].data)
        counts.append(np.bincount(part_of_record, minlength=parts).astype(np.int32))
    spool.flush()
    counts_by_batch = np.array(counts, dtype=np.int32).reshape(len(counts), parts)
    return Scattered(spool, record_bytes, counts_by_batch, words)


def uniform_order(count: int, words: Words) -> NDArray[np.int64]:
    """Return a permutation of 0..count-1. Every permutation is equally likely.

    The permutation sorts ``count`` random keys of 64 bits. Distinct random keys have each order with the same probability. If two keys are
    equal, all keys are drawn again. The probability of this is below count**2 / 2**65.
    """
    while True:
        keys = words(2 * count).view(np.uint64)  # two words of 32 bits for each key
        order = np.argsort(keys)
        ordered = keys[order]
        if not (ordered[1:] == ordered[:-1]).any():
            return order


def _batches(stream: Iterable[bytes], record_bytes: int) -> Iterator[Records]:
    """Yield the records of ``stream`` as rows (records, bytes), some 8 MiB at a time."""
    batch_bytes = max(1, BATCH_BYTES // record_bytes) * record_bytes
    buffered = bytearray()
    for data in stream:
        buffered += data
        while len(buffered) >= batch_bytes:
            yield _rows(buffered[:batch_bytes], record_bytes)
            del buffered[:batch_bytes]
    if len(buffered) % record_bytes:
        raise ValueError("the last record of the uploads is incomplete")
    if buffered:
        yield _rows(buffered, record_bytes)


def _rows(data: bytearray, record_bytes: int) -> Records:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, record_bytes)
