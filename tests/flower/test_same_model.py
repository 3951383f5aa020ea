"""One code path, not two: the simulator and the in-process grid end in the same model, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import flower_parts  # switches Flower's telemetry off before it is imported
import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict, UserConfig

from conftest import TINY_TOML
from ldpfl.data import Dataset
from ldpfl.errors import AllDeclined, ConfigError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import Ask, InProcessGrid, LdpClientApp
from ldpfl.flower.apps import server_app, train
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.server import Checkpoint
from ldpfl.simulation import simulate
from ldpfl.util.randomness import SeededStreams

RECORDS = ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.records=4", "mechanism.noise_multiplier=2"]
CASES = {
    "duchi": [],
    "weights": ["mechanism.perturbed=weights", "ranges.rule=denoised", "ranges.radius=initial"],
    "part of the clients": ["clients.fraction=0.5", "ranges.rule=noisy-minmax"],
    "harmony": ["mechanism.name=harmony", "mechanism.group=40"],
    "laplace": ["mechanism.name=laplace", "mechanism.coordinates=50"],
    "privunit-g": ["mechanism.name=privunit-g", "mechanism.epsilon=8"],
    "full-dp": ["mechanism.name=full-dp"],
    "time-varying": ["mechanism.name=time-varying", "training.server_learning_rate=0.5"],
    "records": [*RECORDS, "training.server_momentum=0.5"],
    "a center of records": [*RECORDS, "model.name=centered-linear", "training.server_learning_rate=0.5"],
    "signs of updates": ["mechanism.name=rotated-sign", "training.average=0.5"],
    "signs of gradients": ["mechanism.name=rotated-sign", "mechanism.perturbed=gradient", "training.server_learning_rate=0.1"],
    "no noise": ["mechanism.name=none", "training.momentum=0.5"],
    "a convolutional model": ["model.name=two-layer-cnn", "training.rounds=2", "clients.count=4"],
}


def simulated(config: RunConfig, task: Dataset) -> Checkpoint:
    """One client at a time."""
    federation, start = build(config, task, torch.device("cpu"))
    *_, last = simulate(replace(federation, chunk_size=1), start, config.training.rounds)
    return last


class SimulatedNode:
    """Allows everything: a simulated client has nothing to lose."""

    def keeps_state(self, ask: Ask) -> bool:
        return True

    def would_admit(self, ask: Ask) -> None: ...

    def admit(self, ask: Ask) -> float:
        return inf

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        raise AssertionError("no relay here")

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        raise AssertionError("no relay here")


def simulator_source(ask: Ask, context: Context) -> SeededStreams:
    return SeededStreams.for_clients(ask.terms.config.seed, ask.terms.round, [int(context.node_config["partition-id"])])


def grid_of(settings: UserConfig, config: RunConfig, data: Path) -> InProcessGrid:
    """The recipes' own client app, with the simulator's random bits."""
    app = LdpClientApp(train, node=lambda context: SimulatedNode(), source=simulator_source)
    return InProcessGrid(app, config.clients.count, run_config=settings, node_config={"data-dir": str(data)})


def deployed(settings: UserConfig, config: RunConfig, data: Path) -> None:
    """Run the recipes' own apps."""
    grid = grid_of(settings, config, data)
    server_app(grid, grid.server_context())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
@pytest.mark.thorough_except("a center of records")
def test_the_same_config_and_seed_give_the_same_model(
    case: str, tiny_data: Path, tiny_task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(TINY_TOML, CASES[case], origin="test")
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    settings: UserConfig = {"ldpfl.recipe": case, "ldpfl.out": str(tmp_path / "run")}  # the name keeps what apps remember apart
    deployed(settings, config, tiny_data)
    folder = RunFolder(tmp_path / "run")
    ours, theirs = folder.checkpoint(), simulated(config, tiny_task)
    assert ours is not None
    assert torch.equal(ours.state.weights, theirs.state.weights)
    assert torch.equal(ours.state.ranges.radius, theirs.state.ranges.radius)
    assert torch.equal(ours.state.ranges.center, theirs.state.ranges.center)
    assert [metrics.score for metrics in ours.history] == [metrics.score for metrics in theirs.history]
    assert not torch.equal(ours.state.weights, ours.state.previous)  # type: ignore[arg-type]
    for own, other in zip(ours.ledger.events, theirs.ledger.events, strict=True):
        assert own.channel == "direct"
        assert (own.release, own.cohort, own.population, own.joined) == (other.release, other.cohort, other.population, other.joined)


@pytest.mark.thorough
def test_a_finished_run_leaves_what_a_simulated_one_does(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(TINY_TOML, (), origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    settings: UserConfig = {"ldpfl.recipe": "finished", "ldpfl.out": str(tmp_path / "run")}
    for _ in range(2):  # a finished run started again is left as it is
        deployed(settings, config, tiny_data)
        result = RunFolder(tmp_path / "run").result()
        assert result is not None
        assert result["rounds"] == 3
        assert result["clients_per_round"] == 8
        assert result["layers"]["1.bias"]["clipped_fraction"] is None  # only a simulation knows it
        assert RunFolder(tmp_path / "run").model_path.exists()
        assert RunFolder(tmp_path / "run").config().shuffling.channel == "direct"
        assert np.isfinite(result["score"])


def test_a_target_is_kept_by_the_run_itself(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is that of the channel that reports take, not of the one that a recipe simulates."""
    config = parse_config(TINY_TOML, ["mechanism.name=rotated-sign", "privacy.target_epsilon=3.0", "training.rounds=1"], origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    deployed({"ldpfl.recipe": "target", "ldpfl.out": str(tmp_path / "run")}, config, tiny_data)
    folder = RunFolder(tmp_path / "run")
    assert folder.config().shuffling.channel == "direct"
    assert 1 < run_epsilon(folder.ledger(), config.privacy.delta) <= 3.0  # solved for larger images than these


def test_a_model_of_another_size_than_what_came_with_it_takes_no_memory(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million million weights: a server needs nothing but their number to ask for them."""
    config = parse_config(TINY_TOML, ["model.name=mlp", "model.options.hidden=65536", "model.options.depth=64"], origin="test")
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    monkeypatch.setattr("ldpfl.flower.federation_setup.build", lambda *_: pytest.fail("a model was built that takes a terabyte"))
    message = flower_parts.instruction(flower_parts.terms_of(config=config))
    with pytest.raises(ConfigError, match=r"has 27\d,\d{3},\d{3},\d{3} weights, but the server sent "):
        train(message, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))


def test_a_client_without_data_reports_as_any_other(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(TINY_TOML, ["training.rounds=1"], origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    grid = grid_of({"ldpfl.recipe": "empty", "ldpfl.out": str(tmp_path / "run")}, config, tiny_data)
    first, second, third, *_ = grid._contexts.values()
    first.node_config["data-dir"] = str(tmp_path / "nothing-here")
    second.node_config["partition-id"] = 10**6
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "train.parquet").write_bytes(b"spoilt")
    third.node_config["data-dir"] = str(tmp_path / "spoilt")
    server_app(grid, grid.server_context())
    result = RunFolder(tmp_path / "run").result()
    assert result is not None
    assert result["clients_per_round"] == config.clients.count


def test_an_app_that_gives_trained_weights_is_not_asked_for_gradients(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What many local steps led to is no gradient of one record: such a client would release what nothing bounds."""
    config = parse_config(TINY_TOML, CASES["records"], origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    app = LdpClientApp(lambda *call: train(*call), node=lambda context: SimulatedNode(), source=simulator_source)  # not ldpfl's own object
    grid = InProcessGrid(app, config.clients.count, run_config={"ldpfl.recipe": "another app"}, node_config={"data-dir": str(tiny_data)})
    with pytest.raises(AllDeclined):
        server_app(grid, grid.server_context())
    assert "this node's app returns trained weights" in caplog.text


def test_the_number_of_records_has_to_be_said_where_nobody_can_count_them(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(TINY_TOML, ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient"], origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    with pytest.raises(ConfigError, match=r"mechanism\.records"):
        deployed({"ldpfl.recipe": "not a number"}, config, tiny_data)
