"""Files of a SQLite store: that nobody else may use them, and a reserve of room on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.util.file_owners import require_own

RESERVE_BYTES = 16 * 2**20
HEADROOM_BYTES = 4 * 2**20
"""What the reserve leaves free: the journal of an upload's block needs some room too."""

_BESIDE = ("", "-journal", "-wal", "-shm")


def create_private(path: Path) -> None:
    """Make the file of a SQLite store, if there is none, and refuse one, or a journal of it, that is open to others.

    Raises:
        ConfigError: it is, or there can be no such file.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be opened: {error.strerror}") from None
    real = path.resolve()  # a journal lies beside the file itself, whatever link leads to it
    for file in (real.with_name(real.name + end) for end in _BESIDE):
        if file.exists():
            # Alone: SQLite would take a journal beside it, whoever made that, for its own, and roll it back into the store.
            try:
                require_own(file, "the store", ConfigError, secret=True, alone=True)
            except ConfigError:
                if file == real or file.exists():
                    raise
                # Another worker's journal, which is gone: there is nothing left that SQLite could take for its own.


@dataclass(frozen=True)
class Reserve:
    """A file that only takes up room, so that there is some left for deleting when the disk is full otherwise."""

    path: Path

    def give_up(self) -> bool:
        """Give the room back; return whether there was any."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def whole(self) -> bool:
        """Whether all of it is there; then what is written beside it may use what else there is."""
        try:
            return self.path.stat().st_size >= RESERVE_BYTES
        except FileNotFoundError:
            return not hasattr(os, "posix_fallocate")

    def make(self) -> None:
        """Take the room that it lacks, as much as there is but for :data:`HEADROOM_BYTES`; where there is too little, do without."""
        if self.whole:
            return
        with suppress(OSError):  # there is less room than it seemed
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                size = min(RESERVE_BYTES, os.fstat(descriptor).st_size + self._free() - HEADROOM_BYTES)
                if size > os.fstat(descriptor).st_size:
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)

    def _free(self) -> int:
        disk = os.statvfs(self.path.parent)
        return disk.f_bavail * disk.f_frsize
