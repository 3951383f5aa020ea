"""The terminal: where all that is printed goes through, whatever it can show."""

from __future__ import annotations

import codecs
import sys
from typing import Any

from rich.console import Console

from ldpfl.util.files import to_json

_SHOWN_AS = {"±": "+-", "…": "...", "δ": "delta", "ε": "epsilon", "é": "e", "•": "*"}
"""What we write ourselves, and the libraries that draw for us, beside ASCII."""

_SPINNERS = range(0x2800, 0x2900)


def terminal(**settings: Any) -> Console:
    """Return a console that takes every text as it stands: what a folder or ledger of somebody else says steers nothing."""
    return Console(markup=False, emoji=False, **settings)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON that every reader takes: a number that is not finite becomes null."""
    print(to_json(value, indent=2))


def print_anything() -> None:
    """Have standard output and error spell out what their encoding lacks, such as an emoji, in place of ending the program."""
    codecs.register_error("ldpfl", _spelled_out)
    for stream in (sys.stdout, sys.stderr):
        if (change := getattr(stream, "reconfigure", None)) is not None:  # what stands in their place may be no text file
            change(errors="ldpfl")


def _spelled_out(error: UnicodeError) -> tuple[str, int]:
    """Return what is written for the characters of ``error``, an error handler's way."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(map(_one_spelled_out, text)), error.end


def _one_spelled_out(char: str) -> str:
    if ord(char) in _SPINNERS:
        return "*"
    return _SHOWN_AS.get(char, char.encode("ascii", "backslashreplace").decode())
