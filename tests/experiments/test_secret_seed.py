"""The secret that noise on a user's own rows follows from: in one file of a run's folder, which only going on with the run needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from conftest import CommandLine
from ldpfl import ConfigError, DataError, api

pytestmark = pytest.mark.slow

SECRET = 0x7F3A5C1E9B2D4068AFC3E1D5B7924680
FILE = "SECRET-seed"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    pd.DataFrame({"age": [20 + place % 50 for place in range(80)], "sick": ["no", "yes", "yes", "no"] * 20}).to_csv(path, index=False)
    return path


HOW: dict[str, Any] = {"target": "sick", "count": 4, "baseline": False, "progress": False}
FEW: dict[str, Any] = {"training.rounds": 2, "data.bounds": {"age": [0, 100]}, "data.scaling": "bounds"}


@pytest.fixture
def run(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run whose secret is known here."""
    monkeypatch.setattr("ldpfl.experiments.secret_seed.secrets.randbits", lambda bits: SECRET if bits == 128 else 5)
    folder = tmp_path / "run"
    api.run(data=rows, **HOW, settings=FEW, folder=folder)
    return folder


def spelled(secret: int) -> list[bytes]:
    """The ways in which a number may stand in a file."""
    words = [form.encode() for form in (str(secret), f"{secret:x}", f"{secret:X}", f"{secret:032x}"[:16], f"{secret:032x}"[16:])]
    halves = [half.to_bytes(8, order) for half in divmod(secret, 1 << 64) for order in ("little", "big")]
    return [*words, *halves, str(secret >> 64).encode(), str(secret % (1 << 64)).encode()]


def test_no_file_of_a_folder_but_one_tells_the_secret(run: Path, ldpfl: CommandLine) -> None:
    assert ldpfl("report", run).code == 0
    assert ldpfl("certify", run, "--out", run / "certificate.json").code == 0
    api.run(folder=run, resume=True, more_rounds=1, baseline=False, progress=False)
    files = {path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"config.toml", "result.json", "checkpoint.safetensors", "ledger.json", "metrics.jsonl", "report.html"} <= set(files)
    found = {name for name, content in files.items() for form in spelled(SECRET) if form in content}
    assert found == {FILE}
    assert (run / FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.thorough
def test_only_what_draws_noise_again_needs_the_secret(run: Path, ldpfl: CommandLine, rows: Path) -> None:
    (run / FILE).unlink()
    for command in ("show", "ledger", "report", "certify"):
        assert ldpfl(command, run).code == 0, command
    assert ldpfl("predict", run, rows).code == 0
    assert ldpfl("audit", run, "--trials", "100").code == 0
    assert api.load_run(run).predict(rows).shape == (80, 3)
    api.run(folder=run, resume=True, progress=False)  # it is finished
    with pytest.raises(ConfigError, match=f"the file {FILE} is not in its folder: put the file back, or begin another run"):
        api.run(folder=run, resume=True, more_rounds=1, progress=False)
    (run / "result.json").unlink()
    with pytest.raises(ConfigError, match=FILE):
        api.run(folder=run, resume=True, progress=False)


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["classification", "regression", "poisson", "survival"])
def test_a_run_whose_columns_were_measured_is_read_without_its_secret(task: str, tmp_path: Path, ldpfl: CommandLine) -> None:
    """What was measured stands beside the model: measured anew, it would need the noise, and so the secret, again."""
    age, stay = [20 + place % 50 for place in range(400)], [1 + place % 9 for place in range(400)]
    frame = pd.DataFrame({"age": age, "stay": stay, "sick": [place % 3 % 2 for place in range(400)]})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    target: Any = {"classification": "sick", "survival": ["stay", "sick"]}.get(task, "stay")
    how = {**HOW, "target": target, "task": task, "target_epsilon": 50.0}
    folder = tmp_path / "measured"
    api.run(data=tmp_path / "rows.csv", **how, settings={"training.rounds": 1}, folder=folder)
    before = api.load_run(folder)
    (folder / FILE).unlink()
    after = api.load_run(folder)
    assert after.encoder is not None
    assert any(after.encoder.knots)
    pd.testing.assert_frame_equal(after.predict(frame), before.predict(frame))
    assert after.to_dict() == before.to_dict()
    for command in (("show", folder), ("audit", folder, "--trials", "100"), ("predict", folder, tmp_path / "rows.csv")):
        assert ldpfl(*command).code == 0, command
    api.run(folder=folder, resume=True, progress=False)  # it is finished
    with pytest.raises(ConfigError, match=FILE):
        api.run(folder=folder, resume=True, more_rounds=1, progress=False)


def test_a_finished_run_is_read_as_it_was_measured_and_not_by_other_columns(rows: Path, tmp_path: Path) -> None:
    api.run(data=rows, **HOW, settings={"training.rounds": 1}, folder=tmp_path / "measured")
    pd.read_csv(rows).assign(weight=1.5).to_csv(rows, index=False)
    with pytest.raises(DataError, match="the run's encoding has 1 columns of numbers, but the data have 2"):
        api.load_run(tmp_path / "measured")


@pytest.mark.thorough
def test_a_run_goes_on_with_its_own_secret(run: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the model of a run that was never interrupted."""
    monkeypatch.setattr("ldpfl.experiments.secret_seed.secrets.randbits", lambda bits: 1)
    config, before = api.load_run(run).config, (run / "model.safetensors").read_bytes()
    shutil.copytree(run, tmp_path / "again")
    for name in ("model.safetensors", "result.json", "checkpoint.safetensors", "metrics.jsonl", "ledger.json"):
        (tmp_path / "again" / name).unlink()
    api.run(folder=tmp_path / "again", resume=True, baseline=False, progress=False)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == before
    other = api.run(config, data=rows, folder=tmp_path / "other", baseline=False, progress=False)
    assert other.config == config
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != before


@pytest.mark.thorough
def test_the_same_call_resumes_a_run_whose_seed_was_drawn(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    how: dict[str, Any] = {**HOW, "settings": FEW}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    begun = api.run(data=rows, **how, folder=tmp_path / "whole")
    with monkeypatch.context() as fixed:  # the same seed and secret as `begun`
        secret, seed = int((tmp_path / "whole" / FILE).read_text().split()[-1], 16), begun.config.seed
        fixed.setattr("ldpfl.experiments.secret_seed.secrets.randbits", lambda bits: secret if bits == 128 else seed)
        with pytest.raises(KeyboardInterrupt):
            api.run(data=rows, **how, folder=folder, on_round=stop)
    finished = api.run("own", data=rows, **how, folder=folder, resume=True)
    assert finished.config == begun.config
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    configured = api.configure("own", settings={**FEW, "data.path": str(rows)}, target="sick", count=4)
    assert configured.seed != begun.config.seed
    assert api.run(configured, folder=folder, resume=True, baseline=False, progress=False).config == begun.config


@pytest.mark.thorough
def test_only_what_really_differs_keeps_a_run_from_going_on(rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    api.run(data=rows, **HOW, settings=FEW, folder=folder)
    with pytest.raises(ConfigError, match=r"another config, so it cannot be resumed.*training\.learning_rate: 0\.03 -> 0\.5$"):
        api.run("own", data=rows, **HOW, settings={**FEW, "training.learning_rate": 0.5}, folder=folder, resume=True)
    with pytest.raises(ConfigError, match=r"secret_noise: True -> False; seed: another one$"):
        api.run("own", data=rows, **HOW, settings=FEW, seed=7, folder=folder, resume=True)
    pd.read_csv(rows).assign(age=30).to_csv(rows, index=False)
    with pytest.raises(ConfigError, match=r"was begun on .*use the same data"):
        api.run("own", data=rows, **HOW, settings=FEW, folder=folder, resume=True)


def test_a_seed_that_was_given_is_never_replaced_by_a_drawn_one(rows: Path, tmp_path: Path) -> None:
    """Its noise follows from the seed alone: a run without a seed has a secret, and is another run."""
    api.run(data=rows, **HOW, settings=FEW, seed=7, folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"secret_noise: False -> True; seed: another one$"):
        api.run("own", data=rows, **HOW, settings=FEW, folder=tmp_path / "run", resume=True)


def test_runs_of_one_config_share_its_drawn_seed_and_no_secret(rows: Path, tmp_path: Path) -> None:
    config = api.configure("own", settings={**FEW, "data.path": str(rows)}, target="sick", count=4)
    folders = [tmp_path / name for name in ("first", "second")]
    runs = [api.run(config, folder=folder, resume=True, baseline=False, progress=False) for folder in folders]
    assert [run.config.seed for run in runs] == [config.seed] * 2
    assert len({(folder / FILE).read_text() for folder in folders}) == 2
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 2


@pytest.mark.thorough
def test_one_call_on_own_data_starts_a_run_and_goes_on_with_it(rows: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (tmp_path / "new", empty):
        calls = [api.run(data=rows, **HOW, settings=FEW, folder=folder, resume=True) for _ in range(2)]
        assert calls[0].to_dict() == calls[1].to_dict()
    described: tuple[dict[str, Any], ...] = ({"data": rows, "target": "sick", "more_rounds": 1}, {})
    for what in described:  # a mistyped folder starts no run
        with pytest.raises(ConfigError, match="typo holds no run"):
            api.run(**what, folder=tmp_path / "typo", resume=True, progress=False)
    (empty / "config.toml").unlink()
    with pytest.raises(ConfigError, match="holds no run"):
        api.run(data=rows, **HOW, settings=FEW, folder=empty, resume=True)


@pytest.mark.thorough
def test_one_command_on_own_data_starts_a_run_and_goes_on_with_it(rows: Path, tmp_path: Path, ldpfl: CommandLine) -> None:
    columns: list[str | Path] = ["--data", rows, "--target", "sick", "--set", "clients.count=4"]
    options = [*columns, "--set", "training.rounds=2", "--no-baseline", "--no-report"]
    recipes: tuple[list[str], ...] = ([], ["own"])
    for recipe in recipes:
        command = ["run", *recipe, *options, "--out", tmp_path / f"run{len(recipe)}", "--resume", "--json"]
        first, second = ldpfl(*command), ldpfl(*command)
        assert (first.code, second.code) == (0, 0), (first.err, second.err)
        assert first.out == second.out
    assert "typo holds no run" in ldpfl.refused("run", *options, "--out", tmp_path / "typo", "--resume", "--more-rounds", "2")
    assert "typo holds no run" in ldpfl.refused("run", "--out", tmp_path / "typo", "--resume")


@pytest.mark.thorough_except("\\xff")
@pytest.mark.parametrize("content", [b"", b"\xff", b"12\n", b"# a comment\n"])
def test_a_damaged_secret_is_told_of(run: Path, content: bytes) -> None:
    (run / FILE).write_bytes(content)
    with pytest.raises(DataError, match=FILE):
        api.run(folder=run, resume=True, more_rounds=1, progress=False)


@pytest.mark.thorough
def test_a_folder_whose_config_has_the_seed_goes_on(rows: Path, tmp_path: Path) -> None:
    """One of before there were files of secrets, or of a seed that was given; of as many bits as there may be."""
    for seed in (2**127 + 5, 3):
        folder = tmp_path / f"{seed}"
        api.run(data=rows, **HOW, settings=FEW, folder=folder, seed=seed)
        assert not (folder / FILE).exists()
        longer = api.run(folder=folder, resume=True, more_rounds=1, baseline=False, progress=False)
        assert longer.config.seed == seed
        assert len(api.predict(folder, rows)) == 80


def test_a_model_is_looked_over_for_seeds_of_any_length(rows: Path) -> None:
    for seed in (0, 2**63, 2**64 + 1, 2**128 - 1):
        assert api.check(data=rows, target="sick", count=4, settings={**FEW, "seed": seed}).is_fit
    assert api.check(data=rows, target="sick", count=4).is_fit


def test_a_model_and_data_are_looked_over_on_the_command_line(rows: Path, ldpfl: CommandLine) -> None:
    looked = ldpfl("check", "logistic-regression", "--data", rows, "--target", "sick", "--set", "clients.count=4")
    assert "can be trained privately" in looked.out, looked.err
