"""FEMNIST comes without test images: a tenth of them, chosen by their places."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Pixels, digits, write_split
from ldpfl.data import Dataset, load
from ldpfl.data.loading import image_shape
from ldpfl.errors import DataError

COUNTS = {"f0000_14": 40, "f0001_41": 29, "f0002_02": 9}
"""Images of each writer."""
WRITERS = [writer for writer, count in COUNTS.items() for _ in range(count)]
PIXELS: Pixels = np.random.default_rng(5).integers(0, 256, (len(WRITERS), 28, 28), dtype=np.uint8)
LABELS = [index % 62 for index in range(len(WRITERS))]


def write(data_dir: Path, order: Iterable[int] | None = None, *, split: str = "train", **columns: Any) -> None:
    """Write images in the columns and types of the hub's copy; a column given as None is left out."""
    import datasets

    rows = list(range(len(WRITERS)) if order is None else order)
    content: dict[str, Any] = {
        "image": [Image.fromarray(PIXELS[row]) for row in rows],
        "writer_id": [WRITERS[row] for row in rows],
        "hsf_id": [0] * len(rows),
        "character": [LABELS[row] for row in rows],
    } | columns
    kinds: dict[str, Any] = {"image": datasets.Image(), "hsf_id": datasets.Value("int64"), "writer_id": datasets.Value("string")}
    kinds["character"] = datasets.ClassLabel(num_classes=62) if "character" not in columns else datasets.Value("int64")
    content = {name: column for name, column in content.items() if column is not None}
    features = datasets.Features({name: kinds[name] for name in content})
    path = data_dir / "femnist" / f"{split}-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(content, features=features).to_parquet(str(path))


def refused(data_dir: Path) -> str:
    """Load, expect refusal in one line, and return it."""
    with pytest.raises(DataError) as caught:
        load("femnist", data_dir)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(data_dir / "femnist") in message
    return message


def rows_of(part: torch.Tensor) -> list[int]:
    """Find images among those that were written."""
    known = {image.tobytes(): row for row, image in enumerate(PIXELS)}
    return [known[image.tobytes()] for image in part.numpy()[:, 0]]


@pytest.fixture
def task(tmp_path: Path) -> Dataset:
    write(tmp_path)
    return load("femnist", tmp_path)


def test_femnist_is_read_as_grey_28x28_of_62_classes(task: Dataset) -> None:
    assert (task.name, task.shape, task.outputs) == ("femnist", (1, 28, 28), 62)
    assert image_shape("femnist") == ((1, 28, 28), 62)
    assert task.train.tensor.dtype == torch.uint8
    assert len(task.mean) == len(task.std) == 1
    for part in (task.train, task.test):
        assert part.targets.tolist() == [LABELS[row] for row in rows_of(part.tensor)]


def test_every_image_is_in_train_or_in_test(task: Dataset) -> None:
    train, test = rows_of(task.train.tensor), rows_of(task.test.tensor)
    assert sorted(train + test) == list(range(len(WRITERS)))
    assert len(test) == len(WRITERS) // 10


@pytest.mark.parametrize("changed", ["image", "writer_id", "character"])
@pytest.mark.thorough_for("image")
def test_what_is_known_of_an_image_does_not_decide_where_others_go(changed: str, task: Dataset, tmp_path: Path) -> None:
    """Else one record of a client would change what its whole sum is over."""
    columns: dict[str, Any] = {
        "image": [Image.fromarray(255 - image if row == 3 else image) for row, image in enumerate(PIXELS)],
        "writer_id": ["another" if row == 3 else writer for row, writer in enumerate(WRITERS)],
        "character": [61 if row == 3 else label for row, label in enumerate(LABELS)],
    }
    only: dict[str, Any] = {changed: columns[changed]}
    write(tmp_path / "other", **only)
    other = load("femnist", tmp_path / "other")
    moved = 0
    for before, after in ((task.train, other.train), (task.test, other.test)):
        assert len(before) == len(after)
        moved += int(((before.tensor != after.tensor).flatten(1).any(dim=1) | (before.targets != after.targets)).sum())
    assert moved == (changed != "writer_id")


def test_a_form_that_asks_for_ten_characters_in_turn_is_not_tested_on_one_of_them(tmp_path: Path) -> None:
    """Every tenth image by position would be of one label only.

    100 test images that are chosen by hash hold all ten labels, but for a chance of ten times 0.9 ** 100 < 0.0003.
    """
    pixels = np.random.default_rng(6).integers(0, 256, (1000, 28, 28), dtype=np.uint8)
    content: dict[str, Any] = {"image": [Image.fromarray(image) for image in pixels], "writer_id": ["f"] * 1000, "hsf_id": [0] * 1000}
    write(tmp_path, **content, character=[index % 10 for index in range(1000)])
    task = load("femnist", tmp_path)
    assert len(task.test) == 100
    assert set(task.test.targets.tolist()) == set(range(10))


def test_the_cache_keeps_the_division(task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def forbidden(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(datasets, "load_dataset", forbidden)
    again = load("femnist", tmp_path)
    assert torch.equal(again.test.tensor, task.test.tensor)
    assert torch.equal(again.train.targets, task.train.targets)


def test_the_hub_is_asked_for_the_name_it_has_there(task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[str] = []
    original = datasets.load_dataset

    def from_hub(hub_id: str) -> Any:
        asked.append(hub_id)
        return original(str(tmp_path / "femnist"))

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    assert torch.equal(load("femnist").test.tensor, task.test.tensor)
    assert asked == ["flwrlabs/femnist"]


@pytest.mark.parametrize("column", ["image", "character"])
def test_a_missing_column_is_named(column: str, tmp_path: Path) -> None:
    without: dict[str, Any] = {column: None}
    write(tmp_path, **without)
    assert f"lacks the column {column}; it has" in refused(tmp_path)


def test_the_columns_of_mnist_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "femnist", "train", *digits(20, seed=1, shape=(28, 28)))
    assert "lacks the column character" in refused(tmp_path)


@pytest.mark.parametrize("column", ["hsf_id", "writer_id"])
def test_a_column_that_is_not_needed_may_be_missing(column: str, tmp_path: Path) -> None:
    without: dict[str, Any] = {column: None}
    write(tmp_path, **without)
    assert len(load("femnist", tmp_path).test) == 7


def test_a_folder_without_train_is_refused(tmp_path: Path) -> None:
    write(tmp_path, split="test")
    assert "lacks the split train" in refused(tmp_path)


def test_a_test_split_that_would_not_be_used_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, split="test")
    assert "remove the split 'test'" in refused(tmp_path)


@pytest.mark.parametrize("label", [62, -1])
def test_labels_out_of_range_are_refused(label: int, tmp_path: Path) -> None:
    write(tmp_path, character=[*LABELS[:-1], label])
    assert "not between 0 and 61" in refused(tmp_path)


def test_too_few_images_for_a_test_set_are_refused(tmp_path: Path) -> None:
    write(tmp_path, range(9))
    assert "9 images, too few" in refused(tmp_path)
