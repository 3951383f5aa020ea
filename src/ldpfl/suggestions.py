"""Point a user who mistyped a name at the nearest one that exists."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a closing clause that names the nearest of ``known``, or lists them all."""
    options = sorted(known)
    by_leaf = [option for option in options if option.rsplit(".", 1)[-1] == name]
    nearest = by_leaf or get_close_matches(name, options, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return f"known: {', '.join(options)}"
