"""Files of a SQLite store: that nobody else may use them, and a reserve of room on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.permissions import check_own

RESERVE_BYTES = 16 * 2**20
HEADROOM_BYTES = 4 * 2**20
"""What the reserve leaves free: the journal of an upload's block needs some room too."""

_SMALLEST_RESERVE = 2**20
_BESIDE = ("", "-journal", "-wal", "-shm")


def create_private(path: Path) -> None:
    """Make the file of a SQLite store, if there is none, and refuse one, or a journal of it, that is open to others.

    Raises:
        ConfigError: it is, or there can be no such file.
    """
    for file in (path.with_name(path.name + end) for end in _BESIDE):
        if file.exists():
            check_own(file, "the store", ConfigError, secret=True)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be opened: {error.strerror}") from None


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

    def make(self) -> None:
        """Take the room, as much as there is up to :data:`RESERVE_BYTES`, if it is not taken yet; where there is too little, do without."""
        size = min(RESERVE_BYTES, self._free() - HEADROOM_BYTES)
        if size < _SMALLEST_RESERVE or self.path.exists() or not hasattr(os, "posix_fallocate"):
            return
        with suppress(OSError):  # another process was quicker to make it
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError:  # or to take the room
                self.path.unlink()
            finally:
                os.close(descriptor)

    def _free(self) -> int:
        disk = os.statvfs(self.path.parent)
        return disk.f_bavail * disk.f_frsize
