"""What a trained model says of new rows of a table: from their columns to its inputs, and from its outputs to words."""

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
    """Return what ``module`` says of ``rows``, in words; of two classes the second one from ``threshold`` on.

    Line i is about row i. Lines have the index of ``rows`` if these are a data frame.

    Raises:
        ConfigError: the model does not tell one of two classes, and there is a threshold.
        DataError: a column is missing, or a value does not fit; its place is named.
    """
    encoder.check_threshold(threshold)
    with torch.no_grad():
        found = encoder.answers(_outputs(module.eval(), encoded(encoder, rows)), threshold)
    return found if isinstance(rows, str | Path) else found.set_axis(rows.index)


def _outputs(module: nn.Module, inputs: Inputs) -> Tensor:
    """Return what ``module`` makes of ``inputs`` (N, ...), some rows at a time where they are texts of several tensors."""
    if isinstance(inputs, Tensor):
        return torch.as_tensor(answers_of(module, inputs))
    count = len(inputs[TOKENS])
    cuts = (slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE))
    return torch.cat([answers_of(module, {name: part[cut] for name, part in inputs.items()}) for cut in cuts])


_AT_ONCE = 64
"""Texts that a pretrained model is given together."""


def encoded(encoder: Encoder, rows: pandas.DataFrame | str | Path) -> Inputs:
    """Return what a model takes (N, ...) for ``rows``: a data frame, or a file or folder; the target's column need not be there.

    Raises:
        DataError: a column is missing, or a value does not fit; its place is named.
    """
    table = read_table(Path(rows)) if isinstance(rows, str | Path) else table_of(rows, "the rows")
    table = table.with_missing(encoder.data.missing_words)
    if encoder.data.text:
        return texts_of(table, encoder.data, encoder.targets)
    return encoder.scaled(torch.from_numpy(features_of(table, encoder.data).values))
