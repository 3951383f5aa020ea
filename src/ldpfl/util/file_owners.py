"""Check that no other user can change, or read, files that this machine's security depends on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ldpfl.errors import LdpflError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_MAY_ACCESS = stat.S_IRWXG | stat.S_IRWXO


def require_own(path: Path, name: str, error: type[LdpflError], *, secret: bool, alone: bool = False) -> Path:
    """Return the resolved ``path``, if no other user can change the file, replace it or, if it is ``secret``, read it.

    The file, and each folder and link on the way to it, must belong to this user or to root, who can do everything anyway. Open the
    returned path, not ``path``. On systems other than POSIX, the path is only resolved.

    Args:
        name: name of the file for the message, such as "the node's key".
        error: type of the error to raise.
        secret: whether other users may not even read the file.
        alone: whether to refuse a folder in which other users can create files, too. A reader that opens files beside this one, as SQLite
            opens a journal, needs that.

    Raises:
        LdpflError: of the type ``error``: another user can access the file, or the file's owner cannot be determined.
    """
    try:
        resolved = path.resolve(strict=True)
        status_of = {place: place.lstat() for place in (*_passed_on_the_way(path), *resolved.parents, resolved)}
    except (OSError, RuntimeError) as problem:
        raise error(f"{name} {path} cannot be read: {getattr(problem, 'strerror', None) or 'its links go in a circle'}") from None
    if os.name != "posix":
        return resolved
    for place, status in status_of.items():
        if status.st_uid not in (os.geteuid(), 0):
            raise error(f"{name} {path}: {place} belongs to another user, who can change it: make the user who runs ldpfl its owner")
    if status_of[resolved].st_mode & (_OTHERS_MAY_ACCESS if secret else _OTHERS_MAY_WRITE):
        raise error(f"{name} {path} can be {'read' if secret else 'changed'} by other users: run chmod {'600' if secret else '644'} {path}")
    for place, status in status_of.items():
        # In a sticky folder, such as /tmp, others can create files, but cannot move files that belong to somebody else.
        may_be_shared = status.st_mode & stat.S_ISVTX and not (alone and place == resolved.parent)
        if stat.S_ISDIR(status.st_mode) and place != resolved and status.st_mode & _OTHERS_MAY_WRITE and not may_be_shared:
            raise error(f"{name} {path} lies in a folder that other users can write to: run chmod go-w {place}, or move the file")
    return resolved


def _passed_on_the_way(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file on the way to ``path``. Its links must not go in a circle."""
    absolute = path.absolute()
    for passed in (*reversed(absolute.parents), absolute):
        yield passed
        if passed.is_symlink():
            # From here on the way leads through the link's target.
            yield from _passed_on_the_way(passed.parent / passed.readlink() / absolute.relative_to(passed))
            return
