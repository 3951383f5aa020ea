"""Predict new rows of a table with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ldpfl.data.columns import features_of, texts_of
from ldpfl.data.encoder import Encoder
from ldpfl.data.inputs import TOKENS, Inputs
from ldpfl.data.tables import read_table, table_of
from ldpfl.models.layout import answers_of

if TYPE_CHECKING:
    import pandas


def answered(encoder: Encoder, module: nn.Module, rows: pandas.DataFrame | str | Path, threshold: float | None = None) -> pandas.DataFrame:
    """Return the predictions of ``module`` for ``rows``, one line for each row.

    If ``rows`` is a data frame, the result has the same index.

    Args:
        threshold: predict the second of two classes wherever its probability is at least this.

    Raises:
        ConfigError: there is a ``threshold``, but the model is not a classifier of two classes.
        DataError: a column is missing, or a value does not fit. The message names the place.
    """
    encoder.check_threshold(threshold)
    with torch.no_grad():
        predictions = encoder.answers(_outputs(module.eval(), encoded(encoder, rows)), threshold)
    return predictions if isinstance(rows, str | Path) else predictions.set_axis(rows.index)


def _outputs(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return the outputs of ``module`` for ``inputs`` (N, ...). Tokenised texts go through it in batches, to save memory."""
    if isinstance(inputs, Tensor):
        return torch.as_tensor(answers_of(module, inputs))
    count = len(inputs[TOKENS])
    cuts = (slice(start, start + _BATCH_SIZE) for start in range(0, count, _BATCH_SIZE))
    return torch.cat([answers_of(module, {name: part[cut] for name, part in inputs.items()}) for cut in cuts])


_BATCH_SIZE = 64
"""Number of texts that go through a pretrained model together."""


def encoded(encoder: Encoder, rows: pandas.DataFrame | str | Path) -> Inputs:
    """Return the model's inputs (N, ...) for ``rows``, a data frame, a file or a folder. The target column may be missing.

    Raises:
        DataError: an input column is missing, or a value does not fit. The message names the place.
    """
    table = read_table(Path(rows)) if isinstance(rows, str | Path) else table_of(rows, "the rows")
    table = table.with_missing(encoder.data.missing_words)
    if encoder.data.text:
        return texts_of(table, encoder.data, encoder.targets)
    return encoder.scaled(torch.from_numpy(features_of(table, encoder.data).values))
