"""Histograms of the columns of nodes' tables, collected in a few rounds before training, to scale the columns.

A node counts its rows between edges that the server names. Later it scales its table by the result. Whatever the edges are, a record
changes only one count of each column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from torch import Tensor

from ldpfl.data import Dataset
from ldpfl.data.encoder import Encoder
from ldpfl.data.scaling import STAGES, Floats, unscaled_values
from ldpfl.errors import ProtocolError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import describe_data, load_dataset
from ldpfl.simulation.measuring import ColumnStages
from ldpfl.simulation.record_sums import NoisySum

_MAX_EDGES, _MAX_COLUMNS = 1 << 12, 1 << 12
"""Maximum number of edges of a column, and of columns, that a node reads from the terms."""

_EDGES = TypeAdapter(
    Annotated[
        list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=_MAX_EDGES, fail_fast=True)]],
        Field(min_length=1, max_length=_MAX_COLUMNS, fail_fast=True),
    ]
)
_MEMORY_KEY = "statistics"
"""Beginning of the keys under which a checkpoint's memory holds the counts."""


def edges_text(stages: ColumnStages) -> str:
    """Return the edges of the next histograms as JSON, for the terms of a round: a list of numbers for each column."""
    return json.dumps([column_edges.tolist() for column_edges in stages.edges])


def read_edges(text: str) -> tuple[Floats, ...]:
    """Return the edges that :func:`edges_text` wrote.

    Raises:
        ProtocolError: the text holds no edges, or a column's edges do not increase.
    """
    try:
        edges = tuple(np.array(column, dtype=np.float64) for column in _EDGES.validate_json(text))
    except ValidationError as error:
        reason = error.errors(include_input=False)[0]["msg"][:80]
        raise ProtocolError(
            f"the server's histogram edges cannot be read: {reason}; check that server and node run the same version of ldpfl"
        ) from None
    for number, column in enumerate(edges):
        not_above_previous = np.diff(column) <= 0
        if not_above_previous.any():
            place = int(not_above_previous.argmax())
            raise ProtocolError(
                f"the server's histogram edges of column {number} (counted from 0) must increase, but {column[place]!s} is followed by "
                f"{column[place + 1]!s}; check that server and node run the same version of ldpfl"
            )
    return edges


def read_encoder(text: str) -> Encoder | None:
    """Return the encoder that the terms of a round hold for measured columns; None if no column was measured.

    Raises:
        ProtocolError: the text holds no encoder.
    """
    try:
        return Encoder.model_validate_json(text) if text else None
    except ValidationError as error:
        raise ProtocolError(
            f"the server's description of the table's columns is invalid: {error.errors(include_input=False)[0]['msg'][:80]}; "
            "check that server and node run the same version of ldpfl"
        ) from None


def unmeasured_stages(config: RunConfig) -> ColumnStages:
    """Return the stages of the columns that ``config`` names, before any measurement."""
    return ColumnStages.before_first_stage(describe_data(config).unscaled)


def histogram_counts(dataset: Dataset, edges: tuple[Floats, ...], rows: NDArray[np.int64], points: NDArray[np.int64]) -> Tensor:
    """Return a node's histograms, one after another, as counts (bins,) int64 between ``edges``: PRIVATE, for they have no noise yet.

    Args:
        dataset: the node's own table, whose columns are not scaled yet.
        rows: numbers of the rows to count.
        points: what each of the ``rows`` adds to its bin of each column: a number of steps of the mechanism's integer grid.
    """
    return torch.from_numpy(ColumnStages(dataset.unscaled, edges).counts(unscaled_values(dataset), rows, points))


def memory_with_counts(memory: Mapping[str, Tensor], stage: int, counts: NoisySum, points_a_row: int) -> dict[str, Tensor]:
    """Return a checkpoint's ``memory`` with the histograms of one more ``stage``, as one vector.

    The vector holds the standard deviation of the noise, followed by the counts, both in rows. ``counts`` is in lattice points,
    the integers in which sums are sent. Each row adds ``points_a_row`` of them to its bin, so both are divided by that.
    """
    return {**memory, f"{_MEMORY_KEY}.{stage}": torch.from_numpy(np.concatenate([[counts.noise], counts.points]) / points_a_row)}


def stages_from_memory(config: RunConfig, memory: Mapping[str, Tensor]) -> ColumnStages:
    """Return the stages of the columns with the counts in a checkpoint's ``memory``. Stages without counts are skipped."""
    stages = unmeasured_stages(config)
    for stage in range(1, STAGES + 1):
        noise_and_counts = memory.get(f"{_MEMORY_KEY}.{stage}")
        if noise_and_counts is not None:
            noise, counts = float(noise_and_counts[0]), noise_and_counts[1:].numpy()
            stages = stages.after(NoisySum(counts, noise), 1)  # 1 point a row, because the memory holds numbers of rows
    return stages


@dataclass(frozen=True)
class ColumnScaling:
    """Scaling of nodes' tables for training. ``encoder`` is None if the counts of every stage were lost: then only data.bounds are used."""

    encoder: Encoder | None
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The encoder for the terms of a round."""
        return "" if self.encoder is None else self.encoder.model_dump_json()


def column_scaling(config: RunConfig, stages: ColumnStages) -> ColumnScaling:
    """Return the scaling of nodes' tables that follows from the measured ``stages``.

    Raises:
        DataError: the target is a number, and the noise is too large to locate its values.
    """
    if not stages.stages:
        return ColumnScaling(None, ("no histogram of the columns was received: columns are scaled by data.bounds alone",))
    server_rows = load_dataset(config, None)
    scaled = stages.scaled(replace(server_rows, notes=()))  # without notes on the server's rows
    return ColumnScaling(scaled.encoder, scaled.notes)
