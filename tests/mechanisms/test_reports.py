"""The packed codec: every honest report survives the wire, every malformed one is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from ldpfl import ProtocolError
from ldpfl.mechanisms import BitReports, DenseReports
from ldpfl.mechanisms.reports.bits import ShuffledBits, count_ones, packed_size


def pack(bits: NDArray[np.uint8]) -> BitReports:
    """Pack by the documented rule alone: bit j stands in byte j // 8 at position j % 8, lowest first."""
    clients, dimension = bits.shape
    packed = np.zeros((clients, -(-dimension // 8)), dtype=np.uint8)
    for row, column in zip(*np.nonzero(bits), strict=True):
        packed[row, column // 8] |= 1 << (column % 8)
    return BitReports(packed, dimension)


@st.composite
def bit_matrices(draw: st.DrawFn) -> NDArray[np.uint8]:
    clients, dimension = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    flat = draw(st.lists(st.integers(0, 1), min_size=clients * dimension, max_size=clients * dimension))
    return np.array(flat, dtype=np.uint8).reshape(clients, dimension)


@given(bit_matrices())
def test_reports_survive_the_wire(bits: NDArray[np.uint8]) -> None:
    clients, dimension = bits.shape
    payloads = list(pack(bits).payloads())
    received = BitReports.from_payloads(payloads, dimension)
    assert (received.clients, received.dimension, received.bytes_per_client) == (clients, dimension, packed_size(dimension))
    assert {len(payload) for payload in payloads} == {packed_size(dimension)}
    assert list(received.payloads()) == payloads
    for row in range(clients):
        np.testing.assert_array_equal(received.unpack()[row], bits[row])


@given(bit_matrices(), st.data())
@pytest.mark.slow
@pytest.mark.thorough
def test_a_payload_of_another_length_is_refused(bits: NDArray[np.uint8], data: st.DataObject) -> None:
    dimension, payloads = bits.shape[1], list(pack(bits).payloads())
    victim = data.draw(st.integers(0, len(payloads) - 1))
    length = data.draw(st.integers(0, 8).filter(lambda n: n != packed_size(dimension)))
    payloads[victim] = bytes(length)
    with pytest.raises(ProtocolError, match=f"has {length} bytes, expected {packed_size(dimension)} for {dimension} weights"):
        BitReports.from_payloads(payloads, dimension)


def test_lengths_that_only_add_up_are_refused() -> None:
    with pytest.raises(ProtocolError, match="bytes"):
        BitReports.from_payloads([bytes(1), bytes(3)], 16)


@pytest.mark.thorough
@given(bit_matrices().filter(lambda bits: bits.shape[1] % 8 != 0), st.data())
def test_a_bit_beyond_the_last_weight_is_refused(bits: NDArray[np.uint8], data: st.DataObject) -> None:
    # A stray bit is a covert channel of up to seven bits a report.
    dimension, payloads = bits.shape[1], [bytearray(payload) for payload in pack(bits).payloads()]
    victim = data.draw(st.integers(0, len(payloads) - 1))
    payloads[victim][-1] |= 1 << data.draw(st.integers(dimension % 8, 7))
    with pytest.raises(ProtocolError, match="bits set after its"):
        BitReports.from_payloads([bytes(payload) for payload in payloads], dimension)


@pytest.mark.parametrize("dimension", [8, 16])
def test_a_full_last_byte_has_no_padding_to_check(dimension: int) -> None:
    received = BitReports.from_payloads([b"\xff" * (dimension // 8)], dimension)
    assert received.unpack()[0].tolist() == [1] * dimension


@pytest.mark.thorough
@given(bit_matrices(), st.integers(0, 6))
def test_count_ones_counts_over_batches(bits: NDArray[np.uint8], cut: int) -> None:
    reports = pack(bits)
    parts = [BitReports(reports.packed[:cut], reports.dimension), BitReports(reports.packed[cut:], reports.dimension)]
    assert count_ones(parts).tolist() == bits.sum(axis=0, dtype=np.int64).tolist()


@pytest.mark.parametrize("clients", [255, 256, 510, 511, 1021])
def test_count_ones_does_not_wrap(clients: int) -> None:
    reports = BitReports(np.full((clients, 1), 0b101, dtype=np.uint8), 3)
    assert count_ones([reports]).tolist() == [clients, 0, clients]
    assert count_ones([reports, reports]).tolist() == [2 * clients, 0, 2 * clients]


def test_dense_reports_state_their_size() -> None:
    reports = DenseReports(torch.zeros(3, 5))
    assert (reports.clients, reports.dimension, reports.bytes_per_client) == (3, 5, 20)
    assert [len(payload) for payload in reports.payloads()] == [20, 20, 20]


def test_dense_reports_survive_the_wire() -> None:
    values = torch.tensor([[0.0, -1.5, 3e38], [1e-45, -0.0, 7.25]])
    payloads = list(DenseReports(values).payloads())
    received = DenseReports.from_payloads(payloads, 3)
    assert (received.clients, received.dimension) == (2, 3)
    assert received.values.dtype == torch.float32
    assert list(received.payloads()) == payloads
    received.values.zero_()  # memory of its own, which may be written to
    assert list(DenseReports.from_payloads(payloads, 3).payloads()) == payloads
    assert DenseReports.from_payloads([], 3).values.shape == (0, 3)


@pytest.mark.parametrize("lengths", [(11,), (13,), (0,), (12, 16), (8, 16)])
def test_a_dense_payload_of_another_length_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="expected 12 for 3 weights"):
        DenseReports.from_payloads([bytes(length) for length in lengths], 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_dense_payload_that_is_not_finite_is_refused(bad: float) -> None:
    # Refused on receipt: one such value would make the whole mean meaningless.
    payloads = list(DenseReports(torch.tensor([[1.0, 2.0], [3.0, bad]])).payloads())
    with pytest.raises(ProtocolError, match="NaN or infinity"):
        DenseReports.from_payloads(payloads, 2)


@pytest.mark.parametrize("clients", [1, 2, 7, 254, 255, 256, 300])
@pytest.mark.parametrize("dimension", [1, 8, 13])
def test_shuffled_bits_have_the_counts_that_they_were_made_of(clients: int, dimension: int) -> None:
    generator = np.random.default_rng(clients)
    ones = generator.integers(0, clients, size=dimension, endpoint=True, dtype=np.int32)
    ones[:1] = clients
    shuffled = ShuffledBits(ones, clients, generator)
    assert (shuffled.clients, shuffled.dimension, shuffled.bytes_per_client) == (clients, dimension, packed_size(dimension))
    assert count_ones([shuffled]).tolist() == ones.tolist()
    looked_at = BitReports.from_payloads(list(shuffled.payloads()), dimension)  # no stray bits
    assert np.unpackbits(looked_at.packed, axis=1, bitorder="little")[:, :dimension].sum(axis=0).tolist() == ones.tolist()
    assert count_ones([looked_at, shuffled, looked_at]).tolist() == (3 * ones).tolist()
    np.testing.assert_array_equal(shuffled.packed, looked_at.packed)  # the same at each look
