"""From a config's ``[mechanism]`` to the mechanism, and one tiny training with each: encode, shuffle, aggregate, account."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ldpfl import ConfigError, LayerRanges, mechanisms
from ldpfl.data import load
from ldpfl.experiments.build import build, mechanism_of
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.mechanisms import DuchiVector, Harmony, Hybrid, Laplace, Mechanism, Piecewise, PrivUnitG, guarantee_of, payload_bits
from ldpfl.privacy import BinaryRelease, PureRelease
from ldpfl.privacy.accounting import account
from ldpfl.simulation import simulate

RANGES = LayerRanges(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), (80, 10))

SETTINGS: dict[str, tuple[list[str], Mechanism]] = {
    "harmony, layer": (["name=harmony"], Harmony(2.0)),
    "harmony, group": (["name=harmony", "group=7"], Harmony(2.0, 7)),
    "laplace": (["name=laplace"], Laplace(2.0)),
    "piecewise, some": (["name=piecewise", "coordinates=5"], Piecewise(2.0, 5)),
    "hybrid, auto": (["name=hybrid", "coordinates=auto"], Hybrid(2.0, "auto")),
    "duchi-vector": (["name=duchi-vector"], DuchiVector(2.0)),
    "privunit-g": (["name=privunit-g", "norm=0.5", "magnitude_share=0.25"], PrivUnitG(2.0, 0.5, 0.25)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_make_the_mechanism_and_it_trains(name: str, tiny_data: Path) -> None:
    settings, expected = SETTINGS[name]
    overrides = [f"mechanism.{setting}" for setting in ["epsilon=2.0", "perturbed=update", *settings]]
    base = ["model.name=logistic-regression", "clients.count=5", "training.epochs=1", "training.rounds=2", "shuffling.channel=direct"]
    config = parse_config("", [*base, *overrides], origin="test")

    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    assert mechanism_of(config, start.state.ranges) == federation.mechanism == expected
    *_, last = simulate(federation, start, 2)
    assert bool(torch.isfinite(last.state.weights).all())
    assert not torch.equal(last.state.weights, start.state.weights)
    bits = payload_bits(expected, start.state.ranges)
    assert last.history[-1].uplink_bytes_per_client == -(-bits // 8)

    statement = account(last.ledger)
    guarantee = guarantee_of(expected, start.state.ranges)
    local = statement.find("local", "run", pure=True)
    assert local is not None
    assert local.epsilon == pytest.approx(2 * guarantee.epsilon * guarantee.units_per_round, rel=1e-9)


def test_every_registered_mechanism_can_be_configured_planned_and_named() -> None:
    for name in mechanisms.names(alone=True):
        config = RunConfig(mechanism=mechanisms.read_settings({"name": name, "perturbed": "update"}))
        assert mechanism_of(config, RANGES).name == name
        assert mechanisms.with_defaults(name, 1.0).name == name


@pytest.mark.parametrize("name", SETTINGS)
def test_a_clients_budget_is_what_the_ledger_says_a_round_costs(name: str, tiny_data: Path) -> None:
    settings, _ = SETTINGS[name]
    overrides = [f"mechanism.{setting}" for setting in ["epsilon=2.5", "budget=client", "perturbed=update", *settings]]
    base = ["model.name=logistic-regression", "clients.count=5", "training.epochs=1", "training.rounds=2", "shuffling.channel=direct"]
    config = parse_config("", [*base, *overrides], origin="test")
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    *_, last = simulate(federation, start, 2)
    figures = account(last.ledger).figures()
    assert figures["local_pure_round"] == pytest.approx(2.5, rel=1e-12)
    assert figures["local_pure"] == pytest.approx(5.0, rel=1e-12)
    assert mechanism_of(config, start.state.ranges) == federation.mechanism


@pytest.mark.parametrize(
    ("settings", "units"),
    [
        ({"name": "duchi"}, 90),
        ({"name": "harmony"}, 2),
        ({"name": "harmony", "group": 7}, 14),
        ({"name": "laplace"}, 90),
        ({"name": "hybrid", "coordinates": 4}, 1),
        ({"name": "duchi-vector"}, 1),
        ({"name": "privunit-g"}, 1),
    ],
)
def test_a_clients_budget_is_divided_evenly_over_its_units(settings: dict[str, object], units: int) -> None:
    config = RunConfig(mechanism=mechanisms.read_settings({**settings, "epsilon": 18.0, "budget": "client"}))
    release = mechanism_of(config, RANGES).release(RANGES)
    assert isinstance(release, BinaryRelease | PureRelease)
    assert (release.units, release.epsilon) == (units, 18.0 / units)


def test_a_clients_budget_too_small_to_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        mechanism_of(RunConfig(mechanism=mechanisms.read_settings({"epsilon": 1e-8, "budget": "client"})), RANGES)


def test_a_group_larger_than_every_layer_is_refused_before_a_run(tiny_data: Path) -> None:
    settings = ["mechanism.name=harmony", "mechanism.group=100000", "model.name=logistic-regression", "clients.count=5"]
    with pytest.raises(ConfigError, match="group"):
        build(parse_config("", settings, origin="test"), load("mnist", tiny_data), torch.device("cpu"))
