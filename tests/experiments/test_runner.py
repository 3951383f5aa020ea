"""A run ends in the same bytes, whatever happened on the way, and its noise-free baseline is trained once."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import TINY_TOML
from ldpfl import ParameterLayout, models
from ldpfl.cli import main
from ldpfl.errors import ConfigError, DataError, PrivacyError
from ldpfl.experiments import RunConfig, Runner, figures as figures_module, read_config, runner as runner_module
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.public_figures import public_caveats
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy import accounting as statement_module
from ldpfl.privacy.accounting import account
from ldpfl.report.plots import draw_score_curve
from ldpfl.server import RoundMetrics
from ldpfl.simulation import BatchSchedule, VectorizedTrainer
from ldpfl.util.files import write_text

REPRODUCED = ("model.safetensors", "metrics.jsonl", "ledger.json", "config.toml", "curve.svg")

KEYS = {
    "metric",
    "score",
    "scores",
    "score_per_round",
    "epsilon_per_unit",
    "clients",
    "rounds",
    "weights",
    "uplink_bytes_per_client_round",
    "seconds",
    "seed",
    "versions",
    "privacy",
}


class Watch:
    """Notes what is trained; raises what it was given after the round it was given."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.labels: list[str] = []
        self.warnings: list[str] = []
        self.rounds: list[int] = []
        self._stop_after = stop_after

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self.labels.append(label)

    def clients_done(self, done: int, total: int) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def round_done(self, metrics: RoundMetrics) -> None:
        self.rounds.append(metrics.round)
        if metrics.round == self._stop_after:
            raise KeyboardInterrupt


def config_of(*overrides: str) -> RunConfig:
    """Reports go to the server directly unless a test says otherwise: that is accounted at once, a shuffler takes seconds."""
    return parse_config(TINY_TOML, ["shuffling.channel=direct", *overrides], origin="test")


def no_curve(path: Path, result: dict[str, Any]) -> None:
    """Stands in for the plot where a test is not about it."""


def written_curve(path: Path, result: dict[str, Any]) -> None:
    """Writes what would be drawn as the plot is written, where a test is about files and not about pictures."""
    write_text(path, json.dumps([result["score_per_round"], result["noise_free_score_per_round"]]))


def runner(data: Path, watch: Watch | None = None, *, curve: Callable[[Path, dict[str, Any]], None] = no_curve) -> Runner:
    return Runner(data, torch.device("cpu"), watch or Watch(), curve)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in REPRODUCED if (folder / name).exists()}


@pytest.mark.slow
def test_a_run_leaves_all_its_files(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result = runner(tiny_data, curve=draw_score_curve).run(config_of(), folder).figures
    names = {path.name for path in folder.path.iterdir() if not path.name.startswith(".")}
    data = {"config.toml", "checkpoint.safetensors", "checkpoint.jsonl", "metrics.jsonl", "ledger.json"}
    assert names == data | {"result.json", "model.safetensors", "model.json", "curve.svg"}
    assert json.loads(folder.result_path.read_text(encoding="utf-8")) == result
    assert folder.curve_path.read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_result_has_the_promised_keys_with_true_values(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result = runner(tiny_data).run(config_of("shuffling.channel=ideal-shuffler"), folder, baseline=False).figures
    assert set(result) >= KEYS
    assert result["weights"] == 20 * 20 * 10 + 10
    assert result["uplink_bytes_per_client_round"] == -(-4010 // 8)
    assert (result["clients"], result["rounds"], result["seed"], result["epsilon_per_unit"]) == (8, 3, 3, 2.0)
    assert len(result["score_per_round"]) == 3
    assert result["score"] == result["score_per_round"][-1]
    assert result["privacy"]["local_pure"] == pytest.approx(2.0 * 4010 * 3)
    assert result["privacy"]["paper_claim"] == 2.0
    assert 0 < result["privacy"]["shuffled_upper"] <= result["privacy"]["local"] < result["privacy"]["local_pure"]
    kept = json.loads(folder.ledger_path.read_text(encoding="utf-8"))
    assert kept["accounted"] == result["privacy"]  # the same figures in both files
    assert len(kept["events"]) == 3
    assert {"ldpfl", "torch", "python"} <= set(result["versions"])
    assert result["seconds"] > 0


def test_metrics_have_a_line_a_round(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result = runner(tiny_data).run(config_of(), folder, baseline=False).figures
    lines = [json.loads(line) for line in folder.metrics_path.read_text(encoding="utf-8").splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [line["score"] for line in lines] == result["score_per_round"]


def test_the_saved_model_can_be_loaded_and_has_the_stated_accuracy(tiny_data: Path, tmp_path: Path) -> None:
    from ldpfl.data import load
    from ldpfl.data.samples import normalise

    folder = RunFolder(tmp_path / "run")
    result = runner(tiny_data).run(config_of(), folder, baseline=False).figures
    task = load("mnist", tiny_data)
    module = models.create("logistic-regression", task.shape, task.outputs, seed=0)
    module.load_state_dict(load_file(folder.model_path))
    predicted = module(normalise(task.test.tensor, task.mean, task.std)).argmax(dim=1)
    assert float((predicted == task.test.targets).float().mean()) == pytest.approx(result["score"])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_written_config_runs_again_to_the_same_bytes(tiny_data: Path, tmp_path: Path) -> None:
    runner(tiny_data, curve=draw_score_curve).run(config_of(), RunFolder(tmp_path / "one"), baseline=False)
    config = read_config(tmp_path / "one" / "config.toml")
    runner(tiny_data, curve=draw_score_curve).run(config, RunFolder(tmp_path / "two"), baseline=False)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert len(files(tmp_path / "one")) == 5


def test_another_seed_ends_in_another_model(tiny_data: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        runner(tiny_data).run(config_of(f"seed={seed}"), RunFolder(tmp_path / str(seed)), baseline=False)
    assert (tmp_path / "1" / "model.safetensors").read_bytes() != (tmp_path / "2" / "model.safetensors").read_bytes()


def test_an_interrupted_run_goes_on_where_it_stopped(tiny_data: Path, tmp_path: Path) -> None:
    runner(tiny_data, curve=written_curve).run(config_of(), RunFolder(tmp_path / "whole"), baseline=False)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runner(tiny_data, Watch(stop_after=2)).run(config_of(), folder, baseline=False)
    assert folder.result() is None
    watch = Watch()
    runner(tiny_data, watch, curve=written_curve).run(config_of(), folder, resume=True, baseline=False)
    assert watch.rounds == [3]
    assert files(folder.path) == files(tmp_path / "whole")


def test_resuming_a_finished_run_returns_its_result_and_trains_nothing(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    result = runner(tiny_data).run(config_of(), folder, baseline=False).figures
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    watch = Watch()
    assert runner(tiny_data, watch).run(config_of(), folder, resume=True, baseline=False).figures == result
    assert watch.labels == []
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.slow
@pytest.mark.thorough_for("1")
def test_a_crash_at_any_write_can_be_resumed_from(every: int, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a picture of the disk before every file is put in place, which is what kill -9 leaves, and go on from each, or each fifth."""
    home, pictures = tmp_path / "home", tmp_path / "pictures"
    config = config_of("training.rounds=2")
    original = os.replace
    sites: list[str] = []

    def photographed(source: Path, target: Path) -> None:
        if Path(target).is_relative_to(home):
            sites.append(f"{len(sites):02d}-{Path(target).name}")
            shutil.copytree(home, pictures / sites[-1])
        original(source, target)

    monkeypatch.setenv("LDPFL_CACHE_DIR", str(home / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", photographed)
        result = runner(tiny_data, curve=written_curve).run(config, RunFolder(home / "run")).figures
    expected = files(home / "run")
    assert len(sites) >= 15

    broken: dict[str, str] = {}
    for site in sites[::every]:
        monkeypatch.setenv("LDPFL_CACHE_DIR", str(pictures / site / "cache"))
        folder = RunFolder(pictures / site / "run")
        try:
            again = runner(tiny_data, curve=written_curve).run(config, folder, resume=folder.config_path.exists()).figures
        except (ConfigError, DataError) as error:
            broken[site] = str(error)
            continue
        if files(folder.path) != expected or again["noise_free_score_per_round"] != result["noise_free_score_per_round"]:
            broken[site] = "other bytes"
        elif list(folder.path.glob(".*.toml.*")) + list(folder.path.glob(".*.safetensors.*")):
            broken[site] = "half-written files were left behind"
    assert broken == {}


def test_nan_in_a_client_stops_the_round_and_the_run_can_be_resumed(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner(tiny_data).run(config_of(), RunFolder(tmp_path / "whole"), baseline=False)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runner(tiny_data, Watch(stop_after=1)).run(config_of(), folder, baseline=False)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    train = VectorizedTrainer.train

    def sick(self: VectorizedTrainer, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        trained = train(self, weights, schedule, round_number)
        trained[-1, 0] = float("nan")
        return trained

    with monkeypatch.context() as patched:
        patched.setattr(VectorizedTrainer, "train", sick)
        with pytest.raises(PrivacyError, match="round 2 stopped"):
            runner(tiny_data).run(config_of(), folder, resume=True, baseline=False)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    runner(tiny_data).run(config_of(), folder, resume=True, baseline=False)
    assert files(folder.path) == files(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_baseline_is_trained_once_and_shared_by_runs_that_differ_in_noise_only(tiny_data: Path, tmp_path: Path) -> None:
    first, second, third = Watch(), Watch(), Watch()
    results = [
        runner(tiny_data, watch).run(config, RunFolder(tmp_path / str(number))).figures
        for number, (watch, config) in enumerate(
            [
                (first, config_of()),
                (second, config_of("mechanism.epsilon=0.5", "ranges.radius=0.1", "name=other")),
                (third, config_of("training.learning_rate=0.06")),
            ]
        )
    ]
    assert first.labels == ["private", "noise-free baseline"]
    assert second.labels == ["private"]
    assert third.labels == ["private", "noise-free baseline"]
    baselines = [result["noise_free_score_per_round"] for result in results]
    assert len(baselines[0]) == 3
    assert baselines[0] == baselines[1]
    assert results[0]["noise_free_score"] == baselines[0][-1]


def test_the_baseline_is_the_same_training_without_noise(tiny_data: Path, tmp_path: Path) -> None:
    result = runner(tiny_data).run(config_of(), RunFolder(tmp_path / "private")).figures
    plain = runner(tiny_data).run(config_of("mechanism.name=none"), RunFolder(tmp_path / "plain")).figures
    assert result["noise_free_score_per_round"] == plain["score_per_round"]
    assert plain["epsilon_per_unit"] is None
    assert plain["noise_free_score"] is None  # a run without noise has no baseline


def test_the_baseline_that_is_handed_out_is_the_one_a_run_is_compared_with(tiny_data: Path, tmp_path: Path) -> None:
    result = runner(tiny_data).run(config_of(), RunFolder(tmp_path / "run")).figures
    watch = Watch()
    folder = runner(tiny_data, watch).baseline(config_of("mechanism.epsilon=0.5", "name=other"))
    assert watch.labels == []
    kept = folder.result()
    assert kept is not None
    assert kept["score_per_round"] == result["noise_free_score_per_round"]
    assert folder.config().mechanism.name == "none"
    assert runner(tiny_data, watch).baseline(config_of("seed=4")) != folder  # another seed, another training
    assert watch.labels == ["noise-free baseline"]


def test_without_a_baseline_none_is_trained(tiny_data: Path, tmp_path: Path) -> None:
    watch = Watch()
    result = runner(tiny_data, watch).run(config_of(), RunFolder(tmp_path / "run"), baseline=False).figures
    assert watch.labels == ["private"]
    assert result["noise_free_score"] is None


def test_a_baseline_left_out_at_first_can_be_added_by_a_resume(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = runner(tiny_data).run(config_of(), folder, baseline=False).figures
    model, watch = folder.model_path.read_bytes(), Watch()
    result = runner(tiny_data, watch).run(config_of(), folder, resume=True, baseline=True).figures
    assert len(result["noise_free_score_per_round"]) == 3
    assert result["score_per_round"] == first["score_per_round"]
    assert watch.labels[-1] == "noise-free baseline"
    assert watch.rounds == [1, 2, 3]  # those of the baseline: the private rounds stand
    assert folder.model_path.read_bytes() == model


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["clients.count=201"], "clients.count is 201"),
        (["model.name=no-such-model"], "no-such-model"),
        (["model.name=torch.nn:BatchNorm2d", "model.options.num_features=1"], "GroupNorm"),
        (["ranges.radius={nowhere = 0.1}"], "nowhere"),
        (['ranges.radius={"1.weight" = 0.1}'], "1.bias"),
        (["ranges.radius=initial"], "initial"),
        (["data.name=no-such-data"], "no-such-data"),
        (["data.partition=labels", "data.labels_per_client=11"], "labels_per_client"),
    ],
)
def test_a_config_that_does_not_fit_leaves_no_folder(overrides: list[str], named: str, tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, PrivacyError), match=named):
        runner(tiny_data).run(config_of(*overrides), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("epsilon", ["1e-12", "1e-300"])
def test_an_epsilon_too_small_for_the_exact_sampler_is_refused_before_anything_is_written(
    epsilon: str, tiny_data: Path, tmp_path: Path
) -> None:
    """Its thresholds leave no signal, so nothing could be estimated."""
    with pytest.raises(ConfigError, match="epsilon"):
        runner(tiny_data).run(config_of(f"mechanism.epsilon={epsilon}"), RunFolder(tmp_path / "run"), baseline=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["mechanism.perturbed=weights", "ranges.rule=denoised", "ranges.radius=initial"],
        ["ranges.rule=noisy-minmax"],
        ["clients.fraction=0.5", "data.partition=dirichlet", "data.alpha=0.3"],
        ['ranges.radius={"1.weight" = 0.02, "1.bias" = 0.01}', "training.momentum=0.5"],
    ],
)
def test_other_settings_run_to_their_end(overrides: list[str], tiny_data: Path, tmp_path: Path) -> None:
    result = runner(tiny_data).run(config_of(*overrides), RunFolder(tmp_path / "run"), baseline=False).figures
    assert result["rounds"] == 3
    assert result["clients_per_round"] == (4 if "clients.fraction=0.5" in overrides else 8)


def test_holdout_measures_on_a_tenth_of_the_training_images(tiny_data: Path, tmp_path: Path) -> None:
    """It must not touch the test images, which are for the last word."""
    result = runner(tiny_data).run(config_of("data.evaluate_on=holdout"), RunFolder(tmp_path / "run"), baseline=False).figures
    assert result["evaluated_on"] == "holdout"
    assert all(share * 20 == pytest.approx(round(share * 20)) for share in result["score_per_round"])
    with pytest.raises(ConfigError, match="has only 180"):
        runner(tiny_data).run(config_of("data.evaluate_on=holdout", "clients.count=181"), RunFolder(tmp_path / "more"), baseline=False)


def test_layers_are_told_apart_in_the_result(tiny_data: Path, tmp_path: Path) -> None:
    layers = runner(tiny_data).run(config_of(), RunFolder(tmp_path / "run"), baseline=False).figures["layers"]
    module = models.create("logistic-regression", (1, 20, 20), 10, seed=0)
    assert list(layers) == list(ParameterLayout.from_module(module).names)
    assert set(layers["1.bias"]) == {"weights", "radius", "noise_std", "clipped_fraction"}


LONG = ("training.rounds=16", "training.epochs=8", "training.batch_size=5")
"""Some hundredths of a second a round, and far more rounds than the test below interrupts."""


def start(arguments: list[str], data: Path) -> ForkProcess:
    """Call the program in a fork of this process, which saves the seconds that its imports take."""
    command = ["ldpfl", "run", *arguments, "--no-baseline", "--device", "cpu", "--data-dir", str(data)]
    process = multiprocessing.get_context("fork").Process(target=_called, args=(command,))
    process.start()
    return process


def _called(command: list[str]) -> None:
    torch.set_num_threads(1)  # a fork has no threads of the process before
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = command
    main()


def rounds_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0


def interrupt(process: ForkProcess, folder: Path, *, delay: float, with_signal: signal.Signals) -> int | None:
    """Send the signal ``delay`` seconds after the process has finished a round of its own, and return the exit code."""
    before, deadline = rounds_done(folder), time.monotonic() + 60
    while rounds_done(folder) == before and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(process.pid or 0, with_signal)
    process.join(60)
    return process.exitcode


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.draws
def test_a_killed_run_resumes_to_the_bytes_of_an_uninterrupted_one(tiny_data: Path, tmp_path: Path) -> None:
    """The program, killed twice and interrupted once, against one that was left alone.

    Delays are parts of a measured round, so a fast machine does not reach the end before the signal comes.
    """
    config = tmp_path / "long.toml"
    config.write_text(config_of(*LONG).to_toml(), encoding="utf-8")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = runner(tiny_data, curve=draw_score_curve).run(config_of(*LONG), RunFolder(whole), baseline=False).figures
    a_round = min(result["seconds_per_round"])
    instants = random.Random(7)

    arguments = [str(config), "--out", str(killed)]
    for with_signal in (signal.SIGKILL, signal.SIGKILL, signal.SIGINT):
        process = start(arguments, tiny_data)
        code = interrupt(process, killed, delay=instants.uniform(0, 2 * a_round), with_signal=with_signal)
        assert code == (130 if with_signal == signal.SIGINT else -with_signal)
        assert not (killed / "result.json").exists()
        arguments = ["--resume", "--out", str(killed)]

    process = start(arguments, tiny_data)
    process.join(60)
    assert process.exitcode == 0
    assert files(killed) == files(whole)
    assert len(files(killed)) == 5


def test_a_run_of_other_random_words_is_read_and_not_gone_on_with(tiny_data: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    finished = runner(tiny_data).run(config_of("training.rounds=2"), folder, baseline=False)
    older = replace(finished.last, words="", state=replace(finished.last.state, round=1))
    older.save(folder.checkpoint_path)
    assert runner(tiny_data).run(config_of("training.rounds=2"), folder, resume=True, baseline=False).figures == finished.figures
    folder.result_path.unlink()
    with pytest.raises(ConfigError, match="drew random numbers in another way"):
        runner(tiny_data).run(config_of("training.rounds=2"), folder, resume=True, baseline=False)


def test_a_run_is_not_resumed_on_other_data(tiny_data: Path, tmp_path: Path) -> None:
    config, folder = config_of(), RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        runner(tiny_data, Watch(stop_after=1)).run(config, folder, baseline=False)
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    # The same images, the other way round: another content, the same layout.
    files = sorted((other / "mnist").rglob("*.parquet"))
    first, second = (path.read_bytes() for path in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    with pytest.raises(ConfigError, match="was begun on"):
        runner(other, Watch()).run(config, folder, resume=True, baseline=False)


def test_a_baseline_that_fails_does_not_cost_the_run_its_result(tiny_data: Path, tmp_path: Path) -> None:
    class NoTwin(Watch):
        def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
            super().started(label, rounds, done, metric)
            if label == "noise-free baseline":
                raise PrivacyError("training went to NaN")

    watch = NoTwin()
    result = runner(tiny_data, watch).run(config_of(), RunFolder(tmp_path / "run")).figures
    assert result["noise_free_score"] is None
    assert watch.warnings == ["no noise-free baseline to compare with: training went to NaN"]
    assert watch.labels == ["private", "noise-free baseline"]  # and it is not tried again without a cache
    assert RunFolder(tmp_path / "run").result() == result


def fails(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("secret-4711")


@pytest.mark.slow
def test_what_fails_after_the_last_round_costs_no_run_its_result(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, folder = Watch(), RunFolder(tmp_path / "run")
    with monkeypatch.context() as broken:
        broken.setattr(figures_module, "quality_entries", fails)
        broken.setattr(figures_module, "unit_epsilon", fails)
        broken.setattr(statement_module, "account_groups", fails)
        broken.setattr(runner_module, "baseline_of", fails)
        found = runner(tiny_data, watch, curve=fails).run(config_of("mechanism.epsilon=2.5"), folder).figures
    said = [*watch.warnings, *found["caveats"], *found["privacy"]["warnings"]]
    for lack in ("no noise-free baseline", "no curve.svg", "no scores of the final model", "no figure of privacy"):
        assert any(line.startswith(lack) and "unexpected ZeroDivisionError at" in line for line in said), lack
    assert "secret-4711" not in " ".join(said)
    held_out = public_caveats(config_of("data.evaluate_on=holdout"), found["caveats"])  # scored on private rows, which an error may quote
    assert not any(line.startswith("no scores of the final model") for line in held_out)
    # Nothing looks better than it is.
    assert found["epsilon_per_unit"] == "infinity"
    assert found["privacy"]["guarantees"] == []
    assert found["privacy"]["verdict"] == ""
    assert (found["score"], found["scores"]) == (found["score_per_round"][-1], {})
    assert folder.model_path.exists()
    assert folder.result() == found
    # Later, the curve is drawn, and the ledger accounted.
    runner(tiny_data, curve=written_curve).run(config_of("mechanism.epsilon=2.5"), folder, resume=True, baseline=False)
    assert folder.curve_path.exists()
    assert account(folder.ledger()).best is not None


def test_without_a_folder_a_baseline_that_fails_leaves_the_result(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "config_without_noise", fails)
    watch = Watch()
    found = runner(tiny_data, watch).in_memory(config_of(), baseline=True).figures
    assert found["noise_free_score"] is None
    assert any("no noise-free baseline to compare with: unexpected ZeroDivisionError" in line for line in watch.warnings)
