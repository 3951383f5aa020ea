"""Load a user's own data: from a file or folder, from the hub, from code, or passed from Python."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldpfl.data.columns import check_configured_columns
from ldpfl.data.dataset import Dataset, Owners, number_clients
from ldpfl.data.from_table import choose_test_rows, dataset_from_table
from ldpfl.data.holding_out import TEST_SHARE, held_out, held_out_by_file_name
from ldpfl.data.leaks import find_leaks, note_on_copies, notes_on_cells
from ldpfl.data.samples import TOKENS, Inputs, Samples, density_problem, map_tensors, tensors_by_name
from ldpfl.data.settings import DataConfig
from ldpfl.data.tables import Table, read_table, table_from_frame
from ldpfl.data.targets import MOST_CLASSES, check_target_columns
from ldpfl.data.tokens import next_token_targets
from ldpfl.data.user_hub import fetch_data
from ldpfl.data.user_images import Pictures, holds_images
from ldpfl.errors import ConfigError, DataError, error_without_data, listed_names, printable
from ldpfl.tasks import PARALLEL, Targets
from ldpfl.util.user_code import GIVEN, call_user_code, is_code

_PIXEL_MEAN, _PIXEL_STD = 0.5, 0.25
"""Fixed constants for normalising a user's images. They are near enough to centre and scale pixels, and depend on no data."""


def load_user_data(config: DataConfig, targets: Targets, data: object = None) -> Dataset:
    """Return a user's own data by ``config``, or from ``data``, the data that a caller passes from Python.

    ``data`` may be a data frame, a :class:`Dataset`, a pair of inputs and targets (tensors or arrays; inputs may be a dict of several),
    or a PyTorch data set of such pairs.

    Raises:
        ConfigError: the settings contradict each other, or ``data`` is needed and None.
        DataError: the data cannot be read, or do not fit. The message names the place.
    """
    if config.path:
        paths = tuple(Path(path) for path in (config.path, config.test_path) if path)
        return _load_files(config.model_dump_json(), targets, paths, tuple(map(_file_states, paths)))
    if config.name != GIVEN:
        data = call_user_code("data", config.name) if is_code(config.name) else fetch_data(config)
    if data is None:
        raise ConfigError("the data of this run were passed from Python, so no file has them: pass them again with data=...")
    return _as_dataset(data, config, targets)


def check_files(config: DataConfig, targets: Targets) -> None:
    """Raise if a file of ``config`` does not exist, or if the table lacks a column that a setting names. Images are not checked.

    Raises:
        ConfigError: a folder holds images and tables.
        DataError: a file cannot be read, or a column is missing, with the message that a run would have.
    """
    if not config.path or holds_images(Path(config.path)):
        return
    train, *test = (read_table(Path(path)) for path in (config.path, config.test_path) if path)
    for table in (train, *test):
        check_target_columns(table, config.target_names if config.target else (), targets)
    for setting in ("client", "person", "text"):
        if name := getattr(config, setting):
            train.column(name, f"data.{setting}")
    check_configured_columns(train, config)


@lru_cache(maxsize=2)
def _load_files(config_json: str, targets: Targets, paths: tuple[Path, ...], file_states: tuple[object, ...]) -> Dataset:
    """Read and encode the files at ``paths``. A second file, if there is one, holds test data.

    The cache serves a run, which needs its data twice: for its checks and for training. ``file_states`` is only a part of the cache's
    key, so that changed files are read again.
    """
    config = DataConfig.model_validate_json(config_json)
    if holds_images(paths[0]):
        return _as_dataset(fetch_data(config), config, targets)
    train, *test = (read_table(path) for path in paths)
    return _dataset_of_tables(paths[0].stem, train, test[0] if test else None, config, targets)


def _file_states(path: Path) -> object:
    """Return a value that changes when the files at ``path`` change: their names, times and sizes."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        return tuple((str(file), state.st_mtime_ns, state.st_size) for file in files if (state := file.stat()))
    except OSError:
        return ()  # reading the file raises the error with its message


def _as_dataset(data: object, config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set of ``data``, which is data in any form that :func:`load_user_data` supports.

    Raises:
        ConfigError: the form is not supported, or a setting does not apply to it.
        DataError: the data do not fit.
    """
    import pandas

    if isinstance(data, pandas.DataFrame):
        data = (data,)
    if isinstance(data, Sequence) and len(data) in (1, 2) and all(isinstance(part, pandas.DataFrame) for part in data):
        if len(data) > 1 and config.test_path:
            raise ConfigError("data is a pair of training and test rows, but data.test_path is set too: leave data.test_path out")
        origins = ("the train rows", "the test rows") if len(data) > 1 else ("the data frame",)
        train, *test = (table_from_frame(part, origin) for part, origin in zip(data, origins, strict=True))
        return _dataset_of_tables(config.name, train, test[0] if test else _test_table(config), config, targets)
    if isinstance(data, Pictures):
        if targets != "class":
            raise ConfigError("images of a folder or the hub have one class each: leave task.name at 'classification'")
        _check_unused(config, "images", _TABLE_SETTINGS)
        return _dataset_of_images(data, config)
    unused_settings = (*_TABLE_SETTINGS, *_FILE_SETTINGS)
    if isinstance(data, Dataset):
        _check_unused(config, "an ldpfl.data.Dataset", unused_settings)
        for samples in (data.train, data.test):
            for part in (*tensors_by_name(samples.inputs).values(), samples.targets):
                _refuse_subclass(part, "samples")
        return data
    if isinstance(data, torch.utils.data.Dataset):
        if _is_sorted_by_class(data):
            raise ConfigError(
                "data is an ImageFolder of torchvision, whose images are sorted by class: give the path of its folder instead"
            )
        _check_unused(config, "a PyTorch data set", unused_settings)
        return _dataset_of_pairs(data, targets)
    if targets == "tokens" and _are_tokens(data):
        data = (data, None)  # the next tokens become the targets, below
    if isinstance(data, Sequence) and not isinstance(data, str | bytes) and len(data) == 2:
        given_inputs, given_targets = data
        _check_unused(config, "a pair of inputs and targets", unused_settings)
        return _dataset_of_arrays(given_inputs, given_targets, targets)
    raise ConfigError(
        f"data are {_kind_of(data)}, which cannot be used: give a file, a folder, a pandas data frame, a pair (inputs, targets), "
        f"a PyTorch data set of such pairs, or an ldpfl.data.Dataset{_conversion_hint(data)}"
    )


def _dataset_of_arrays(given_inputs: object, given_targets: object, targets: Targets) -> Dataset:
    """Return the data set of inputs and targets, each an array or a tensor.

    Inputs may be a dict of several. A language model may have None for targets: then they are each text's next tokens.
    """
    inputs: Inputs
    if isinstance(given_inputs, Mapping):
        inputs = {name: _number_tensor(part, "inputs") for name, part in given_inputs.items()}
    else:
        inputs = _number_tensor(given_inputs, "inputs")
    is_text = given_targets is None and targets == "tokens"
    target_values = next_token_targets(inputs) if is_text else _number_tensor(given_targets, "targets")
    return _dataset_of_tensors(inputs, target_values, targets)


def _dataset_of_tables(name: str, train: Table, test: Table | None, config: DataConfig, targets: Targets) -> Dataset:
    """Return the data set of a user's own tables, with notes on faults in their cells, and with columns that give the target away."""
    dataset = dataset_from_table(name, train, test, config, targets)
    rows = train.with_missing(config.missing_words)
    # An encoder's settings state the kind of each column, but neither person nor client. Texts for a language model have no encoder.
    resolved = config if dataset.encoder is None else dataset.encoder.data
    with_owners = resolved.model_copy(update={"person": config.person, "client": config.client})
    dataset = dataset.with_notes(*notes_on_cells(rows, with_owners))
    if test is not None and not config.person:  # persons in both tables are refused
        dataset = dataset.with_notes(*note_on_copies(rows, test.with_missing(config.missing_words), resolved))
    if dataset.encoder is None:
        return dataset
    return replace(dataset, leaks=find_leaks(rows, resolved, targets))


def _are_tokens(data: object) -> bool:
    """Return whether ``data`` are tokens without targets: one tensor or array, or a dict with the names of ``transformers``."""
    return TOKENS in data if isinstance(data, Mapping) else isinstance(data, Tensor | np.ndarray)


def sample_tensor(values: object, what: str) -> Tensor:
    """Return ``values`` as samples (N, ...): images as uint8 (N, C, H, W), tokens as int64, other numbers as float32.

    Messages call the values ``what``.

    Raises:
        DataError: the values are not numbers of one shape, or hold NaN or infinity.
    """
    numbers = _number_tensor(values, what)
    if numbers.dim() < 2:
        raise DataError(
            f"{what} have the shape {tuple(numbers.shape)}, expected samples along the first axis, and the values of each sample along "
            "further axes: reshape them"
        )
    if not len(numbers):
        raise DataError(f"{what} have the shape {tuple(numbers.shape)}, so there are no samples: give at least one")
    return _with_sample_dtype(numbers)


def _kind_of(data: object) -> str:
    """Describe the type and length of ``data`` for a message, without its content, which is private."""
    kind = type(data)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]} {kind.__name__}"
    length = f" of {len(data):,}" if isinstance(data, Sequence | Mapping) else ""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{length}"


def _conversion_hint(data: object) -> str:
    """Return a hint on how to convert ``data`` to a supported form, or ""."""
    if hasattr(data, "to_pandas"):
        return "; data.to_pandas() is a data frame"
    if isinstance(data, torch.utils.data.DataLoader):
        return "; data.dataset is the data set of this loader"
    if isinstance(data, Mapping) and data and all(hasattr(part, "to_pandas") for part in data.values()):
        return "; give data['train'].to_pandas(), or a pair of train rows and test rows as two such data frames"
    if isinstance(data, list) and data and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in data):
        return f"; {_AS_PAIR}"
    return "; a table of columns is pandas.DataFrame(data)" if isinstance(data, Mapping | list) or hasattr(data, "__array__") else ""


_AS_PAIR = "with pairs = list(data), give (torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))"


def _is_sorted_by_class(data: Any) -> bool:
    """Return whether ``data`` is torchvision's ImageFolder, or a subset or concatenation of some. Its samples are sorted by class."""
    inner = [data.dataset] if hasattr(data, "dataset") else list(getattr(data, "datasets", ()))  # of a subset, or a concatenation
    return (hasattr(data, "class_to_idx") and hasattr(data, "samples")) or any(map(_is_sorted_by_class, inner))


def _refuse_subclass(values: Tensor, what: str) -> None:
    """Raise if ``values`` are of a subclass of tensors, whose code would run at each step of the training and might mix samples."""
    if type(values) not in (Tensor, nn.Parameter):
        raise DataError(
            f"{what} are of the class {type(values).__name__}, whose code would run in the training: give X.as_subclass(torch.Tensor)"
        )


def _number_tensor(values: object, what: str) -> Tensor:
    """Return ``values``, a tensor, an array, a list, or columns of a frame, as a tensor of real numbers. Messages call them ``what``."""
    if isinstance(values, Tensor):
        if problem := density_problem(values):
            raise DataError(f"{what} are {problem}")
        _refuse_subclass(values, what)
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{what} are a masked array, whose mask would be lost: fill it (X.filled(...)) or leave these samples out")
    try:
        # PyTorch warns of read-only arrays, so these are copied.
        numbers = torch.as_tensor(values if isinstance(values, Tensor) else np.require(np.asarray(values), requirements="W"))
    except (TypeError, ValueError, RuntimeError):
        advice = "give words or missing values as a data frame with data.target, and samples of several tensors as a dict of tensors"
        raise DataError(f"{what} cannot be converted to one array of numbers ({_kind_of(values)}): {advice}") from None
    if numbers.dim() == 0 or numbers.is_complex():
        raise DataError(f"{what} are {'complex' if numbers.is_complex() else 'one number'}: give one or more real numbers for each sample")
    return numbers


_TABLE_SETTINGS = ("columns", "bounds", "numbers", "words", "categories", "missing", "text")
"""Settings that only tables use."""
_FILE_SETTINGS = ("target", "client", "person", "classes", "test_path")
"""Settings that tables or images use, but not data that are passed as tensors."""


def _check_unused(config: DataConfig, what: str, names: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if one of the settings ``names`` is set. It would have no effect on data of the kind ``what``."""
    defaults = DataConfig()
    unused = [f"data.{name}" for name in names if getattr(config, name) != getattr(defaults, name)]
    if unused:
        raise ConfigError(f"{', '.join(unused)} has no effect where data is {what}: leave out {' and '.join(unused)}")


def _dataset_of_images(pictures: Pictures, config: DataConfig) -> Dataset:
    """Return the data set of a user's own images. Without test images, about a fifth of the images become test images."""
    name = Path(config.path).name if config.path else config.name
    notes = [] if config.classes else [_class_note(pictures.classes)]
    if pictures.unused:
        columns = printable(", ".join(pictures.unused))
        notes.append(
            f"the description of the images has columns that are not used ({columns}): if one names an image's person, who may have "
            "several images, give it with --person (data.person); if one names the client, with --client (data.client)"
        )
    train, *test = pictures.parts
    if test:
        is_test = np.zeros(len(train), dtype=bool)
    elif pictures.persons is not None:
        is_test = choose_test_rows(len(train), pictures.persons)
    elif pictures.identities is not None:
        is_test = held_out_by_file_name(pictures.identities)
    else:
        is_test = held_out(len(train), TEST_SHARE)
    parts = [train, *test] if test else [train.take(torch.from_numpy(~is_test)), train.take(torch.from_numpy(is_test))]
    outputs = len(pictures.classes) or None  # None: the classes have no names, so the targets decide
    dataset = replace(_dataset_of_splits(name, parts, tuple(notes), outputs=outputs), classes=pictures.classes)
    owners = Owners() if pictures.owners is None else _owners_of_images(pictures.owners, is_test)
    owners = owners.with_persons(pictures.persons, is_test)
    return replace(dataset, **owners._asdict(), identities=None if pictures.identities is None else pictures.identities[~is_test])


def _owners_of_images(names: Sequence[str], is_test: NDArray[np.bool_]) -> Owners:
    """Return the client of each image from the ``names`` (N,) of the images' clients. A separate test split has no clients."""
    train_names, test_names = ([names[int(row)] for row in np.flatnonzero(in_split)] for in_split in (~is_test, is_test))
    return number_clients(train_names, test_names or None)


def _test_table(config: DataConfig) -> Table | None:
    """Return the table of test rows at ``data.test_path``; None if it is not set."""
    return read_table(Path(config.test_path)) if config.test_path else None


def _class_note(classes: Sequence[str]) -> str:
    """Return the note that the names of the ``classes`` were taken from the data; if they have no names, the note is on their number."""
    if not classes:
        return _COUNT_NOTE
    return printable(
        f"the names of the classes ({listed_names(classes, 5)}) were taken from the data as if they were public. Results and published "
        "files show them: if it is secret which of them occur, list all classes in data.classes"
    )


_COUNT_NOTE = "the number of classes, or tokens, was taken from the data as if it were public"


def _dataset_of_pairs(data: Any, targets: Targets) -> Dataset:
    """Read a PyTorch data set of (input, target) to its end."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):  # for example an IterableDataset
        raise DataError(f"data is a {type(data).__name__}, which lacks __len__ or __getitem__: {_AS_PAIR}")
    try:
        pairs = [data[place] for place in range(len(data))]
        samples = [pair[0] for pair in pairs]
        if isinstance(samples[0], Mapping):
            inputs: Inputs = {name: _stack([sample[name] for sample in samples]) for name in samples[0]}
        else:
            inputs = _stack(samples)
        target_values = _stack([pair[1] for pair in pairs])
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(
            f"the items of the data set cannot be stacked as pairs (input, target) of one shape: {error_without_data(error)}"
        ) from error
    return _dataset_of_tensors(inputs, target_values, targets)


def _stack(values: Sequence[Any]) -> Tensor:
    """Return ``values``, the values of one item in each sample, as one tensor (N, ...)."""
    problems = [problem for value in values if isinstance(value, Tensor) and (problem := density_problem(value))]
    if problems:
        raise DataError(f"samples of the data set are {problems[0]}")
    arrays = (value.detach() if isinstance(value, Tensor) else value for value in values)
    return torch.stack([torch.as_tensor(np.asarray(array)) for array in arrays])


def _dataset_of_tensors(inputs: Inputs, target_values: Tensor, targets: Targets) -> Dataset:
    """Return the data set of ``inputs`` (N, ...) and the target of each, ``target_values`` (N, ...), or raise if a value does not fit."""
    if not tensors_by_name(inputs) or not all(isinstance(name, str) for name in tensors_by_name(inputs)):
        raise DataError(
            "inputs is a dict that is empty, or has a key that is not a text: give each input the name of an argument of the model's "
            "forward"
        )
    for name, part in tensors_by_name(inputs).items():
        if len(part) != len(target_values) or not len(target_values):
            which = f"inputs {name!r} have" if name else "inputs have"
            raise DataError(
                f"{which} {len(part):,} rows, and targets {len(target_values):,}: give one target for each row, and one row at least"
            )
    if targets in PARALLEL:
        raise ConfigError("task.name is 'ordinal' or 'survival', which need a table: give a data frame or a file, and data.target")
    inputs, target_values = map_tensors(_with_sample_dtype, inputs), target_values.detach()
    has_tokens = any(part.dtype == torch.int64 for part in tensors_by_name(inputs).values())
    notes = (_COUNT_NOTE,) if targets in ("class", "tokens") or has_tokens else ()
    target_values = _valid_targets(target_values, targets)
    if any(part.dtype == torch.int64 and part.numel() and int(part.min()) < 0 for part in tensors_by_name(inputs).values()):
        raise DataError(
            "some inputs are below 0, but inputs of whole numbers count as tokens, from 0 on: convert inputs that are no tokens to float"
        )
    return _dataset_of_splits(GIVEN, [Samples(inputs, target_values)], notes, targets)


def _valid_targets(target_values: Tensor, targets: Targets) -> Tensor:
    """Return ``target_values`` (N, ...) as int64 for classes and tokens, else as float32.

    Raises:
        DataError: a value is not finite, or does not fit the kind of ``targets``.
    """
    if not bool(target_values.isfinite().all()):
        raise DataError("targets contain NaN or infinity: leave such samples out")
    if targets == "class" and target_values.dim() != 1:
        is_column = target_values.dim() == 2 and target_values.shape[1] == 1
        advice = "squeeze(1)" if is_column else "argmax(1), or for several labels set task.name to 'multilabel'"
        raise DataError(
            f"targets have the shape {tuple(target_values.shape)}, expected ({len(target_values)},), one class each: give targets.{advice}"
        )
    if targets in ("class", "tokens"):
        if target_values.is_floating_point() and not torch.equal(target_values, target_values.round()):
            raise DataError("some targets are not whole numbers, but classes must be; to predict a number, set task.name to 'regression'")
        target_values = target_values.long()
        if targets == "class" and not (target_values.numel() and int(target_values.min()) >= 0 and int(target_values.max()) < MOST_CLASSES):
            raise DataError(
                f"some targets are negative or above {MOST_CLASSES - 1}, but classes are numbered from 0: correct them, or set task.name "
                "to 'regression'"
            )
        if targets == "class" and bool((target_values == target_values[0]).all()):
            raise DataError("all targets are of the same class, so there is nothing to learn: give samples of at least two classes")
    else:
        target_values = target_values.float()
    if targets == "classes" and not bool(((target_values == 0) | (target_values == 1)).all()):
        raise DataError("some targets are not 0 or 1, as each label of the task 'multilabel' must be: correct them")
    if targets == "count" and bool((target_values < 0).any()):
        raise DataError("some targets are below 0, but counts must be 0 or more: correct them")
    return target_values


def _with_sample_dtype(inputs: Tensor) -> Tensor:
    """Convert samples (N, ...) to the type that :class:`Samples` expects: uint8 for images, float32 for numbers, int64 for tokens."""
    if inputs.dtype == torch.uint8 and inputs.dim() in (3, 4):
        return _channels_first(inputs)
    # Bytes that are not an image are a table of small numbers.
    are_numbers = inputs.is_floating_point() or inputs.dtype in (torch.uint8, torch.bool)
    if not are_numbers:
        return inputs.detach().long()
    inputs = inputs.detach().float()
    if not bool(inputs.isfinite().all()):
        raise DataError("inputs contain NaN or infinity: fill in the missing values first")
    return inputs


def _channels_first(pixels: Tensor) -> Tensor:
    """Return images as (N, C, H, W). The input may lack the channel axis, or have it last."""
    if pixels.dim() == 3:
        return pixels[:, None]
    has_channels_last = pixels.shape[1] > 4 >= pixels.shape[3]  # an image has at most 4 channels, and more rows
    return pixels.permute(0, 3, 1, 2).contiguous() if has_channels_last else pixels


def _dataset_of_splits(
    name: str, parts: list[Samples], notes: tuple[str, ...], targets: Targets = "class", outputs: int | None = None
) -> Dataset:
    """Return a data set of two ``parts``, training and test samples. If there is only one part, a fifth of it becomes the test samples."""
    if len(parts) == 1:
        is_test = torch.from_numpy(held_out(len(parts[0]), TEST_SHARE))
        parts = [parts[0].take(~is_test), parts[0].take(is_test)]
    train, test = parts
    if not len(test) or not len(train):
        raise DataError(f"data has only {len(train) + len(test)} samples, too few to keep a fifth of them for the test: add samples")
    digest = hashlib.sha256()
    for part in parts:
        for content in part.content():
            digest.update(content)
    if outputs is None:  # the data name no classes
        outputs = _output_count(train.targets, test.targets, targets)
    test_inputs = tensors_by_name(test.inputs)
    tokens = {key: part for key, part in tensors_by_name(train.inputs).items() if part.dtype == torch.int64}
    vocabulary_sizes = {key: 1 + max(int(part.max()), int(test_inputs[key].max())) for key, part in tokens.items()}
    vocabulary = vocabulary_sizes if isinstance(train.inputs, Mapping) else vocabulary_sizes.get("")  # "" names a single tensor
    # One mean and one deviation for all channels, since images may differ in their number of channels.
    has_images = any(part.dtype == torch.uint8 for part in tensors_by_name(train.inputs).values())
    mean, std = ((_PIXEL_MEAN,), (_PIXEL_STD,)) if has_images else ((), ())
    return Dataset(name, train, test, outputs, mean, std, digest.hexdigest()[:16], vocabulary=vocabulary, notes=notes)


def _output_count(train: Tensor, test: Tensor, targets: Targets) -> int:
    """Return how many outputs a model needs for the targets of ``train`` and ``test`` samples: one for each class, or each number."""
    if targets in ("class", "tokens"):
        return 1 + max(int(train.max()), int(test.max()))
    return train.shape[1] if train.dim() > 1 else 1
