"""Clients that decide for themselves: how often, that it is theirs alone, what is recorded, and rounds that nobody joins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from ldpfl import ConfigError
from ldpfl.data import load
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import account
from ldpfl.server import Checkpoint, round_event, self_sampled_cohort
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.federation import Participation

CPU = torch.device("cpu")


def federation(data: Path, *overrides: str) -> tuple[RunConfig, Federation, Checkpoint]:
    config = parse_config(
        "", ["model.name=logistic-regression", "clients.count=6", "training.epochs=1", "training.rounds=3", *overrides], origin="test"
    )
    return (config, *build(config, load("mnist", data), CPU))


@pytest.mark.parametrize(("lowest", "rate"), [(0.5, 0.75), (0.0, 0.5), (1.0, 1.0)])
@pytest.mark.thorough_for("0.5-0.75")
def test_clients_join_as_often_as_stated(lowest: float, rate: float) -> None:
    joined = sum(self_sampled_cohort(3, number, 500, lowest).size for number in range(1, 41))
    # 20,000 decisions; a true rate fails at 1e-6.
    assert binomtest(joined, 20_000, rate).pvalue > 1e-6


def test_what_a_client_decides_depends_on_nobody_else() -> None:
    few, many = self_sampled_cohort(3, 5, 10, 0.5), self_sampled_cohort(3, 5, 1000, 0.5)
    assert few.tolist() == [client for client in many.tolist() if client < 10]
    assert few.tolist() != self_sampled_cohort(3, 6, 10, 0.5).tolist() or few.tolist() != self_sampled_cohort(4, 5, 10, 0.5).tolist()


@pytest.mark.slow
def test_decisions_of_two_rounds_are_independent() -> None:
    first, second = (np.isin(np.arange(8_000), self_sampled_cohort(1, number, 8_000, 0.5)) for number in (1, 2))
    # Both join with 0.5625; five standard deviations.
    assert abs((first & second).mean() - 0.5625) < 5 * 0.5 / np.sqrt(8_000)


def test_a_round_is_recorded_as_secret_only_behind_a_shuffler(tiny_data: Path) -> None:
    _, both, start = federation(tiny_data, "clients.self_sampling=restrictive")
    events = list(simulate(both, start, 2))[-1].ledger.events
    assert {(event.sampling, event.rate, event.population) for event in events} == {("secret", 0.75, 6)}
    assert [event.cohort for event in events] == [self_sampled_cohort(0, number, 6, 0.5).size for number in (1, 2)]
    seen = round_event(1, events[0].release, 3, np.array([1, 1, 1, 0]), "direct", 0.5)
    assert (seen.sampling, seen.rate) == ("visible", 1.0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_that_nobody_joins_changes_nothing_and_is_charged_like_others(tiny_data: Path) -> None:
    _, everyone, start = federation(tiny_data)
    lonely = replace(everyone, participation=Participation(1.0, 0.0), samples=everyone.samples[:1])
    rounds = list(simulate(lonely, start, 12))
    joined = [self_sampled_cohort(0, number, 1, 0.0).size for number in range(1, 13)]
    assert set(joined) == {0, 1}  # this seed has both
    assert [event.cohort for event in rounds[-1].ledger.events] == joined
    events = rounds[-1].ledger.events
    # Left out, as earlier versions did, they count all the same: that nobody joins is an outcome too.
    left_out = Ledger(tuple(event for event in events if event.cohort))
    charged = Ledger(tuple(replace(event, cohort=1, joined=event.round) for event in events[: left_out.events[-1].round]))
    assert account(left_out).figures()["shuffled_upper"] == account(charged).figures()["shuffled_upper"]
    before = start
    for size, after in zip(joined, rounds, strict=True):
        same = torch.equal(before.state.weights, after.state.weights)
        assert same == (size == 0)
        assert after.state.round == before.state.round + 1
        assert after.history[-1].clients == size
        before = after


@pytest.mark.slow
def test_idle_rounds_alone_are_charged(tiny_data: Path) -> None:
    _, everyone, start = federation(tiny_data)
    idle = next(seed for seed in range(100) if self_sampled_cohort(seed, 1, 1, 0.0).size == 0)
    lonely = replace(everyone, participation=Participation(1.0, 0.0), samples=everyone.samples[:1], coin_seed=idle)
    (only,) = simulate(lonely, start, 1)
    assert [(event.round, event.cohort) for event in only.ledger.events] == [(1, 0)]
    assert account(only.ledger).figures()["local"] != 0


def test_the_forecast_is_the_ledger_of_the_run(tiny_data: Path) -> None:
    config, both, start = federation(tiny_data, "clients.self_sampling=plain")
    planned, real = planned_ledger(config).events, list(simulate(both, start, 3))[-1].ledger.events
    units = real[0].release.units  # the test's images are smaller than the data set of that name
    assert [replace(event, release=replace(event.release, units=units)) for event in planned] == list(real)


def test_clients_and_server_do_not_both_decide(tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"self_sampling.*fraction"):
        federation(tiny_data, "clients.self_sampling=plain", "clients.fraction=0.5")


def test_a_round_that_nobody_joins_where_that_is_seen_costs_nothing_and_can_be_read_again(tiny_data: Path) -> None:
    _, everyone, start = federation(tiny_data)
    lonely = replace(everyone, participation=Participation(1.0, 0.0, channel="random-delay"), samples=everyone.samples[:1])
    *_, last = simulate(lonely, start, 12)
    joined = [self_sampled_cohort(0, number, 1, 0.0).size for number in range(1, 13)]
    assert [(event.cohort, event.sampling == "secret") for event in last.ledger.events] == [(size, False) for size in joined]
    assert Ledger.from_json(last.ledger.to_json()) == last.ledger
    only = Ledger(tuple(event for event in last.ledger.events if event.cohort))
    assert account(last.ledger).figures() == account(only).figures()
