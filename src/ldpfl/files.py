"""Write files so that a crash leaves the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIX = ".partial"


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success, flush it to disk and put it in place of ``path``."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_SUFFIX, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files that only their owner may read
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written in ``folder``; no other process may be writing there."""
    for leftover in folder.glob(f".*{_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # only there can a folder be opened and synced
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
