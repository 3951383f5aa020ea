"""A report that no mechanism of the ldpfl project makes is nobody's that is known, whatever a file says."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest

from golden_files import CERTIFICATE, certificate_of, chained, unsigned
from ldpfl_verify import read_certificate, verify
from ldpfl_verify.certificate_file import OURS, ClientRelease
from ldpfl_verify.stated_author import DOUBTED, with_believed_author

MADE_UP: dict[str, dict[str, Any]] = {
    "no such mechanism": {"mechanism": "evil"},
    "another kind of report": {"mechanism": "dp-sgd"},
    "a blanket that its noise has not": {"kind": "pure", "mechanism": "laplace", "blanket": 0.999},
}
"""What is put into the releases of the golden files."""


@pytest.mark.parametrize("name", MADE_UP)
def test_nothing_is_confirmed_of_a_report_that_is_made_up(name: str, tmp_path: Path) -> None:
    def in_ledger(tree: dict[str, Any]) -> None:
        for event in tree["events"]:
            event["release"].update(MADE_UP[name])

    def in_certificate(statement: dict[str, Any]) -> None:
        for one in statement["charged"]:
            one["release"].update(MADE_UP[name])

    ledger = chained(tmp_path, in_ledger)
    for certificate, compared in ((unsigned(tmp_path, in_certificate), None), (certificate_of(tmp_path, ledger, in_certificate), ledger)):
        found = verify(certificate, ledger=compared)
        assert {verdict.status for verdict in found.lines} == {"author's claim"}
        assert all(DOUBTED in verdict.why for verdict in found.lines)
        assert not found.holds


def test_the_report_of_the_golden_certificate_is_believed() -> None:
    (one,) = read_certificate(CERTIFICATE).statement.charged
    assert with_believed_author(one.release) == one.release


@pytest.mark.parametrize(
    ("mechanism", "unit", "epsilon", "blanket"),
    [
        ("laplace", "weight", 8.0, exp(-4.0)),
        ("piecewise", "vector", 2.0, exp(-1.0)),
        ("hybrid", "weight", 0.5, 2 / (exp(0.5) + 1)),
        ("hybrid", "weight", 2.0, (1 - exp(-1)) * exp(-1) + exp(-1) * 2 / (exp(2) + 1)),
        ("duchi-vector", "vector", 4.0, 4 / (exp(4) + 3)),
        ("privunit-g", "vector", 4.0, 0.2235409),
    ],
)
def test_a_blanket_is_believed_up_to_that_of_the_mechanism(mechanism: str, unit: Any, epsilon: float, blanket: float) -> None:
    for factor, author in ((0.9, OURS), (1.0, OURS), (1.01, DOUBTED)):
        release = ClientRelease("pure", mechanism, epsilon, 1, unit, blanket=factor * blanket, author=OURS)
        assert with_believed_author(release).author == author
