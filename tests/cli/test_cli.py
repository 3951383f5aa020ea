"""The command line: two commands to a result, and one line for every mistake, with nothing written over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import TINY_TOML, CommandLine, digits, write_split
from ldpfl import __version__
from ldpfl.experiments import Runner, read_config, recipe_names
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.plots import draw_score_curve
from ldpfl.server import RoundMetrics


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class StopAfterFirst:
    def warn(self, message: str) -> None: ...
    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None: ...

    def clients_done(self, done: int, total: int) -> None: ...

    def round_done(self, metrics: RoundMetrics) -> None:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(tiny_data: Path, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted after its first round."""
    folder = RunFolder(tmp_path_factory.mktemp("interrupted") / "run")
    runner = Runner(tiny_data, torch.device("cpu"), StopAfterFirst(), draw_score_curve)
    with pytest.raises(KeyboardInterrupt):
        runner.run(read_config(config_file), folder, baseline=False)
    return folder.path


@pytest.fixture
def unfinished(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(interrupted, tmp_path / "unfinished")


@pytest.mark.slow
def test_tensorboard_has_each_round_also_of_a_run_that_goes_on(
    ldpfl: CommandLine, unfinished: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = ldpfl("run", "--resume", "--out", unfinished, "--data-dir", tiny_data, "--no-baseline", "--track", "tensorboard")
    assert outcome.code == 0, outcome.err
    board = EventAccumulator(str(unfinished / "tensorboard")).Reload()
    last = RunFolder(unfinished).checkpoint()
    assert last is not None
    history = last.history
    for name, own in {
        "accuracy": [metrics.score for metrics in history],
        "clients": [float(metrics.clients) for metrics in history],
        "noise std/1.weight": [metrics.noise_std["1.weight"] for metrics in history],
    }.items():
        written = {event.step: event.value for event in board.Scalars(name)}
        assert written == pytest.approx({1: own[0], 2: own[1], 3: own[2]}), name  # the first round was made without it
    assert "privacy/text_summary" in board.Tags()["tensors"]

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused = ldpfl("run", "quickstart", "--track", "tensorboard", "--out", "nothing")
    assert (refused.code, "pip install 'ldpfl[tensorboard]'" in refused.err, Path("nothing").exists()) == (2, True, False)


@pytest.mark.slow
@pytest.mark.draws
def test_a_run_prints_tables_and_writes_its_folder(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    outcome = ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "result", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    result = json.loads(Path("result/result.json").read_text(encoding="utf-8"))
    assert f"{result['score']:.2%}" in outcome.out
    assert f"{result['noise_free_score']:.2%}" in outcome.out
    for word in ("noise-free baseline", "502 bytes", "clipped", "noise std", "1.weight", "1.bias", "time", "result"):
        assert word in outcome.out, word
    for word in ("epsilon at delta 1e-05", "paper's claim", "one weight, one round", "one client, whole run", "24,060 pure", "shuffler"):
        assert word in outcome.out, word
    assert "round 3/3" in outcome.err


@pytest.mark.slow
def test_json_is_all_that_stdout_gets(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    outcome = ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "result", "--json", "--no-baseline")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert result == json.loads(Path("result/result.json").read_text(encoding="utf-8"))
    assert set(result) >= {"metric", "score", "scores", "score_per_round", "epsilon_per_unit", "clients", "rounds", "weights"}
    assert set(result) >= {"uplink_bytes_per_client_round", "seconds", "seed", "versions"}
    assert result["noise_free_score"] is None


@pytest.mark.thorough
def test_settings_and_seed_reach_the_run(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    arguments = ["--set", "training.rounds=1", "--set", "mechanism.epsilon=4", "--seed", "11", "--no-baseline"]
    outcome = ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "result", *arguments, "--json")
    result = json.loads(outcome.out)
    assert (result["rounds"], result["epsilon_per_unit"], result["seed"]) == (1, 4.0, 11)
    assert read_config(Path("result/config.toml")).seed == 11


@pytest.mark.slow
def test_the_environment_names_the_data_folder(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    assert ldpfl("run", config_file, "--out", "result", "--no-baseline", "--json").code == 0


@pytest.mark.slow
def test_without_out_each_run_gets_a_folder_of_its_own(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    assert ldpfl("run", config_file, "--data-dir", tiny_data, "--no-baseline").code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("tiny-seed3-")
    assert (folder / "result.json").exists()


@pytest.mark.slow
def test_a_recipe_runs_by_name_on_the_bundled_digits_and_learns(ldpfl: CommandLine) -> None:
    """The quickstart, cut to a few seconds: half of the digits right is a low bar, chance is a tenth."""
    cut = ["model.name=logistic-regression", "training.rounds=2", "training.epochs=2", "clients.count=40", "shuffling.channel=direct"]
    outcome = ldpfl("run", *(part for setting in cut for part in ("--set", setting)), "--out", "quick", "--no-baseline", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["name"] == "quickstart"
    assert result["score"] > 0.5


BAD_SETTINGS = {
    "mechanism.epsilon=0": "mechanism.epsilon",
    "mechanism.epsilon=-1": "mechanism.epsilon",
    "mechanism.epsilon=nan": "mechanism.epsilon",
    "mechanism.epsilon=inf": "mechanism.epsilon",
    "mechanism.epsilon='1'": "mechanism.epsilon",
    "ranges.radius=0": "ranges.radius",
    "ranges.radius=-0.1": "ranges.radius",
    "clients.count=201": "clients.count is 201, but the training data has only 200 samples",
    "mechanism.epsilonn=1": "did you mean 'mechanism.epsilon'",
    "training.rouns=1": "did you mean 'training.rounds'",
    "data.name=minst": "did you mean 'mnist'",
    "data.name=cifar10": "cifar10",
    "model.name=two-layer-ccn": "two-layer-cnn",
    "model.name=nowhere.at.all:Model": "nowhere.at.all",
    "seed": "key=value",
}


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "folder with a run"])
@pytest.mark.parametrize(("setting", "named"), BAD_SETTINGS.items())
@pytest.mark.slow
def test_a_bad_setting_gets_one_line_and_writes_nothing(
    setting: str, named: str, existing: bool, ldpfl: CommandLine, config_file: Path, tiny_data: Path, unfinished: Path, tmp_path: Path
) -> None:
    out = unfinished if existing else tmp_path / "new"
    before = content(unfinished)
    resume = ["--resume"] if existing else []
    line = ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", out, "--set", setting, *resume)
    assert named in line
    assert content(unfinished) == before
    assert out.exists() == existing


def test_a_missing_data_folder_is_named(ldpfl: CommandLine, config_file: Path, unfinished: Path) -> None:
    before = content(unfinished)
    assert "no-data-here" in ldpfl.refused("run", config_file, "--data-dir", "no-data-here", "--out", "new")
    assert "no-data-here" in ldpfl.refused("run", "--data-dir", "no-data-here", "--out", unfinished, "--resume")
    assert not Path("new").exists()
    assert content(unfinished) == before


def test_a_corrupt_data_file_is_named(ldpfl: CommandLine, config_file: Path, tmp_path: Path, unfinished: Path) -> None:
    write_split(tmp_path / "bad", "mnist", "test", *digits(5, seed=2))
    path = write_split(tmp_path / "bad", "mnist", "train", *digits(20, seed=1))
    path.write_bytes(path.read_bytes()[:-50])
    before = content(unfinished)
    assert str(path) in ldpfl.refused("run", config_file, "--data-dir", tmp_path / "bad", "--out", "new")
    assert str(path) in ldpfl.refused("run", "--data-dir", tmp_path / "bad", "--out", unfinished, "--resume")
    assert not Path("new").exists()
    assert content(unfinished) == before


def test_a_missing_or_broken_config_file_is_named(ldpfl: CommandLine) -> None:
    assert "missing.toml" in ldpfl.refused("run", "missing.toml", "--out", "new")
    Path("broken.toml").write_text("[[[", encoding="utf-8")
    assert "broken.toml" in ldpfl.refused("run", "broken.toml", "--out", "new")
    assert "'ldp-fl/mnist'" in ldpfl.refused("run", "ldp-fl/mnits", "--out", "new")
    assert not Path("new").exists()


def test_a_resume_with_another_config_shows_the_difference(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, unfinished: Path
) -> None:
    before = content(unfinished)
    shared: list[str | Path] = ["--data-dir", tiny_data, "--out", unfinished, "--resume"]
    assert "mechanism.epsilon: 2.0 -> 9.0" in ldpfl.refused("run", config_file, *shared, "--set", "mechanism.epsilon=9")
    assert "seed: 3 -> 4" in ldpfl.refused("run", *shared, "--seed", "4")
    assert content(unfinished) == before


def test_a_folder_that_holds_another_run_or_other_things_is_refused(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, unfinished: Path
) -> None:
    before = content(unfinished)
    assert str(unfinished) in ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", unfinished)
    assert content(unfinished) == before
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine", encoding="utf-8")
    assert "mine" in ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", "mine")
    assert content(Path("mine")) == {"notes.txt": b"mine"}


@pytest.mark.parametrize(("typed", "meant"), [("rnu", "run"), ("reportt", "report"), ("ledgr", "ledger")])
def test_a_command_that_is_not_there_is_answered_with_the_nearest(typed: str, meant: str, ldpfl: CommandLine) -> None:
    assert f"no such command '{typed}': did you mean '{meant}'?" in ldpfl.refused(typed, "--help")


def test_resume_needs_a_run(ldpfl: CommandLine) -> None:
    assert "--out" in ldpfl.refused("run", "--resume")
    assert "no run" in ldpfl.refused("run", "--resume", "--out", "nothing")
    assert not Path("nothing").exists()


@pytest.mark.slow
def test_resume_of_a_recipe_whose_run_never_began_begins_it(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    """Killed before its config was in place, a run is gone on with by the same command as at any other moment."""
    arguments: list[str | Path] = [config_file, "--data-dir", tiny_data, "--no-baseline"]
    assert ldpfl("run", *arguments, "--resume", "--out", "late").code == 0
    assert ldpfl("run", *arguments, "--out", "whole").code == 0
    for name in ("model.safetensors", "metrics.jsonl", "config.toml", "curve.svg"):
        assert Path("late", name).read_bytes() == Path("whole", name).read_bytes()


def test_a_damaged_checkpoint_is_named_and_left_as_it_is(ldpfl: CommandLine, tiny_data: Path, unfinished: Path) -> None:
    checkpoint = unfinished / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-7])
    before = content(unfinished)
    assert "checkpoint.safetensors" in ldpfl.refused("run", "--resume", "--out", unfinished, "--data-dir", tiny_data)
    assert "checkpoint.safetensors" in ldpfl.refused("show", unfinished)
    assert content(unfinished) == before


def test_cuda_that_is_not_there_is_refused(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = content(unfinished)
    assert "CUDA" in ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", "new", "--device", "cuda")
    assert "CUDA" in ldpfl.refused("run", "--resume", "--data-dir", tiny_data, "--out", unfinished, "--device", "cuda")
    assert "tpu" in ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", "new", "--device", "tpu")
    assert not Path("new").exists()
    assert content(unfinished) == before


def test_nan_in_a_client_stops_the_run_by_round(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    arguments = ["--set", "training.learning_rate=1e30", "--set", "model.name=two-layer-cnn", "--no-baseline"]
    line = ldpfl.refused("run", config_file, "--data-dir", tiny_data, "--out", "sick", *arguments)
    assert "round 1" in line
    assert "NaN" in line
    assert not Path("sick/result.json").exists()
    # The folder stands as it was before the round: trying again meets the same NaN, and nothing else.
    assert "round 1" in ldpfl.refused("run", "--data-dir", tiny_data, "--out", "sick", "--resume", "--no-baseline")


@pytest.mark.parametrize("arguments", [["run", "--seed=-1"], ["run", "--seed", "x"], ["run", "--sed", "1"], ["walk"]])
def test_a_flag_that_is_no_flag_exits_with_2(arguments: list[str], ldpfl: CommandLine) -> None:
    outcome = ldpfl(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert arguments[-1].removeprefix("--seed=") in outcome.err or arguments[1] in outcome.err
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_a_run_that_goes_on_has_no_baseline_if_it_was_begun_without_one(ldpfl: CommandLine, tiny_data: Path, unfinished: Path) -> None:
    """It was begun so, and a person who resumes it has no reason to say so again; who says --baseline gets it."""
    command = ("run", "--resume", "--out", unfinished, "--data-dir", tiny_data, "--json")
    scores = [json.loads(ldpfl(*command, *more).out)["noise_free_score"] for more in ((), (), ("--baseline",), ())]
    assert scores[:2] == [None, None]
    assert scores[2] is not None
    assert scores[2] == scores[3]


@pytest.mark.slow
def test_resume_alone_goes_on_with_the_stored_config(ldpfl: CommandLine, tiny_data: Path, unfinished: Path) -> None:
    outcome = ldpfl("run", "--resume", "--out", unfinished, "--data-dir", tiny_data, "--no-baseline", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["rounds"] == 3
    finished = content(unfinished)
    again = ldpfl("run", "--resume", "--out", unfinished, "--data-dir", tiny_data, "--no-baseline", "--json")
    assert json.loads(again.out) == json.loads(outcome.out)
    assert content(unfinished) == finished


def test_show_tells_how_far_an_unfinished_run_got(ldpfl: CommandLine, unfinished: Path) -> None:
    before = content(unfinished)
    outcome = ldpfl("show", unfinished)
    assert outcome.code == 0
    assert "1 of 3 rounds done" in outcome.out
    assert f"--resume --out {unfinished}" in outcome.out
    figures = json.loads(ldpfl("show", unfinished, "--json").out)
    assert (figures["finished"], figures["rounds_done"], figures["rounds"]) == (False, 1, 3)
    assert content(unfinished) == before


@pytest.mark.slow
def test_show_prints_a_finished_run_as_the_run_itself_did(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    ran = ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "result", "--no-baseline")
    shown = ldpfl("show", "result").out
    assert shown.startswith(ran.out)
    assert shown.removeprefix(ran.out).strip().startswith("For a paper or an ethics board:")
    assert "24,060 pure" in ran.out  # the guarantees are part of it
    assert json.loads(ldpfl("show", "result", "--json").out) == json.loads(Path("result/result.json").read_text(encoding="utf-8"))


def test_show_of_no_run_is_refused(ldpfl: CommandLine, config_file: Path) -> None:
    assert "nowhere" in ldpfl.refused("show", "nowhere")
    assert "no run" in ldpfl.refused("show", ".")
    assert "no run" in ldpfl.refused("show", config_file)
    assert list(Path().iterdir()) == []


def test_recipes_are_listed_with_the_default_marked(ldpfl: CommandLine) -> None:
    outcome = ldpfl("recipes")
    assert outcome.code == 0
    assert all(name in outcome.out for name in recipe_names())
    assert "quickstart (default)" in outcome.out


def test_version(ldpfl: CommandLine) -> None:
    outcome = ldpfl("--version")
    assert (outcome.code, outcome.out) == (0, f"ldpfl {__version__}\n")


@pytest.mark.parametrize(
    ("argument", "code", "out"), [("--version", 0, f"ldpfl {__version__}\n"), ("walk", 2, "")], ids=["a word", "a mistake"]
)
@pytest.mark.slow
def test_the_module_itself_answers_as_the_command_does(argument: str, code: int, out: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ldpfl", argument], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, out)
    assert (done.stderr == "") == (code == 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_module_itself_runs_and_refuses_to_write_over_its_run(tmp_path: Path, tiny_data: Path, ldpfl: CommandLine) -> None:
    """The whole program as a person starts it; and with the same folder again."""
    (tmp_path / "tiny.toml").write_text(TINY_TOML, encoding="utf-8")
    command = [sys.executable, "-m", "ldpfl", "run", "tiny.toml", "--data-dir", str(tiny_data), "--no-baseline", "--json"]
    done = subprocess.run([*command, "--out", "one"], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "tiny"
    assert done.stderr == ""
    before = content(tmp_path / "one")
    refused = ldpfl("run", tmp_path / "tiny.toml", "--data-dir", tiny_data, "--no-baseline", "--json", "--out", tmp_path / "one")
    assert refused.code == 2
    assert refused.out == ""
    assert len(refused.err.splitlines()) == 1
    assert content(tmp_path / "one") == before


def test_an_unforeseen_error_repeats_no_value(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks inside, neither the message nor the frames' variables may show private data."""

    def broken(*arguments: object, **named: object) -> None:
        private = "SECRET-0.1234"
        raise RuntimeError(private)

    monkeypatch.setattr("ldpfl.simulation.rounds.mix", broken)
    outcome = ldpfl("run", config_file, "--data-dir", tiny_data, "--no-baseline")
    assert outcome.code == 1
    assert "SECRET" not in outcome.out + outcome.err
    assert "unexpected RuntimeError" in outcome.err
    assert outcome.err.count("ldpfl: ") == 1
