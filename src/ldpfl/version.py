"""Which version this is; read from the installed package when it is asked for, since that takes longer than importing ``ldpfl``."""

from importlib.metadata import version

__version__ = version("ldpfl")

YEAR = "2026"
"""Year of this version, for citations."""
