"""Runs that protect whole clients, whose model clients measure in bits or by a sum: cost, estimates, error bars, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_record_sum_runs import dataset, exact

import ldpfl
from ldpfl.data.samples import Division
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import CallerObjects
from ldpfl.experiments.evaluation_figures import client_evaluation_entries
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.planning.evaluation_noise import ENTRIES_OF_CLASSES, epsilon_of_bit
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.duchi import Duchi
from ldpfl.mechanisms.harmony import Harmony
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.registry import settings_of
from ldpfl.mechanisms.settings import Facts
from ldpfl.privacy import BinaryRelease, Ledger
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.report.page import page
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.evaluating_records import LOSS, NUMBERS, RIGHT, ClientFigures, RecordScores
from ldpfl.simulation.evaluating_whole_clients import BitScores, ClientScores, MeanScores, WholeClientEvaluation
from ldpfl.simulation.record_sums import NoisySum
from ldpfl.simulation.score_bins import BINS
from ldpfl.tasks.weighted_metrics import AUROC

CLIENTS = 60
PLAIN = {
    "model.name": "logistic-regression",
    "training.server_weight_decay": 0.0,
    "training.rounds": 4,
    "clients.count": CLIENTS,
    "evaluation.every": 2,
    "evaluation.epsilon": 1.0,
    "evaluation.share": 0.2,
    "mechanism.perturbed": "gradient",
    "seed": 3,
}
REGIMES: dict[str, dict[str, str]] = {
    "signs, shuffled": {"mechanism.name": "rotated-sign", "shuffling.channel": "ideal-shuffler"},
    "bits, shuffled": {"mechanism.name": "duchi", "shuffling.channel": "ideal-shuffler"},
    "drawn bits, shuffled": {"mechanism.name": "harmony", "shuffling.channel": "ideal-shuffler"},
    "vectors, summed": {"mechanism.name": "dp-fedavg", "shuffling.channel": "secure-sum"},
    "signs, summed": {"mechanism.name": "rotated-sign", "shuffling.channel": "secure-sum"},
    "signs, nobody trusted": {"mechanism.name": "rotated-sign", "shuffling.channel": "direct"},
    "directions, nobody trusted": {"mechanism.name": "privunit-g", "shuffling.channel": "direct"},
    "noise, nobody trusted": {"mechanism.name": "dp-fedavg", "shuffling.channel": "direct"},
}


def config_of(settings: Mapping[str, Any], classes: int = 2) -> RunConfig:
    overrides = [f"{key}={_toml(value)}" for key, value in {**PLAIN, **settings}.items()]
    return resolve_settings(parse_config('[data]\nname = "given"\n', overrides, origin="test"), CallerObjects(dataset(classes)))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def run_of(settings: Mapping[str, Any]) -> tuple[RunConfig, Federation, Checkpoint]:
    config = config_of(settings)
    federation, start = build(config, dataset(2), torch.device("cpu"))
    *_, last = simulate(federation, start, config.training.rounds)
    return config, federation, last


@pytest.mark.slow
@pytest.mark.thorough_except("signs, nobody trusted")
@pytest.mark.parametrize("regime", REGIMES)
def test_a_target_covers_training_and_bits_and_the_plan_is_the_ledger(regime: str) -> None:
    config, _, last = run_of({**REGIMES[regime], "privacy.target_epsilon": 4.0})
    assert planned_ledger(config, CallerObjects(dataset(2))) == last.ledger
    assert [event.histograms for event in last.ledger.events] == [False, False, True, False, False, True]
    assert 3.96 < run_epsilon(last.ledger, config.privacy.delta) <= 4.0
    alone = Ledger()
    for place, event in enumerate((event for event in last.ledger.events if event.histograms), start=1):
        alone = alone.charge(replace(event, round=place, joined=place))
    assert 0.99 < run_epsilon(alone, config.privacy.delta) <= 1.0


@pytest.mark.slow
@pytest.mark.thorough_except("vectors, summed")
@pytest.mark.parametrize("regime", ["signs, summed", "vectors, summed"])
def test_colluding_clients_are_no_help(regime: str) -> None:
    alone = []
    for colluding in (0, 30):
        config = config_of({**REGIMES[regime], "shuffling.colluding": colluding})
        event = planned_ledger(config, CallerObjects(dataset(2))).events[-1]
        assert event.colluding == colluding
        alone.append(event.release.parameter)
        two = Ledger((replace(event, round=1, joined=1), replace(event, round=2, joined=2)))
        assert 0.99 < run_epsilon(two, config.privacy.delta) <= 1.0
    assert alone[1] < 0.8 * alone[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_certificate_of_such_a_run_is_confirmed_by_other_accountants(tmp_path: Path) -> None:
    config = config_of({**REGIMES["signs, shuffled"], "training.rounds": 2})
    result = ldpfl.run(config, data=dataset(2), folder=tmp_path / "run", progress=False, baseline=False)
    assert result.privacy.protected == "client"
    assert "paper's claim" not in str(result.to_dict()["privacy"])
    assert ldpfl.verify(ldpfl.certify(tmp_path / "run"), ledger=tmp_path / "run").holds
    text = page([tmp_path / "run"])
    assert "by 60 clients, each of which counts once, on records that they hold back from training. The figures are released" in text
    assert "randomised bits about the mean of each client were released" in text


# --- estimates and error bars ---------------------------------------------------------------------------------------------


def scores_for(mechanism: Mechanism) -> ClientScores:
    return (MeanScores if isinstance(mechanism, DpFedAvg) else BitScores)("class", 2, 5.0, one_by_one=False)


@cache
def trained() -> tuple[Federation, Checkpoint]:
    """Return a federation and its last checkpoint. Nothing changes them, so all tests of estimates share one run."""
    return run_of(REGIMES["signs, shuffled"])[1:]


def bits_of(mechanism: Mechanism, *, clients: int = 600, held: int = 1) -> tuple[Federation, Checkpoint, WholeClientEvaluation]:
    """Return an evaluation of a trained model at ``clients`` with ``held`` records each."""
    federation, last = trained()
    order = np.random.default_rng(0).permutation(len(dataset(2).train))[: clients * held].reshape(clients, held)
    units = Division.of(list(order.astype(np.int64)))
    judged = WholeClientEvaluation(units, scores_for(mechanism), mechanism, 1)
    return replace(federation, judged=judged), last, judged


DRAWS = 60
SUM = DpFedAvg(RecordClip(1.0), 0.1, summed=True)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", [Duchi(1.0), Harmony(3.0), SUM], ids=["all", "drawn", "sum"])
@pytest.mark.parametrize("held", [1, 2])
def test_figures_are_unbiased_and_their_noise_is_as_stated(mechanism: Mechanism, held: int) -> None:
    """60 draws of noise: means within 4.5 deviations (false alarm below 1e-4 in all), deviations within 45 % (1e-5).

    A bin of scores rounds the AUROC by less than 0.01, and its estimate, a ratio, has a bias of the second order: 0.02.
    """
    federation, last, judged = bits_of(mechanism, held=held)
    expected = exact(federation, last)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(DRAWS):
        measured = judged.measured(federation.task, last.state.model, seed, 1)
        for name, figure in client_evaluation_entries(federation, (replace(last.history[-1], at_clients=measured),))[0]["figures"].items():
            found.setdefault(name, []).append((figure["value"], figure["noise"]))
    assert len(found.get(AUROC, ())) == DRAWS or isinstance(mechanism, Harmony)  # one drawn bit each tells too little of it here
    for name in (RIGHT, LOSS, AUROC) if not isinstance(mechanism, Harmony) else (RIGHT, LOSS):
        values = found[name]
        drawn, noise = np.array(values).T
        assert abs(drawn.mean() - expected[name]) < 4.5 * noise.mean() / np.sqrt(len(drawn)) + 0.03 * (name == AUROC), name
        assert drawn.std() == pytest.approx(noise.mean(), rel=0.45), name


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", [Duchi(2.0), Harmony(6.0), SUM], ids=["all", "drawn", "sum"])
@pytest.mark.parametrize("held", [1, 3])
def test_intervals_hold_the_figure_of_all_records_in_about_95_percent_of_draws(mechanism: Mechanism, held: int) -> None:
    """Other clients and other bits in each of 200 draws. At a rate of 95 %, fewer than 176 of 200 come about once in 10,000 draws.

    For clients with one record the interval of the accuracy is no longer than it must be: all 200 come about once in 10,000 draws too.
    """
    federation, last, _ = bits_of(mechanism)
    whole = replace(federation, judged=WholeClientEvaluation(Division.of([np.arange(1200)]), scores_for(mechanism), mechanism, 1))
    true = exact(whole, last)
    judged_by = (RIGHT, LOSS) if isinstance(mechanism, Harmony) else (RIGHT, LOSS, AUROC)  # one drawn bit tells too little of the latter
    inside = dict.fromkeys(judged_by, 0)
    for seed in range(200):
        chosen = np.random.default_rng(seed).integers(0, 1200, (400, held)).astype(np.int64)
        judged = WholeClientEvaluation(Division.of(list(chosen)), scores_for(mechanism), mechanism, 1)
        measured = judged.measured(federation.task, last.state.model, seed, 1)
        history = (replace(last.history[-1], at_clients=measured),)
        figures = client_evaluation_entries(replace(federation, judged=judged), history)[0]["figures"]
        for name in inside:
            rounded = 0.01 * (name == AUROC)  # by the bins of scores
            inside[name] += figures[name]["low"] - rounded <= true[name] <= figures[name]["high"] + rounded
    assert min(inside.values()) >= 176
    assert held > 1 or inside[RIGHT] < 200


@pytest.mark.thorough_except("20.0-200-0.02", "20.0-200-0.5", "5.0-200-0.5", "5.0-50-0.9")
@pytest.mark.parametrize(("records", "chance"), [(200, 0.02), (200, 0.5), (50, 0.9)])
@pytest.mark.parametrize("times", [0.3, 3.5, 5.0, 20.0])
def test_intervals_of_bins_hold_although_only_large_ones_are_shown(records: int, chance: float, times: float) -> None:
    """All records in one bin, whose number is ``times`` deviations of its noise.

    Of the bins that are shown, 93 % hold the true share in long simulations, and fewer than 88 % of 1,000 about once in a million.
    """
    scores, random = RecordScores("class", 3, 5.0), np.random.default_rng(records + int(10 * times))
    first, draws, shown, held = NUMBERS + scores.cells, 20_000 if times < 5 else 2_000, 0, 0
    noise = scores.weights.bin * records / times / np.sqrt(2)
    for positive in random.binomial(records, chance, draws):
        sums = np.full(scores.size, -1e6)  # no other bin is shown
        sums[[first + 4, first + BINS + 4]] = scores.weights.bin * np.array([records - positive, positive]) + random.normal(0, noise, 2)
        for row in ClientFigures(scores, NoisySum(sums, noise), records).calibration():
            shown += 1
            held += row["low"] <= chance <= row["high"]
        if shown == 1000:
            break
    assert shown == 0 if times < 1 else held >= 0.88 * shown > 0


@pytest.mark.parametrize(("share", "bounds"), [(-0.4, (0.0, 0.3)), (1.4, (0.7, 1.0))])
def test_a_bin_whose_share_noise_moved_out_of_bounds_has_an_interval_and_no_point(share: float, bounds: tuple[float, float]) -> None:
    scores, records = RecordScores("class", 3, 5.0), 1000
    first, sums = NUMBERS + scores.cells, np.full(scores.size, -1e6)  # no other bin is shown
    sums[[first + 4, first + BINS + 4]] = scores.weights.bin * records * np.array([1 - share, share])
    noise = scores.weights.bin * 100
    (row,) = ClientFigures(scores, NoisySum(sums, noise), records).calibration()
    assert row["low"] >= bounds[0]
    assert row["high"] <= bounds[1]
    assert row["high"] - row["low"] > 0.2


@pytest.mark.thorough
def test_without_noise_the_figures_are_those_of_the_clients() -> None:
    """A bit at epsilon 30 is never flipped here, and for one record each nothing is rounded but losses and the bins of scores."""
    federation, last, judged = bits_of(Duchi(30.0))
    measured = judged.measured(federation.task, last.state.model, 0, 1)
    figures = client_evaluation_entries(federation, (replace(last.history[-1], at_clients=measured),))[0]["figures"]
    expected = exact(federation, last)
    assert figures[RIGHT]["value"] == pytest.approx(expected[RIGHT], abs=1e-6)
    assert figures[RIGHT]["noise"] < 1e-4
    assert figures[AUROC]["value"] == pytest.approx(expected[AUROC], abs=0.01)
    assert (
        sum(
            row["rows"]
            for row in client_evaluation_entries(federation, (replace(last.history[-1], at_clients=measured),))[0]["calibration"]
        )
        == 600
    )


def test_a_regression_is_measured_by_its_loss_alone() -> None:
    scores = BitScores("number", 1, 5.0)
    assert scores.entries == scores.size == 1
    assert float(scores.rotation) == 1


def test_entries_are_bounded_whatever_a_model_says() -> None:
    """And the plan, which knows no model, counts as many of them."""
    _, federation, _ = run_of(REGIMES["signs, shuffled"])
    scores = BitScores("class", 2, 5.0)
    assert scores.entries == ENTRIES_OF_CLASSES
    for scale in (0.0, 1.0, 1e30, float("nan")):
        weights = torch.full((federation.task.layout.dimension,), scale)
        units = Division.of([np.arange(5), np.arange(5, 6), np.empty(0, dtype=np.int64)])
        asked, sent = (
            scores.client_values(federation.task, weights, units),
            MeanScores("class", 2, 5.0).client_values(federation.task, weights, units),
        )
        assert bool((asked.abs() <= 1).all())
        assert bool((sent.double().norm(dim=1) <= 1).all())
        assert not asked[2].any()
        assert not sent[2].any()


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mechanism.name": "dp-fedavg", "shuffling.channel": "ideal-shuffler"}, "can hide only among other bits"),
        ({"mechanism.name": "privunit-g", "shuffling.channel": "ideal-shuffler"}, "set mechanism.name to 'rotated-sign'"),
        ({"mechanism.name": "none", "mechanism.perturbed": "update", "shuffling.channel": "direct"}, "adds no noise that would protect"),
        ({**REGIMES["signs, shuffled"], "clients.once": True}, "leave clients.self_sampling and clients.once out"),
        ({**REGIMES["signs, shuffled"], "evaluation.share": 0.04}, "no client holds any back"),
        ({**REGIMES["signs, shuffled"], "data.partition": "quantity", "evaluation.share": 0.1}, "some client holds back no record"),
        ({**REGIMES["signs, shuffled"], "privacy.target_epsilon": 0.5}, "set evaluation.epsilon below it"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(settings: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(config_of(settings), dataset(2), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_computes_the_noise_in_seconds_whatever_a_server_says() -> None:
    """More clients than bits need are not counted: the epsilon of a bit is smaller than it could be, so nobody is protected less."""
    found = [epsilon_of_bit(1.0, 1e-5, "ideal-shuffler", clients, ENTRIES_OF_CLASSES, 1) for clients in (10**5, 10**12)]
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match=r"set evaluation\.every higher"):
        epsilon_of_bit(1.0, 1e-5, "ideal-shuffler", 1000, ENTRIES_OF_CLASSES, 10**6)


def test_mechanisms_that_say_so_send_bits_and_no_others() -> None:
    for name in ("duchi", "harmony", "rotated-sign", "privunit-g", "laplace", "dp-fedavg"):
        settings = settings_of(name)(name=name)
        release = settings.build(_facts()).release(LayerRanges(0.0, 1.0, (8,)))
        assert settings.sends_bits == isinstance(release, BinaryRelease), name


def _facts() -> Facts:
    return Facts(LayerRanges(0.0, 1.0, (8,)))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_includes_the_measurement() -> None:
    planned = ldpfl.plan_regime("shuffled", 2.0, clients=200, weights=8, rounds=2, evaluation_epsilon=1.0)
    plain = ldpfl.plan_regime("shuffled", 2.0, clients=200, weights=8, rounds=2)
    assert planned.statement.best is not None
    assert planned.statement.best.epsilon <= 2.0
    assert 0.75 * plain.value < planned.value < 0.95 * plain.value
    summed = ldpfl.plan_regime("clients-summed", 2.0, clients=200, weights=8, rounds=2, evaluation_epsilon=1.0)
    assert summed.statement.best is not None
    assert 1.99 < summed.statement.best.epsilon <= 2.0
    with pytest.raises(ConfigError, match="in any regime but local"):
        ldpfl.plan_regime("local", 2.0, clients=200, weights=8, rounds=2, evaluation_epsilon=1.0)
