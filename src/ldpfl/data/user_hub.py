"""Read images and tables in the hub's layout, from the hub or from a folder, with its library ``datasets``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ldpfl.data.folders import check_one_split, split_in_path, visible_files
from ldpfl.data.loading import silence_loggers
from ldpfl.data.settings import DataConfig
from ldpfl.data.user_images import IMAGE_SUFFIXES, Pictures, image_column, read_pictures, read_pixels
from ldpfl.errors import ConfigError, DataError, LdpflError, first_line
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas


def fetch_data(config: DataConfig) -> tuple[pandas.DataFrame, ...] | Pictures:
    """Return the data set that ``config`` names: its train rows and, if there are any, its test rows.

    Raises:
        ConfigError: the settings contradict the data set.
        DataError: the data set cannot be downloaded or read.
    """
    origin = config.path or config.name
    splits = _splits(origin, is_local=bool(config.path), config=config)
    if image_column(splits["train"]) is None:
        return tuple(split.to_pandas() for split in splits.values())
    if config.test_path:
        if "test" in splits:
            raise ConfigError(f"data.test_path is set, but {origin!r} already has a split 'test': leave data.test_path out")
        test_splits = _splits(config.test_path, is_local=True, one_class=True, config=config)
        splits["test"] = test_splits.get("test", test_splits["train"])
        if image_column(splits["test"]) is None:
            raise DataError(f"data.test_path is {config.test_path!r}, which holds no images, but {origin!r} does: name a folder of images")
    return read_pictures(splits, config, origin)


def read_new_images(path: Path, files: Sequence[Path] | None, mode: str) -> Tensor:
    """Return images without classes as bytes (N, C, H, W): those of ``files``, or else those in the Parquet files at ``path``.

    Args:
        mode: "RGB", or "L" for grey values.

    Raises:
        DataError: there are no images, one cannot be decoded, or they differ in size.
    """
    import datasets  # slow to import

    if files is None:
        split = _splits(str(path), is_local=True)["train"]
    else:
        names = {"image": [str(file) for file in files]}
        split = datasets.Dataset.from_dict(names, features=datasets.Features({"image": datasets.Image()}))
    image = image_column(split)
    if image is None or not len(split):
        raise DataError(f"{path} holds no images: give a folder of them, an image, a Parquet file with a column of images, or a .npy file")
    return read_pixels(split, image, str(path), mode)


def _splits(origin: str, *, is_local: bool, one_class: bool = False, config: DataConfig | None = None) -> dict[str, Any]:
    """Return the splits train and test of the data set ``origin``.

    Args:
        is_local: whether ``origin`` is a path rather than an id on the hub. Local data are not kept in the library's cache.
        one_class: whether a folder of images may hold a single class. The library would read such images as having no class.
        config: settings that name the columns to read of a table that describes images; None to read none.
    """
    import datasets  # slow to import

    datasets.disable_progress_bars()
    try:
        with silence_loggers("datasets", "huggingface_hub"), TemporaryDirectory() as folder:
            no_retries = datasets.DownloadConfig(max_retries=0)
            cache = folder if is_local else None
            source, arguments = _source(Path(origin), one_class=one_class, config=config) if is_local else (origin, {})
            arguments |= {"download_config": no_retries, "cache_dir": cache, "keep_in_memory": True if is_local else None}
            loaded = datasets.load_dataset(source, **arguments)
    except LdpflError:
        raise
    except Exception as error:  # the library raises many kinds
        cause = first_line(error)
        if is_local:
            raise DataError(f"data set {origin!r} cannot be read: {cause}") from error
        suggestion = _nearest(Path(origin))
        raise DataError(f"there is no file or folder {origin!r} here{suggestion}, and the hub does not have it either: {cause}") from error
    if "train" not in loaded:
        raise DataError(
            f"data set {origin!r} has no split 'train', only {', '.join(loaded)}: give the split that you want to train on the name 'train'"
        )
    return {split: loaded[split] for split in ("train", "test") if split in loaded}


def _nearest(path: Path) -> str:
    """Return a question in parentheses that suggests the file or folder named most like the missing ``path``; "" if none is similar."""
    try:
        neighbours = [str(entry) for entry in path.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    suggestion = did_you_mean(str(path), neighbours) if neighbours else ""
    return f" ({suggestion})" if suggestion.startswith("did") else ""  # any other suggestion is a list of all names


def _source(path: Path, *, one_class: bool, config: DataConfig | None) -> tuple[str, dict[str, Any]]:
    """Return the builder and the arguments for ``datasets.load_dataset``, with an explicit list of files for each split.

    Without the list, the library would guess the splits by words in the paths. With ``one_class``, even a single folder is a class.
    """
    if not path.exists():
        raise DataError(f"data set {str(path)!r} cannot be read: there is no such file or folder")
    if path.is_file():
        return "parquet", {"data_files": {"train": escape(str(path))}}
    files = [file for file in visible_files(path) if file.suffix.lower() in IMAGE_SUFFIXES or file.stem == "metadata"]
    if not any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        return "parquet", {"data_files": _parquet_of(path)}
    for file in files:
        if file.name == "metadata.csv":
            _check_descriptions(file, config)
    folders = {file.relative_to(path).parts[0] for file in files}  # with the names of files that lie in ``path`` itself
    has_splits = "train" in folders and folders <= {"train", "test"} and all((path / name).is_dir() for name in folders)
    if not has_splits:
        check_one_split((Path(name) for name in folders if (path / name).is_dir()), path)
    folder_by_split = {name: path / name for name in sorted(folders, reverse=True)} if has_splits else {"train": path}  # train first
    paths = {split: [escape(str(file)) for file in files if file.is_relative_to(folder)] for split, folder in folder_by_split.items()}
    arguments: dict[str, Any] = {"data_files": paths}
    if one_class and not any(file.stem == "metadata" for file in files):
        arguments["drop_labels"] = False
    return "imagefolder", arguments


def _check_descriptions(path: Path, config: DataConfig | None) -> None:
    """Raise a :class:`DataError` if the library would misread the table ``path``, a ``metadata.csv`` that describes images.

    The library takes commas alone, reads a file's second row as a second image, and codes such as 007 as numbers. Codes matter only in
    the columns of clients and classes that ``config`` reads: 007 and 7 are one person in any table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            header, *rows = filter(None, csv.reader(lines))  # without empty lines
    except (UnicodeDecodeError, csv.Error, ValueError) as error:  # ValueError: there is no line
        raise DataError(
            f"{path} cannot be read as a table in UTF-8 with commas: {type(error).__name__}; save it anew in this form"
        ) from None
    columns = dict(zip(header, zip(*rows, strict=False), strict=False))
    names = next((cells for name, cells in columns.items() if name == "file_name" or name.endswith("_file_name")), None)
    if rows and names is None:
        raise DataError(
            f"{path} has no column file_name: give the column with the images' files this name, and separate columns by commas (not by "
            "semicolons)"
        )
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} lists the image {twice} more than once: keep one row for each image")
    if config is None:
        return
    targets = config.target_names if config.target else [name for name in columns if "label" in name]  # one of these has the classes
    for name in {config.client, *targets}.intersection(columns):
        words = [cell.strip() for cell in columns[name] if cell.strip()]
        if all(word.isdecimal() for word in words) and any(len(word) > 1 and word[0] == "0" for word in words):
            raise DataError(
                f"the column {name!r} of {path} has codes with zeros in front, which would be read as numbers, so that 007 and 7 would be "
                "one: write a letter before each code of the column"
            )


def _parquet_of(path: Path) -> dict[str, list[str]]:
    """Return the Parquet files below ``path`` by split, train and test, without files for validation. If none is for training, all are."""
    files = [file for file in visible_files(path) if file.suffix.lower() == ".parquet"]
    if not files:
        raise DataError(f"{path} holds no images: expected a folder of images for each class, or Parquet files with images")
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(split_in_path(file.relative_to(path)) or "train", []).append(escape(str(file)))
    if "train" not in splits:  # a folder of test data alone
        return {"train": [escape(str(file)) for file in files]}
    return {split: splits[split] for split in ("train", "test") if split in splits}
