"""Check that training can change each trained parameter, by the gradients of outputs for made-up samples."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from ldpfl.data.inputs import Inputs
from ldpfl.simulation import LocalTask

_STEPS = 4
"""Steps after which a parameter has moved, if it can: the second factor of a product moves after the first, which began with zeros."""


def immovable(trial: LocalTask, weights: Tensor) -> list[str]:
    """Return the names of trained parameters that no step can change, from ``weights`` (d,) on.

    A parameter with a gradient can move, whatever that gradient is. Those that can are moved at random, and the others are asked again: of
    an adapter whose second factor begins with zeros, the first factor has a gradient after the first step alone. If both are zeros, neither
    ever has one. Gradients are those of a random sum of the outputs, for the loss may be 0 on made-up targets.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = {name: value.clone() for name, value in trial.layout.unflatten(weights.to(trial.data.device)).items()}
    waiting = list(parameters)
    for _ in range(_STEPS):
        found = _gradients(trial, parameters)
        moved = [name for name in waiting if bool(found[name].any())]
        if not moved:
            break
        for name in moved:
            own = parameters[name]
            noise = torch.randn(own.shape, generator=generator) / sqrt(own.numel() / len(own))
            parameters[name] = own + noise.to(own.device)
        waiting = [name for name in waiting if name not in moved]
    return waiting


def _gradients(trial: LocalTask, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a random sum of all outputs, or of the losses where outputs are no tensor."""
    asked = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    batch = trial.data
    outputs = trial.outputs(dict(asked), _spread(trial.normalised(batch.inputs)))
    if isinstance(outputs, Tensor):  # a task of one's own may take anything
        direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs.device)
        total = (outputs * direction).sum()
    else:
        total = trial.losses(trial.outputs(dict(asked), trial.normalised(batch.inputs)), batch.targets).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(value) for name, value in asked.items()}
    found = torch.autograd.grad(total, list(asked.values()), materialize_grads=True)
    return dict(zip(asked, found, strict=True))


def _spread(inputs: Inputs) -> Inputs:
    """Return numeric ``inputs``, also negated and enlarged: a ReLU that is 0 for all made-up samples is rarely 0 for these as well."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return inputs
    return torch.cat([scale * inputs for scale in (1, -1, 64, -64)])
