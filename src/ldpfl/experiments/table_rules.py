"""Choose the clipping norm, the server's step and its pull for a table: what ``auto`` means in a config.

Everything here follows from public facts (columns, number of rows, noise), from rows that are drawn at random and are nobody's, and from
the measured shares of the classes. So it costs no privacy beyond measuring.

- **Clipping norm**: a record's gradient is the residual r of the outputs times the Jacobian J of the model. The norm is that of J v for a
  unit vector v, over drawn rows, times the largest residual, times :data:`_OF_USUAL`. A smaller norm would cut the gradients of the rare
  class, whose residuals are large, and so bias every risk downwards; a larger one means more noise.
- **Pull** back to the initial model (ridge): a mean gradient has noise of variance n^2 a coordinate, if all rounds are taken together.
  Weights of variance v, seen through a curvature h, are estimated with the least squared error by a ridge of n^2 / (v h). With much
  noise the model stays near its start, which is the measured base rate; with little it is free.
- **Step**: heavy ball with momentum b is stable up to 2 (1 + b) / L. It takes (1 - b^2) / L, with the trace of the curvature, which is
  no smaller than its largest eigenvalue L however correlated the columns are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

import numpy as np
import torch
from torch import Tensor, nn

from ldpfl.data.columns import drawn_inputs
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import Description, targets_of
from ldpfl.layout import ParameterLayout
from ldpfl.mechanisms import Mechanism
from ldpfl.ranges import LayerRanges
from ldpfl.tasks import Targets

_DRAWN = 64
"""Rows that are drawn to see how long gradients are."""
_OF_USUAL = 0.85
_PRIOR = 0.05
"""Variance that a weight is expected to have, of an input of variance 1."""
_CLIP_ELSEWHERE, _RATE_ELSEWHERE = 1.0, 0.6
"""Clipping norm and learning rate where the data are no table, or the model does not take its rows: a trial says why."""

_FROM_ZERO = ("logistic-regression", "linear")
"""Models that are convex, so that they may begin at 0."""
_WITH_BIAS = ("logistic-regression", "mlp")
"""Models whose last layer is the bias of their outputs."""


@dataclass(frozen=True)
class TableStart:
    """Where training begins on a table, and how the server steps.

    Attributes:
        weights: (d,) initial weights.
        config: the config with numbers in the place of ``auto``.
    """

    weights: Tensor
    config: RunConfig


def clip_norm_for(config: RunConfig, data: Description, module: nn.Module) -> float:
    """Return the clipping norm for ``module`` on ``data``."""
    squared = _squared_jacobian(module, data)
    if squared is None:
        return _CLIP_ELSEWHERE
    return float(f"{_OF_USUAL * _largest_residual(targets_of(config), data.outputs) * sqrt(squared):.3g}")


def start_on_table(
    config: RunConfig,
    data: Description,
    module: nn.Module,
    layout: ParameterLayout,
    weights: Tensor,
    mechanism: Mechanism,
    clients: int,
    shares: Sequence[float],
) -> TableStart:
    """Return where training begins and how the server steps; nothing changes where the config says ``auto`` nowhere.

    Args:
        weights: (d,) initial weights of ``module``.
        shares: of the classes, as they were measured, or empty.
    """
    training = config.training
    if "auto" not in (training.server_learning_rate, training.server_weight_decay):
        return TableStart(weights, config)
    if config.mechanism.perturbed != "gradient":  # what clients send are steps already
        return TableStart(weights, _chosen(config, 1 - training.server_momentum, 0.0))
    squared = _squared_jacobian(module, data)
    if squared is None:
        return TableStart(weights, _chosen(config, _RATE_ELSEWHERE, 0.0))
    targets = targets_of(config)
    shares = list(shares) or list(config.data.class_shares) or _uniform(targets, data.outputs)
    curvature = _output_curvature(targets, shares)
    clip = 1.0 if mechanism.record_clip is None else mechanism.record_clip.norm
    ranges = LayerRanges(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), (layout.dimension,))
    noise = float(mechanism.noise_std(ranges, clients)[0]) * clip / sqrt(training.rounds)
    pull = noise**2 / (_PRIOR * curvature)
    rate = (1 - training.server_momentum**2) / (curvature * squared + pull)
    # Reports are in units of the clipping norm.
    return TableStart(_begun(config, layout, weights, targets, shares), _chosen(config, rate * clip, pull / clip))


def _chosen(config: RunConfig, rate: float, decay: float) -> RunConfig:
    """Return ``config`` with these numbers where it says ``auto``."""
    training = config.training
    chosen = {"server_learning_rate": rate, "server_weight_decay": decay}
    update = {name: value for name, value in chosen.items() if getattr(training, name) == "auto"}
    return config.model_copy(update={"training": training.model_copy(update=update)})


def _begun(config: RunConfig, layout: ParameterLayout, weights: Tensor, targets: Targets, shares: Sequence[float]) -> Tensor:
    """Return the initial weights: 0 for a convex model, with the logits of the shares as the bias of the outputs."""
    name, begun = config.model.name, weights.clone()
    if name in _FROM_ZERO:
        begun.zero_()
    if name in _WITH_BIAS and targets in ("class", "classes"):
        logits = [log(share) if targets == "class" else log(share / (1 - share)) for share in shares]
        begun[layout.slices[layout.names[-1]]] = torch.tensor(logits, dtype=begun.dtype)
    return begun


def _uniform(targets: Targets, outputs: int) -> list[float]:
    return [1 / outputs if targets == "class" else 0.5] * outputs


def _largest_residual(targets: Targets, outputs: int) -> float:
    """Return the norm of the loss' gradient with respect to the outputs: the largest, or for a number that of an error of one spread."""
    return {"class": sqrt(2), "classes": 1 / sqrt(outputs)}.get(targets, 2.0)


def _output_curvature(targets: Targets, shares: Sequence[float]) -> float:
    """Return the largest eigenvalue of the loss' Hessian with respect to the outputs, where a model tells nothing but the base rate."""
    if targets == "class":
        p = np.asarray(shares)
        return float(np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))[-1])
    if targets == "classes":
        return max(share * (1 - share) for share in shares) / len(shares)
    return 2.0


def _squared_jacobian(module: nn.Module, data: Description) -> float | None:
    """Return the mean of |J^T v|^2 over drawn rows, for a unit vector v of outputs that tells two of them apart.

    None where the data are no table, or the model does not take its rows.
    """
    if data.encoder is None or data.encoder.data.text:
        return None
    direction = torch.zeros(data.outputs)
    direction[:2] = torch.tensor([1.0, -1.0])[: data.outputs]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = 0.0
    try:
        for row in drawn_inputs(data.encoder.data, _DRAWN, torch.Generator().manual_seed(0)):
            output = (module(row[None]).reshape(-1) * direction / direction.norm()).sum()
            total += sum(float(part.double().square().sum()) for part in torch.autograd.grad(output, trained))
    except Exception:  # of a user's own module, on rows that are nobody's: the trial before the run says what is wrong
        return None
    return total / _DRAWN
