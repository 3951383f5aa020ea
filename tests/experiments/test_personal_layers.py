"""Layers that stay at each client: they train and are kept there, and nothing else of a run knows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ldpfl import ConfigError, DataError, api
from ldpfl.api.results import RunResult
from ldpfl.data import Dataset, Samples

CLIENTS, ROWS = 12, 60

Settings = dict[str, Any]


def data() -> Dataset:
    """Every second client names the classes the other way round, which no shared head can follow."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(CLIENTS * ROWS, 4, generator=generator)
    owners = np.repeat(np.arange(CLIENTS), ROWS)
    targets = ((inputs[:, 0] > 0) ^ torch.from_numpy(owners % 2 == 1)).long()
    test = Samples(inputs[:10].clone(), targets[:10].clone())
    return Dataset("points", Samples(inputs, targets), test, 2, (), (), "points", clients=owners)


def run(folder: Path | None = None, *, personal: tuple[str, ...] = ("3",), settings: Settings | None = None, **more: Any) -> RunResult:
    usual: Settings = {
        "seed": 1,
        "model.name": "mlp",
        "model.personal": list(personal),
        "data.evaluate_on": "clients",
        "evaluation.share": 0.4,
        "training.rounds": 4,
        "training.epochs": 3,
        "training.learning_rate": 0.2,
        "mechanism": {"name": "duchi", "epsilon": 4.0, "perturbed": "update"},
        "ranges.radius": 0.1,
        "privacy.target_epsilon": "off",
        "training.server_learning_rate": 1.0,
        "training.server_weight_decay": 0.0,
        "training.server_momentum": 0.0,
        "training.average": 0.0,
    }
    options = {"workers": 1, "baseline": False, "progress": False} | more
    return api.run(data=data(), settings=usual | (settings or {}), folder=folder, **options)


def kept_in(folder: Path) -> torch.Tensor:
    (path,) = folder.glob("PRIVATE-personal-*")
    return load_file(path)["personal"]


@pytest.mark.thorough
def test_personal_heads_follow_clients_that_one_head_cannot(tmp_path: Path) -> None:
    shared, own = run(personal=()), run(tmp_path / "own")
    assert shared.score < 0.65
    assert own.score > 0.8
    assert len(own.sites_to_dataframe()) == CLIENTS
    assert own.site_means_to_dataframe().loc["accuracy", "worst"] > 0.65
    assert any(note.startswith("3.weight, 3.bias (") for note in own.to_dict()["caveats"])


def test_only_shared_layers_are_sent_charged_and_saved(tmp_path: Path) -> None:
    whole, own = run(personal=()), run(tmp_path / "own")
    head = sum(p.numel() for name, p in whole.module().named_parameters() if name.startswith("3."))
    assert own.to_dict()["weights"] == whole.to_dict()["weights"] - head
    assert set(own.to_dict()["layers"]) == {"1.weight", "1.bias"}
    assert own.bytes_per_client < whole.bytes_per_client
    assert kept_in(tmp_path / "own").shape == (CLIENTS, head)
    (path,) = (tmp_path / "own").glob("PRIVATE-personal-*")
    assert path.stat().st_mode & 0o777 == 0o600
    checkpoint = load_file(tmp_path / "own" / "checkpoint.safetensors")
    assert checkpoint["weights"].numel() == own.to_dict()["weights"]
    initial = run(settings={"training.rounds": 1, "training.learning_rate": 1e-12}).module().state_dict()
    assert torch.equal(own.module().state_dict()["3.weight"], initial["3.weight"])  # as the seed makes it, and nobody's


@pytest.mark.thorough
def test_two_workers_and_a_resumed_run_end_in_the_same_bytes(tmp_path: Path) -> None:
    settings = {"secret_noise": False, "clients.fraction": 0.6}
    once = run(tmp_path / "once", settings=settings)
    run(tmp_path / "two", workers=2, settings=settings)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "resumed", on_round=_stop_after(2), settings=settings)
    resumed = run(tmp_path / "resumed", resume=True, settings=settings)
    for name in ("two", "resumed"):
        assert torch.equal(kept_in(tmp_path / name), kept_in(tmp_path / "once"))
        ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("once", name))
        assert all(torch.equal(ours[layer], theirs[layer]) for layer in ours)
    assert [metrics.score for metrics in resumed.history] == [metrics.score for metrics in once.history]


def test_a_client_that_was_not_asked_keeps_its_layers(tmp_path: Path) -> None:
    run(tmp_path / "run", settings={"clients.fraction": 0.25, "training.rounds": 1})
    kept = kept_in(tmp_path / "run")
    changed = (kept != kept.mode(dim=0).values).any(dim=1)
    assert int(changed.sum()) == 3


@pytest.mark.thorough
def test_a_run_goes_on_from_its_clients_layers_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, settings={"secret_noise": False})
    (path,) = folder.glob("PRIVATE-personal-*")
    save_file({"personal": torch.zeros(3, 2)}, path)
    with pytest.raises(DataError, match=r"PRIVATE-personal-4\.safetensors is missing or damaged"):
        api.run(data=data(), folder=folder, resume=True, more_rounds=1, progress=False)
    path.unlink()
    with pytest.raises(DataError, match="restore the file"):
        api.run(data=data(), folder=folder, resume=True, more_rounds=1, progress=False)


@pytest.mark.thorough
def test_the_saved_model_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    found = run(tmp_path / "run")
    for use in (
        lambda: found.predict(np.zeros((2, 4), dtype=np.float32)),
        lambda: api.predict(tmp_path / "run", np.zeros((2, 4), dtype=np.float32)),
        lambda: api.export(tmp_path / "run", tmp_path / "exported"),
    ):
        with pytest.raises(ConfigError, match="stayed at the clients"):
            use()
    assert not (tmp_path / "exported").exists()
    assert api.load_model(tmp_path / "run")(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model.personal": ["head"]}, "a name that starts with 'head'; its layers: 1.weight, 1.bias, 3.weight, 3.bias"),
        ({"model.personal": ["1", "3"]}, "no layer is left to train together"),
        ({"data.evaluate_on": "test"}, "set data.evaluate_on to 'clients'"),
        ({"evaluation.share": 0.0}, "set evaluation.share"),
        ({"training.average": 0.5}, "training.average"),
        ({"training.compile": "on"}, "training.compile"),
        ({"training.proximal": 0.1}, "training.proximal"),
        ({"mechanism": {"name": "dp-sgd"}}, "a record changes its client's layers"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_run_starts(tmp_path: Path, settings: Settings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_a_cluster_gets_no_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Ray trains on others"):
        run(tmp_path / "run", workers="ray")


def _stop_after(rounds: int) -> Any:
    def on_round(metrics: Any) -> None:
        if metrics.round == rounds:
            raise KeyboardInterrupt

    return on_round
