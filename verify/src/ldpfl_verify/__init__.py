"""Check the privacy certificates of ldpfl by accountants that share no line with those that made them.

``verify("certificate.json", ledger="ledger.json")`` returns a :class:`SecondOpinion`. Where things are:

- the form of a certificate: ``certificate_file``, checked by ``field_checks``; its file and signature: ``signature``, ``ed25519``
- whether it charges what the run's ledger holds: ``ledger_file``, ``ledger_comparison``
- which accountant computes a guarantee again: ``accountant_choice``; what is made of the result: ``second_opinion``
- accountants without a shuffler: ``closed_forms``, ``unshuffled_reports``; with one: ``shuffled_bits``, ``shuffled_reports``,
  ``shuffled_blankets``; many releases together: ``composition``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ldpfl_verify.certificate_file import Certificate as Certificate
from ldpfl_verify.errors import CertificateError as CertificateError
from ldpfl_verify.signature import read_certificate as read_certificate

if TYPE_CHECKING:
    from ldpfl_verify.second_opinion import SecondOpinion as SecondOpinion, Verdict as Verdict, verify as verify

_LATER = ("SecondOpinion", "Verdict", "verify")
"""Imported when they are first used: who only reads or writes a certificate does not wait for SciPy."""

__all__ = ["Certificate", "CertificateError", "SecondOpinion", "Verdict", "read_certificate", "verify"]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module("ldpfl_verify.second_opinion"), name)
    raise AttributeError(f"module 'ldpfl_verify' has no attribute {name!r}")
