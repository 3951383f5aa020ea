"""What is these hospitals' own: their network, how they read a table, and the loss of one patient."""

from __future__ import annotations

import os
from pathlib import Path

import pandas
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ldpfl.flower import RecordTask

BOUNDS = {"age": (18, 100), "pulse": (30, 200), "lactate": (0, 15), "days": (0, 60)}
WARDS = ("cardiology", "intensive care", "surgery")
"""Rules that are public and the same at each hospital. Bounds that are taken from a hospital's own rows would let one row decide how
others are read, and its protection would end there."""


class Network(nn.Module):
    """Two branches, for numbers and for the ward."""

    def __init__(self) -> None:
        super().__init__()
        self.ward = nn.Embedding(len(WARDS) + 1, 4)
        self.numbers = nn.Linear(len(BOUNDS), 12)
        self.out = nn.Linear(16, 1)

    def forward(self, numbers: Tensor, ward: Tensor) -> Tensor:
        """Return the log odds (N,) that a patient comes back within a month."""
        both = torch.cat([torch.tanh(self.numbers(numbers)), self.ward(ward)], dim=1)
        found: Tensor = self.out(both).squeeze(1)
        return found


def read(path: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of all rows of a table, and what to tell from them.

    No cell stops the reading: one that is no number is taken for the middle of its bounds, a ward that is none of ours for the last one.
    A row that stopped it would show, because this hospital's report would be one of nothing.
    """
    table = pandas.read_csv(path, dtype=str)
    scaled = []
    for name, (low, high) in BOUNDS.items():
        values = torch.tensor(pandas.to_numeric(table[name], errors="coerce").to_numpy("float32"))
        scaled.append(values.nan_to_num((low + high) / 2).clamp(low, high).sub(low).div(high - low).mul(2).sub(1))
    wards = {name: place for place, name in enumerate(WARDS)}
    ward = torch.tensor([wards.get(name, len(WARDS)) for name in table["ward"]])
    came_back = torch.tensor((table["readmitted"] == "yes").to_numpy("float32"))
    return {"numbers": torch.stack(scaled, dim=1), "ward": ward}, came_back


def records(context: Context) -> RecordTask:
    """Return this hospital's records; where its table is, its operator says in the environment of the SuperNode."""
    path = os.environ["HOSPITAL_TABLE"].replace("{partition}", str(context.node_config.get("partition-id")))
    return RecordTask(Network(), *read(Path(path)), binary_cross_entropy_with_logits)
