"""The one exception of this package, and how its messages quote what other people wrote."""

from __future__ import annotations

MAX_QUOTED_CHARACTERS = 80


class CertificateError(Exception):
    """A certificate or a ledger cannot be read, was changed, or does not belong to the other.

    The message is one line of printable characters, whatever the file says: it can forge no line of a log and no colour on a screen.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return ``text`` with every character that is not printable spelled out, as in ``\\n`` or ``\\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def quoted(value: object) -> str:
    """Return a text for the ``value`` in a file, for a message. Of a list or an object, it is only the length. Long texts are cut."""
    if isinstance(value, list | tuple | dict):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}..."
