"""Predict new rows of a table with a trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ldpfl.data.columns import check_exact_names, column_words, read_features, read_texts
from ldpfl.data.encoder import Encoder
from ldpfl.data.samples import TOKENS, Inputs
from ldpfl.data.tables import Table, read_table, table_from_frame
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.models.layout import answers_of
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas


def predict_rows(
    encoder: Encoder,
    module: nn.Module,
    rows: pandas.DataFrame | str | Path,
    threshold: float | None = None,
    id_column: str | None = None,
) -> pandas.DataFrame:
    """Return the predictions of ``module`` for ``rows``, one line for each row.

    If ``rows`` is a data frame, the result has the same index. If columns may have another unit than in training, the entry ``"notes"``
    of its ``attrs`` is a list of texts that say so.

    Args:
        threshold: predict the second of two classes wherever its probability is at least this.
        id_column: column of ``rows`` that is copied to the front of the result, so that each prediction can be assigned.

    Raises:
        ConfigError: there is a ``threshold``, but the model is not a classifier of two classes; or ``id_column`` is also predicted.
        DataError: a column is missing, or a value does not fit. The message names the place.
    """
    encoder.check_threshold(threshold)
    table = _table(encoder, rows)
    identifiers = [] if id_column is None else _identifiers(table, id_column)
    with torch.no_grad():
        inputs = _unscaled_inputs(encoder, table)
        predictions = encoder.predictions(_outputs(module.eval(), _scaled(encoder, inputs)), threshold)
    if id_column is not None:
        if (name := printable(id_column)) in predictions:
            raise ConfigError(f"id_column (--id) is {id_column!r}, the target that the model predicts: name a column that identifies rows")
        predictions.insert(0, name, np.array([printable(identifier) for identifier in identifiers], dtype=object))
    if not isinstance(rows, str | Path):
        predictions = predictions.set_axis(rows.index)
    if isinstance(inputs, Tensor) and (beyond := encoder.columns_beyond_knots(inputs)):
        predictions.attrs["notes"] = [_NOTE_ON_UNITS.format(name=name) for name in beyond]
    return predictions


_NOTE_ON_UNITS = (
    "at least half of the values of the column {name!r} lie beyond the range that the model was trained for, and count as the end of that "
    "range: check that the column has the same unit as in training"
)


def _outputs(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the outputs of ``module`` for ``inputs`` (N, ...). Tokenised texts go through it in batches, to save memory."""
    if isinstance(inputs, Tensor):
        return torch.as_tensor(answers_of(module, inputs))
    batches = (slice(start, start + _BATCH_SIZE) for start in range(0, len(inputs[TOKENS]), _BATCH_SIZE))
    return torch.cat([answers_of(module, {name: tensor[batch] for name, tensor in inputs.items()}) for batch in batches])


_BATCH_SIZE = 64
"""Number of texts that go through a pretrained model together."""


def _table(encoder: Encoder, rows: pandas.DataFrame | str | Path) -> Table:
    """Read ``rows`` as a table with the encoder's words for no value, and with advice for messages about cells of new rows."""
    table = read_table(Path(rows)) if isinstance(rows, str | Path) else table_from_frame(rows, "the rows")
    remedy = "correct the cell" + ("" if encoder.data.missing == "refuse" else ", or leave it empty where there is no value")
    return replace(table.with_missing(encoder.data.missing_words), remedy=remedy)


def _identifiers(table: Table, id_column: str) -> list[str]:
    """Return the cells of the column ``id_column`` as they are written, so that they match those of other tables."""
    column = table.columns[_require_id_column(table, id_column)]
    if column.dtype != np.float64:
        return [text.strip() for text in column]
    return column_words(replace(table, missing=()), id_column)  # missing=(): 999 is an identifier, too


def _require_id_column(table: Table, name: str) -> str:
    """Return ``name``, or raise a :class:`DataError` if the table has no such column, or its numbers are rounded."""
    if name not in table.columns:
        raise DataError(f"the rows have no column {name!r}, which id_column (--id) names: {did_you_mean(name, table.columns)}")
    check_exact_names(table, name, "id_column (--id)")
    return name


def _unscaled_inputs(encoder: Encoder, table: Table) -> Inputs:
    """Return the model's inputs (N, ...) for the rows of ``table``: tokens of texts, or columns that are not scaled yet."""
    if text := encoder.data.text:
        if text not in table.columns:
            raise DataError(f"the table has no column {text!r}, whose texts the model reads: {did_you_mean(text, table.columns)}")
        return read_texts(table, encoder.data, encoder.targets)
    return torch.from_numpy(read_features(table, encoder.data).values)


def _scaled(encoder: Encoder, inputs: Inputs) -> Inputs:
    """Return ``inputs`` with their numbers scaled as in training. Texts have no numbers to scale."""
    return inputs if encoder.data.text or not isinstance(inputs, Tensor) else encoder.scaled(inputs)
