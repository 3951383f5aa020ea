"""Whether a file is its owner's alone: what decides or opens something on this machine must not be anybody else's to change or read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ldpfl.errors import LdpflError

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_OPEN = stat.S_IRWXG | stat.S_IRWXO


def check_own(path: Path, what: str, error: type[LdpflError], *, secret: bool, alone: bool = False) -> None:
    """Return if no other user of this machine could have changed ``path``, put another file in its place, or, if it is ``secret``, read it.

    Root is no other user: it can do everything anyway. Only POSIX systems say who may do what in a way that this understands.

    Args:
        what: what the file is, for the message.
        error: what to raise.
        alone: whether files beside it matter as well, as a database's journal does: then others may make none in its folder.

    Raises:
        LdpflError: of the kind ``error``: others can, or the file cannot be looked at.
    """
    try:
        status, folder = path.stat(), path.parent.stat()
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from None
    if os.name != "posix":
        return
    for place, owner in ((path, status.st_uid), (path.parent, folder.st_uid)):
        if owner not in (os.geteuid(), 0):
            raise error(f"{what} {path}: {place} belongs to another user, who can change it: make this user its owner")
    if status.st_mode & (_OPEN if secret else _WRITABLE):
        raise error(f"{what} {path} can be {'read' if secret else 'changed'} by other users: chmod {'600' if secret else '644'} it")
    if folder.st_mode & _WRITABLE and (alone or not folder.st_mode & stat.S_ISVTX):
        raise error(
            f"{what} {path} lies in a folder that other users can write to: chmod go-w {path.parent}, or move it to a folder of its own"
        )
