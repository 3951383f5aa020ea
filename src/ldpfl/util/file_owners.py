"""Check that no other user can change, or read, files that this machine's security depends on."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ldpfl.errors import LdpflError

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_OPEN = stat.S_IRWXG | stat.S_IRWXO


def require_own(path: Path, what: str, error: type[LdpflError], *, secret: bool, alone: bool = False) -> Path:
    """Return the resolved ``path``, if no other user can change the file, replace it or, if it is ``secret``, read it.

    The file, and each folder and link on the way to it, must belong to this user or to root, who can do everything anyway. Open the
    returned path, not ``path``. On systems other than POSIX, the path is only resolved.

    Args:
        what: what the file is, for the message.
        error: type of the error to raise.
        secret: whether other users may not even read the file.
        alone: whether other users may not create files beside it either, because the reader also uses those, as a database its journal.

    Raises:
        LdpflError: of the type ``error``: another user can access the file, or the file's owner cannot be found out.
    """
    try:
        resolved = path.resolve(strict=True)
        passed = {place: place.lstat() for place in (*_passed(path), *resolved.parents, resolved)}
    except (OSError, RuntimeError) as problem:
        raise error(f"{what} {path} cannot be read: {getattr(problem, 'strerror', None) or 'its links go in a circle'}") from None
    if os.name != "posix":
        return resolved
    for place, found in passed.items():
        if found.st_uid not in (os.geteuid(), 0):
            raise error(f"{what} {path}: {place} belongs to another user, who can change it: make this user its owner")
    if passed[resolved].st_mode & (_OPEN if secret else _WRITABLE):
        raise error(f"{what} {path} can be {'read' if secret else 'changed'} by other users: chmod {'600' if secret else '644'} it")
    for place, found in passed.items():
        # In a sticky folder, such as /tmp, others can create files, but cannot move files that belong to somebody else.
        sticky = found.st_mode & stat.S_ISVTX and not (alone and place == resolved.parent)
        if stat.S_ISDIR(found.st_mode) and place != resolved and found.st_mode & _WRITABLE and not sticky:
            raise error(f"{what} {path} lies in a folder that other users can write to: chmod go-w {place}, or move it")
    return resolved


def _passed(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file on the way to ``path``. Its links must not go in a circle."""
    place = path.absolute()
    for step in (*reversed(place.parents), place):
        yield step
        if step.is_symlink():
            yield from _passed(step.parent / step.readlink() / place.relative_to(step))
            return
