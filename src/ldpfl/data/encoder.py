"""Encode new rows of a table as a model's inputs, and decode the model's outputs to classes and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from ldpfl.data.columns import input_width
from ldpfl.data.settings import DataConfig
from ldpfl.errors import ConfigError, DataError, printable
from ldpfl.tasks import Targets
from ldpfl.tasks.outcomes import class_probabilities, expected_count, median_class, survival_probabilities
from ldpfl.util.user_code import public_name

if TYPE_CHECKING:
    import pandas

_Floats = Annotated[tuple[float, ...], Field(fail_fast=True)]
Knots = tuple[_Floats, _Floats]
"""Ascending values, and the scaled value of each."""

_MAX_WIDTH = 1 << 24
"""Maximum number of inputs or outputs. Without it, an encoding from an untrusted file could exhaust the memory."""

_MUCH_BEYOND = 0.5
"""Share of a column's values beyond the outer knots from which its unit may be another than in training."""


class Encoder(BaseModel):
    """How rows of a table are encoded as inputs, and outputs decoded. All of it is public or was measured with noise.

    Attributes:
        data: the data settings, with the kind of each column filled in.
        targets: the kind of target that the model predicts.
        classes: names of the classes, in the order of a classifier's outputs.
        places: indices of the inputs that are numbers.
        knots: for each index in ``places`` the points between which its values are interpolated; None if noise hid the column's scale.
        shares: measured share of each class or label; for a count, its mean in units of ``target_spread``; for survival, the hazard of
            each interval.
        cuts: times at which the intervals of survival end.
        target_center, target_spread: a predicted number is ``target_center`` plus the model's output times ``target_spread``.
        width: number of inputs for each row.
        outputs: number of outputs of the model.
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
    width: Annotated[int, Field(ge=0, le=_MAX_WIDTH)]
    outputs: Annotated[int, Field(ge=1, le=_MAX_WIDTH)]

    @model_validator(mode="after")
    def _check_consistent(self) -> Self:
        """Raise a ValueError if sizes, classes and knots do not fit together, as they may in an encoding from an untrusted file."""
        width = input_width(self.data)
        if width != self.width:
            raise ValueError(f"width is {self.width:,}, but the columns in data make {width:,} inputs")
        if self.targets == "class" and len(self.classes) != self.outputs:
            raise ValueError(f"there are {len(self.classes)} classes and {self.outputs} outputs, expected one output for each class")
        if self.targets in ("number", "count") and self.outputs != 1:
            raise ValueError(f"there are {self.outputs} outputs for a target that is a number, expected 1")
        if self.targets == "ordered" and len(self.classes) != self.outputs + 1:
            raise ValueError(
                f"there are {len(self.classes)} ordered classes and {self.outputs} outputs, expected one output less than classes"
            )
        if self.targets == "survival" and (len(self.data.target) != 2 or len(self.cuts) not in (0, self.outputs)):
            raise ValueError("survival expects two target columns, and one output for each interval")
        if self.targets == "classes" and len(self.data.target) != self.outputs:
            raise ValueError(f"there are {len(self.data.target)} labels and {self.outputs} outputs, expected one output for each label")
        valid_places = {place for place in self.places if 0 <= place < self.width}  # fewer if a place is repeated or out of range
        if len(valid_places) != len(self.places) or len(self.knots) != len(self.places):
            raise ValueError("places must be distinct input indices below width, and knots must have one entry for each of them")
        for values, scaled_values in filter(None, self.knots):
            are_pairs = 2 <= len(values) == len(scaled_values)
            are_finite = all(map(isfinite, (*values, *scaled_values)))
            if not (are_pairs and are_finite and list(values) == sorted(set(values))):
                raise ValueError("knots must be two or more ascending values, with one finite scaled value for each")
        return self

    @property
    def _number_columns(self) -> list[str]:
        """Names of the columns of numbers, in the order of ``places``. Empty for a model of texts."""
        return [name for name in self.data.columns if name not in self.data.words and name not in self.data.categories]

    @property
    def hidden_columns(self) -> frozenset[str]:
        """Columns of numbers that the model does not see: noise hid their scale, so they are 0 in each row. Empty before scaling."""
        # strict=False, here and below: ``knots`` is empty until the columns are scaled.
        return frozenset(name for name, knots in zip(self._number_columns, self.knots, strict=False) if knots is None)

    def columns_beyond_knots(self, inputs: Tensor) -> list[str]:
        """Return the columns of numbers in which at least half of ``inputs`` (N, width) lie beyond the range that training scaled."""
        beyond = []
        for name, place, knots in zip(self._number_columns, self.places, self.knots, strict=False):
            values = inputs[:, place].double()
            values = values[~values.isnan()]
            if knots is not None and len(values):
                (least, *_, largest), _ = knots
                if ((values < least) | (values > largest)).double().mean() >= _MUCH_BEYOND:
                    beyond.append(name)
        return beyond

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` (N, width) with their numbers scaled as in training.

        Raises:
            DataError: ``inputs`` has another width.
        """
        if inputs.shape[1] != self.width:
            raise DataError(
                f"these columns make {inputs.shape[1]} inputs, but the model takes {self.width}: restore encoding.json of the run"
            )
        return scale_columns(inputs, self.places, self.knots)

    def handed_on(self) -> Encoder:
        """Return a copy that can be published: it names no folder of this machine."""
        return self.with_tokenizer(public_name(self.data.tokenizer))

    def with_tokenizer(self, tokenizer: str) -> Encoder:
        """Return a copy that uses ``tokenizer``."""
        return self.model_copy(update={"data": self.data.model_copy(update={"tokenizer": tokenizer})})

    def check_threshold(self, threshold: float | None) -> None:
        """Raise if the model cannot predict with ``threshold``, the least probability of the second class. None is always valid.

        Raises:
            ConfigError: the model is not a classifier of two classes, or ``threshold`` does not lie between 0 and 1.
        """
        if threshold is not None:
            check_threshold(threshold, self.outputs if self.targets == "class" else None)

    def predictions(self, outputs: Tensor, threshold: float | None = None) -> pandas.DataFrame:
        """Return the predictions for the model's ``outputs`` (N, outputs), one row for each.

        Classes give the likeliest class and the probability of each class. Ordered classes give the median class and the probabilities.
        A time to an event gives the probability that it lies beyond each cut. Labels give a probability each, and other targets a number.

        Args:
            threshold: predict the second of two classes wherever its probability is at least this.

        Raises:
            ConfigError: a language model makes no prediction for a row.
            DataError: ``outputs`` has another number of outputs than the encoding.
        """
        import pandas

        if outputs.numel() != len(outputs) * self.outputs:
            raise DataError(
                f"the model's output for a row has the shape {tuple(outputs.shape[1:])}, expected {self.outputs} numbers: use the model "
                "that this encoding was made for"
            )
        if self.targets == "number":
            values = outputs.reshape(len(outputs)).double() * self.target_spread + self.target_center
            return pandas.DataFrame({printable(str(self.data.target)): values.numpy()})
        if self.targets == "count":
            counts = expected_count(outputs.reshape(len(outputs)).double()) * self.target_spread
            return pandas.DataFrame({printable(str(self.data.target)): counts.numpy()})
        if self.targets == "survival":
            time = printable(self.data.target[0])
            beyond = survival_probabilities(outputs.double()).numpy()
            return pandas.DataFrame({f"probability of {time} beyond {cut:.6g}": beyond[:, place] for place, cut in enumerate(self.cuts)})
        if self.targets == "ordered":
            logits = outputs.double()
            return class_predictions(str(self.data.target), self.classes, class_probabilities(logits), median_class(logits))
        if self.targets == "class":
            chances = outputs.double().softmax(dim=1)
            return class_predictions(str(self.data.target), self.classes, chances, most_likely_class(chances, threshold))
        if self.targets == "classes":
            return pandas.DataFrame(outputs.double().sigmoid().numpy(), columns=[printable(name) for name in self.data.target])
        raise ConfigError("a language model predicts tokens of a text, not rows of a table: load its module with ldpfl.load_model instead")


def check_threshold(threshold: float, classes: int | None) -> None:
    """Raise if a model with ``classes`` classes cannot predict with ``threshold``, the least probability of the second of two classes.

    Args:
        classes: number of classes of the model; None if it is not a classifier.

    Raises:
        ConfigError: there are not two classes, or ``threshold`` does not lie between 0 and 1.
    """
    if classes != 2:
        predicted = "no class" if classes is None else f"one of {classes:,} classes"
        raise ConfigError(
            f"threshold = {threshold:g} is only for models of two classes, and this model predicts {predicted}: leave the threshold out"
        )
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold is {threshold:g}, expected a probability above 0 and below 1, such as 0.2")


def most_likely_class(chances: Tensor, threshold: float | None = None) -> Tensor:
    """Return the most likely class (N,) by the probabilities ``chances`` (N, K). A ``threshold`` decides between classes 1 and 0."""
    return chances.argmax(dim=1) if threshold is None else (chances[:, 1] >= threshold).long()


def class_predictions(target: str, classes: Sequence[str], chances: Tensor, predicted: Tensor) -> pandas.DataFrame:
    """Return a data frame of predictions, with the name of each row's class in the column ``target``, and the probability of each class.

    Args:
        chances: (N, K) probability of each class.
        predicted: (N,) number of the predicted class.
    """
    import pandas

    names = [printable(name) for name in classes]
    by_class = {f"probability of {name}": chances[:, place].numpy() for place, name in enumerate(names)}
    return pandas.DataFrame({printable(target): np.array(names, dtype=object)[predicted.numpy()], **by_class})


def scale_columns(inputs: Tensor, places: Sequence[int], knots: Sequence[Knots | None]) -> Tensor:
    """Return a copy of ``inputs`` (N, F) in which the columns at ``places`` are scaled by their ``knots``.

    Knots are ascending values and the scaled value of each, between which values are interpolated linearly. A value beyond the outer knots
    becomes that knot's scaled value. A missing value becomes 0, and so does a whole column without knots.
    """
    result = inputs.clone()
    for place, column_knots in zip(places, knots, strict=True):
        values = np.zeros(len(inputs)) if column_knots is None else np.interp(inputs[:, place].double().numpy(), *column_knots)
        result[:, place] = torch.from_numpy(values).float().nan_to_num(0.0)
    return result
