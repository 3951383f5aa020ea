"""Moving a lifetime budget to another file: two files of one client would each allow all that is left."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from ldpfl.errors import ConfigError, Declined
from ldpfl.privacy.budget_file import MOVED, Books, books_in, close_for_good, opened, read_books
from ldpfl.util.files import writing


def move(path: Path, to: Path) -> Books:
    """Write the budget in ``path``, with all that was charged, to the new file ``to``; return what that says.

    Before ``to`` has its name, the old file is set to epsilon 0: it allows nothing any more, whoever still uses it. A process that is
    killed in between leaves the copy with ``.part`` behind its name. It counts only if the old file is 0; else it has to be removed.

    Raises:
        ConfigError: there is something at ``to``, or it cannot be made, or the old file has epsilon 0 and so nothing to move.
        Declined: the old file, or the place of the new one, is not to be relied on.
    """
    part = to.with_name(f"{to.name}.part")
    if os.path.lexists(to):
        raise ConfigError(f"{to} exists and is left as it is: give another name")
    if os.path.lexists(part):
        raise ConfigError(
            f"{part} was left by a move that was interrupted. If ldpfl budget show says that {path} is 0, rename it to {to.name}; "
            "if not, remove it, and move again"
        )
    with opened(path, write=True) as connection:  # nobody else charges until this is over
        if books_in(connection).limit.epsilon == 0:
            raise ConfigError(f"the budget in {path} is 0: it was moved before, or set so; there is nothing to move")
        _copy(path, part)
        try:
            read_books(part)  # where nobody relies on it, nothing would leave any more, and what was moved would be lost
        except Declined:
            part.unlink()
            raise
        close_for_good(connection, f"{MOVED} {to.absolute()}: use that file")
    with writing(to):
        part.rename(to)
    return read_books(to)


def refuse_moved(path: Path) -> None:
    """Return if the budget in ``path``, if there is one, was not moved: a new one there would be a second lifetime of the same client.

    Raises:
        ConfigError: it was moved.
        Declined: the file is not to be relied on.
    """
    books = read_books(path) if path.exists() else None
    if books and books.limit.epsilon == 0 and books.refusals and books.refusals.reason.startswith(MOVED):
        raise ConfigError(f"{books.refusals.reason}. A budget that begins here anew would be a second one of the same client")


def _copy(path: Path, part: Path) -> None:
    """Copy the file's last committed state, to disk; a reader beside the transaction that keeps others from writing."""
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise ConfigError(f"{part} cannot be made: {error.strerror}") from None
    try:
        with (
            closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(f"{part.absolute().as_uri()}?mode=rw", uri=True)) as copy,
        ):
            copy.execute("PRAGMA synchronous = EXTRA")
            source.backup(copy)
    except sqlite3.Error as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be copied to {part}: {' '.join(str(error).split())}") from None
