"""A checkpoint comes back as it was, and a damaged one is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ldpfl import LayerRanges
from ldpfl.errors import DataError, WriteError
from ldpfl.server import Checkpoint, RoundMetrics, ServerState


def example(rounds: int = 2) -> Checkpoint:
    history = tuple(
        RoundMetrics(number, 0.1 * number, 7, 2, {"a": 0.1, "b": 1 / 3}, {"a": 0.02, "b": 0.0}, {"a": 0.5, "b": 1e-9}, 1.25)
        for number in range(1, rounds + 1)
    )
    ranges = LayerRanges(torch.tensor([0.1, -1 / 3]), torch.tensor([0.5, 1e-9], dtype=torch.float64), (4, 3))
    weights = torch.tensor([0.0, -0.0, 1e-42, 1 / 3, -1e30, 2.0, 3.0])
    return Checkpoint(ServerState(rounds, weights, ranges), history)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    saved, path = example(), tmp_path / "checkpoint.safetensors"
    saved.save(path)
    loaded = Checkpoint.load(path)
    assert loaded.history == saved.history
    assert loaded.state.round == 2
    assert loaded.state.weights.dtype == torch.float32
    assert loaded.state.weights.numpy().tobytes() == saved.state.weights.numpy().tobytes()
    assert torch.equal(loaded.state.ranges.center, saved.state.ranges.center)
    assert torch.equal(loaded.state.ranges.radius, saved.state.ranges.radius)
    assert loaded.state.ranges.sizes == (4, 3)


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path: Path) -> None:
    example().save(tmp_path / "a")
    Checkpoint.load(tmp_path / "a").save(tmp_path / "b")
    assert Checkpoint.load(tmp_path / "b").state.weights.equal(example().state.weights)
    assert Checkpoint.load(tmp_path / "b").history == example().history


def test_saving_replaces_the_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    example(1).save(path)
    example(3).save(path)
    assert Checkpoint.load(path).state.round == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_keeps_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for instance, shows when the new file is flushed."""
    path = tmp_path / "checkpoint.safetensors"
    example(1).save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="no space left"):
        example(2).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -200, -1])
def test_a_truncated_file_is_refused_by_name(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    example().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(path)


def test_tensors_without_a_checkpoint_s_figures_are_refused(tmp_path: Path) -> None:
    """A model file under the checkpoint's name, for instance."""
    from safetensors.torch import save_file

    path = tmp_path / "checkpoint.safetensors"
    save_file({"weights": torch.zeros(3), "center": torch.zeros(1), "radius": torch.ones(1)}, path)
    with pytest.raises(DataError, match="damaged"):
        Checkpoint.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Checkpoint.load(tmp_path / "nowhere")
