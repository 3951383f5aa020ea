"""Test whether a model is a function of one sample, by comparing its outputs for made-up samples in a batch and one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import sqrt

import torch
from torch import Tensor, nn

from ldpfl.data.inputs import map_tensors
from ldpfl.simulation import LocalTask

MADE_UP = 5
"""Number of samples in the largest batch that is compared. The trial must have as many samples."""
_BATCH_SIZES = (2, MADE_UP)

_TOLERANCE, _TINY = 0.02, 1e-6
"""Tolerance between outputs for the same samples, relative to their norm and absolute. Kernels round differently for other batch sizes."""


def mixes_samples(trial: LocalTask, weights: Tensor) -> bool:
    """Return whether the output of the model with ``weights`` (d,) for a sample depends on the other samples of its batch.

    Outputs for batches of several sizes are compared with the outputs for single samples, in training mode and in evaluation mode. Only
    differences beyond rounding count.
    """
    parameters = _without_zero_layers(trial.layout.unflatten(weights.to(trial.data.device)))
    for mode in (nullcontext(), _in_evaluation_mode(trial.module)):
        with mode, torch.no_grad():
            alone = [_outputs(trial, parameters, slice(place, place + 1)) for place in range(MADE_UP)]
            if any(_batch_differs(_outputs(trial, parameters, slice(size)), alone[:size]) for size in _BATCH_SIZES):
                return True
    return False


def _without_zero_layers(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of ``parameters``. A layer of zeros, which would hide any difference, gets random values of usual size instead."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(value.shape, generator=generator) / sqrt(value.numel() / len(value)) for name, value in parameters.items()}
    return {name: value.clone() if bool(value.any()) else drawn[name].to(value.device) for name, value in parameters.items()}


@contextmanager
def _in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch ``module`` to evaluation mode, and on exit restore the mode of each of its parts."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was_training in before.items():
            part.training = was_training


def _outputs(trial: LocalTask, parameters: dict[str, Tensor], places: slice) -> list[Tensor]:
    """Return the outputs (B, ...) for the made-up samples at ``places``. Tensors without a row for each sample are left out."""
    rows = trial.data.take(places)
    copies = {name: value.clone() for name, value in parameters.items()}
    result: object = trial.outputs(copies, trial.normalised(map_tensors(torch.clone, rows.inputs)))
    values = list(result.values()) if isinstance(result, Mapping) else list(result) if isinstance(result, tuple | list) else [result]
    return [value for value in values if isinstance(value, Tensor) and value.shape[:1] == (len(rows),)]


def _batch_differs(together: list[Tensor], alone: list[list[Tensor]]) -> bool:
    """Return whether the outputs of a batch, computed ``together``, differ from the outputs of its samples ``alone``.

    If their shapes differ, the outputs cannot be compared, and the result is False.
    """
    shapes = [output.shape[1:] for output in together]
    if any([output.shape[1:] for output in outputs] != shapes for outputs in alone):
        return False
    return any(_differ_beyond_rounding(output, torch.cat([outputs[place] for outputs in alone])) for place, output in enumerate(together))


def _differ_beyond_rounding(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors differ by more than rounding. Entries that are NaN or infinite count as 0."""
    first, second = (tensor.double().nan_to_num(0.0, 0.0, 0.0) for tensor in (first, second))
    return bool((first - second).norm() > _TOLERANCE * torch.maximum(first.norm(), second.norm()) + _TINY)
