"""The command ``ldpfl-verify``, which ``ldpfl verify`` calls as well."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import NoReturn

from ldpfl_verify.errors import CertificateError, printable
from ldpfl_verify.second_opinion import SecondOpinion, Verdict, verify

REFUSED, NOT_CONFIRMED, NOT_CHECKED, INTERRUPTED = 2, 3, 4, 130
"""Exit codes. A file is no certificate, was changed or does not belong to the ledger or signer; a guarantee is not confirmed; a guarantee
could not be checked, or rests on an author's claim; the user stopped the command."""

_TRUSTED = {"local": "nobody", "shuffled": "shuffler", "summed": "sum"}
_HEADINGS = ("protected", "delta", "trusted", "stated epsilon", "second opinion", "status", "how")
_RIGHT_ALIGNED = {"delta", "stated epsilon", "second opinion"}

_CERTIFICATE = "certificate.json"
"""Name of the certificate in a folder, such as that of an export."""


def check_files(files: Sequence[Path], ledger: Path | None, signed_by: str | None, *, as_json: bool, program: str) -> int:
    """Print a second opinion on each certificate in ``files``, and return the exit code. Each line on stderr begins with ``program``."""
    opinions: list[tuple[Path, SecondOpinion]] = []
    refused = False
    for path in files:
        file = path / _CERTIFICATE if path.is_dir() else path
        try:
            if path.is_dir() and not file.exists():
                command = f"ldpfl certify {quote(str(path))} --out {quote(str(file))}"
                raise CertificateError(f"{path} holds no {_CERTIFICATE}: write one for a run's folder with {command}")
            opinions.append((file, verify(file, ledger=ledger, signed_by=signed_by)))
        except CertificateError as error:
            print(f"{program}: {error}", file=sys.stderr)
            refused = True
    if as_json and opinions:
        trees = [{"file": str(file), **opinion.to_dict()} for file, opinion in opinions]
        print(json.dumps(trees if len(files) > 1 else trees[0], indent=2))
    elif not as_json:
        print("\n\n".join("\n".join(_table_lines(file, opinion)) for file, opinion in opinions), end="\n" if opinions else "")
    if refused:
        return REFUSED
    if any(opinion.contradicted for _, opinion in opinions):
        return NOT_CONFIRMED
    return 0 if all(opinion.holds for _, opinion in opinions) else NOT_CHECKED


def _table_lines(file: Path, opinion: SecondOpinion) -> Iterator[str]:
    """Yield the lines of a table of verdicts, then the notes."""
    yield printable(f"{file}: certificate of {opinion.run}")
    rows = [_HEADINGS, *map(_table_row, opinion.lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, _HEADINGS, widths, strict=True)
        yield "  ".join(cell.rjust(width) if heading in _RIGHT_ALIGNED else cell.ljust(width) for cell, heading, width in cells).rstrip()
    yield from (printable(f"note: {note}") for note in opinion.notes)


def _table_row(verdict: Verdict) -> tuple[str, ...]:
    """Return the cells of a guarantee's row, below ``_HEADINGS``."""
    line = verdict.line
    second = "-" if verdict.second is None else _epsilon_text(verdict.second)
    stated = _epsilon_text(float(line.epsilon))
    delta = "0 (pure)" if line.delta == 0 else f"{line.delta:g}"
    return line.protects, delta, _TRUSTED[line.trusted], stated, second, verdict.status, printable(verdict.why)


def _epsilon_text(value: float) -> str:
    """Format an epsilon with six digits, or with all digits before the point. Infinity, which is no guarantee, becomes "none"."""
    if not isfinite(value):
        return "none"
    return f"{value:,.0f}" if 1e6 <= value < 1e15 else f"{value:,.6g}"


def main() -> NoReturn:
    """Run the command line. For a refused file, it prints one line to stderr and exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="ldpfl-verify",
        description="Check privacy certificates of ldpfl with accountants that share no code with ldpfl.",
        epilog="Exit code 0: all guarantees are confirmed. 2: a file is refused. 3: a guarantee is not confirmed. "
        "4: a guarantee could not be checked, or rests on the claim of a mechanism's author.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a certificate, or a folder with certificate.json")
    parser.add_argument("--ledger", type=Path, help="the run's ledger, or its folder: every certificate must be about it")
    parser.add_argument("--signed-by", metavar="KEY", help="public key (64 hexadecimal digits): every certificate must be signed with it")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON: an object, or a list if there are several files")
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('ldpfl-verify')}")
    arguments = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a console may lack characters that a run's name has
    try:
        sys.exit(check_files(arguments.files, arguments.ledger, arguments.signed_by, as_json=arguments.as_json, program="ldpfl-verify"))
    except KeyboardInterrupt:
        print("ldpfl-verify: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
