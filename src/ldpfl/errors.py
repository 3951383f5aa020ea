"""The exceptions that ldpfl raises for a caller's or an operator's mistake.

Every message says what was wrong, what was expected, and where the value came from, in one line.
The command line prints it and exits with code 2.
"""


class LdpflError(Exception):
    """Base of all errors that ldpfl raises on purpose.

    A message may quote what a file or somebody else's machine says. It is one line of printable characters all the same: line
    breaks and terminal codes are spelled out, so that they forge no line in a log and no colour on a screen.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


def printable(text: str) -> str:
    """Return ``text`` with every character that is not printable spelled out, as in ``\\n`` or ``\\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def first_line(error: BaseException) -> str:
    """Return the first line of what somebody else's code says went wrong; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(LdpflError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(LdpflError):
    """A data file is missing, corrupt, or not in the expected layout."""


class PrivacyError(LdpflError):
    """Something would have left a client without the stated protection; nothing was sent."""


class BudgetExhausted(PrivacyError):
    """A client's own privacy budget does not allow the requested release."""


class ProtocolError(LdpflError):
    """A received message does not follow the wire format."""
