"""Plans of the regimes whose guarantee covers all that is sent."""

from __future__ import annotations

import json
from functools import cache
from math import sqrt
from typing import Any

import pytest

import ldpfl
from conftest import CommandLine
from ldpfl import ConfigError
from ldpfl.experiments.planning.regimes import RegimePlan
from ldpfl.privacy.accountants.gaussian import gaussian_mu

pytestmark = pytest.mark.xdist_group("regimes")  # which are planned once a process

SIZE: dict[str, dict[str, Any]] = {
    "shuffled": {"clients": 400, "weights": 25, "rounds": 1},
    "local": {"clients": 5000, "weights": 100, "rounds": 10},
    "records": {"clients": 100, "weights": 100, "rounds": 15, "records": 600},
    "records-summed": {"clients": 100, "weights": 100, "rounds": 15, "records": 600},
    "clients-summed": {"clients": 1000, "weights": 100, "rounds": 15},
}


@cache
def planned(regime: str, target: float = 1.0, **more: Any) -> RegimePlan:
    return ldpfl.plan_regime(regime, target, **{**SIZE[regime], **more})


@pytest.mark.parametrize("regime", SIZE)
@pytest.mark.slow
@pytest.mark.thorough_for("shuffled", "local")
def test_the_target_is_kept_by_what_the_statement_proves(regime: str) -> None:
    plan = planned(regime)
    best = plan.statement.best
    assert best is not None
    assert 0.98 < best.epsilon <= 1.0
    assert best.unit == ("record" if regime.startswith("records") else "client")
    assert plan.reports == (1 if regime == "local" else plan.rounds)


@pytest.mark.slow
@pytest.mark.thorough
def test_noise_is_as_many_times_a_trusted_servers_as_theory_says() -> None:
    ratio = {regime: plan.noise / plan.trusted_noise for regime in SIZE for plan in [planned(regime)]}
    assert ratio["records"] == pytest.approx(10, rel=0.01)  # the root of the number of clients
    assert ratio["records-summed"] == pytest.approx(1, rel=0.01)
    assert ratio["clients-summed"] == pytest.approx(1, rel=0.01)
    assert 1.1 < ratio["shuffled"] < 1.5  # sqrt(pi / 2), the rounding up of 25 coordinates to 32, and what bits cost
    assert ratio["local"] > 5


def test_records_need_the_noise_that_the_curve_of_the_gaussian_says() -> None:
    plan = planned("records", 2.0)
    assert plan.value == pytest.approx(2 * sqrt(15) / gaussian_mu(2.0, 1e-5), rel=2e-3)
    assert plan.noise == pytest.approx(plan.value / 600 / 10 * 10, rel=1e-6)  # by the root of 100 clients, times that of 100 weights
    small = planned("records", 2.0, records=plan.wanted)
    assert small.noise <= 0.1


def test_whole_clients_need_the_noise_that_the_curve_of_the_gaussian_says() -> None:
    plan = planned("clients-summed", 2.0)
    share = 2 * sqrt(15) / gaussian_mu(2.0, 1e-5) / sqrt(1000)
    assert (plan.mechanism, plan.parameter, plan.bytes_per_client) == ("dp-fedavg", "noise_multiplier", 400)
    assert plan.value == pytest.approx(share, rel=2e-3)
    assert plan.noise == pytest.approx(share / sqrt(1000) * 10, rel=2e-3)
    assert planned("clients-summed", 2.0, clients=plan.wanted).noise == pytest.approx(0.1, rel=0.01)
    assert planned("records-summed").bytes_per_client == 400


@pytest.mark.slow
@pytest.mark.thorough
def test_drawing_coordinates_and_linking_them_saves_bytes_and_records_for_noise() -> None:
    plain, drawn, linked = (planned("shuffled", **more) for more in ({}, {"group": 8}, {"linked": 2}))
    assert (plain.bytes_per_client, plain.relay_records) == (4, 32)
    assert (drawn.bytes_per_client, drawn.relay_records) == (2, 4)
    assert (linked.bytes_per_client, linked.relay_records) == (4, 16)
    assert plain.noise < min(drawn.noise, linked.noise)
    assert all(plan.statement.best is not None and 0.98 < plan.statement.best.epsilon <= 1.0 for plan in (plain, drawn, linked))


@pytest.mark.slow
@pytest.mark.thorough
def test_colluding_clients_cost_noise_where_others_hide() -> None:
    for regime in ("shuffled", "records-summed", "clients-summed"):
        assert planned(regime, colluding=50).noise > planned(regime).noise


@pytest.mark.parametrize(
    ("regime", "changes", "why"),
    [
        ("recods", {}, "known: shuffled"),
        ("records", {"target": 0.0}, "positive"),
        ("records", {"clients": 0}, "1 or more"),
        ("local", {"clients": 5}, "once each"),
        ("records", {"delta": 0.0}, "delta"),
        ("records", {"group": 4}, "to the regime shuffled, not to records"),
        ("local", {"linked": 2}, "to the regime shuffled, not to local"),
        ("shuffled", {"group": 0}, "1 or more"),
        ("shuffled", {"group": 64}, "group is 64"),
    ],
)
def test_what_cannot_be_planned_is_refused(regime: str, changes: dict[str, Any], why: str) -> None:
    figures = {"target": 1.0, **SIZE.get(regime, SIZE["records"]), **changes}
    with pytest.raises(ConfigError, match=why):
        ldpfl.plan_regime(regime, **figures)


def test_the_command_prints_the_plan_and_what_it_proves(ldpfl: CommandLine) -> None:
    arguments = ["--regime", "records", "--target", "1", "--clients", "100", "--records", "600", "--weights", "2000", "--rounds", "15"]
    shown = ldpfl("plan", *arguments).out
    assert "noise_multiplier 28." in shown
    assert "10 times a" in shown
    assert "one record, whole run" in shown
    figures = json.loads(ldpfl("plan", *arguments, "--json").out)
    assert figures["regime"] == "records"
    assert figures["protected"] == "record"
    assert "--clients" in ldpfl.refused("plan", "--regime", "records", "--target", "1")


def test_a_target_out_of_reach_is_told_with_what_is_reached() -> None:
    with pytest.raises(ConfigError, match=r"epsilon 1e-09 is out of reach of the regime records: it reaches about 0\.0\d+ to .* here"):
        ldpfl.plan_regime("records", 1e-9, clients=100, records=1, weights=100, rounds=10)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("regime", "more"),
    [
        ("shuffled", {"clients": 50, "weights": 30, "rounds": 1, "group": 30}),
        ("shuffled", {"clients": 500, "weights": 2000, "rounds": 1, "group": 500, "delta": 1e-4}),
        ("local", {"clients": 5000, "weights": 200, "rounds": 10}),
        ("clients-summed", {"clients": 300, "weights": 200, "rounds": 10, "colluding": 100}),
    ],
)
def test_with_as_many_clients_as_the_plan_says_the_noise_is_small(regime: str, more: dict[str, Any]) -> None:
    """Noise falls neither as 1 / n nor as 1 / sqrt(n) where less noise a report costs more and more epsilon."""
    wanted = ldpfl.plan_regime(regime, 2.0, **more).wanted
    assert ldpfl.plan_regime(regime, 2.0, **{**more, "clients": wanted}).noise == pytest.approx(0.1, rel=0.1)
