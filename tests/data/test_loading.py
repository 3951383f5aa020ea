"""Data sets are decoded once, from any of the four layouts, and whatever is wrong with a file is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import digits, write_split
from ldpfl.data import Dataset, load, names
from ldpfl.errors import ConfigError, DataError

LAYOUTS = {
    "mnist": (("image", "label"), (28, 28), (1, 28, 28), 10),
    "fashion_mnist": (("image", "label"), (28, 28), (1, 28, 28), 10),
    "cifar10": (("img", "label"), (32, 32, 3), (3, 32, 32), 10),
    "cifar100": (("img", "fine_label"), (32, 32, 3), (3, 32, 32), 100),
}


def cached_files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.safetensors"))


def small(data_dir: Path, name: str = "mnist", train: int = 12) -> Path:
    """Write a small, valid data set and return the path of its training file."""
    write_split(data_dir, name, "test", *digits(4, seed=2))
    return write_split(data_dir, name, "train", *digits(train, seed=1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_gives_back_the_pixels_and_labels_that_were_written(name: str, tmp_path: Path) -> None:
    """Channels must end up in front, and no pixel may be changed on the way."""
    columns, written, shape, classes = LAYOUTS[name]
    train, labels = digits(12, seed=1, shape=written)
    test, _ = digits(5, seed=2, shape=written)
    labels = [label * (classes // 10) for label in labels]
    write_split(tmp_path, name, "train", train, labels, columns=columns)
    write_split(tmp_path, name, "test", test, labels[:5], columns=columns)

    task = load(name, tmp_path)

    assert (task.name, task.outputs, task.shape) == (name, classes, shape)
    assert len(task.mean) == len(task.std) == shape[0]
    assert task.train.tensor.dtype == torch.uint8
    assert task.train.targets.tolist() == labels
    assert task.test.targets.tolist() == labels[:5]
    expected = train[:, None] if train.ndim == 3 else train.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(task.train.tensor.numpy(), expected)


def test_cifar100_is_read_by_its_fine_labels(tmp_path: Path) -> None:
    """The hub's files have the twenty coarse ones as well; all of 0 to 99 are labels, and 100 is none."""
    from pyarrow import parquet

    images, _ = digits(3, seed=1, shape=(32, 32, 3))
    for split in ("train", "test"):
        path = write_split(tmp_path, "cifar100", split, images, [99, 0, 7], columns=("img", "fine_label"))
        table = parquet.read_table(path)
        described = json.loads(table.schema.metadata[b"huggingface"])
        described["info"]["features"]["coarse_label"] = {"dtype": "int64", "_type": "Value"}
        both = table.append_column("coarse_label", [[19, 4, 1]])
        parquet.write_table(both.replace_schema_metadata({"huggingface": json.dumps(described)}), path)
    task = load("cifar100", tmp_path)
    assert task.train.targets.tolist() == task.test.targets.tolist() == [99, 0, 7]

    write_split(tmp_path / "more", "cifar100", "train", images, [0, 1, 100], columns=("img", "fine_label"))
    write_split(tmp_path / "more", "cifar100", "test", images, [0, 1, 2], columns=("img", "fine_label"))
    with pytest.raises(DataError, match="0 and 99"):
        load("cifar100", tmp_path / "more")


def test_the_environment_names_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tmp_path))
    assert len(load("mnist").train) == 12


def test_without_a_folder_the_hub_id_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub gives the same images as a folder with the same files."""
    import datasets

    small(tmp_path)
    asked: list[str] = []
    original = datasets.load_dataset

    def from_hub(hub_id: str) -> Any:
        asked.append(hub_id)
        return original(str(tmp_path / "mnist"))

    monkeypatch.setattr(datasets, "load_dataset", from_hub)
    task = load("mnist")
    monkeypatch.undo()
    assert asked == ["ylecun/mnist"]
    assert torch.equal(task.train.tensor, load("mnist", tmp_path).train.tensor)


def test_an_unreachable_hub_tells_of_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(hub_id: str) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"ylecun/mnist.*no route to host.* with --data-dir or in LDPFL_DATA_DIR"):
        load("mnist")


def test_mnist_5k_is_5000_real_digits_split_by_class() -> None:
    """The split is disjoint and stratified: 400 and 100 of each digit."""
    task = load("mnist-5k")
    assert task.shape == (1, 28, 28)
    assert (len(task.train), len(task.test)) == (4000, 1000)
    assert torch.bincount(task.train.targets).tolist() == [400] * 10
    assert torch.bincount(task.test.targets).tolist() == [100] * 10
    train, test = ({image.tobytes() for image in part.tensor.numpy()} for part in (task.train, task.test))
    assert not train & test
    assert task.train.tensor.max() == 255
    ink = [float(task.train.tensor[task.train.targets == label].float().mean()) for label in (0, 1)]
    assert ink[0] > 1.5 * ink[1]  # a 0 takes more ink than a 1, in real digits


@pytest.mark.slow
def test_mnist_5k_is_the_same_every_time() -> None:
    first, second = load("mnist-5k"), load("mnist-5k")
    assert first.fingerprint == second.fingerprint
    assert torch.equal(first.train.tensor, second.train.tensor)


def test_the_second_load_needs_no_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decoded once comes from the cache: ``datasets`` is not even called."""
    import datasets

    small(tmp_path)
    first = load("mnist", tmp_path)

    def forbidden(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(datasets, "load_dataset", forbidden)
    second = load("mnist", tmp_path)
    assert second.fingerprint == first.fingerprint
    assert torch.equal(first.train.tensor, second.train.tensor)
    assert torch.equal(first.test.targets, second.test.targets)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_cached_load_does_not_import_datasets(tmp_path: Path) -> None:
    """Importing it takes seconds, which each start of the command line would pay."""
    small(tmp_path)
    load("mnist", tmp_path)
    code = (
        "import sys; from pathlib import Path; from ldpfl.data import load; "
        "load('mnist', Path(sys.argv[1])); sys.exit('datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_changed_content_gets_a_new_cache_entry(tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    before = load("mnist", tmp_path)
    images, labels = digits(12, seed=1)
    write_split(tmp_path, "mnist", "train", images, labels[::-1])
    after = load("mnist", tmp_path)
    assert after.fingerprint != before.fingerprint
    assert after.train.targets.tolist() == labels[::-1]
    assert len(cached_files(cache)) == 2


def test_changed_content_of_the_same_age_is_decoded_anew(tmp_path: Path) -> None:
    """Copies and archives keep a file's time; only the content may decide what is stale."""
    path = small(tmp_path)
    os.utime(path, ns=(10**18, 10**18))
    load("mnist", tmp_path)
    images, labels = digits(12, seed=1)
    write_split(tmp_path, "mnist", "train", images, labels[::-1])
    os.utime(path, ns=(10**18, 10**18))
    assert load("mnist", tmp_path).train.targets.tolist() == labels[::-1]


def test_the_same_content_elsewhere_shares_the_cache_entry(tmp_path: Path, cache: Path) -> None:
    small(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load("mnist", tmp_path / "a").fingerprint == load("mnist", tmp_path / "b").fingerprint
    assert len(cached_files(cache)) == 1


@pytest.mark.parametrize("damage", ["truncated", "emptied", "foreign"])
def test_a_damaged_cache_is_decoded_again_and_replaced(damage: str, tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    first = load("mnist", tmp_path)
    (entry,) = cached_files(cache)
    whole = entry.read_bytes()
    entry.write_bytes({"truncated": whole[: len(whole) // 2], "emptied": b"", "foreign": b"not tensors at all"}[damage])
    second = load("mnist", tmp_path)
    assert torch.equal(first.train.tensor, second.train.tensor)
    assert entry.read_bytes() == whole


def test_nothing_but_the_entry_is_left_in_the_cache(tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    load("mnist", tmp_path)
    assert [path for path in cache.rglob("*") if path.is_file()] == cached_files(cache)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'fashion_mnist'"):
        load("fashion-mnist")
    assert set(names()) == {"mnist", "fashion_mnist", "cifar10", "cifar100", "femnist", "mnist-5k"}


def refused(data_dir: Path, cache: Path) -> str:
    """Load, expect refusal with nothing cached, and return the message."""
    with pytest.raises(DataError) as caught:
        load("mnist", data_dir)
    assert cached_files(cache) == []
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path, cache: Path) -> None:
    assert str(tmp_path / "mnist") in refused(tmp_path, cache)
    assert "nowhere" in refused(tmp_path / "nowhere", cache)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\x00" * 4096])
def test_a_corrupt_file_is_named(content: bytes, tmp_path: Path, cache: Path) -> None:
    path = small(tmp_path)
    path.write_bytes(content)
    assert str(path) in refused(tmp_path, cache)


def test_a_truncated_file_is_named(tmp_path: Path, cache: Path) -> None:
    path = small(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in refused(tmp_path, cache)


def test_a_file_with_flipped_bytes_inside_is_named(tmp_path: Path, cache: Path) -> None:
    """Its footer is whole, so only reading the columns shows the damage."""
    path = small(tmp_path)
    content = bytearray(path.read_bytes())
    content[100:1100] = bytes(255 - byte for byte in content[100:1100])
    path.write_bytes(bytes(content))
    assert str(path) in refused(tmp_path, cache)


def test_a_missing_split_is_named(tmp_path: Path, cache: Path) -> None:
    write_split(tmp_path, "mnist", "train", *digits(4, seed=1))
    message = refused(tmp_path, cache)
    assert "test" in message
    assert str(tmp_path / "mnist") in message


@pytest.mark.parametrize(("columns", "lacking"), [(("img", "label"), "image"), (("image", "digit"), "label")])
def test_a_missing_column_is_named(columns: tuple[str, str], lacking: str, tmp_path: Path, cache: Path) -> None:
    for split in ("train", "test"):
        write_split(tmp_path, "mnist", split, *digits(4, seed=1), columns=columns)
    message = refused(tmp_path, cache)
    assert f"lacks the column {lacking}" in message
    assert str(tmp_path / "mnist") in message


def test_images_of_mixed_shapes_are_refused(tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    wide, labels = digits(2, seed=1, shape=(20, 24))
    square, _ = digits(2, seed=1)
    write_split(tmp_path, "mnist", "train", [*square, *wide], [*labels, *labels])
    message = refused(tmp_path, cache)
    assert "different shapes" in message
    assert str(tmp_path / "mnist") in message


def test_test_images_of_another_shape_than_the_training_images_are_refused(tmp_path: Path, cache: Path) -> None:
    """Otherwise the run would fail at the end of its first round."""
    small(tmp_path)
    write_split(tmp_path, "mnist", "test", *digits(4, seed=2, shape=(20, 24)))
    assert str(tmp_path / "mnist") in refused(tmp_path, cache)


@pytest.mark.parametrize("label", [10, -1])
def test_labels_out_of_range_are_refused(label: int, tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    write_split(tmp_path, "mnist", "train", digits(3, seed=1)[0], [0, 1, label])
    message = refused(tmp_path, cache)
    assert "0 and 9" in message
    assert str(tmp_path / "mnist") in message


@pytest.mark.parametrize("labels", [[0, 1, None], ["zero", "one", "two"]])
def test_labels_that_are_no_numbers_are_refused(labels: list[int | str | None], tmp_path: Path, cache: Path) -> None:
    small(tmp_path)
    write_split(tmp_path, "mnist", "train", digits(3, seed=1)[0], labels)
    if isinstance(labels[0], str):
        write_split(tmp_path, "mnist", "test", digits(3, seed=2)[0], labels)
    assert str(tmp_path / "mnist") in refused(tmp_path, cache)


def test_taking_images_keeps_pixels_and_labels_together(tiny_task: Dataset) -> None:
    taken = tiny_task.train.take(torch.tensor([7, 3]))
    assert taken.targets.tolist() == [7, 3]
    assert torch.equal(taken.tensor[0], tiny_task.train.tensor[7])


def test_what_is_kept_of_the_data_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of data may be closed to others; the copy of it that the cache holds must be as well, and theirs is not trusted."""
    monkeypatch.setenv("LDPFL_CACHE_DIR", str(tmp_path / "cache"))
    small(tmp_path)
    before = load("mnist", tmp_path).train
    (kept,) = cached_files(tmp_path / "cache")
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    spoilt = load_file(kept)
    spoilt["train.labels"] = (spoilt["train.labels"] + 1) % 10
    save_file(spoilt, kept)
    kept.chmod(0o606)  # as if somebody else had made it
    assert torch.equal(load("mnist", tmp_path).train.targets, before.targets)
    assert kept.stat().st_mode & 0o777 == 0o600
