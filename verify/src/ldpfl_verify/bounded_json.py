"""Read a JSON file that may be hostile: its size, its parts and its nesting are bounded before it is parsed, and no field comes twice."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

MAX_CERTIFICATE_BYTES = 1 << 23
"""Size of the largest certificate. The 10,000 kinds of rounds that it may charge take 6 MiB."""

MAX_LEDGER_BYTES = 80 << 20
"""Size of the largest ledger: 100,000 rounds of at most 838 bytes each."""

MAX_CERTIFICATE_PARTS = 1 << 20
"""Number of lists and objects in the largest certificate. An empty one takes 25 times its bytes in memory."""

MAX_LEDGER_PARTS = 1 << 18
MAX_LEDGER_COMMAS = 5 << 19
MAX_LEDGER_NAMES = 1 << 10
"""Numbers of lists and objects, of commas, and of different field names in the largest ledger: 100,000 rounds with 25 commas each."""

_TEXT = re.compile(r'"((?:[^"\\]|\\.?)*+)(?:"(\s*+:)?|\Z)', re.DOTALL)
"""A text in JSON, and the colon behind it if the text is a field's name. The pattern takes each character once."""


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: the file cannot be read, is a pipe or a device (which may have no end), or has more than ``max_bytes`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, expected at most {max_bytes:,}", str(path))
        return file.read(status.st_size)


def parse_certificate(text: str) -> Any:
    """Return the JSON of a certificate as Python objects.

    Raises:
        ValueError: the text is no JSON, has too many parts, is nested too deeply, or gives a field twice.
    """
    _check_parts(text, MAX_CERTIFICATE_PARTS)
    return _parse(text)


def parse_ledger(text: str) -> Any:
    """Return the JSON of a ledger as Python objects.

    Raises:
        ValueError: as for :func:`parse_certificate`; or the text has more values or field names than a ledger of 100,000 rounds.
    """
    _check_parts(text, MAX_LEDGER_PARTS)
    if text.count(",") > MAX_LEDGER_COMMAS:
        raise ValueError(f"it has {text.count(','):,} commas, expected at most {MAX_LEDGER_COMMAS:,}")
    names = set[str]()
    for match in _TEXT.finditer(text):
        if match.lastindex == 2:  # a colon follows, so the text is a field's name
            names.add(match[1])
            if len(names) > MAX_LEDGER_NAMES:
                raise ValueError(f"its fields have more than {MAX_LEDGER_NAMES:,} different names")
    return _parse(text)


def _check_parts(text: str, max_parts: int) -> None:
    """Raise a ``ValueError`` if the JSON in ``text`` has more lists and objects: each takes many times its bytes in memory."""
    parts = text.count("[") + text.count("{")
    if parts > max_parts:
        raise ValueError(f"it has {parts:,} lists and objects, expected at most {max_parts:,}")


def _parse(text: str) -> Any:
    """Parse JSON. NaN, infinity and a field that is given twice are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_fields)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinity, which Python's parser would accept."""
    raise ValueError(f"got {name}, expected a finite number")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object. A field that is given twice is refused, because some readers take its first value and some its last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"the field {repeated[:40]!r} is given twice: keep one")
    return fields
