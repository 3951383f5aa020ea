"""Histograms of nodes' columns, which rounds before the first round of training take one after another.

A node counts its rows between edges that the server names, and scales its table by what the histograms told. Whatever the edges are, a
record changes one count of each column and no more.
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
from ldpfl.experiments.dataset import described, load_dataset
from ldpfl.simulation.measuring import ColumnStages
from ldpfl.simulation.record_sums import NoisySum

_MOST_EDGES, _MOST_COLUMNS = 1 << 12, 1 << 12
_EDGES = TypeAdapter(
    Annotated[
        list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=_MOST_EDGES, fail_fast=True)]],
        Field(min_length=1, max_length=_MOST_COLUMNS, fail_fast=True),
    ]
)
_KEPT = "statistics"


def edges_text(stages: ColumnStages) -> str:
    """Return the edges of the next histograms as text, for the terms of a round."""
    return json.dumps([own.tolist() for own in stages.edges])


def edges_in(text: str) -> tuple[Floats, ...]:
    """Return the edges that :func:`edges_text` wrote.

    Raises:
        ProtocolError: the text is something else, or some edges do not ascend.
    """
    try:
        found = tuple(np.array(own, dtype=np.float64) for own in _EDGES.validate_json(text))
    except ValidationError as error:
        raise ProtocolError(f"the server's edges cannot be read: {error.errors(include_input=False)[0]['msg'][:80]}") from None
    if not all((np.diff(own) > 0).all() for own in found):
        raise ProtocolError("the server's edges do not ascend")
    return found


def encoder_in(text: str) -> Encoder | None:
    """Return what the terms of a round say of columns that were measured; None where nothing was.

    Raises:
        ProtocolError: the text is something else.
    """
    try:
        return Encoder.model_validate_json(text) if text else None
    except ValidationError as error:
        raise ProtocolError(f"the server's encoding cannot be read: {error.errors(include_input=False)[0]['msg'][:80]}") from None


def begun_for(config: RunConfig) -> ColumnStages:
    """Return the state before anything is measured of the columns that ``config`` names."""
    return ColumnStages.begun(described(config).unscaled)


def counted_at_node(dataset: Dataset, edges: tuple[Floats, ...], rows: NDArray[np.int64], points: NDArray[np.int64]) -> Tensor:
    """Return a node's counts (bins,) int64 between ``edges``, in which each of ``rows`` counts so many ``points``: PRIVATE.

    Args:
        dataset: the node's own table, whose columns are not scaled yet.
    """
    return torch.from_numpy(ColumnStages(dataset.unscaled, edges).counts(unscaled_values(dataset), rows, points))


def kept_with(memory: Mapping[str, Tensor], stage: int, found: NoisySum, point: int) -> dict[str, Tensor]:
    """Return ``memory`` of a checkpoint with the counts of one more stage, in rows, behind their noise."""
    return {**memory, f"{_KEPT}.{stage}": torch.from_numpy(np.concatenate([[found.noise], found.points]) / point)}


def stages_in(config: RunConfig, memory: Mapping[str, Tensor]) -> ColumnStages:
    """Return what a checkpoint's ``memory`` tells of the columns. A stage of which nothing came is passed over."""
    stages = begun_for(config)
    for stage in range(1, STAGES + 1):
        kept = memory.get(f"{_KEPT}.{stage}")
        if kept is not None:
            stages = stages.after(NoisySum(kept[1:].numpy(), float(kept[0])), 1)
    return stages


@dataclass(frozen=True)
class Scaled:
    """How tables are scaled from the first round of training on; ``encoder`` is None where every stage was lost, and bounds alone count."""

    encoder: Encoder | None
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The encoder for the terms of a round."""
        return "" if self.encoder is None else self.encoder.model_dump_json()


def scaled_by_stages(config: RunConfig, stages: ColumnStages) -> Scaled:
    """Return how tables are scaled by what was measured.

    Raises:
        DataError: the target is a number, and noise hides where it lies.
    """
    if not stages.stages:
        return Scaled(None, ("no histogram of the columns came: they are scaled by data.bounds alone",))
    public = load_dataset(config, None)
    found = stages.scaled(replace(public, notes=()))
    return Scaled(found.encoder, found.notes)
