"""Test whether a model is a function of one sample, by comparing its outputs for made-up samples in a batch and one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from ldpfl.data.samples import map_tensors
from ldpfl.simulation import LocalTask
from ldpfl.util.side_effects import OutsideState

MADE_UP = 5
"""Number of samples in the largest batch that is compared. The trial must have as many samples."""
_BATCH_SIZES = (2, MADE_UP)

_TOLERANCE, _TINY = 0.02, 1e-6
"""Tolerance between outputs for the same sample, relative to their norm and absolute. Kernels round differently for other batch sizes."""

_OUTLIER_FACTOR, _BYTES_DIVISOR = 1e4, 16
"""Factor that makes one sample larger than others, and divisor that makes the bytes of the others smaller."""


def mixes_samples(trial: LocalTask, weights: Tensor) -> bool:
    """Return whether the output of the model with ``weights`` (d,) for a sample depends on the other samples of its batch.

    Outputs for batches of several sizes are compared with the outputs for single samples, in training mode and in evaluation mode. Only
    differences beyond rounding count. ``trial`` has made-up samples. The comparison is repeated with one sample that is far larger than
    the others. It finds models that scale a whole batch by one number, as in quantisation: for samples of similar size, that number would
    hardly differ from the number for each sample alone.
    """
    parameters = _without_zero_layers(trial.layout.unflatten(weights.to(trial.data.device)))
    inputs_with_outlier = map_tensors(_with_outlier, trial.data.inputs)
    with OutsideState.of(trial.module).restored():
        # What the model's code keeps in classes is put back afterwards: a kept outlier could hide what real records change.
        if _mixes(trial, parameters):
            return True
        with suppress(Exception):  # a model may refuse numbers as large as the outlier's
            return _mixes(replace(trial, data=replace(trial.data, inputs=inputs_with_outlier)), parameters)
    return False


def _mixes(trial: LocalTask, parameters: dict[str, Tensor]) -> bool:
    """Return whether outputs for batches of the made-up samples in ``trial`` differ from the outputs for single samples."""
    for mode in (nullcontext(), _in_evaluation_mode(trial.module)):
        with mode, torch.no_grad():
            alone = [_outputs(trial, parameters, slice(place, place + 1)) for place in range(MADE_UP)]
            if any(_batch_differs(_outputs(trial, parameters, slice(size)), alone[:size]) for size in _BATCH_SIZES):
                return True
    return False


def _with_outlier(values: Tensor) -> Tensor:
    """Return ``values`` (B, ...) with a first sample that is far larger than the others.

    Whole numbers other than bytes may be tokens, so they are returned unchanged.
    """
    is_first = torch.arange(len(values), device=values.device).view(-1, *[1] * (values.dim() - 1)) == 0  # (B, 1, ..., 1)
    if values.is_floating_point():
        return torch.where(is_first, values * _OUTLIER_FACTOR, values)
    # Bytes end at 255, so the others are made smaller.
    return torch.where(is_first, values, values // _BYTES_DIVISOR) if values.dtype == torch.uint8 else values


def _without_zero_layers(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of ``parameters``. Zeros would hide differences, so a parameter of zeros gets random values of usual size instead."""
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
    """Return the tensors (B, ...) among the outputs for the made-up samples at ``places``, if they have a row for each sample."""
    rows = trial.data.take(places)
    copies = {name: value.clone() for name, value in parameters.items()}  # a model might change its parameters or inputs in place
    result: object = trial.outputs(copies, trial.normalised(map_tensors(torch.clone, rows.inputs)))
    values = [result]
    if isinstance(result, Mapping):
        values = list(result.values())
    elif isinstance(result, tuple | list):
        values = list(result)
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
    """Return whether two tensors (B, ...) differ in any row by more than rounding. Entries that are NaN or infinite count as 0."""
    first, second = (tensor.double().nan_to_num(0.0, 0.0, 0.0).reshape(len(tensor), -1) for tensor in (first, second))
    sizes = torch.maximum(first.norm(dim=1), second.norm(dim=1))
    return bool(((first - second).norm(dim=1) > _TOLERANCE * sizes + _TINY).any())
