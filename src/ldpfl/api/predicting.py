"""Predict rows, texts or images with a finished run's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ldpfl.api.arguments import checked
from ldpfl.data.cells import can_parse
from ldpfl.data.encoder import Encoder, check_threshold
from ldpfl.data.new_rows import predict_rows
from ldpfl.data.new_samples import Rows, classify_samples, read_samples
from ldpfl.data.tables import SUFFIXES
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.model_file import ModelFile, check_no_personal_layers
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.util.files import check_suffix, write_text
from ldpfl.util.user_code import PRETRAINED, import_library, named_model

if TYPE_CHECKING:
    import pandas


@checked
def predict(
    folder: str | Path,
    rows: pandas.DataFrame | Rows,
    *,
    model: str | nn.Module | None = None,
    threshold: float | None = None,
    id_column: str | None = None,
) -> pandas.DataFrame:
    """Return the model's prediction for each of ``rows``, one line for each row.

    For classes, a line has the likeliest class and the probability of each class. For labels, it has the probability of each label.
    Otherwise it has a number in the target's unit.
    Only three files of ``folder`` are read: ``model.safetensors``, ``model.json`` and, for a table, ``encoding.json``. None of them holds
    a secret, or a row that the model was trained on. If columns of a table may have another unit than in training, the list
    ``attrs["notes"]`` of the result says so.

    Args:
        folder: folder of a finished run, or one that :func:`ldpfl.export` wrote.
        rows: a data frame, or a CSV or Parquet file or a folder of them, with the columns that the model takes, or the texts. For a
            classifier of images: a folder of images, one image, a Parquet file with a column of images, a ``.npy`` file or an array.
        model: the module or its name, if the model is code: the folder may be somebody else's, so no code that it names is run. For a
            pretrained model: its base, if the base is no longer in the folder that the run took it from.
        threshold: for two classes, the probability of the second class from which it is predicted, instead of 0.5.
        id_column: column of a table's ``rows`` that comes first in the result, such as a patient's number. The model does not see it,
            unless it was trained on it.

    Raises:
        ConfigError: the folder has no model that predicts rows, or some layers stayed at the clients; or the model was a Python object or
            is code, and ``model`` is missing; or its tokenizer would be asked for at the hub; or ``threshold`` is given and the model does
            not have two classes; or ``id_column`` is given and the model is not of a table.
        DataError: a file is damaged; or a column is missing, or a value does not fit.
    """
    source = RunFolder(Path(folder))
    described = source.model_file()
    check_no_personal_layers(described.personal)
    encoder = source.measured_encoder()
    if encoder is None:
        if id_column is not None:
            raise ConfigError(f"id_column (--id) works only with models of tables, and the model in {source.path} is not one: leave it out")
        return predict_samples(described, lambda: described.module(source.model_path, model), rows, threshold, str(source.path))
    model = named_model(model) if isinstance(model, str) else model
    if encoder.data.tokenizer == described.name and isinstance(model, str):  # the folder was moved, with its tokenizer
        encoder = encoder.with_tokenizer(model)
    if described.data_description != _expected_description(encoder) or described.targets != encoder.targets:
        raise DataError(
            f"{source.encoding_path} does not fit {source.description_path.name}, so one of them is damaged: restore both from a copy"
        )
    if not isinstance(rows, str | Path) and not hasattr(rows, "columns"):
        raise ConfigError(
            f"rows has the type {type(rows).__name__}, but the model was trained on a table: give a data frame, a file or a folder"
        )
    module = described.module(source.model_path, model)
    _check_tokenizer_is_here(encoder.data.tokenizer, model)
    return predict_rows(encoder, module, rows, threshold, id_column)


def _check_tokenizer_is_here(tokenizer: str, model: str | nn.Module | None) -> None:
    """Raise a :class:`ConfigError` if ``tokenizer`` would be read from the hub, and the caller did not name it as ``model``.

    The folder that names it may be somebody else's, who would learn who predicts with it, and when.
    """
    name = tokenizer.removeprefix(PRETRAINED)
    if not tokenizer or tokenizer == model or Path(name).is_dir() or import_library("huggingface_hub").constants.HF_HUB_OFFLINE:
        return
    raise ConfigError(
        f"this model reads texts by the tokenizer {tokenizer}, which is no folder here, and asking the Hugging Face hub for it tells "
        "others that you use the model: set HF_HUB_OFFLINE=1 in the environment to use a copy that was downloaded before. If it is the "
        f"tokenizer of the model's base, you may also give --model {tokenizer}, which asks the hub"
    )


def predict_csv(
    folder: str | Path,
    rows: Rows,
    *,
    model: str | None = None,
    threshold: float | None = None,
    id_column: str | None = None,
    file: Path | None = None,
    on_note: Callable[[str], None] | None = None,
) -> str:
    """Return the result of :func:`predict` as CSV, and write it to ``file`` if one is given.

    The first column is the number of each row, from 1, in the order of the file, or of a folder's files sorted by name. Images have
    their file's name instead. A text that a spreadsheet would run as a formula is escaped. ``on_note`` is called with each note on the
    rows, see :func:`predict`.

    Raises:
        ConfigError, DataError: as for :func:`predict`.
        WriteError: ``file`` cannot be written.
    """
    if file is not None:
        check_suffix(file, "a table in CSV", ".csv", ".txt")
    table = predict(folder, rows, model=model, threshold=threshold, id_column=id_column)
    if on_note is not None:
        for note in table.attrs.get("notes", ()):
            on_note(note)
    # Only a model of a table has an encoding, and its result may have a target called "file".
    rows_are_image_files = "file" in table and not RunFolder(Path(folder)).encoding_path.exists()
    if not rows_are_image_files:
        table.insert(0, "row", range(1, len(table) + 1), allow_duplicates=True)  # a target may be called "row", too
    text: str = without_formulas(table).to_csv(index=False)
    if file is not None:
        write_text(file, text)
    return text


def without_formulas(table: pandas.DataFrame) -> pandas.DataFrame:
    """Return ``table`` with each text and column name escaped that a spreadsheet would run as a formula."""
    escaped = table.map(lambda cell: _escape_formula(cell) if isinstance(cell, str) else cell)
    return escaped.rename(columns=_escape_formula)


def _escape_formula(text: str) -> str:
    """Return ``text`` with an apostrophe before it if a spreadsheet would take it for a formula. A number such as -1 is no formula."""
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) and not can_parse(float, text) else text


_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r")


def predict_samples(
    described: ModelFile | None, module: Callable[[], nn.Module], rows: pandas.DataFrame | Rows, threshold: float | None, owner: str
) -> pandas.DataFrame:
    """Return a classifier's predictions for images, or for samples in an array.

    Args:
        described: description of the model; None if it is no classifier.
        module: function that returns the trained model. It is called only once the samples are known to fit, because loading takes time.
        owner: the folder or run that has the model, for messages.

    Raises:
        ConfigError: the model is no classifier of samples, or ``threshold`` is given and the model does not have two classes.
        DataError: the samples cannot be read, or do not fit.
    """
    if described is None or described.targets != "class" or described.shape is None:
        raise ConfigError(
            f"the model of {owner} is neither a classifier of images nor a model of a table: load its module with ldpfl.load_model, and "
            "call the module with your inputs"
        )
    if threshold is not None:
        check_threshold(threshold, described.outputs)
    if hasattr(rows, "columns") or (isinstance(rows, str | Path) and Path(rows).suffix.lower() in set(SUFFIXES) - {".parquet"}):
        raise ConfigError(
            f"the model of {owner} was not trained on a table: give a folder of images, an image, a Parquet file with images, a "
            f".npy file or an array, whose samples have the shape {described.shape}"
        )
    samples = read_samples(rows, described.shape)
    scale = described.mean, described.std  # inputs are standardised as in training
    classes = described.classes or tuple(map(str, range(described.outputs)))
    return classify_samples(module(), samples, scale, classes, threshold)


def _expected_description(encoder: Encoder) -> Description:
    """Return the description of inputs and outputs that a model must have if its rows are encoded by ``encoder``."""
    if encoder.data.tokenizer:
        return Description(shape=None, outputs=encoder.outputs)  # a sample is several tensors
    return Description((encoder.width,), encoder.outputs, encoder.data.vocabulary if encoder.data.text else None)


@checked
def load_model(folder: str | Path, *, model: str | nn.Module | None = None) -> nn.Module:
    """Return the trained model in ``folder`` as a plain PyTorch module, on the CPU.

    Args:
        folder: as for :func:`predict`.
        model: as for :func:`predict`.

    Raises:
        ConfigError: the folder has no model; or the model was a Python object or is code, and ``model`` is missing.
        DataError: a file is damaged.
    """
    run_folder = RunFolder(Path(folder))
    return run_folder.model_file().module(run_folder.model_path, named_model(model) if isinstance(model, str) else model)
