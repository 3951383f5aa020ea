"""Which files of a folder are data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ldpfl.errors import ConfigError

_MADE_BY_ARCHIVES = "__MACOSX"
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
}
_WORD = re.compile(r"[a-z]+")


def visible_files(folder: Path) -> list[Path]:
    """Return all files below ``folder``, sorted by their paths, but those that are hidden, or in a folder that is.

    Editors and notebooks keep copies there: each row would count twice.
    """
    return sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder).parts))


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") or part == _MADE_BY_ARCHIVES for part in parts)


def split_of(path: Path) -> str | None:
    """Return which split the name of a file, or of a folder that it is in, begins with, in any case: train, test, validation or none."""
    words = (_WORD.match(part.lower()) for part in reversed(path.parts))
    return next((_SPLITS[word.group()] for word in words if word and word.group() in _SPLITS), None)


def check_one_split(paths: Iterable[Path], folder: Path) -> None:
    """Raise a :class:`ConfigError` if ``paths`` below ``folder`` say that some rows are to be trained on and others not.

    A class may be called test.
    """
    named = {split_of(path): path for path in paths}
    held = named.get("test") or named.get("validation")
    if held and "train" in named:
        raise ConfigError(
            f"{folder} holds {str(named['train'])!r} beside {str(held)!r}, and all would be trained on: name what is to be trained on in "
            "data.path, and what is to be measured on in data.test_path"
        )
