"""Default output folder of commands."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path


def new_folder(name: str) -> Path:
    """Return a path below ``runs`` that is named after ``name`` and the time, and does not exist yet, unless all 99 candidates exist.

    The folder is created by the code that writes into it. So two commands that begin in the same millisecond may get the same path.
    """
    milliseconds_stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]  # %f has six digits, microseconds
    stamped = f"{name.replace('/', '-')}-{milliseconds_stamp}"
    candidates = [Path("runs") / folder_name for folder_name in (stamped, *(f"{stamped}-{number}" for number in range(2, 100)))]
    return next((folder for folder in candidates if not folder.exists()), candidates[0])
