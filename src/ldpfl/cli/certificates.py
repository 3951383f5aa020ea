"""Commands about certificates: write one for a run, and check one by other accountants."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl import api
from ldpfl.errors import printable
from ldpfl.files import write_text
from ldpfl.report.privacy import certificate_table
from ldpfl.report.terminal import terminal

NOT_CONFIRMED, NOT_CHECKED = 3, 4
"""Exit codes when a line of a certificate is not confirmed, and when none is that, but some could not be checked."""


def certify(
    what: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a ledger's file.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("certificate.json"),
    key: Annotated[Path | None, typer.Option(help="Private key that signs it (Ed25519); made if there is none.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability.", show_default="the run's")] = None,
) -> None:
    """Write what a run guarantees, and from what that follows, in a small file for others to check. No figure of the data is in it."""
    made = api.certify(what, delta=delta, key=key)
    write_text(out, made.to_json())
    signer = "not signed: give --key, for others to know that it is yours"
    if made.signature is not None:
        signer = f"signed; the public key, for others to know that it is yours: {made.signature.public_key}"
    terminal().print(Text(f"{out}: {len(made.statement.guarantees)} guarantees, {signer}"), soft_wrap=True)
    print(f"check it with: ldpfl verify {shlex.quote(str(out))} --ledger {shlex.quote(str(what))}")


def verify(
    file: Annotated[Path, typer.Argument(help="A certificate.")],
    ledger: Annotated[Path | None, typer.Option(help="The ledger that it is of, or the run's folder.")] = None,
    signed_by: Annotated[str | None, typer.Option(help="Public key that has to have signed it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a certificate by other accountants than it was made with. Exit code 3: a line is not confirmed; 4: it cannot be checked."""
    with terminal(stderr=True).status("accounting ..."):
        checked = api.verify(file, ledger=ledger, signed_by=signed_by)
    if as_json:
        print(json.dumps(checked.to_dict(), indent=2))
    else:
        console = terminal()
        console.print(certificate_table(checked.run, checked.lines))
        for note in checked.notes:
            console.print(Text(printable(note)), soft_wrap=True)
    if not checked.holds:
        raise SystemExit(NOT_CONFIRMED if checked.contradicted else NOT_CHECKED)
