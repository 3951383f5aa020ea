"""The exceptions that ldpfl raises for a caller's or an operator's mistake.

Every message says what was wrong, what was expected, and where the value came from, in one line.
The command line prints it and exits with code 2.
"""


class LdpflError(Exception):
    """Base of all errors that ldpfl raises on purpose."""


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
