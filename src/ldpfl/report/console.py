"""The terminal: where all that is printed goes through, whatever it can show."""

from __future__ import annotations

import codecs
import sys
from typing import Any

from rich.console import Console

from ldpfl.util.files import to_json

_ASCII_FORMS = {"±": "+-", "…": "...", "δ": "delta", "ε": "epsilon", "é": "e", "•": "*"}
"""ASCII forms of other characters that this package and the libraries which draw for it write."""

_BRAILLE = range(0x2800, 0x2900)  # characters of spinners


def terminal(**settings: Any) -> Console:
    """Return a console that prints every text as it is: a text from somebody else's folder or ledger is no markup."""
    return Console(markup=False, emoji=False, **settings)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON that every reader takes: a number that is not finite becomes null."""
    print(to_json(value, indent=2))


def print_anything() -> None:
    """Make standard output and error replace characters that their encoding lacks, such as emojis, instead of ending the program."""
    codecs.register_error("ldpfl", _replacement)
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:  # other objects may have replaced the streams
            reconfigure(errors="ldpfl")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """Return the text for the characters that cannot be encoded, and the position after them, as an error handler of ``codecs`` must."""
    if not isinstance(error, UnicodeEncodeError):
        raise error  # the handler is for output; bytes that were read have no right replacement
    text = error.object[error.start : error.end]
    return "".join(map(_ascii_form, text)), error.end


def _ascii_form(char: str) -> str:
    """Return a character's ASCII form, or its escape sequence."""
    if ord(char) in _BRAILLE:  # spinners are drawn with these
        return "*"
    return _ASCII_FORMS.get(char, char.encode("ascii", "backslashreplace").decode())
