"""Explain an app's exception to the node's operator: the line that failed and a hint, without the text that may repeat records."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from ldpfl.errors import LdpflError, PrivacyError, printable
from ldpfl.flower import confined_process
from ldpfl.flower.arrays import OtherArray

TRY_IT = "ldpfl deploy check-node --app APP --try"
"""Command that tells a node's operator more than the node's log does. It runs on the node, and nothing leaves."""

UNUSABLE = "unusable: "
"""Beginning of the line in a node's log that says that training found no or few records to use."""

_MAX_SHOWN = 100
"""Maximum number of characters of a line of code that are shown."""

_HINTS: Mapping[type[BaseException], str] = {
    LdpflError: "ldpfl rejects an argument that the line passes to it: compare the data's shape and dtype, and the settings, with the docs",
    MemoryError: "there was too little memory: give this machine more, or let the app read less at once",
    UnicodeError: "a file is not text in the encoding that the line expects: save it as UTF-8",
    KeyError: "the line looks up a name that does not exist: compare it with the names of the table's columns, classes or variables",
    IndexError: "the line uses an index that is too large: is a label outside the classes, or a row shorter than the others?",
    AttributeError: "an object in the line does not have the attribute that the line uses: is a file or a value missing?",
    TypeError: "an object in the line has another type than expected: is there text instead of a number, or a missing value?",
    ValueError: "the line expects another value or shape: is there text instead of a number, a missing value, or a row of another length?",
    ArithmeticError: "the line divides by 0, or a number is too large: are the data in the expected unit?",
    RuntimeError: "shapes or types do not fit each other: compare the data's shape and dtype with what the model takes",
    ImportError: "a module that the line imports cannot be imported here: install it, or correct its name",
    FileNotFoundError: "a file that the line opens does not exist: is its name right, and set in the environment?",
    OSError: "a file cannot be read: is it there, and can the user of the SuperNode read it?",
}
"""Hint for the operator, by type of exception."""


def explain_to_operator(error: BaseException, app: Path | None, known_paths: tuple[str, ...]) -> str:
    """Explain ``error`` to the node's operator, without text that may repeat values of records.

    The text of an exception is shown only where it is known to repeat no such value
    (:func:`ldpfl.flower.confined_process.has_public_text`). For any other exception the explanation has its type, the line of the app that
    raised it and a hint. A path is shown only as the operator named it. A type that the app defines is named by its nearest known base
    class (:func:`ldpfl.flower.confined_process.public_type_name`).

    Args:
        app: folder of the app. The line shown is the innermost one that lies in this folder; without one, the innermost of all.
        known_paths: paths that the operator has named.
    """
    if confined_process.has_public_text(error):
        # The text lacks the array's shape and dtype, because an app may hide private values in them and logs may leave the node. Here they
        # are added: the operator may see the node's values.
        return f"{error}, got {error.got}" if isinstance(error, OtherArray) else str(error)
    # Frames without a line of code are left out: the app may have made up the name of their file.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line]
    app_frames = [frame for frame in frames if app is not None and app.resolve() in Path(frame.filename).resolve().parents]
    line, place, code = "", "", ""
    if frames:
        innermost = (app_frames or frames)[-1]
        line = innermost.line or ""
        place, code = f" at {Path(innermost.filename).name}:{innermost.lineno}", f", in: {line[:_MAX_SHOWN]}"
    missing_key = _missing_key(line, error)
    key_note = f" about {missing_key!r}" if missing_key else ""
    hint = _hint(error, line, known_paths)
    return printable(
        f"{confined_process.public_type_name(error)}{key_note}{place}{code} -- {hint}{'' if hint.endswith('?') else '.'} {_TEXT_NOT_SHOWN}"
    )


def _missing_key(line: str, error: BaseException) -> str:
    """Return the key, such as a column's name, that a ``line`` of code looks up and a KeyError reports as missing; "" if that is not sure.

    The key must be the only quoted text in the line. With several quoted texts, a record may have decided which one was looked up, and so
    naming the key could reveal something about the record.
    """
    match = _ONLY_QUOTED_KEY.fullmatch(line)
    return match[2] if match and isinstance(error, KeyError) and repr(match[2]) in str(error) else ""


_ONLY_QUOTED_KEY = re.compile(r"[^'\"]*\[(['\"])([^'\"]+)\1\][^'\"]*")


def with_explanation(work: Callable[[], bytes], explain: Callable[[BaseException], str]) -> bytes:
    """Do ``work`` and return its result.

    Raises:
        PrivacyError: ``work`` raised an exception of any type; the text is the explanation that ``explain`` returns. It is raised in this
            module, which reads no data, so that :func:`ldpfl.flower.confined_process.describe_error` passes the text on.
    """
    try:
        return work()
    except BaseException as error:
        raise PrivacyError(explain(error)) from None


def raise_nothing_learnt() -> NoReturn:
    """Raise the error for an app that returns the arrays that it received, unchanged."""
    raise PrivacyError(
        "the app returned the arrays that it received, unchanged: return the trained arrays, and check that there are data and epochs"
    )


_TEXT_NOT_SHOWN = "The exception's text is not shown, because it may repeat values of records: run the line by hand to read it"


def _hint(error: BaseException, line: str, known_paths: tuple[str, ...]) -> str:
    """Return a hint on ``error``, which ``line`` of the app raised. It names no file but ``known_paths``, and no value of a record."""
    if isinstance(error, ImportError) and error.name and _is_imported(error.name, line):
        return f"the app needs the module {error.name!r}, which cannot be imported here: install it, or correct its name"
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()  # or a file's number: no path
        for known_path in known_paths:
            if path == Path(known_path):
                return f"{known_path}: {_system_reason(error)}"
            if Path(known_path) in path.parents:  # the file's own name may say whose record it is, so it is not shown
                return f"a file or folder below {known_path}: {_system_reason(error)}. Do all files that the app opens exist?"
        return (
            f"a file that no setting of this node names: {_system_reason(error)}. Is its name in the app right, and set in the environment?"
        )
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return "the app has ended its process: do not call exit, but return from the function"
    if line.startswith("raise"):
        return "the app's own `raise` statement ran: read the condition above this line"
    return next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "the app's code has failed")


def _is_imported(module: str, line: str) -> bool:
    """Tell whether ``line`` is an import statement that spells out ``module``. A name that code computed may repeat a private value."""
    match = _IMPORT.match(line)
    # With the dots, the import of a.b spells out a and a.b, but not a.bc, nor b.
    return match is not None and f"{match[1]}.".startswith(f"{module}.")


_IMPORT = re.compile(r"(?:import|from)\s+([\w.]+)")


def _system_reason(error: OSError) -> str:
    """Return the system's text for the error's number. The exception's own text is not shown, because the app may have written it."""
    return os.strerror(error.errno) if error.errno is not None and error.errno in errno.errorcode else "it cannot be used"
