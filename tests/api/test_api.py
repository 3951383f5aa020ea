"""The front door in Python: what a notebook calls, and what comes back."""

from __future__ import annotations

import shutil
from dataclasses import FrozenInstanceError
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import ldpfl
from ldpfl import ConfigError
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy import Ledger
from ldpfl.server import RoundMetrics

SMALL = {"model.name": "logistic-regression", "data.name": "mnist", "shuffling.channel": "direct"}


def small(data: Path, **changes: object) -> ldpfl.RunResult:
    return ldpfl.run("quickstart", settings=SMALL, count=5, rounds=2, epochs=1, data_dir=data, progress=False, **changes)  # type: ignore[arg-type]


def tensors_of(result: ldpfl.RunResult) -> list[torch.Tensor]:
    return list(result.module().state_dict().values())


def test_a_run_gives_typed_figures_a_plain_module_and_no_file(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    seen: list[RoundMetrics] = []
    result = small(tiny_data, epsilon=2.0, on_round=seen.append)
    assert [metrics.round for metrics in seen] == [1, 2]
    assert result.history == tuple(seen)
    assert result.accuracy == seen[-1].score
    assert result.baseline is not None
    assert len(result.baseline) == 2
    assert result.config.mechanism.epsilon_and_budget == (2.0, "unit")
    assert result.privacy == ldpfl.account(result)
    assert result.ledger.events[0].release.parameter == 2.0
    module = result.module()
    assert isinstance(module, nn.Module)
    assert module is not result.module()
    with pytest.raises(FrozenInstanceError):
        result.folder = tmp_path  # type: ignore[misc]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_run_in_a_folder_is_the_same_and_can_be_loaded(tiny_data: Path, tmp_path: Path) -> None:
    """Twice in one process, with and without files, from a recipe and from the config that it became."""
    first = small(tiny_data, baseline=False)
    kept = small(tiny_data, baseline=False, folder=tmp_path / "run")
    again = ldpfl.load_run(tmp_path / "run", data_dir=tiny_data)
    config = ldpfl.run(first.config, data_dir=tiny_data, baseline=False, progress=False)
    for other in (kept, again, config):
        assert [metrics.reproducible() for metrics in other.history] == [metrics.reproducible() for metrics in first.history]
        assert all(
            torch.equal(a, b) for a, b in zip(other.module().state_dict().values(), first.module().state_dict().values(), strict=True)
        )
    assert kept.folder == tmp_path / "run"
    assert again.to_dict() == kept.to_dict()
    assert ldpfl.account(tmp_path / "run") == ldpfl.account(tmp_path / "run" / "ledger.json") == first.privacy
    (tmp_path / "config.toml").write_text("of something else", encoding="utf-8")  # a ledger of another name is in no run's folder
    copied = Path(shutil.copy(tmp_path / "run" / "ledger.json", tmp_path / "copied.json"))
    assert ldpfl.account(copied) == first.privacy
    finished = small(tiny_data, baseline=False, folder=tmp_path / "run", resume=True)
    assert finished.history[-1].reproducible() == first.history[-1].reproducible()


def test_a_result_shows_itself(tiny_data: Path, tmp_path: Path) -> None:
    result = small(tiny_data)
    frame = result.to_dataframe()
    assert list(frame.index) == [1, 2]
    assert frame["score"].tolist() == [metrics.score for metrics in result.history]
    assert any(column.startswith("noise_std.") for column in frame.columns)
    picture = result.plot()
    picture.save(tmp_path / "curve.svg")
    for name in ("curve.png", "curve.PDF"):
        with pytest.raises(ldpfl.ConfigError, match=r"cannot be written to .*: name the file curve\.svg"):
            picture.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    assert picture._repr_svg_() == (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert "duchi, ε = 1 for one weight, one round" in picture.svg
    console = Console(record=True, width=120, file=StringIO())
    console.print(result)
    for text in (console.export_text(), result._repr_html_()):
        assert "noise-free baseline" in text
        assert "one client, whole run" in text


def test_what_a_caller_mistypes_is_named(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run has no argument 'epsilonn': did you mean 'epsilon'"):
        ldpfl.run("quickstart", epsilonn=1.0)
    with pytest.raises(ConfigError, match="no argument 'group' with the mechanism duchi"):
        ldpfl.run("quickstart", group=4)  # of another mechanism
    with pytest.raises(ConfigError, match="no recipe 'quickstar'"):
        ldpfl.run("quickstar")
    with pytest.raises(ConfigError, match="resume=True needs the argument folder"):
        ldpfl.run("quickstart", resume=True)
    with pytest.raises(ConfigError, match="holds no run"):
        ldpfl.load_run(tmp_path)
    with pytest.raises(ConfigError, match="no argument 'client': did you mean 'clients'"):
        ldpfl.plan(epsilon=1.0, client=10, weights=5, rounds=1)
    with pytest.raises(ConfigError, match="plan needs a value for clients, rounds"):
        ldpfl.plan(epsilon=1.0, weights=5)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ({"epsilon": 3}, "mechanism.epsilon", 3),
        ({"mechanism": "harmony", "group": 4}, "mechanism.group", 4),
        ({"model": "logistic-regression"}, "model.name", "logistic-regression"),
        ({"seed": 7}, "seed", 7),
        ({"degrees_bug": False, "mechanism": "adapldp"}, "mechanism.degrees_bug", False),
        ({"settings": {"ranges.radius": 0.2}}, "ranges.radius", 0.2),
    ],
)
def test_overrides_go_by_the_last_word_of_their_key(
    overrides: dict[str, object], key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunConfig] = []

    def stop(self: object, config: RunConfig, *, baseline: bool) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("ldpfl.experiments.runner.Runner.in_memory", stop)
    with pytest.raises(KeyboardInterrupt):
        ldpfl.run("quickstart", **overrides)  # type: ignore[arg-type]
    tree = asked[0].model_dump()
    for part in key.split("."):
        tree = tree[part]
    assert tree == value
    assert load_recipe("quickstart").seed == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_and_an_audit_are_typed() -> None:
    planned = ldpfl.plan(epsilon=1.0, clients=1000, weights=100, rounds=3, channel="direct")
    assert planned.bytes_per_client == 13
    assert planned.statement.find("local", "run") is not None
    audited = ldpfl.audit("duchi", epsilon=2.0, trials=5_000, seed=1)
    assert audited.passed
    assert audited.epsilon_claimed == 2.0
    assert ldpfl.audit(ldpfl.mechanisms.create("duchi", epsilon=2.0), trials=5_000, seed=1) == audited


@pytest.mark.slow
def test_what_stands_between_two_rounds_is_not_certified(tiny_data: Path, tmp_path: Path) -> None:
    """Killed once the checkpoint was written and the ledger was not: a certificate of either would not be that of the other."""
    small(tiny_data, baseline=False, folder=tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    ledger = folder.ledger()
    Ledger(ledger.events[:-1]).save(folder.ledger_path)
    with pytest.raises(ConfigError, match="is not finished: resume it"):
        ldpfl.certify(folder.path)
    ledger.save(folder.ledger_path)
    assert ldpfl.certify(folder.path).statement.guarantees
