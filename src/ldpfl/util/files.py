"""Write files atomically, so that a crash leaves the old or the new content; read files that strangers may have made."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from ldpfl.errors import ConfigError, WriteError

_TEMPORARY_SUFFIX = ".partial"
_LEFTOVERS = (f".*{_TEMPORARY_SUFFIX}", ".tmp??????")
"""Patterns of the files that a killed process leaves: our own temporary files, and those that safetensors makes beside them."""

_OS_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


def write_error(path: Path, number: int | None, reason: str) -> WriteError:
    """Return the error for ``path``, given the system's error number, or None if it is not known, and the system's text."""
    match number:
        case errno.ENOSPC:
            return WriteError(f"no space left on the device of {path.parent}", reason, "make room")
        case errno.EDQUOT:
            return WriteError(f"no space left for this user on the device of {path.parent}: the quota is used up", reason, "make room")
        case errno.EFBIG:
            return WriteError(f"{path} would become larger than this system or user allows", reason, "allow larger files (ulimit -f)")
        case errno.EROFS:
            return WriteError(f"{path.parent} is on a read-only file system", reason, "make it writable")
    return WriteError(f"{path} cannot be written: {reason}", reason, "correct the cause")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors in the block, which writes ``path``, into :class:`WriteError`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error.errno, error.strerror or str(error)) from error
    except SafetensorError as error:
        match = _OS_ERROR_NUMBER.search(str(error))  # only its text has the system's error number
        if match is None:
            raise
        number = int(match[1])
        raise write_error(path, number, os.strerror(number)) from error


@contextmanager
def replace_atomically(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; if the block succeeds, flush that file to disk and rename it to ``path``.

    ``mode`` is the file's mode; by default that of any new file of this user.

    Raises:
        WriteError: the system refuses to write, here or in the block; ``path`` is unchanged.
    """
    with writing(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_TEMPORARY_SUFFIX, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            temporary.chmod(0o666 & ~_umask() if mode is None else mode)  # mkstemp makes files that only their owner may read
            with temporary.open("rb+") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
            _flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def check_suffix(path: Path, description: str, *suffixes: str) -> None:
    """Raise if ``path`` has a suffix that is none of ``suffixes``, by which other programs would misread the file.

    The error says that the file is ``description``, such as "a page in HTML", and suggests the first of ``suffixes``. A path without a
    suffix is allowed.

    Raises:
        ConfigError: the suffix is another one.
    """
    if path.suffix.lower() not in ("", *suffixes):
        name = path.with_suffix(suffixes[0]).name
        raise ConfigError(
            f"{description} cannot be written to {path}, because the suffix {path.suffix} stands for another format: name the file {name}"
        )


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


class Inside:
    """Attribute of a folder's class: the path of a file or folder inside it. The folder's own path is its attribute ``path``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: _Folder, owner: type) -> Path:
        return folder.path / self._name


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create the folder ``path`` and its parents, unless it exists. ``mode`` is the new folder's mode, before the umask.

    Raises:
        WriteError: the system refuses to create it.
    """
    with writing(path):
        path.mkdir(mode, parents=True, exist_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that a killed process left in ``folder``. No other process may be writing there."""
    for pattern in _LEFTOVERS:
        for leftover in folder.glob(pattern):
            leftover.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically; errors as in :func:`replace_atomically`."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def append_text(path: Path, text: str, size: int) -> None:
    """Truncate the file at ``path`` to ``size`` bytes, append ``text``, and flush it to disk.

    After a crash, the first ``size`` bytes are unchanged, and any part of ``text`` may follow them.

    Raises:
        WriteError: the system refuses to write.
    """
    with writing(path), path.open("rb+") as file:
        file.truncate(size)
        file.seek(size)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def ends_with(path: Path, text: str) -> bool:
    """Whether the file at ``path`` ends with ``text``."""
    end = text.encode()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(end)))
        return file.read(len(end)) == end


def finite(value: Any) -> Any:
    """Return ``value`` with None in place of every number that is not finite, because JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as standard JSON; numbers that are not finite become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


MAX_CONFIG_BYTES = 1 << 20
"""Size of the largest file that people write, or that describes a run in a few words. Recipes have some 2,000 bytes."""

MAX_RESULT_BYTES = 1 << 24
"""Size of the largest result. The figures of 100,000 rounds, the maximum, take 10 MiB."""

MAX_ROUNDS_BYTES = 80 << 20
"""Size of the largest ledger: 100,000 rounds at 838 bytes, where an event has 520 to 680."""

MAX_METRICS_BYTES = 1 << 29
"""Size of the largest metrics, which have some 115 bytes a layer and round: 60,000 rounds of 62 layers. They are read line by line."""

MAX_LINE_BYTES = 1 << 22
"""Size of the metrics of one round: 36,000 layers."""

_MAX_PARTS = 1 << 20
"""Lists and objects of the largest JSON that is read. Empty ones take 25 times their bytes; a ledger of 100,000 rounds has 200,000."""


_MAX_EVENT_PARTS = 1 << 18
_MAX_EVENT_VALUES = 5 << 19
_MAX_EVENT_NAMES = 1 << 10
"""Lists and objects, commas, and different names of fields in the largest ledger: 100,000 rounds of 2 objects and up to 25 commas each,
all with the same 22 fields.

Bytes alone would let it hold 16 million short texts, or 7 million names of fields, which take 1 GB and 10 s to read.
"""

_JSON_TEXT = re.compile(r'"((?:[^"\\]|\\.?)*+)(?:"(\s*+:)?|\Z)', re.DOTALL)
"""Matches a string of JSON, or its beginning at the end of the file, and the colon after the name of a field. Reads each character once."""


def check_regular(path: Path) -> None:
    """Raise unless ``path`` is a regular file. Reading a pipe in its place could block for ever.

    Raises:
        OSError: ``path`` is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_text(path: Path, most: int = MAX_CONFIG_BYTES, size: int | None = None) -> str:
    """Return the text of a file that a stranger may have made. A pipe or a device, which may have no end, is refused.

    Args:
        most: maximum number of bytes. Parsed text takes many times its size in memory.
        size: number of bytes to read from the start of a file that grows; None reads all.

    Raises:
        OSError: the file cannot be read, is no regular file, has more than ``most`` bytes, or fewer than ``size``.
        UnicodeDecodeError: the file is no UTF-8 text.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # to open a pipe must not wait for somebody who writes to it
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, expected at most {most:,}", str(path))
        if size is not None and status.st_size < size:
            raise OSError(errno.EINVAL, f"it has {status.st_size:,} bytes, expected {size:,}", str(path))
        # Python allocates as many bytes as are asked for, so no more may be asked for than the file has.
        return file.read(status.st_size if size is None else size).decode()


_MAX_KEY_PARTS = 8
"""Maximum number of parts of a dotted key in TOML. Configs and policies have three at most."""

_LONG_KEY = re.compile(r"(?:\.[ \t]*+[\w-]*+[ \t]*+){" + str(_MAX_KEY_PARTS) + "}")
"""Matches the end of a dotted key that has more than ``_MAX_KEY_PARTS`` parts."""

_NOT_KEYS = re.compile(
    r'"""(?:[^"\\]++|\\.?|"(?!""))*+(?:"{3,5}|\Z)'  # one or two quotes may stand before the three that end it
    r"|'''(?:[^']++|'(?!''))*+(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]++|\\[^\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
"""Strings and comments. A quoted part of a key is a string, too, and is replaced by a bare one before keys are looked at.

Reads each character once, because a string that nobody closes counts to the end of its line or text: there TOML is wrong anyhow.
"""


def from_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: the text is not TOML or is nested too deeply, or one of its numbers or keys is far too long.
    """
    # To parse a dotted key takes time that grows with the square of its parts. Strings and comments go first: their dots do not count.
    if _LONG_KEY.search(_NOT_KEYS.sub("0", text)):
        raise ValueError(f"a key has more than {_MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def from_json(text: str) -> Any:
    """Parse JSON. A bare NaN or infinity is read as None.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, has too many parts, a repeated field, or an integer of too many digits.
    """
    check_parts(text)
    try:
        return json.loads(text, parse_constant=lambda name: None, parse_int=whole_number, object_pairs_hook=unique_fields)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def whole_number(digits: str) -> int:
    """Parse the ``digits`` of an integer in a file.

    Raises:
        ValueError: there are more digits than any honest file has. Arithmetic with floats would fail later, far from the file.
    """
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits, expected at most {_MAX_DIGITS}")
    return int(digits)


_MAX_DIGITS = 39
"""Digits of the largest whole number in JSON, which is a seed of 128 bits."""


def from_json_lines(path: Path) -> Iterator[Any]:
    """Yield the parsed JSON of each line of a file; errors as in :func:`read_text` and :func:`from_json`."""
    for number, line in enumerate(read_text(path, MAX_METRICS_BYTES).splitlines(), start=1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"line {number} has {len(line):,} characters, expected at most {MAX_LINE_BYTES:,}")
        yield from_json(line)


def check_parts(text: str, most: int = _MAX_PARTS) -> None:
    """Raise if JSON has more than ``most`` lists and objects. No honest file has as many. Brackets in strings count, too.

    It is called before JSON is parsed, because in memory each list or object takes many times its bytes in the file.

    Raises:
        ValueError: the text has more lists and objects.
    """
    parts = text.count("[") + text.count("{")
    if parts > most:
        raise ValueError(f"it has {parts:,} lists and objects, expected at most {most:,}")


def check_events(text: str) -> None:
    """Raise if the JSON of a ledger has more parts, values or names of fields than a ledger of 100,000 rounds.

    Raises:
        ValueError: the text has more of them.
    """
    check_parts(text, _MAX_EVENT_PARTS)
    commas = text.count(",")  # each value but the first of a list or object follows one
    if commas > _MAX_EVENT_VALUES:
        raise ValueError(f"it has {commas:,} commas, expected at most {_MAX_EVENT_VALUES:,}")
    names = set[str]()
    for match in _JSON_TEXT.finditer(text):
        if match.lastindex == 2:  # a colon follows, so the text is the name of a field
            names.add(match[1])
            if len(names) > _MAX_EVENT_NAMES:
                raise ValueError(f"its fields have more than {_MAX_EVENT_NAMES:,} different names")


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from its fields. A repeated field is refused: some readers take its first value, and some its last.

    Raises:
        ValueError: a field is repeated.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"the field {repeated[:40]!r} is given twice: keep one")
    return fields


def _umask() -> int:
    """Return this process's umask. The system can only tell it by setting another one."""
    current = os.umask(0)
    os.umask(current)
    return current


def _flush_folder(folder: Path) -> None:
    """Flush the names of the files in ``folder`` to disk, so that a renamed file survives a power loss."""
    if os.name != "posix":  # only there can a folder be opened and synced
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
