"""Files of a SQLite store: keep other users from them, and reserve room on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ldpfl.errors import ConfigError
from ldpfl.util.file_owners import require_own

RESERVE_BYTES = 16 * 2**20
HEADROOM_BYTES = 4 * 2**20
"""Bytes that the reserve leaves free on the disk, for the journal of an upload's block."""

_SUFFIXES = ("", "-journal", "-wal", "-shm")  # ends of the names of a SQLite store's files


def create_private_file(path: Path) -> None:
    """Create the file of a SQLite store if there is none. Refuse a file, or a journal beside it, that other users can access.

    Raises:
        ConfigError: other users can access the file or a journal, or the file cannot be created.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ConfigError(f"the store {path} cannot be opened: {error.strerror}") from None
    real_path = path.resolve()  # a journal lies beside the file itself, whatever link leads to it
    for file in (real_path.with_name(real_path.name + suffix) for suffix in _SUFFIXES):
        if file.exists():
            # alone=True also refuses a file in a folder where others can create files: SQLite would apply any journal that they put there.
            try:
                require_own(file, "the store", ConfigError, secret=True, alone=True)
            except ConfigError:
                if file == real_path or file.exists():  # else the journal has just ended with another process's transaction: no fault
                    raise
                # Otherwise the file was another worker's journal, which that worker has deleted by now.


@dataclass(frozen=True)
class Reserve:
    """A file without content that reserves room on the disk. It is deleted to make room for deletions when the disk is full."""

    path: Path

    def delete(self) -> bool:
        """Delete the reserve; return whether there was one."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def is_full_size(self) -> bool:
        """Whether the reserve has its full size. True on systems without ``posix_fallocate``, where there is no reserve."""
        try:
            return self.path.stat().st_size >= RESERVE_BYTES
        except FileNotFoundError:
            return not hasattr(os, "posix_fallocate")

    def enlarge(self) -> None:
        """Enlarge the reserve to its full size, or as far as the disk has room beyond :data:`HEADROOM_BYTES`."""
        if self.is_full_size:
            return
        with suppress(OSError):  # if the disk has less room than it reported, the reserve stays as it is
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                size = min(RESERVE_BYTES, os.fstat(descriptor).st_size + self._free_bytes() - HEADROOM_BYTES)
                if size > os.fstat(descriptor).st_size:
                    os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)

    def _free_bytes(self) -> int:
        """Return how many bytes are free on the reserve's disk."""
        disk = os.statvfs(self.path.parent)
        return disk.f_bavail * disk.f_frsize
