"""Commands about certificates: write one for a run, and check certificates by the package ``ldpfl_verify``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ldpfl import api
from ldpfl.report.console import terminal


def certify(
    what: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a ledger's file.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("certificate.json"),
    key: Annotated[Path | None, typer.Option(help="Private key that signs it (Ed25519); made if there is none.")] = None,
    delta: Annotated[float | None, typer.Option(help="Failure probability.", show_default="the run's")] = None,
) -> None:
    """Write a run's guarantee to a small file that others can check. It contains no figure of the data."""
    certificate = api.certify(what, delta=delta, key=key, out=out)
    signer = "not signed: sign it with --key, so that others know that it is yours"
    if certificate.signature is not None:
        signer = f"signed; give others the public key, so that they know that it is yours: {certificate.signature.public_key}"
    terminal().print(Text(f"{out}: {len(certificate.statement.guarantees)} guarantees, {signer}"), soft_wrap=True)
    print(f"check it with: ldpfl verify {shlex.quote(str(out))} --ledger {shlex.quote(str(what))}")


def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Certificates, or folders that hold certificate.json.")],
    ledger: Annotated[Path | None, typer.Option(help="The ledger, or the run's folder, that every certificate must be about.")] = None,
    signed_by: Annotated[str | None, typer.Option(help="Public key that must have signed the certificates.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check certificates by a second implementation of the accountants. Exit code 3: one is not confirmed; 4: one is not checked."""
    from ldpfl.api.verifying import check_ledger_of_run
    from ldpfl_verify.command_line import check_files  # slow to import

    if ledger is not None:
        check_ledger_of_run(ledger)
    if code := check_files(files, ledger, signed_by, as_json=as_json, program="ldpfl"):
        raise SystemExit(code)
