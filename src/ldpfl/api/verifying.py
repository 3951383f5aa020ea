"""The check of a certificate by other accountants. It needs no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ldpfl.api.arguments import checked
from ldpfl.privacy.ledger import LEDGER_FILE, Ledger
from ldpfl.verifying.certificate_file import Certificate
from ldpfl.verifying.signature import read

if TYPE_CHECKING:
    from ldpfl.verifying.verdicts import SecondOpinion


@checked
def verify(certificate: Certificate | str | Path, *, ledger: str | Path | None = None, signed_by: str | None = None) -> SecondOpinion:
    """Return what a second implementation of the accountants, which shares no line with the first, finds of a certificate.

    Args:
        certificate: itself, or its file, whose signature is checked.
        ledger: a ledger's file, or a run's folder, that it must be of.
        signed_by: public key that must have signed it.

    Raises:
        DataError: it was changed, is signed by somebody else, is not of this ledger, or charges less than that holds.
    """
    from ldpfl.verifying.verdicts import second_opinion  # slow to import

    made = certificate if isinstance(certificate, Certificate) else read(Path(certificate))
    if ledger is None:
        return second_opinion(made, None, signed_by)
    path = Path(ledger) / LEDGER_FILE if Path(ledger).is_dir() else Path(ledger)
    if path.is_file():
        Ledger.load(path)  # one whose events do not follow from each other was changed
    return second_opinion(made, path, signed_by)
