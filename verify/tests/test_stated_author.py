"""A report that no mechanism of the ldpfl project makes is nobody's that is known, whatever a file says."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest

from golden_files import CERTIFICATE, Change, write_certificate_of, write_chained, write_unsigned
from ldpfl_verify import CertificateError, read_certificate, verify
from ldpfl_verify.certificate_file import OURS, ClientRelease
from ldpfl_verify.ledger_file import read_ledger
from ldpfl_verify.stated_author import DOUBTED, with_author_of_bits, with_believed_author

MADE_UP: dict[str, dict[str, Any]] = {
    "no such mechanism": {"mechanism": "evil"},
    "another kind of report": {"mechanism": "dp-sgd"},
    "a blanket that its noise has not": {"kind": "pure", "mechanism": "laplace", "blanket": 0.999},
    "another unit": {"unit": "layer"},
}
"""What is put into the releases of the golden files."""


def fewer_bits(tree: dict[str, Any]) -> None:
    """State 5 bits a round in place of 500 in a ledger or a certificate, which take less time. The stated figures are then too large."""
    for charged in tree["events" if "events" in tree else "charged"]:
        charged["release"].update(units=5)


@pytest.mark.parametrize("name", MADE_UP)
def test_nothing_is_confirmed_of_a_report_that_is_made_up(name: str, tmp_path: Path) -> None:
    def in_ledger(tree: dict[str, Any]) -> None:
        fewer_bits(tree)
        for event in tree["events"]:
            event["release"].update(MADE_UP[name])
            for field in ("realised", "sampled") if event["release"]["kind"] == "pure" else ():  # which only bits have
                event["release"].pop(field, None)

    def in_certificate(statement: dict[str, Any]) -> None:
        fewer_bits(statement)
        for one in statement["charged"]:
            one["release"].update(MADE_UP[name])

    ledger = write_chained(tmp_path, in_ledger)
    for certificate, compared_ledger in (
        (write_unsigned(tmp_path, in_certificate), None),
        (write_certificate_of(tmp_path, ledger, in_certificate), ledger),
    ):
        opinion = verify(certificate, ledger=compared_ledger)
        assert {verdict.status for verdict in opinion.lines} == {"author's claim"}
        assert all(DOUBTED in verdict.why for verdict in opinion.lines)
        assert not opinion.holds


def test_the_report_of_the_golden_certificate_is_believed() -> None:
    (one,) = read_certificate(CERTIFICATE).statement.charged
    assert with_believed_author(one.release) == one.release


RECORD = ClientRelease("gaussian", "dp-sgd", 0.5, 1, "record", rate=0.1, author=OURS)
BALL = ClientRelease("gaussian", "dp-fedavg", 0.5, 1, "vector", alike=True, integers=True, author=OURS)
DRAWN = ClientRelease("binary", "rotated-sign", 0.5, 8, "coordinate", sampled=16, author=OURS)
PARTS = ClientRelease("pure", "laplace", 2.0, 1, "vector", author=OURS)


@pytest.mark.parametrize("release", [RECORD, BALL, DRAWN, PARTS], ids=lambda release: release.mechanism)
def test_a_report_is_believed_with_the_unit_and_the_flags_of_its_mechanism_alone(release: ClientRelease) -> None:
    assert with_believed_author(release) == release
    changes: dict[ClientRelease, list[dict[str, Any]]] = {
        RECORD: [{"unit": "vector", "rate": 1.0}, {"integers": True}, {"units": 2}, {"unit": "client"}, {"mechanism": "full-dp"}],
        BALL: [{"unit": "person", "alike": False}, {"unit": "record"}, {"mechanism": "full-dp"}, {"units": 3}, {"sampled": 2}],
        DRAWN: [{"unit": "weight"}, {"mechanism": "duchi"}, {"rate": 0.5}, {"alike": True}],
        PARTS: [{"unit": "coordinate"}, {"units": 30}, {"sampled": 5}, {"integers": True}, {"rate": 0.5}],
    }
    for change in changes[release]:
        assert with_believed_author(replace(release, **change)).author == DOUBTED, change


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


def with_stated_epsilon(realised: object) -> Change:
    """Return a change of a ledger: its bits are said to have the epsilon ``realised``."""

    def change(tree: dict[str, Any]) -> None:
        fewer_bits(tree)
        for event in tree["events"]:
            event["release"].update(realised=realised)

    return change


def test_an_epsilon_of_rounded_bits_is_computed_again(tmp_path: Path) -> None:
    """The ledger alone holds it. A certificate that names the project is refused, and one that names nobody is an author's claim."""
    for realised, author in ((1.0, OURS), (1 - 1e-9, OURS), (0.9, DOUBTED), (1e-3, DOUBTED)):
        ledger = write_chained(tmp_path, with_stated_epsilon(realised))
        assert {event.release.author for event in read_ledger(ledger).events} == {author}
        if author == OURS:
            assert verify(write_certificate_of(tmp_path, ledger, fewer_bits), ledger=ledger).holds
            continue
        with pytest.raises(
            CertificateError, match=r"'duchi' is the ldpfl project's code, but .* says of its reports what that code cannot send"
        ):
            verify(write_certificate_of(tmp_path, ledger, fewer_bits), ledger=ledger)

        def as_doubted(statement: dict[str, Any]) -> None:
            fewer_bits(statement)
            for one in statement["charged"]:
                one["release"].update(author=DOUBTED)

        opinion = verify(write_certificate_of(tmp_path, ledger, as_doubted), ledger=ledger)
        assert {verdict.status for verdict in opinion.lines} == {"author's claim"}


@pytest.mark.parametrize("realised", [0.0, -1.0, 1.5, "1.0", True])
def test_bits_do_not_spend_more_than_is_counted(realised: object, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="bits at epsilon 1 have a realised epsilon of"):
        read_ledger(write_chained(tmp_path, with_stated_epsilon(realised)))


def test_what_the_project_s_own_mechanism_states_of_its_bits_is_believed() -> None:
    for epsilon in (1e-6, 0.1, 1.0, 8.0, 20.0, 22.0, 40.0, 1e3):
        rarer = max(1, round(2.0**32 / (exp(min(epsilon, 700)) + 1)))  # of 2^32 words, rounded to the safe side, at least one
        rarer += log((2**32 - rarer) / rarer) > epsilon
        bits = ClientRelease("binary", "duchi", epsilon, 1, "weight", author=OURS)
        assert with_author_of_bits(bits, min(epsilon, log((2**32 - rarer) / rarer))) == bits
