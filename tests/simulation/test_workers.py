"""Worker processes: the bytes of one process, whatever dies meanwhile, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from torch import nn

from ldpfl import api
from ldpfl.data import Dataset
from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation, simulate
from ldpfl.simulation.compiling import has_compiler
from ldpfl.simulation.federation import Evaluation
from ldpfl.simulation.shared_objects import read_shared, write_shared
from ldpfl.simulation.shares import OneProcess
from ldpfl.simulation.workers import Processes, checked_count, workers

CLIENTS = 40
RECIPES = {
    "duchi": ["mechanism.name=duchi", "mechanism.epsilon=1.0"],
    "gaussian with memory": ["mechanism.name=ladp", "mechanism.perturbed=update", "training.clip_norm=1.0"],
    "records": ["mechanism.name=dp-sgd", "mechanism.perturbed=gradient", "mechanism.noise_multiplier=1.0", "shuffling.channel=direct"],
    "sampled": ["mechanism.name=harmony", "mechanism.epsilon=1.0"],
    "self-sampling": ["mechanism.name=duchi", "mechanism.epsilon=1.0", "clients.self_sampling=plain"],
}


def federation_of(task: Dataset, recipe: str, *overrides: str) -> tuple[Federation, Checkpoint]:
    settings = ["model.name=linear", f"clients.count={CLIENTS}", "training.rounds=2", "training.batch_size=4", *RECIPES[recipe], *overrides]
    return build(parse_config("", settings, origin="test"), task, torch.device("cpu"))


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    pool = Processes(2)
    yield pool
    pool.close()


def same(first: Checkpoint, second: Checkpoint) -> bool:
    def timeless(checkpoint: Checkpoint) -> list[object]:
        return [replace(metrics, seconds=0.0) for metrics in checkpoint.history]

    return (
        torch.equal(first.state.weights, second.state.weights)
        and timeless(first) == timeless(second)
        and first.ledger == second.ledger
        and first.memory.keys() == second.memory.keys()
        and all(torch.equal(first.memory[name], second.memory[name]) for name in first.memory)
    )


@pytest.mark.slow
@pytest.mark.thorough_except("duchi", "records")
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_end_in_the_bytes_of_one(recipe: str, tiny_task: Dataset, two: Processes) -> None:
    federation, start = federation_of(tiny_task, recipe)
    told: list[tuple[int, int]] = []
    *_, alone = simulate(federation, start, 2)
    *_, together = simulate(federation, start, 2, lambda done, total: told.append((done, total)), two)
    assert same(alone, together)
    assert told[-1][0] == told[-1][1]
    assert max(done for done, _ in told) <= CLIENTS


@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("recipe", "batch", "count"), [("duchi", 5, 3), ("duchi", 2, 2), ("records", 5, 3)], ids=["counted", "steps", "records"]
)
def test_any_number_of_processes_ends_in_the_same_bytes_where_steps_are_compiled(
    recipe: str, batch: int, count: int, tiny_task: Dataset
) -> None:
    larger = replace(tiny_task, train=tiny_task.train.take(torch.arange(1_400) % 200))
    settings = ["clients.count=280", f"training.batch_size={batch}", "training.compile=on"]
    federation, start = federation_of(larger, recipe, *settings)
    assert start.origin.endswith("on cpu, compiled")
    *_, alone = simulate(federation, start, 2)
    pool = Processes(count)
    try:
        *_, together = simulate(federation, start, 2, workers=pool)
    finally:
        pool.close()
    assert same(alone, together)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_processes_share_a_long_evaluation_and_find_the_figure_of_one(tiny_task: Dataset, two: Processes) -> None:
    federation, _ = federation_of(tiny_task, "duchi")
    long = replace(federation, evaluation=Evaluation(tiny_task.train.take(torch.arange(2_345) % 200)))
    weights = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    assert two.score(long, weights) == OneProcess().score(long, weights)
    assert 0 < long.score(weights) < 1


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
def test_a_killed_process_is_replaced_and_its_clients_are_trained_again(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, "duchi")
    *_, alone = simulate(federation, start, 2)
    said: list[str] = []
    before = {child.pid for child in psutil.Process().children()}
    pool = Processes(2, said.append)
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if not killed and done:
            (child, *_) = [one for one in psutil.Process().children() if one.pid not in before and "tracker" not in str(one.cmdline())]
            child.kill()
            killed.append(child.pid)

    try:
        *_, last = simulate(federation, start, 2, kill_one, pool)
    finally:
        pool.close()
    assert same(alone, last)
    assert len(said) == 1
    assert "all worker processes are started anew" in said[0]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
def test_what_a_client_must_not_send_ends_the_run_as_in_one_process(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, "duchi", "training.learning_rate=1e38", "training.epochs=3")
    two = Processes(2)
    for pool in (OneProcess(), two):
        with pytest.raises(PrivacyError, match=r"^round [12] stopped: a client's values contain NaN or infinity"):
            list(simulate(federation, start, 2, workers=pool))


def test_an_object_is_read_as_it_was_placed(tmp_path: Path) -> None:
    """Arrays and tensors are those of the file: written to, they change nothing in it."""
    module = nn.Linear(3, 2)
    write_shared(
        {"big": torch.arange(100_000), "module": module, "view": torch.arange(12.0).reshape(3, 4).T, "empty": torch.empty(0)},
        tmp_path / "x",
    )
    found = read_shared(tmp_path / "x")
    assert torch.equal(found["big"], torch.arange(100_000))
    assert torch.equal(found["view"], torch.arange(12.0).reshape(3, 4).T)
    assert all(torch.equal(a, b) for a, b in zip(found["module"].parameters(), module.parameters(), strict=True))
    found["big"][0] = 7
    assert int(read_shared(tmp_path / "x")["big"][0]) == 0


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "many", None])
def test_a_count_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="whole number from 1"):
        checked_count(count)


@pytest.mark.thorough
def test_a_small_run_stays_in_one_process(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task, "duchi")
    with workers("auto", torch.device("cpu")) as pool:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        *_, last = simulate(federation, start, 2, workers=pool)
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    *_, alone = simulate(federation, start, 2)
    assert same(alone, last)


NET = """
import os
from torch import nn
from widths import WIDTH

if os.getpid() not in ALLOWED:
    raise ImportError("another process")

class Net(nn.Module):
    class Body(nn.Linear):
        pass

    def __init__(self, shape, outputs):
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.layers = nn.Sequential(nn.Flatten(), self.Body(size, WIDTH), nn.Linear(WIDTH, outputs))

    def forward(self, inputs):
        return self.layers(inputs)
"""
TASK = """
from dataclasses import replace
from ldpfl.tasks import create

def losses(outputs, targets):
    return outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]

def own(outputs):
    return replace(create("classification", outputs), name="own", losses=losses)
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("is_importable", [True, False])
def test_code_of_a_user_s_files_is_trained_by_processes_or_else_here_with_a_note(
    is_importable: bool, tiny_task: Dataset, tmp_path: Path
) -> None:
    allowed = "range(10**9)" if is_importable else f"[{os.getpid()}]"
    (tmp_path / "net.py").write_text(NET.replace("ALLOWED", allowed), encoding="utf-8")
    (tmp_path / "widths.py").write_text("WIDTH = 3\n", encoding="utf-8")
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    named = [f"model.name={tmp_path}/net.py:Net", f"task.name={tmp_path}/task.py:own"]
    federation, start = federation_of(tiny_task, "duchi", *named)
    *_, alone = simulate(federation, start, 2)
    before, notes = kept_in_memory(os.getpid()), list[str]()
    pool = Processes(2, notes.append)
    *_, last = simulate(federation, start, 2, workers=pool)
    assert kept_in_memory(os.getpid()) > before
    pool.close()
    pool.close()  # as after an error
    assert same(alone, last)
    assert kept_in_memory(os.getpid()) == before
    assert [note for note in notes if "this process trains alone" not in note] == []
    assert len(notes) == (0 if is_importable else 1)


SCRIPT = """
import torch, ldpfl
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, inputs):
        return self.layer(inputs)

torch.manual_seed(0)
inputs = torch.randn(128, 4)
result = ldpfl.run(
    data=(inputs, (inputs[:, 0] > 0).long()), model=Own(), count=32, rounds=ROUNDS, seed=1, workers=2, baseline=False, progress=False
)
print("done", float(result.module().layer.weight.sum()))
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")
def test_a_model_of_a_script_without_a_guard_is_trained_and_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT.replace("ROUNDS", "2"), encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "own.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("done"), done.stderr
    (tmp_path / "own.py").write_text(SCRIPT.replace("ROUNDS", "400"), encoding="utf-8")
    for with_signal in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, tmp_path / "own.py"], start_new_session=True, stderr=subprocess.DEVNULL)
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 90
        while len(family.children()) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        children = family.children(recursive=True)
        time.sleep(2)
        os.killpg(process.pid, with_signal) if with_signal == signal.SIGINT else process.kill()
        process.wait(150)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, with_signal
        deadline = time.monotonic() + 60
        while left := kept_in_memory(process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


def kept_in_memory(process: int) -> set[Path]:
    return {folder for parent in ("/dev/shm", tempfile.gettempdir()) for folder in Path(parent).glob(f"ldpfl-{process}-*")}


def of_run(folder: Path) -> dict[str, object]:
    """What a run's folder holds, but for times and what is drawn of them, and the order of a checkpoint's texts, which is any."""
    times = re.compile(rb'\\?"seconds[a-z_]*\\?": (\[[^\]]*\]|[\d.e-]+)')
    held: dict[str, object] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as kept:
                texts = {name: text for name, text in (kept.metadata() or {}).items() if name != "log"}  # hashes of times
                held[path.name] = texts, {name: kept.get_tensor(name).numpy().tobytes() for name in kept.keys()}  # noqa: SIM118
        elif path.is_file() and path.suffix not in (".html", ".svg"):
            held[path.name] = times.sub(b"", path.read_bytes())
    return held


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.xdist_group("ray")  # another test looks at what processes leave behind
@pytest.mark.parametrize(("recipe", "counts"), [("duchi", (1, 2, 3, 7, "ray")), ("records", (1, 3, "ray"))], ids=["duchi", "records"])
def test_the_folder_of_a_run_is_the_same_for_any_number_of_workers(
    recipe: str, counts: tuple[int | str, ...], tiny_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    settings = ["data.name=mnist", "model.name=linear", f"clients.count={CLIENTS}", "training.rounds=2", "training.batch_size=4"]
    held = []
    for count in counts:
        folder = tmp_path / str(count)
        api.run("quickstart", settings=[*settings, *RECIPES[recipe]], data_dir=tiny_data, workers=count, folder=folder, progress=False)
        held.append(of_run(folder))
    assert {"model.safetensors", "checkpoint.safetensors", "ledger.json", "metrics.jsonl", "result.json", "config.toml"} <= held[0].keys()
    for other in held[1:]:
        assert other == held[0]
