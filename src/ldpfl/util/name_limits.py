"""Refuse dictionaries with too many names before pydantic validates them. It keeps an error of a thousand bytes for each wrong name."""

from __future__ import annotations

from pydantic import BeforeValidator

MAX_NAMES = 1 << 14
"""Maximum number of entries of a dictionary by name, such as the layers of a model."""


def require_few(named: object) -> object:
    """Return ``named``, which pydantic is about to validate. Raise a ValueError if it is a dictionary of too many names."""
    if isinstance(named, dict) and len(named) > MAX_NAMES:
        raise ValueError(f"expected at most {MAX_NAMES:,} names, got {len(named):,}")
    return named


FEW = BeforeValidator(require_few)
"""Limits a dictionary in a pydantic model: ``Annotated[dict[str, float], FEW]``."""
