"""Whether a file is its owner's alone: what decides or opens something on this machine must not be anybody else's to change or read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ldpfl.errors import LdpflError

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_OPEN = stat.S_IRWXG | stat.S_IRWXO


def require_own(path: Path, what: str, error: type[LdpflError], *, secret: bool, alone: bool = False) -> Path:
    """Return where ``path`` really lies, if no other user could have changed it, put another in its place, or, if ``secret``, read it.

    The file, and each folder and link on the way to it, as it is written and as links lead on, must be this user's or root's, which can
    do everything anyway. Open what is returned. Only POSIX systems say who may do what in a way that this understands.

    Args:
        what: what the file is, for the message.
        error: what to raise.
        alone: whether files beside it matter as well, as a database's journal does: then others may make none in its folder.

    Raises:
        LdpflError: of the kind ``error``: others can, or the file cannot be looked at.
    """
    try:
        own = path.resolve(strict=True)
        passed = {place: place.lstat() for place in (*_passed(path), *own.parents, own)}
    except (OSError, RuntimeError) as problem:
        raise error(f"{what} {path} cannot be read: {getattr(problem, 'strerror', None) or 'its links go in a circle'}") from None
    if os.name != "posix":
        return own
    for place, found in passed.items():
        if found.st_uid not in (os.geteuid(), 0):
            raise error(f"{what} {path}: {place} belongs to another user, who can change it: make this user its owner")
    if passed[own].st_mode & (_OPEN if secret else _WRITABLE):
        raise error(f"{what} {path} can be {'read' if secret else 'changed'} by other users: chmod {'600' if secret else '644'} it")
    for place, found in passed.items():
        # In a sticky folder, such as /tmp, others can make files, and move none that are not theirs.
        sticky = found.st_mode & stat.S_ISVTX and not (alone and place == own.parent)
        if stat.S_ISDIR(found.st_mode) and place != own and found.st_mode & _WRITABLE and not sticky:
            raise error(f"{what} {path} lies in a folder that other users can write to: chmod go-w {place}, or move it")
    return own


def _passed(path: Path) -> Iterator[Path]:
    """Yield every folder, link and file that is passed on the way to ``path``, which must not go in a circle."""
    place = path.absolute()
    for step in (*reversed(place.parents), place):
        yield step
        if step.is_symlink():
            yield from _passed(step.parent / step.readlink() / place.relative_to(step))
            return
