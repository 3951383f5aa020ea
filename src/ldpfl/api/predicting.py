"""What a finished run's model says of rows that it was not trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from ldpfl.api.arguments import checked
from ldpfl.data.new_rows import answered
from ldpfl.errors import ConfigError, DataError, first_line
from ldpfl.experiments.build import model_of
from ldpfl.experiments.dataset import Description
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.files import check_regular
from ldpfl.importing import GIVEN, is_code

if TYPE_CHECKING:
    import pandas


@checked
def predict(folder: str | Path, rows: pandas.DataFrame | str | Path, *, model: str | None = None) -> pandas.DataFrame:
    """Return a line for each of ``rows``: the likeliest class and the probability of each, or of each label, or a number in its own unit.

    Of the run in ``folder`` it takes the files alone, and none of the rows that it was trained on.

    Args:
        rows: a data frame, or a CSV or Parquet file or a folder of them, with the columns that the model is told.
        model: name of the run's model, where that is code: a folder may be somebody else's, and what it names is run for who names it too.

    Raises:
        ConfigError: there is no finished run on a table; or its model was handed over, or is code and is not named.
        DataError: a file is damaged; or a column is missing, or a value does not fit.
    """
    kept = RunFolder(Path(folder))
    config, encoder = kept.config(), kept.encoder()
    if config.model.name == GIVEN:
        raise ConfigError("the model of this run was handed over: ldpfl.load_run(..., data=..., model=...).predict(rows) has it")
    if is_code(config.model.name) and model != config.model.name:
        raise ConfigError(f"the model of this run is code, which would be run: if that is yours, name it as the model: {config.model.name}")
    tokens = encoder.data.vocabulary if encoder.data.text else None
    described = Description((encoder.width,), encoder.outputs, tokens)
    module = model_of(config, described, 0, None, encoder.targets)  # whose weights are replaced
    try:
        check_regular(kept.model_path)
        module.load_state_dict(load_file(kept.model_path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"{kept.model_path} is damaged, or of another model: {first_line(error)}") from error
    return answered(encoder, module, rows)
