"""Check that training can change each parameter of the model, by the gradients of outputs for made-up samples."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from ldpfl.data.samples import Inputs
from ldpfl.simulation import LocalTask

_MAX_STEPS = 4
"""Number of times that parameters are moved. If one factor of a product is 0, the other has a gradient only after the first has moved."""


def untrainable_parameters(trial: LocalTask, weights: Tensor) -> list[str]:
    """Return the names of the parameters whose gradients stay 0 however training moves the others from ``weights`` (d,).

    ``trial`` has made-up samples. Parameters whose gradient is not 0 for these samples are moved at random. Then the gradients of the
    remaining parameters are computed again. For example, if the second factor of an adapter is 0 at the start, the first factor gets a
    gradient only after the second has moved. If both are 0, neither ever gets one. Gradients are those of a randomly weighted sum of the
    outputs, since the loss may be 0 on made-up targets.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = {name: value.clone() for name, value in trial.layout.unflatten(weights.to(trial.data.device)).items()}
    not_yet_moved = list(parameters)
    for _ in range(_MAX_STEPS):
        gradients = _gradients(trial, parameters)
        trainable = [name for name in not_yet_moved if bool(gradients[name].any())]
        if not trainable:
            break
        for name in trainable:
            value = parameters[name]
            # Divided by the root of the number of inputs of an output, as usual initial weights are.
            noise = torch.randn(value.shape, generator=generator) / sqrt(value.numel() / len(value))
            parameters[name] = value + noise.to(value.device)
        not_yet_moved = [name for name in not_yet_moved if name not in trainable]
    return not_yet_moved


def _gradients(trial: LocalTask, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each parameter's gradient of a randomly weighted sum of all outputs, or of all losses if the outputs are not a tensor."""
    variables = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    batch = trial.data
    outputs = trial.outputs(dict(variables), _with_scaled_copies(trial.normalised(batch.inputs)))
    if isinstance(outputs, Tensor):  # a user's own task may take outputs of any type
        direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs.device)
        total = (outputs * direction).sum()
    else:
        total = trial.losses(trial.outputs(dict(variables), trial.normalised(batch.inputs)), batch.targets).sum()
    if not total.requires_grad:  # no output depends on a trained parameter
        return {name: torch.zeros_like(value) for name, value in variables.items()}
    gradients = torch.autograd.grad(total, list(variables.values()), materialize_grads=True)
    return dict(zip(variables, gradients, strict=True))


def _with_scaled_copies(inputs: Inputs) -> Inputs:
    """Return numeric ``inputs``, also negated and enlarged: a ReLU that is 0 for all made-up samples is rarely 0 for these as well."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return inputs
    return torch.cat([scale * inputs for scale in (1, -1, 64, -64)])
