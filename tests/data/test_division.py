"""Who holds which samples, in one array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ldpfl.data.samples import Division

Parts = st.lists(st.lists(st.integers(0, 1000), max_size=7), min_size=1, max_size=6)


@settings(max_examples=80, derandomize=True)
@given(Parts, st.data())
def test_a_division_is_its_parts(parts: list[list[int]], data: st.DataObject) -> None:
    division = Division.of([np.array(part, dtype=np.int64) for part in parts])
    assert [own.tolist() for own in division] == parts
    assert division.sizes.tolist() == [len(part) for part in parts]
    clients = data.draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=5))
    assert [own.tolist() for own in division.take(np.array(clients))] == [parts[client] for client in clients]
    assert [own.tolist() for own in division[1:]] == parts[1:]
    table, inside = division.table()
    for client, part in enumerate(parts):
        assert table[client][inside[client]].tolist() == part
        assert not part or set(table[client].tolist()) <= {*part}


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=30))
def test_owners_hold_their_own_places_in_order(owners: list[int]) -> None:
    division = Division.by_owner(np.array(owners), 5)
    assert [own.tolist() for own in division] == [[place for place, owner in enumerate(owners) if owner == client] for client in range(5)]


def test_equal_parts_leave_a_remainder_out_and_shared_places_are_held_once() -> None:
    assert [own.tolist() for own in Division.equal(np.arange(11), 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    shared = Division.shared(np.arange(4), 1000)
    assert (len(shared), shared.places.size) == (1000, 4)
    assert shared[999].tolist() == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        shared[1000]
