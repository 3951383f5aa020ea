"""``ldpfl attack gan RUN RUN ...``: every run in its own folder, nothing twice, and one table of them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conftest import CommandLine
from ldpfl.attacks import attack as gan_attack
from ldpfl.experiments import Runner, read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.server import RoundMetrics
from ldpfl.simulation import simulate

pytestmark = pytest.mark.usefixtures("extractors")


class Quiet:
    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...
    def clients_done(self, done: int, total: int) -> None: ...
    def round_done(self, metrics: RoundMetrics) -> None: ...
    def warn(self, message: str) -> None: ...


def made(folder: Path, config_file: Path, data: Path, *overrides: str) -> Path:
    config = read_config(config_file, ["training.rounds=1", "shuffling.channel=direct", "data.private_label=4", *overrides])
    Runner(data, torch.device("cpu"), Quiet(), lambda path, result: None).run(config, RunFolder(folder), baseline=False)
    return folder


class Counted:
    """Counts what is trained and what is attacked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained = self.attacked = 0
        monkeypatch.setattr("ldpfl.experiments.runner.simulate", self._simulate)
        monkeypatch.setattr("ldpfl.attacks.on_run.attack", self._attack)

    def _simulate(self, *arguments: Any) -> Any:
        self.trained += 1
        return simulate(*arguments)

    def _attack(self, *arguments: Any) -> Any:
        self.attacked += 1
        return gan_attack(*arguments)


@pytest.mark.slow
@pytest.mark.thorough
def test_runs_are_compared_and_nothing_is_made_twice(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seeds of one protection, one run with a wider range, and one without protection: two unprotected models in all."""
    variants = [
        ("seed=3",),
        ("seed=4",),
        ("seed=3", "ranges.radius=0.05"),
        ("seed=3", "mechanism.name=none", "mechanism.perturbed=weights"),
    ]
    runs = [made(tmp_path / f"run{number}", config_file, tiny_data, *overrides) for number, overrides in enumerate(variants)]
    command: list[str | Path] = ["--steps", "1", "--seeds", "2", "--data-dir", tiny_data]
    counted = Counted(monkeypatch)
    single = ldpfl("attack", "gan", runs[1], *command)
    assert (single.code, counted.trained, counted.attacked) == (0, 1, 4)

    outcome = ldpfl("attack", "gan", *runs, *command, "--out", "all")
    assert outcome.code == 0, outcome.err
    # The run attacked alone is not attacked again; the run without protection is the baseline of two others.
    assert (counted.trained, counted.attacked) == (2, 4 + 3 * 2)
    for words in ("4 runs, 2 seeds", "ranges.radius 0.02", "ranges.radius 0.05", "unprotected model", "floor", "other classes"):
        assert words in outcome.out, words
    assert f"4/4: {runs[3]}" in outcome.err
    found = json.loads(Path("all/comparison.json").read_text(encoding="utf-8"))
    with Image.open("all/side-by-side.png") as picture:
        assert picture.format == "PNG"

    alone = [json.loads((run / "attacks/gan-4/attack.json").read_text(encoding="utf-8")) for run in runs]
    rows = [{row["kind"]: row for row in result["rows"]} for result in alone]
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in runs]
    lines = {(line["name"].rpartition(" ")[2] if line["kind"] == "protected" else line["kind"]): line for line in found["lines"]}
    expected = {
        "0.02": [rows[0]["protected"], rows[1]["protected"]],
        "0.05": [rows[2]["protected"]],
        "unprotected": [rows[0]["unprotected"], rows[1]["unprotected"]],
        "floor": [rows[0]["floor"]],
        "other classes": [rows[0]["other classes"], rows[1]["other classes"]],
    }
    assert lines.keys() == expected.keys()
    for name, parts in expected.items():
        assert lines[name]["distances"] == [distance for part in parts for distance in part["distances"]]
        assert lines[name]["shares"] == [share for part in parts for share in part["shares"]]
    assert lines["0.02"]["accuracies"] == [results[0]["score"], results[1]["score"]]
    assert lines["0.02"]["runs"] == [str(runs[0]), str(runs[1])]
    assert rows[3]["unprotected"] == rows[0]["unprotected"] == rows[2]["unprotected"]

    again = ldpfl("attack", "gan", *runs, *command, "--out", "all", "--json")
    assert json.loads(again.out) == found
    assert (counted.trained, counted.attacked) == (2, 10)

    # One part lost: that part alone is made again, to the same figures.
    (runs[2] / "attacks/gan-4/images/protected-1.safetensors").unlink()
    assert json.loads(ldpfl("attack", "gan", *runs, *command, "--out", "all", "--json").out) == found
    assert (counted.trained, counted.attacked) == (2, 11)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_attack_takes_the_baseline_that_the_run_was_compared_with(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "run", config_file, tiny_data)
    runner = Runner(tiny_data, torch.device("cpu"), Quiet(), lambda path, result: None)
    result = runner.run(RunFolder(run).config(), RunFolder(run), resume=True, baseline=True).figures
    counted = Counted(monkeypatch)
    outcome = ldpfl("attack", "gan", run, "--steps", "1", "--data-dir", tiny_data, "--json")
    rows = {row["kind"]: row for row in json.loads(outcome.out)["rows"]}
    assert counted.trained == 0
    assert rows["unprotected"]["accuracy"] == result["noise_free_score"]
    assert rows["protected"]["accuracy"] == result["score"]
    assert rows["floor"]["accuracy"] is None
    assert {path.name for path in (run / "attacks/gan-4").iterdir() if path.is_dir()} == {"images"}


def test_runs_that_do_not_belong_in_one_table_are_refused_before_anything_is_made(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    first, second = (made(tmp_path / f"seed{seed}", config_file, tiny_data, f"seed={seed}") for seed in (1, 2))
    other = made(tmp_path / "other", config_file, tiny_data, "data.private_label=5")
    shared = made(tmp_path / "shared", config_file, tiny_data, "data.private_label=none")
    rest: list[str | Path] = ["--steps", "1", "--data-dir", tiny_data]
    data = [*rest, "--out", "all"]
    assert "--out is missing" in ldpfl.refused("attack", "gan", first, second, *rest)
    assert "the same label, got 2: 4; 5" in ldpfl.refused("attack", "gan", first, other, *data)
    assert "--label" in ldpfl.refused("attack", "gan", first, shared, *data)
    assert "same run" in ldpfl.refused("attack", "gan", first, second, first, *data)
    assert "no run" in ldpfl.refused("attack", "gan", first, tmp_path / "nowhere", *data)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.json").write_text("{}", encoding="utf-8")
    for runs in ([sweep], [first, sweep]):
        assert f"give one of its runs, {sweep / 'runs'}/*" in ldpfl.refused("attack", "gan", *runs, *data)
    (second / "result.json").unlink()
    assert "has finished 1 of 1 round: finish it" in ldpfl.refused("attack", "gan", first, second, *data)
    assert not Path("all").exists()
    assert not (first / "attacks").exists()
