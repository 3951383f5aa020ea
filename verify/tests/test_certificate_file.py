"""A certificate is read as it was written, and a file that is none is refused with the place of the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from golden_files import CERTIFICATE, write_unsigned
from ldpfl_verify import Certificate, CertificateError, read_certificate


def test_a_certificate_is_written_as_it_was_read() -> None:
    certificate = read_certificate(CERTIFICATE)
    assert certificate.to_json() == CERTIFICATE.read_text()
    assert Certificate.from_dict(certificate.to_dict()) == certificate


def test_a_changed_statement_does_not_fit_its_signature(tmp_path: Path) -> None:
    certificate = read_certificate(CERTIFICATE)
    path = tmp_path / "certificate.json"
    path.write_text(replace(certificate, statement=replace(certificate.statement, run="another")).to_json())
    with pytest.raises(CertificateError, match="was changed after it was signed"):
        read_certificate(path)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a field is missing": (lambda statement: statement.pop("run"), "statement: lacks the field 'run'"),
    "a field is unknown": (lambda statement: statement.update(more=1), "statement: unknown field 'more'"),
    "an unknown kind": (
        lambda statement: release(statement).update(kind="new"),
        "charged.0.release.kind: got 'new', expected 'binary' or",
    ),
    "a text for a number": (lambda statement: charged(statement).update(cohort="100"), "charged.0.cohort: got '100', expected a whole"),
    "true for a number": (lambda statement: charged(statement).update(cohort=True), "charged.0.cohort: got true, expected a whole"),
    "no parameter": (lambda statement: release(statement).update(parameter=None), "a release of kind 'binary' needs a parameter"),
    "a parameter too large": (lambda statement: release(statement).update(parameter=10**400), "parameter: got a number above 1e308"),
    "no rounds": (lambda statement: statement.update(charged=[]), "charged: got a list of 0 entries, expected 1 to 10,000"),
    "no list": (lambda statement: statement.update(caveats="none"), "caveats: got 'none', expected a list"),
    "a hash of another length": (lambda statement: statement.update(ledger="00"), "ledger: got '00', expected 64 hexadecimal digits"),
    "a delta of one": (lambda statement: statement["guarantees"][0].update(delta=1), "guarantees.0.delta: got 1, expected a number of 0"),
}


def charged(statement: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = statement["charged"][0]
    return found


def release(statement: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = charged(statement)["release"]
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_message_names_the_place_the_value_and_what_was_expected(fault: str, tmp_path: Path) -> None:
    change, expected_message = FAULTS[fault]
    with pytest.raises(CertificateError) as caught:
        read_certificate(write_unsigned(tmp_path, change))
    assert "certificate.json is not a certificate: statement" in str(caught.value)
    assert expected_message in str(caught.value)


def test_what_steers_a_terminal_is_spelled_out(tmp_path: Path) -> None:
    certificate = read_certificate(write_unsigned(tmp_path, lambda statement: statement.update(run="good\x1b[31m\nconfirmed")))
    assert certificate.statement.run == "good\\x1b[31m\\nconfirmed"


def test_a_bare_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps({"version": float("nan")}))
    with pytest.raises(CertificateError, match="got NaN, expected a finite number"):
        read_certificate(path)
