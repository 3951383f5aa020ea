"""The ledger that is forecast from a config is the one that its run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import TINY_TOML
from ldpfl.data import load
from ldpfl.errors import ConfigError
from ldpfl.experiments import recipe_names
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.recipes import load_recipe
from ldpfl.experiments.shipped import OWN
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, UnprotectedRelease
from ldpfl.simulation import simulate


@pytest.mark.thorough_for(
    "shuffling.channel=random-delay mechanism.epsilon=0.5 data.evaluate_on=holdout",
    "model.name=two-layer-cnn training.rounds=1 mechanism.perturbed=weights ranges.radius=initial",
)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["clients.fraction=0.3", "training.rounds=5"],
        ["clients.fraction=0.3", "training.rounds=5", "seed=4"],
        ["mechanism.name=none"],
        ["shuffling.channel=random-delay", "mechanism.epsilon=0.5", "data.evaluate_on=holdout"],
        ["model.name=two-layer-cnn", "training.rounds=1", "mechanism.perturbed=weights", "ranges.radius=initial"],
    ],
    ids=" ".join,
)
def test_the_forecast_is_the_ledger_that_the_run_leaves(overrides: list[str], tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny images are 20x20, those of MNIST 28x28: the forecast is told so."""
    monkeypatch.setattr("ldpfl.experiments.planned_ledger.describe_data", lambda config, caller_objects: Description((1, 20, 20), 10))
    config = parse_config(TINY_TOML, overrides, origin="test")
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    *_, last = simulate(federation, start, config.training.rounds)
    assert planned_ledger(config) == last.ledger
    assert {event.release.units for event in last.ledger.events} == {federation.task.layout.dimension}


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != OWN])
@pytest.mark.thorough_for("ladp-fl/paper")
def test_every_recipe_is_forecast(name: str) -> None:
    config = load_recipe(name, [])
    events = planned_ledger(config).events
    assert [event.round for event in events] == list(range(1, config.training.rounds + 1))
    release = events[0].release
    if isinstance(release, UnprotectedRelease):  # LaDP-FL as published
        assert (release.claimed_epsilon, release.claimed_delta) == (
            config.mechanism.model_dump()["epsilon"],
            config.mechanism.model_dump()["delta"],
        )
    elif isinstance(release, GaussianRelease):  # of one record
        assert release.mu == pytest.approx(2 / config.mechanism.model_dump()["noise_multiplier"])
    else:
        assert isinstance(release, BinaryRelease | PureRelease)
        assert config.mechanism.epsilon_and_budget == (release.epsilon, "unit")


def test_the_paper_s_mnist_setting_has_its_number_of_weights() -> None:
    releases = [event.release for event in planned_ledger(load_recipe("ldp-fl/mnist", [])).events]
    assert [(release.mechanism, release.units) for release in releases] == [("duchi", 21_840)] * 10
    unprotected = {event.release for event in planned_ledger(load_recipe("ldp-fl/mnist", ["mechanism.name=none"])).events}
    assert unprotected == {UnprotectedRelease("none", "values leave as they are", 21_840, "weight", author="ldpfl")}


def test_who_joins_is_counted() -> None:
    """Nine clients, three a round: after three rounds someone has joined at least once, and nobody more than three times."""
    config = parse_config(TINY_TOML, ["clients.count=9", "clients.fraction=0.3", "training.rounds=12"], origin="test")
    joined = [event.joined for event in planned_ledger(config).events]
    assert joined == sorted(joined)
    assert joined[0] == 1
    assert 4 <= joined[-1] < 12


@pytest.mark.parametrize(("override", "named"), [("data.name=minst", "mnist"), ("model.name=two-layer-cn", "two-layer-cnn")])
def test_what_is_unknown_is_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned_ledger(parse_config(TINY_TOML, [override], origin="test"))


def test_a_crowd_that_nobody_has_is_not_forecast() -> None:
    """An app's settings may name any number: to find that out must not take the machine's memory."""
    with pytest.raises(ConfigError, match="more than the 200,000,000 that can be planned"):
        planned_ledger(parse_config("", ["clients.count=1000000000"], origin="test"))
