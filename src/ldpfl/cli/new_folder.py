"""Where a command writes that was given no folder."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path


def new_folder(name: str) -> Path:
    """Return a folder below ``runs`` that is named after ``name`` and the time, and is not there yet.

    It is made by who writes into it, so of two commands that begin in the same millisecond only the later one may see the other's.
    """
    stamped = f"{name.replace('/', '-')}-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')[:-3]}"
    names = (stamped, *(f"{stamped}-{number}" for number in range(2, 100)))
    return next((folder for own in names if not (folder := Path("runs") / own).exists()), Path("runs") / stamped)
