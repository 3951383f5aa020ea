"""What each server sees of a sum round, for data sets that differ in one client: the relay's rows and files, and what the aggregator pulls.

The relay must see the same law whatever the data are: every number that it keeps is uniform, and so are differences between coordinates,
clients and rounds, by which a mask that comes twice would show. The aggregator must see the sum and what is drawn apart from the data.
Each check is shown to find planted faults.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from relay_support import (
    RUN,
    TABLES,
    Clock,
    Postgres,
    content,
    die_before,
    give,
    process,
    pull,
    seeded,
    share_id,
    signer,
    signing_key,
    sum_opened,
    sum_terms,
    unsynced,
)
from scipy.stats import chi2
from sqlalchemy import LargeBinary

from ldpfl.relay.database import open_engine
from ldpfl.relay.schema import parts, uploads
from ldpfl.relay.store import Store
from ldpfl.transport.sums import ENVELOPE_BYTES, Bits, SumBinding, open_seeds, seal_seed, shard, signer_of, unshard

pytest_plugins = ["relay_fixtures"]

ROUNDS, CLIENTS, WIDTH = 60, 3, 64
BITS: tuple[Bits, ...] = (32, 64)
FALSE_ALARM = 1e-7
"""Of each test of one set of numbers. There are 2 x 2 x 7 of them here, so that an honest code fails once in 300,000 seeds."""

AGGREGATOR = X25519PrivateKey.from_private_bytes(bytes(range(32)))
NODES = [signing_key(f"c{client}") for client in range(CLIENTS)]
KNOWN = {signer_of(node.public_key()): node.public_key() for node in NODES}

Numbers = NDArray[np.unsignedinteger]
Sharding = Callable[[NDArray[np.int64], bytes, Bits], bytes]


def data_sets() -> dict[str, NDArray[np.int64]]:
    """Return points of each client in two data sets that differ in the first one's: one of its records is another one."""
    points = np.random.default_rng(6).integers(-1000, 1000, (CLIENTS, WIDTH))
    other = points.copy()
    other[0] += np.random.default_rng(7).integers(-(2**20), 2**20, WIDTH)
    return {"one": points, "other": other}


def seed_of(name: str, number: int, client: int) -> bytes:
    return hashlib.sha256(f"{name} {number} {client}".encode()).digest()


def binding_of(number: int, bits: Bits) -> SumBinding:
    return SumBinding(RUN, number, bytes(32), WIDTH, bits)


@contextmanager
def relay_in(folder: Path, clock: Clock) -> Iterator[Store]:
    folder.mkdir()
    store = Store(unsynced(open_engine(str(folder / "relay.db"))), clock=clock, words=seeded(1))
    yield store
    store.close()


def rows(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Return what a relay keeps, with lengths in the place of bytes and of upload ids, which are hashes of envelopes."""
    kept = {}
    for table, found in zip(TABLES, content(store), strict=True):
        hidden = [column.name == "upload_id" or isinstance(column.type, LargeBinary) for column in table.columns]
        kept[table.name] = sorted(tuple(len(part) if out else part for part, out in zip(row, hidden, strict=True)) for row in found)
    return kept


def held(store: Store, bits: Bits) -> Numbers:
    """Return the sum that lies in the store."""
    return np.frombuffer(dict(zip(TABLES, content(store), strict=True))[parts][0][-1], f"<u{bits // 8}")


def seen_by_relay(
    store: Store, clock: Clock, name: str, points: NDArray[np.int64], bits: Bits, sharding: Sharding, rounds: int = ROUNDS
) -> tuple[Numbers, list[Any]]:
    """Return the sum in the store after each upload of each round, (``rounds``, CLIENTS, WIDTH), and all other rows after each step."""
    sums, others = [], []
    for number in range(1, rounds + 1):
        sum_opened(store, number, dimension=WIDTH, bits=bits, max_uploads=CLIENTS)
        for client, own in enumerate(points):
            seed = seed_of(name, number, client)
            envelope = seal_seed(seed, AGGREGATOR.public_key(), NODES[client], binding_of(number, bits))
            give(store, f"c{client}", sharding(own, seed, bits) + envelope, number)
            sums.append(held(store, bits))
            others.append(rows(store))
        clock.now += 100
        pull(store, number)
        assert (held(store, bits) == sums[-1]).all()
        others.append(rows(store))
        store.cancel("aggregator", RUN, number)
    return np.array(sums).reshape(rounds, CLIENTS, WIDTH), others


def not_uniform(sums: Numbers) -> list[str]:
    """Return which numbers of a relay's view have bytes whose frequencies chance leaves below :data:`FALSE_ALARM`."""
    sent = np.diff(sums, axis=1, prepend=sums.dtype.type(0))  # each client's masked vector, modulo 2^bits
    sets = {
        "sums": sums,
        "vectors": sent,
        "first vectors": sent[:, 0],
        "released sums": sums[:, -1],
        "differences of coordinates": np.diff(sent, axis=2),
        "differences of clients": np.diff(sent, axis=1),
        "differences of rounds": np.diff(sent, axis=0),
    }
    return [name for name, numbers in sets.items() if _chance(numbers) < FALSE_ALARM]


def _chance(numbers: Numbers) -> float:
    """Return the p-value of the bytes' frequencies, where all are equally probable; each place in a number by itself."""
    places = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.dtype.itemsize)
    expected = len(places) / 256
    least = min(chi2.sf(float(((np.bincount(own, minlength=256) - expected) ** 2 / expected).sum()), 255) for own in places.T)
    return float(least * places.shape[1])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("bits", BITS)
def test_a_relay_sees_the_same_law_whatever_a_client_holds(bits: Bits, tmp_path: Path) -> None:
    """Both data sets: all that is kept of vectors is uniform, and all else that is kept is the same."""
    kept = {}
    for name, points in data_sets().items():
        with relay_in(tmp_path / name, clock := Clock()) as store:
            sums, kept[name] = seen_by_relay(store, clock, name, points, bits, shard)
        assert not_uniform(sums) == []
    assert kept["one"] == kept["other"]


def _masks(seed: bytes, bits: Bits) -> NDArray[np.int64]:
    return np.frombuffer(shard(np.zeros(WIDTH, np.int64), seed, bits), f"<i{bits // 8}").astype(np.int64)


def _sent(points: NDArray[np.int64], mask: NDArray[np.int64], bits: Bits) -> bytes:
    return (points + mask).astype(f"<i{bits // 8}").tobytes()


FAULTS: dict[str, Sharding] = {
    "no mask": lambda points, seed, bits: _sent(points, np.zeros(WIDTH, np.int64), bits),
    "a mask of a bit less": lambda points, seed, bits: _sent(points, _masks(seed, bits) & (2 ** (bits - 1) - 1), bits),
    "one mask for all": lambda points, seed, bits: _sent(points, _masks(bytes(32), bits), bits),
    "a mask that repeats": lambda points, seed, bits: _sent(points, _masks(seed, bits)[:1].repeat(WIDTH), bits),
    "a mask of each client": lambda points, seed, bits: _sent(points, _masks(hashlib.sha256(points.tobytes()).digest(), bits), bits),
    "a mask of small numbers": lambda points, seed, bits: _sent(points, _masks(seed, bits) % 10**6, bits),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_masks_with_a_fault_are_found(fault: str, tmp_path: Path) -> None:
    """A third of the rounds is enough: each fault makes some set of numbers far from uniform."""
    with relay_in(tmp_path / "relay", clock := Clock()) as store:
        sums, _ = seen_by_relay(store, clock, "one", data_sets()["one"], 32, FAULTS[fault], ROUNDS // 3)
    assert not_uniform(sums)


class Marks(Store):
    """A relay with a fault: it keeps something of what a client sent in the row of its upload."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        add = self.sums.add

        def marking(expected: Any, body: Any) -> Any:
            done = add(expected, body)
            done.result(30)
            with self.engine.begin() as connection:
                connection.execute(uploads.update().where(uploads.c.client == expected.client).values(received=body.getvalue()[0]))
            return done

        self.sums.add = marking  # type: ignore[method-assign]


def test_a_relay_that_keeps_more_is_found(tmp_path: Path) -> None:
    kept = []
    for name, points in data_sets().items():
        store = Marks(unsynced(open_engine(str(tmp_path / f"{name}.db"))), clock=Clock())
        sum_opened(store, dimension=WIDTH)
        seed = seed_of("same", 1, 0)
        envelope = seal_seed(seed, AGGREGATOR.public_key(), NODES[0], binding_of(1, 32))
        give(store, "c0", shard(points[0], seed, 32) + envelope)
        kept.append(rows(store))
        store.close()
    assert kept[0] != kept[1]


@pytest.mark.thorough_except("64")
@pytest.mark.parametrize("bits", BITS)
def test_what_an_aggregator_pulls_is_the_sum_and_what_was_drawn_without_the_data(bits: Bits, tmp_path: Path) -> None:
    """One client's record is another one, and another client's noise makes up for it: the released sum is the same. With the same seeds
    and envelopes the aggregator pulls the same bytes, so that given the sum nothing that it sees depends on who holds what."""
    points = data_sets()["one"]
    moved = points.copy()
    moved[0] += (change := np.random.default_rng(8).integers(-(2**24), 2**24, WIDTH))
    moved[1] -= change
    pulled: dict[str, list[bytes]] = {"one": [], "other": []}
    with relay_in(tmp_path / "one", clock := Clock()) as one, relay_in(tmp_path / "other", clock) as other:
        for number in range(1, 21):
            envelopes = [
                seal_seed(seed_of("", number, client), AGGREGATOR.public_key(), NODES[client], binding_of(number, bits))
                for client in range(CLIENTS)
            ]
            for store in (one, other):
                sum_opened(store, number, dimension=WIDTH, bits=bits, max_uploads=CLIENTS)
            for client, envelope in enumerate(envelopes):
                give(one, f"c{client}", shard(points[client], seed_of("", number, client), bits) + envelope, number)
                give(other, f"c{client}", shard(moved[client], seed_of("", number, client), bits) + envelope, number)
            clock.now += 100
            for name, store in (("one", one), ("other", other)):
                pulled[name].append(pull(store, number))
                store.acknowledge("aggregator", RUN, number)
    assert pulled["one"] == pulled["other"]
    for number, data in enumerate(pulled["one"], start=1):
        size = WIDTH * bits // 8
        sent = [data[start : start + ENVELOPE_BYTES] for start in range(size, len(data), ENVELOPE_BYTES)]
        seeds = open_seeds(sent, AGGREGATOR, KNOWN, binding_of(number, bits), CLIENTS)
        assert set(seeds) == {seed_of("", number, client) for client in range(CLIENTS)}
        assert (unshard(np.frombuffer(data[:size], f"<u{bits // 8}"), seeds) == points.sum(axis=0)).all()


# --- files, whenever a relay dies ---------------------------------------------------------------------------------------


LONG = 4000
"""Numbers of a vector: it takes several pages of a database."""


def secret_uploads(number: int) -> tuple[dict[str, bytes], list[bytes]]:
    """Return uploads by client, and what no file may hold: 16 bytes of points, as 32 and as 64 bits, and of masks, and each seed."""
    shares, secrets = {}, []
    for client in range(CLIENTS):
        points = np.random.default_rng((number, client)).integers(2**24, 2**30, LONG)
        seed = seed_of("files", number, client)
        binding = SumBinding(RUN, number, bytes(32), LONG, 32)
        shares[f"c{client}"] = shard(points, seed, 32) + seal_seed(seed, AGGREGATOR.public_key(), NODES[client], binding)
        mask = shard(np.zeros(LONG, np.int64), seed, 32)
        secrets += [seed.hex().encode(), seed[:16], seed[16:]]
        for start in (0, LONG // 2, LONG - 4):
            secrets += [mask[4 * start : 4 * start + 16], *(points[start : start + 4].astype(kind).tobytes() for kind in ("<i4", "<i8"))]
    return shares, secrets


def found_in(folder: Path, secrets: list[bytes], since: float = 0.0) -> list[bytes]:
    """Return which of ``secrets`` are in files below a folder that were written ``since``: databases, journals, write-ahead logs."""
    found = set[bytes]()
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a server deletes files whenever it likes
            if file.is_file() and file.stat().st_mtime >= since:
                data = file.read_bytes()
                found.update(secret for secret in secrets if secret in data)
    return [secret for secret in secrets if secret in found]


def files_of(place: str, request: pytest.FixtureRequest) -> Path:
    if "://" not in place:
        return Path(place).parent
    server: Postgres = request.getfixturevalue("postgres")
    return server.folder / "data"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("last", [1, 2])
def test_no_file_of_a_relay_that_is_killed_holds_points_masks_or_seeds(place: str, last: int, request: pytest.FixtureRequest) -> None:
    """Killed in the first upload or in the second one, once its sum is written, so that a journal or log is left."""
    shares, secrets = secret_uploads(1)
    began = time.time() - 1  # files of other tests lie beside those of this one, and are large
    store = Store(open_engine(place))
    store.open_round("aggregator", RUN, 1, sum_terms(min_clients=CLIENTS, closes_in_s=0.0, dimension=LONG))
    store.close()
    with process(_give_and_die, place, shares, last) as killed:
        killed.join(60)
    assert killed.exitcode == -9
    folder = files_of(place, request)
    assert "://" in place or Path(f"{place}-journal").stat().st_size > 0
    assert found_in(folder, secrets, began) == []
    store = Store(open_engine(place))
    for client, share in shares.items():
        give(store, client, share)
    assert found_in(folder, secrets, began) == []
    released = pull(store)
    assert found_in(folder, secrets, began) == []
    assert found_in(folder, [*secrets, released[:16]], began) == [released[:16]]  # the search finds what is there
    store.acknowledge("aggregator", RUN, 1)
    assert found_in(folder, secrets, began) == []
    store.close()


def _give_and_die(place: str, shares: dict[str, bytes], last: int) -> None:
    """Add shares one after the other, and die before the ``last``-th one is counted, which is its last statement."""
    store = Store(open_engine(place))
    die_before(last, store, "SET uploads")
    for name in ("c0", "c1"):
        expected = store.sums.check(signer(name), RUN, 1, share_id(shares[name]), len(shares[name]))
        store.sums.add(expected, BytesIO(shares[name])).result(30)
    os._exit(0)


@pytest.mark.thorough
def test_a_relay_s_file_that_holds_points_is_found(tmp_path: Path) -> None:
    shares, secrets = secret_uploads(1)
    with relay_in(tmp_path / "relay", Clock()) as store:
        sum_opened(store, dimension=LONG)
        points = np.random.default_rng((1, 0)).integers(2**24, 2**30, LONG)
        give(store, "c0", points.astype("<i4").tobytes() + shares["c0"][-ENVELOPE_BYTES:])
        assert found_in(tmp_path, secrets)
