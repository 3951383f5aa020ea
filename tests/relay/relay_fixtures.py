"""Fixtures of the relay's tests. Named as a plugin by the modules that use them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from relay_support import Clock, Postgres, postgres_programs, unsynced

from ldpfl.relay.database import open_engine
from ldpfl.relay.store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server; where there is none, the test is skipped, but in continuous integration it fails."""
    programs = postgres_programs()
    if programs is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed, and in continuous integration it must be: apt-get install postgresql")
        pytest.skip("PostgreSQL is not installed")
    server = Postgres(programs)
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new store may be: a path or a URL."""
    if request.param == "sqlite":
        return str(tmp_path / "relay.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(place: str, clock: Clock) -> Iterator[Store]:
    """An empty store on each kind of database."""
    opened = Store(unsynced(open_engine(place)), clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def sqlite_store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    opened = Store(unsynced(open_engine(str(tmp_path / "relay.db"))), clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def another(place: str, clock: Clock) -> Iterator[Callable[[], Store]]:
    """Open the same store once more, as another worker would."""
    opened: list[Store] = []

    def open_again() -> Store:
        opened.append(Store(unsynced(open_engine(place)), clock=clock))
        return opened[-1]

    yield open_again
    for each in opened:
        each.close()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    """An event loop in a thread."""
    with start_blocking_portal() as running:
        yield running
