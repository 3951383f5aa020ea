"""Which files of a folder are read, and which folders are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from ldpfl import ConfigError, DataError
from ldpfl.data.dataset import Dataset
from ldpfl.data.scaling import scaled_by_bounds
from ldpfl.data.settings import DataConfig
from ldpfl.data.user_data import load_user_data

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 4, 4, 3), dtype=np.uint8)


def loaded(folder: Path, **settings: Any) -> Dataset:
    return load_user_data(DataConfig(name="given", path=str(folder), **settings), "class")


def write_images(folder: Path, first: int = 0, last: int = 60) -> None:
    for place in range(first, last):
        own = folder / ("cat", "dog")[place % 2]
        own.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PIXELS[place]).save(own / f"{place:03}.png")


def write_rows(file: Path, rows: int = 50) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x,y\n" + "".join(f"{place},{place % 2}\n" for place in range(rows)))


@pytest.mark.parametrize("copy", [".ipynb_checkpoints/rows-checkpoint.csv", "._rows.csv", "__MACOSX/rows.csv", ".git/a/rows.csv"])
def test_what_is_hidden_is_no_data(copy: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv")
    write_rows(tmp_path / copy)
    found = loaded(tmp_path, target="y")
    assert len(found.train) + len(found.test) == 50


def test_hidden_images_are_no_data(tmp_path: Path) -> None:
    write_images(tmp_path)
    write_images(tmp_path / ".thumbnails")
    found = loaded(tmp_path)
    assert (len(found.train) + len(found.test), found.outputs) == (60, 2)


@pytest.mark.parametrize("held", ["val", "Test", "validation"])
def test_images_of_several_splits_are_not_mixed(held: str, tmp_path: Path) -> None:
    write_images(tmp_path / "train", 0, 40)
    write_images(tmp_path / held, 40)
    with pytest.raises(ConfigError, match=rf"'train'.* and test data .*'{held}'.*data.test_path"):
        loaded(tmp_path)


@pytest.mark.parametrize("names", [("train.csv", "test.csv"), ("data/train-0.csv", "data/test-0.csv"), ("train/a.csv", "Val/a.csv")])
def test_rows_of_several_splits_are_not_mixed(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        write_rows(tmp_path / name)
    with pytest.raises(ConfigError, match=r"and test data .*data\.test_path"):
        loaded(tmp_path, target="y")


def test_a_table_of_vehicles_and_its_tests_are_rows(tmp_path: Path) -> None:
    for name in ("trainers.csv", "tested.csv", "testers.csv"):
        write_rows(tmp_path / name)
    found = loaded(tmp_path, target="y")
    assert len(found.train) + len(found.test) == 150


def test_images_beside_a_table_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path)
    write_rows(tmp_path / "labels.csv")
    with pytest.raises(ConfigError, match=r"contains images and also the table labels\.csv"):
        loaded(tmp_path, target="y")


def to_parquet(file: Path, images: list[Any], labels: list[int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_dict({"image": images, "label": labels}, kinds).to_parquet(file)


def some(first: int, last: int) -> tuple[list[Any], list[int]]:
    return [Image.fromarray(pixels) for pixels in PIXELS[first:last]], [place % 2 for place in range(first, last)]


@pytest.mark.parametrize("name", ["data/{}-00000-of-00001.parquet", "{}/0000.parquet", "{}.parquet"])
def test_splits_of_the_hub_are_kept_apart(name: str, tmp_path: Path) -> None:
    for split, (first, last) in {"train": (0, 30), "test": (30, 40), "validation": (40, 60)}.items():
        to_parquet(tmp_path / name.format(split), *some(first, last))
    found = loaded(tmp_path)
    assert (len(found.train), len(found.test)) == (30, 10)


def test_a_page_beside_the_files_names_no_others(tmp_path: Path) -> None:
    to_parquet(tmp_path / "own" / "a.parquet", *some(0, 30))
    to_parquet(tmp_path / "other.parquet", *some(30, 60))
    page = f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {tmp_path}/other.parquet\n---\n"
    (tmp_path / "own" / "README.md").write_text(page)
    found = loaded(tmp_path / "own")
    assert {image.numpy().tobytes() for part in (found.train, found.test) for image in part.tensor} == {
        pixels.transpose(2, 0, 1).tobytes() for pixels in PIXELS[:30]
    }


def test_a_row_without_a_name_decides_nothing_about_others(tmp_path: Path) -> None:
    """Rows of Parquet have places, whatever they say of files."""
    buffers = [(tmp_path / f"{place}.png") for place in range(60)]
    for place, file in enumerate(buffers):
        Image.fromarray(PIXELS[place]).save(file)
    rows = [{"bytes": file.read_bytes(), "path": file.name} for file in buffers]
    to_parquet(tmp_path / "named" / "a.parquet", rows, some(0, 60)[1])
    to_parquet(tmp_path / "one" / "a.parquet", [{**rows[0], "path": None}, *rows[1:]], some(0, 60)[1])
    named, one = loaded(tmp_path / "named"), loaded(tmp_path / "one")
    assert named.identities is one.identities is None
    assert named.train.tensor.equal(one.train.tensor)


def write_grey(folder: Path, first: int = 0, last: int = 60, *, bits: bool = False) -> None:
    write_images(folder, first, last)
    for file in folder.rglob("*.png"):
        Image.open(file).convert("1" if bits and int(file.stem) % 3 else "L").save(file)


@pytest.mark.parametrize("bits", [False, True])
def test_grey_images_have_one_channel(bits: bool, tmp_path: Path) -> None:
    write_grey(tmp_path / "grey", bits=bits)
    found = loaded(tmp_path / "grey")
    assert found.train.tensor.shape[1:] == (1, 4, 4)
    assert found.test.tensor.shape[1:] == (1, 4, 4)
    write_images(tmp_path / "colours")
    assert loaded(tmp_path / "colours").train.tensor.shape[1:] == (3, 4, 4)


def test_grey_images_among_coloured_ones_have_three_equal_channels(tmp_path: Path) -> None:
    write_grey(tmp_path / "some", 0, 40)
    write_images(tmp_path / "some", 40, 60)
    mixed = loaded(tmp_path / "some").train.tensor
    grey = (mixed == mixed[:, :1]).all(dim=(1, 2, 3))
    assert mixed.shape[1:] == (3, 4, 4)
    assert 0 < grey.sum() < len(mixed)
    write_grey(tmp_path / "train", 0, 40)
    write_images(tmp_path / "test", 40, 60)
    apart = loaded(tmp_path / "train", test_path=str(tmp_path / "test"))
    assert (apart.train.tensor.shape, apart.test.tensor.shape) == ((40, 3, 4, 4), (20, 3, 4, 4))
    assert (apart.train.tensor == apart.train.tensor[:, :1]).all()


@pytest.mark.parametrize(("made", "mode"), [(lambda x: x.astype(np.uint16) * 200, "I;16"), (lambda x: x.astype(np.float32) / 255, "F")])
def test_images_of_more_than_8_bits_are_refused(made: Callable[[Any], Any], mode: str, tmp_path: Path) -> None:
    write_images(tmp_path)
    Image.fromarray(made(PIXELS[0][..., 0])).save(tmp_path / "cat" / "deep.tiff")
    with pytest.raises(DataError, match=rf"more than 8 bits \(mode {mode}"):
        loaded(tmp_path)


def test_targets_that_are_measured_on_are_told_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{place},{place}\n" for place in range(100)))
    found = scaled_by_bounds(
        load_user_data(
            DataConfig(name="given", path=str(tmp_path / "rows.csv"), target="y", bounds={"x": [0, 100], "y": [40, 60]}), "number"
        )
    )
    assert float(found.train.targets.abs().max()) == 1.0
    assert (found.test.targets * found.unit + 50).tolist() == pytest.approx((found.test.tensor[:, 0] * 50 + 50).tolist())
    assert len(set(found.test.targets.tolist())) == len(found.test)
