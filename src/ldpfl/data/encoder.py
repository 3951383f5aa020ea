"""How rows of a table become what a model takes, and its outputs words again: for rows that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ldpfl.data.columns import width_of
from ldpfl.data.settings import DataConfig
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import Targets
from ldpfl.tasks.outcomes import class_chances, expected_count, middle_class, survival
from ldpfl.util.user_code import public_name

if TYPE_CHECKING:
    import pandas


_Floats = Annotated[tuple[float, ...], Field(fail_fast=True)]
Knots = tuple[_Floats, _Floats]
"""Ascending values, and what each of them becomes."""

_WIDEST = 1 << 24
"""Inputs of a row: a file of somebody else's makes no model beyond all memory."""


class Encoder(BaseModel):
    """What is known of a table's columns, all of it public or measured with noise.

    Attributes:
        data: the settings, in which each column is one of numbers or of words.
        targets: what is told of a row.
        classes: in the order of a classifier's outputs.
        places: of the inputs that are numbers.
        knots: for each of them the points, values and what they become, between which it is brought to its scale; None where noise hid it.
        shares: share of each class, or of each label, as it was measured; the mean of a count, in its spreads; or the hazard of each
            interval of time.
        cuts: times at which the intervals of survival end.
        target_center, target_spread: a number that is told, in its own unit, is the center and so many spreads.
        width: inputs of a row.
        outputs: of the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data: DataConfig
    targets: Targets
    classes: Annotated[tuple[str, ...], Field(fail_fast=True)] = ()
    places: Annotated[tuple[int, ...], Field(fail_fast=True)] = ()
    knots: Annotated[tuple[Knots | None, ...], Field(fail_fast=True)] = ()
    shares: _Floats = ()
    cuts: _Floats = ()
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
        if self.targets in ("number", "count") and self.outputs != 1:
            raise ValueError("a number is one output")
        if self.targets == "ordered" and len(self.classes) != self.outputs + 1:
            raise ValueError("there is one output less than there are ordered classes")
        if self.targets == "survival" and (len(self.data.target) != 2 or len(self.cuts) not in (0, self.outputs)):
            raise ValueError("survival has two columns and as many intervals as outputs")
        if self.targets == "classes" and len(self.data.target) != self.outputs:
            raise ValueError("there are as many labels as outputs")
        if len({place for place in self.places if 0 <= place < self.width}) != len(self.places) or len(self.knots) != len(self.places):
            raise ValueError("each scaled input is one of the inputs, and has knots or None")
        for values, deviates in filter(None, self.knots):
            if not 2 <= len(values) == len(deviates) or not all(map(isfinite, (*values, *deviates))) or list(values) != sorted(set(values)):
                raise ValueError("knots are two or more ascending values, and as many finite numbers that they become")
        return self

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` (N, width) with their numbers on the scale that the model takes.

        Raises:
            DataError: there are more inputs, or fewer.
        """
        if inputs.shape[1] != self.width:
            raise DataError(f"{inputs.shape[1]} inputs come of these columns, and the model takes {self.width}: the encoding is damaged")
        return scaled_by(inputs, self.places, self.knots)

    def handed_on(self) -> Encoder:
        """Return a copy that names no folder of this machine."""
        return self.read_by(public_name(self.data.tokenizer))

    def read_by(self, tokenizer: str) -> Encoder:
        """Return a copy that reads texts by ``tokenizer``."""
        return self.model_copy(update={"data": self.data.model_copy(update={"tokenizer": tokenizer})})

    def check_threshold(self, threshold: float | None) -> None:
        """Return if predictions can be made by ``threshold``; None is no threshold.

        Raises:
            ConfigError: the model tells something else than one of two classes, or the threshold is no probability.
        """
        if threshold is not None:
            check_threshold(threshold, self.outputs if self.targets == "class" else None)

    def answers(self, outputs: Tensor, threshold: float | None = None) -> pandas.DataFrame:
        """Return in words what ``outputs`` (N, outputs) of the model say: probabilities and the likeliest class, or a number.

        Of ordered classes it is the median one; of a time to an event, the probability that it lies beyond each cut. With a ``threshold``
        the class is the second of two wherever its probability is no less than that.

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
        if self.targets == "count":
            counts = expected_count(outputs.reshape(len(outputs)).double()) * self.target_spread
            return pandas.DataFrame({printable(str(self.data.target)): counts.numpy()})
        if self.targets == "survival":
            time, lasting = printable(self.data.target[0]), survival(outputs.double()).numpy()
            return pandas.DataFrame({f"probability of {time} beyond {cut:.6g}": lasting[:, place] for place, cut in enumerate(self.cuts)})
        if self.targets in ("class", "ordered"):
            ordered, logits = self.targets == "ordered", outputs.double()
            if ordered:
                return told_classes(str(self.data.target), self.classes, class_chances(logits), middle_class(logits))
            chances = logits.softmax(dim=1)
            return told_classes(str(self.data.target), self.classes, chances, likeliest(chances, threshold))
        if self.targets == "classes":
            return pandas.DataFrame(outputs.double().sigmoid().numpy(), columns=[printable(name) for name in self.data.target])
        raise ConfigError("a language model says how texts go on, and nothing of a row")


def check_threshold(threshold: float, classes: int | None) -> None:
    """Return if the second of two classes can be told by ``threshold``.

    Args:
        classes: how many classes the model tells apart; None where it tells something else.

    Raises:
        ConfigError: there are not two classes, or the threshold is no probability between 0 and 1.
    """
    if classes != 2:
        told = "something else than a class" if classes is None else f"one of {classes:,} classes"
        raise ConfigError(f"threshold = {threshold:g} decides between two classes, and this model tells {told}: leave the threshold out")
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold is {threshold:g}, expected a probability above 0 and below 1: give one, such as 0.2")


def likeliest(chances: Tensor, threshold: float | None = None) -> Tensor:
    """Return the likeliest class of each row (N,) by its ``chances`` (N, K); of two classes the second one from ``threshold`` on."""
    return chances.argmax(dim=1) if threshold is None else (chances[:, 1] >= threshold).long()


def told_classes(target: str, classes: Sequence[str], chances: Tensor, told: Tensor) -> pandas.DataFrame:
    """Return a row for each of ``told`` (N,): the class in the column ``target``, and the probability of each of the ``classes``."""
    import pandas

    names = [printable(name) for name in classes]
    by_class = {f"probability of {name}": chances[:, place].numpy() for place, name in enumerate(names)}
    return pandas.DataFrame({printable(target): np.array(names, dtype=object)[told.numpy()], **by_class})


def scaled_by(inputs: Tensor, places: Sequence[int], knots: Sequence[Knots | None]) -> Tensor:
    """Return a copy of ``inputs`` (N, F) in which each of ``places`` is brought to its scale by its ``knots``.

    Between two knots a value is interpolated, and beyond the first or the last it becomes what that one becomes. A gap becomes 0, and so
    does all of a column without knots.
    """
    found = inputs.clone()
    for place, own in zip(places, knots, strict=True):
        values = np.zeros(len(inputs)) if own is None else np.interp(inputs[:, place].double().numpy(), *own)
        found[:, place] = torch.from_numpy(values).float().nan_to_num(0.0)
    return found
