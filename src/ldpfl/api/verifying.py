"""The check of a certificate by the accountants of the package ``ldpfl_verify``. It needs no PyTorch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ldpfl.api.arguments import checked
from ldpfl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ldpfl_verify import Certificate, SecondOpinion


@checked
def verify(certificate: Certificate | str | Path, *, ledger: str | Path | None = None, signed_by: str | None = None) -> SecondOpinion:
    """Compute the guarantees of a certificate again, by the package ``ldpfl_verify``, which shares no line with ldpfl's accountants.

    Args:
        certificate: the certificate, or the path of its file. Its signature is checked if it has one.
        ledger: the run's ledger, or the run's folder. The certificate must be about this ledger and charge all that it holds.
        signed_by: the public key, in hexadecimal digits, that must have signed the certificate.

    Raises:
        DataError: the certificate was changed, is signed by another key, is about another ledger, or charges less than the ledger; or the
            run's folder holds another ledger than its checkpoint.
    """
    import ldpfl_verify  # slow to import

    if ledger is not None:
        check_ledger_of_run(Path(ledger))
    try:
        return ldpfl_verify.verify(certificate, ledger=ledger, signed_by=signed_by)
    except ldpfl_verify.CertificateError as error:
        raise DataError(str(error)) from None


def check_ledger_of_run(ledger: Path) -> None:
    """Raise if ``ledger`` is a run's folder, or the ledger in it, and the run's other files contradict it.

    Raises:
        DataError: the ledger is older than the run's checkpoint or result, or another run's.
    """
    from ldpfl.api.accounting import folder_of_ledger  # takes long to import

    folder = Path(folder_of_ledger(ledger))
    if (folder / "config.toml").exists():
        from ldpfl.experiments.run_folder import RunFolder  # imports PyTorch

        with suppress(ConfigError):  # this machine's ldpfl cannot read the config: an auditor's may lack the run's mechanism
            RunFolder(folder).ledger()  # raises if it contradicts the other files
