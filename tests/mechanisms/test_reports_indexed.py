"""The codec of sampled signs: every honest report survives the wire, every malformed one is refused, mixing loses nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from ldpfl import PrivacyError, ProtocolError
from ldpfl.mechanisms.reports.indexed import IndexedBitReports, payload_bits


def sizes_of(*sizes: int) -> NDArray[np.int64]:
    return np.array(sizes, dtype=np.int64)


def reports_of(index: Sequence[Sequence[int]], signs: Sequence[Sequence[int]], *sizes: int) -> IndexedBitReports:
    shape = (len(index), len(sizes))
    return IndexedBitReports(np.array(index, dtype=np.int64).reshape(shape), np.array(signs, dtype=bool).reshape(shape), sizes_of(*sizes))


def written_out(index: Sequence[int], signs: Sequence[bool], sizes: Sequence[int]) -> bytes:
    """Pack one report by the documented rule alone, as one long integer."""
    value = place = 0
    for which, sign, size in zip(index, signs, sizes, strict=True):
        width = math.ceil(math.log2(size))
        value |= (which | sign << width) << place
        place += width + 1
    return value.to_bytes(-(-place // 8), "little")


group_size = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 255, 256, 257, 16_000, 2**31, 2**32 - 1]))


@st.composite
def reports(draw: st.DrawFn, smallest: int = 0) -> IndexedBitReports:
    sizes = draw(st.lists(group_size, min_size=1, max_size=8))
    clients = draw(st.integers(smallest, 5))
    index = [[draw(st.integers(0, size - 1)) for size in sizes] for _ in range(clients)]
    signs = [[draw(st.booleans()) for _ in sizes] for _ in range(clients)]
    return reports_of(index, signs, *sizes)


# --- the wire ---------------------------------------------------------------------------------------------------------


@given(reports())
def test_reports_survive_the_wire_as_written_out(sent: IndexedBitReports) -> None:
    payloads = list(sent.payloads())
    sizes = sent.group_sizes.tolist()
    assert payloads == [written_out(*row, sizes) for row in zip(sent.index.tolist(), sent.signs.tolist(), strict=True)]
    assert {len(payload) for payload in payloads} <= {sent.bytes_per_client}
    assert sent.bytes_per_client == math.ceil(payload_bits(sent.group_sizes) / 8)
    received = IndexedBitReports.from_payloads(payloads, sent.group_sizes)
    np.testing.assert_array_equal(received.index, sent.index)
    np.testing.assert_array_equal(received.signs, sent.signs)
    assert (received.clients, received.dimension) == (sent.clients, sum(sizes))


@given(st.lists(group_size, min_size=1, max_size=6), st.data())
def test_whatever_arrives_is_refused_or_is_the_only_payload_of_its_report(sizes: list[int], data: st.DataObject) -> None:
    """Fuzzing: nothing but ProtocolError may escape, and no two payloads may mean the same."""
    size = (payload_bits(sizes_of(*sizes)) + 7) // 8
    payload = data.draw(st.one_of(st.binary(min_size=size, max_size=size), st.binary(max_size=size + 2)))
    try:
        received = IndexedBitReports.from_payloads([payload], sizes_of(*sizes))
    except ProtocolError:
        return
    assert list(received.payloads()) == [payload]


@pytest.mark.parametrize(
    ("size", "bits"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (8, 4), (9, 5), (16_000, 15), (2**32, 33), (2**32 + 1, 34)]
)
def test_a_group_takes_its_index_bits_and_a_sign(size: int, bits: int) -> None:
    assert payload_bits(sizes_of(size)) == bits
    assert payload_bits(sizes_of(size, 1, size)) == 2 * bits + 1


def test_a_report_by_hand() -> None:
    # A group of 5: index 4 = 001 lowest first, sign 1; a group of one: sign 0; a group of 2: index 1, sign 1.
    report = reports_of([[4, 0, 1]], [[1, 0, 1]], 5, 1, 2)
    assert list(report.payloads()) == [bytes([0b1101100])]
    assert report.bytes_per_client == 1


@pytest.mark.parametrize("lengths", [(0,), (1,), (3,), (2, 1), (1, 3)])
def test_a_payload_of_another_length_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="bytes, expected 2 for 2 groups"):
        IndexedBitReports.from_payloads([bytes(length) for length in lengths], sizes_of(100, 5))


@pytest.mark.parametrize("place", range(12, 16))
def test_a_bit_beyond_the_last_group_is_refused(place: int) -> None:
    with pytest.raises(ProtocolError, match="a report has bits set after its 2 groups"):
        IndexedBitReports.from_payloads([bytes(2), (1 << place).to_bytes(2, "little")], sizes_of(100, 5))


@pytest.mark.parametrize("index", [5, 6, 7])
def test_an_index_outside_its_group_is_refused(index: int) -> None:
    with pytest.raises(ProtocolError, match=f"names index {index} in a group of 5 weights"):
        IndexedBitReports.from_payloads([bytes([0]), bytes([index])], sizes_of(5))


def test_no_payload_is_no_report() -> None:
    assert IndexedBitReports.from_payloads([], sizes_of(3, 4)).index.shape == (0, 2)


@pytest.mark.slow
def test_a_million_groups_and_clients_packed_in_parts_survive_the_wire() -> None:
    generator = np.random.default_rng(1)
    for clients, sizes in [(1, np.full(1_000_000, 1000)), (3000, generator.integers(1, 50, 600))]:
        sent = IndexedBitReports(
            generator.integers(0, sizes, (clients, sizes.size)), generator.random((clients, sizes.size)) < 0.5, sizes.astype(np.int64)
        )
        received = IndexedBitReports.from_payloads(list(sent.payloads()), sent.group_sizes)
        np.testing.assert_array_equal(received.index, sent.index)
        np.testing.assert_array_equal(received.signs, sent.signs)


# --- what cannot be a report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "signs", "sizes"),
    [
        pytest.param(np.zeros((1, 2), np.int32), np.zeros((1, 2), bool), sizes_of(3, 3), id="index-dtype"),
        pytest.param(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.uint8), sizes_of(3, 3), id="sign-dtype"),
        pytest.param(np.zeros((1, 2), np.int64), np.zeros((2, 2), bool), sizes_of(3, 3), id="fewer-indices"),
        pytest.param(np.zeros((1, 1), np.int64), np.zeros((1, 1), bool), sizes_of(3, 3), id="fewer-groups"),
        pytest.param(np.zeros(2, np.int64), np.zeros(2, bool), sizes_of(3, 3), id="one-dimensional"),
        pytest.param(np.zeros((1, 0), np.int64), np.zeros((1, 0), bool), sizes_of(), id="no-group"),
        pytest.param(np.zeros((1, 2), np.int64), np.zeros((1, 2), bool), sizes_of(3, 0), id="empty-group"),
        pytest.param(np.array([[0, -1]]), np.zeros((1, 2), bool), sizes_of(3, 3), id="negative-index"),
        pytest.param(np.array([[3, 0]]), np.zeros((1, 2), bool), sizes_of(3, 3), id="index-too-large"),
    ],
)
def test_a_report_that_cannot_be_is_refused(index: NDArray[np.int64], signs: NDArray[np.bool_], sizes: NDArray[np.int64]) -> None:
    with pytest.raises(ProtocolError) as caught:
        IndexedBitReports(index, signs, sizes)
    assert len(str(caught.value).splitlines()) == 1


# --- mixing -----------------------------------------------------------------------------------------------------------


def pairs(batch: IndexedBitReports, group: int) -> Counter[tuple[int, bool]]:
    return Counter(zip(batch.index[:, group].tolist(), batch.signs[:, group].tolist(), strict=True))


@given(reports(smallest=1), st.integers(0, 5), st.integers(0, 2**32))
def test_mixing_keeps_what_each_group_received(batch: IndexedBitReports, cut: int, seed: int) -> None:
    parts = [IndexedBitReports(batch.index[rows], batch.signs[rows], batch.group_sizes) for rows in (slice(0, cut), slice(cut, None))]
    mixed = IndexedBitReports.mix(parts, np.random.default_rng(seed))
    assert mixed.clients == batch.clients
    for group in range(batch.group_sizes.size):
        assert pairs(mixed, group) == pairs(batch, group)


def test_mixing_breaks_what_one_client_sent_apart() -> None:
    """Client k marks every group with index k; 100 groups go through more than one block."""
    clients, groups = 50, 100
    marks = np.repeat(np.arange(clients)[:, None], groups, axis=1)
    batch = IndexedBitReports(marks, marks % 2 == 1, np.full(groups, clients, dtype=np.int64))
    mixed = IndexedBitReports.mix([batch], np.random.default_rng(5))
    np.testing.assert_array_equal(mixed.signs, mixed.index % 2 == 1)  # an index keeps its sign
    np.testing.assert_array_equal(batch.index, marks)  # what came in is left alone
    assert len({tuple(column) for column in mixed.index.T.tolist()}) == groups
    kept = int((mixed.index == marks).sum())
    assert abs(kept - groups) < 4 * math.sqrt(groups)  # one fixed point a group on average, with variance 1
    together = sum(int((row[1:] == row[:-1]).sum()) for row in mixed.index)
    assert abs(together - (groups - 1)) < 4 * math.sqrt(groups - 1)  # and of two neighbours no more stay together


def test_every_order_is_equally_likely() -> None:
    """chi-squared over the 6 orders of 3 clients in 30,000 groups: above 25.7 once in 10,000 seeds; the seed is fixed."""
    groups = 30_000
    marks = np.repeat(np.arange(3)[:, None], groups, axis=1)
    batch = IndexedBitReports(marks, np.zeros((3, groups), bool), np.full(groups, 3, dtype=np.int64))
    mixed = IndexedBitReports.mix([batch], np.random.default_rng(8)).index
    counts = np.bincount(mixed[0] * 3 + mixed[1], minlength=9)
    counts = counts[counts > 0]
    assert counts.size == 6
    assert float(((counts - groups / 6) ** 2).sum() / (groups / 6)) < 25.7


def test_mixing_depends_on_the_generator_alone() -> None:
    batch = reports_of([[0, 1], [1, 0], [2, 1]], [[0, 1], [1, 0], [1, 1]], 3, 2)
    first, second = (IndexedBitReports.mix([batch], np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first.index, second.index)
    np.testing.assert_array_equal(first.signs, second.signs)


def test_other_groups_are_not_mixed() -> None:
    with pytest.raises(PrivacyError, match="different groups"):
        IndexedBitReports.mix([reports_of([[0, 0]], [[0, 0]], 3, 4), reports_of([[0, 0]], [[0, 0]], 4, 3)], np.random.default_rng(0))
