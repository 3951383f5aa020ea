"""How far the server may move a model before noise alone moves its outputs too much.

A round's mean gradient carries noise that is known beforehand. After steps that add up to t, that noise has moved each weight by about
t times the noise of all rounds together. What this does to outputs is computed, and not bounded: the model is run on drawn samples, with
its initial weights and with weights moved by drawn noise. So the rule holds for any model, and it sees that noise in one layer of a
network multiplies that in the next.
"""

from __future__ import annotations

from math import inf, sqrt

import torch
from torch import Tensor, nn

_DRAWS, _ROWS = 4, 16
"""Draws of noise, and samples, over which a change of the outputs is averaged; the root mean square of 64 changes is off by a tenth."""

_SEED = 1
"""Decides the noise; another one than the drawn samples have, for noise that equals a sample would move its output most."""

_HALVINGS, _FINER = 60, 4
"""Times that the length is halved until noise moves the outputs less, and times that the last halving is halved in turn."""


def longest_within(module: nn.Module, inputs: Tensor, direction: Tensor, noise: float, most: float, longest: float) -> float:
    """Return how long all steps together may be: ``longest``, or less where noise would move the outputs by more than ``most``.

    Args:
        module: with its initial weights.
        inputs: (N, ...) drawn samples.
        direction: (K,) what is looked at of the K outputs, of length 1.
        noise: standard deviation of the noise in a coordinate of the mean gradient, all rounds taken together.
        most: root mean square by which noise may move an output.
    """

    rows = inputs[:_ROWS]
    with torch.no_grad():
        initial = _told(module, {}, rows, direction)

    def is_within(length: float) -> bool:
        return _moved(module, rows, direction, initial, noise * length) <= most

    if is_within(longest):
        return longest
    low = longest / 2
    for _ in range(_HALVINGS):
        if is_within(low):
            break
        low /= 2
    high = 2 * low
    for _ in range(_FINER):
        middle = sqrt(low * high)
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def _moved(module: nn.Module, inputs: Tensor, direction: Tensor, initial: Tensor, spread: float) -> float:
    """Return the root mean square by which normal noise of this ``spread`` in each trained weight moves the ``initial`` outputs (N,).

    It is infinity if an output becomes NaN.
    """
    generator, total = torch.Generator().manual_seed(_SEED), 0.0
    trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for _ in range(_DRAWS):
            moved = {name: own + spread * torch.randn(own.shape, generator=generator) for name, own in trained.items()}
            total += float((_told(module, moved, inputs, direction) - initial).square().mean()) / _DRAWS
    return sqrt(total) if total < inf else inf


def _told(module: nn.Module, weights: dict[str, Tensor], inputs: Tensor, direction: Tensor) -> Tensor:
    """Return what ``module`` with these ``weights`` says (N,) along ``direction``; inputs go one by one, as gradients are taken."""
    outputs = [torch.func.functional_call(module, weights, (row[None],)).reshape(-1) for row in inputs]
    return torch.stack(outputs).double() @ direction.double()
