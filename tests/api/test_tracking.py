"""Callbacks of a run, and trackers: what they are handed, when, and that nothing private or secret is in it."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import ldpfl as package
from conftest import CommandLine
from ldpfl import Callback, ConfigError, RunResult, api
from ldpfl.api import RoundMetrics
from ldpfl.experiments import RunConfig
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.report.trackers import round_figures

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"data.name": "mnist", "model.name": "linear", "clients.count": 4, "training.rounds": 3}
SEED = 918273645
FILES = {"README.md", "certificate.json", "guarantee.json", "model.json", "model.safetensors", "report-public.html"}


@pytest.fixture(autouse=True)
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services keep all they get below ``tmp_path``."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    for name, value in {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DATA_DIR": str(tmp_path / "staged")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
    monkeypatch.delenv("WANDB_DIR", raising=False)


def records_of(kept: Path) -> list[Any]:
    """What Weights & Biases keeps of an offline run. Its service may still write when the run is over for its client."""
    (file,) = kept.glob("*.wandb")
    until = time.monotonic() + 30
    while not (records := parsed(file.read_bytes())) or not records[-1].HasField("exit"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return records


def parsed(data: bytes) -> list[Any]:
    """Records in the log format of LevelDB, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, whole, records = 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if place > len(data):
            break
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def tracked_by_mlflow() -> Any:
    """The last run that MLflow keeps."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("ldpfl")
    return client.search_runs([experiment.experiment_id])[0]


@pytest.fixture
def run(tiny_data: Path) -> Callable[..., RunResult]:
    def runs(**more: Any) -> RunResult:
        return api.run("quickstart", settings=SMALL, data_dir=tiny_data, progress=False, baseline=False, **more)

    return runs


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "of patients" / "rows.csv"
    path.parent.mkdir()
    pd.DataFrame({"age": [20 + place % 50 for place in range(120)], "sick": ["no", "yes", "yes"] * 40}).to_csv(path, index=False)
    return path


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_run_start(self, config: RunConfig, metric: str, history: Sequence[RoundMetrics]) -> None:
        self.seen.append((config.training.rounds, metric, [metrics.round for metrics in history]))

    def on_round_end(self, metrics: RoundMetrics) -> None:
        self.seen.append(metrics)

    def on_run_end(self, result: RunResult) -> None:
        self.seen.append(result)


class Stopper(Callback):
    """Inherits the methods that it does not need."""

    def on_round_end(self, metrics: RoundMetrics) -> None:
        if metrics.round == 2:
            raise RuntimeError("enough")


@pytest.mark.thorough
def test_callbacks_are_called_at_the_start_each_round_and_the_end(run: Callable[..., RunResult], tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    with pytest.raises(RuntimeError, match="enough"):
        run(folder=tmp_path / "run", callbacks=[first, Stopper()])
    assert first.seen[0] == (3, "accuracy", [])
    result = run(folder=tmp_path / "run", resume=True, callbacks=[second])
    assert second.seen == [(3, "accuracy", [1, 2]), result.history[2], result]
    assert [*first.seen[1:], second.seen[1]] == list(result.history)  # a round is in the folder before its callbacks
    third = Recorder()
    run(folder=tmp_path / "run", resume=True, callbacks=[third])
    assert third.seen[0] == (3, "accuracy", [1, 2, 3])
    assert isinstance(third.seen[1], RunResult)


def test_the_baseline_is_trained_without_callbacks(tiny_data: Path) -> None:
    seen = Recorder()
    result = api.run("quickstart", settings=SMALL, data_dir=tiny_data, progress=False, callbacks=(seen,))
    assert result.baseline is not None
    assert seen.seen[1:] == [*result.history, result]


@pytest.mark.parametrize("wrong", [print, Recorder], ids=["function", "class"])
def test_what_is_no_callback_is_refused_before_training(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"callbacks\[0\] is not a callback: give an instance of a class that inherits from ldpfl\.Callback"
    ):
        package.run(callbacks=[wrong], progress=False)


@pytest.mark.thorough
def test_mlflow_gets_scores_on_public_rows_the_guarantee_and_the_files(run: Callable[..., RunResult], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    result = run(folder=tmp_path / "run", track="mlflow")
    found = tracked_by_mlflow()
    assert (found.info.status, found.info.run_name) == ("FINISHED", "quickstart")
    history = MlflowClient().get_metric_history(found.info.run_id, "accuracy")
    assert [(entry.step, entry.value) for entry in history][:3] == [(metrics.round, metrics.score) for metrics in result.history]
    figures = result.privacy.figures()
    for name in ("paper_claim", "local", "shuffled_upper_adaptive"):
        assert found.data.metrics[f"epsilon/{name}"] == figures[name]
    assert found.data.params["clients.count"] == "4"
    assert found.data.params["seed"] == str(result.config.seed)  # of built-in data it is public
    assert found.data.tags["ldpfl.verdict"] == result.privacy.verdict
    assert "paper's claim" in found.data.tags["ldpfl.guarantee"]
    assert {entry.path for entry in MlflowClient().list_artifacts(found.info.run_id)} == FILES
    assert "mlflow.source.name" not in found.data.tags
    assert not {"seconds", "clipped/1.weight"} & set(found.data.metrics)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own use of SQLAlchemy
def test_mlflow_keeps_a_run_in_a_database(run: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    result = run(folder=tmp_path / "run", track=["mlflow"])
    assert tracked_by_mlflow().data.metrics["accuracy"] == result.score


def contents(folder: Path) -> Iterator[bytes]:
    yield from (path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("settings", "clipping"),
    [
        ([], {"radius/w": 0.3}),
        (["mechanism.name=dp-fedavg", "shuffling.channel=secure-sum"], {}),  # the fixed norm is a setting
        (["mechanism.name=dp-fedavg", "shuffling.channel=secure-sum", "clipping.target_quantile=0.5"], {"clipping norm": 0.3}),
    ],
)
def test_trackers_get_the_clipping_that_the_mechanism_has(settings: list[str], clipping: dict[str, float]) -> None:
    metrics = RoundMetrics(1, 0.5, 3, 8, {}, {"w": 0.1}, {"w": 0.3}, 1.0)
    figures = round_figures(parse_config("", settings, origin="test"), "accuracy", metrics)
    assert {name: value for name, value in figures.items() if name.startswith(("radius", "clip"))} == clipping


@pytest.mark.thorough
@pytest.mark.parametrize("seeded", [True, False])
def test_of_private_rows_trackers_get_no_score_no_seed_and_no_path(rows: Path, ldpfl: CommandLine, tmp_path: Path, seeded: bool) -> None:
    seed = ["--seed", str(SEED)] if seeded else []
    settings = [word for key in ("training.rounds=2", "clients.count=4", "data.bounds={age = [0, 100]}") for word in ("--set", key)]
    tracked = ["--track", "mlflow", "--track", "wandb"]
    done = ldpfl("run", "--data", rows, "--target", "sick", *settings, *seed, "--out", "run", "--no-report", *tracked)
    assert done.code == 0, done.err
    found, folder = tracked_by_mlflow(), RunFolder(Path("run"))
    result, secret = folder.result(), folder.secret()
    assert result is not None
    assert result["noise_free_score"] is not None
    assert set(found.data.metrics) >= {"clients", "bytes", "epsilon/local"}
    assert {name.split("/")[0] for name in found.data.metrics} <= {"clients", "bytes", "noise std", "epsilon"}
    assert ("seed" in found.data.params) is not seeded
    assert "data.path" not in found.data.params
    scores = [*result["score_per_round"], *result["noise_free_score_per_round"], *result["pooled_scores"].values()]
    private = {f"{score:.6f}" for score in scores if score not in (None, 0.0, 1.0, 0.5)} | {str(rows.parent), result["data_fingerprint"]}
    private |= {str(SEED)} if seeded else {str(secret), f"{secret:x}"}
    (kept,) = Path("run/wandb").glob("offline-run-*")
    handed_on = [str(record).encode() for record in records_of(kept)]  # which the file cuts into blocks
    handed_on += [*contents(tmp_path / "store"), *contents(Path("run/wandb")), *contents(tmp_path / "staged")]
    assert any(b"epsilon/local" in file for file in handed_on)
    for said in private:
        assert not any(said.encode() in file for file in handed_on), said


@pytest.mark.thorough
def test_weights_and_biases_gets_each_round_and_nothing_that_it_collects_itself(run: Callable[..., RunResult], tmp_path: Path) -> None:
    result = run(folder=tmp_path / "run", track="wandb")
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    records = records_of(kept)
    rounds = [{item.nested_key[0] or item.key: item.value_json for item in one.history.item} for one in records if one.HasField("history")]
    assert [float(one["accuracy"]) for one in rounds] == [metrics.score for metrics in result.history]
    assert {one.artifact.type for one in records if one.HasField("artifact")} == {"model"}
    assert {one.run.host for one in records if one.HasField("run")} == {""}
    assert not any(one.HasField(kind) for one in records for kind in ("output", "output_raw", "stats", "environment"))
    assert [path for path in (kept / "files").rglob("*") if path.is_file()] == []


@pytest.mark.thorough
def test_a_tracker_that_fails_later_ends_no_run_and_gets_the_finished_one(
    ldpfl: CommandLine, tiny_data: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    log = MlflowClient.log_batch

    def fails(self: Any, run: str, metrics: Any = (), params: Any = ()) -> None:
        if metrics and metrics[0].step == 2:
            raise OSError("no route to host")
        log(self, run, metrics=metrics, params=params)

    monkeypatch.setattr(MlflowClient, "log_batch", fails)
    done = ldpfl("run", config_file, "--data-dir", tiny_data, "--out", "run", "--no-baseline", "--track", "mlflow")
    assert done.code == 0, done.err
    again = ["run", "--resume", "--out", "run", "--track", "mlflow"]
    said = " ".join(done.err.split())
    reason = "mlflow gets no further figures of this run (OSError: no route to host)"
    assert f"{reason}; when the run is finished, hand it over with: ldpfl {' '.join(again)}" in said
    assert tracked_by_mlflow().info.status == "FAILED"


def test_a_finished_run_is_handed_over_afterwards(run: Callable[..., RunResult], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    result = run(folder=tmp_path / "run")
    run(folder=tmp_path / "run", resume=True, track="mlflow")
    history = MlflowClient().get_metric_history(tracked_by_mlflow().info.run_id, "accuracy")
    assert [entry.value for entry in history][:3] == [metrics.score for metrics in result.history]


def test_a_run_that_ends_early_is_no_finished_one_for_its_tracker(run: Callable[..., RunResult], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="enough"):
        run(folder=tmp_path / "run", callbacks=[Stopper()], track="mlflow")
    assert tracked_by_mlflow().info.status == "FAILED"


def test_a_tracker_that_cannot_begin_says_so(run: Callable[..., RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "12345")
    with pytest.raises(ConfigError, match=r"mlflow cannot track the run: .*12345"):
        run(folder=tmp_path / "run", track="mlflow")


def test_what_was_not_protected_gives_a_tracker_no_model(rows: Path, ldpfl: CommandLine) -> None:
    settings = ["training.rounds=1", "clients.count=4", "mechanism.name=none", "mechanism.perturbed=update", "privacy.target_epsilon=off"]
    words = [word for key in (*settings, "shuffling.channel=direct") for word in ("--set", key)]
    done = ldpfl("run", "--data", rows, "--target", "sick", *words, "--out", "run", "--no-report", "--track", "mlflow")
    assert done.code == 0, done.err
    assert "the run's files were not handed to mlflow" in done.err
    assert "without noise" in done.err


def test_a_tracker_s_name_client_and_folder_are_checked_first(ldpfl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown tracker 'mlflo': did you mean 'mlflow'?" in ldpfl.refused("run", "quickstart", "--track", "mlflo", "--out", "nothing")
    with pytest.raises(ConfigError, match="track needs the argument folder"):
        package.run(track="wandb", progress=False)
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        refused = ldpfl.refused("run", "quickstart", "--track", name, "--out", "nothing")
        assert f"pip install 'ldpfl[{name}]'" in refused
    assert not Path("nothing").exists()
