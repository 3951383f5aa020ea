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
    own = path.resolve()  # where it really lies: a link's folder says nothing of it
    try:
        status, folders = own.stat(), [(folder, folder.stat()) for folder in own.parents]
    except OSError as problem:
        raise error(f"{what} {path} cannot be read: {problem.strerror}") from None
    if os.name != "posix":
        return
    for place, found in ((own, status), *folders):
        if found.st_uid not in (os.geteuid(), 0):
            raise error(f"{what} {path}: {place} belongs to another user, who can change it: make this user its owner")
    if status.st_mode & (_OPEN if secret else _WRITABLE):
        raise error(f"{what} {path} can be {'read' if secret else 'changed'} by other users: chmod {'600' if secret else '644'} it")
    for folder, found in folders:
        # In a sticky folder, such as /tmp, others can make files, and move none that are not theirs.
        if found.st_mode & _WRITABLE and not (found.st_mode & stat.S_ISVTX and not (alone and folder == own.parent)):
            raise error(f"{what} {path} lies in a folder that other users can write to: chmod go-w {folder}, or move it")
