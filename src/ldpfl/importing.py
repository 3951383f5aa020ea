"""Code that a user names: ``package.module:name`` or ``file.py:name``, the current folder included."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

from ldpfl.errors import ConfigError, in_short

GIVEN = "given"
"""Name of data, or of a model, that a caller hands over; nothing but its caller can run such a config again."""


def is_code(name: str) -> bool:
    """Tell whether ``name`` is an import path, whose code would run."""
    return ":" in name


def lies_in_file(name: str) -> bool:
    """Tell whether the code ``name`` is that of a file, of whatever folder a process happens to run in, and not of an installed package."""
    return name.partition(":")[0].endswith(".py")


def called(what: str, path: str, *arguments: Any, **options: Any) -> Any:
    """Return what the function or class at ``path`` makes of the arguments; ``what`` is named in errors.

    Raises:
        ConfigError: there is none, or it fails.
    """
    module_name, _, attribute = path.partition(":")
    try:
        with _found_in(_folder_of(module_name)):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else import_module(module_name)
            return getattr(module, attribute)(*arguments, **options)
    except Exception as error:  # it is the user's code: anything may come out of it
        # What reads somebody's data may repeat them in what it says went wrong.
        said = in_short(error) if what == "data" else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} {path!r} cannot be built: {said}") from error


def _of_file(path: Path) -> ModuleType:
    # A name of its own: the file may be called as a module that others mean. By the path, so that one file is one module.
    name = f"_ldpfl_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes defined there can be copied and saved
    spec.loader.exec_module(module)
    return module


def _folder_of(module: str) -> Path | None:
    """Return where what is named may have others beside it: a file's own folder, or the current one if nowhere else is a module so called.

    What is installed, and what lies elsewhere, needs nothing of the folder that one happens to be in, which may be somebody else's.
    """
    if module.endswith(".py"):
        return Path(module).resolve().parent
    return Path.cwd() if util.find_spec(module.partition(".")[0]) is None else None


@contextmanager
def _found_in(folder: Path | None) -> Iterator[None]:
    """Let modules of ``folder`` be found, after all others: what is installed keeps its name."""
    if folder is None:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
