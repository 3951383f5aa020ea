"""Point a user who mistyped a name at the nearest one that exists."""

from collections.abc import Iterable
from difflib import get_close_matches

_ABBREVIATION = 3
"""Fewest letters that are taken for the beginning of a longer name."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of ``known`` that ``name`` was probably meant to be; None if none is near."""
    options = sorted(known)
    last = {option: option.rsplit(".", 1)[-1] for option in options}
    found = [option for option in options if last[option] == name]
    if not found and len(name) >= _ABBREVIATION:  # "eps" is short for epsilon, though "epochs" has more of its letters
        found = sorted((option for option in options if last[option].startswith(name)), key=len)
    found = found or get_close_matches(name, options, n=1, cutoff=0.5)
    # Where several sections have a setting of this name, that of the mechanism is meant, as in arguments of ldpfl.run.
    return min(found, key=lambda option: not option.startswith("mechanism."), default=None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a closing clause that names the nearest of ``known``, or lists them all."""
    options = sorted(known)
    found = nearest(name, options)
    return f"known: {', '.join(options)}" if found is None else f"did you mean {found!r}?"
