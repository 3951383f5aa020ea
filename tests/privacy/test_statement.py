"""From a ledger to the lines of its table: what stands there, what must not, and why.

Bounds behind a shuffler take a second or so each, so settings are small, and what is asked twice is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, pi, sqrt
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, ndtr

from ldpfl.errors import ConfigError
from ldpfl.privacy import BinaryRelease, GaussianRelease, Ledger, PureRelease, Release, RoundEvent, UnprotectedRelease
from ldpfl.privacy.accountants.blanket import Bits, Hidden, blanket_epsilon
from ldpfl.privacy.accountants.clones import clone_probability, composed_clone_epsilon
from ldpfl.privacy.accountants.closed_forms import central_limit_epsilon
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_epsilon, gaussian_mu
from ldpfl.privacy.accountants.participation import self_sampled_epsilon
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import single_epsilon
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds
from ldpfl.privacy.accounting import account, account_together
from ldpfl.privacy.events import OURS
from ldpfl.privacy.guarantee import Scope, Statement

DELTA = 1e-5
CLAIM = "LDP-FL, section 4"
BIT = BinaryRelease("duchi", 1.0, 1, claim=CLAIM, author=OURS)
BITS = BinaryRelease("duchi", 1.0, 21, claim=CLAIM, author=OURS)
VECTOR = PureRelease("laplace", 1.0, 1, "vector", author=OURS)
NOISE = GaussianRelease("gaussian", 0.3, author=OURS)
NOTHING = UnprotectedRelease("none", "values leave as they are", 21, "weight", author=OURS)

SHUFFLED = ("per_report_shuffled", "shuffled_lower", "shuffled_upper", "shuffled_upper_adaptive", "shuffled_estimate")
LOCAL = ("local_pure_round", "local_round", "local_pure", "local")


def ledger_of(*releases: Release, cohort: int = 100, **common: Any) -> Ledger:
    """A round for each release; everyone joins all of them unless ``joined`` says otherwise."""
    ledger = Ledger()
    for number, release in enumerate(releases, start=1):
        fields: dict[str, Any] = {"population": cohort, "joined": number, **common}
        ledger = ledger.charge(RoundEvent(number, release, cohort, **{**fields, "joined": min(fields["joined"], number)}))
    return ledger


@cache
def accounted(ledger: Ledger, delta: float = DELTA, colluding: int = 0) -> Statement:
    return account(ledger, delta, colluding)


def figures(ledger: Ledger, delta: float = DELTA, colluding: int = 0) -> dict[str, Any]:
    return accounted(ledger, delta, colluding).figures()


def direct(*releases: Release, **fields: Any) -> Ledger:
    return ledger_of(*releases, channel="direct", **fields)


MNIST = pytest.mark.xdist_group("mnist")  # it is accounted once a process


# --- the paper's setting ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist() -> Statement:
    """LDP-FL on MNIST: 21,840 weights at epsilon 1, ten rounds, a hundred clients."""
    return accounted(ledger_of(*[BinaryRelease("duchi", 1.0, 21_840, claim=CLAIM, author=OURS)] * 10))


@pytest.mark.slow
@pytest.mark.thorough
@MNIST
def test_the_figures_of_the_paper_s_mnist_setting(mnist: Statement) -> None:
    found = mnist.figures()
    assert found["delta"] == DELTA
    assert found["paper_claim"] == 1.0
    assert found["per_report"] == 1.0
    assert found["per_report_shuffled"] == pytest.approx(0.4078, abs=5e-5)
    assert found["local_pure_round"] == 21_840
    assert found["local_round"] == pytest.approx(10_647.8, abs=0.05)
    assert found["local_pure"] == 218_400
    assert found["local"] == pytest.approx(102_690.0, abs=0.5)
    assert found["shuffled_lower"] == pytest.approx(1405.4, abs=0.05)
    assert found["shuffled_upper"] == pytest.approx(1406.2, abs=0.05)
    assert isinstance(found["shuffled_upper_adaptive"], float)
    assert 1406.2 < found["shuffled_upper_adaptive"] <= 1412.5
    assert mnist.notes == ()
    assert mnist.warnings == ()


@MNIST
@pytest.mark.slow
def test_the_lines_come_in_the_order_of_a_table(mnist: Statement) -> None:
    lines = [(row.status, row.unit, row.trust_model, row.scope, row.delta == 0, row.adaptive) for row in mnist.rows]
    assert lines == [
        ("claimed", "client", "shuffled", "run", True, True),
        ("proved", "weight", "local", "round", True, True),
        ("proved", "weight", "shuffled", "round", False, True),
        ("proved", "client", "local", "round", True, True),
        ("proved", "client", "local", "round", False, True),
        ("proved", "client", "shuffled", "round", False, True),
        ("proved", "client", "local", "run", True, True),
        ("proved", "client", "local", "run", False, True),
        ("proved", "client", "shuffled", "run", False, False),
        ("proved", "client", "shuffled", "run", False, True),
    ]


@pytest.mark.slow
@pytest.mark.thorough
@MNIST
def test_the_estimate_of_the_central_limit_theorem_bounds_nothing_and_says_so(mnist: Statement) -> None:
    """At the paper's setting it lies below what a data set attains, and is not shown: whoever quotes it as a guarantee is wrong."""
    lower = mnist.figures()["shuffled_lower"]
    assert isinstance(lower, float)
    assert central_limit_epsilon(1.0, 100, 218_400, DELTA) < lower
    assert not [row for row in mnist.rows if row.status == "estimate"]
    assert mnist.figures()["shuffled_estimate"] is None
    for found in (figures(ledger_of(replace(BIT, epsilon=epsilon))) for epsilon in (0.01, 0.1, 1.0)):
        assert found["shuffled_estimate"] is None or found["shuffled_lower"] <= found["shuffled_estimate"]


@MNIST
@pytest.mark.slow
def test_what_a_shuffler_must_be_is_an_assumption_of_its_lines_only(mnist: Statement) -> None:
    for row in mnist.rows:
        if row.status == "proved":
            assert any("99 clients are honest" in assumption for assumption in row.assumptions) == (row.trust_model == "shuffled")
            assert any("fixed before the first" in assumption for assumption in row.assumptions) == (not row.adaptive)


@MNIST
@pytest.mark.slow
def test_a_statement_is_strict_json_with_all_its_figures_on_top(mnist: Statement) -> None:
    infinite = accounted(ledger_of(NOTHING))
    for statement in (mnist, infinite, accounted(direct(NOISE))):
        tree = json.loads(json.dumps(statement.to_dict(), allow_nan=False))
        assert tree.items() >= statement.figures().items()
        assert len(tree["guarantees"]) == len(statement.rows)
        assert [row["status"] for row in tree["guarantees"]] == [row.status for row in statement.rows]
    assert infinite.to_dict()["local"] == "infinity"


# --- channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channel", "why"),
    [("random-delay", "a random delay is not a shuffler"), ("direct", "reports reach the server with their sender")],
)
def test_without_a_shuffler_there_is_no_shuffled_number_and_the_note_says_why(channel: str, why: str) -> None:
    statement = accounted(ledger_of(BITS, BITS, channel=channel))
    assert {name: statement.figures()[name] for name in SHUFFLED} == dict.fromkeys(SHUFFLED)
    assert len(statement.notes) == 1
    assert why in statement.notes[0]
    assert not [row for row in statement.rows if row.trust_model == "shuffled" and row.status != "claimed"]
    assert statement.figures()["paper_claim"] == 1.0  # the claim stands beside it all the same


def test_one_round_without_a_shuffler_takes_the_shuffled_number_of_the_run_away() -> None:
    first = RoundEvent(1, BITS, 100, 100, 1)
    statement = accounted(Ledger((first, replace(first, round=2, joined=2, channel="random-delay"))))
    assert statement.find("shuffled", "run") is None
    assert any("random delay" in note for note in statement.notes)


@pytest.mark.parametrize("channel", ["random-delay", "direct"])
def test_local_figures_do_not_depend_on_the_channel(channel: str) -> None:
    behind, before = accounted(ledger_of(BIT)), accounted(ledger_of(BIT, channel=channel))
    assert [behind.figures()[name] for name in LOCAL] == [before.figures()[name] for name in LOCAL]


# --- kinds of releases ------------------------------------------------------------------------------------------------


def test_bits_are_composed_exactly() -> None:
    found = figures(direct(BITS, BITS, BITS))
    assert [found[name] for name in LOCAL] == [21.0, composed_epsilon(1.0, 21, DELTA), 63.0, composed_epsilon(1.0, 63, DELTA)]


def test_gaussian_noise_is_composed_by_its_mu() -> None:
    releases = [NOISE, NOISE, GaussianRelease("gaussian", 0.4, author=OURS)]
    found = figures(direct(*releases))
    assert found["local"] == pytest.approx(gaussian_epsilon((0.3**2 + 0.3**2 + 0.4**2) ** 0.5, DELTA), rel=1e-9)
    assert found["local_round"] == pytest.approx(gaussian_epsilon(0.4, DELTA), rel=1e-9)
    assert found["local_pure"] == found["local_pure_round"] == "infinity"
    assert found["per_report"] is None
    assert figures(direct(replace(NOISE, units=4)))["local"] == pytest.approx(gaussian_epsilon(0.6, DELTA), rel=1e-9)


def test_pure_reports_and_gaussian_noise_together_cost_more_than_each_and_less_than_both() -> None:
    found = figures(direct(NOISE, NOISE, VECTOR))
    noise, pure = figures(direct(NOISE, NOISE))["local"], figures(direct(VECTOR))["local"]
    assert max(noise, pure) < found["local"] < 1.05 * (figures(direct(NOISE, NOISE), DELTA / 2)["local"] + 1.0)
    assert found["local_pure"] == "infinity"


@pytest.mark.parametrize("releases", [(NOTHING,), (BITS,) * 9 + (NOTHING,), (NOTHING, NOISE), (NOTHING, VECTOR, VECTOR)], ids=len)
def test_one_unprotected_round_makes_every_local_line_infinite(releases: Sequence[Release]) -> None:
    """Whatever was protected in the other rounds."""
    statement = accounted(ledger_of(*releases))
    assert {name: statement.figures()[name] for name in LOCAL} == dict.fromkeys(LOCAL, "infinity")
    assert not [row for row in statement.rows if row.trust_model == "shuffled" and row.status != "claimed"]
    assert any("without protection" in note for note in statement.notes)
    local = statement.find("local", "run")
    assert local is not None
    assert any("values leave as they are" in assumption for assumption in local.assumptions)


def test_the_unprotected_round_counts_even_where_a_client_joined_only_some() -> None:
    assert figures(direct(BITS, BITS, NOTHING, BITS, joined=1, population=400))["local"] == "infinity"


def test_only_a_release_whose_paper_says_so_is_claimed() -> None:
    assert figures(direct(VECTOR))["paper_claim"] is None
    assert figures(direct(BinaryRelease("ours", 1.0, 3, author=OURS)))["paper_claim"] is None
    assert figures(direct(BITS, replace(BITS, epsilon=2.5)))["paper_claim"] == 2.5


@pytest.mark.slow
@pytest.mark.thorough
def test_a_shuffled_vector_is_accounted_by_clones() -> None:
    found = figures(ledger_of(VECTOR, VECTOR))
    assert found["shuffled_upper_adaptive"] == composed_clone_epsilon(1.0, 100, 2, DELTA, clone_probability(1.0))
    assert found["shuffled_upper_adaptive"] < found["local"]
    assert found["shuffled_lower"] is None
    assert found["shuffled_estimate"] is None


@pytest.mark.slow
@pytest.mark.thorough
def test_units_that_travel_together_are_accounted_as_one_message_and_never_below_single_ones() -> None:
    apart = figures(ledger_of(replace(BITS, units=4, epsilon=0.5), cohort=1000))
    linked = [figures(ledger_of(replace(BITS, units=4, epsilon=0.5), cohort=1000, linked=size)) for size in (2, 4, 9)]
    clones = [composed_clone_epsilon(size * 0.5, 1000, 4 // size, DELTA, clone_probability(size * 0.5)) for size in (2, 4)]
    assert linked[0]["shuffled_upper_adaptive"] == blanket_epsilon([Hidden(Bits(0.5, 2), 1000, 2)], DELTA) < clones[0]
    assert linked[1]["shuffled_upper_adaptive"] == blanket_epsilon([Hidden(Bits(0.5, 4), 1000, 1)], DELTA) < clones[1]
    assert linked[2] == linked[1]  # more than there are
    for found in linked:
        assert apart["shuffled_upper_adaptive"] <= found["shuffled_upper_adaptive"] <= found["local"] == apart["local"]
        assert found["shuffled_lower"] is found["shuffled_estimate"] is found["per_report_shuffled"] is None


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_that_differ_are_composed_together() -> None:
    """More than the dearest alone, and no less than what some data set loses."""
    dear, cheap = BinaryRelease("duchi", 1.0, 2, author=OURS), BinaryRelease("duchi", 0.5, 2, author=OURS)
    ledger = ledger_of(dear, cohort=50).charge(RoundEvent(2, cheap, 200, 200, 2))
    found, alone = figures(ledger), figures(ledger_of(dear, cohort=50))
    for name in ("local_pure", "local", "shuffled_upper_adaptive"):
        assert alone[name] < found[name]
    assert found["shuffled_upper_adaptive"] < found["local"]
    assert 0 <= found["shuffled_lower"] <= found["shuffled_upper"]
    assert found["local_pure"] == 3.0
    assert found["local_round"] == alone["local_round"]


# --- who else is there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colluding", [1, 50, 98])
def test_colluding_clients_leave_n_minus_c(colluding: int) -> None:
    with_them = accounted(ledger_of(BIT, BIT, channel="direct"), colluding=colluding)
    assert with_them.rows == accounted(ledger_of(BIT, BIT, cohort=100 - colluding, channel="direct")).rows
    assert accounted(ledger_of(BIT), colluding=colluding).rows == accounted(ledger_of(BIT, cohort=100 - colluding)).rows


@pytest.mark.slow
@pytest.mark.thorough
def test_many_bits_among_colluding_clients_are_those_among_fewer() -> None:
    assert figures(ledger_of(BITS, cohort=12), colluding=4) == figures(ledger_of(BITS, cohort=8))


def test_dropped_clients_are_not_in_the_crowd() -> None:
    assert figures(ledger_of(BIT, cohort=60, population=100)) == figures(ledger_of(BIT, cohort=60))


def test_more_colluding_clients_never_help() -> None:
    rising = [figures(ledger_of(BIT), colluding=count) for count in (0, 1, 10, 50, 90, 98, 99)]
    for name in ("per_report_shuffled", "shuffled_upper_adaptive"):
        values = [found[name] for found in rising]
        assert values == sorted(values)
        assert values[0] < values[-1]
    assert len({found["local"] for found in rising}) == 1


@pytest.mark.parametrize(("cohort", "colluding"), [(1, 0), (100, 99)])
def test_among_nobody_a_shuffler_is_worth_nothing(cohort: int, colluding: int) -> None:
    found = figures(ledger_of(BITS, BITS, cohort=cohort), colluding=colluding)
    assert found["shuffled_lower"] == found["shuffled_upper"] == found["shuffled_upper_adaptive"] == found["local"]
    assert found["local"] == composed_epsilon(1.0, 42, DELTA)
    assert found["per_report_shuffled"] == composed_epsilon(1.0, 1, DELTA)


@pytest.mark.parametrize("colluding", [-1, 100, 1000])
def test_as_many_colluding_clients_as_took_part_are_refused(colluding: int) -> None:
    with pytest.raises(ConfigError, match=rf"colluding, .* is {colluding}, expected 0 to 99: "):
        account(ledger_of(BIT), DELTA, colluding)


def test_the_smallest_cohort_bounds_the_colluding_ones() -> None:
    ledger = direct(BIT).charge(RoundEvent(2, BIT, 3, 100, 2, channel="direct"))
    with pytest.raises(ConfigError, match="expected 0 to 2"):
        account(ledger, DELTA, 3)


# --- who took part ----------------------------------------------------------------------------------------------------


def test_a_client_is_charged_for_the_rounds_that_it_joined() -> None:
    found = figures(direct(*[BITS] * 10, joined=3, population=400))
    assert found["local_pure"] == 3 * 21
    assert found["local"] == composed_epsilon(1.0, 63, DELTA)


def test_at_least_the_dearest_of_the_rounds_are_charged() -> None:
    """Which ones a client joined is not recorded, so it is the worst that counts, or all of them."""
    releases = [replace(BITS, epsilon=epsilon) for epsilon in (0.5, 2.0, 1.0, 1.5)]
    for order in (releases, releases[::-1]):
        found = figures(direct(*order, joined=2, population=400))
        assert 21 * (2.0 + 1.5) <= found["local_pure"] <= 21 * (0.5 + 2.0 + 1.0 + 1.5)
        assert found["local"] >= figures(direct(*releases[1::2]))["local"]
        assert found["local_pure_round"] == 42
        assert found["per_report"] == 2.0


def test_the_smallest_of_the_crowds_are_charged() -> None:
    ledger = Ledger()
    for number, cohort in enumerate((300, 20, 100), start=1):
        ledger = ledger.charge(RoundEvent(number, BIT, cohort, 500, 1, "visible"))
    found = figures(ledger)
    assert found["shuffled_upper_adaptive"] == found["per_report_shuffled"] == single_epsilon(1.0, 20, DELTA)


DEAREST_DIFFERS: dict[str, tuple[Release, Release]] = {
    "few strong reports against many weak ones": (BinaryRelease("a", 1.0, 21, author=OURS), BinaryRelease("b", 4.0, 5, author=OURS)),
    "Gaussian noise against a pure report": (GaussianRelease("a", 0.3, author=OURS), PureRelease("b", 0.5, 1, "vector", author=OURS)),
    "much Gaussian noise against a pure report": (GaussianRelease("a", 3.0, author=OURS), PureRelease("b", 2.9, 1, "vector", author=OURS)),
}


@pytest.mark.parametrize("delta", [1e-5, 1e-2])
@pytest.mark.parametrize("name", DEAREST_DIFFERS)
def test_what_holds_of_a_client_that_joined_one_round_holds_whichever_it_was(name: str, delta: float) -> None:
    """Which round is the dearest can differ for the pure figure and for the one at delta."""
    both = accounted(direct(*DEAREST_DIFFERS[name], joined=1, population=400), delta)
    for release in DEAREST_DIFFERS[name]:
        alone = accounted(direct(release, population=400), delta)
        scopes: tuple[Scope, ...] = ("round", "run")
        for scope in scopes:
            for pure in (True, False):
                bound, own = both.find("local", scope, pure=pure), alone.find("local", scope, pure=pure)
                assert bound is not None
                assert own is not None
                assert bound.epsilon >= own.epsilon * (1 - 1e-9), f"{scope}, pure {pure}, {release.mechanism}"


@pytest.mark.slow
@pytest.mark.thorough
def test_what_holds_behind_a_shuffler_holds_whichever_round_a_client_joined() -> None:
    """The round that costs a little more locally may hide a client among many more others."""
    small = RoundEvent(1, BIT, 10, 400, 1, "visible")
    large = RoundEvent(2, replace(BIT, epsilon=1.01), 400, 400, 1, "visible")
    both, alone = figures(Ledger((small, large))), figures(Ledger((small,)))
    for name in ("per_report_shuffled", "shuffled_upper_adaptive"):
        assert both[name] >= alone[name]


def test_the_line_of_one_round_is_that_of_the_dearest() -> None:
    """Also where the pure figure and the one at delta are those of different rounds."""
    found = figures(direct(GaussianRelease("a", 0.3, author=OURS), PureRelease("b", 0.5, 1, "vector", author=OURS)))
    assert found["local_pure_round"] == "infinity"
    assert found["local_round"] >= gaussian_epsilon(0.3, DELTA)


@pytest.mark.slow
@pytest.mark.thorough
def test_secret_participation_is_amplified_and_every_round_counts() -> None:
    """Nobody knows who joined, so all rounds are composed, each with the chance to have been in it."""
    ledger = ledger_of(BIT, BIT, cohort=5, population=20, sampling="secret", rate=0.3, joined=1)
    found = figures(ledger)
    expected = self_sampled_epsilon(ShuffledRounds(1.0, 20, 1, 2), 0.3, DELTA)
    assert found["shuffled_upper_adaptive"] == min(expected, found["local"])
    assert found["shuffled_upper_adaptive"] < found["local"]
    assert found["local_pure"] == 2.0
    assert found["shuffled_lower"] is None
    assert found["shuffled_estimate"] is None


def test_visible_participation_gives_nothing_away_and_nothing_for_free() -> None:
    """Being drawn by the server is no secret: the crowd is those that took part."""
    visible = figures(ledger_of(BIT, cohort=20, population=200, sampling="visible"))
    assert visible == figures(ledger_of(BIT, cohort=20))
    assert visible["shuffled_upper_adaptive"] == single_epsilon(1.0, 20, DELTA)


# --- delta ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, float("nan"), float("inf")])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta must lie strictly between 0 and 1"):
        account(ledger_of(BIT), delta)


def test_who_asks_for_delta_0_is_told_of_the_pure_figures() -> None:
    with pytest.raises(ConfigError, match="pure figures"):
        account(ledger_of(BIT), 0.0)


@pytest.mark.parametrize(("delta", "warned"), [(1e-3, False), (0.009, False), (0.01, True), (0.5, True)])
def test_a_delta_that_is_not_below_one_over_n_is_warned_of(delta: float, warned: bool) -> None:
    warnings = accounted(direct(BIT), delta).warnings
    assert len(warnings) == warned
    assert all("1/n = 0.01" in warning for warning in warnings)


def test_n_is_the_number_of_clients_not_of_those_of_one_round() -> None:
    """To publish one of 1000 clients has delta 0.001, however many take part in a round."""
    assert accounted(direct(BIT, cohort=100, population=1000), 0.005).warnings


def test_a_larger_delta_asks_for_less() -> None:
    falling = [figures(ledger_of(BIT), delta) for delta in (1e-9, 1e-7, 1e-5, 1e-3)]
    for name in ("local", "shuffled_upper_adaptive"):
        values = [found[name] for found in falling]
        assert values == sorted(values, reverse=True)
    assert len({found["local_pure"] for found in falling}) == 1


def test_where_nothing_was_released_there_is_nothing_to_state() -> None:
    """All clients may have decided to stay away in every round."""
    statement = account(Ledger())
    assert statement.rows == ()
    assert statement.notes == ("nothing was released",)
    assert all(value is None for name, value in statement.figures().items() if name not in ("delta", "protected", "status"))


@pytest.mark.slow
@pytest.mark.thorough
def test_more_rounds_are_charged_than_are_said_to_be_joined_where_clients_must_have_joined_more() -> None:
    """Two rounds of 300 out of 400: some client was in both, whatever ``joined`` says."""
    said = Ledger((RoundEvent(1, BIT, 300, 400, 1, "visible"), RoundEvent(2, BIT, 300, 400, 1, "visible")))
    true = Ledger((RoundEvent(1, BIT, 300, 400, 1, "visible"), RoundEvent(2, BIT, 300, 400, 2, "visible")))
    assert figures(said) == figures(true)


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 40.0, 100.0, 700.0, 800.0])
def test_any_budget_of_a_bit_is_accounted(epsilon: float) -> None:
    """A mechanism takes them all; a run must not end in an error after its training."""
    found = figures(ledger_of(replace(BIT, epsilon=epsilon)))
    assert 0 <= found["shuffled_upper_adaptive"] <= found["local"] <= found["local_pure"] == epsilon
    if epsilon > 3:  # a hundred clients, and the rarer answer is too rare for the central limit theorem
        assert found["shuffled_estimate"] is None
    else:
        assert found["shuffled_estimate"] is None or found["shuffled_lower"] <= found["shuffled_estimate"] <= epsilon


@pytest.mark.parametrize("epsilon", [60.0, 67.6, 100.0, 300.0, 700.0, 800.0])
@pytest.mark.parametrize("count", [6, 12_030, 10**7])
def test_the_estimate_never_stops_a_statement(epsilon: float, count: int) -> None:
    """It may be infinite, for then it is left at the sum of all reports; an error would cost a finished run its table."""
    assert central_limit_epsilon(epsilon, 8, count, DELTA) > epsilon


@pytest.mark.parametrize("release", [BITS, NOISE, VECTOR], ids=lambda release: type(release).__name__)
@pytest.mark.parametrize("parameter", [5e-324, 1e-100, 1e150, 1.7e308])
def test_a_parameter_at_the_end_of_the_numbers_gives_a_bound_or_a_refusal(release: Any, parameter: float) -> None:
    """A ledger may hold it; never may it come out as no loss at all, nor as an error of some other kind."""
    own = replace(release, **{"mu" if release is NOISE else "epsilon": parameter})
    try:
        found = figures(direct(own, own))
    except ConfigError:
        return
    assert found["local"] == "infinity" or found["local"] >= (1.0 if parameter > 1 else 0.0)


@pytest.mark.parametrize(
    "release", [replace(VECTOR, epsilon=800.0), replace(VECTOR, epsilon=100.0)], ids=lambda release: f"{release.epsilon:g}"
)
def test_a_shuffled_message_of_a_large_budget_falls_back_to_the_local_figure(release: PureRelease) -> None:
    found = figures(ledger_of(release))
    assert 0 < found["shuffled_upper_adaptive"] <= found["local"] <= release.epsilon


def test_a_paper_s_claim_stands_first_with_its_source() -> None:
    for release in (
        BinaryRelease("duchi", 1.5, 100, claim=CLAIM, author=OURS),
        PureRelease("harmony", 1.5, 8, "layer", f"Optimal {CLAIM}", author=OURS),
    ):
        first = accounted(direct(release)).rows[0]
        assert (first.status, first.epsilon, first.scope, first.unit) == ("claimed", 1.5, "run", "client")
        assert "LDP-FL" in first.source
    for other in (PureRelease("laplace", 1.5, 100, "weight", author=OURS), GaussianRelease("gaussian", 0.1, author=OURS)):
        assert all(row.status != "claimed" for row in accounted(direct(other)).rows)


# --- claims of what is unprotected ----------------------------------------------------------------------------------------


CLAIMED = UnprotectedRelease(
    "ladp", "the noise depends on the client's weights", claimed_epsilon=0.9, claimed_delta=1e-3, claim="LaDP-FL, Theorem 3", author=OURS
)


@pytest.mark.parametrize("claimed", [0.9, 2])
def test_what_a_paper_claims_of_an_unprotected_round_stands_first_at_its_own_delta(claimed: float) -> None:
    """A budget may be given as a whole number."""
    statement = accounted(ledger_of(replace(CLAIMED, claimed_epsilon=claimed), CLAIMED))
    first = statement.rows[0]
    assert (first.status, first.epsilon, first.delta) == ("claimed", claimed, 1e-3)
    assert (first.unit, first.trust_model, first.scope) == ("client", "local", "round")
    assert "LaDP-FL" in first.source
    assert [row.status for row in statement.rows].count("claimed") == 1
    assert statement.figures()["paper_claim"] == claimed
    assert {name: statement.figures()[name] for name in LOCAL} == dict.fromkeys(LOCAL, "infinity")


@pytest.mark.parametrize(
    ("first", "second"),
    [(CLAIMED, replace(CLAIMED, reason="another")), (BIT, replace(BIT, mechanism="ours")), (VECTOR, replace(VECTOR, mechanism="ours"))],
)
def test_rounds_that_cost_the_same_under_two_names_are_both_accounted(first: Release, second: Release) -> None:
    """Neither is dearer, so neither may push the other out of the line of one round."""
    both, twice = figures(direct(first, second)), figures(direct(first, first))
    assert {name: both[name] for name in ("per_report", *LOCAL)} == {name: twice[name] for name in ("per_report", *LOCAL)}


def test_without_figures_nothing_is_claimed() -> None:
    assert figures(ledger_of(NOTHING))["paper_claim"] is None


def test_what_is_unprotected_is_warned_of_once_a_reason() -> None:
    other = replace(CLAIMED, mechanism="adapldp")
    assert accounted(ledger_of(CLAIMED, NOISE, CLAIMED, other, NOTHING)).warnings == (
        "no guarantee: ladp: the noise depends on the client's weights",
        "no guarantee: adapldp: the noise depends on the client's weights",
        "no guarantee: none: values leave as they are",
    )
    assert not [warning for warning in accounted(ledger_of(NOISE)).warnings if "no guarantee" in warning]


# --- Gaussian rounds of different noise -------------------------------------------------------------------------------------


MUS = (0.1, 0.4, 0.2, 0.3, 0.25)


@pytest.mark.parametrize("joined", range(1, len(MUS) + 1))
@pytest.mark.parametrize("order", [MUS, MUS[::-1], tuple(sorted(MUS))])
def test_a_client_is_charged_for_the_dearest_of_the_gaussian_rounds(joined: int, order: Sequence[float]) -> None:
    """It joined that many, and the ledger does not say which. Epsilon is a client's own: no crowd is large enough to change it."""
    rounds = [GaussianRelease("gaussian", mu, author=OURS) for mu in order]
    dearest = sorted(MUS)[-joined:]
    for cohort, population in ((1, 1000), (100, 1000)):
        found = figures(direct(*rounds, cohort=cohort, population=population, joined=joined))
        assert found["local"] == pytest.approx(gaussian_epsilon(composed_mu(dearest), DELTA), rel=1e-12)
        assert found["local_round"] == pytest.approx(gaussian_epsilon(0.4, DELTA), rel=1e-12)


def test_all_gaussian_rounds_are_charged_where_some_client_must_have_joined_them_all() -> None:
    """A ledger that says less contradicts itself: everyone was in every cohort."""
    rounds = [GaussianRelease("gaussian", mu, author=OURS) for mu in MUS]
    assert figures(direct(*rounds, joined=1))["local"] == pytest.approx(gaussian_epsilon(composed_mu(MUS), DELTA), rel=1e-12)


def test_beside_rounds_of_another_kind_every_gaussian_round_is_charged() -> None:
    """Which of two kinds is dearer is not compared."""
    rounds = [GaussianRelease("gaussian", mu, author=OURS) for mu in MUS]
    few = figures(direct(*rounds, VECTOR, cohort=10, population=1000, joined=1))["local"]
    assert few == figures(direct(*rounds, VECTOR, cohort=10, population=1000, joined=6))["local"]
    assert few > gaussian_epsilon(composed_mu(MUS), DELTA)


def test_bits_of_clients_that_come_one_after_the_other_are_accounted_as_clones() -> None:
    """The count of bits is proved for inputs that no earlier bit of the same crowd decides; here later clients know earlier bits."""
    ledger = Ledger()
    for number in range(1, 5):
        ledger = ledger.charge(RoundEvent(number, BinaryRelease("duchi", 0.5, 1, author=OURS), 250, 1000, 1, sampling="once"))
    found = figures(ledger)
    assert found["shuffled_upper_adaptive"] == composed_clone_epsilon(0.5, 1000, 1, DELTA, clone_probability(0.5))
    assert found["shuffled_lower"] is None


@pytest.mark.parametrize("common", [None, exp(-6.0) * 1.01])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_whose_reports_have_less_in_common_is_the_dearer_one(common: float | None) -> None:
    """Whichever came first: at the same epsilon, what is known of one round says nothing of another."""
    hiding = PureRelease("piecewise", 6.0, 1, "vector", blanket=exp(-3.0), author=OURS)
    other = PureRelease("other", 6.0, 1, "vector", blanket=common, author=OURS)
    alone = account(ledger_of(other, cohort=1000)).find("shuffled", "round")
    assert alone is not None
    for order in ((hiding, other), (other, hiding)) if common is None else ((hiding, other),):
        found = account(ledger_of(*order, cohort=1000)).find("shuffled", "round")
        assert found is not None
        assert found.epsilon == pytest.approx(alone.epsilon)
    assert alone.epsilon > 1.2 * account(ledger_of(hiding, cohort=1000)).find("shuffled", "round").epsilon  # type: ignore[union-attr]


@pytest.mark.slow
def test_vectors_of_whoever_decides_in_secret_are_charged_for_every_round() -> None:
    """Who sees counts alone does not know in how many rounds it joined: by quadrature, of two clients and two rounds of one report each.

    The other client is at -a, the one in question at a or -a, and each report is equally likely to be of either.
    """
    release = replace(NOISE, mu=gaussian_mu(8.0, DELTA), alike=True)
    ledger = Ledger(tuple(RoundEvent(number, release, 1, 2, 1, "secret", 0.5) for number in (1, 2)))
    row = account(ledger, DELTA).find("shuffled", "run")
    assert row is not None
    place = np.linspace(-12.0, 12.0, 2401)
    far, near = (np.exp(-((place - end) ** 2) / 2) / sqrt(2 * pi) * 0.01 for end in (release.mu / 2, -release.mu / 2))
    one = (far + near) / 2
    first, second = np.outer(one, one), np.outer(near, near)
    assert np.maximum(first - exp(8.0) * second, 0.0).sum() > 20 * DELTA  # what was charged of the one round that it joined
    assert np.maximum(first - exp(row.epsilon) * second, 0.0).sum() < DELTA
    assert account(Ledger(tuple(replace(event, channel="direct") for event in ledger.events)), DELTA).figures()["local"] == pytest.approx(
        8.0
    )


# --- what is attained -------------------------------------------------------------------------------------------------


def test_histograms_of_columns_attain_nothing() -> None:
    """A record is in one cell of each column: no two are as far apart as vectors of that length can be."""
    summed = replace(NOISE, unit="record", alike=False)
    rounds = [RoundEvent(number, summed, 4, 4, number, channel="secure-sum", histograms=number <= 4) for number in range(1, 10)]
    found = account(Ledger(tuple(rounds)), DELTA).figures()
    trained = account(Ledger(tuple(replace(event, histograms=False) for event in rounds)), DELTA).figures()
    assert found["shuffled_lower"] is None
    assert trained["shuffled_lower"] is not None
    assert found["shuffled_upper"] == trained["shuffled_upper"]
    text = Ledger(tuple(rounds)).to_json()
    assert text.count("histograms") == 4
    assert [event.histograms for event in Ledger.from_json(text).events] == [event.histograms for event in rounds]


@pytest.mark.thorough
def test_nothing_is_attained_where_no_client_is_known_to_have_sent_what_is_charged() -> None:
    """In a secret order nobody knows the client's round; and of rounds that differ it joined fewer than are charged."""
    once = Ledger(tuple(RoundEvent(number, replace(BITS, units=2), 1, 20, 1, "once") for number in range(1, 21)))
    sizes = Ledger(tuple(RoundEvent(number, BIT, 30 + number % 2, 100, min(number, 2), "visible") for number in range(1, 5)))
    noise = [replace(NOISE, alike=True, mu=0.3 + number / 100) for number in (1, 2, 3)]
    vectors = Ledger(tuple(RoundEvent(number, each, 30 + number % 2, 100, 1, "visible") for number, each in enumerate(noise, start=1)))
    asked = Ledger(tuple(RoundEvent(number, BIT, 15, 30, number, "visible") for number in range(1, 5)))  # in four rounds; half answered
    for ledger in (once, sizes, vectors, asked):
        assert figures(ledger)["shuffled_upper_adaptive"] is not None
        assert figures(ledger)["shuffled_lower"] is None
    joined = Ledger(tuple(RoundEvent(number, BIT, 30, 30, number) for number in range(1, 5)))
    assert figures(joined)["shuffled_lower"] is not None
    assert account(joined, colluding=5).figures()["shuffled_lower"] is not None
    pairs = Ledger(tuple(RoundEvent(number, BIT, 2, 3, min(number, 2), "visible") for number in (1, 2, 3)))  # one colludes: not in each
    assert figures(pairs)["shuffled_lower"] is not None
    assert account(pairs, colluding=1).figures()["shuffled_lower"] is None
    parts = Ledger((RoundEvent(1, BIT, 15, 30, 1, "visible"),))
    assert account_together([joined, joined]).figures()["shuffled_lower"] is not None
    assert account(parts).figures()["shuffled_lower"] is not None
    assert (
        account_together([joined, parts]).figures()["shuffled_lower"] is None
    )  # whoever sent most of the one, perhaps sent none of the other


def guessed(statement: Statement) -> float:
    """Return the probability that the sentence says."""
    found = re.search(r"is right with probability ([0-9.]+) % at most", statement.verdict)
    assert found is not None, statement.verdict
    return float(found[1]) / 100


def test_a_guess_against_gaussian_noise_is_right_as_often_as_mu_says() -> None:
    """Phi(mu / 2), which is what the best test attains: not e^epsilon / (1 + e^epsilon), which is far above it."""
    record = GaussianRelease("dp-sgd", 0.3, unit="record")
    for channel, mu in (("direct", 0.9), ("secure-sum", 0.09)):
        statement = account(ledger_of(*[record] * 9, channel=channel))
        assert 0 <= guessed(statement) - ndtr(mu / 2) <= 1.1e-5
        assert "by the noise of all releases" in statement.verdict
    best = account(ledger_of(*[record] * 9, channel="direct")).best
    assert best is not None
    assert expit(best.epsilon) > 0.95


@pytest.mark.parametrize(("rounds", "epsilon"), [(1, 1.0), (3, 0.5)])
def test_a_guess_against_pure_reports_is_right_as_often_as_the_likelihood_ratio_s_sign(rounds: int, epsilon: float) -> None:
    """By enumeration of all answers of binary randomised response, the worst case; one of epsilon 1 is right in e / (1 + e)."""
    answers = np.array(list(product((0, 1), repeat=rounds)))
    chances = [np.where(answers == truth, expit(epsilon), expit(-epsilon)).prod(axis=1) for truth in (0, 1)]
    found = account(ledger_of(*[PureRelease("other", epsilon, 1, "vector")] * rounds, channel="direct"))
    assert 0 <= guessed(found) - np.maximum(*chances).sum() / 2 <= 1.1e-5


@pytest.mark.thorough
def test_a_guess_is_bounded_from_above_where_records_take_part_by_chance_or_kinds_are_mixed() -> None:
    rate, mu = 0.05, 1.0
    sampled = guessed(account(ledger_of(GaussianRelease("dp-sgd", mu, unit="record", rate=rate), channel="direct")))
    attained = (1 + rate * (2 * ndtr(mu / 2) - 1)) / 2  # the record moves a batch that has it, and no other
    assert attained <= sampled <= (1 + 1.2 * (2 * attained - 1)) / 2
    mixed = guessed(account(ledger_of(NOISE, NOISE, PureRelease("other", 0.2, 1, "vector"), channel="direct")))
    assert ndtr(0.3 * sqrt(2) / 2) < mixed < 0.75


@pytest.mark.thorough
def test_among_many_kinds_of_rounds_the_costliest_is_bounded_by_few_that_dominate_them() -> None:
    """No round dominates another: each has a larger epsilon and fewer units. To account each would take minutes where clients are many."""

    def of_rounds(ledger: Ledger) -> dict[tuple[str, bool], float]:
        rows = [row for row in accounted(ledger).rows if row.scope == "round" and row.unit == "client" and row.status == "proved"]
        return {(row.trust_model, row.delta == 0): row.epsilon for row in rows}

    releases = [BinaryRelease("x", 0.5 + 0.04 * place, 60 - 4 * place, "weight", author=OURS) for place in range(12)]
    together, alone = of_rounds(ledger_of(*releases)), [of_rounds(ledger_of(release)) for release in releases]
    assert together.keys() == alone[0].keys()
    for kind, epsilon in together.items():
        assert max(each[kind] for each in alone) <= epsilon < 1.15 * max(each[kind] for each in alone)
