"""Sweeps from Python over one's own data: the same as by flags, whatever the data and the settings are given as."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import CommandLine
from ldpfl import ConfigError, api

FRAME = pd.DataFrame(
    {
        "age": [20 + place % 50 for place in range(60)],
        "sick": ["yes" if place % 3 else "no" for place in range(60)],
        "site": [f"S{place % 3}" for place in range(60)],
        "who": [f"P{place // 2}" for place in range(60)],
    }
)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ldpfl.api.sweeping.draw_sweep", lambda *_, **__: None)


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("result.json")}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_from_python_is_the_same_as_by_flags(ldpfl: CommandLine, tmp_path: Path) -> None:
    """Settings as a dict or as texts, values of axes as Python's or as text: one of them goes on with the other's folder."""
    table, out = tmp_path / "table.csv", tmp_path / "out"
    FRAME.to_csv(table, index=False)
    axes = {"privacy.target_epsilon": np.array([2.0, 4.0]), "data.bounds": [{"age": (0, 120)}]}
    settings = {"training": {"rounds": 1}, "data.columns": ["age"]}
    how: dict[str, Any] = {"target": "sick", "client": "site", "person": "who"}
    made = api.sweep(data=table, axes=axes, settings=settings, seeds=2, folder=out, progress=False, **how)
    before = contents(out)
    assert len(before) == 4
    bounds = "data.bounds={age = [0, 120]}"
    flags = [
        "--target",
        "sick",
        "--client",
        "site",
        "--person",
        "who",
        "--seeds",
        "2",
        "--axis",
        "privacy.target_epsilon=2,4",
        "--axis",
        bounds,
    ]
    texts = ["--set", "training={rounds = 1}", "--set", "data.columns=['age']"]
    again = ldpfl("sweep", "--data", table, *flags, *texts, "--out", out, "--json")
    assert again.code == 0, again.err
    assert contents(out) == before
    assert json.loads(again.out) == json.loads(json.dumps(made.to_dict()))
    assert made.config.name == "table-target_epsilon-bounds"
    assert made.together is not None
    assert made.together.statement.protected == "person"
    assert made.together.statement == api.account(*(out / "runs").iterdir())

    by_seed = made.to_dataframe(by_seed=True)
    assert len(by_seed) == 4
    assert list(by_seed["run"]) == [1, 2] * 2
    assert {"privacy.target_epsilon", "data.bounds", "AUROC", "accuracy"} <= set(by_seed.columns)
    means = by_seed.groupby(["privacy.target_epsilon", "data.bounds"], sort=False)["AUROC"].mean()
    assert list(made.to_dataframe()["mean"]) == pytest.approx(list(means))
    assert "another sweep" in ldpfl.refused("sweep", "--data", table, *flags, "--out", out)


@pytest.mark.slow
def test_a_resumed_sweep_of_ones_own_data_takes_the_guarantee_from_ledgers(ldpfl: CommandLine, tmp_path: Path) -> None:
    """An edited ``result.json`` changes nothing. A report counts no run whose ledger is missing as a run that released nothing."""
    table, out = tmp_path / "table.csv", tmp_path / "out"
    FRAME.to_csv(table, index=False)
    columns = ("--target", "sick", "--client", "site", "--axis", "mechanism.clip_norm=1,2", "--set", "training.rounds=1")
    made = ldpfl("sweep", "--data", table, *columns, "--out", out, "--json")
    assert made.code == 0, made.err
    for path in contents(out):
        result = json.loads(path.read_text(encoding="utf-8"))
        result["privacy"] |= dict.fromkeys(("local", "local_round", "shuffled_upper_adaptive"), 0.001)
        for row in result["privacy"]["guarantees"]:
            row["epsilon"] = 0.001
        path.write_text(json.dumps(result), encoding="utf-8")
    again = ldpfl("sweep", "--resume", "--out", out, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out) == json.loads(made.out)
    assert all(row["privacy"]["local"] > 0.001 for row in json.loads(again.out)["rows"])
    (ledger, _) = out.glob("runs/*/ledger.json")
    ledger.unlink()
    assert f"{ledger} is missing" in ldpfl.refused("report", out)
    ledger.with_name("result.json").unlink()  # the checkpoint of an unfinished run shows its releases, too
    assert f"{ledger} is missing" in ldpfl.refused("report", out)


@pytest.mark.slow
@pytest.mark.thorough
def test_frames_and_tensors_are_swept_and_gone_on_with(tmp_path: Path) -> None:
    out, few = tmp_path / "out", {"training.rounds": 1}
    made = api.sweep(
        data=FRAME, target="sick", client="site", axes={"mechanism.clip_norm": [1.0, 2.0]}, settings=few, folder=out, progress=False
    )
    assert made.config.name == "own-clip_norm"
    assert len(made.rows) == 2
    before = contents(out)
    again = api.sweep(folder=out, resume=True, data=FRAME, progress=False)
    assert again.to_dict() == made.to_dict()
    assert contents(out) == before
    with pytest.raises(ConfigError, match="use the same data"):
        api.sweep(folder=out, resume=True, data=FRAME.assign(age=FRAME["age"] + 1), progress=False)
    (last,) = [path.parent for path in before if "clip_norm = 2.0" in (path.parent / "config.toml").read_text(encoding="utf-8")]
    shutil.rmtree(last)
    with pytest.raises(ConfigError, match="use the same data"):  # the run that is left to do is not made on other rows
        api.sweep(folder=out, resume=True, data=FRAME.assign(age=FRAME["age"] + 1), progress=False)
    assert not last.exists()
    with pytest.raises(ConfigError, match="give files instead of objects, or jobs=1"):
        api.sweep(data=FRAME, target="sick", jobs=2, progress=False)

    pair = (torch.arange(80.0).reshape(40, 2) / 80, torch.arange(40) % 2)
    model, own = torch.nn.Linear(2, 2), tmp_path / "own"
    tensors = api.sweep(data=pair, model=model, settings={**few, "clients.count": 4}, seeds=[5, 6], name="mine", folder=own, progress=False)
    assert (tensors.config.name, tensors.config.each_seed, len(tensors.rows[0].score)) == ("mine", [5, 6], 2)
    assert api.sweep(folder=own, resume=True, data=pair, model=model, progress=False).to_dict() == tensors.to_dict()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, "exactly one of these"),
        ({"data": FRAME, "what": "sound-mnist"}, "exactly one of these"),
        ({"what": "sound-mnist", "target": "sick"}, "or give data"),
        ({"what": "sound-mnist", "seeds": 3}, "or give data"),
        ({"resume": True}, "resume=True needs the argument folder"),
        ({"resume": True, "folder": "out", "data": "table.csv"}, "leave data out"),
        ({"resume": True, "folder": "out", "settings": ["training.rounds=2"]}, "leave settings .* out"),
        ({"data": FRAME, "axes": {"training.rounds": 3}}, "expected a list of values"),
        ({"data": FRAME, "axes": {"training.rounds": "3,4"}}, "expected a list of values"),
        ({"data": FRAME, "axes": {"training.rounds": []}}, "axes.training.rounds"),
        ({"data": FRAME, "seeds": 0}, "seeds"),
        ({"data": FRAME, "targett": "sick"}, "no argument 'targett'"),
    ],
)
def test_what_is_no_sweep_is_one_line(how: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        api.sweep(**how, progress=False)  # type: ignore[arg-type]
