"""A run's folder is never written over, and whatever is in it can be read or is refused by name."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from conftest import TINY_TOML
from ldpfl.data import Dataset
from ldpfl.errors import ConfigError, DataError, WriteError
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.more_rounds import config_with_more_rounds
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.privacy import Ledger
from ldpfl.simulation import simulate
from ldpfl.util.quantities import MAX_ROUNDS
from simulated import federation_of


def config_of(*overrides: str) -> RunConfig:
    return parse_config(TINY_TOML, overrides, origin="test")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "one")


def test_a_new_folder_holds_the_config(folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)
    assert folder.config() == config_of()
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]
    assert folder.checkpoint() is None
    assert folder.result() is None


def test_an_empty_folder_may_be_used(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.open(config_of(), resume=False)
    assert folder.config() == config_of()


def test_a_folder_that_holds_a_run_is_left_alone(folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)
    before = content(folder.path)
    for config in (config_of(), config_of("seed=8")):
        with pytest.raises(ConfigError, match="resume the run in it, or choose another folder"):
            folder.open(config, resume=False)
    assert content(folder.path) == before


def test_a_folder_that_holds_something_else_is_left_alone(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "thesis.txt").write_text("years of work", encoding="utf-8")
    before = content(folder.path)
    for resume in (False, True):
        with pytest.raises(ConfigError, match="not empty"):
            folder.open(config_of(), resume=resume)
    assert content(folder.path) == before


def test_a_file_in_the_folder_s_place_is_left_alone(folder: RunFolder) -> None:
    folder.path.parent.mkdir(parents=True)
    folder.path.write_text("a file", encoding="utf-8")
    for resume in (False, True):
        with pytest.raises(ConfigError):
            folder.open(config_of(), resume=resume)
    with pytest.raises(WriteError, match="cannot be written"):
        RunFolder(folder.path / "below").open(config_of(), resume=False)
    assert folder.path.read_text(encoding="utf-8") == "a file"


def test_a_resume_with_another_config_shows_the_difference(folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)
    before = content(folder.path)
    with pytest.raises(ConfigError, match=r"mechanism\.epsilon: 2\.0 -> 3\.0; training\.rounds: 3 -> 4"):
        folder.open(config_of("mechanism.epsilon=3", "training.rounds=4"), resume=True)
    folder.open(config_of(), resume=True)
    assert content(folder.path) == before


def test_what_a_crash_left_of_the_first_write_keeps_nobody_out(folder: RunFolder) -> None:
    """Killed before the config was in place: nothing is lost, so the folder must be usable."""
    folder.path.mkdir(parents=True)
    (folder.path / ".config.toml.k3x9_a1b").write_text("name = ", encoding="utf-8")
    folder.open(config_of(), resume=False)
    assert folder.config() == config_of()


def _tried(folder: Path) -> str:
    try:
        with RunFolder(folder).locked():
            return "got in"
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_only_one_process_works_in_a_folder(folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)

    def other_process() -> str:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(_tried, folder.path).result()

    with folder.locked():
        assert "another process is working in" in other_process()
    assert "got in" in other_process()


@pytest.mark.parametrize("text", ["", "{", '{"score": ', "[1]", "null", "3"])
def test_a_damaged_result_is_refused_by_name(text: str, folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)
    folder.result_path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"result\.json is damaged"):
        folder.result()


def test_a_damaged_checkpoint_is_refused_by_name(folder: RunFolder) -> None:
    folder.open(config_of(), resume=False)
    folder.checkpoint_path.write_bytes(b"half")
    folder.checkpoint_path.with_suffix(".jsonl").touch()
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        folder.checkpoint()


def test_a_round_s_checkpoint_is_written_before_its_ledger(folder: RunFolder, tiny_task: Dataset) -> None:
    """A crash in between leaves a checkpoint that the others follow from, and no ledger of a round that is not there."""
    federation, start = federation_of(tiny_task)
    (first,) = simulate(federation, start, 1)
    folder.open(config_of(), resume=False)
    folder.checkpoint_path.mkdir()  # nothing can be written in its place
    with pytest.raises(WriteError):
        folder.save_round(first)
    assert not folder.ledger_path.exists()
    assert not folder.metrics_path.exists()
    folder.checkpoint_path.rmdir()
    folder.ledger_path.mkdir()
    with pytest.raises(WriteError):
        folder.save_round(first)
    found = folder.checkpoint()
    assert found is not None
    assert found.ledger == first.ledger


@pytest.mark.thorough_except("missing")
@pytest.mark.parametrize("damage", ["whole", "half a line", "another line", "missing"])
def test_metrics_grow_by_a_line_and_are_mended_where_they_are_damaged(damage: str, folder: RunFolder, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    folder.open(config_of(), resume=False)
    first, second, third = simulate(federation, start, 3)
    folder.save_round(first)
    folder.save_round(second)
    text = folder.metrics_path.read_text(encoding="utf-8")
    told = {"whole": text, "half a line": text + text[:20], "another line": text.splitlines()[0] + "\n"}
    folder.metrics_path.unlink()
    if damage in told:
        folder.metrics_path.write_text(told[damage], encoding="utf-8")
    folder.save_round(third)
    grown = folder.metrics_path.read_text(encoding="utf-8")
    assert grown.startswith(text)
    assert [json.loads(line)["round"] for line in grown.splitlines()] == [1, 2, 3]
    assert grown.endswith("\n")


def test_a_ledger_that_grows_is_the_same_text_as_one_that_is_written_once(tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    *_, last = simulate(federation, start, 3)
    grown = Ledger()
    for event in last.ledger.events:
        assert grown.lines == Ledger(grown.events).lines  # which it then need not make again
        grown = grown.charge(event)
    assert grown.to_json() == Ledger(last.ledger.events).to_json()
    assert Ledger.from_lines(grown.lines) == last.ledger


def test_a_run_is_not_extended_beyond_the_rounds_that_can_be_read_again(folder: RunFolder, tiny_task: Dataset) -> None:
    config = config_of()
    federation, start = federation_of(tiny_task)
    *_, last = simulate(federation, start, config.training.rounds)
    folder.open(config, resume=False)
    folder.save_round(last)
    with pytest.raises(ConfigError, match=rf"at most 100,000 rounds, .* extend it by {MAX_ROUNDS - config.training.rounds:,} at most"):
        config_with_more_rounds(folder, MAX_ROUNDS)


def put_back(folder: RunFolder, kept: dict[str, bytes], *names: str) -> None:
    for name in names:
        (folder.path / name).write_bytes(kept[name])


@pytest.mark.parametrize("witness", ["metrics.jsonl", "checkpoint.jsonl"])
def test_a_run_whose_checkpoint_and_ledger_were_put_back_to_an_earlier_round_is_refused(
    witness: str, folder: RunFolder, tiny_task: Dataset
) -> None:
    """Whoever resumed it would get a ledger without the rounds since. Either of two files shows that there were some."""
    federation, start = federation_of(tiny_task)
    folder.open(config_of(), resume=False)
    first, second, third = simulate(federation, start, 3)
    folder.save_round(first)
    kept = content(folder.path)
    folder.save_round(second)
    folder.save_round(third)
    others = {"checkpoint.safetensors", "ledger.json", "metrics.jsonl", "checkpoint.jsonl"} - {witness}
    put_back(folder, kept, *others)
    for read in (folder.checkpoint, folder.ledger, lambda: folder.checkpoint_to_resume(start)):
        with pytest.raises(DataError, match=r"3 rounds?|3:|2 more rounds"):
            read()
    put_back(folder, kept, witness)  # where all files are, nothing in the folder tells
    assert folder.ledger() == first.ledger


def test_a_run_whose_checkpoint_and_ledger_were_removed_does_not_begin_anew(folder: RunFolder, tiny_task: Dataset) -> None:
    federation, start = federation_of(tiny_task)
    folder.open(config_of(), resume=False)
    (first,) = simulate(federation, start, 1)
    folder.save_round(first)
    folder.checkpoint_path.unlink()
    folder.ledger_path.unlink()
    for read in (folder.ledger, lambda: folder.checkpoint_or(start)):
        with pytest.raises(DataError, match=r"has 0 rounds, and metrics\.jsonl beside it 1"):
            read()
