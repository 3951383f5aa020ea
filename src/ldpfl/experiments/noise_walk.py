"""How far the server may move a model before noise alone moves its outputs too much.

A round's mean gradient carries noise that is known beforehand. After steps whose lengths add up to t, that noise has moved each weight by
about t times the noise of all rounds together. The effect on outputs is measured: the model is run on synthetic samples, with its initial
weights and with weights moved by random noise. So the rule holds for any model, also if noise in one layer multiplies that in the next.
"""

from __future__ import annotations

from math import inf, sqrt

import torch
from torch import Tensor, nn

from ldpfl.data.samples import Inputs, map_tensors, one_by_one
from ldpfl.models.layout import called_with

_DRAWS, _ROWS = 4, 16
"""Number of draws of noise, and of samples, over which the change is averaged. The root mean square of 4 x 16 changes is off by a tenth."""

_SEED = 1
"""Seed of the noise. It is not the seed of the synthetic samples, since noise that equals a sample would move its output most."""

_MAX_HALVINGS, _REFINEMENTS = 60, 4
"""Maximum number of times that the length is halved, and number of bisections after that. They find it within 5 %."""


def longest_total_step(module: nn.Module, inputs: Inputs, direction: Tensor, noise: float, max_change: float, max_length: float) -> float:
    """Return how long all steps together may be: ``max_length``, or less so that noise moves the outputs by at most ``max_change``.

    If no length down to ``max_length`` / 2^:data:`_MAX_HALVINGS` is short enough, the result is about that length.

    Args:
        module: the model with its initial weights.
        inputs: N synthetic samples.
        direction: (K,) unit vector along which the outputs' changes are measured.
        noise: standard deviation of the noise in a coordinate of the mean gradient, all rounds taken together.
        max_change: maximum root mean square of the change of an output by noise.
        max_length: maximum sum of the steps' lengths, that is, of learning rates.
    """
    rows = map_tensors(lambda part: part[:_ROWS], inputs)
    with torch.no_grad():
        initial = _outputs_along(module, {}, rows, direction)

    def is_within(length: float) -> bool:
        """Return whether noise moves the outputs by at most ``max_change`` if the steps have this ``length`` together."""
        return _output_change(module, rows, direction, initial, noise * length) <= max_change

    if is_within(max_length):
        return max_length
    # Halve the length until it is short enough. The longest such length then lies between ``low`` and twice ``low``.
    low = max_length / 2
    for _ in range(_MAX_HALVINGS):
        if is_within(low):
            break
        low /= 2
    high = 2 * low
    for _ in range(_REFINEMENTS):
        middle = sqrt(low * high)
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def _output_change(module: nn.Module, inputs: Inputs, direction: Tensor, initial: Tensor, spread: float) -> float:
    """Return the root mean square change of the ``initial`` outputs (N,) by normal noise with this ``spread`` in each trained weight.

    ``direction`` is as in :func:`longest_total_step`. The result is infinity if an output becomes NaN.
    """
    generator, mean_square = torch.Generator().manual_seed(_SEED), 0.0
    trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for _ in range(_DRAWS):
            noisy_weights = {name: value + spread * torch.randn(value.shape, generator=generator) for name, value in trained.items()}
            mean_square += float((_outputs_along(module, noisy_weights, inputs, direction) - initial).square().mean()) / _DRAWS
    return sqrt(mean_square) if mean_square < inf else inf


def _outputs_along(module: nn.Module, weights: dict[str, Tensor], inputs: Inputs, direction: Tensor) -> Tensor:
    """Return the outputs (N,) along ``direction`` (K,) of ``module`` with these ``weights``: the scalar product of each output with it.

    Inputs go through the model one by one, as they do for gradients of records.
    """
    outputs = [outputs_of(module, weights, row).reshape(-1) for row in one_by_one(inputs)]
    return torch.stack(outputs).double() @ direction.double()


def outputs_of(module: nn.Module, weights: dict[str, Tensor], inputs: Inputs) -> Tensor:
    """Return the outputs of ``module`` for ``inputs``. ``weights`` replace the module's own weights of the same names."""
    arguments, named = ((inputs,), {}) if isinstance(inputs, Tensor) else ((), dict(inputs))
    outputs: Tensor = called_with(module, weights, arguments, named)
    return outputs
