"""The file that a client's lifetime budget is kept in, and the checks that make it reliable.

The file is an SQLite database with a rollback journal. A write-ahead log would let readers and a writer work at once, which is not
needed here. It would also keep the last charges in a second file, so that a copy of the main file alone would under-count.
"""

from __future__ import annotations

import hashlib
import operator
import os
import sqlite3
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from ldpfl.errors import ConfigError, Declined, NotSetUp, shown
from ldpfl.privacy.accountants.adaptive import filter_order, filtered_epsilon
from ldpfl.privacy.accounting import DELTA
from ldpfl.privacy.events import KIND_NAMES, KINDS, BinaryRelease, GaussianRelease, PureRelease, Release, UnprotectedRelease, for_one_record
from ldpfl.privacy.guarantee import Protected, least_protected
from ldpfl.privacy.policy import Limit, Request
from ldpfl.util.file_owners import require_own

VERSION = 3
_APPLICATION = 0x4C445042  # "LDPB"
MAX_ROUNDS_LEFT = 10**9
"""Largest number of remaining rounds that is reported."""

MOVED = "this budget was moved to"
"""Beginning of the refusal reason of a budget that was moved to another file."""

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for another process that is charging."""

LOST_RUN = "(lost)"
"""Run of charges that :func:`charge_lost` makes. A server cannot give its run this name."""

MAX_LOST_REPORTS = 10**5
"""Largest number of lost reports that are charged at once."""

_NEW = 0
"""Number of a release that is not in the file. SQLite numbers rows from 1."""

# ``digest``, or ``sealed`` of a charge, is the SHA-256 of the row's other values. A release's ``count`` is the number of its charges.
_TABLES = (
    "CREATE TABLE limits (id INTEGER PRIMARY KEY, at TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL, digest BLOB NOT NULL)",
    "CREATE TABLE releases (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, mechanism TEXT NOT NULL, parameter REAL NOT NULL, "
    "units INTEGER NOT NULL, unit TEXT NOT NULL, author TEXT NOT NULL, count INTEGER NOT NULL, digest BLOB NOT NULL UNIQUE)",
    "CREATE TABLE charges (id INTEGER PRIMARY KEY, at TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL, "
    "release INTEGER NOT NULL REFERENCES releases, cohort INTEGER NOT NULL, transport TEXT NOT NULL, "
    "linked INTEGER NOT NULL, person TEXT NOT NULL, node TEXT NOT NULL, sealed BLOB UNIQUE)",
    "CREATE INDEX charges_by_release ON charges (release)",
    "CREATE INDEX charges_by_round ON charges (run, round)",
    "CREATE TABLE refusals (id INTEGER PRIMARY KEY CHECK (id = 1), at TEXT NOT NULL, reason TEXT NOT NULL, times INTEGER NOT NULL)",
)

_CHARGED = "at, run, round, release, cohort, transport, linked, person, node"  # a charge, apart from its number and digest
# The largest number of reports that were charged for one round over the relay.
_TOGETHER = (
    "SELECT coalesce(max(reports), 1) FROM (SELECT count(*) AS reports FROM charges WHERE transport <> 'direct' GROUP BY run, round)"
)
_PERSON_COLUMNS = "SELECT DISTINCT person FROM charges WHERE release IN (SELECT id FROM releases WHERE unit = 'person')"


@dataclass(frozen=True)
class Charged:
    """A charge as the file holds it.

    Attributes:
        at: the time (UTC) by the client's clock. It is only displayed: no decision depends on it.
        person: the column that names a row's person; empty unless the release protects persons.
        node: name of the node that was charged, see :class:`ldpfl.privacy.budget.Budget`.
    """

    number: int
    at: str
    run: str
    round: int
    release: Release
    cohort: int
    transport: str
    linked: int
    person: str
    node: str


@dataclass(frozen=True)
class Sent:
    """``count`` equal reports that left over the same ``transport``, among ``cohort`` clients, with ``linked`` units in one message.

    A unit is a part of a report that is mixed on its own, such as one bit. ``together`` is the number of reports that the file has for one
    round over the relay: above 1 if several nodes share the file.
    """

    release: Release
    cohort: int
    transport: str
    linked: int
    count: int
    together: int = 1


@dataclass(frozen=True)
class Granted:
    """A budget that an operator set, and when (UTC)."""

    at: str
    limit: Limit


@dataclass(frozen=True)
class Refusals:
    """The last refusal, and the number of refusals (``times``)."""

    at: str
    reason: str
    times: int


@dataclass(frozen=True)
class Books:
    """The contents of a budget file.

    Attributes:
        granted: the budgets that were set; the last one is in force.
        counts: how often each distinct release was charged, in the order of their first charge.
        refusals: the last refusal; None if nothing was refused.
        person_columns: the columns that named persons in the charged releases that protect persons.
        together: the largest number of reports that were charged for one round over the relay. At least as many nodes share the file.
    """

    granted: tuple[Granted, ...]
    counts: Mapping[Release, int]
    refusals: Refusals | None = None
    person_columns: frozenset[str] = frozenset()
    together: int = 1

    @property
    def limit(self) -> Limit:
        """The budget in force."""
        return self.granted[-1].limit

    @property
    def charges(self) -> int:
        """Number of releases that were charged."""
        return sum(self.counts.values())

    @property
    def protected(self) -> Protected:
        """The largest unit that every charged release protects: the client, a person or a record."""
        return least_protected(release.unit for release in self.counts)

    @property
    def order(self) -> float:
        """Rényi order of the privacy filter, which the first listed budget with a delta above 0 fixes.

        By the filter's proof it may not change once a report was charged.
        """
        orders = (filter_order(grant.limit.epsilon, grant.limit.delta) for grant in self.granted)
        return next((order for order in orders if order < inf), inf)

    def spent(self, delta: float, new: Release | None = None, *, order: float | None = None, times: int = 1) -> float:
        """Return epsilon at ``delta`` of all charged releases, and of ``times`` more releases ``new`` if one is given.

        The privacy filter of :mod:`ldpfl.privacy.accountants.adaptive` computes it, so later releases may depend on earlier ones. Without
        ``order``, the budget's own order is used.
        """
        return filtered_epsilon(self._counts_with(new, times).items(), self.order if order is None else order, delta)

    def rounds_left(self, release: Release) -> int:
        """Return how many more rounds with ``release`` fit into the budget, at most 1e9. Every node that shares the file joins each."""
        return most_that_fit(lambda rounds: self.spent(self.limit.delta, release, times=rounds * self.together) <= self.limit.epsilon)

    def _counts_with(self, new: Release | None, times: int) -> dict[Release, int]:
        """Return how often each release was charged, if ``new`` were charged ``times`` more times."""
        counts = dict(self.counts)
        if new is not None:
            counts[new] = counts.get(new, 0) + times
        return counts


def most_that_fit(fits: Callable[[int], bool]) -> int:
    """Return the largest number for which ``fits`` holds, at most 1e9; 0 if it does not hold for 1.

    If ``fits`` holds for a number, it must hold for all smaller numbers.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MAX_ROUNDS_LEFT and fits(high):  # double until the number does not fit, then bisect between the last two
        low, high = high, 2 * high
    numbers = range(min(high, MAX_ROUNDS_LEFT) + 1)
    return bisect_left(numbers, True, lo=low, key=lambda number: not fits(number)) - 1  # the one before the first that does not fit


def read_books(path: Path, protects: Protected = "client") -> Books:
    """Read the budget file at ``path``, as :func:`read_open_books` does.

    Raises:
        Declined: the file is missing or unreliable.
    """
    with budget_transaction(path) as connection:
        return read_open_books(connection, protects)


def read_charges(path: Path) -> tuple[Charged, ...]:
    """Return every charge, in order. Raises the errors of :func:`read_books`."""
    with budget_transaction(path) as connection:
        releases = {release_id: release for release_id, (release, _count) in _read_releases(connection).items()}
        rows = connection.execute(f"SELECT id, {_CHARGED} FROM charges ORDER BY id").fetchall()
    return tuple(
        Charged(number, at, run, round_, releases[release_id], cohort, transport, linked, person, node)
        for number, at, run, round_, release_id, cohort, transport, linked, person, node in rows
    )


def set_limit(path: Path, epsilon: float, delta: float | None = None) -> Books:
    """Set the budget in the file ``path``, and create the file if it is missing.

    Earlier budgets stay listed once a report was charged, because the first of them decides how reports are counted.

    Without ``delta``, an existing file keeps its delta, and a new file gets :data:`~ldpfl.privacy.accounting.DELTA`.

    Raises:
        ConfigError: epsilon or delta is out of range, or the file cannot be created.
        Declined: the file is unreliable.
    """
    limit = Limit(epsilon, DELTA if delta is None else delta)
    if not os.path.lexists(path):
        return _create(path, limit)
    with budget_transaction(path, write=True) as connection:
        books = read_open_books(connection)
        if delta is None:
            limit = Limit(epsilon, books.limit.delta)
        if not books.charges:
            connection.execute("DELETE FROM limits")
        _store_limit(connection, limit)
        return read_open_books(connection)


def _create(path: Path, limit: Limit) -> Books:
    """Create a budget file that only its owner can read. If this is interrupted, an empty file stays, which is no valid budget file."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise ConfigError(f"budget file {path} cannot be made: {error.strerror}") from None
    with _sqlite_transaction(path, write=True, patience=LOCK_TIMEOUT_S) as connection:
        for statement in (*_TABLES, f"PRAGMA application_id = {_APPLICATION}", f"PRAGMA user_version = {VERSION}"):
            connection.execute(statement)
        _store_limit(connection, limit)
        return read_open_books(connection)


@contextmanager
def budget_transaction(path: Path, *, write: bool = False, patience: float = LOCK_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
    """Check the budget file and yield a transaction on it. May raise Declined.

    It is committed durably if the block ends without an error, unless the block itself has rolled it back.
    """
    with _sqlite_transaction(_private_path(path), write=write, patience=patience) as connection:
        _check_sound(connection, path)
        yield connection


@contextmanager
def _sqlite_transaction(path: Path, *, write: bool, patience: float) -> Iterator[sqlite3.Connection]:
    """Yield a transaction on an SQLite file. Wait up to ``patience`` seconds for its lock. Raise SQLite's errors as :class:`Declined`."""
    try:
        # mode=rw does not create a missing file: a new file would forget what was spent.
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=patience, isolation_level=None)
        ) as connection:
            # EXTRA also syncs the folder after the journal is deleted. Otherwise a power cut could restore the journal and undo the charge.
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            try:
                yield connection
                if connection.in_transaction:
                    connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:  # a damaged schema may not be text
        raise Declined(f"budget file {path} cannot be used, so nothing leaves this client: {' '.join(str(error).split())}") from None


def _private_path(path: Path) -> Path:
    """Return the resolved path of the budget file, after checking that no other user can read or change it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NotSetUp(f"there is no budget file {path}: make it with ldpfl budget set; without one nothing leaves this client") from None
    except OSError as error:
        raise Declined(f"budget file {path} cannot be read, so nothing leaves this client: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Declined(f"budget file {path} is not a regular file: nothing leaves this client")
    # SQLite names its journal after the name by which the file was opened. If a charge is interrupted, and the next ones use another name,
    # the journal is rolled back when its name is used again, and those charges are lost.
    if status.st_nlink > 1:
        raise Declined(
            f"budget file {path} has {status.st_nlink} names (hard links), expected 1: remove the other names; find / -samefile {path} "
            "lists them. Until then nothing leaves this client"
        )
    return require_own(path, "nothing leaves this client: budget file", Declined, secret=True, alone=True)


def _check_sound(connection: sqlite3.Connection, path: Path) -> None:
    """Raise :class:`Declined` unless the file is an undamaged budget file of this version, with a rollback journal."""
    if _first_value(connection, "PRAGMA application_id") != _APPLICATION:
        raise Declined(f"{path} is not a budget file, or making it was interrupted: nothing leaves this client; make one at a new path")
    version = _first_value(connection, "PRAGMA user_version")
    if version != VERSION:
        raise Declined(
            f"budget file {path} has version {version}, expected {VERSION}: nothing leaves this client; use the ldpfl that made it"
        )
    # A write-ahead log would keep the last charges in a second file: a copy of the main file alone would forget them.
    if (mode := _first_value(connection, "PRAGMA journal_mode")) != "delete":
        raise Declined(
            f"budget file {path} has SQLite's journal mode {mode!r}, expected 'delete', so nothing leaves this client: "
            "set it back by PRAGMA journal_mode = DELETE"
        )
    tables = tuple(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"))
    if tables != _TABLES or _first_value(connection, "PRAGMA quick_check(1)") != "ok" or not _is_consistent(connection):
        raise Declined(
            f"budget file {path} is damaged: nothing leaves this client; restore a backup of it and add the charges since then with "
            "ldpfl budget charge-lost, or make a new file with the epsilon that is left"
        )


def _is_consistent(connection: sqlite3.Connection) -> bool:
    """Whether each release's count is its number of charges, and each row matches its digest. SQLite itself keeps no checksums."""
    releases = connection.execute("SELECT id, count, digest, kind, mechanism, parameter, units, unit, author FROM releases").fetchall()
    limits = connection.execute("SELECT digest, epsilon, delta FROM limits").fetchall()
    charge_counts = dict(connection.execute("SELECT release, count(*) FROM charges GROUP BY release").fetchall())
    charges = connection.execute(f"SELECT sealed, id, {_CHARGED} FROM charges").fetchall()
    return (
        bool(limits)
        and {release_id: count for release_id, count, *_ in releases} == charge_counts
        and all(digest == _digest(*figures) for _, _, digest, *figures in releases)
        and all(digest == _digest(*figures) for digest, *figures in limits)
        and all(digest == _digest(*figures) for digest, *figures in charges)
    )


def _digest(*figures: Any) -> bytes:
    """Return the SHA-256 of a row's values: it is stored beside them, so that damage is found."""
    return hashlib.sha256(repr(figures).encode()).digest()


def _first_value(connection: sqlite3.Connection, query: str) -> Any:
    """Return the first column of the first row that ``query`` finds; None if it finds no row."""
    row = connection.execute(query).fetchone()
    return None if row is None else row[0]


def read_open_books(connection: sqlite3.Connection, protects: Protected = "client") -> Books:
    """Return the contents of an open budget file.

    ``protects`` is the unit that the policy protects. For a record, each release is counted as what it costs one record, see
    :func:`ldpfl.privacy.events.for_one_record`: otherwise earlier rounds that protected persons would count too little.
    """
    limits = connection.execute("SELECT at, epsilon, delta FROM limits ORDER BY id").fetchall()
    refusal = connection.execute("SELECT at, reason, times FROM refusals").fetchone()
    return Books(
        granted=tuple(Granted(at, Limit(epsilon, delta)) for at, epsilon, delta in limits),
        counts=_counts(_read_releases(connection, protects).values()),
        refusals=None if refusal is None else Refusals(*refusal),
        person_columns=frozenset(column for (column,) in connection.execute(_PERSON_COLUMNS)),
        together=int(_first_value(connection, _TOGETHER)),
    )


def _read_releases(connection: sqlite3.Connection, protects: Protected = "client") -> dict[int, tuple[Release, int]]:
    """Return each stored release and the number of its charges, by the row's id.

    If ``protects`` is a record, releases are returned as :func:`for_one_record` counts them. Two of them may then be equal.
    """
    rows = connection.execute("SELECT id, count, kind, mechanism, parameter, units, unit, author FROM releases ORDER BY id")
    as_counted = for_one_record if protects == "record" else lambda release: release
    return {
        release_id: (as_counted(_release_from_row(kind, mechanism, parameter, number_of_units, unit, author)), count)
        for release_id, count, kind, mechanism, parameter, number_of_units, unit, author in rows
    }


def _counts(releases: Iterable[tuple[Release, int]]) -> dict[Release, int]:
    """Return how often each distinct release was charged."""
    counts: dict[Release, int] = {}
    for release, count in releases:
        counts[release] = counts.get(release, 0) + count
    return counts


def _release_from_row(kind: str, mechanism: str, parameter: float, number_of_units: int, unit: Any, author: str) -> Release:
    """Return the release of a stored row. ``kind`` is a key of ``KINDS``, ``parameter`` the epsilon or mu, ``unit`` what one unit is."""
    if kind == "unprotected":
        return UnprotectedRelease(mechanism, "left without protection", number_of_units, unit, author=author)
    release_class: Callable[..., Release] = KINDS[kind]
    return release_class(mechanism, parameter, number_of_units, unit, author=author)


def _row_from_release(release: Release) -> tuple[str, str, float, int, str, str]:
    """Return kind, mechanism, parameter, units, unit and author of ``release``: the columns in which it is stored."""
    match release:
        case BinaryRelease(epsilon=parameter) | PureRelease(epsilon=parameter) | GaussianRelease(mu=parameter):
            return KIND_NAMES[type(release)], release.mechanism, float(parameter), int(release.units), release.unit, release.author
    return "unprotected", release.mechanism, inf, int(release.units), release.unit, release.author


def as_stored(release: Release) -> Release:
    """Return ``release`` with only the fields that the file stores. A new release then equals a stored one that has the same cost."""
    return _release_from_row(*_row_from_release(release))


def read_sent_reports(connection: sqlite3.Connection, protects: Protected, new: Request | None = None, times: int = 1) -> list[Sent]:
    """Return the charged reports, and ``times`` reports of ``new``, in groups of equal :class:`Sent` reports.

    Charged releases are counted for the unit that the policy ``protects``, as in :func:`read_open_books`.
    """
    releases = {release_id: release for release_id, (release, _count) in _read_releases(connection, protects).items()}
    rows = connection.execute("SELECT run, round, release, cohort, transport, linked FROM charges ORDER BY id").fetchall()
    if new is not None:
        releases[_NEW] = as_stored(new.release)
        rows += [(new.run, new.round, _NEW, new.cohort, new.transport, new.linked)] * times
    # Number of reports in each round over the relay. Direct reports are not mixed, so each counts by itself.
    together_in = Counter((run, round_) for run, round_, _, _, transport, _ in rows if transport != "direct")
    groups = Counter(
        (release_id, cohort, transport, linked, 1 if transport == "direct" else together_in[run, round_])
        for run, round_, release_id, cohort, transport, linked in rows
    )
    return [
        Sent(releases[release_id], cohort, transport, linked, count, together)
        for (release_id, cohort, transport, linked, together), count in groups.items()
    ]


def nodes_charged(connection: sqlite3.Connection, run: str, round_: int, *, over_relay: bool = True) -> list[str]:
    """Return the node of each charge for this round: for reports over the relay, or else for direct ones. Not all need have been sent."""
    query = "SELECT node FROM charges WHERE (transport <> 'direct') = ? AND run = ? AND round = ?"
    return [node for (node,) in connection.execute(query, (over_relay, run, round_))]


def add_charge(connection: sqlite3.Connection, request: Request, release: Release, *, person: str = "", node: str = "") -> int:
    """Store one charge of ``release`` for ``request``, and return the charge's number.

    ``person`` is the column that names persons, stored only if the release protects persons. ``node`` is the name of the charged node.
    """
    figures = _row_from_release(release)
    # A release that was charged before has the same digest: then only its count grows.
    connection.execute(
        "INSERT INTO releases (kind, mechanism, parameter, units, unit, author, count, digest) VALUES (?, ?, ?, ?, ?, ?, 1, ?) "
        "ON CONFLICT (digest) DO UPDATE SET count = count + 1",
        (*figures, _digest(*figures)),
    )
    (release_id,) = connection.execute("SELECT id FROM releases WHERE digest = ?", (_digest(*figures),)).fetchone()
    column = person if release.unit == "person" else ""
    return _insert_charge(
        connection, request.run, request.round, release_id, request.cohort, request.transport, request.linked, column, node
    )


def _insert_charge(connection: sqlite3.Connection, *columns: Any) -> int:
    """Insert a charge made now, and return its number. ``columns`` are the values of ``_CHARGED`` that follow the time."""
    number = int(_first_value(connection, "SELECT coalesce(max(id), 0) + 1 FROM charges"))
    charge = (number, _now(), *columns)
    places = ", ".join("?" * (len(charge) + 1))
    connection.execute(f"INSERT INTO charges (id, {_CHARGED}, sealed) VALUES ({places})", (*charge, _digest(*charge)))
    return number


def charge_lost(path: Path, rounds: int, nodes: int, like: int | None = None) -> Books:
    """Charge ``rounds`` that this file lacks, because it is a backup, and the newer file that had counted them is lost.

    In each round, each of ``nodes`` is charged one report, at the cost of the existing charge ``like``. All bounds then count them: the
    file's epsilon, and the policy's epsilons and rounds.

    Args:
        nodes: number of nodes that share the file. If an earlier round in the file had more nodes, that number is used: reports of the
            same round cost more together.
        like: number of the charge whose cost is copied; by default the last one.

    Raises:
        ConfigError: ``rounds`` or ``nodes`` is out of range, or the file has no such charge.
        Declined: the file is unreliable.
    """
    try:  # SQLite would store NumPy's integers as bytes
        rounds, nodes = operator.index(rounds), operator.index(nodes)
        like = None if like is None else operator.index(like)
    except TypeError:
        got = ", ".join(map(shown, (rounds, nodes, like)))
        raise ConfigError(f"the lost rounds, the nodes and the number of a charge must be whole numbers, got {got}") from None
    if min(rounds, nodes) < 1 or rounds * nodes > MAX_LOST_REPORTS:
        raise ConfigError(
            f"lost rounds and nodes must be 1 at least, and {MAX_LOST_REPORTS:,} at most when multiplied, got {rounds:,} and {nodes:,}"
        )
    with budget_transaction(path, write=True) as connection:
        query = f"SELECT {_CHARGED} FROM charges WHERE id = coalesce(?, (SELECT max(id) FROM charges WHERE run <> ?))"
        charge = connection.execute(query, (like, LOST_RUN)).fetchone()
        if charge is None:
            which = "no charge" if like is None else f"no charge with the number {like}"
            raise ConfigError(
                f"{path} has {which} by which the lost reports could be charged: give the number of a similar charge from the list that "
                "ldpfl budget export prints. If no charge is similar, set the budget to epsilon 0, so that nothing leaves any more"
            )
        _at, _run, _round, release_id, cohort, transport, linked, person, node = charge
        together = max(nodes, read_open_books(connection).together)
        reports = rounds * together
        # Continue after the rounds of earlier calls: a round number that is used twice would count as one round of more nodes.
        last_round = int(connection.execute("SELECT coalesce(max(round), 0) FROM charges WHERE run = ?", (LOST_RUN,)).fetchone()[0])
        connection.execute("UPDATE releases SET count = count + ? WHERE id = ?", (reports, release_id))
        for index in range(reports):
            round_number = last_round + 1 + index // together  # each round has ``together`` reports
            _insert_charge(connection, LOST_RUN, round_number, release_id, cohort, transport, linked, person, node)
        return read_open_books(connection)


def note_refusal(connection: sqlite3.Connection, reason: str) -> None:
    """Count a refusal, and store ``reason`` as the last one.

    The reason of a budget that was moved, which begins with :data:`MOVED`, is never replaced: it names the new file.
    """
    connection.execute(
        "INSERT INTO refusals VALUES (1, ?, ?, 1) ON CONFLICT (id) DO UPDATE SET at = excluded.at, times = times + 1, "
        "reason = iif(instr(reason, ?) = 1, reason, excluded.reason)",
        (_now(), reason, MOVED),
    )


def close_for_good(connection: sqlite3.Connection, why: str) -> None:
    """Set the budget to 0 and note ``why``. This file then allows no report any more."""
    _store_limit(connection, Limit(0.0, read_open_books(connection).limit.delta))
    note_refusal(connection, why)


def _store_limit(connection: sqlite3.Connection, limit: Limit) -> None:
    """Store ``limit`` as the budget in force. Earlier budgets stay in the file."""
    figures = (float(limit.epsilon), float(limit.delta))
    connection.execute("INSERT INTO limits (at, epsilon, delta, digest) VALUES (?, ?, ?, ?)", (_now(), *figures, _digest(*figures)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
