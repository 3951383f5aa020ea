"""Test whether a model is a function of one sample, by comparing its outputs for made-up samples in a batch and one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import sqrt

import torch
from torch import Tensor, nn

from ldpfl.data.inputs import each
from ldpfl.simulation import LocalTask

MADE_UP = 5
"""Number of samples in the largest batch that is compared. The trial must have as many samples."""
_BATCHES = (2, MADE_UP)

_ROUNDING, _TINY = 0.02, 1e-6
"""Tolerance between outputs for the same samples, relative to their norm and absolute. Kernels round differently for other batch sizes."""


def mixes_samples(trial: LocalTask, weights: Tensor) -> bool:
    """Return whether the output of the model with ``weights`` (d,) for a sample depends on the other samples of its batch.

    Outputs for batches of several sizes are compared with the outputs for single samples, in training mode and in evaluation mode. Only
    differences beyond rounding count.
    """
    parameters = _not_zero(trial.layout.unflatten(weights.to(trial.data.device)))
    for mode in (nullcontext(), _evaluating(trial.module)):
        with mode, torch.no_grad():
            alone = [_outputs(trial, parameters, slice(place, place + 1)) for place in range(MADE_UP)]
            if any(_differ(_outputs(trial, parameters, slice(size)), alone[:size]) for size in _BATCHES):
                return True
    return False


def _not_zero(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of ``parameters``. A layer of zeros, which would hide any difference, gets small random values instead."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(own.shape, generator=generator) / sqrt(own.numel() / len(own)) for name, own in parameters.items()}
    return {name: own.clone() if bool(own.any()) else drawn[name].to(own.device) for name, own in parameters.items()}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch ``module`` to evaluation mode, and on exit restore the mode of each of its parts."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in before.items():
            part.training = was


def _outputs(trial: LocalTask, parameters: dict[str, Tensor], places: slice) -> list[Tensor]:
    """Return the outputs (B, ...) for the made-up samples at ``places``, one tensor or several."""
    rows = trial.data.take(places)
    own = {name: value.clone() for name, value in parameters.items()}
    found: object = trial.outputs(own, trial.normalised(each(torch.clone, rows.inputs)))
    values = list(found.values()) if isinstance(found, Mapping) else list(found) if isinstance(found, tuple | list) else [found]
    return [own for own in values if isinstance(own, Tensor) and own.shape[:1] == (len(rows),)]


def _differ(together: list[Tensor], alone: list[list[Tensor]]) -> bool:
    """Whether a batch's outputs are others than those of its samples; where their form is another, nothing is compared."""
    if any([own.shape[1:] for own in one] != [own.shape[1:] for own in together] for one in alone):
        return False
    return any(_are_apart(own, torch.cat([one[place] for one in alone])) for place, own in enumerate(together))


def _are_apart(first: Tensor, second: Tensor) -> bool:
    first, second = (own.double().nan_to_num(0.0, 0.0, 0.0) for own in (first, second))
    return bool((first - second).norm() > _ROUNDING * torch.maximum(first.norm(), second.norm()) + _TINY)
