"""A ledger that was edited, or that contradicts itself, is refused; and a certificate that charges less than its ledger holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden_files import LEDGER, write_certificate_of, write_chained, write_unsigned
from ldpfl_verify import CertificateError, verify
from ldpfl_verify.ledger_file import read_ledger


def test_the_golden_ledger_is_read() -> None:
    ledger = read_ledger(LEDGER)
    assert ledger == read_ledger(LEDGER.parent)  # as a run's folder
    assert ledger.sha256 == hashlib.sha256(LEDGER.read_bytes()).hexdigest()
    assert [(event.round, event.joined, event.release.parameter) for event in ledger.events] == [(1, 1, 1.0), (2, 2, 1.0), (3, 3, 1.0)]


def test_an_edited_event_is_found_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(LEDGER.read_text().replace('"epsilon": 1.0', '"epsilon": 0.5', 1))
    with pytest.raises(CertificateError, match="event 1: the event was changed"):
        read_ledger(path)


CONTRADICTIONS: dict[str, tuple[Callable[[list[dict[str, Any]]], object], str]] = {
    "a round is left out": (lambda events: events.pop(1), "event 2: round 3 comes after round 1"),
    "a round comes twice": (lambda events: events[1].update(round=1), "event 2: round 1 comes after round 1"),
    "more reports than joined rounds allow": (
        lambda events: [event.update(joined=1) for event in events],
        "event 2: 200 reports of 100 clients: some client joined more than 1 rounds",
    ),
    "rounds joined before they were": (lambda events: events[0].update(joined=2), "event 1: a client cannot have joined 0 rounds before"),
    "not all of everyone": (
        lambda events: events[0].update(cohort=50),
        "event 1: sampling is 'everyone', but only 50 of 100 clients took part",
    ),
    "a cohort above the population": (lambda events: events[0].update(cohort=101), "event 1: a cohort of 101"),
    "a population that shrinks": (lambda events: events[0].update(population=200, cohort=200), "event 2: the population shrank from 200"),
    "all collude": (lambda events: events[0].update(colluding=100), "event 1: a cohort of 100 with 100 colluding clients"),
    "a cohort that chance does not make": (
        lambda events: events[0].update(sampling="secret", rate=0.01, cohort=100),
        "event 1: 100 clients that join with probability 0.01 each do not make a cohort of 100",
    ),
    "two rounds of one": (lambda events: [event.update(sampling="once") for event in events], "event 2: sampling is 'once'"),
    "an unknown field": (lambda events: events[0].update(discount=0.5), "event 1: its fields are"),
    "an unknown field of a release": (lambda events: events[0]["release"].update(discount=0.5), "event 1: a release of kind 'binary' has"),
    "a field of another kind": (lambda events: events[0]["release"].update(claimed_epsilon=0.1), "event 1: a release of kind 'binary' has"),
    "a rate of bits": (lambda events: events[0]["release"].update(rate=1.0), "event 1: a release of kind 'binary' has"),
    "an unknown kind": (lambda events: events[0]["release"].update(kind="new"), "event 1: got a release of kind 'new'"),
    "a bit that protects a record": (lambda events: events[0]["release"].update(unit="record"), "does not protect a record as one unit"),
    "no event": (lambda events: events.append({"chain": ""}), "event 4"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_ledger_that_contradicts_itself_is_refused_even_with_new_hashes(name: str, tmp_path: Path) -> None:
    change, expected_message = CONTRADICTIONS[name]
    with pytest.raises(CertificateError) as caught:
        read_ledger(write_chained(tmp_path, lambda tree: change(tree["events"])))
    assert "is not a ledger of a run" in str(caught.value)
    assert expected_message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("[]", "lacks the field format"),
        ('{"format": "ldpfl-ledger", "version": 2, "events": []}', "it has version 2, expected 3"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "1," * 3_000_000 + "1]", "3,000,000 commas, expected at most 2,621,440"),
        ("{" + ",".join(f'"{number}" : 0' for number in range(1_100)) + "}", "more than 1,024 different names"),
    ],
    ids=["a list", "another version", "nested", "commas", "names"],
)
def test_a_file_that_is_no_ledger_is_refused(text: str, expected_message: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text(text)
    with pytest.raises(CertificateError, match=expected_message):
        read_ledger(path)


def test_another_ledger_than_the_certified_one_is_refused(tmp_path: Path) -> None:
    other = write_chained(tmp_path, lambda tree: tree["events"].pop())
    with pytest.raises(CertificateError, match="is not the ledger that was certified"):
        verify(write_unsigned(tmp_path), ledger=other)


def test_a_certificate_that_charges_fewer_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="some client joined 3 rounds, but only 2 are charged"):
        verify(write_unsigned(tmp_path, lambda statement: statement["charged"][0].update(rounds=2)), ledger=LEDGER)


def test_colluding_clients_are_taken_off_the_anonymity_set(tmp_path: Path) -> None:
    ledger = write_chained(tmp_path, lambda tree: [event.update(colluding=40) for event in tree["events"]])
    with pytest.raises(CertificateError, match="it has no round like the charged one with mechanism duchi and a cohort of 100"):
        verify(write_certificate_of(tmp_path, ledger), ledger=ledger)


def test_empty_rounds_are_not_compared(tmp_path: Path) -> None:
    def nobody_joined(tree: dict[str, Any]) -> None:
        tree["events"] = [{**tree["events"][0], "sampling": "secret", "rate": 1e-6, "cohort": 0, "joined": 0}]

    ledger = write_chained(tmp_path, nobody_joined)
    assert json.loads(ledger.read_text())["events"][0]["cohort"] == 0
    with pytest.raises(CertificateError, match="no client joined any of its rounds"):
        verify(write_certificate_of(tmp_path, ledger), ledger=ledger)
