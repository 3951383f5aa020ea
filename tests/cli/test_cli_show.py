"""What ``ldpfl show`` says of a folder is true of what made it, and the command that it prints works."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import StopAfterFirst, content
from test_cli_sweep import SHORT

from conftest import CommandLine
from ldpfl import ConfigError, DataError, LayerRanges
from ldpfl.experiments import RunConfig, Runner, read_config
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.privacy import BinaryRelease, Ledger, RoundEvent
from ldpfl.privacy.events import OURS
from ldpfl.report.plots import draw_score_curve
from ldpfl.report.unfinished import figures_so_far
from ldpfl.server import Checkpoint, RoundMetrics, initial_checkpoint

OWN_SETTINGS = """
name = "mine"
[training]
rounds = 2
[mechanism]
epsilon = 2.0
perturbed = "update"
"""


def own_config(*overrides: str) -> RunConfig:
    return parse_config(OWN_SETTINGS, overrides, origin="test")


def after_a_round(origin: str, accuracy: float = nan) -> Checkpoint:
    """What a server has that measures no accuracy."""
    ranges = LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (4,))
    start = initial_checkpoint(torch.zeros(4), ranges, origin)
    metrics = RoundMetrics(1, accuracy, 3, 1, {}, {"weight": 0.1}, {"weight": 1.0}, 0.5)
    return replace(start, state=replace(start.state, round=1), history=(metrics,))


def flower_folder(path: Path, kind: Kind, *, score: float = nan) -> RunFolder:
    """A run of one round as the strategy leaves it."""
    folder = RunFolder(path)
    folder.open(own_config(), resume=True, kind=kind)
    (path / "participation.json").write_text("{}", encoding="utf-8")
    folder.save_round(after_a_round(" on Flower", score))
    return folder


def hint(output: str) -> list[str]:
    """Return the command that the line "... with: " names."""
    (line,) = [line for line in output.splitlines() if "with: ldpfl " in line]
    return shlex.split(line.partition("with: ldpfl ")[2])


def test_an_own_app_on_flower_is_shown_as_one(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "own", Kind.OWN_APP)
    assert folder.kind() is Kind.OWN_APP
    outcome = ldpfl("show", folder.path)
    assert outcome.code == 0
    assert "own app on Flower, 1 round done (2 in its config)" in outcome.out
    assert f"ldpfl ledger {folder.path}" in outcome.out
    for word in ("ldpfl run", "mnist", "cnn", "nan", "accuracy"):
        assert word not in outcome.out.lower(), word
    figures = json.loads(ldpfl("show", folder.path, "--json").out)
    assert (figures["kind"], figures["finished"]) == ("own app on Flower", None)
    assert "whose model your ServerApp saves" in ldpfl.refused("export", folder.path, tmp_path / "out")


def test_an_own_app_that_has_done_all_its_rounds_is_not_gone_on_with(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "own")
    folder.open(own_config("training.rounds=1"), resume=True, kind=Kind.OWN_APP)
    (folder.path / "participation.json").write_text("{}", encoding="utf-8")
    folder.save_round(after_a_round(" on Flower", nan))
    out = ldpfl("show", folder.path).out
    assert "go on" not in out
    assert "finished, unless its app asks for more rounds than its config; what it released: ldpfl ledger" in out


def test_the_config_of_an_own_app_names_no_data_and_model_but_its_own(tmp_path: Path) -> None:
    flower_folder(tmp_path / "own", Kind.OWN_APP)
    text = (tmp_path / "own" / "config.toml").read_text(encoding="utf-8")
    for word in ("mnist", "two-layer-cnn", "[data]", "[model]", "count", "batch_size"):
        assert word not in text, word
    for word in ("epsilon = 2.0", "rounds = 2", "fraction", "radius"):
        assert word in text, word
    told = RunFolder(tmp_path / "told")
    told.open(own_config("data.name=cifar10", "clients.count=7"), resume=False, kind=Kind.OWN_APP)
    text = told.config_path.read_text(encoding="utf-8")
    assert 'name = "cifar10"' in text
    assert "count = 7" in text
    assert "evaluate_on" not in text


@pytest.mark.parametrize("kind", [Kind.OWN_APP, Kind.READY_APP])
def test_a_run_on_flower_goes_on_there_and_not_in_the_simulator(kind: Kind, ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "run", kind)
    before = content(folder.path)
    with pytest.raises(ConfigError, match="simulation cannot resume it"):
        folder.open(own_config(), resume=True, kind=Kind.SIMULATION)
    folder.open(own_config(), resume=True)  # by a strategy that does not say what it is
    assert content(folder.path) == before
    folder.open(own_config(), resume=True, kind=kind)
    with pytest.raises(ConfigError, match=r"training\.rounds: 2 -> 9"):
        folder.open(own_config("training.rounds=9"), resume=True, kind=kind)
    assert (folder.path / "config.toml").read_bytes() == before["config.toml"]


def test_run_refuses_a_folder_of_flower_s_by_its_kind(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "run", Kind.OWN_APP)
    before = content(folder.path)
    settings = ("--set", "data.name=mnist-5k", "--set", "model.name=logistic-regression")
    for more in (settings, (), ("--more-rounds", "1")):  # without settings, data are not looked for
        assert "own app on Flower; a simulation cannot resume it" in ldpfl.refused("run", "--resume", "--out", folder.path, *more)
    assert content(folder.path) == before


@pytest.mark.slow
def test_a_simulation_does_not_go_on_on_flower(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    assert ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "run", "--no-baseline").code == 0
    folder = RunFolder(Path("run"))
    before = content(folder.path)
    with pytest.raises(ConfigError, match="this kind: simulation"):
        folder.open(folder.config(), resume=True, kind=Kind.READY_APP)
    assert content(folder.path) == before
    assert folder.kind() is Kind.SIMULATION


def test_what_an_own_app_measures_is_a_score_and_may_be_anything(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "own", Kind.OWN_APP, score=0.25)
    assert "1 round done (2 in its config); only the app knows its data and model, score 0.25\n" in ldpfl("show", folder.path).out
    assert figures_so_far(folder, folder.config())["metric"] == "score"


def test_the_ready_app_is_gone_on_with_by_flower(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "ready", Kind.READY_APP, score=0.25)
    out = ldpfl("show", folder.path).out
    assert "not finished (ready app on Flower), 1 of 2 rounds done, accuracy 25.00%" in out
    assert "flwr run" in out
    assert "ldpfl run" not in out
    assert 'name = "mnist"' in folder.config_path.read_text(encoding="utf-8")


def test_killed_before_its_config_a_folder_may_be_used_for_either(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "kind.txt").write_text("own app on Flower\n", encoding="utf-8")
    folder.open(own_config(), resume=False, kind=Kind.SIMULATION)
    assert folder.kind() is Kind.SIMULATION
    assert content(folder.path) == {"config.toml": own_config().to_toml().encode()}


def test_a_damaged_kind_is_refused_by_name(ldpfl: CommandLine, tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "run", Kind.READY_APP)
    (folder.path / "kind.txt").write_bytes(b"\xff\x00")
    assert "kind.txt is damaged" in ldpfl.refused("show", folder.path)
    (folder.path / "kind.txt").unlink()
    assert "kind.txt is damaged or missing" in ldpfl.refused("show", folder.path)


def test_metrics_are_json_for_every_reader(tmp_path: Path) -> None:
    folder = flower_folder(tmp_path / "own", Kind.OWN_APP)
    (line,) = folder.metrics_path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["score"] is None
    last = folder.checkpoint()
    assert last is not None
    assert last.history[0].score != last.history[0].score  # what goes on from here goes on as before


def unmeasured(value: Any) -> Any:
    """Return a result as one would have it whose server measures nothing, and whose noise has no bound."""
    layers = {name: {**layer, "noise_std": float("inf")} for name, layer in value["layers"].items()}
    noise = {"norm": float("inf"), "protected_fraction": 1.0, "paper_epsilon": nan, "paper_epsilon_per_round": [nan]}
    return {**value, "score": nan, "score_per_round": [nan, nan, nan], "layers": layers, "noise": noise}


@pytest.mark.slow
def test_a_result_of_before_with_bare_nan_is_shown(ldpfl: CommandLine, config_file: Path, tiny_data: Path) -> None:
    result = json.loads(ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "run", "--no-baseline", "--json").out)
    folder = RunFolder(Path("run"))
    folder.result_path.write_text(json.dumps(unmeasured(result)), encoding="utf-8")
    outcome = ldpfl("show", "run")
    assert outcome.code == 0, outcome.err
    assert "nan" not in outcome.out
    shown = json.loads(ldpfl("show", "run", "--json").out, parse_constant=pytest.fail)
    assert shown["score"] is None
    draw_score_curve(Path("curve.svg"), shown)
    assert "<svg" in Path("curve.svg").read_text(encoding="utf-8")


def test_what_is_shown_of_privacy_is_computed_from_a_ledger_that_fits_the_checkpoint(
    ldpfl: CommandLine, config_file: Path, tiny_data: Path
) -> None:
    result = json.loads(ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "run", "--no-baseline", "--json").out)
    folder, told = RunFolder(Path("run")), result["privacy"]["local"]
    result["privacy"]["local"] = 0.001
    for line in result["privacy"]["guarantees"]:
        line["epsilon"] = 0.001
    folder.result_path.write_text(json.dumps(result), encoding="utf-8")
    again = ("run", "--resume", "--out", "run", "--data-dir", tiny_data, "--no-baseline", "--no-report")
    for command in (("show", "run"), again):
        assert json.loads(ldpfl(*command, "--json").out)["privacy"]["local"] == told
        assert "0.001" not in ldpfl(*command).out
    # A ledger of its own that is well formed, with every round at a thousandth.
    events = folder.ledger().events
    Ledger(tuple(replace(event, release=BinaryRelease("duchi", 1e-3, event.release.units, author=OURS)) for event in events)).save(
        folder.ledger_path
    )
    for command in (("show", "run"), ("ledger", "run")):
        assert "does not belong to this run's checkpoint" in ldpfl.refused(*command)


@pytest.mark.slow
def test_several_runs_on_the_same_data_add_up(ldpfl: CommandLine) -> None:
    small = ("--set", "training.rounds=1", "--set", "clients.count=30", "--json")  # what a shuffler hides of more takes seconds
    one, two = (json.loads(ldpfl("ledger", *["quickstart"] * times, *small).out) for times in (1, 2))
    assert (two["rounds"], two["local_pure"]) == (2 * one["rounds"], 2 * one["local_pure"])
    assert one["shuffled_upper_adaptive"] < two["shuffled_upper_adaptive"] < 2 * one["shuffled_upper_adaptive"]


@pytest.mark.slow
def test_a_result_is_written_as_strict_json(config_file: Path, tiny_data: Path, ldpfl: CommandLine) -> None:
    result = json.loads(ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "run", "--no-baseline", "--json").out)
    folder, last = RunFolder(Path("run")), RunFolder(Path("run")).checkpoint()
    assert last is not None

    class Task:
        @staticmethod
        def module_with(weights: torch.Tensor) -> torch.nn.Module:
            return torch.nn.Linear(1, 1)

    folder.save_result(last, Task, unmeasured(result), folder.model_file())  # type: ignore[arg-type]
    assert json.loads(folder.result_path.read_text(encoding="utf-8"), parse_constant=pytest.fail)["score"] is None


@pytest.fixture
def unfinished(tiny_data: Path, config_file: Path, tmp_path: Path) -> Path:
    """A simulation after its first round, in a folder whose name a shell would split."""
    folder, direct = RunFolder(tmp_path / "my runs; one"), read_config(config_file, ["shuffling.channel=direct"])
    with pytest.raises(KeyboardInterrupt):
        Runner(tiny_data, torch.device("cpu"), StopAfterFirst(), draw_score_curve).run(direct, folder, baseline=False)
    return folder.path


def test_the_command_for_a_simulation_works_as_it_is_printed(
    ldpfl: CommandLine, unfinished: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ldpfl("show", unfinished).out
    assert "1 of 3 rounds done" in out
    assert "if the run was begun with --data-dir, give it again" in out
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    out = ldpfl("show", unfinished).out
    assert "--data-dir" not in out
    outcome = ldpfl(*hint(out))
    assert outcome.code == 0, outcome.err
    assert "go on" not in ldpfl("show", unfinished).out


def test_the_command_for_a_simulation_names_the_device_where_another_would_be_taken(
    ldpfl: CommandLine, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hint(ldpfl("show", unfinished).out)[-2:] == ["--device", "cpu"]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_is_shown_with_the_command_that_goes_on(ldpfl: CommandLine, tiny_data: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "my sweep"
    file.write_text(SHORT, encoding="utf-8")
    settings = ["--set", "shuffling.channel=direct", "--set", 'name="a b"']
    assert ldpfl("sweep", file, "--data-dir", tiny_data, "--out", out, *settings).code == 0
    finished = sorted((out / "runs").rglob("result.json"))
    for path in finished[1:]:
        path.unlink()
    shutil.copytree(finished[0].parent, out / "runs" / "0123456789abcdef")  # a run of an earlier version is not one of this sweep
    shown = ldpfl("show", out)
    assert shown.code == 0
    assert f"tiny: a sweep, 1 of {len(finished)} runs finished" in shown.out
    command = hint(shown.out)
    assert command == ["sweep", "--resume", "--out", str(out)]
    assert ldpfl(*command, "--data-dir", tiny_data).code == 0
    figures = json.loads(ldpfl("show", out, "--json").out)
    assert (figures["finished"], figures["runs_done"]) == (True, len(finished))
    resume = f"ldpfl sweep --resume --out '{out}'"
    assert f"\ngo on with: {resume}\n" in shown.out
    assert f"\nprint its table with: {resume}\n" in ldpfl("show", out).out
    for command in (["ledger"], ["run", "--resume", "--out"], ["audit"]):
        assert f"give one of its runs, {out}/runs/*" in ldpfl.refused(*command, out)


def test_a_run_that_a_sweep_gave_up_says_why_and_offers_no_command(ldpfl: CommandLine, unfinished: Path) -> None:
    (unfinished / "stopped.txt").write_text("round 2 stopped: NaN", encoding="utf-8")
    out = ldpfl("show", unfinished).out
    assert "given up: round 2 stopped: NaN" in out
    assert "ldpfl run" not in out
    assert json.loads(ldpfl("show", unfinished, "--json").out)["stopped"] == "round 2 stopped: NaN"


DAMAGES = {
    "half": lambda whole: whole[: len(whole) // 2].rstrip()[:-1],  # within a line: a config that ends with a line is one
    "empty": lambda whole: b"",
    "garbage": lambda whole: bytes(range(128, 256)) * 20,
    "nested": lambda whole: b"[" * 100_000,
    "a folder": None,
}
FILES = ("checkpoint.safetensors", "config.toml", "ledger.json", "metrics.jsonl", "result.json", ".lock")
FILES_OF_OTHERS = ("participation.json", "stopped.txt")


@pytest.mark.slow
@pytest.mark.thorough
def test_whatever_is_damaged_is_one_line(ldpfl: CommandLine, tiny_data: Path, unfinished: Path, config_file: Path) -> None:
    """In a finished and an unfinished run; and what is left of a config may not be taken for a run of the defaults."""
    shared = ["--data-dir", str(tiny_data), "--no-baseline", "--json"]
    assert ldpfl("run", config_file, *shared, "--out", "finished", "--set", "shuffling.channel=direct").code == 0
    commands = (["show"], ["show", "--json"], ["ledger"], ["run", "--resume", *shared, "--out"])
    for run, every in ((unfinished, 1), (Path("finished"), 3)):  # the same files are read the same way there: each third will do
        whole = content(run)
        for name, damage, command in list(itertools.product(FILES + FILES_OF_OTHERS, DAMAGES, commands))[::every]:
            spoil(run / name, damage)
            outcome = ldpfl(*command, run)
            where = f"{name}, {damage}, {command}: {outcome.err}"
            assert "unexpected" not in outcome.err, where
            assert outcome.code == 0 or (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), where
            if name == "config.toml":
                assert (outcome.code, "config.toml" in outcome.err) == (2, True), where
            restore(run, whole)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(ldpfl: CommandLine, unfinished: Path) -> None:
    (unfinished / "checkpoint.safetensors").unlink()
    os.mkfifo(unfinished / "checkpoint.safetensors")
    assert "no regular file" in ldpfl.refused("show", unfinished)


@pytest.mark.slow
@pytest.mark.thorough
def test_figures_of_another_kind_are_one_line(ldpfl: CommandLine, tiny_data: Path, config_file: Path, tmp_path: Path) -> None:
    """Each figure that is read is left out, or something else, in turn: no command stumbles over it."""
    run = tmp_path / "run"
    assert ldpfl("run", config_file, "--data-dir", tiny_data, "--no-baseline", "--out", run).code == 0
    figures = json.loads((run / "result.json").read_text())
    commands: list[list[str | Path]] = [["show", run], ["certify", run, "--out", tmp_path / "x.json"], ["report", run]]
    wrongs: tuple[Any, ...] = (None, {"a": {}}, "x", 1e400)
    for number, (name, wrong) in enumerate(itertools.product(figures, wrongs)):
        kept = {key: value for key, value in figures.items() if key != name}
        (run / "result.json").write_text(json.dumps(kept if wrong is None else {**kept, name: wrong}))
        outcome = ldpfl(*commands[number % 3])
        assert "unexpected" not in outcome.err, (name, wrong, outcome.err)
        assert outcome.code in (0, 2), (name, wrong, outcome.err)
    (run / "result.json").write_text(json.dumps({**figures, "rounds": 1, "score_per_round": [0.5, 0.6]}))
    assert "score for each of 1 rounds" in ldpfl.refused("report", run)


def spoil(path: Path, damage: str) -> None:
    change, whole = DAMAGES[damage], path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if change is None:
        path.mkdir()
    else:
        path.write_bytes(change(whole))


def restore(run: Path, whole: dict[str, bytes]) -> None:
    for path in run.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    for name, text in whole.items():
        (run / name).write_bytes(text)


@pytest.mark.slow
def test_a_damaged_sweep_is_one_line(ldpfl: CommandLine, tiny_data: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "s"
    file.write_text(SHORT, encoding="utf-8")
    sweep: list[str | Path] = ["sweep", file, "--data-dir", tiny_data, "--out", out, "--set", "shuffling.channel=direct"]
    assert ldpfl(*sweep).code == 0
    whole = content(out)
    for damage in DAMAGES:
        spoil(out / "sweep.json", damage)
        assert "sweep" in ldpfl.refused("show", out)
        assert str(out) in ldpfl.refused(*sweep)
        (out / "sweep.json").rmdir() if damage == "a folder" else None
        (out / "sweep.json").write_bytes(whole["sweep.json"])


def test_a_sweep_whose_reason_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "stopped.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"stopped\.txt is damaged"):
        RunFolder(tmp_path).stopped()


def test_nothing_that_a_foreign_sweep_names_is_run_or_opened(ldpfl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("told.py").write_text("raise SystemExit('run')\n", encoding="utf-8")
    foreign = {"name": "theirs", "recipe": "own", "settings": ["data.name=told.py:make", "privacy.target_epsilon=1.0"]}
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({**SweepConfig.model_validate(foreign).model_dump(), "overrides": []}))
    (folder / "runs" / "\x1b]0;mine\x07").mkdir(parents=True)
    outcome = ldpfl("show", folder)
    assert "0 of 1 run finished" in outcome.out
    assert "\x1b" not in outcome.out
    assert "told" not in sys.modules


def test_nothing_of_a_foreign_folder_steers_the_terminal(tiny_data: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """Its config's name, why a sweep gave it up, and what its ledger says that a paper claims."""
    code = "\x1b]0;mine\x07"
    folder = RunFolder(tmp_path / "run")
    folder.open(own_config(), resume=True)
    folder.stopped_path.write_text(f"round 1 {code}", encoding="utf-8")
    release = BinaryRelease("duchi", 1.0, 1, claim=f"it says {code}", author=OURS)
    ledger = tmp_path / "ledger.json"
    ledger.write_text(Ledger((RoundEvent(1, release, 5, 5, 1),)).to_json(), encoding="utf-8")
    for outcome in (ldpfl("show", tmp_path / "run"), ldpfl("ledger", ledger)):
        assert "\x1b" not in outcome.out + outcome.err
        assert "x1b]0;mine" in outcome.out + outcome.err
    markup = "it [bold]says[/bold] [/nope] :smile:"
    ledger.write_text(
        Ledger((RoundEvent(1, BinaryRelease("duchi", 1.0, 1, claim=markup, author=OURS), 5, 5, 1),)).to_json(), encoding="utf-8"
    )
    assert markup in " ".join(ldpfl("ledger", ledger).out.split())
    config = folder.config_path.read_text(encoding="utf-8")
    folder.config_path.write_text(config.replace('name = "', 'name = "\\u001b]0;mine', 1), encoding="utf-8")
    assert "not printable" in ldpfl.refused("show", tmp_path / "run")


def without(figures: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in figures.items() if key != name}


@pytest.mark.slow
@pytest.mark.thorough
def test_figures_that_belong_together_and_are_not_there_are_one_line(ldpfl: CommandLine, tmp_path: Path) -> None:
    """Any figure of a run on two classes is left out in turn, also inside others: no command stumbles over it."""
    run, rows = tmp_path / "run", tmp_path / "rows.csv"
    rows.write_text("age,sick\n" + "".join(f"{20 + place % 50},{'no' if place % 4 else 'yes'}\n" for place in range(80)))
    options: list[str | Path] = ["--data", rows, "--target", "sick", "--set", "clients.count=4", "--set", "training.rounds=1"]
    ended = ldpfl("run", *options, "--no-report", "--out", run)
    assert ended.code == 0, ended.err
    result = run / "result.json"
    figures = json.loads(result.read_text())
    assert figures["event"] == "yes"
    scores, risks = figures["scores"], figures["risks"]
    damaged: dict[str, dict[str, Any]] = {
        "scores has 'accuracy of the commonest class', but 'accuracy' is missing": {"scores": without(scores, "accuracy")},
        "event is set, but test_rows is missing": {},
        "risks: Value error, expected 1 edges for 0 counts of rows": {"risks": {**risks, "rows": []}},
    }
    for said, changes in damaged.items():
        result.write_text(json.dumps({**figures, **changes} if changes else without(figures, "test_rows")))
        for command in ("report", "show"):
            line = ldpfl.refused(command, run)
            assert "result.json is damaged" in line
            assert said in line
    for name, value in figures.items():
        for inner_name in value if isinstance(value, dict) else ():
            result.write_text(json.dumps({**figures, name: without(value, inner_name)}))
            outcome = ldpfl("show", run)
            assert "unexpected" not in outcome.err, (name, inner_name, outcome.err)
            assert outcome.code in (0, 2), (name, inner_name, outcome.err)


@pytest.mark.slow
def test_nothing_of_a_foreign_result_steers_the_terminal(config_file: Path, tiny_data: Path, ldpfl: CommandLine, tmp_path: Path) -> None:
    """Every text in it, names included; and square brackets are no markup."""
    folder = tmp_path / "run"
    ldpfl("run", config_file, "--data-dir", tiny_data, "--set", "training.rounds=1", "--no-baseline", "--out", folder)

    def changed(figures: Any) -> Any:
        match figures:
            case str() if figures != "accuracy":
                return f"{figures}[/x]\x1b]0;mine"
            case dict():
                return {key: value if key in ("privacy", "metric") else changed(value) for key, value in figures.items()}
            case list():
                return [changed(value) for value in figures]
        return figures

    result = json.loads((folder / "result.json").read_text())
    layers = {f"{name}[/x]\x1b]0;mine": layer for name, layer in result["layers"].items()}
    (folder / "result.json").write_text(json.dumps({**changed(result), "layers": layers}))
    outcome = ldpfl("show", folder)
    assert "\x1b" not in outcome.out + outcome.err
    assert outcome.out.count("[/x]") > 4
