"""Runs that sum over records, for heads by least squares or figures of clients: they plan, charge, resume and refuse as others do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import ldpfl
from ldpfl.data import Dataset, Samples
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.experiments.build import build
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import CallerObjects
from ldpfl.experiments.evaluation_figures import client_evaluation_entries, client_evaluation_entry
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.public_figures import without_private_figures
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.report.client_figures import how_measured
from ldpfl.report.page import page
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.evaluating_records import GAP, LOSS, MAX_BINNING, RIGHT, ClientFigures, Figure, RecordScores, as_measured
from ldpfl.simulation.local_training import LocalTask, evaluated
from ldpfl.simulation.record_sums import NoisySum, lattice_points, released_sum
from ldpfl.simulation.workers import workers
from ldpfl.tasks import ACCURACY
from ldpfl.tasks.weighted_metrics import AUROC, MEASURED_AT_CLIENTS
from ldpfl.util.randomness import Purpose


@cache
def dataset(classes: int = 2, rows: int = 1200) -> Dataset:
    generator = torch.Generator().manual_seed(classes)
    inputs, pull = torch.randn(rows + 200, 4, generator=generator), torch.randn(4, classes, generator=generator)
    targets = (inputs @ pull + torch.randn(rows + 200, classes, generator=generator)).argmax(dim=1)
    train, test = Samples(inputs[:rows], targets[:rows]), Samples(inputs[rows:], targets[rows:])
    return Dataset("x", train, test, classes, (), (), "x")


SQUARES = {"training.method": "least-squares", "training.rounds": 1, "least_squares.feature_norm": 2.0}
STEPS = {"training.rounds": 4, "evaluation.every": 2, "training.server_learning_rate": 1.0}


def config_of(given: CallerObjects, settings: Mapping[str, Any]) -> RunConfig:
    plain = {
        "mechanism.name": "dp-sgd",
        "mechanism.clip_norm": 1.0,
        "model.name": "logistic-regression",
        "clients.count": 6,
        "shuffling.channel": "secure-sum",
        "training.server_weight_decay": 0.0,
        "seed": 3,
    }
    overrides = [f"{key}={value!r}" for key, value in {**plain, **settings}.items()]
    return resolve_settings(parse_config('[data]\nname = "given"\n', overrides, origin="test"), given)


def run_of(classes: int, settings: Mapping[str, Any]) -> tuple[RunConfig, Federation, Checkpoint]:
    given = CallerObjects(dataset(classes))
    config = config_of(given, settings)
    federation, start = build(config, dataset(classes), torch.device("cpu"))
    *_, last = simulate(federation, start, config.training.rounds)
    assert planned_ledger(config, given) == last.ledger
    assert [event.histograms for event in planned_ledger(config, given).events] == [event.histograms for event in last.ledger.events]
    return config, federation, last


@pytest.mark.thorough_except("secure-sum-squares", "direct-squares")
@pytest.mark.parametrize("settings", [SQUARES, STEPS], ids=["squares", "steps"])
@pytest.mark.parametrize("channel", ["secure-sum", "direct"])
def test_a_target_covers_training_and_what_clients_measure(settings: Mapping[str, Any], channel: str) -> None:
    measured = {"evaluation.epsilon": 0.5, "privacy.target_epsilon": 2.0, "shuffling.channel": channel}
    config, _, last = run_of(2, {**settings, **measured})
    assert 1.99 < run_epsilon(last.ledger, config.privacy.delta) <= 2.0
    events = [event for event in last.ledger.events if event.histograms]
    alone = Ledger()
    for place, event in enumerate(events, start=1):
        alone = alone.charge(event.__class__(**{**vars(event), "round": place, "joined": place}))
    assert 0.499 < run_epsilon(alone, config.privacy.delta) <= 0.5
    assert [event.round for event in last.ledger.events] == ([1, 2] if settings is SQUARES else [1, 2, 3, 4, 5, 6])
    assert [event.histograms for event in last.ledger.events][-1]


def test_colluding_clients_are_no_help_to_what_clients_measure() -> None:
    config, _, last = run_of(2, {**SQUARES, "evaluation.epsilon": 0.5, "privacy.target_epsilon": 2.0, "shuffling.colluding": 4})
    assert 1.99 < run_epsilon(last.ledger, config.privacy.delta) <= 2.0


def exact(federation: Federation, last: Checkpoint) -> dict[str, float]:
    """Return the figures of the held-back records without noise."""
    judged = federation.judged
    assert judged is not None
    rows = federation.task.data.take(torch.from_numpy(np.concatenate(list(judged.units))))
    outputs, targets = map(torch.cat, zip(*evaluated(federation.task, last.state.model, rows), strict=True))
    chances, losses = outputs.double().softmax(dim=1)[:, 1], federation.task.losses(outputs, targets).clamp(max=judged.vectors.loss_bound)
    above = (chances[targets == 1, None] > chances[targets == 0]).double() + (chances[targets == 1, None] == chances[targets == 0]) / 2
    right = (outputs.argmax(dim=1) == targets).double().mean()
    figures = {RIGHT: right, LOSS: losses.double().mean(), AUROC: above.mean(), GAP: (chances - (targets == 1).double()).mean()}
    return {name: float(value) for name, value in figures.items()}


def test_figures_are_unbiased_and_their_noise_is_as_stated() -> None:
    """60 draws of noise: each figure's mean within 4.5 deviations of it (false alarm below 1e-4 in all), its deviation within 45 % (1e-5).

    A bin of scores rounds the AUROC by less than 0.01.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    _, federation, last = run_of(2, {**SQUARES, "evaluation.epsilon": 20.0, "evaluation.share": 0.4})
    expected = exact(federation, last)
    judged = federation.judged
    assert judged is not None
    for seed in range(60):
        measured = judged.measured(federation.task, last.state.model, seed, 1)
        metrics = last.history[-1].__class__(**{**vars(last.history[-1]), "at_clients": measured})
        for name, figure in client_evaluation_entries(federation, (metrics,))[0]["figures"].items():
            found.setdefault(name, []).append((figure["value"], figure["noise"]))
    assert found.keys() == expected.keys()
    for name, values in found.items():
        drawn, noise = np.array(values).T
        assert abs(drawn.mean() - expected[name]) < 4.5 * noise.mean() / np.sqrt(60) + 0.01 * (name == AUROC), name
        assert drawn.std() == pytest.approx(noise.mean(), rel=0.45), name


def test_intervals_hold_the_figure_of_all_records_in_about_95_percent_of_draws() -> None:
    """Other records and other noise in each of 200 draws: 95 % of intervals of the accuracy hold its true share; of binomial counts at that
    rate, fewer than 176 or all 200 come about once in 10,000 draws. Those of the loss are longer, because no variance is measured."""
    _, federation, last = run_of(2, SQUARES)
    scores, mechanism = RecordScores("class", 2, 3.0), DpSgd(RecordClip(1.0), 4.0, summed=True, records=100.0)
    whole = list(evaluated(federation.task, last.state.model, federation.task.data))
    vectors = torch.cat([scores.vectors(federation.task, outputs, targets) for outputs, targets in whole])
    true = _shares(vectors, scores)
    held = dict.fromkeys((RIGHT, GAP, LOSS), 0)
    for seed in range(200):
        chosen = torch.from_numpy(np.random.default_rng(seed).integers(0, len(vectors), 400))
        sums = lattice_points(vectors[chosen], mechanism.steps).reshape(4, 100, -1).sum(dim=1)
        found = released_sum(partial(_of_clients, sums), 4, scores.size, mechanism, seed=seed, purpose=Purpose.EVALUATION, number=1)
        figures = ClientFigures(scores, found.in_units(mechanism.steps), 400).all()
        for name in held:
            low, high = figures[name].interval
            held[name] += low <= true[name] <= high
    assert 176 <= held[RIGHT] < 200
    assert 176 <= held[GAP] < 200
    assert held[LOSS] >= 176


def test_an_estimate_beyond_what_is_possible_has_an_interval_of_possible_values() -> None:
    assert Figure(-0.25, noise=0.1, sampling=0.0).interval == pytest.approx((0.0, 0.196))
    assert Figure(1.5, noise=0.0, sampling=0.1).interval == pytest.approx((0.804, 1.0))
    assert Figure(0.05, noise=0.1, sampling=0.0).interval == pytest.approx((0.0, 0.246))  # as without bounds, but cut off


@pytest.mark.parametrize(("spread", "is_shown"), [(0.1, False), (4.0, True)])
def test_the_interval_of_an_auroc_covers_the_binning_of_scores(spread: float, is_shown: bool) -> None:
    """Nearly all scores of a model after few rounds lie in two bins. Then the order within them is unknown, and no AUROC is shown."""
    generator = np.random.default_rng(0)
    classes = generator.integers(0, 2, 4000)
    logits = spread * (generator.normal(size=4000) + 1.5 * classes - 0.75)
    ranks = logits.argsort().argsort()
    positives = classes.sum()
    true = (ranks[classes == 1].sum() - positives * (positives - 1) / 2) / (positives * (4000 - positives))
    scores, task = RecordScores("class", 2, 5.0), SimpleNamespace(losses=partial(nn.functional.cross_entropy, reduction="none"))
    outputs = torch.from_numpy(np.stack([np.zeros(4000), logits], axis=1))
    vectors = scores.vectors(cast(LocalTask, task), outputs, torch.from_numpy(classes))
    sums = NoisySum(vectors.sum(dim=0).numpy(), 1e-6)
    entry = client_evaluation_entry(scores, 1, as_measured(scores, sums, 4000))
    assert (AUROC in entry["figures"]) == is_shown
    assert ("The AUROC is left out" in how_measured({"at_clients": [entry]})) != is_shown
    if is_shown:
        assert entry["figures"][AUROC]["low"] < true < entry["figures"][AUROC]["high"]
    else:
        assert entry["binning"] > MAX_BINNING


def test_a_class_that_is_too_rare_for_an_auroc_is_named() -> None:
    scores, task = RecordScores("class", 2, 5.0), SimpleNamespace(losses=partial(nn.functional.cross_entropy, reduction="none"))
    vectors = scores.vectors(
        cast(LocalTask, task), torch.randn(500, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(500, dtype=torch.int64)
    )
    sums = NoisySum(vectors.sum(dim=0).numpy(), 1.0)
    entry = client_evaluation_entry(scores, 1, as_measured(scores, sums, 500))
    assert AUROC not in entry["figures"]
    assert "The AUROC is left out: the held-back records of one class are too few" in how_measured({"at_clients": [entry]})


def _of_clients(sums: torch.Tensor, some: range) -> torch.Tensor:
    return sums[some.start : some.stop]


def _shares(vectors: torch.Tensor, scores: Any) -> dict[str, float]:
    mean = vectors.mean(dim=0)
    return {
        LOSS: 3.0 * float(0.5 + mean[0] / scores.weights.loss),
        RIGHT: float(0.5 + mean[1] / scores.weights.right),
        GAP: float(2 * mean[2] / scores.weights.gap),
    }


def test_held_back_records_are_not_trained_on() -> None:
    """And which they are follows from places alone: other contents leave the same records out."""
    _, federation, _ = run_of(2, {**SQUARES, "evaluation.epsilon": 1.0, "evaluation.share": 0.25})
    judged = federation.judged
    assert judged is not None
    for client in range(6):
        kept, held = set(federation.samples[client].tolist()), set(judged.units[client].tolist())
        assert (len(kept), len(held)) == (150, 50)
        assert not kept & held
    config = config_of(CallerObjects(dataset(2)), {**SQUARES, "evaluation.epsilon": 1.0, "evaluation.share": 0.25})
    others = Dataset("x", Samples(torch.zeros(1200, 4), torch.zeros(1200, dtype=torch.int64)), dataset(2).test, 2, (), (), "x")
    again, _ = build(config, others, torch.device("cpu"))
    assert again.judged is not None
    assert np.array_equal(again.judged.units.places, judged.units.places)


@pytest.mark.thorough_except("squares")
@pytest.mark.parametrize("settings", [SQUARES, STEPS], ids=["squares", "steps"])
def test_workers_change_nothing(settings: Mapping[str, Any]) -> None:
    config = config_of(CallerObjects(dataset(3)), {**settings, "evaluation.epsilon": 5.0})
    federation, start = build(config, dataset(3), torch.device("cpu"))
    ends = []
    for count in (1, 2):
        with workers(count, torch.device("cpu"), print) as pool:
            *_, last = simulate(federation, start, config.training.rounds, workers=pool)
        ends.append((last.state.weights.numpy().tobytes(), [metrics.reproducible() for metrics in last.history], last.ledger))
    assert ends[0] == ends[1]


@pytest.mark.thorough
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    settings = {**STEPS, "mechanism.name": "dp-sgd", "evaluation.epsilon": 2.0, "model.name": "logistic-regression", "clients.count": 6}
    settings |= {"shuffling.channel": "secure-sum", "seed": 3, "mechanism.clip_norm": 1.0}
    whole = ldpfl.run("own", data=dataset(2), settings=settings, folder=tmp_path / "whole", progress=False, baseline=False)

    class Stop(Exception):
        pass

    def stop(metrics: object) -> None:
        if getattr(metrics, "round", 0) == 2:
            raise Stop

    with pytest.raises(Stop):
        ldpfl.run("own", data=dataset(2), settings=settings, folder=tmp_path / "part", progress=False, baseline=False, on_round=stop)
    again = ldpfl.run(data=dataset(2), folder=tmp_path / "part", resume=True, progress=False, baseline=False)
    assert again.ledger == whole.ledger
    assert [metrics.reproducible() for metrics in again.history] == [metrics.reproducible() for metrics in whole.history]
    for one, other in zip(again.module().parameters(), whole.module().parameters(), strict=True):
        assert torch.equal(one, other)
    named = f"{ACCURACY}{MEASURED_AT_CLIENTS}"
    assert named in whole.scores
    assert whole.intervals[named][0] < whole.intervals[named][1]
    text = page([tmp_path / "whole"])
    assert "Measured at clients" in text
    assert "hold back from training" in text
    kept = without_private_figures(whole.config, whole.to_dict())
    assert set(kept["scores"]) == {name for name in whole.scores if name.endswith(MEASURED_AT_CLIENTS)}
    with pytest.raises(ConfigError, match=r"evaluation\.epsilon"):
        ldpfl.run(folder=tmp_path / "whole", data=dataset(2), resume=True, more_rounds=1, progress=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**SQUARES, "model.name": "mlp"}, "model.name is 'mlp': set it to 'linear'"),
        ({**SQUARES, "mechanism.name": "duchi", "shuffling.channel": "direct"}, "set mechanism.name to 'dp-sgd'"),
        ({**SQUARES, "training.rounds": 3}, "set training.rounds to 1"),
        ({**SQUARES, "mechanism.sample_rate": 0.5}, "set it to 1"),
        ({**SQUARES, "clients.once": True}, "clients.once out"),
        ({**STEPS, "evaluation.epsilon": 3.0, "privacy.target_epsilon": 2.0}, "set evaluation.epsilon below it"),
        ({**STEPS, "evaluation.epsilon": 1.0, "evaluation.share": 0.0}, "set evaluation.share"),
        ({**STEPS, "evaluation.epsilon": 1.0, "evaluation.share": 0.001}, "no client holds any back"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(settings: Mapping[str, Any], said: str) -> None:
    named = {
        "clients.count": 6,
        "shuffling.channel": "secure-sum",
        "mechanism.name": "dp-sgd",
        "model.name": "logistic-regression",
        **settings,
    }
    named |= {"mechanism.perturbed": "gradient"} if named["mechanism.name"] == "duchi" else {}
    with pytest.raises(ConfigError, match=said):
        _built([f"{key}={_toml(value)}" for key, value in named.items()])


def _built(overrides: list[str]) -> None:
    config = resolve_settings(parse_config('[data]\nname = "given"\n', overrides, origin="test"), CallerObjects(dataset(2)))
    build(config, dataset(2), torch.device("cpu"))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def rows_of_persons() -> pandas.DataFrame:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(600, 2))
    told = np.where(values.sum(axis=1) > 0, "yes", "no")
    return pandas.DataFrame({"a": values[:, 0], "b": values[:, 1], "who": [f"p{place // 2}" for place in range(600)], "outcome": told})


BY_PERSON = {"clients.count": 3, "shuffling.channel": "secure-sum", "training.rounds": 2, "evaluation.epsilon": 1.0, "data.person": "who"}


def test_persons_are_held_back_whole_and_counted_once() -> None:
    bounds = {"data.bounds.a": [-3.0, 3.0], "data.bounds.b": [-3.0, 3.0]}
    plain = {"data.target": "outcome", "data.scaling": "bounds", "model.name": "logistic-regression"}
    found = ldpfl.run(data=rows_of_persons(), settings={**BY_PERSON, **bounds, **plain}, progress=False, baseline=False)
    held = found.to_dict()["at_clients"][0]["records"]
    assert 10 <= held <= 45  # of some 240 training persons a tenth, by names: fewer or more come about once in 100,000
    assert found.privacy.protected == "person"
    assert run_epsilon(found.ledger, found.config.privacy.delta) <= 4.0


@pytest.mark.thorough_except("persons")
@pytest.mark.parametrize("unit", [{}, {"data.person": "who"}], ids=["records", "persons"])
def test_held_back_targets_are_not_clipped(unit: Mapping[str, Any]) -> None:
    """Targets to train on are clipped. The loss of a record that is held back would hide how far off a model is for it."""
    frame = rows_of_persons().assign(outcome=lambda table: np.where(table.index % 2, 90.0, -90.0))
    settings = {"data.bounds.outcome": [-1.0, 1.0], "data.bounds.a": [-3.0, 3.0], "data.bounds.b": [-3.0, 3.0], "data.scaling": "bounds"}
    chosen = {"data.target": "outcome", "task.name": "regression", "model.name": "linear", "training.rounds": 1, **settings, **unit}
    chosen |= {"clients.count": 3, "shuffling.channel": "secure-sum", "evaluation.epsilon": 100.0, "seed": 1}
    result = ldpfl.run(data=frame, settings=chosen, progress=False, baseline=False, target_epsilon=300.0).to_dict()
    loss = result["at_clients"][-1]["figures"][LOSS]["value"]
    assert loss > 4.0  # its bound is 5; of targets clipped to 1 it is about 1
    assert "in units of 1 squared: the measured spread" in how_measured(result)  # the bounds reach 1 on either side of 0


class Centered(nn.Module):
    """What it makes of a row depends on those beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(rows - rows.mean(dim=0)))


def test_a_model_that_mixes_rows_is_refused_where_clients_measure_rows_of_several_persons() -> None:
    """Without measuring it is trained: each person's rows are a batch of their own."""
    plain = {"data.target": "outcome", "data.scaling": "bounds", "data.bounds.a": [-3.0, 3.0], "data.bounds.b": [-3.0, 3.0]}
    with pytest.raises(PrivacyError, match="mixes the samples of a batch"):
        ldpfl.run(data=rows_of_persons(), model=Centered(), settings={**BY_PERSON, **plain}, progress=False, baseline=False)


def test_the_epsilon_of_evaluation_is_not_taken_for_a_mechanism_s() -> None:
    config = ldpfl.configure("quickstart", epsilon=0.7)
    assert config.mechanism.model_dump()["epsilon"] == 0.7
    assert ldpfl.configure("sum/least-squares-mnist", evaluation_epsilon=0.7).evaluation.epsilon == 0.7
    with pytest.raises(ConfigError, match="no argument 'epsilon'"):
        ldpfl.configure("sum/least-squares-mnist", epsilon=0.7)
