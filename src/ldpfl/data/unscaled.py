"""A column of a table that is to be measured before training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unscaled:
    """A column that is to be measured before training.

    Attributes:
        name: of the column, for messages.
        place: of its numbers among the inputs; None for a target.
        bounds: least and largest value that the public knows of; None where it knows none.
        classes: number of values of a target that is a class, or 2 for a label; 0 for numbers.
        label: which of several labels a target is; None where it is none of several.
    """

    name: str
    place: int | None = None
    bounds: tuple[float, float] | None = None
    classes: int = 0
    label: int | None = None
