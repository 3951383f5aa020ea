"""The lifetime budget counts every report that leaves, whatever happens to the process, the file or the clock."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from math import exp, inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from full_disk import files_up_to
from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import BudgetExhausted, ConfigError, Declined, Exhausted
from ldpfl.mechanisms import Mechanism
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, Release, RoundEvent, budget_file
from ldpfl.privacy.accountants.adaptive import filter_order, filtered_epsilon, hidden_epsilon, summed_epsilon
from ldpfl.privacy.accounting import account
from ldpfl.privacy.authors import released
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import charge_lost, most_that_fit, read_books, read_charges, set_limit
from ldpfl.privacy.policy import Limit, Policy, Request

RANGES = LayerRanges(center=0.0, radius=0.1, sizes=(6, 4))
DUCHI, NOISE, NONE = mechanisms.create("duchi", epsilon=0.5), mechanisms.create("full-dp", epsilon=0.5), mechanisms.create("none")
KEY = bytes(range(32))
POLICY = Policy(
    mechanisms=("duchi", "full-dp"),
    epsilon_per_unit=2.0,
    epsilon_per_round=100.0,
    lifetime_epsilon=1e6,
    rounds=10**6,
    min_clients=1,
    transports=("relay", "direct"),
    aggregator_keys=("AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",),
)


def request(number: int = 1, mechanism: Mechanism = DUCHI, **changes: Any) -> Request:
    asked: dict[str, Any] = {"run": "mnist-1", "cohort": 20, "transport": "relay", "key": KEY}
    return Request.of(mechanism, RANGES, round=number, **asked | changes)


def with_policy(**changes: Any) -> Policy:
    return Policy.model_validate(POLICY.model_dump() | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A budget file of epsilon 1000 at delta 1e-5, of which nothing is spent."""
    file = tmp_path / "budget.sqlite"
    set_limit(file, 1000.0)
    return file


@pytest.fixture
def budget(path: Path) -> Budget:
    return Budget(path, POLICY)


def declined(call: Callable[[], object], named: str = "") -> str:
    """Expect refusal in one line, and return it."""
    with pytest.raises(Declined) as caught:
        call()
    message = str(caught.value)
    assert named in message
    assert len(message.splitlines()) == 1
    assert caught.value.public.startswith("declined")
    assert not set("0123456789") & set(caught.value.public)
    return message


# --- what is counted --------------------------------------------------------------------------------------------------


def test_what_is_spent_is_what_the_accountant_says(budget: Budget) -> None:
    plan: list[Mechanism] = [DUCHI, DUCHI, DUCHI, mechanisms.create("duchi", epsilon=1.0), NOISE, NOISE]
    ledger = Ledger()
    for number, mechanism in enumerate(plan, start=1):
        assert budget.charge(request(number, mechanism)) == number
        ledger = ledger.charge(RoundEvent(number, mechanism.release(RANGES), 20, 20, number, channel="direct"))
        books, statement = read_books(budget.path), account(ledger, 1e-5).figures()
        # Of a budget far above what is spent, the order is that of so large a budget.
        assert float(statement["local"] or 0) <= books.spent(1e-5) * (1 + 1e-9)
        assert books.spent(1e-5) == filtered_epsilon(books.counts.items(), filter_order(1000.0, 1e-5), 1e-5)
        if number <= 4:
            assert books.spent(0.0) == pytest.approx(statement["local_pure"])
    assert (books.charges, len(books.counts)) == (6, 3)


def test_the_last_release_that_fits_is_the_last(path: Path) -> None:
    set_limit(path, 17.5, 0.0)  # 10 weights at 0.5: 5 a round
    budget = Budget(path, POLICY)
    for number in (1, 2, 3):
        assert read_books(path).rounds_left(DUCHI.release(RANGES)) == 4 - number
        budget.charge(request(number))
    for _ in range(2):
        with pytest.raises(
            BudgetExhausted, match=r"round 4: all releases would cost epsilon 20 at delta 0, above the budget set in .* = 17.5"
        ):
            budget.charge(request(4))
    assert (read_books(path).charges, read_books(path).rounds_left(DUCHI.release(RANGES))) == (3, 0)
    budget.charge(request(4, mechanisms.create("duchi", epsilon=0.25)))
    assert read_books(path).spent(0.0) == 17.5


def test_of_two_budgets_the_smaller_one_holds(path: Path) -> None:
    small = Budget(path, with_policy(lifetime_epsilon=12.0, delta=0.0))
    small.charge(request(1))
    small.charge(request(2))
    with pytest.raises(Exhausted, match="epsilon 15 at delta 0, above the policy's lifetime_epsilon = 12"):
        small.charge(request(3))
    Budget(path, POLICY).charge(request(3))
    set_limit(path, 14.0)
    with pytest.raises(Exhausted, match="above the budget set in"):
        Budget(path, POLICY).charge(request(4))


def test_the_number_of_reports_is_bounded(path: Path) -> None:
    budget = Budget(path, with_policy(rounds=2))
    budget.charge(request(1))
    budget.charge(request(2))
    with pytest.raises(Exhausted, match="3 reports would exceed the policy's rounds = 2"):
        budget.charge(request(2, run="another-run"))


def test_what_the_policy_declines_is_not_charged(budget: Budget) -> None:
    declined(lambda: budget.charge(request(1, mechanisms.create("duchi", epsilon=3.0))), "epsilon_per_unit")
    declined(lambda: budget.charge(request(1, NONE)), "mechanism 'none'")
    declined(lambda: budget.charge(request(1, cohort=0)), "cohort of 0")
    assert read_books(budget.path).charges == 0


def test_asking_the_policy_costs_nothing(budget: Budget) -> None:
    for _ in range(3):
        budget.check_policy(request(1))
    assert read_books(budget.path).counts == {}


@pytest.mark.parametrize(("limit", "delta"), [(40.0, 1e-5), (40.0, 0.0), (4.9, 0.0), (100.0, 1e-3)])
@pytest.mark.slow
@pytest.mark.thorough_for("100.0-0.001")
def test_rounds_left_are_those_that_can_be_charged(limit: float, delta: float, path: Path) -> None:
    set_limit(path, limit, delta)
    budget, left = Budget(path, POLICY), read_books(path).rounds_left(DUCHI.release(RANGES))
    assert 0 <= left <= 100
    for number in range(1, left + 1):
        budget.charge(request(number))
    with pytest.raises(Exhausted):
        budget.charge(request(left + 1))


def test_a_check_allows_what_would_be_charged_and_writes_nothing(path: Path) -> None:
    set_limit(path, 17.5, 0.0)
    budget = Budget(path, with_policy(min_clients=10))
    for number in (1, 2, 3):
        before = path.read_bytes()
        budget.check(request(number))
        declined(lambda: budget.check(request(cohort=9)), "min_clients")
        assert path.read_bytes() == before
        budget.charge(request(number))
    before = path.read_bytes()
    for _ in range(2):
        declined(lambda: budget.check(request(4)), "all releases would cost epsilon 20")
    assert path.read_bytes() == before


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 1000, 2**29 - 1, 2**29, 2**29 + 5, 999_999_999, 10**9, 10**12])
def test_rounds_left_are_found_up_to_a_billion(limit: int) -> None:
    assert most_that_fit(lambda number: number <= limit) == min(limit, 10**9)


def test_rounds_left_of_what_costs_next_to_nothing_are_many(path: Path) -> None:
    tiny = mechanisms.create("duchi", epsilon=1e-6).release(RANGES)
    assert read_books(path).rounds_left(tiny) == 10**9
    assert read_books(path).rounds_left(NONE.release(RANGES)) == 0


# --- the same again ---------------------------------------------------------------------------------------------------


def test_a_round_that_is_charged_again_is_a_new_release(budget: Budget) -> None:
    assert [budget.charge(request(1, transport="direct", key=b"")) for _ in range(3)] == [1, 2, 3]
    assert read_books(budget.path).spent(0.0) == 15.0


def test_over_the_relay_which_takes_one_report_a_round_is_charged_once(budget: Budget) -> None:
    assert budget.charge(request(1)) == 1
    for action in (budget.charge, budget.check):
        declined(lambda action=action: action(request(1)), "run mnist-1, round 1: this round was charged before")  # type: ignore[misc]
    assert budget.charge(request(1, transport="direct", key=b"")) == 2
    assert budget.charge(request(2)) == 3
    assert budget.charge(request(1, run="another-run")) == 4


def test_nodes_that_share_a_budget_are_charged_for_a_round_once_each(path: Path) -> None:
    first, second = (Budget(path, POLICY, name) for name in ("first", "second"))
    assert [first.charge(request(1)), second.charge(request(1))] == [1, 2]
    for node in (first, second):
        declined(lambda node=node: node.charge(request(1)), "this round was charged before")  # type: ignore[misc]
    assert [charge.node for charge in read_charges(path)] == ["first", "second"]
    assert read_books(path).spent(0.0) == 10.0


def test_a_round_that_does_not_fit_for_all_nodes_of_a_budget_is_declined_by_the_first(path: Path) -> None:
    """Otherwise the first would be charged for nothing in a round that needs both."""
    first, second = (Budget(path, with_policy(rounds=5), name) for name in ("first", "second"))
    for number in (1, 2):
        for node in (first, second):
            node.check(request(number))
            node.charge(request(number))
        assert first.rounds_left(read_charges(path)[-1]) == 2 - number
    for action in (first.check, second.check, first.charge):
        declined(lambda action=action: action(request(3)), "6 reports would exceed the policy's rounds = 5")  # type: ignore[misc]


def test_a_file_with_two_names_is_no_budget(path: Path) -> None:
    """SQLite names its journal after the file: a charge that was interrupted under one name would undo later ones under the other."""
    other = path.with_name("other.sqlite")
    other.hardlink_to(path)
    for name in (path, other):
        declined(lambda name=name: Budget(name, POLICY).charge(request(1)), "has 2 names (hard links)")  # type: ignore[misc]
    other.unlink()
    assert Budget(path, POLICY).charge(request(1)) == 1


# --- what the operator sets -------------------------------------------------------------------------------------------


def test_a_lower_budget_stops_everything_and_a_higher_one_is_on_record(budget: Budget) -> None:
    budget.charge(request(1))
    set_limit(budget.path, 4.0)
    with pytest.raises(Exhausted):
        budget.charge(request(2))
    set_limit(budget.path, 50.0, 1e-6)
    assert budget.charge(request(2)) == 2
    books = read_books(budget.path)
    assert [grant.limit for grant in books.granted] == [Limit(1000.0), Limit(4.0), Limit(50.0, 1e-6)]
    assert all(abs((datetime.now(UTC) - datetime.fromisoformat(grant.at)).total_seconds()) < 600 for grant in books.granted)


def test_a_budget_of_zero_lets_nothing_leave(path: Path) -> None:
    set_limit(path, 0.0)
    for mechanism in (DUCHI, NOISE):
        with pytest.raises(Exhausted):
            Budget(path, POLICY).charge(request(1, mechanism))


@pytest.mark.parametrize(("epsilon", "delta"), [(-1.0, None), (float("nan"), None), (float("inf"), None), (1.0, 1.0), (1.0, 1e-40)])
def test_a_budget_that_is_none_changes_nothing(epsilon: float, delta: float | None, path: Path) -> None:
    with pytest.raises(ConfigError, match="a budget's"):
        set_limit(path, epsilon, delta)
    with pytest.raises(ConfigError, match="a budget's"):
        set_limit(path.with_name("new"), epsilon, delta)
    assert len(read_books(path).granted) == 1
    assert not path.with_name("new").exists()


def test_after_one_report_without_protection_no_budget_means_anything(path: Path) -> None:
    loose = Budget(path, with_policy(mechanisms=("duchi", "none"), allow_unprotected=True))
    loose.charge(request(1))
    loose.charge(request(2, NONE))
    loose.charge(request(3, NONE))
    with pytest.raises(Exhausted, match="all releases would cost epsilon inf"):
        loose.charge(request(4))
    assert read_books(path).spent(1e-5) == float("inf")


def test_a_budget_of_zero_lets_nothing_leave_unprotected_either(path: Path) -> None:
    loose = Budget(path, with_policy(mechanisms=("none",), allow_unprotected=True))
    loose.charge(request(1, NONE))
    set_limit(path, 0.0)
    declined(lambda: loose.charge(request(2, NONE)), "is 0, which allows no report")


def test_the_last_refusal_is_kept_for_the_operator(budget: Budget) -> None:
    assert read_books(budget.path).refusals is None
    declined(lambda: budget.charge(request(1, NONE)))
    message = declined(lambda: budget.charge(request(7, mechanisms.create("duchi", epsilon=3.0))))
    refusals = read_books(budget.path).refusals
    assert refusals is not None
    assert (refusals.reason, refusals.times) == (message, 2)


@pytest.mark.parametrize("year", [1, 1970, 9998])
def test_a_clock_that_jumps_changes_nothing(year: int, budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def now(zone: Any) -> datetime:
            return datetime(year, 1, 1, tzinfo=zone)

    budget.charge(request(1))
    monkeypatch.setattr(budget_file, "datetime", Clock)
    budget.charge(request(2))
    set_limit(budget.path, 20.0, 0.0)
    monkeypatch.undo()
    budget.charge(request(3))
    books = read_books(budget.path)
    assert (books.charges, books.limit.epsilon) == (3, 20.0)
    assert [charge.round for charge in read_charges(budget.path)] == [1, 2, 3]
    assert read_charges(budget.path)[1].at.startswith(f"{year:04d}-01-01T")


def test_a_charge_is_read_back_as_it_was_made(budget: Budget) -> None:
    budget.charge(request(4, cohort=17, transport="direct", key=b""))
    budget.charge(request(5, NOISE))
    first, second = read_charges(budget.path)
    assert (first.number, first.run, first.round, first.cohort, first.transport, first.linked) == (
        *(1, "mnist-1", 4),
        *(17, "direct", 1),
    )
    assert (first.release.mechanism, first.release.units, first.release.unit) == ("duchi", 10, "weight")
    sent = released(NOISE, RANGES)
    assert isinstance(sent, GaussianRelease)
    assert second.release == replace(sent, alike=False)  # a budget counts by mu alone


# --- the file is not to be relied on ----------------------------------------------------------------------------------


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "there is no budget file"),
    "a dangling link": (a_link_to_nothing, "there is no budget file"),
    "a folder": (a_folder, "is not a regular file"),
    "empty": (lambda path: path.write_bytes(b""), "is not a budget file, or making it was interrupted"),
    "garbage": (lambda path: path.write_bytes(b"garbage" * 1000), "cannot be used"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "nothing leaves"),
    "its last page lost": (lambda path: path.write_bytes(path.read_bytes()[:-4096]), "nothing leaves"),
    "another database": (lambda path: edit(path, "PRAGMA application_id = 7"), "is not a budget file"),
    "newer": (lambda path: edit(path, "PRAGMA user_version = 4"), "has version 4, expected 3"),
    "another journal": (lambda path: edit(path, "PRAGMA journal_mode = WAL"), "has SQLite's journal mode"),
    "open to others": (lambda path: path.chmod(0o640), "run chmod 600 /"),
    "in a folder of others": (lambda path: path.parent.chmod(0o777), "chmod go-w"),
    "in a folder for all, such as /tmp": (lambda path: path.parent.chmod(0o1777), "chmod go-w"),
    "another table": (lambda path: edit(path, "CREATE TABLE extra (x)"), "is damaged"),
    "a charge deleted": (lambda path: edit(path, "DELETE FROM charges WHERE id = 1"), "is damaged"),
    "a lower count": (lambda path: edit(path, "UPDATE releases SET count = count - 1"), "is damaged"),
    "a lower epsilon": (lambda path: edit(path, "UPDATE releases SET parameter = parameter / 2"), "is damaged"),
    "a crowd that was larger": (lambda path: edit(path, "UPDATE charges SET cohort = 10 * cohort"), "is damaged"),
    "another way to the server": (lambda path: edit(path, "UPDATE charges SET transport = 'direct'"), "is damaged"),
    "a higher budget": (lambda path: edit(path, "UPDATE limits SET epsilon = 2 * epsilon"), "is damaged"),
    "no budget": (lambda path: edit(path, "DELETE FROM limits"), "is damaged"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_file_that_cannot_be_relied_on_lets_nothing_leave(name: str, budget: Budget) -> None:
    for number in (1, 2, 3):
        budget.charge(request(number))
    spoil, named = SPOILS[name]
    spoil(budget.path)
    for call in (lambda: budget.charge(request(4)), lambda: read_books(budget.path)):
        assert str(budget.path) in declined(call, named)
    if name not in ("missing", "a dangling link", "a folder"):
        declined(lambda: set_limit(budget.path, 5.0), named)
    assert name != "missing" or not budget.path.exists()


@pytest.mark.slow
def test_a_changed_byte_is_found_out_or_does_not_matter(budget: Budget) -> None:
    """One bit, in the file's header or in every sixteenth byte that is not 0: what is read must be what was spent."""
    for number in range(1, 4):
        budget.charge(request(number))
    sound, generator = budget.path.read_bytes(), random.Random(5)
    true = read_books(budget.path)
    places = [place for place in range(len(sound)) if sound[place] and (generator.random() < 1 / 16 or place < 100)]
    found = 0
    for place in places:
        changed = bytearray(sound)
        changed[place] ^= 1 << generator.randrange(8)
        budget.path.write_bytes(changed)
        try:
            books = read_books(budget.path)
        except Declined:
            found += 1
            continue
        assert books.counts == true.counts, place
        assert books.limit == true.limit, place
    assert found > len(places) / 2


def test_a_lost_page_is_found_out_wherever_it_is(path: Path) -> None:
    with budget_file.budget_transaction(path, write=True) as connection:
        for number in range(1, 201):
            budget_file.add_charge(connection, request(number), budget_file.as_stored(DUCHI.release(RANGES)))
    sound = path.read_bytes()
    assert len(sound) > 10 * 4096
    for start in range(0, len(sound), 4096):
        path.write_bytes(sound[:start] + bytes(4096) + sound[start + 4096 :])
        declined(lambda: read_books(path), "nothing leaves this client")


def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        set_limit(tmp_path / "new", 1.0)
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


@contextmanager
def an_ordinary_user(folder: Path) -> Iterator[None]:
    """Be one in the block, where tests run as root, for whom no folder is read-only."""
    if os.geteuid() != 0:
        yield
        return
    for entry in (folder, *folder.iterdir()):
        os.chown(entry, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can get at, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="ldpfl-budget-"))
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_where_nothing_can_be_written_nothing_leaves(what: str, open_folder: Path) -> None:
    path = open_folder / "budget.sqlite"
    set_limit(path, 1000.0)
    budget = Budget(path, POLICY)
    budget.charge(request(1))
    with an_ordinary_user(open_folder):
        (open_folder if what == "folder" else path).chmod(0o500 if what == "folder" else 0o400)
        for use in (budget.charge, budget.check):
            declined(partial(use, request(2)), "cannot be used, so nothing leaves this client")
        declined(lambda: set_limit(path, 2000.0), "cannot be used")
        if what == "folder":
            with pytest.raises(ConfigError, match="cannot be made: Permission denied"):
                set_limit(open_folder / "new", 1.0)
        assert read_books(path).charges == 1
        (open_folder if what == "folder" else path).chmod(0o700 if what == "folder" else 0o600)
        assert budget.charge(request(2)) == 2


def test_a_full_disk_refuses_and_spoils_nothing(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, pages = sqlite3.connect, budget.path.stat().st_size // 4096

    def connect_on_a_full_disk(*arguments: Any, **named: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **named)
        connection.execute(f"PRAGMA max_page_count = {pages}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_on_a_full_disk)
    charged: list[int] = []

    def fill() -> None:
        for number in range(1, 1000):
            charged.append(budget.charge(request(number, run=f"run-{number:090d}")))

    declined(fill, "database or disk is full")
    assert 0 < len(charged) < 200
    monkeypatch.undo()
    assert read_books(budget.path).charges == len(charged)
    assert budget.charge(request(1)) == len(charged) + 1


def test_a_node_with_a_full_disk_would_not_take_part_in_a_round(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the question before a round finds it, before other nodes are charged for a round that must fail."""
    budget.charge(request(1))
    before = budget.path.read_bytes()
    with files_up_to(100):  # too small for SQLite's journal
        for use in (budget.check, budget.charge):
            declined(partial(use, request(2)), "cannot be used, so nothing leaves this client")
    assert budget.path.read_bytes() == before
    budget.check(request(2))
    assert budget.path.read_bytes() == before
    assert budget.charge(request(2)) == 2


def test_a_file_that_was_not_finished_is_not_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new"
    monkeypatch.setattr(budget_file, "_TABLES", ("CREATE TABLE limits (", *budget_file._TABLES))
    declined(lambda: set_limit(path, 1.0), "cannot be used")
    monkeypatch.undo()
    declined(lambda: set_limit(path, 1.0), "making it was interrupted")


@pytest.mark.parametrize("write", [False, True])
def test_what_is_charged_is_on_the_disk_and_in_the_one_file_before_a_report_leaves(write: bool, path: Path) -> None:
    """EXTRA, 3: the journal's end as well, which a power cut would otherwise undo the charge by. No log beside the file."""
    names = ("synchronous", "journal_mode", "cell_size_check")
    with budget_file.budget_transaction(path, write=write) as connection:
        assert [connection.execute(f"PRAGMA {name}").fetchone() for name in names] == [(3,), ("delete",), (1,)]


def test_a_file_that_another_process_holds_is_waited_for_and_then_refused(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sqlite3.connect(budget.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **named: connect(*arguments, **named | {"timeout": 0.1}))
    declined(lambda: budget.charge(request(1)), "database is locked")
    other.execute("ROLLBACK")
    other.close()
    assert budget.charge(request(1)) == 1


# --- other processes, and their end -----------------------------------------------------------------------------------

CLIENTS = """
import os, sys
from pathlib import Path
from types import MappingProxyType
from ldpfl import LayerRanges, mechanisms
from ldpfl.errors import BudgetExhausted
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.policy import Policy, Request

ranges = LayerRanges(center=0.0, radius=0.1, sizes=(10,))
policy = Policy(mechanisms=("duchi",), epsilon_per_unit=1, epsilon_per_round=9, lifetime_epsilon=1e6, rounds=10**6,
                min_clients=1, transports=("direct",))

def client(path):
    budget, number = Budget(Path(path), policy), 0
    try:
        while True:
            number += 1
            budget.charge(Request.of(mechanisms.create("duchi", epsilon=0.5), ranges, run="r", round=number, cohort=1, transport="direct"))
            os.write(1, b"sent\\n")
    except BudgetExhausted:
        os._exit(0)
    except BaseException as error:
        os.write(1, f"failed: {error}\\n".encode())
        os._exit(1)

os.write(1, b"ready\\n")
for line in sys.stdin:
    command, argument = line.split()
    if command == "start":
        pid = os.fork()
        if pid == 0:
            client(argument)
        os.write(1, f"started {pid}\\n".encode())
    else:
        os.waitpid(int(argument), 0)
        os.write(1, f"over {argument}\\n".encode())
"""
"""Forks a client that charges and "sends" as fast as it can, whenever it is told to."""


class Clients:
    """Processes that charge one budget, and what they say they have sent."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", CLIENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._running: set[int] = set()
        self.sent = 0
        assert self._line() == "ready"

    def start(self, path: Path) -> int:
        pid = int(self._told(f"start {path}", "started "))
        self._running.add(pid)
        return pid

    def see_one(self) -> None:
        """Return when something more was sent."""
        assert self._line() == "sent"
        self.sent += 1

    def wait(self, pid: int) -> None:
        """Return when it is over and all that it sent is counted."""
        self._told(f"wait {pid}", "over ")
        self._running.discard(pid)

    def close(self) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate(timeout=30)

    def _told(self, command: str, answer: str) -> str:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        while not (line := self._line()).startswith(answer):
            assert line == "sent"
            self.sent += 1
        return line.removeprefix(answer)

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line.endswith("\n")
        return line.rstrip("\n")


@pytest.fixture(scope="session")
def all_clients() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    clients.close()


@pytest.fixture
def clients(all_clients: Clients) -> Clients:
    all_clients.sent = 0
    return all_clients


@pytest.mark.slow
@pytest.mark.xdist_group("budget")  # which start one process
def test_of_many_processes_one_gets_the_last_bit(path: Path, clients: Clients) -> None:
    set_limit(path, 5.0 * 24, 0.0)
    for pid in [clients.start(path) for _ in range(3)]:
        clients.wait(pid)
    assert clients.sent == read_books(path).charges == 24
    assert read_books(path).spent(0.0) == 120.0


@pytest.mark.slow
@pytest.mark.xdist_group("budget")
def test_killed_at_any_moment_it_has_counted_what_was_sent(path: Path, clients: Clients) -> None:
    set_limit(path, 1e5)
    generator, kills = random.Random(3), 12
    for kill in range(kills):
        pid = clients.start(path)
        if kill % 3:  # the others are killed while they set out
            clients.see_one()
        time.sleep(generator.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        clients.wait(pid)
        charges = read_books(path).charges  # nothing is found damaged
        assert clients.sent <= charges
    assert clients.sent >= kills / 2
    assert charges <= clients.sent + kills
    assert [charge.number for charge in read_charges(path)] == list(range(1, charges + 1))


def test_a_charge_without_its_digest_is_damaged(path: Path) -> None:
    budget = Budget(path, POLICY)
    set_limit(path, 1e9)
    budget.charge(request(1))
    edit(path, "UPDATE charges SET sealed = NULL")
    with pytest.raises(Declined, match="is damaged"):
        read_books(path)


# --- it stays fast ----------------------------------------------------------------------------------------------------


def test_hundreds_of_rounds_are_one_line_to_the_accountant(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a charge computes is a matter of distinct releases, not of how often each was made."""
    release = budget_file.as_stored(released(DUCHI, RANGES))
    with budget_file.budget_transaction(path, write=True) as connection:
        for number in range(1, 301):
            budget_file.add_charge(connection, request(number), release)
    seen: list[list[tuple[Release, int]]] = []

    def counting(releases: Any, order: float, delta: float) -> float:
        seen.append(list(releases))
        return filtered_epsilon(seen[-1], order, delta)

    monkeypatch.setattr("ldpfl.privacy.budget_file.filtered_epsilon", counting)
    set_limit(path, 1e9)
    Budget(path, POLICY).charge(request(301))
    assert [times for releases in seen for _, times in releases] == [301, 301]  # for the policy and for the file


@pytest.mark.slow
def test_the_rule_of_counting_is_fixed_by_the_first_charge_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "own.sqlite"
    for limit in (0.0, 20.0, 50.0):
        set_limit(path, limit, 1e-5)
        assert read_books(path).order == (filter_order(limit, 1e-5) if limit else inf)
    assert len(read_books(path).granted) == 1
    Budget(path, POLICY).charge(request(1))
    set_limit(path, 80.0, 1e-5)
    assert read_books(path).order == filter_order(50.0, 1e-5)
    assert [grant.limit.epsilon for grant in read_books(path).granted] == [50.0, 80.0]


# --- what a relay hides -----------------------------------------------------------------------------------------------


def _refusal(budget: Budget, number: int, **changes: Any) -> str:
    try:
        budget.charge(request(number, **changes))
    except Exhausted as refusal:
        return str(refusal)
    return ""


def fitting(path: Path, asked: Mapping[str, int] = MappingProxyType({}), **changes: Any) -> int:
    """Return how many rounds of ten bits at 0.5 among 10,000 fit a bound of 0.3."""
    set_limit(path, 1000.0)
    budget = Budget(path, with_policy(**{"relay_epsilon": 0.3, "min_clients": 10_000, "linked": 2, **asked}))
    refused = next(text for number in range(1, 500) if (text := _refusal(budget, number, **{"cohort": 10_000, **changes})))
    assert "above the policy's relay_epsilon = 0.3" in refused
    return len(read_charges(path))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bound_behind_the_relay_lets_rounds_through_until_it_is_spent(tmp_path: Path) -> None:
    """Never less than what is known of as many rounds that were fixed beforehand; linked units cost more."""
    sent, ledger = fitting(tmp_path / "apart.sqlite"), Ledger()
    for number in range(1, sent + 1):
        ledger = ledger.charge(RoundEvent(number, DUCHI.release(RANGES), 10_000, 10_000, number))
    known = account(ledger, 1e-5).figures()["shuffled_upper_adaptive"]
    assert isinstance(known, float)
    assert 0.15 < known <= 0.3
    assert sent > fitting(tmp_path / "linked.sqlite", linked=2) > 3
    # However many more are mixed, a server may have sent them; and of those that the policy asks for, as many as it says.
    assert fitting(tmp_path / "more.sqlite", cohort=1_000_000) == sent
    assert fitting(tmp_path / "colluding.sqlite", {"min_clients": 20_000, "colluding": 10_000}, cohort=10**6) == sent


@pytest.mark.slow
def test_clients_that_a_server_may_have_sent_hide_nobody(path: Path) -> None:
    """Not those of a round beyond what the policy asks for, and not later either, when it asks for more."""
    for number, (asked, left) in enumerate(((500, 500), (900, 900), (200, 200)), 1):
        Budget(path, with_policy(min_clients=asked)).charge(request(number, cohort=1_000))
        assert read_charges(path)[-1].cohort == left
    Budget(path, with_policy(min_clients=900, colluding=300)).charge(request(4, cohort=1_000))
    assert [charge.cohort for charge in read_charges(path)] == [500, 900, 200, 600]
    with pytest.raises(ValueError, match="leaves none of min_clients"):
        with_policy(min_clients=100, colluding=100)


@pytest.mark.parametrize(
    ("changes", "mechanism"), [({"transport": "direct", "key": b""}, DUCHI), ({}, NOISE)], ids=["a reply", "another mechanism"]
)
@pytest.mark.slow
def test_what_a_relay_does_not_hide_is_declined_under_such_a_bound(changes: dict[str, Any], mechanism: Mechanism, path: Path) -> None:
    budget = Budget(path, with_policy(relay_epsilon=50.0))
    declined(lambda: budget.charge(request(1, mechanism, **changes)), "relay_epsilon")
    assert read_charges(path) == ()


def test_a_reply_before_the_bound_was_set_is_not_forgotten(path: Path) -> None:
    Budget(path, POLICY).charge(request(1, transport="direct", key=b""))
    declined(lambda: Budget(path, with_policy(relay_epsilon=50.0)).charge(request(2)), "cost epsilon inf behind the relay")


def test_units_that_travel_together_hide_as_any_report_would_and_a_part_of_a_record_is_one() -> None:
    """What is proved for one bit is not said of several that are linked: they cost more than a bit of their whole budget would."""

    def hidden(epsilon: float, units: int, linked: int, count: int) -> float:
        return hidden_epsilon([(BinaryRelease("duchi", epsilon, units), 10_000, linked, count)], filter_order(1.0, 1e-5), 1e-5)

    assert hidden(0.5, 64, 4, 1) > 1.05 * hidden(2.0, 1, 1, 16)
    assert hidden(0.5, 7, 4, 1) == hidden(0.5, 8, 4, 1) > hidden(0.5, 4, 4, 1)
    assert hidden(0.5, 3, 4, 1) < hidden(0.5, 4, 4, 1)  # a report shorter than a record is as much as it is


@pytest.mark.slow
@pytest.mark.thorough
def test_the_divergences_behind_a_relay_bound_every_small_tree_of_choices() -> None:
    """Two reports of two clients; the second one's epsilon follows from what was seen of the first: by enumeration, at the other's worst.

    The filter lets either choice through within its epsilon; then no tree of such choices exceeds it.
    """
    delta, limit = 0.05, 1.2
    order = filter_order(limit, delta)

    def hidden(*epsilons: float) -> float:
        bits = [(BinaryRelease("duchi", epsilon, 1), 2, 1, 1) for epsilon in epsilons]
        return hidden_epsilon(bits, order, delta)

    allowed = [epsilon for epsilon in (0.1, 0.2, 0.4, 0.6, 0.9) if hidden(0.3, epsilon) <= limit]
    assert allowed
    assert hidden(0.3, 0.9) > hidden(0.3, 0.1)

    def counts(epsilon: float, own: int, other: int) -> list[float]:
        p, q = (1 / (1 + exp(-epsilon)) if bit else 1 - 1 / (1 + exp(-epsilon)) for bit in (own, other))
        return [(1 - p) * (1 - q), p * (1 - q) + q * (1 - p), p * q]

    for others in product((0, 1), repeat=2):
        for choices in product(allowed, repeat=3):
            excess = 0.0
            for first in range(3):
                for second in range(3):
                    one, two = (counts(0.3, own, others[0])[first] * counts(choices[first], own, others[1])[second] for own in (1, 0))
                    excess += max(0.0, one - exp(limit) * two)
            assert excess <= delta


# --- what a sum hides -------------------------------------------------------------------------------------------------


def summed(number: int, mu: float = 0.5, **changes: Any) -> Request:
    release = replace(GaussianRelease("dp-sgd", mu, integers=True), author="ldpfl")
    return Request("mnist-1", number, release, **{"cohort": 100, "transport": "sum", "key": KEY, **changes})


SUMS: dict[str, Any] = {"mechanisms": ("dp-sgd",), "transports": ("sum", "direct"), "min_clients": 100, "epsilon_per_unit": 100.0}


def fitting_sums(path: Path, mu: float, cohort: int = 100, **policy: Any) -> int:
    """Return how many sums fit."""
    set_limit(path, 1e5)
    budget = Budget(path, with_policy(**SUMS | policy))
    for number in range(1, 200):
        try:
            budget.charge(summed(number, mu, cohort=cohort))
        except Exhausted:
            return number - 1
    return -1


def test_a_sum_costs_what_a_hundredth_of_the_variance_would(tmp_path: Path) -> None:
    """The noise of 100 clients in place of one's own: as many rounds fit as of a tenth of the mu, trusting nobody."""
    sent = fitting_sums(tmp_path / "sums.sqlite", 3.0, sum_epsilon=3.0)
    alone = fitting_sums(tmp_path / "alone.sqlite", 0.3, lifetime_epsilon=3.0)
    assert sent == alone > 3
    assert fitting_sums(tmp_path / "more.sqlite", 3.0, cohort=10**6, sum_epsilon=3.0) == sent
    assert fitting_sums(tmp_path / "colluding.sqlite", 3.0, cohort=10**6, sum_epsilon=3.0, min_clients=150, colluding=50) == sent
    assert fitting_sums(tmp_path / "fewer.sqlite", 3.0, sum_epsilon=3.0, colluding=60) < sent


def test_what_was_spent_of_each_bound_of_a_policy_is_what_the_refusal_compares(path: Path) -> None:
    set_limit(path, 1e5)
    budget = Budget(path, with_policy(**SUMS, sum_epsilon=1.0))
    assert [(spend.setting, spend.epsilon) for spend in budget.spent_of_policy()] == [("lifetime_epsilon", 0.0), ("sum_epsilon", 0.0)]
    for number in range(1, 100):
        before = budget.spent_of_policy()[1].epsilon
        try:
            budget.charge(summed(number, 1.0))
        except Exhausted as refusal:
            cost = float(str(refusal).partition("epsilon ")[2].split()[0])
            break
        assert before < budget.spent_of_policy()[1].epsilon <= 1.0
    assert number > 2
    assert before <= 1.0 < cost  # the refused report is not counted
    local, hidden = budget.spent_of_policy()
    assert (hidden.epsilon, hidden.allowed, hidden.delta) == (before, 1.0, 1e-5)
    assert local.epsilon > 5 * hidden.epsilon
    Budget(path, with_policy(**SUMS)).charge(summed(number + 1, transport="direct", key=b""))
    assert budget.spent_of_policy()[1].epsilon == float("inf")


def test_the_local_line_bounds_sums_as_well(path: Path) -> None:
    budget = Budget(path, with_policy(**SUMS, sum_epsilon=100.0, lifetime_epsilon=20.0))
    budget.charge(summed(1, 3.0))
    declined(lambda: budget.charge(summed(2, 3.0)), "lifetime_epsilon = 20")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"transport": "direct", "key": b""}, "with sum_epsilon set, reports may leave only by transport"),
        ({"release": BinaryRelease("dp-sgd", 0.5, 10, author="ldpfl")}, "needs Gaussian noise on integers"),
        ({"release": GaussianRelease("dp-sgd", 0.5, author="ldpfl")}, "needs Gaussian noise on integers"),  # of floats
    ],
)
def test_what_no_sum_hides_is_declined_under_such_a_bound(changes: dict[str, Any], why: str, path: Path) -> None:
    asked = replace(summed(1), **changes)
    declined(lambda: Budget(path, with_policy(**SUMS, sum_epsilon=50.0)).charge(asked), why)
    assert read_charges(path) == ()


def test_what_left_otherwise_before_is_not_forgotten_by_sums(path: Path) -> None:
    Budget(path, with_policy(**SUMS)).charge(summed(1, transport="direct", key=b""))
    declined(lambda: Budget(path, with_policy(**SUMS, sum_epsilon=50.0)).charge(summed(2)), "cost epsilon inf in sums")


def test_a_round_of_a_sum_is_charged_once(path: Path) -> None:
    budget = Budget(path, with_policy(**SUMS))
    budget.charge(summed(1))
    declined(lambda: budget.charge(summed(1)), "this round was charged before")
    declined(lambda: budget.charge(summed(2, key=bytes(32))), "aggregator_keys")


def test_two_reports_on_the_same_people_in_one_sum_count_as_one_of_twice_the_mu(path: Path) -> None:
    policy = with_policy(**SUMS, sum_epsilon=20.0)
    for node in ("first", "second"):
        Budget(path, policy, node).charge(summed(1))
    twice = summed_epsilon([(GaussianRelease("dp-sgd", 1.0), 100, 1)], filter_order(20.0, 1e-5), 1e-5)
    assert Budget(path, policy).spent_of_policy()[1].epsilon == pytest.approx(twice, rel=1e-9)
    Budget(path, policy).charge(summed(2))
    apart = summed_epsilon([(GaussianRelease("dp-sgd", 0.5), 20, 1)], filter_order(20.0, 1e-5), 1e-5)  # mu: sqrt(1 + 1/4) of two clients'
    assert Budget(path, policy).spent_of_policy()[1].epsilon == pytest.approx(apart, rel=1e-9)


@pytest.mark.slow
def test_two_reports_on_the_same_people_in_one_mix_hide_among_half_of_the_clients(path: Path) -> None:
    policy = with_policy(relay_epsilon=5.0, min_clients=1_000)
    for node in ("first", "second"):
        Budget(path, policy, node).charge(request(1, cohort=1_000))
    among_half = hidden_epsilon([(BinaryRelease("duchi", 0.5, 10), 500, 1, 2)], filter_order(5.0, 1e-5), 1e-5)
    assert Budget(path, policy).spent_of_policy()[1].epsilon == pytest.approx(among_half)


# --- what was lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [("",), ("first", "second")])
def test_a_backup_that_is_charged_for_what_was_lost_keeps_every_bound(nodes: tuple[str, ...], path: Path) -> None:
    policy, backup = with_policy(**SUMS, sum_epsilon=4.0, rounds=60), path.with_name("backup.sqlite")

    def charge_round(number: int) -> None:
        for node in nodes:
            Budget(path, policy, node).charge(summed(number))

    for number in (1, 2, 3):
        charge_round(number)
    shutil.copy(path, backup)
    for number in (4, 5, 6, 7):
        charge_round(number)
    spent, left = Budget(path, policy).spent_of_policy(), Budget(path, policy).rounds_left(read_charges(path)[-1])
    assert Budget(backup, policy).spent_of_policy()[1].epsilon < spent[1].epsilon
    books = charge_lost(backup, 2, len(nodes))
    charge_lost(backup, 2, len(nodes), like=1)
    assert (books.charges, read_books(backup).counts) == (5 * len(nodes), read_books(path).counts)
    assert [spend.epsilon for spend in Budget(backup, policy).spent_of_policy()] == pytest.approx([spend.epsilon for spend in spent])
    assert Budget(backup, policy).rounds_left(read_charges(backup)[-1]) == left
    declined(lambda: Budget(backup, with_policy(**SUMS, rounds=7 * len(nodes))).charge(summed(8)), "rounds = ")


def test_lost_reports_count_as_of_whole_rounds_of_all_nodes(path: Path) -> None:
    """The round of the charge that they are like may have been one of a single node."""
    policy = with_policy(**SUMS, sum_epsilon=40.0, rounds=60)
    for number, nodes in ((1, ("a", "b")), (2, ("a",))):
        for node in nodes:
            Budget(path, policy, node).charge(summed(number))
    charge_lost(path, 2, 1)
    charge_lost(path, 1, 1)
    charges = read_charges(path)
    assert [charge.round for charge in charges[3:]] == [1, 1, 2, 2, 3, 3]
    truth = path.with_name("truth.sqlite")
    set_limit(truth, 1000.0)
    for number in (1, 2, 3, 4, 5):
        for node in ("a", "b"):
            Budget(truth, policy, node).charge(summed(number))
    spent, true = (Budget(file, policy).spent_of_policy()[1].epsilon for file in (path, truth))
    assert spent < true  # round 2 had one report
    Budget(path, policy, "b").charge(summed(2))
    assert Budget(path, policy).spent_of_policy()[1].epsilon == pytest.approx(true)


def test_lost_rounds_count_nodes_that_the_backup_does_not_know(path: Path) -> None:
    """The backup was made before the second node joined."""
    policy, backup = with_policy(**SUMS, sum_epsilon=40.0, rounds=60), path.with_name("backup.sqlite")
    Budget(path, policy, "a").charge(summed(1))
    shutil.copy(path, backup)
    Budget(path, policy, "b").charge(summed(1))
    for number in (2, 3):
        for node in ("a", "b"):
            Budget(path, policy, node).charge(summed(number))
    charge_lost(backup, 3, 2)  # with the round before
    spent, restored = (Budget(file, policy).spent_of_policy()[1].epsilon for file in (path, backup))
    assert spent <= restored
    left, true_left = (Budget(file, policy).rounds_left(read_charges(file)[-1]) or 0 for file in (backup, path))
    assert 0 < left <= true_left


def test_lost_rounds_may_be_numbers_of_numpy(budget: Budget) -> None:
    """SQLite would store them as bytes, and the file would be damaged."""
    budget.charge(request(1))
    numbers: Any = (np.int64(2), np.int64(1), np.int64(1))
    assert charge_lost(budget.path, *numbers).charges == 3
    assert read_books(budget.path).charges == 3
    with pytest.raises(ConfigError, match=r"must be whole numbers, got 2\.0, 1, None"):
        charge_lost(budget.path, 2.0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rounds", "nodes", "like", "named"),
    [(0, 1, None, "got 0 and 1"), (1, 0, None, "got 1 and 0"), (10**3, 10**3, None, "got 1,000 and 1,000"), (1, 1, 9, "number 9")],
)
def test_lost_reports_that_no_charge_is_like_change_nothing(rounds: int, nodes: int, like: int | None, named: str, budget: Budget) -> None:
    with pytest.raises(ConfigError, match="no charge by which the lost reports could be charged"):
        charge_lost(budget.path, 1, 1)
    budget.charge(request(1))
    with pytest.raises(ConfigError, match=named):
        charge_lost(budget.path, rounds, nodes, like)
    assert read_books(budget.path).charges == 1
