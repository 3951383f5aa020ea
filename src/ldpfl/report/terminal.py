"""The terminal: where all that is printed goes through."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def terminal(**settings: Any) -> Console:
    """Return a console that takes every text as it stands: what a folder or ledger of somebody else says steers nothing."""
    return Console(markup=False, emoji=False, **settings)
