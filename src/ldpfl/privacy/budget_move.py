"""Move a lifetime budget to another file. The old file is closed: two open files would each allow the whole remaining budget."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from ldpfl.errors import ConfigError, Declined
from ldpfl.privacy.budget_file import MOVED, Books, budget_transaction, close_for_good, read_books, read_open_books
from ldpfl.util.files import writing


def move(path: Path, to: Path) -> Books:
    """Move the budget in ``path``, with all its charges, to the new file ``to``. Return the contents of ``to``.

    The copy is first written under the name of ``to`` with ``.part`` appended. Then the old file is set to epsilon 0, so that it allows
    nothing to anyone who still uses it. Last, the copy is renamed to ``to``. If the process is killed, the ``.part`` file may be left. It
    is valid only if the old file is at 0; otherwise remove it.

    Raises:
        ConfigError: ``to`` exists or cannot be created, or the old file has epsilon 0 and so nothing to move.
        Declined: the old file, or the folder of the new one, is unreliable.
    """
    copy = to.with_name(f"{to.name}.part")
    if os.path.lexists(to):
        raise ConfigError(f"{to} exists and is left as it is: give another name")
    if os.path.lexists(copy):
        raise ConfigError(
            f"{copy} was left by a move that was interrupted. If ldpfl budget show says that the budget in {path} is 0, rename {copy} to "
            f"{to.name}; if not, remove {copy}, and move again"
        )
    with budget_transaction(path, write=True) as connection:  # nobody else charges until this is over
        if read_open_books(connection).limit.epsilon == 0:
            raise ConfigError(f"the budget in {path} is 0: it was moved before, or set to 0; there is nothing to move")
        _copy(path, copy)
        try:
            read_books(copy)  # check the copy before the old file is closed: with an unreliable copy the budget would be lost
        except Declined:
            copy.unlink()
            raise
        close_for_good(connection, f"{MOVED} {to.absolute()}: use that file")
    with writing(to):
        copy.rename(to)
    return read_books(to)


def refuse_moved(path: Path) -> None:
    """Raise if the budget in ``path`` was moved away. A new budget there would give the same client a second lifetime budget.

    Raises:
        ConfigError: the budget was moved to another file.
        Declined: the file is unreliable.
    """
    books = read_books(path) if path.exists() else None
    if books and books.refusals and is_moved(books):
        raise ConfigError(f"{books.refusals.reason}. A new budget here would give the same client a second lifetime budget")


def is_moved(books: Books) -> bool:
    """Return whether the budget file with the contents ``books`` was moved to another file. Then its budget cannot be set again."""
    return books.limit.epsilon == 0 and books.refusals is not None and books.refusals.reason.startswith(MOVED)


def _copy(path: Path, target: Path) -> None:
    """Copy the last committed state of the budget file ``path`` durably to the new file ``target``.

    The caller has a write transaction open, which keeps other processes from writing meanwhile.
    """
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise ConfigError(f"the new budget file {target} cannot be made: {error.strerror}") from None
    try:
        with (
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(f"{target.absolute().as_uri()}?mode=rw", uri=True)) as copy,
        ):
            copy.execute("PRAGMA synchronous = EXTRA")
            source.backup(copy)
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be copied to {target}: {' '.join(str(error).split())}") from None
