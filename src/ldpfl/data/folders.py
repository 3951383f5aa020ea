"""Find the data files in a folder, and the split that each belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ldpfl.errors import ConfigError

_MACOS_ARCHIVE_FOLDER = "__MACOSX"
"""Folder with copies of attributes that macOS adds to archives."""

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
}
"""Split by the word that a file's or a folder's name begins with."""

_FIRST_WORD = re.compile(r"[a-z]+")


def visible_files(folder: Path) -> list[Path]:
    """Return all files below ``folder``, sorted by path, without hidden files and files in hidden folders.

    Editors and notebooks keep copies in hidden folders, and each row would count twice.
    """
    return sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder).parts))


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part == _MACOS_ARCHIVE_FOLDER for part in parts)


def split_in_path(path: Path) -> str | None:
    """Return the split that the file's name, or else that of the nearest folder above it, begins with: train, test, validation or None."""
    first_words = (_FIRST_WORD.match(part.lower()) for part in reversed(path.parts))
    return next((_SPLITS[word.group()] for word in first_words if word and word.group() in _SPLITS), None)


def check_one_split(paths: Iterable[Path], folder: Path) -> None:
    """Raise a :class:`ConfigError` if ``paths`` below ``folder`` contain both a train split and a test or validation split.

    A test split alone is fine: it may be a class that is called "test".
    """
    path_by_split = {split_in_path(path): path for path in paths}
    held_out = path_by_split.get("test") or path_by_split.get("validation")
    if held_out and "train" in path_by_split:
        raise ConfigError(
            f"{folder} holds training data {str(path_by_split['train'])!r} and test data {str(held_out)!r}: name the first in "
            "data.path, the second in data.test_path"
        )
