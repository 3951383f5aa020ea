"""The user's cache: its folder, and cached tensors that no other user can have changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ldpfl.errors import DataError, WriteError
from ldpfl.util.file_owners import require_own
from ldpfl.util.files import make_folder, replace_atomically

CACHE_DIR_VARIABLE = "LDPFL_CACHE_DIR"

_UNUSABLE = Path(os.devnull, "ldpfl")
"""Path at which no folder can be created, so that nothing is cached."""

Warn = Callable[[str], None]


def cache_dir() -> Path:
    """Return the user's cache folder for ldpfl; the environment variable ``LDPFL_CACHE_DIR`` overrides it.

    A user without a home gets a folder that cannot be created, so nothing is cached: in a shared folder, others could change the files.
    """
    override = os.environ.get(CACHE_DIR_VARIABLE)
    if override:
        return Path(override)
    try:
        folder = user_cache_path("ldpfl", appauthor=False)
    except RuntimeError:  # there is no home; other versions of the library say "~"
        return _UNUSABLE
    return folder if folder.is_absolute() else _UNUSABLE


def warning_of_no_cache(error: WriteError) -> str:
    """Return the warning that nothing is cached. It is the same for all files, so that it can be printed once."""
    return (
        f"going on without the cache folder {cache_dir()} ({error.reason}): results that it would store are computed anew each time. "
        f"Set {CACHE_DIR_VARIABLE} to a folder that can be written"
    )


def read_cached(path: Path, what: str) -> dict[str, Tensor] | None:
    """Return the tensors that :func:`write_cached` stored at ``path``, described by ``what``. None if they must be computed again.

    That is so if the file does not exist or is damaged, or if other users could have changed or read it.
    """
    try:
        return load_file(require_own(path, f"the cached {what}", DataError, secret=True))
    except (SafetensorError, OSError, DataError):
        return None


def write_cached(path: Path, tensors: dict[str, Tensor], what: str, warn: Warn) -> None:
    """Store ``tensors``, described by ``what``, for this user alone. A cache that cannot be written must not stop a run."""
    try:
        make_folder(path.parent, mode=0o700)
        require_own(path.parent, f"the folder of cached {what}", DataError, secret=True)
        with replace_atomically(path, mode=0o600) as temporary:
            save_file(tensors, temporary)
    except WriteError as error:
        warn(warning_of_no_cache(error))
    except DataError as error:
        warn(f"nothing is cached: {error}")
