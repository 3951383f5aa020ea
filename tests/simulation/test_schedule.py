"""Every client sees each of its samples once an epoch, in an order that only its own stream decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from ldpfl.simulation import BatchSchedule, batch_schedule
from ldpfl.util.randomness import Purpose, SeededStreams


def orders_of(clients: Sequence[int], epochs: int, seed: int = 0) -> list[SeededStreams]:
    return [SeededStreams.of(clients, seed, Purpose.BATCH_ORDER, epoch) for epoch in range(epochs)]


Sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def schedule_of(sizes: list[int], *, epochs: int, batch_size: int, first_seed: int = 0) -> tuple[BatchSchedule, list[NDArray[np.int64]]]:
    samples = np.split(1000 + np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return batch_schedule(samples, orders_of(range(len(sizes)), epochs, first_seed), batch_size=batch_size), samples


def batches(schedule: BatchSchedule, client: int) -> list[list[int]]:
    """The batches that count for ``client``, empty ones left out."""
    rows = zip(schedule.index[client], schedule.mask[client], strict=True)
    return [index[mask > 0].tolist() for index, mask in rows if bool((mask > 0).any())]


@settings(max_examples=80, derandomize=True)
@given(Sizes, st.integers(1, 3), st.integers(1, 15))
def test_each_epoch_holds_every_sample_once_in_full_batches(sizes: list[int], epochs: int, batch_size: int) -> None:
    schedule, samples = schedule_of(sizes, epochs=epochs, batch_size=batch_size)
    for client, own in enumerate(samples):
        cut = batches(schedule, client)
        per_epoch = -(-own.size // batch_size)
        assert len(cut) == epochs * per_epoch
        for epoch in range(epochs):
            of_epoch = cut[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert sorted(sample for batch in of_epoch for sample in batch) == own.tolist()
            assert {len(batch) for batch in of_epoch[:-1]} <= {batch_size}


@settings(max_examples=80, derandomize=True)
@given(Sizes, st.integers(1, 3), st.integers(1, 15))
def test_padding_points_at_the_clients_own_samples_and_counts_nothing(sizes: list[int], epochs: int, batch_size: int) -> None:
    """A blanked-out place still loads an image; it must be one of the client's own."""
    schedule, samples = schedule_of(sizes, epochs=epochs, batch_size=batch_size)
    assert set(schedule.mask.flatten().tolist()) <= {0.0, 1.0}
    for client, own in enumerate(samples):
        assert set(schedule.index[client].flatten().tolist()) <= set(own.tolist())
        assert int(schedule.mask[client].sum()) == epochs * own.size


def test_a_client_s_order_depends_on_its_own_stream_alone() -> None:
    samples = np.split(np.arange(30), [12, 17])

    def order(numbers: tuple[int, ...], clients: tuple[int, ...]) -> list[list[list[int]]]:
        schedule = batch_schedule([samples[client] for client in clients], orders_of(numbers, epochs=2), batch_size=4)
        return [batches(schedule, row) for row in range(len(clients))]

    together = order((1, 2, 3), (0, 1, 2))
    assert order((2,), (1,))[0] == together[1]
    assert order((3, 1), (2, 0)) == [together[2], together[0]]
    assert order((9, 2, 9), (0, 1, 2))[1] == together[1]
    assert order((9, 2, 9), (0, 1, 2))[0] != together[0]


def test_epochs_are_shuffled_anew() -> None:
    schedule, _ = schedule_of([20], epochs=2, batch_size=20)
    first, second = batches(schedule, 0)
    assert first != second
    assert first != sorted(first)


def test_head_keeps_the_first_steps() -> None:
    schedule, _ = schedule_of([10, 4], epochs=1, batch_size=2)
    head = schedule.head(3)
    assert (head.clients, head.steps, schedule.steps) == (2, 3, 5)
    assert batches(head, 0) == batches(schedule, 0)[:3]
