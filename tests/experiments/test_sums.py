"""Runs whose server learns sums alone: what their configs say, and what it does to the noise, the ledger and what is sent."""

from __future__ import annotations

from math import sqrt

import pytest
import torch

from ldpfl import ConfigError
from ldpfl.data import Dataset
from ldpfl.experiments import RunConfig, load_recipe, recipe_names
from ldpfl.experiments.build import build, mechanism_of
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.mechanisms import payload_bits
from ldpfl.mechanisms.lattice import LatticeMechanism
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.accountants.gaussian import gaussian_epsilon
from ldpfl.privacy.accounting import account
from ldpfl.simulation import simulate

SUMS = ["model.name=linear", "clients.count=12", "training.rounds=4", "shuffling.channel=secure-sum"]
CLIENTS = [*SUMS, "mechanism.name=dp-fedavg", "mechanism.clip_norm=0.1", "mechanism.noise_multiplier=5.0"]
RECORDS = [*SUMS, "mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.noise_multiplier=5.0"]
RANGES = LayerRanges(0.0, 1.0, (2000,))


def config_of(*overrides: str) -> RunConfig:
    return parse_config("", overrides, origin="test")


def lattice_of(*overrides: str, sizes: tuple[int, ...] = (1,)) -> tuple[int, int]:
    mechanism = mechanism_of(config_of(*overrides), RANGES, sizes)
    assert isinstance(mechanism, LatticeMechanism)
    assert payload_bits(mechanism, RANGES) == 2000 * mechanism.bits
    return mechanism.steps, mechanism.bits


@pytest.mark.parametrize("overrides", [CLIENTS, [*CLIENTS, "mechanism.perturbed=gradient", "training.momentum=0.0"], RECORDS])
def test_a_run_sends_32_bits_a_weight_and_counts_on_honest_clients_alone(overrides: list[str], tiny_task: Dataset) -> None:
    federation, start = build(config_of(*overrides, "shuffling.colluding=3"), tiny_task, torch.device("cpu"))
    *_, last = simulate(federation, start, 4)
    assert not torch.equal(last.state.weights, start.state.weights)
    assert {metrics.uplink_bytes_per_client for metrics in last.history} == {4 * start.state.weights.numel()}
    assert [(event.cohort, event.population, event.colluding) for event in last.ledger.events] == [(12, 12, 3)] * 4
    row = account(last.ledger).find("summed", "run")
    assert row is not None
    assert row.epsilon == pytest.approx(gaussian_epsilon(2 / 5 * sqrt(4 / 9), 1e-5), rel=1e-6)
    assert any("the other 8 clients are honest" in assumption for assumption in row.assumptions)


def test_who_counts_on_fewer_clients_adds_more_noise() -> None:
    plain, careful = (
        resolve_settings(config_of(*CLIENTS[:-1], "data.name=mnist-5k", "privacy.target_epsilon=2", *more))
        for more in ((), ("shuffling.colluding=9",))
    )
    noise = [config.mechanism.noise_multiplier for config in (plain, careful)]  # type: ignore[attr-defined]
    assert noise[1] == pytest.approx(noise[0] * sqrt(12 / 3), rel=5e-3)
    for config in (plain, careful):
        best = account(planned_ledger(config)).best
        assert best is not None
        assert best.trust_model == "summed"
        assert 1.98 < best.epsilon <= 2


def test_the_lattice_follows_from_how_many_are_added_up() -> None:
    assert lattice_of(*CLIENTS) == (2**20, 32)
    assert lattice_of(*CLIENTS, "shuffling.max_clients=5000") == (2**17, 32)
    assert lattice_of(*CLIENTS, "shuffling.max_clients=10_000_000") == (2**20, 64)
    assert lattice_of(*RECORDS, sizes=(600, 1000)) == (2**17, 32)  # 9,600 records
    assert lattice_of(*RECORDS, "mechanism.records=5_000") == (2**15, 32)


def test_where_nothing_is_summed_floats_leave() -> None:
    mechanism = mechanism_of(config_of(*CLIENTS, "shuffling.channel=direct"), RANGES)
    assert isinstance(mechanism, LatticeMechanism)
    assert (mechanism.steps, payload_bits(mechanism, RANGES)) == (2**20, 32 * 2000)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["shuffling.max_clients=11"], r"shuffling\.max_clients is 11, but up to 12 clients take part: set it to 12"),
        (["shuffling.colluding=12"], "12 of 12 clients, but at least one client has to be honest"),
        (["shuffling.colluding=1", "shuffling.channel=direct"], "for the channel 'secure-sum'"),
        (["shuffling.max_clients=20", "shuffling.channel=ideal-shuffler"], "for the channel 'secure-sum'"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        mechanism_of(config_of(*CLIENTS, *overrides), RANGES)


@pytest.mark.thorough_except("sum/least-squares-cifar10", "sum/least-squares-mnist")
@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("sum/")])
def test_recipes_of_sums_keep_epsilon_1_with_32_bits_a_weight(name: str) -> None:
    config = resolve_settings(load_recipe(name))
    best = account(planned_ledger(config)).best
    assert best is not None
    assert (best.trust_model, best.unit) == ("summed", "client" if "clients" in name else "record")
    assert 0.99 < best.epsilon <= 1
    mechanism = mechanism_of(config, RANGES, (600,) if "records" in name else (1,))
    assert isinstance(mechanism, LatticeMechanism)
    assert mechanism.bits == 32
