"""What is stated of a person with several records, and what policies, budgets and certificates make of it."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path
from typing import Any

import pytest

from ldpfl import plan_regime, verify
from ldpfl.api.certified_lines import certified
from ldpfl.errors import ConfigError, Declined, Exhausted
from ldpfl.experiments.planning.regimes import Regime
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.privacy import GaussianRelease, Ledger, RoundEvent
from ldpfl.privacy.accountants.adaptive import filter_order, filtered_epsilon, summed_epsilon
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accounting import account, account_together
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import read_books, read_charges, set_limit
from ldpfl.privacy.events import OURS, for_one_record
from ldpfl.privacy.guarantee import least_protected
from ldpfl.privacy.policy import Policy, Request
from ldpfl_verify import Certificate

PERSON = GaussianRelease("dp-sgd", 0.2, unit="person", author=OURS)
RECORD = replace(PERSON, unit="record")
CLIENT = GaussianRelease("full-dp", 0.2, author=OURS)
REPLACED = "replace all records of one person at one client"


def ledger(release: GaussianRelease, channel: str = "direct", rounds: int = 9) -> Ledger:
    return Ledger(tuple(RoundEvent(number, release, 100, 100, number, channel=channel) for number in range(1, rounds + 1)))  # type: ignore[arg-type]


def test_a_person_is_accounted_as_one_gaussian() -> None:
    statement = account(ledger(PERSON))
    row = statement.find("local", "run")
    assert row is not None
    assert (row.unit, row.adjacency, statement.protected) == ("person", REPLACED, "person")
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * 3, 1e-5), rel=1e-9)
    assert "which of two persons' records the client holds" in statement.verdict
    assert any("for m persons of one client together, mu is m times as large" in note for note in statement.notes)
    assert any("at k clients counts as k persons" in note for note in statement.notes)
    assert any(note.startswith("if one person is left out") for note in statement.notes)


def test_sums_over_persons_and_clients_hide_as_those_of_records_do() -> None:
    found, by_record = (account(ledger(release, "secure-sum")).find("summed", "run") for release in (PERSON, RECORD))
    assert found is not None
    assert by_record is not None
    assert (found.unit, found.epsilon) == ("person", by_record.epsilon)


def test_what_protects_less_decides() -> None:
    assert least_protected(["vector", "person"]) == "person"
    assert least_protected(["person", "record", "vector"]) == "record"
    assert least_protected([]) == "client"
    both = account_together([ledger(PERSON), ledger(RECORD)])
    row = both.find("local", "run")
    assert row is not None
    assert both.protected == "record"
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * sqrt(9 + 4 * 9), 1e-5), rel=1e-9)  # a person's counts at twice its mu
    assert any("rounds that protect persons count at twice their mu for one record" in note for note in both.notes)
    one_round = both.find("local", "round")
    assert one_round is not None
    assert one_round.epsilon == pytest.approx(gaussian_epsilon(0.4, 1e-5), rel=1e-9)
    assert account_together([ledger(PERSON), ledger(CLIENT)]).protected == "person"


def test_a_person_is_no_unit_of_bits_and_lies_in_no_ball() -> None:
    with pytest.raises(ConfigError, match="have no common bound"):
        RoundEvent(1, replace(PERSON, alike=True), 1, 1, 1)
    RoundEvent(1, replace(PERSON, rate=0.5), 1, 1, 1)
    assert Ledger.from_json(ledger(PERSON).to_json(), "again") == ledger(PERSON)


def policy(**fields: object) -> Policy:
    bounds = {"epsilon_per_unit": 9.0, "epsilon_per_round": 9.0, "lifetime_epsilon": 9.0, "rounds": 50, "min_clients": 1}
    return Policy(mechanisms=("dp-sgd", "full-dp"), **{"transports": ("direct",), **bounds, **fields})  # type: ignore[arg-type]


def request(release: GaussianRelease, number: int = 1) -> Request:
    return Request("run", number, release, 100, "direct")


@pytest.mark.parametrize(
    ("protects", "taken", "declined"),
    [("record", [RECORD, CLIENT], [PERSON]), ("person", [PERSON, CLIENT], [RECORD]), ("client", [CLIENT], [RECORD, PERSON])],
)
def test_a_policy_takes_what_protects_no_less(protects: str, taken: list[GaussianRelease], declined: list[GaussianRelease]) -> None:
    for release in taken:
        policy(protects=protects).check(request(release))
    for release in declined:
        with pytest.raises(Declined, match=f"protects one {release.unit} at a time, but the policy has protects = '{protects}'"):
            policy(protects=protects).check(request(release))


def test_releases_that_protected_less_leave_no_budget_for_more(tmp_path: Path) -> None:
    file = tmp_path / "budget.sqlite"
    set_limit(file, 1000.0)
    Budget(file, policy(protects="person")).charge(request(PERSON))
    assert read_books(file).protected == "person"
    with pytest.raises(Exhausted, match="one person at a time: no epsilon covers what these revealed of the whole client"):
        Budget(file, policy()).charge(request(CLIENT, 2))
    spent = read_books(file).spent(1e-5)
    Budget(file, policy(protects="record")).charge(request(RECORD, 3))
    books = read_books(file)
    for_a_record = {for_one_record(PERSON): 1, RECORD: 1}
    assert for_one_record(PERSON) == replace(RECORD, mu=0.4)
    assert (
        books.spent(1e-5)
        == filtered_epsilon(for_a_record.items(), books.order, 1e-5)
        > filtered_epsilon({PERSON: 2}.items(), books.order, 1e-5)
    )
    assert books.spent(1e-5) > spent
    with pytest.raises(Exhausted, match="one record at a time: no epsilon covers what these revealed of all records of a person"):
        Budget(file, policy(protects="person")).charge(request(PERSON, 4))


def test_a_budget_covers_persons_of_one_column_only(tmp_path: Path) -> None:
    """A patient with ten visits was protected ten times less by rounds that protected visits."""
    file = tmp_path / "budget.sqlite"
    set_limit(file, 9.0)
    visits, patients = (Budget(file, policy(protects="person", person=column)) for column in ("visit", "patient"))
    visits.charge(request(PERSON))
    visits.charge(request(CLIENT, 2))
    assert [charge.person for charge in read_charges(file)] == ["visit", ""]
    with pytest.raises(Exhausted, match=r"persons named by the column 'visit'.*person = 'patient'; set person = 'visit' again"):
        patients.charge(request(PERSON, 3))
    assert patients.rounds_left(read_charges(file)[0]) == 0
    assert [spend.epsilon for spend in patients.spent_of_policy()] == [inf]
    visits.charge(request(PERSON, 3))
    Budget(file, policy(protects="record", person="patient")).charge(request(RECORD, 4))  # whose epsilon needs no persons


def test_what_is_left_under_a_policy_for_another_unit_is_what_it_would_charge(tmp_path: Path) -> None:
    file = tmp_path / "budget.sqlite"
    set_limit(file, 9.0)
    persons, records = (Budget(file, policy(protects=unit)) for unit in ("person", "record"))
    persons.charge(request(PERSON))
    assert persons.rounds_left(read_charges(file)[-1]) > 0
    assert records.rounds_left(read_charges(file)[-1]) == 0  # a policy for records declines rounds for persons
    records.charge(request(RECORD, 2))
    assert records.spent_of_policy()[0].epsilon < 9
    assert persons.spent_of_policy()[0].epsilon == inf  # no epsilon bounds what a round for records revealed of a person


@pytest.mark.parametrize("transport", ["direct", "sum"])
def test_earlier_rounds_for_persons_count_twice_once_the_policy_protects_records(transport: str, tmp_path: Path) -> None:
    file = tmp_path / "budget.sqlite"
    set_limit(file, 9.0)
    bounds: dict[str, Any] = {"min_clients": 4, "transports": (transport,)}
    if transport == "sum":
        bounds |= {"sum_epsilon": 4.5, "aggregator_keys": (b64encode(bytes(32)).decode(),)}

    def asked(release: GaussianRelease, number: int) -> Request:
        return replace(request(replace(release, integers=transport == "sum"), number), transport=transport, cohort=4, key=bytes(32))  # type: ignore[arg-type]

    for number in range(12):
        Budget(file, policy(protects="person", **bounds)).charge(asked(PERSON, number + 1))
    Budget(file, policy(protects="person", **bounds)).charge(asked(CLIENT, 13))
    for_records = Budget(file, policy(protects="record", **bounds))
    spends = for_records.spent_of_policy()
    order = filter_order(9.0, 1e-5)
    mu = 0.2 * sqrt(12 * 2**2 + 1)  # a replaced record changes two persons
    assert spends[0].epsilon == pytest.approx(filtered_epsilon([(replace(CLIENT, mu=mu), 1)], order, 1e-5))
    if transport == "sum":  # of which the noise of four clients hides each report
        assert spends[1].epsilon == pytest.approx(summed_epsilon([(replace(CLIENT, mu=mu), 4, 1)], filter_order(4.5, 1e-5), 1e-5))
    left = for_records.rounds_left(read_charges(file)[-1])
    assert 0 < left < 37  # the policy's rounds alone would allow 37
    for number in range(left):
        for_records.charge(asked(CLIENT, number + 14))
    with pytest.raises(Exhausted, match=r"above the policy's (lifetime|sum)_epsilon"):
        for_records.charge(asked(CLIENT, 99))
    assert for_records.rounds_left(read_charges(file)[-1]) == 0
    assert read_books(file, "record").spent(1e-5) > read_books(file).spent(1e-5)


def test_a_certificate_of_persons_is_confirmed_and_none_of_clients() -> None:
    made = Certificate(statement=certified(ledger(PERSON).to_json(), "run", 1e-5, {}, (), origin="test"))
    assert {line.protects for line in made.statement.guarantees} == {"person"}
    assert verify(made).holds
    client = "replace one client's data"
    changes: list[dict[str, Any]] = [{"protects": "client"}, {"adjacency": client}, {"protects": "client", "adjacency": client}]
    for change in changes:
        lines = [replace(line, **change) for line in made.statement.guarantees if line.delta > 0]
        assert not verify(Certificate(statement=replace(made.statement, guarantees=tuple(lines)))).holds


def test_a_sum_over_clients_counts_persons_twice_for_a_record() -> None:
    """Also where they take part by chance, since two persons have a coin each."""
    rounds = ledger(RECORD, "secure-sum", 2).events + tuple(
        replace(event, round=3, joined=3) for event in ledger(PERSON, "secure-sum", 1).events
    )
    row = account(Ledger(rounds)).find("summed", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * sqrt(2 + 4) / 10, 1e-5), rel=1e-6)
    assert row.lower is None
    assert for_one_record(replace(PERSON, rate=0.1)) == replace(RECORD, mu=0.4)


def test_a_policy_for_records_says_how_to_take_rounds_for_persons() -> None:
    with pytest.raises(Declined, match=r"changes the contributions of two persons.*set protects to 'person' and person to the column"):
        policy(protects="record").check(request(PERSON))


def test_a_certificate_of_both_is_of_a_record_at_twice_a_person_s_mu() -> None:
    text = Ledger(
        (*ledger(RECORD, rounds=1).events, *(replace(event, round=2, joined=2) for event in ledger(PERSON, rounds=1).events))
    ).to_json()
    made = certified(text, "run", 1e-5, {}, (), origin="test")
    assert {line.protects for line in made.guarantees} == {"record"}
    assert verify(Certificate(statement=made)).holds
    too_little = gaussian_epsilon(0.2 * sqrt(2), 1e-5)
    lines = [replace(line, epsilon=too_little) for line in made.guarantees if line.delta > 0]
    assert verify(Certificate(statement=replace(made, guarantees=tuple(lines)))).contradicted


def test_a_person_s_certificate_is_none_of_a_record() -> None:
    made = certified(ledger(PERSON).to_json(), "run", 1e-5, {}, (), origin="test")
    record: dict[str, Any] = {"protects": "record", "adjacency": "replace one record of one client"}
    lines = [replace(line, **record) for line in made.guarantees if line.delta > 0]
    assert verify(Certificate(statement=replace(made, guarantees=tuple(lines)))).contradicted


def test_a_record_s_certificate_is_none_of_its_person() -> None:
    made = certified(ledger(RECORD).to_json(), "run", 1e-5, {}, (), origin="test")
    person: dict[str, Any] = {"protects": "person", "adjacency": REPLACED}
    lines = [replace(line, **person) for line in made.guarantees if line.delta > 0]
    assert not verify(Certificate(statement=replace(made, guarantees=tuple(lines)))).holds


@pytest.mark.parametrize("regime", ["records", "records-summed"])
def test_a_plan_for_persons_counts_them_as_records(regime: Regime) -> None:
    sizes = {"clients": 10, "records": 600, "weights": 200, "rounds": 15}
    found, by_record = (plan_regime(regime, 2.0, part=part, **sizes) for part in ("person", "record"))
    assert (found.statement.protected, by_record.statement.protected) == ("person", "record")
    assert (found.value, found.noise) == (by_record.value, by_record.noise)


def test_a_plan_for_persons_is_one_of_records() -> None:
    with pytest.raises(ConfigError, match="persons are protected only in the regimes records and records-summed, not in local"):
        plan_regime("local", 2.0, clients=100, weights=200, rounds=15, part="person")


def test_the_mechanism_says_what_it_protects() -> None:
    mechanism = DpSgd(RecordClip(0.5), 5.0, part="person")
    assert "the number of a client's persons is public" in mechanism.properties.assumptions
