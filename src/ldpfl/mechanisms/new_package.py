"""A new package with one mechanism: files that its author reads, changes and installs."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.registry import names
from ldpfl.util.files import write_text

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_LENGTH = 40
"""Pattern of a mechanism's name, and its largest number of characters."""


def package_files(name: str) -> dict[str, str]:
    """Return the files of a new package that provides the mechanism ``name``: text by file name."""
    package = name.replace("-", "_")
    placeholders = {"name": name, "package": package, "class": "".join(part.capitalize() for part in name.split("-"))}
    template_of = {
        "pyproject.toml": "pyproject.toml.txt",
        f"{package}.py": "module.py.txt",
        f"test_{package}.py": "test_module.py.txt",
        "README.md": "README.md.txt",
    }
    folder = files("ldpfl.mechanisms") / "template"
    return {file: Template((folder / path).read_text(encoding="utf-8")).substitute(placeholders) for file, path in template_of.items()}


def write_package(folder: Path, name: str) -> None:
    """Write the files of a package that provides the mechanism ``name`` into a new ``folder``.

    Raises:
        ConfigError: ``name`` is not valid, a mechanism or a Python module has it already, or ``folder`` is a file or not empty.
    """
    if not _NAME.fullmatch(name) or len(name) > _MAX_LENGTH:
        raise ConfigError(f"{name[:60]!r} is not a valid name: use up to {_MAX_LENGTH} small letters, digits and single hyphens")
    if name in names():
        raise ConfigError(f"a mechanism {name!r} exists already: give the new one another name")
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or find_spec(package) is not None:
        raise ConfigError(f"{name!r} would need the module name {package}, which Python already uses: give another name")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and was not changed: give a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in package_files(name).items():
        write_text(folder / file, text)
