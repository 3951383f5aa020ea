"""Refuse what has too many names before pydantic looks at them: of each wrong one it keeps an error, which takes a thousand bytes."""

from __future__ import annotations

from pydantic import BeforeValidator

MAX_NAMES = 1 << 14
"""Entries of the largest table of names, such as the layers of a model."""


def require_few(named: object) -> object:
    """Return ``named``, which pydantic is about to look at, unless it has too many names; for a model's own validator as well."""
    if isinstance(named, dict) and len(named) > MAX_NAMES:
        raise ValueError(f"expected at most {MAX_NAMES:,} names, got {len(named):,}")
    return named


FEW = BeforeValidator(require_few)
"""Marks a dictionary, such as ``Annotated[dict[str, float], FEW]``."""
