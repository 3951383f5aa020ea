"""A target is kept by what the ledger proves, with hardly more noise than it takes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch

from ldpfl import ConfigError
from ldpfl.data import Dataset
from ldpfl.experiments.build import build
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.privacy.accounting import account, run_epsilon
from ldpfl.server import once_cohort
from ldpfl.simulation import simulate

BASE = ["data.name=mnist-5k", "model.name=linear", "training.rounds=3", "clients.count=2000"]
SIGNS = ["mechanism.name=rotated-sign", "mechanism.perturbed=gradient", "data.features=strokes", "data.feature_options.directions=1"]
CASES = {
    "records": ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "shuffling.channel=direct", "clients.count=10"],
    "records, summed": ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "shuffling.channel=secure-sum", "clients.count=10"],
    "clients, summed": ["mechanism.name=dp-fedavg", "shuffling.channel=secure-sum", "clients.count=50", "shuffling.colluding=14"],
    "signs": [*SIGNS, "clients.count=50", "training.rounds=1"],
    "once": ["mechanism.name=privunit-g", "clients.once=true"],
    "a part of the clients": ["mechanism.name=full-dp", "mechanism.perturbed=update", "clients.fraction=0.5", "shuffling.channel=direct"],
}


def config_of(case: str, *more: str) -> RunConfig:
    return parse_config("", [*BASE, *CASES[case], *more], origin="test")


@pytest.mark.parametrize(
    ("case", "target"), [(case, target) for case in CASES for target in (0.5, 4.0) if (case, target) != ("signs", 4.0)]
)
@pytest.mark.slow
@pytest.mark.thorough_except("records-4.0", "clients, summed-4.0")
def test_the_target_is_kept_and_not_much_is_given_away(case: str, target: float) -> None:
    config = resolve_settings(config_of(case, f"privacy.target_epsilon={target}"))
    ledger = planned_ledger(config)
    best = account(ledger).best
    assert best is not None
    assert best.epsilon <= target
    assert run_epsilon(ledger) == pytest.approx(best.epsilon, rel=1e-9)
    # Clones fall steeply where they begin to hide; all else is within a hundredth.
    assert best.epsilon > target * (0.7 if case == "once" else 0.99)
    assert resolve_settings(config) == config


@pytest.mark.thorough_except("evaluation.every=1")
@pytest.mark.parametrize("evaluations", ["evaluation.epsilon=0.1", "evaluation.every=1"])
def test_noise_that_differs_by_round_is_calibrated_for_the_rounds_of_training(evaluations: str) -> None:
    """Evaluations between rounds are numbered with them, and shift no round's noise."""
    settings = ["mechanism.name=time-varying", "mechanism.perturbed=update", "shuffling.channel=direct", "clients.count=50"]
    evaluated = [*settings, "evaluation.epsilon=0.1", evaluations, "evaluation.share=0.2"]
    without, with_evaluations = (
        resolve_settings(parse_config("", [*BASE, *more, "privacy.target_epsilon=4.0"], origin="test")) for more in (settings, evaluated)
    )
    assert account(planned_ledger(with_evaluations)).best.epsilon <= 4.0  # type: ignore[union-attr]
    assert with_evaluations.mechanism.name == without.mechanism.name == "time-varying"


def test_without_a_target_a_config_stays_as_it_is() -> None:
    config = config_of("records")
    assert resolve_settings(config) is config


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["mechanism.name=none"], "no noise setting that"),
        (["mechanism.name=duchi", "clients.count=10", "shuffling.channel=direct"], "more clients or fewer rounds"),
    ],
)
@pytest.mark.slow
def test_what_cannot_keep_a_target_says_so(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_settings(parse_config("", [*BASE, *overrides, "privacy.target_epsilon=1e-9"], origin="test"))


def test_everybody_takes_part_once_in_an_order_that_the_seed_decides() -> None:
    rounds = [once_cohort(3, number, 103, 10) for number in range(1, 11)]
    assert sorted(torch.tensor([client for cohort in rounds for client in cohort.tolist()]).tolist()) == list(range(103))
    assert {cohort.size for cohort in rounds} == {10, 11}
    assert rounds[0].tolist() != once_cohort(4, 1, 103, 10).tolist()
    with pytest.raises(ConfigError, match="takes part in only one round"):
        once_cohort(3, 1, 5, 10)


def test_a_run_of_clients_that_take_part_once_ends_with_the_planned_ledger(tiny_task: Dataset) -> None:
    overrides = ["model.name=linear", "clients.count=12", "clients.once=true", "training.rounds=4", "mechanism.name=privunit-g"]
    config = parse_config("", [*overrides, "mechanism.perturbed=gradient"], origin="test")
    federation, start = build(config, tiny_task, torch.device("cpu"))
    *_, last = simulate(federation, start, 4)
    assert [event.sampling for event in last.ledger.events] == ["once"] * 4
    assert [(event.cohort, event.population, event.joined) for event in last.ledger.events] == [(3, 12, 1)] * 4
    local = account(last.ledger).find("local", "run", pure=True)
    assert local is not None
    assert local.epsilon == config.mechanism.epsilon  # type: ignore[attr-defined]


@pytest.mark.parametrize("override", ["clients.fraction=0.5", "clients.self_sampling=plain"])
def test_once_goes_with_no_other_choice_of_clients(override: str, tiny_task: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"clients\.once"):
        build(config_of("once", override, "clients.count=10"), tiny_task, torch.device("cpu"))


def test_a_direct_channel_hides_no_order(tiny_task: Dataset) -> None:
    config = parse_config(
        "", ["model.name=linear", "clients.count=8", "clients.once=true", "training.rounds=2", "mechanism.name=privunit-g"], origin="test"
    )
    federation, start = build(config, tiny_task, torch.device("cpu"))
    *_, last = simulate(replace(federation, participation=replace(federation.participation, channel="direct")), start, 2)
    assert {event.sampling for event in last.ledger.events} == {"visible"}
    assert account(last.ledger).find("shuffled", "run") is None
    assert run_epsilon(last.ledger) < inf


@pytest.mark.parametrize(("case", "setting"), [("records", "mechanism.noise_multiplier=9.0"), ("signs", "mechanism.epsilon=0.5")])
def test_noise_that_is_set_is_not_replaced_by_what_a_target_takes(case: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=r"is computed from privacy\.target_epsilon = 2.*'off'"):
        config_of(case, setting, "privacy.target_epsilon=2.0")
    text = config_of(case, "privacy.target_epsilon=2.0").to_toml()
    with pytest.raises(ConfigError, match="is computed from"):
        parse_config(text, [setting], origin="test")
    name, _, value = setting.removeprefix("mechanism.").partition("=")
    own = parse_config(text, [setting, "privacy.target_epsilon='off'"], origin="test")
    assert getattr(resolve_settings(own).mechanism, name) == float(value)
