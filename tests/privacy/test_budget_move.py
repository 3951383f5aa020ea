"""A budget that is moved is in one file: the new one knows all that was charged, and by the old one nothing leaves any more."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from conftest import CommandLine
from ldpfl import ConfigError, LayerRanges, mechanisms
from ldpfl.errors import Declined, Exhausted
from ldpfl.privacy import budget_move
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_books, read_charges, set_limit
from ldpfl.privacy.policy import Policy, Request

RANGES = LayerRanges(center=0.0, radius=0.1, sizes=(10,))
DUCHI = mechanisms.create("duchi", epsilon=0.5)
POLICY = Policy(
    mechanisms=("duchi",),
    epsilon_per_unit=1.0,
    epsilon_per_round=10.0,
    lifetime_epsilon=1e4,
    rounds=1000,
    min_clients=1,
    transports=("direct",),
)


def charge(path: Path) -> int:
    return Budget(path, POLICY).charge(Request.of(DUCHI, RANGES, run="run", round=1, cohort=3, transport="direct"))


@pytest.fixture
def spent(tmp_path: Path) -> Path:
    """A budget of which there is room for one report more."""
    path = tmp_path / "budget.sqlite"
    set_limit(path, 15.0, 0.0)
    charge(path)
    charge(path)
    return path


def test_what_was_spent_moves_along_and_the_old_file_allows_nothing(spent: Path) -> None:
    new = spent.with_name("new.sqlite")
    before = read_charges(spent)
    books = budget_move.move(spent, new)
    assert read_charges(new) == before
    assert (books.limit.epsilon, books.charges) == (15.0, 2)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    with pytest.raises(Exhausted, match=f"this budget was moved to {new}: use that file"):
        charge(spent)
    assert charge(new) == 3
    with pytest.raises(Exhausted):
        charge(new)
    refusals = read_books(spent).refusals
    assert refusals is not None
    assert refusals.times == 2  # that it was moved, and what was asked of it since


def test_the_old_file_says_where_the_budget_went(spent: Path) -> None:
    new = spent.with_name("new.sqlite")
    budget_move.move(spent, new)
    refusals = read_books(spent).refusals
    assert refusals is not None
    assert refusals.reason == f"this budget was moved to {new}: use that file"
    with pytest.raises(ConfigError, match="is 0: it was moved before"):
        budget_move.move(spent, spent.with_name("third.sqlite"))


def test_killed_in_between_no_new_file_counts_beside_the_old_one(spent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    new = spent.with_name("new.sqlite")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            budget_move.move(spent, new)
    assert read_books(spent).limit.epsilon == 0
    assert not new.exists()
    assert read_books(spent.with_name("new.sqlite.part")).limit.epsilon == 15.0
    with monkeypatch.context() as patched:
        patched.setattr(budget_move, "close_for_good", killed)
        other = spent.with_name("other.sqlite")
        set_limit(other, 5.0)
        with pytest.raises(Killed):
            budget_move.move(other, spent.with_name("else.sqlite"))
    assert read_books(other).limit.epsilon == 5.0
    assert not spent.with_name("else.sqlite").exists()
    with pytest.raises(ConfigError, match="if not, remove"):
        budget_move.move(other, spent.with_name("else.sqlite"))


def test_a_place_that_is_taken_or_cannot_be_relied_on_is_refused_and_nothing_moves(spent: Path) -> None:
    taken = spent.with_name("taken.sqlite")
    taken.touch()
    with pytest.raises(ConfigError, match="is left as it is"):
        budget_move.move(spent, taken)
    open_folder = spent.parent / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(Declined, match="other users can write"):
        budget_move.move(spent, open_folder / "new.sqlite")
    assert not list(open_folder.iterdir())
    with pytest.raises(ConfigError, match="cannot be made"):
        budget_move.move(spent, spent.parent / "missing" / "new.sqlite")
    assert read_books(spent).limit.epsilon == 15.0


def test_a_moved_budget_is_not_begun_anew(spent: Path, ldpfl: CommandLine) -> None:
    """There would be two lifetimes of one client, whatever was asked of the old file in between."""
    budget_move.move(spent, spent.with_name("new.sqlite"))
    with pytest.raises(Exhausted):
        charge(spent)
    assert "this budget was moved to" in ldpfl.refused("budget", "set", "--file", spent, "--epsilon", "100")
    assert read_books(spent).limit.epsilon == 0
    assert ldpfl("budget", "set", "--file", spent.with_name("new.sqlite"), "--epsilon", "100").code == 0
