"""Point a user who mistyped a name at the nearest one that exists."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_MIN_ABBREVIATION = 3
"""Minimum number of letters of an abbreviation, which is the beginning of a longer name."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name among ``known`` that ``name`` was probably meant to be; None if no name is similar.

    These are tried in order: the last part of a dotted name, this part in another case, its beginning, and a similar name.
    """
    options = sorted(known)
    last_part = {option: option.rsplit(".", 1)[-1] for option in options}
    matches = [option for option in options if last_part[option] == name]
    if not matches:
        matches = [option for option in options if last_part[option].casefold() == name.casefold()]
    if not matches and len(name) >= _MIN_ABBREVIATION:  # "eps" is short for epsilon, though "epochs" has more of its letters
        matches = sorted((option for option in options if last_part[option].startswith(name)), key=len)
    if not matches:
        matches = get_close_matches(name, options, n=1, cutoff=0.55)
    # Where several sections have a setting of this name, that of the mechanism is meant, as in arguments of ldpfl.run.
    of_mechanism = [option for option in matches if option.startswith("mechanism.")]
    return next(iter(of_mechanism or matches), None)


def did_you_mean_file(name: str, files: Iterable[str]) -> str:
    """Return the end of a message on the missing file ``name``: the most similar one of ``files``, or a list of them; "" without files.

    Names are compared without their suffix, since unrelated files have the same one.
    """
    options = sorted(files)
    by_stem = {Path(option).stem: option for option in options}
    similar = get_close_matches(Path(name).stem, by_stem, n=1, cutoff=0.7)
    if similar:
        return f": did you mean {by_stem[similar[0]]!r}?"
    more = len(options) - _MAX_FILES
    listed = ", ".join(options[:_MAX_FILES]) + (f" and {more:,} more" if more > 0 else "")
    return f": known: {listed}" if options else ""


_MAX_FILES = 8
"""Maximum number of files that a message lists."""


def quoting_hint(argument: str) -> str:
    """Return the end of a message on an unknown ``argument``: advice to quote a setting that the shell took apart at its braces, or ""."""
    is_piece = "=" in argument or argument.endswith(("]", "}"))
    return "; the shell takes braces apart, so put a setting that has them in quotes: --set 'data.bounds={age=[0,120]}'" if is_piece else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on the unknown ``name``: it names the most similar one of ``known``, or lists all of them."""
    options = sorted(known)
    suggestion = nearest(name, options)
    return f"known: {', '.join(options)}" if suggestion is None else f"did you mean {suggestion!r}?"
