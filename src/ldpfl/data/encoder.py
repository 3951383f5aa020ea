"""How rows of a table become what a model takes, and its outputs words again: for rows that it was not trained on."""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ldpfl.data.columns import width_of
from ldpfl.data.settings import DataConfig
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import Targets

if TYPE_CHECKING:
    import pandas


_WIDEST = 1 << 24
"""Inputs of a row: a file of somebody else's makes no model beyond all memory."""


class Encoder(BaseModel):
    """What is known of a table's columns, all of it public or measured with noise.

    Attributes:
        data: the settings, in which each column is one of numbers or of words.
        targets: what is told of a row.
        classes: in the order of a classifier's outputs.
        unscaled: places of the inputs that were measured, and their ``centers`` and ``spreads``; None where noise hid a column.
        target_center, target_spread: a number that is told, in its own unit, is the center and so many spreads.
        width: inputs of a row.
        outputs: of the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: DataConfig
    targets: Targets
    classes: tuple[str, ...] = ()
    unscaled: tuple[int, ...] = ()
    centers: tuple[float | None, ...] = ()
    spreads: tuple[float | None, ...] = ()
    target_center: float = 0.0
    target_spread: float = 1.0
    width: Annotated[int, Field(ge=0, le=_WIDEST)]
    outputs: Annotated[int, Field(ge=1, le=_WIDEST)]

    @model_validator(mode="after")
    def _has_a_class_an_output(self) -> Self:
        if (width := width_of(self.data)) != self.width:
            raise ValueError(f"{width:,} inputs come of its columns, and it says {self.width:,}")
        if self.targets == "class" and len(self.classes) != self.outputs:
            raise ValueError("there are as many classes as outputs")
        if self.targets == "number" and self.outputs != 1:
            raise ValueError("a number is one output")
        if self.targets == "classes" and len(self.data.target) != self.outputs:
            raise ValueError("there are as many labels as outputs")
        if len({place for place in self.unscaled if 0 <= place < self.width}) != len(self.unscaled):
            raise ValueError("each measured input is one of the inputs")
        if any(len(known) not in (0, len(self.unscaled)) for known in (self.centers, self.spreads)):
            raise ValueError("there are as many centers and spreads as measured inputs")
        return self

    def measured(self, center: NDArray[np.float64], spread: NDArray[np.float64]) -> Encoder:
        """Return the same with the middles and spreads of ``unscaled`` columns, then of the target where it was measured too."""
        count = len(self.unscaled)
        known = {"centers": tuple(map(_known, center[:count])), "spreads": tuple(map(_known, spread[:count]))}
        if len(center) == count:
            return self.model_copy(update=known)
        return self.model_copy(update={**known, "target_center": float(center[-1]), "target_spread": float(spread[-1])})

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` (N, width) with what stood on its own scale measured by the centers and spreads."""
        if inputs.shape[1] != self.width:
            raise DataError(f"{inputs.shape[1]} inputs come of these columns, and the model takes {self.width}: the encoding is damaged")
        if not self.unscaled:
            return inputs
        places, found = torch.tensor(self.unscaled), inputs.clone()
        center, spread = (torch.tensor([nan if value is None else value for value in own]) for own in (self.centers, self.spreads))
        found[:, places] = moved(found[:, places], center, spread)
        return found

    def answers(self, outputs: Tensor) -> pandas.DataFrame:
        """Return in words what ``outputs`` (N, outputs) of the model say: probabilities and the likeliest class, or a number.

        Raises:
            ConfigError: a language model tells no row anything.
            DataError: the model has other outputs.
        """
        import pandas

        if outputs.numel() != len(outputs) * self.outputs:
            raise DataError(
                f"the model says {tuple(outputs.shape[1:])} of a row, not {self.outputs} figures: it is not that of the encoding"
            )
        if self.targets == "number":
            values = outputs.reshape(len(outputs)).double() * self.target_spread + self.target_center
            return pandas.DataFrame({printable(str(self.data.target)): values.numpy()})
        if self.targets == "class":
            chances = outputs.double().softmax(dim=1).numpy()
            said = np.array([printable(name) for name in self.classes], dtype=object)[chances.argmax(axis=1)]
            by_class = {f"probability of {printable(name)}": chances[:, place] for place, name in enumerate(self.classes)}
            return pandas.DataFrame({printable(str(self.data.target)): said, **by_class})
        if self.targets == "classes":
            return pandas.DataFrame(outputs.double().sigmoid().numpy(), columns=[printable(name) for name in self.data.target])
        raise ConfigError("a language model says how texts go on, and nothing of a row")


REACH = 6.0
"""Spreads beyond which a number counts as if it lay there."""


def moved(values: Tensor, center: Tensor, spread: Tensor, reach: float = REACH) -> Tensor:
    """Return ``values`` (N, columns) less their ``center`` in units of ``spread``, and 0 for what is not known."""
    return ((values - center) / spread).clamp(-reach, reach).nan_to_num(0.0)


def _known(value: Any) -> float | None:
    return float(value) if isfinite(value) else None
