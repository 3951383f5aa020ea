"""A disk that is full or read-only costs a line and no finished round; a cache of that kind costs a warning."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_cli_sweep import SHORT, SWEEP

from conftest import CommandLine, digits, write_split
from full_disk import files_up_to
from ldpfl.data import load
from ldpfl.errors import WriteError
from ldpfl.experiments import Runner, read_config
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.server import RoundMetrics

REPRODUCED = ("model.safetensors", "metrics.jsonl", "ledger.json", "config.toml", "curve.svg")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.slow
def test_what_cannot_be_printed_names_standard_output() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-m", "ldpfl", "recipes"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ldpfl: the output cannot be written to standard output: No space left on device")


def reproduced(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in REPRODUCED}


@contextmanager
def full_after(flushes: int) -> Iterator[list[int]]:
    """Let the disk be full after so many flushes of a file or a folder, as the system says it then; yields how many there were."""
    original, done, patched = os.fsync, [0], pytest.MonkeyPatch()

    def flush(descriptor: int) -> None:
        if done[0] >= flushes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done[0] += 1
        original(descriptor)

    patched.setattr(os, "fsync", flush)
    try:
        yield done
    finally:
        patched.undo()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of ``size`` at ``folder``, where this may be done."""
    folder.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def arguments(config_file: Path, tiny_data: Path) -> list[str | Path]:
    return [
        config_file,
        "--data-dir",
        tiny_data,
        "--no-baseline",
        "--json",
        "--set",
        "shuffling.channel=direct",
        "--set",
        "training.rounds=2",
    ]


def hint(line: str) -> list[str]:
    """Return the command that a line ends with, as a shell would read it."""
    command = shlex.split(line.rpartition("go on with: ")[2])
    assert command[0] == "ldpfl"
    return command[1:]


@pytest.mark.parametrize("every", [1, 9])
@pytest.mark.slow
@pytest.mark.thorough
def test_a_disk_that_is_full_at_any_write_is_one_line_and_the_run_goes_on(
    every: int, ldpfl: CommandLine, arguments: list[str | Path], tiny_data: Path
) -> None:
    load("mnist", tiny_data)  # so that the writes below are those of the run
    with full_after(100) as done:
        assert ldpfl("run", *arguments, "--out", "whole").code == 0
    flushes = done[0]
    # The config; log, checkpoint, metrics and ledger of a round; metrics, ledger, model, its description, result; and the curve: a file
    # and its folder each. In the second round log and metrics grow, and their folder stays as it is.
    assert flushes == 2 * (1 + 4 + 6) + 1 + 2 + 1 + 2
    out = Path("no curve")
    with full_after(flushes - 2):
        outcome = ldpfl("run", *arguments, "--out", out)
    assert outcome.code == 0  # the run is finished, and its curve can be drawn later
    assert "no curve.svg: " in " ".join(outcome.err.split())
    assert ldpfl("run", *arguments, "--resume", "--out", out).code == 0
    assert reproduced(out) == reproduced(Path("whole"))
    for number in range(0, flushes - 2, every):
        out = Path(f"in place {number}")
        with full_after(number):
            line = ldpfl.refused("run", *arguments, "--out", out)
        assert f"no space left on the device of {out}: nothing that was finished is lost; make room and go on with: " in line
        if number == 0:
            assert line.endswith("the same command")
            outcome = ldpfl("run", *arguments, "--out", out)
        else:
            outcome = ldpfl(*hint(line))
        assert outcome.code == 0, outcome.err
        assert reproduced(out) == reproduced(Path("whole"))


@pytest.mark.parametrize("kilobytes", [4, 40, 76])
@pytest.mark.thorough_except("4")
def test_a_disk_that_really_is_full_is_one_line_and_the_run_goes_on(
    kilobytes: int, ldpfl: CommandLine, arguments: list[str | Path], tmp_path: Path
) -> None:
    assert ldpfl("run", *arguments, "--out", "whole").code == 0
    with small_disk(tmp_path / "disk", f"{kilobytes}k"):
        out = tmp_path / "disk" / "run"
        line = ldpfl.refused("run", *arguments, "--out", out)
        assert "no space left on" in line
        subprocess.run(["mount", "-o", "remount,size=1m", tmp_path / "disk"], check=True)
        assert ldpfl(*hint(line)).code == 0
        assert reproduced(out) == reproduced(Path("whole"))


def test_a_read_only_disk_is_one_line(ldpfl: CommandLine, arguments: list[str | Path], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        assert ldpfl("run", *arguments, "--out", tmp_path / "disk" / "run").code == 0
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        other: list[str | Path] = ["--out", tmp_path / "disk" / "other"]
        for more in (other, ["--out", tmp_path / "disk" / "run", "--resume"]):
            line = ldpfl.refused("run", *arguments, *more)
            assert "is on a read-only file system" in line
            assert "make it writable and go on with: " in line
        assert ldpfl("show", tmp_path / "disk" / "run").code == 0
        assert ldpfl("ledger", tmp_path / "disk" / "run").code == 0


def test_a_file_that_may_not_become_as_large_as_a_checkpoint_is_named(
    ldpfl: CommandLine, arguments: list[str | Path], tiny_data: Path
) -> None:
    load("mnist", tiny_data)
    with files_up_to(20_000):
        line = ldpfl.refused("run", *arguments, "--out", "run")
    assert "checkpoint.safetensors would become larger than this system or user allows" in line
    assert ldpfl(*hint(line)).code == 0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_on_a_full_disk_names_the_command_that_goes_on(ldpfl: CommandLine, tiny_data: Path) -> None:
    file = Path("a sweep.toml")
    file.write_text(SWEEP.replace("[0, 1]", "[0]"), encoding="utf-8")
    load("mnist", tiny_data)
    arguments: list[str | Path] = [file, "--data-dir", tiny_data, "--set", "shuffling.channel=direct"]
    assert ldpfl("sweep", *arguments, "--out", "whole").code == 0
    for number in (0, 5, 10):  # the sweep's own file, a run's, the rows
        out = Path(f"sweep {number}")
        with full_after(number):
            outcome = ldpfl("sweep", *arguments, "--out", out)
        assert (outcome.code, outcome.out) == (2, "")
        line = outcome.err.splitlines()[-1]
        assert "no space left on" in line
        assert ldpfl(*hint(line)).code == 0
        assert (out / "score.svg").read_bytes() == (Path("whole") / "score.svg").read_bytes()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_of_own_rows_on_a_full_disk_names_the_command_that_goes_on(ldpfl: CommandLine) -> None:
    rows = "".join(f"{20 + place % 50},{'yes' if place % 3 else 'no'}\n" for place in range(40))
    Path("my rows.csv").write_text(f"age,is sick\n{rows}", encoding="utf-8")
    flags = ["--data", "my rows.csv", "--target", "is sick", "--set", "clients.count=3", "--set", "training.rounds=1"]
    flags += ["--axis", "data.bounds={age = [0, 120]},{age = [0, 100]}"]
    for number in (0, 5):  # the sweep's own file, a run's
        with full_after(number):
            outcome = ldpfl("sweep", *flags, "--out", f"out {number}")
        assert outcome.code == 2, outcome.err
        command = hint(outcome.err.splitlines()[-1])
        assert ("--resume" in command) == (number > 0)
        again = ldpfl(*command, "--json")
        assert again.code == 0, again.err
        assert len(list(Path(f"out {number}").glob("runs/*/result.json"))) == 2


def unusable(cache: Path) -> None:
    """Put a file where the cache folder should be."""
    shutil.rmtree(cache, ignore_errors=True)
    cache.write_text("mine", encoding="utf-8")


@pytest.mark.slow
def test_without_a_cache_a_run_has_its_baseline_and_a_warning(ldpfl: CommandLine, config_file: Path, tiny_data: Path, cache: Path) -> None:
    arguments: list[str | Path] = [config_file, "--data-dir", tiny_data, "--json", "--set", "shuffling.channel=direct"]
    kept = ldpfl("run", *arguments, "--out", "kept")
    assert (kept.code, kept.err) == (0, "")
    unusable(cache)
    outcome = ldpfl("run", *arguments, "--out", "run")
    assert outcome.code == 0
    (warning,) = outcome.err.splitlines()
    for word in (str(cache), "Not a directory", "LDPFL_CACHE_DIR"):
        assert word in warning, word
    assert cache.read_text(encoding="utf-8") == "mine"
    assert reproduced(Path("run")) == reproduced(Path("kept"))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sweep_without_a_cache_warns_once(ldpfl: CommandLine, tiny_data: Path, cache: Path) -> None:
    Path("sweep.toml").write_text(SHORT, encoding="utf-8")
    unusable(cache)
    outcome = ldpfl("sweep", "sweep.toml", "--data-dir", tiny_data, "--set", "shuffling.channel=direct")
    assert outcome.code == 0, outcome.err
    assert sum("LDPFL_CACHE_DIR" in line for line in outcome.err.splitlines()) == 1


def test_data_are_loaded_without_a_cache(tiny_data: Path, cache: Path) -> None:
    expected = load("mnist", tiny_data)
    unusable(cache)
    warnings: list[str] = []
    found = load("mnist", tiny_data, warnings.append)
    assert torch.equal(found.train.tensor, expected.train.tensor)
    assert len(warnings) == 1


def test_no_room_to_decode_in_is_not_blamed_on_the_data(tmp_path: Path, cache: Path) -> None:
    write_split(tmp_path, "mnist", "train", *digits(40, seed=1))
    write_split(tmp_path, "mnist", "test", *digits(10, seed=2))
    with files_up_to(1_000), pytest.raises(WriteError, match=r"where images are unpacked \(set by TMPDIR\)"):
        load("mnist", tmp_path)
    assert not cache.exists()


class Watch:
    """Notes what is trained and said."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, int]] = []
        self.warnings: list[str] = []
        self._label = ""

    def started(self, label: str, rounds: int, done: tuple[RoundMetrics, ...], metric: str) -> None:
        self._label = label

    def clients_done(self, done: int, total: int) -> None: ...

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def round_done(self, metrics: RoundMetrics) -> None:
        self.trained.append((self._label, metrics.round))


def run(config_file: Path, data: Path, folder: Path) -> tuple[Watch, object]:
    watch = Watch()
    runner = Runner(data, torch.device("cpu"), watch, lambda path, result: None)
    config = read_config(config_file, ["shuffling.channel=direct"])
    return watch, runner.run(config, RunFolder(folder)).figures["noise_free_score_per_round"]


def test_a_cache_that_fills_up_loses_no_round_of_the_baseline(config_file: Path, tiny_data: Path, tmp_path: Path, cache: Path) -> None:
    _, expected = run(config_file, tiny_data, tmp_path / "one")
    shutil.rmtree(cache / "baselines")
    save, patched = RunFolder.save_round, pytest.MonkeyPatch()

    def saved(folder: RunFolder, checkpoint: object) -> None:
        if folder.path.is_relative_to(cache) and checkpoint.state.round == 2:  # type: ignore[attr-defined]
            with full_after(0):
                save(folder, checkpoint)  # type: ignore[arg-type]
        save(folder, checkpoint)  # type: ignore[arg-type]

    patched.setattr(RunFolder, "save_round", saved)
    try:
        watch, found = run(config_file, tiny_data, tmp_path / "two")
    finally:
        patched.undo()
    assert found == expected
    assert [number for label, number in watch.trained if label == "noise-free baseline"] == [1, 2, 3]
    (warning,) = watch.warnings
    assert "No space left on device" in warning


def test_a_baseline_in_a_cache_that_cannot_be_written_is_used(config_file: Path, tiny_data: Path, tmp_path: Path, cache: Path) -> None:
    _, expected = run(config_file, tiny_data, tmp_path / "one")
    (lock,) = (cache / "baselines").rglob(".lock")
    lock.unlink()
    lock.mkdir()  # nobody can take it, as on a read-only file system
    watch, found = run(config_file, tiny_data, tmp_path / "two")
    assert found == expected
    assert (watch.warnings, {label for label, _ in watch.trained}) == ([], {"private"})


def test_who_needs_the_baseline_s_folder_is_told_of_the_variable(config_file: Path, tiny_data: Path, cache: Path) -> None:
    unusable(cache)
    runner = Runner(tiny_data, torch.device("cpu"), Watch(), lambda path, result: None)
    with pytest.raises(WriteError, match="LDPFL_CACHE_DIR"):
        runner.baseline(read_config(config_file))
