"""What an app's exception says to the operator of the node: the line and what to look for, and no value of a record."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from ldpfl.errors import LdpflError, PrivacyError, printable
from ldpfl.flower import confined_process
from ldpfl.flower.arrays import OtherArray

_MAX_SHOWN = 100
"""Characters of a line of code that are shown."""

_HINTS: Mapping[type[BaseException], str] = {
    LdpflError: "ldpfl refuses what the line gives it: data of another form, or a setting that does not fit them",
    MemoryError: "there was too little memory: give this machine more, or let the app read less at once",
    UnicodeError: "a file is not text in the encoding that the line expects: save it as UTF-8",
    KeyError: "a name that the line looks up is not there: compare the names of the table's columns, classes or variables with the line's",
    IndexError: "the line looks up a place that is not there: a label outside the classes, or a row with fewer values than others",
    AttributeError: "something is of another kind than the line expects: is a file or a value missing?",
    TypeError: "something is of another type than the line expects: text in the place of a number, or a missing value",
    ValueError: "a value or shape is not what the line expects: text where a number is to stand, a missing value, or rows of two lengths",
    ArithmeticError: "a number is 0, or too large, where the line cannot take that: is the data's unit the expected one?",
    RuntimeError: "shapes or types do not fit each other: compare the data's shape and dtype with what the model takes",
    ImportError: "a module that the line asks for cannot be imported here: install it, or mend its name",
    FileNotFoundError: "a file that the line opens is not there: is its name right, and set in the environment?",
    OSError: "a file cannot be read: is it there, and can the user of the SuperNode read it?",
}
"""What to look for, by the kind of an exception."""


def explained(error: BaseException, app: Path | None, data: tuple[str, ...]) -> str:
    """Return what ``error`` means to who operates the node, without any value of a record.

    The text of an exception may repeat values, so it is shown only where it repeats none
    (:func:`ldpfl.flower.confined_process.repeats_nothing`). Of any other exception its kind, its line in the app and a hint are shown, and
    a path just as the operator named it.

    Args:
        app: folder of the app, whose own line is the one that is shown.
        data: paths that the operator has named.
    """
    if confined_process.repeats_nothing(error):
        return f"{error}, it is {error.got}" if isinstance(error, OtherArray) else str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if app is not None and app.resolve() in Path(frame.filename).resolve().parents]
    frame = next(reversed(own or frames), None)
    line = (frame and frame.line) or ""
    place = f" at {Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
    about = f" about {name!r}" if (name := _looked_up(line, error)) else ""
    code = f", in: {line[:_MAX_SHOWN]}" if line else ""
    hint = _hint(error, line, data)
    return printable(f"{type(error).__name__}{about}{place}{code} -- {hint}{'' if hint.endswith('?') else '.'} {_LEFT_OUT}")


def _looked_up(line: str, error: BaseException) -> str:
    """Return the name that a ``line`` of code looks up and an exception says is not there, such as a column; "" where that is not sure.

    It is the only text in quotes of the line: which one of several is looked up, a record may have decided.
    """
    found = _NAME.fullmatch(line)
    return found[2] if found and isinstance(error, KeyError) and repr(found[2]) in str(error) else ""


_NAME = re.compile(r"[^'\"]*\[(['\"])([^'\"]+)\1\][^'\"]*")


def with_explanation(work: Callable[[], bytes], explain: Callable[[BaseException], str]) -> bytes:
    """Return what ``work`` gives.

    Raises:
        PrivacyError: it raised whatever it likes; the text is what ``explain`` makes of that. It is raised here, in a room that reads no
            data, so that :func:`ldpfl.flower.confined_process.place_of` hands the text on.
    """
    try:
        return work()
    except BaseException as error:
        raise PrivacyError(explain(error)) from None


def raise_nothing_learnt() -> NoReturn:
    """Raise the error of an app that gives back the arrays that it got."""
    raise PrivacyError(
        "the arrays came back as they were sent, so nothing was learnt: return the trained ones, and see that data and epochs are not empty"
    )


_LEFT_OUT = "The exception's text is not shown, because it may repeat values of records: run the line by hand to read it"


def _hint(error: BaseException, line: str, data: tuple[str, ...]) -> str:
    if isinstance(error, ImportError) and (not line or line.startswith(("import ", "from "))):  # what such a statement names is code
        return f"the app needs the module {error.name!r}, which cannot be imported here: install it, or mend its name"
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
        for named in data:
            if path == Path(named):
                return f"{named}: {error.strerror}"
            if Path(named) in path.parents:  # its name may say whose record it is
                return f"a file or folder below {named}: {error.strerror}. Is all there that the line opens, and can it be read?"
        return f"a file that no setting of this node names: {error.strerror}. Is its name in the app right, and set in the environment?"
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "the app has ended its process: let the function return instead"
    if line.startswith("raise"):
        return "the app itself refuses here: see the lines before this one"
    return next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "the app's code has failed")
