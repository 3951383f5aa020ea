"""Sum rounds in the store, on SQLite and on PostgreSQL: sums that are exact, and change together with the list of who is in them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from relay_support import (
    RUN,
    TABLES,
    Clock,
    Postgres,
    blob,
    content,
    die_before,
    envelope_of,
    give,
    members,
    on_disk,
    opened,
    postgres_programs,
    process,
    pull,
    put,
    refused,
    share_for,
    share_id,
    signer,
    signing_key,
    sum_opened,
    sum_terms,
    upload_id,
)
from sqlalchemy import event, insert, select, text

from ldpfl.relay.database import open_engine
from ldpfl.relay.errors import Conflict, Forbidden, Refusal, RoundOver, StoreFull, StoreUnavailable, TooEarly, Unknown, WrongLength
from ldpfl.relay.queries import try_lock
from ldpfl.relay.rounds_listed import cancel_round, list_rounds
from ldpfl.relay.schema import SCHEMA, blocks, is_sqlite, parts, rounds, uploads
from ldpfl.relay.store import Store
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, new_seed, open_seeds, seal_seed, shard, signer_of, unshard

pytest_plugins = ["relay_fixtures"]


def by_table(store: Store) -> dict[Any, list[tuple[Any, ...]]]:
    return dict(zip(TABLES, content(store), strict=True))


@pytest.mark.thorough_except("sqlite-32", "sqlite-64")
@pytest.mark.parametrize("bits", [32, 64])
def test_what_clients_sent_is_summed_exactly_and_nobody_else_is_in_it(store: Store, clock: Clock, bits: Any) -> None:
    """From points to their sum, as a whole: masked, added up by the relay, opened and unmasked by the aggregator."""
    size = sum_opened(store, dimension=50, bits=bits, min_clients=5)
    aggregator, source = X25519PrivateKey.generate(), np.random.default_rng(8)
    binding = SumBinding(RUN, 1, bytes(32), size.dimension, size.bits)
    nodes, points = {}, source.integers(-(2**27), 2**27, (5, size.dimension))
    for index, mine in enumerate(points):
        node, seed = signing_key(f"c{index}"), new_seed()
        nodes[signer_of(node.public_key())] = node.public_key()
        give(store, f"c{index}", shard(mine, seed, bits) + seal_seed(seed, aggregator.public_key(), node, binding))
    clock.now += 100
    data = pull(store)
    envelopes = [data[start : start + ENVELOPE_BYTES] for start in range(size.sum_bytes, len(data), ENVELOPE_BYTES)]
    seeds = open_seeds(envelopes, aggregator, nodes, binding, 5)
    assert (unshard(np.frombuffer(data[: size.sum_bytes], f"<u{bits // 8}"), seeds) == points.sum(axis=0)).all()


@pytest.mark.thorough_except("sqlite-32")
@pytest.mark.parametrize("bits", [32, 64])
def test_many_clients_at_once_through_several_workers(
    store: Store, another: Callable[[], Store], clock: Clock, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ldpfl.relay.protocol.SUM_PART_BYTES", 64)
    monkeypatch.setattr("ldpfl.relay.uniform_order.PART_BYTES", 1000)
    size = sum_opened(store, dimension=100, bits=bits, min_clients=60, max_uploads=60)
    shares = {f"c{index}": share_for(f"c{index}", size) for index in range(60)}
    workers = [store, another()]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda numbered: give(workers[numbered[0] % 2], numbered[1], shares[numbered[1]]), enumerate(shares)))
    assert store.status("aggregator", RUN, 1).uploads == 60
    clock.now += 100
    released = pull(store)
    assert store.part("aggregator", RUN, 1, 0).count == -(-size.sum_bytes // 64) + 16
    assert members(released, shares, size) == set(shares)


def test_all_that_wait_are_added_up_in_one_transaction(sqlite_store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum_opened(sqlite_store)
    shares = {f"c{index}": share_for(f"c{index}") for index in range(8)}
    begun, free, commits = threading.Event(), threading.Event(), []
    fold = sqlite_store.sums._add_shares

    def held_up(*arguments: Any) -> Any:
        begun.set()
        free.wait(30)
        return fold(*arguments)

    monkeypatch.setattr(sqlite_store.sums, "_add_shares", held_up)
    event.listen(sqlite_store.engine, "commit", lambda _: commits.append(1))
    adding = []
    for client, share in shares.items():
        expected = sqlite_store.sums.check(signer(client), RUN, 1, share_id(share), len(share))
        adding.append(sqlite_store.sums.add(expected, BytesIO(share)))
        assert begun.wait(30)  # the first one alone, the others behind it
    free.set()
    for each in adding:
        each.result(30)
    assert len(commits) == 2
    clock.now += 100
    assert members(pull(sqlite_store), shares, size) == set(shares)


def test_a_share_counts_once_however_often_it_comes(store: Store, clock: Clock) -> None:
    size = sum_opened(store, max_uploads=2)
    shares = {name: share_for(name) for name in ("alice", "bob")}
    give(store, "alice", shares["alice"])
    before = content(store)
    give(store, "alice", shares["alice"])
    give(store, "alice", bytes(size.sum_bytes) + shares["alice"][size.sum_bytes :])  # another vector comes too late
    assert content(store) == before
    give(store, "bob", shares["bob"])
    give(store, "alice", shares["alice"])  # who is in hears so when the round is full, too, and when it is over
    clock.now += 100
    give(store, "alice", shares["alice"])
    assert members(pull(store), shares, size) == {"alice", "bob"}
    refused(store, RoundOver, lambda: give(store, "alice", shares["alice"]))  # whether it was in, nobody knows any more


def test_one_share_a_client_and_one_client_an_envelope(store: Store) -> None:
    size = sum_opened(store, max_uploads=2)
    give(store, "alice", share_for("alice"))
    refused(store, Conflict, lambda: give(store, "alice", share_for("alice2", by="alice")), "one in each round")
    alias = replace(signer("alice"), name="bob")  # no two tokens have one key; where it went from one to the other, this holds
    refused(store, Conflict, lambda: give(store, alias, share_for("alice")), "another client")
    refused(store, WrongLength, lambda: give(store, "bob", b"x" + share_for("bob")), f"exactly {size.upload_bytes} bytes")
    expected = store.sums.check(signer("bob"), RUN, 1, "0" * 64, size.upload_bytes)
    refused(store, Refusal, lambda: store.sums.add(expected, BytesIO(share_for("bob"))), "SHA-256")
    refused(store, Unknown, lambda: give(store, "bob", share_for("bob"), 2))
    give(store, "bob", share_for("bob"))
    refused(store, Conflict, lambda: give(store, "carol", share_for("carol")), "full")


def test_a_client_adds_in_its_own_name_alone(store: Store, clock: Clock) -> None:
    """Whatever is refused here is in no sum; what it would have spoilt is whole."""
    size = sum_opened(store, min_clients=1)
    alice, bob = share_for("alice"), share_for("bob")
    vector, sealed = alice[: size.sum_bytes], bob[-80:]
    another = sum_terms(agreement="1" * 64)
    forged = {
        "another one's envelope": (bob, "names node"),
        "another one's name on its own signature": (
            vector + bob[size.sum_bytes :][:8] + envelope_of(sealed, "alice", size)[8:],
            "names node",
        ),
        "its own name on another one's signature": (
            vector + alice[size.sum_bytes :][:8] + bob[size.sum_bytes :][8:],
            "not signed for this round",
        ),
        "its own signature on another one's seed": (alice[:-80] + sealed, "not signed for this round"),
        "an envelope of another round": (share_for("alice", number=2), "not signed for this round"),
        "an envelope of another agreement": (share_for("alice", another), "not signed for this round"),
    }
    for share, why in forged.values():
        refused(store, Forbidden, lambda share=share: give(store, "alice", share), why)  # type: ignore[misc]
    give(store, "alice", alice)
    clock.now += 100
    assert members(pull(store), {"alice": alice}, size) == {"alice"}


def test_a_token_without_a_signing_key_is_for_mixed_records_alone(store: Store) -> None:
    opened(store, 1)
    sum_opened(store, 2)
    put(store, "alice")
    keyless = signer("alice", signs=False)
    why = "has no signing key for sums: to add one, run ldpfl relay token renew alice --signing-key KEY"
    refused(store, Forbidden, lambda: give(store, keyless, share_for("alice", number=2), 2), why)


def test_what_was_released_stays_the_same_until_it_is_acknowledged(place: str, store: Store, clock: Clock) -> None:
    """An aggregator that could not open it, or died over it, gets it again, also of another relay; a late client changes nothing."""
    size = sum_opened(store)
    shares = {name: share_for(name) for name in ("alice", "bob")}
    for name, share in shares.items():
        give(store, name, share)
    clock.now += 100
    first = pull(store)
    store.close()
    clock.now += 10 * 24 * 3600
    later = Store(open_engine(place), clock=clock)
    later.tidy()
    refused(later, RoundOver, lambda: give(later, "carol", share_for("carol")))
    assert pull(later) == pull(later) == first
    assert members(first, shares, size) == {"alice", "bob"}
    later.acknowledge("aggregator", RUN, 1)
    refused(later, RoundOver, lambda: pull(later))
    later.close()


def test_a_round_is_of_one_kind_for_ever(store: Store, clock: Clock) -> None:
    sum_opened(store, 1)
    opened(store, 2)
    assert store.status("alice", RUN, 1).terms == sum_terms()
    refused(store, Conflict, lambda: opened(store, 1), "other terms")
    refused(store, Conflict, lambda: store.open_round("aggregator", RUN, 2, sum_terms()), "other terms")
    refused(store, Conflict, lambda: store.begin("alice", RUN, 1, upload_id("alice"), 640), "shares of a sum")
    refused(store, Conflict, lambda: store.begin("alice", RUN, 1, upload_id("alice"), sum_terms().upload_bytes), "shares of a sum")
    refused(store, Conflict, lambda: give(store, "alice", share_for("alice", number=2), 2), "sealed records")
    give(store, "alice", share_for("alice"))
    mine = ("alice", RUN, 1, share_id(share_for("alice")))
    refused(store, Conflict, lambda: store.progress(*mine), "shares of a sum")
    refused(store, Conflict, lambda: store.append(*mine, ENVELOPE_BYTES, b""), "shares of a sum")
    put(store, "alice", 2)
    put(store, "bob", 2)
    clock.now += 100
    assert sorted(pull(store, 2)) == sorted(blob("alice") + blob("bob"))


def test_nothing_is_released_before_the_deadline_or_of_too_few(store: Store, clock: Clock) -> None:
    size = sum_opened(store, min_clients=3)
    shares = {name: share_for(name) for name in ("alice", "bob", "carol", "dave")}
    give(store, "alice", shares["alice"])
    refused(store, TooEarly, lambda: pull(store), "open for")
    clock.now += 1000
    refused(store, TooEarly, lambda: pull(store), "waits for 3 clients")
    give(store, "bob", shares["bob"])
    for index in range(4):
        refused(store, TooEarly, lambda index=index: store.part("aggregator", RUN, 1, index))  # type: ignore[misc]
    assert store.status("aggregator", RUN, 1).state == "waiting"
    give(store, "carol", shares["carol"])
    refused(store, RoundOver, lambda: give(store, "dave", shares["dave"]))
    refused(store, Forbidden, lambda: pull(store, owner="another"))
    first = pull(store)
    assert members(first, shares, size) == {"alice", "bob", "carol"}
    assert pull(store) == first
    refused(store, RoundOver, lambda: give(store, "dave", shares["dave"]))
    assert pull(store) == first
    store.acknowledge("aggregator", RUN, 1)
    refused(store, RoundOver, lambda: pull(store))


def test_a_batch_that_comes_late_is_refused_by_the_transaction(store: Store, clock: Clock) -> None:
    """The check before the body says yes, the deadline passes while the body comes."""
    sum_opened(store, min_clients=1)
    give(store, "alice", share_for("alice"))
    share = share_for("bob")
    expected = store.sums.check(signer("bob"), RUN, 1, share_id(share), len(share))
    clock.now += 100
    refused(store, RoundOver, lambda: store.sums.add(expected, BytesIO(share)).result(30))
    pull(store)
    refused(store, RoundOver, lambda: store.sums.add(expected, BytesIO(share)).result(30))


def at_once(count: int, action: Callable[[int], object]) -> list[Exception | None]:
    """Do it ``count`` times at the same moment; return what each raised."""
    barrier = threading.Barrier(count)

    def one(index: int) -> Exception | None:
        barrier.wait()
        try:
            action(index)
        except Conflict as error:
            return error
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.thorough_except("sqlite-same envelope", "sqlite-other share", "sqlite-same share", "sqlite-too many")
@pytest.mark.parametrize("race", ["same share", "other share", "same envelope", "too many"])
def test_races_of_several_workers(store: Store, another: Callable[[], Store], clock: Clock, race: str) -> None:
    size = sum_opened(store, min_clients=1, max_uploads=3 if race == "too many" else 8)
    workers = [store, another()] * 4
    names = [f"c{index}" for index in range(8)]
    one_key = race != "too many"
    clients = [
        replace(signer("alice" if one_key else name), name="alice" if race in ("same share", "other share") else name) for name in names
    ]
    shares = {
        name: share_for("one" if race in ("same share", "same envelope") else name, by="alice" if one_key else name) for name in names
    }
    errors = at_once(8, lambda index: give(workers[index], clients[index], shares[f"c{index}"]))
    assert errors.count(None) == {"same share": 8, "other share": 1, "same envelope": 1, "too many": 3}[race]
    clock.now += 100
    assert len(members(pull(store), shares, size)) == (3 if race == "too many" else 1)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_race_leaves_no_client_s_name_in_the_log_of_the_database_server(clock: Clock) -> None:
    """PostgreSQL logs the values of a row that violates a constraint."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    server = Postgres(programs, logging_collector="on", log_directory="log")
    try:
        store = Store(open_engine(server.new_store()), clock=clock)
        sum_opened(store, min_clients=1)
        with ThreadPoolExecutor(1) as pool:
            with store.engine.begin() as connection:
                connection.execute(insert(uploads).values(round_id=select(rounds.c.id).scalar_subquery(), client="alice", upload_id="0"))
                late = pool.submit(give, store, signer("alice"), share_for("alice"))
                while not connection.scalar(text("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")):
                    assert not late.done()
            with pytest.raises(Conflict, match="another upload"):
                late.result()
        store.close()
        log = "".join(file.read_text() for file in (server.folder / "data" / "log").iterdir())
    finally:
        server.stop()
    assert "ready to accept connections" in log
    assert "alice" not in log


def beside(store: Store, places: int, action: Callable[[], None]) -> None:
    """Do it while other relays hold the first so many partial sums of the first round."""
    with store.engine.begin() as connection:
        for place in range(places):
            assert try_lock(connection, f"partial sum {place} of round 1 of {RUN}")
        action()


@pytest.fixture
def postgres_store(postgres: Postgres, clock: Clock) -> Iterator[Store]:
    opened = Store(open_engine(postgres.new_store()), clock=clock)
    yield opened
    opened.close()


@pytest.mark.thorough
def test_relays_that_add_at_once_have_partial_sums_and_the_release_adds_them_up(
    postgres_store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ldpfl.relay.protocol.SUM_PART_BYTES", 64)
    size = sum_opened(postgres_store, dimension=40)  # in three parts
    shares = {f"c{index}": share_for(f"c{index}", size) for index in range(6)}
    for index, (client, share) in enumerate(shares.items()):
        beside(postgres_store, index % 3, lambda client=client, share=share: give(postgres_store, client, share))  # type: ignore[misc]
    assert [row[1] for row in by_table(postgres_store)[parts]] == [*range(9)]
    assert postgres_store.status("aggregator", RUN, 1).uploads == 6
    clock.now += 100
    assert members(pull(postgres_store), shares, size) == set(shares)
    assert [row[1] for row in by_table(postgres_store)[parts]] == [*range(4)]  # three of the sum, one of envelopes
    postgres_store.acknowledge("aggregator", RUN, 1)
    assert by_table(postgres_store)[parts] == []


def test_a_relay_that_finds_all_partial_sums_held_waits_for_one(postgres_store: Store, clock: Clock) -> None:
    size = sum_opened(postgres_store)
    shares = {name: share_for(name) for name in ("alice", "bob")}
    for name, share in shares.items():
        beside(postgres_store, 7, lambda name=name, share=share: give(postgres_store, name, share))  # type: ignore[misc]
    assert [row[1] for row in by_table(postgres_store)[parts]] == [7]
    clock.now += 100
    assert members(pull(postgres_store), shares, size) == {"alice", "bob"}


@pytest.mark.slow
@pytest.mark.parametrize("last", range(1, 22))
@pytest.mark.thorough_except("12")
def test_a_relay_killed_at_any_statement_of_a_release_leaves_the_partial_sums_or_their_sum(postgres: Postgres, last: int) -> None:
    place = postgres.new_store()
    store = Store(open_engine(place))
    size = sum_terms(dimension=1000, min_clients=3, closes_in_s=0.0)
    store.open_round("aggregator", RUN, 1, size)
    shares = {name: share_for(name, size) for name in ("alice", "bob", "carol")}
    for index, (name, share) in enumerate(shares.items()):
        beside(store, index, lambda name=name, share=share: give(store, name, share))  # type: ignore[misc]
    with process(_release_and_die, place, last) as killed:
        killed.join(60)
        ended = killed.exitcode
    assert ended in (-9, 0)
    assert len(by_table(store)[parts]) == (2 if by_table(store)[uploads] == [] else 3)
    assert members(pull(store), shares, size) == set(shares)
    store.close()


def test_workers_that_release_at_once_release_once(store: Store, another: Callable[[], Store], clock: Clock) -> None:
    size = sum_opened(store)
    shares = {name: share_for(name) for name in ("alice", "bob", "carol")}
    for name, share in shares.items():
        give(store, name, share)
    clock.now += 100
    workers = [store, another(), another()]
    with ThreadPoolExecutor(3) as pool:
        (released,) = set(pool.map(pull, workers))
    assert members(released, shares, size) == set(shares)


def test_envelopes_come_in_an_order_that_says_nothing(store: Store, clock: Clock) -> None:
    """Where the first one of 40 is put, in 40 rounds: never in order of arrival but by chance below 1e-60."""
    places = []
    for number in range(1, 6):
        size = sum_opened(store, number, max_uploads=40)
        shares = [share_for(f"c{index}", size, number) for index in range(40)]
        for index, share in enumerate(shares):
            give(store, f"c{index}", share, number)
        clock.now += 100
        data = pull(store, number)[size.sum_bytes :]
        envelopes = [data[start : start + ENVELOPE_BYTES] for start in range(0, len(data), ENVELOPE_BYTES)]
        assert envelopes != [share[-ENVELOPE_BYTES:] for share in shares]
        places.append(tuple(envelopes.index(share[-ENVELOPE_BYTES:]) for share in shares))
    assert len(set(places)) == 5


def test_the_store_keeps_the_sum_and_envelopes_and_never_a_vector(store: Store, clock: Clock) -> None:
    sum_opened(store, dimension=1000)
    for index in range(6):
        give(store, f"client-{index}", share_for(f"client-{index}", sum_terms(dimension=1000)))
    tables = by_table(store)
    assert [len(row[-1]) for row in tables[parts]] == [4000]
    assert [len(row[-1]) for row in tables[blocks]] == [ENVELOPE_BYTES] * 6
    clock.now += 100
    pull(store)
    tables = by_table(store)
    assert tables[uploads] == tables[blocks] == []
    assert "client-" not in repr(tables)
    store.acknowledge("aggregator", RUN, 1)
    assert by_table(store)[parts] == []


def test_a_cancelled_sum_leaves_nothing(store: Store) -> None:
    sum_opened(store)
    give(store, "alice", share_for("alice"))
    (listed,) = list_rounds(store)
    assert (listed.uploads, listed.incomplete, listed.upload_bytes, listed.state) == (1, 0, 40 + ENVELOPE_BYTES, "open")
    assert cancel_round(store, RUN, 1)
    tables = by_table(store)
    assert tables[parts] == tables[uploads] == tables[blocks] == []
    assert list_rounds(store) == []
    refused(store, RoundOver, lambda: give(store, "bob", share_for("bob")))


def test_no_file_holds_a_vector_a_seed_or_later_a_name(sqlite_store: Store, clock: Clock, tmp_path: Path) -> None:
    """Two federations that differ in their points leave files in which neither points nor seeds nor masks can be found."""
    place, aggregator = tmp_path / "relay.db", X25519PrivateKey.generate()
    for number, value in ((1, 0x01020304), (2, 0x05060708)):
        size = sum_opened(sqlite_store, number, dimension=2000)
        points, binding, secrets, vectors = np.full(2000, value), SumBinding(RUN, number, bytes(32), 2000, 32), [], []
        for index in range(4):
            seed = new_seed()
            secrets += [seed, shard(np.zeros(2000, np.int64), seed, 32)[:16], points[:4].astype("<u4").tobytes()]
            vectors.append(shard(points, seed, 32))
            node = signing_key(f"client-{index}")
            give(sqlite_store, f"client-{index}", vectors[-1] + seal_seed(seed, aggregator.public_key(), node, binding), number)
        files = on_disk(place)
        assert b"client-3" in files
        for index in range(0, size.sum_bytes, 400):
            assert not any(vector[index : index + 16] in files for vector in vectors)
        assert not any(secret in files for secret in secrets)
        clock.now += 100
        released = pull(sqlite_store, number)
        files = on_disk(place)
        assert released[:16] in files
        assert not any(secret in files for secret in (*secrets, b"client-"))
        sqlite_store.acknowledge("aggregator", RUN, number)
        assert not any(part in on_disk(place) for part in (released[:16], released[-16:]))


def test_a_full_disk_refuses_and_changes_nothing(sqlite_store: Store, clock: Clock) -> None:
    size = sum_opened(sqlite_store)
    give(sqlite_store, "alice", share_for("alice"))
    with sqlite_store.engine.connect() as connection:
        pages = connection.scalar(text("PRAGMA page_count"))
        connection.execute(text(f"PRAGMA max_page_count = {pages}"))
    large = sum_terms(dimension=10_000)
    sqlite_store.open_round("aggregator", RUN, 2, large)
    refused(sqlite_store, StoreFull, lambda: give(sqlite_store, "alice", share_for("alice", large, 2), 2))
    with sqlite_store.engine.connect() as connection:
        connection.execute(text("PRAGMA max_page_count = 1000000"))
    give(sqlite_store, "alice", share_for("alice", large, 2), 2)
    give(sqlite_store, "bob", share_for("bob"))
    clock.now += 100
    assert members(pull(sqlite_store), {name: share_for(name) for name in ("alice", "bob")}, size) == {"alice", "bob"}


def test_a_batch_that_fails_is_answered_and_the_next_one_is_taken(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum_opened(store, min_clients=1)

    def broken(*_: object) -> int:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr("ldpfl.relay.sum_store._add_up", broken)
        refused(store, StoreUnavailable, lambda: give(store, "alice", share_for("alice")))
    give(store, "alice", share_for("alice"))
    clock.now += 100
    assert members(pull(store), {"alice": share_for("alice")}, size) == {"alice"}


def test_outdated_sums_are_freed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that PostgreSQL keeps long values in stays within a few sums, however many shares came; so does SQLite's."""
    monkeypatch.setattr("ldpfl.relay.sum_store._VACUUMED_BYTES", 800_000)
    size = sum_opened(store, dimension=100_000, max_uploads=60)

    def used() -> int:
        if is_sqlite(store.engine):
            return Path(str(store.engine.url.database)).stat().st_size
        with store.engine.connect() as connection:
            return int(connection.scalar(text(f"SELECT pg_catalog.pg_total_relation_size('{SCHEMA}.relay_parts')")))

    sizes = []
    for index in range(40):
        give(store, f"c{index}", share_for(f"c{index}", size))
        sizes.append(used())
    assert max(sizes) < 8 * size.sum_bytes


@pytest.mark.slow
@pytest.mark.parametrize("last", range(1, 14))
@pytest.mark.thorough_except("sqlite-9", "sqlite-10")
def test_a_relay_killed_at_any_statement_of_a_batch_has_all_of_it_or_nothing(place: str, last: int) -> None:
    store = Store(open_engine(place))
    size = sum_terms(min_clients=1, closes_in_s=0.0, dimension=1000)
    shares = {name: share_for(name, size) for name in ("alice", "bob", "carol")}
    store.open_round("aggregator", RUN, 1, size)
    store.open_round("aggregator", RUN, 2, size)
    store.close()
    with process(_fold_and_die, place, shares, last) as killed:
        killed.join(60)
        ended = killed.exitcode
    assert ended in (-9, 0)
    store = Store(open_engine(place))
    count = store.status("aggregator", RUN, 1).uploads or 0
    assert count in ((0, 2) if ended else (2,))
    if not count:
        give(store, "alice", shares["alice"])
    assert members(pull(store), shares, size) == ({"alice", "bob"} if count else {"alice"})
    store.close()


def _release_and_die(place: str, last: int) -> None:
    """Release a round, and die before the ``last``-th statement or commit of it."""
    store = Store(open_engine(place))
    die_before(last, store)
    store.part("aggregator", RUN, 1, 0)
    os._exit(0)


def _fold_and_die(place: str, shares: dict[str, bytes], last: int) -> None:
    """Add two shares in one batch, and die before the ``last``-th statement or commit of it."""
    store = Store(open_engine(place))
    futures, held = [], threading.Event()
    store.sums._thread.submit(held.wait)  # so that both are there when the batch is taken
    for name in ("alice", "bob"):
        expected = store.sums.check(signer(name), RUN, 1, share_id(shares[name]), len(shares[name]))
        futures.append(store.sums.add(expected, BytesIO(shares[name])))
    die_before(last, store)
    held.set()
    for future in futures:
        future.result(30)
    os._exit(0)
