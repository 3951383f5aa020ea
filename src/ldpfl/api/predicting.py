"""What a finished run's model says of rows that it was not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ldpfl.api.arguments import checked
from ldpfl.data.new_rows import answered
from ldpfl.errors import DataError
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas


@checked
def predict(folder: str | Path, rows: pandas.DataFrame | str | Path, *, model: str | nn.Module | None = None) -> pandas.DataFrame:
    """Return a line for each of ``rows``: the likeliest class and the probability of each, or of each label, or a number in its own unit.

    It reads three files of ``folder``, ``model.safetensors``, ``model.json`` and ``encoding.json``, and nothing else: none of them holds
    a secret, or a row that the model was trained on.

    Args:
        folder: of a finished run, or one that :func:`ldpfl.export` wrote.
        rows: a data frame, or a CSV or Parquet file or a folder of them, with the columns that the model is told.
        model: the module or its name, where the model is code: a folder may be somebody else's, and no code that it names is run.

    Raises:
        ConfigError: there is no model on a table; or its model was handed over, or is code and is not named.
        DataError: a file is damaged; or a column is missing, or a value does not fit.
    """
    kept = RunFolder(Path(folder))
    described, encoder = kept.model_file(), kept.encoder()
    expected = Description((encoder.width,), encoder.outputs, encoder.data.vocabulary if encoder.data.text else None)
    if described.described != expected or described.targets != encoder.targets:
        raise DataError(f"{kept.encoding_path} is damaged: it is not the encoding of the model that {kept.description_path.name} describes")
    return answered(encoder, described.module(kept.model_path, model), rows)


@checked
def load_model(folder: str | Path, *, model: str | nn.Module | None = None) -> nn.Module:
    """Return the trained model in ``folder`` as a plain PyTorch module, on the CPU.

    Args:
        folder: as for :func:`predict`.
        model: as for :func:`predict`.

    Raises:
        ConfigError: there is no model; or it was handed over, or is code and is not named.
        DataError: a file is damaged.
    """
    kept = RunFolder(Path(folder))
    return kept.model_file().module(kept.model_path, model)
