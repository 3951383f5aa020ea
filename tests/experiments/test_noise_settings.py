"""From the settings of a Gaussian mechanism to a schedule, its forecast, its figures and its baseline; and what is refused, in one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from conftest import CommandLine
from ldpfl.data import load
from ldpfl.errors import ConfigError
from ldpfl.experiments.baseline import config_without_noise
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.figures import summarise
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.mechanisms import Gaussian
from ldpfl.mechanisms.gaussian import (
    AdapLDP,
    Dpa,
    FullDP,
    LadpPaper,
    LadpSound,
    LayerSelection,
    LocalSteps,
    NbAFL,
    NoiseSchedule,
    SensitiveDP,
    Sensitivity,
    TimeVarying,
)
from ldpfl.privacy import UnprotectedRelease
from ldpfl.privacy.accounting import account
from ldpfl.simulation import simulate

BASE = [
    "model.name=logistic-regression",
    "clients.count=5",
    "training.rounds=3",
    "training.epochs=2",
    "training.batch_size=10",
    "training.learning_rate=0.05",
    "training.clip_norm=1.5",
    "mechanism.epsilon=0.9",
    "mechanism.norm=0.5",
    "mechanism.perturbed=update",
]
"""40 images a client."""

CLIPPED = Sensitivity("update_clip", norm=0.5)
STEPS = LocalSteps(0.05, 2, 10, 1.5)

SETTINGS: dict[str, tuple[list[str], NoiseSchedule]] = {
    "full-dp": ([], FullDP(0.9, 1e-5, CLIPPED)),
    "full-dp, as assumed": (
        ["mechanism.sensitivity=per_dataset", "mechanism.delta=1e-3", "mechanism.layers_separately=true"],
        FullDP(0.9, 1e-3, Sensitivity("per_dataset", STEPS, samples=40), layers_separately=True),
    ),
    "full-dp, classical": (
        ["mechanism.sensitivity=per_batch", "mechanism.constant=classical"],
        FullDP(0.9, 1e-5, Sensitivity("per_batch", STEPS, samples=40), "classical"),
    ),
    "nbafl": (["mechanism.exposures=3"], NbAFL(0.9, 1e-5, 0.5, 40, 3)),
    "time-varying": (
        ["mechanism.ratio=0.8", "mechanism.participations=2"],
        TimeVarying(0.9, 1e-5, CLIPPED, rounds=3, participations=2, ratio=0.8),
    ),
    "time-varying, paper": (["mechanism.variant=paper"], TimeVarying(0.9, 1e-5, CLIPPED, rounds=3, variant="paper")),
    "sensitive-dp": (["mechanism.own_share=0.25", "mechanism.kappa=2"], SensitiveDP(0.9, 1e-5, CLIPPED, None, 0.25, 2.0)),
    "sensitive-dp, sound": (
        ["mechanism.own_share=0", "mechanism.clip_to_estimate=true"],
        SensitiveDP(0.9, 1e-5, CLIPPED, lam=0.0, clip_to_estimate=True),
    ),
    "dpa": (["mechanism.contraction=0.8"], Dpa(0.9, 1e-5, CLIPPED, rounds=3, contraction=0.8)),
    "adapldp": (["mechanism.rate_decay=0.9", "mechanism.degrees_bug=false"], AdapLDP(0.9, 1e-5, STEPS, 0.9, False)),
    "ladp": (
        [
            "mechanism.sensitivity=per_batch",
            "mechanism.selection=rms",
            "mechanism.threshold=0.02",
            "mechanism.p_max=1e-3",
            "mechanism.normaliser=l1",
        ],
        LadpPaper(
            *(0.9, 1e-5, Sensitivity("per_batch", STEPS, samples=40)),
            selection=LayerSelection("rms", 0.02),
            p_max=1e-3,
            normaliser="l1",
        ),
    ),
    "ladp-sound": (
        ["mechanism.share_rule=size", "mechanism.smallest_share=0.01", "mechanism.p_min=1e-8"],
        LadpSound(0.9, 1e-5, 0.5, "size", 0.01, 1e-8),
    ),
}


def config_of(name: str, *overrides: str) -> RunConfig:
    return parse_config("", ["mechanism.name=full-dp"], BASE, [f"mechanism.name={name}", *overrides], origin="test")


def schedule_built(config: RunConfig, data: Path) -> NoiseSchedule:
    federation, _ = build(config, load("mnist", data), torch.device("cpu"))
    assert isinstance(federation.mechanism, Gaussian)
    return federation.mechanism.schedule


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_make_the_schedule(case: str, tiny_data: Path) -> None:
    overrides, expected = SETTINGS[case]
    found = schedule_built(config_of(case.partition(",")[0], *overrides), tiny_data)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("name", sorted({case.partition(",")[0] for case in SETTINGS}))
def test_every_schedule_builds_with_no_more_than_its_name(name: str, tiny_data: Path) -> None:
    assert schedule_built(config_of(name), tiny_data).name == name


# --- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({case.partition(",")[0] for case in SETTINGS}))
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("mechanism.perturbed=weights", "'mechanism.perturbed'.*should be 'update'"),
        ("ranges.center=0.1", "leave ranges.center"),
        ("ranges.rule=denoised", "ranges.rule out"),
    ],
)
def test_schedules_noise_updates_and_use_no_ranges(name: str, override: str, named: str, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        schedule_built(config_of(name, override), tiny_data)
    assert "perturbed" in override or repr(name) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def run_one_round(name: str, overrides: list[str], data: Path) -> None:
    list(simulate(*build(config_of(name, *overrides), load("mnist", data), torch.device("cpu")), 1))


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("adapldp", ["training.clip_norm=off"], "set training.clip_norm"),
        ("full-dp", ["training.clip_norm=off", "mechanism.sensitivity=theorem"], "set training.clip_norm"),
        ("ladp", ["training.clip_norm=off", "mechanism.sensitivity=per_batch"], "set training.clip_norm"),
        ("full-dp", ["mechanism.delta=0"], "'mechanism.delta'.*greater than 0"),
        ("full-dp", ["mechanism.delta=1"], "'mechanism.delta'.*less than 1"),
        ("full-dp", ["mechanism.delta=nan"], "'mechanism.delta'"),
        ("full-dp", ["mechanism.epsilon=0"], "'mechanism.epsilon'"),
        ("ladp", ["mechanism.p_min=1e-4", "mechanism.p_max=1e-5"], "more than p_max"),
        ("ladp-sound", ["mechanism.p_min=1e-4", "mechanism.p_max=1e-5"], "more than p_max"),
        ("ladp", ["mechanism.threshold=-0.5"], "'mechanism.threshold'.*greater than or equal to 0"),
        ("ladp", ["mechanism.threshold=0"], "top_fraction must lie in"),
        ("ladp", ["mechanism.threshold=1.5"], "top_fraction must lie in"),
        ("ladp", ["mechanism.selection=l2"], "'mechanism.selection'.*abs_l2"),
        ("ladp", ["mechanism.normaliser=sigmoid"], "'mechanism.normaliser'.*softmax"),
        ("ladp-sound", ["mechanism.share_rule=kld"], "'mechanism.share_rule'.*kl"),
        ("ladp-sound", ["mechanism.smallest_share=0.6"], "smallest_share is 0.6, but must be below 1/2"),
        ("full-dp", ["mechanism.sensitivity=per_client"], "'mechanism.sensitivity'.*per_dataset"),
        ("full-dp", ["mechanism.constant=theorem2"], "'mechanism.constant'.*theorem3"),
        ("time-varying", ["mechanism.variant=papers"], "'mechanism.variant'.*equal_budget"),
        ("time-varying", ["mechanism.participations=4"], "participations must lie between 1 and the 3 rounds"),
        ("time-varying", ["mechanism.ratio=1.1"], "'mechanism.ratio'"),
        ("dpa", ["mechanism.contraction=1"], "'mechanism.contraction'"),
        ("sensitive-dp", ["mechanism.clip_to_estimate=true"], "clip_to_estimate needs lam = 0"),
        ("nbafl", ["mechanism.epsilon=1.5"], "proved for epsilon < 1"),
        ("ladpp", [], "'mechanism.name'.*did you mean 'ladp'"),
        ("ladp", ["mechanism.treshold=1"], "unknown setting 'mechanism.treshold'.*threshold"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_clear_line(name: str, overrides: list[str], named: str, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        run_one_round(name, overrides, tiny_data)
    assert len(str(caught.value).splitlines()) == 1


# --- forecast, figures, baseline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("full-dp", []),
        ("full-dp", ["mechanism.sensitivity=per_dataset"]),
        ("time-varying", ["mechanism.ratio=0.8"]),
        ("dpa", []),
        ("adapldp", []),
        ("ladp", ["mechanism.sensitivity=per_batch"]),
        ("ladp-sound", []),
    ],
)
@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.thorough_except("0.4-full-dp-overrides1", "0.4-adapldp-overrides4")
def test_the_forecast_is_the_ledger_that_the_run_leaves(
    name: str, overrides: list[str], fraction: float, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny images are 20x20, those of MNIST 28x28: the forecast is told so."""
    monkeypatch.setattr("ldpfl.experiments.planned_ledger.describe_data", lambda config, caller_objects: Description((1, 20, 20), 10))
    config = config_of(name, f"clients.fraction={fraction}", *overrides)
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    *_, last = simulate(federation, start, config.training.rounds)
    assert planned_ledger(config) == last.ledger


@pytest.mark.parametrize("name", ["nbafl", "sensitive-dp"])
def test_what_depends_on_data_or_training_is_not_forecast(name: str) -> None:
    """NbAFL's mu needs the smallest client's data set size, which only the data tell."""
    with pytest.raises(ConfigError, match=f"mechanism '{name}' depends on the data.*ldpfl ledger"):
        planned_ledger(config_of(name))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_result_tells_the_noise_and_what_the_paper_charges(tiny_data: Path) -> None:
    """Two of five clients join a round, and a batch is 10 of 40 images: a client is charged 0.4 x 0.25 of epsilon a round."""
    config = config_of("full-dp", "clients.fraction=0.4")
    task = load("mnist", tiny_data)
    federation, start = build(config, task, torch.device("cpu"))
    *_, last = simulate(federation, start, 3)
    noise = summarise(config, federation, task, last, None)["noise"]
    assert noise["paper_epsilon_per_round"] == pytest.approx([0.4 * 0.25 * 0.9] * 3)
    assert noise["paper_epsilon"] == pytest.approx(sum(noise["paper_epsilon_per_round"]))
    assert noise["protected_fraction"] == 1.0
    assert noise["multiplier_median"] == pytest.approx([1.0] * 3)
    assert noise["norm"] == pytest.approx(sum(metrics.noise["norm"] for metrics in last.history))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_round_is_charged_to_as_many_as_joined_it(tiny_data: Path) -> None:
    """Clients that decide for themselves come in other numbers each round, perhaps none."""
    config = config_of("full-dp", "clients.self_sampling=plain", "training.rounds=8", "seed=2")
    task = load("mnist", tiny_data)
    federation, start = build(config, task, torch.device("cpu"))
    *_, last = simulate(federation, start, 8)
    came = [metrics.clients for metrics in last.history if metrics.clients]
    assert len(set(came)) > 2
    noise = summarise(config, federation, task, last, None)["noise"]
    assert noise["paper_epsilon_per_round"] == pytest.approx([0.25 * 0.9 * count / 5 for count in came])
    assert noise["paper_epsilon"] == pytest.approx(0.25 * 0.9 * sum(came) / 5)


def test_other_mechanisms_have_no_noise_in_their_result(tiny_data: Path) -> None:
    config = config_of("duchi", "shuffling.channel=direct")
    task = load("mnist", tiny_data)
    federation, start = build(config, task, torch.device("cpu"))
    *_, last = simulate(federation, start, 1)
    assert "noise" not in summarise(config, federation, task, last, None)


def test_the_noise_free_baseline_has_no_noise_settings() -> None:
    """So that all schedules share one; how clients train is the same."""
    baseline = config_without_noise(config_of("ladp", "mechanism.p_max=1e-3", "mechanism.delta=1e-3"))
    assert baseline == config_without_noise(config_of("full-dp"))
    assert baseline.mechanism.name == "none"
    assert baseline.training.clip_norm == 1.5


@pytest.mark.parametrize(("name", "sound"), [("ladp", False), ("ladp-sound", True)])
def test_the_closing_tables_show_the_noise_and_the_claim(name: str, sound: bool, ldpfl: CommandLine, tiny_data: Path) -> None:
    """The claim stands at the paper's own delta, above what holds."""
    chosen = [*BASE, f"mechanism.name={name}", "mechanism.delta=1e-3", "training.rounds=1"]
    settings = [part for setting in chosen for part in ("--set", setting)]
    Path("run.toml").write_text("", encoding="utf-8")
    outcome = ldpfl("run", "run.toml", "--data-dir", tiny_data, "--no-baseline", *settings)
    assert outcome.code == 0, outcome.err
    assert "noise, L2 norms added up" in outcome.out
    assert "epsilon as papers add it up" in outcome.out
    claims = [line for line in outcome.out.splitlines() if "paper's claim" in line]
    assert len(claims) == (0 if sound else 1)
    run = next(line for line in outcome.out.splitlines() if "one client, whole run" in line)
    assert ("warning: no guarantee: ladp: " in outcome.out) == (not sound)
    if sound:
        assert "(no pure bound)" in run
    else:
        assert "0.9 at delta 0.001" in claims[0]
        assert "one client, one round" in claims[0]
        assert " none " in run
        assert "pure" not in run


def test_a_run_s_claim_is_that_of_its_own_delta(tiny_data: Path) -> None:
    config = config_of("ladp", "mechanism.delta=1e-3")
    federation, start = build(config, load("mnist", tiny_data), torch.device("cpu"))
    *_, last = simulate(federation, start, 1)
    release = last.ledger.events[0].release
    assert isinstance(release, UnprotectedRelease)
    assert (release.claimed_epsilon, release.claimed_delta) == (0.9, 1e-3)
    row = account(last.ledger, 1e-5).rows[0]
    assert (row.status, row.epsilon, row.delta) == ("claimed", 0.9, 1e-3)
    found = account(last.ledger, 1e-5).find("local", "run")
    assert found is not None
    assert found.epsilon == math.inf
