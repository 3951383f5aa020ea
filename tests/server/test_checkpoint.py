"""A checkpoint comes back as it was, and a damaged one is refused by name."""

from __future__ import annotations

import json
import math
import os
import re
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


CLAIMED = 50_000_000


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weights": ("F32", [CLAIMED])}, "expected F32 of shape [7], found 'weights', F32 of shape [50000000]"),
        ({"weights": ("F16", [7])}, "expected F32 of shape [7], found 'weights', F16 of shape [7]"),
        ({"previous": ("F32", [CLAIMED])}, "found 'previous'"),
        ({"center": ("F64", [CLAIMED])}, "expected F64 of shape [2], found 'center'"),
        ({"another": ("F32", [7])}, "expected no such tensor, found 'another'"),
        ({"memory.sent": ("F16", [CLAIMED])}, "found 'memory.sent'"),
        ({"radius": None}, "it has no radius"),
    ],
)
def test_tensors_that_are_not_a_checkpoint_s_are_refused_by_what_the_header_says(
    tensors: dict[str, tuple[str, list[int]] | None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes may claim billions of values; none is read or converted."""
    path = written(tmp_path, tensors)
    for name in ("to", "float", "double"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor was converted"))
    with pytest.raises(DataError, match="is damaged: " + ".*" + re.escape(reason)):
        Checkpoint.load(path)


@pytest.mark.parametrize("field", ["sizes", "history", "ledger"])
@pytest.mark.parametrize("text", ["[" * 300_000, "[" + "[]," * 2_000_000 + "[]]", "{}", '["a"]', "[[]]"])
def test_figures_that_are_none_are_refused(field: str, text: str, tmp_path: Path) -> None:
    """Whether they are nested without end, or take much more memory than bytes."""
    with pytest.raises(DataError, match=r"checkpoint\.safetensors is damaged"):
        Checkpoint.load(written(tmp_path, {}, **{field: text}))


def written(folder: Path, tensors: dict[str, tuple[str, list[int]] | None], **figures: str) -> Path:
    """Write a file that says what the example's does, but for ``tensors`` and ``figures``; its values take no room on the disk."""
    path = folder / "checkpoint.safetensors"
    example().save(path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    figures = {**header.pop("__metadata__"), **figures}
    told = {**{name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}, **tensors}
    start, made = 0, {}
    for name, tensor in told.items():
        if tensor is not None:
            stop = start + math.prod(tensor[1]) * int(tensor[0][1:]) // 8
            made[name] = {"dtype": tensor[0], "shape": tensor[1], "data_offsets": [start, stop]}
            start = stop
    text = json.dumps({"__metadata__": figures, **made}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + start)
    return path
