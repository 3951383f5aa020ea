"""What is stated of one record, of sums that hide their terms, and of clients that take part once; and what a policy makes of it."""

from __future__ import annotations

import re
from contextlib import suppress
from math import sqrt
from pathlib import Path

import mpmath
import pytest

from ldpfl.errors import ConfigError, Declined, Exhausted
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, PureRelease, RoundEvent
from ldpfl.privacy.accountants.clones import clone_epsilon, clone_probability
from ldpfl.privacy.accountants.gaussian import gaussian_delta, gaussian_epsilon
from ldpfl.privacy.accounting import account, account_together, run_epsilon
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.events import OURS, Sampling
from ldpfl.privacy.policy import Policy, Request

RECORD = GaussianRelease("dp-sgd", 0.2, unit="record", author=OURS)
CLIENT = GaussianRelease("full-dp", 0.2, author=OURS)


def ledger(release: object, rounds: int = 9, cohort: int = 100, **fields: object) -> Ledger:
    found = Ledger()
    for number in range(1, rounds + 1):
        event = {"joined": number, **fields}
        found = found.charge(RoundEvent(number, release, cohort, event.pop("population", cohort), **event))  # type: ignore[arg-type]
    return found


def test_a_record_is_accounted_as_one_gaussian_and_its_client_is_not_promised_anything() -> None:
    statement = account(ledger(RECORD, channel="direct"))
    row = statement.find("local", "run")
    assert row is not None
    assert (row.unit, row.adjacency, statement.protected) == ("record", "replace one record of one client", "record")
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * 3, 1e-5), rel=1e-9)
    assert not any(row.unit == "client" for row in statement.rows)
    assert any("m times" in note for note in statement.notes)
    assert "which of two records the client holds" in statement.verdict
    assert statement.figures()["protected"] == "record"


def test_what_protects_a_client_protects_its_records_but_not_the_other_way_round() -> None:
    both = account_together([ledger(RECORD, channel="direct"), ledger(CLIENT, channel="direct")])
    assert both.protected == "record"
    row = both.find("local", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * sqrt(18), 1e-5), rel=1e-9)
    assert account(ledger(CLIENT, channel="direct")).protected == "client"


def test_floats_that_are_rounded_one_by_one_do_not_add_up_as_their_noise_does() -> None:
    """The low digits of an exact sum of float32 reports tell whether one of them was small: delta of 0.3 where 1e-5 would be printed."""
    statement = account(ledger(CLIENT, channel="secure-sum"))
    assert statement.find("summed", "run") is None
    assert any("on integers" in note for note in statement.notes)
    assert statement.best is statement.find("local", "run")


def test_a_sum_hides_a_record_in_the_noise_of_all() -> None:
    release = RECORD
    statement = account(ledger(release, channel="secure-sum"))
    row = statement.find("summed", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(gaussian_epsilon(0.2 * 3 / 10, 1e-5), rel=1e-6)
    assert gaussian_delta(0.06, row.epsilon) <= 1e-5
    assert statement.best is row
    assert "sum over all clients" in statement.verdict
    colluding = account(ledger(release, channel="secure-sum"), colluding=75).find("summed", "run")
    assert colluding is not None
    assert colluding.epsilon == pytest.approx(gaussian_epsilon(0.2 * 3 / 5, 1e-5), rel=1e-6)


def test_a_record_left_out_of_a_sum_has_an_epsilon_of_the_sum() -> None:
    """Half the mu of a record that is replaced, of the sum first, and then of who sees senders."""
    (note,) = [note for note in account(ledger(RECORD, channel="secure-sum")).notes if "left out" in note]
    epsilons = [gaussian_epsilon(mu, 1e-5) for mu in (0.2 * 3 / 10 / 2, 0.2 * 3 / 2)]
    told = re.findall(r"([\d.]+) (?:if nobody learns more than the sum over all clients|against whoever sees who sent what)", note)
    assert [float(text) for text in told] == pytest.approx(epsilons, rel=1e-3)
    assert "sum" not in next(note for note in account(ledger(RECORD, channel="direct")).notes if "left out" in note)


def test_a_record_left_out_of_two_runs_of_one_round_counts_as_of_least_squares() -> None:
    """Each run may have solved least squares, where a record that is left out moves the sums up to 1 / sqrt(2) times as far."""
    once = ledger(RECORD, rounds=1, channel="direct")
    told = [next(note for note in account_together(runs).notes if "left out" in note) for runs in ([once], [once, once])]
    found = [float(found[1]) for note in told if (found := re.search(r"epsilon ([\d.]+) against whoever sees who sent what", note))]
    assert found == pytest.approx([gaussian_epsilon(0.2 * sqrt(runs / 2), 1e-5) for runs in (1, 2)], rel=1e-3)


WHOLE = GaussianRelease("dp-fedavg", 1.5, alike=True, integers=True, author=OURS)


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """Return delta of a Gaussian of mu at epsilon, to 400 digits (Balle and Wang 2018, Theorem 8)."""
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("clients", "rounds"), [(1, 1), (100, 6), (300, 20), (10_000, 40)])
def test_a_sum_hides_a_whole_client_in_the_noise_of_all(clients: int, rounds: int) -> None:
    """The figure holds at 400 digits, with the part of delta that rounding is charged; and 1 part in 10^7 less does not."""
    found = ledger(WHOLE, rounds, clients, channel="secure-sum")
    row = account(found).find("summed", "run")
    assert row is not None
    assert (row.unit, row.adjacency) == ("client", "replace one client's data")
    mu = 1.5 * sqrt(rounds / clients)
    assert exact_delta(mu, row.epsilon) <= 1e-5 * (1 - 0.99e-9)
    assert exact_delta(mu, row.epsilon * (1 - 1e-7)) > 1e-5 * (1 - 1e-9)
    assert row.lower == row.epsilon
    assert run_epsilon(found) == pytest.approx(row.epsilon, rel=1e-9)
    assert Ledger.from_json(found.to_json(), "again") == found
    local = account(found).find("local", "run")
    assert local is not None
    assert local.epsilon == pytest.approx(gaussian_epsilon(1.5 * sqrt(rounds), 1e-5), rel=1e-9)


def test_records_and_whole_clients_behind_a_sum_are_accounted_together() -> None:
    both = account_together([ledger(RECORD, channel="secure-sum"), ledger(WHOLE, channel="secure-sum")])
    row = both.find("summed", "run")
    assert row is not None
    assert row.unit == "record"
    assert row.epsilon == pytest.approx(gaussian_epsilon(sqrt(0.2**2 + 1.5**2) * 3 / 10, 1e-5), rel=1e-6)


def test_a_ledger_says_of_how_many_clients_the_noise_is_not_relied_on() -> None:
    """As if whoever asks had named them; who asks for more gets more, and the client itself is always left."""
    planned = ledger(WHOLE, channel="secure-sum", colluding=75)
    plain = ledger(WHOLE, channel="secure-sum")
    assert Ledger.from_json(planned.to_json(), "again") == planned
    assert account(planned).rows == account(plain, colluding=75).rows
    assert account(planned, colluding=99).rows == account(plain, colluding=99).rows
    assert account(planned, colluding=10).rows == account(planned).rows
    few = ledger(WHOLE, channel="secure-sum", cohort=20, population=100, sampling="visible", colluding=75)
    row, local = account(few).find("summed", "run"), account(few).find("local", "run")
    assert row is not None
    assert local is not None
    assert row.epsilon == pytest.approx(local.epsilon, rel=1e-6)
    with pytest.raises(ConfigError, match="one has to be honest"):
        ledger(WHOLE, channel="secure-sum", colluding=100)


def test_one_small_round_takes_no_colluding_clients_off_the_others() -> None:
    """A round in which fewer took part than may collude has the client's own noise; all others lose the noise of all that may."""
    mu, rounds, colluding = 1.0, 20, 90

    def figure(cohorts: list[int]) -> float:
        found = Ledger()
        for number, cohort in enumerate(cohorts, start=1):
            release = GaussianRelease("dp-sgd", mu, unit="record")
            found = found.charge(RoundEvent(number, release, cohort, 100, number, "visible", channel="secure-sum", colluding=colluding))
        line = account(found).find("summed", "run")
        assert line is not None
        return line.epsilon

    equal = figure([100] * rounds)
    assert equal == pytest.approx(gaussian_epsilon(mu * sqrt(rounds / 10), 1e-5), rel=1e-6)
    mixed = figure([100] * (rounds - 1) + [1])
    assert mixed == pytest.approx(gaussian_epsilon(mu * sqrt((rounds - 1) / 10 + 1), 1e-5), rel=1e-6)
    assert mixed > equal


def test_the_smallest_sum_counts() -> None:
    found = Ledger()
    for number, cohort in enumerate((100, 25, 100), start=1):
        found = found.charge(
            RoundEvent(number, RECORD, cohort, 100, number, "visible" if cohort < 100 else "everyone", channel="secure-sum")
        )
    row = account(found).find("summed", "run")
    assert row is not None
    assert row.epsilon >= gaussian_epsilon(0.2 * sqrt(1 / 25 + 2 / 100), 1e-5) * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sum_of_bits_says_what_a_shuffler_says() -> None:
    bits = BinaryRelease("duchi", 0.5, 4, author=OURS)
    summed, shuffled = (account(ledger(bits, 1, 20, channel=channel)) for channel in ("secure-sum", "ideal-shuffler"))
    one, other = summed.find("summed", "run"), shuffled.find("shuffled", "run")
    assert one is not None
    assert other is not None
    assert one.epsilon == other.epsilon


def test_what_a_sum_hides_of_other_reports_is_not_claimed() -> None:
    statement = account(ledger(PureRelease("laplace", 0.5, 40, "weight", author=OURS), 2, channel="secure-sum"))
    assert statement.find("hidden", "run") is None
    assert any("bits, and for Gaussian noise on integers" in note for note in statement.notes)


def once(rounds: int = 20, cohort: int = 50, epsilon: float = 2.0) -> Ledger:
    return ledger(
        PureRelease("privunit-g", epsilon, 1, "vector", author=OURS), rounds, cohort, population=rounds * cohort, sampling="once", joined=1
    )


def test_a_client_that_takes_part_once_hides_among_all_of_the_run() -> None:
    statement = account(once())
    local, hidden = statement.find("local", "run", pure=True), statement.find("shuffled", "run")
    assert local is not None
    assert hidden is not None
    assert local.epsilon == 2.0
    assert hidden.epsilon == pytest.approx(clone_epsilon(2.0, 1000, 1e-5, clone_probability(2.0)), rel=1e-9)
    assert any("the order in which" in assumption for assumption in hidden.assumptions)
    crowd = account(once(), colluding=49).find("shuffled", "run")
    assert crowd is not None
    assert crowd.epsilon == pytest.approx(clone_epsilon(2.0, 951, 1e-5, clone_probability(2.0)), rel=1e-9)


def test_only_those_that_took_part_are_a_crowd() -> None:
    few = account(ledger(PureRelease("privunit-g", 2.0, 1, "vector", author=OURS), 4, 50, population=1000, sampling="once", joined=1))
    row = few.find("shuffled", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(clone_epsilon(2.0, 200, 1e-5, clone_probability(2.0)), rel=1e-9)


def test_nobody_takes_part_once_twice() -> None:
    with pytest.raises(ConfigError, match="once"):
        RoundEvent(2, PureRelease("privunit-g", 2.0, 1, "vector", author=OURS), 5, 10, 2, "once")


@pytest.mark.parametrize("found", [ledger(RECORD, channel="direct"), ledger(CLIENT, channel="secure-sum"), once()])
def test_the_short_way_to_a_runs_epsilon_is_that_of_its_statement(found: Ledger) -> None:
    best = account(found).best
    assert best is not None
    assert run_epsilon(found) == pytest.approx(best.epsilon, rel=1e-9)
    assert Ledger.from_json(found.to_json(), "again") == found


def request(release: GaussianRelease, number: int) -> Request:
    return Request("run", number, release, 100, "direct")


def policy(**fields: object) -> Policy:
    bounds = {"epsilon_per_unit": 9.0, "epsilon_per_round": 9.0, "lifetime_epsilon": 9.0, "rounds": 50}
    return Policy(mechanisms=("dp-sgd", "full-dp"), transports=("direct",), min_clients=1, **{**bounds, **fields})  # type: ignore[arg-type]


def test_a_policy_that_protects_the_client_takes_no_records_for_it(tmp_path: Path) -> None:
    with pytest.raises(Declined, match="one record at a time"):
        policy().check(request(RECORD, 1))
    policy(protects="record").check(request(RECORD, 1))
    policy(protects="record").check(request(CLIENT, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "budget.sqlite"
    set_limit(file, 1000.0)
    return file


def test_releases_that_protected_records_leave_no_budget_for_the_client(path: Path) -> None:
    Budget(path, policy(protects="record")).charge(request(RECORD, 1))
    with pytest.raises(Exhausted, match="no epsilon"):
        Budget(path, policy()).charge(request(CLIENT, 2))


def test_a_records_lifetime_is_kept(path: Path) -> None:
    budget, sent = Budget(path, policy(protects="record", lifetime_epsilon=2.0)), 0
    with suppress(Exhausted):
        for number in range(1, 50):
            budget.charge(request(RECORD, number))
            sent = number
    assert 0 < sent < 49
    assert gaussian_epsilon(0.2 * sqrt(sent), 1e-5) <= 2.0
    assert gaussian_epsilon(0.2 * sqrt(1.5 * sent), 1e-5) > 2.0  # and not much is lost to choosing one order beforehand


@pytest.mark.slow
@pytest.mark.thorough
def test_one_secret_order_does_not_hide_bits_as_if_each_had_its_own() -> None:
    """A report of many bits: its client's bits stand at one place of the order, and add up among those of its round."""
    bits = BinaryRelease("duchi", 1.0, 64, author=OURS)
    alone = account(ledger(bits, 1, 100)).find("shuffled", "run")
    in_order = account(ledger(bits, 20, 100, population=2000, sampling="once", joined=1)).find("shuffled", "run")
    assert alone is not None
    assert in_order is not None
    assert in_order.epsilon == pytest.approx(alone.epsilon, rel=1e-9)


def test_an_order_is_secret_behind_a_shuffler_only() -> None:
    release = PureRelease("privunit-g", 2.0, 1, "vector", author=OURS)
    found = Ledger().charge(RoundEvent(1, release, 50, 100, 1, "once"))
    mixed = account(found.charge(RoundEvent(2, release, 50, 100, 1, "once", channel="direct")))
    assert mixed.find("shuffled", "run") is None
    nobody = Ledger().charge(RoundEvent(1, release, 0, 100, 0, "once"))
    assert account(nobody).rows == ()


def test_of_unequal_sums_all_are_charged() -> None:
    """Much noise in a small sum may hide less than little noise in a large one."""
    found = Ledger()
    for number, (mu, cohort) in enumerate([(0.01, 1000), (0.009, 1)], start=1):
        release = GaussianRelease("dp-sgd", mu, unit="record", author=OURS)
        sampling: Sampling = "visible" if cohort < 1000 else "everyone"
        found = found.charge(RoundEvent(number, release, cohort, 1000, 1, sampling, channel="secure-sum"))
    row = account(found).find("summed", "run")
    assert row is not None
    assert row.epsilon >= gaussian_epsilon(0.009, 1e-5) * (1 - 1e-9)


def test_rounds_that_protect_a_record_are_not_left_out_for_costlier_ones_of_clients() -> None:
    """A client that joined one of two visible rounds may have joined the one that says nothing of it as a whole."""
    releases = GaussianRelease("full-dp", 1.0, 1, "vector", author=OURS), GaussianRelease("dp-sgd", 0.5, 1, "record", author=OURS)

    def events_of(sent: tuple[GaussianRelease, ...]) -> list[RoundEvent]:
        return [RoundEvent(number, release, 5, 10, 1, "visible", channel="direct") for number, release in enumerate(sent, 1)]

    both, first = (account(Ledger(own)).find("local", "run") for own in (tuple(events_of(releases)), tuple(events_of(releases[:1]))))
    assert both is not None
    assert first is not None
    assert (both.unit, first.unit) == ("record", "client")
    assert both.epsilon > first.epsilon
