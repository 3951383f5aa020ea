"""A column of a table that is measured before training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Unscaled:
    """A column that is measured before training.

    Attributes:
        name: name of the column, for messages.
        place: index of the column among the inputs; None for a target.
        bounds: publicly known least and largest value, or None.
        classes: number of classes of a target, 2 for a label; 0 for numbers.
        label: index of the target's column if there are several targets, else None.
    """

    name: str
    place: int | None = None
    bounds: tuple[float, float] | None = None
    classes: int = 0
    label: int | None = None
