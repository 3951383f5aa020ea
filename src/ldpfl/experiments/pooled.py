"""The pooled reference: a regression on the rows of all clients together, without clipping and without noise.

Only a simulation can compute it, since elsewhere nobody holds all rows. It depends on private rows without protection, and is not
published.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from ldpfl import tasks
from ldpfl.data.samples import Samples
from ldpfl.experiments.judging import evaluate_outputs
from ldpfl.simulation import Federation
from ldpfl.tasks.weighted_metrics import Floats

_MAX_VALUES = 5 * 10**7
"""Maximum number of values in a table for which the regression is fitted. Larger tables would take minutes."""
_MAX_STEPS = 300
"""Maximum number of steps of L-BFGS."""


_TASKS = ("classification", "multilabel", "regression", "poisson", "ordinal", "survival")
_MEANS = ("multilabel", "ordinal")
"""Tasks whose loss of a sample is a mean over the model's outputs."""


def pooled_scores(federation: Federation) -> dict[str, float] | None:
    """Return the figures of the pooled regression on the test rows, by name.

    The result is None if the task has no such regression, if the data are texts or not a table, if the table is too large, or if there are
    no test rows. It is also None if the model is evaluated on records of clients, because the regression is fitted to these records.

    Outputs are linear in the columns, which are scaled as for the model of ``federation``. The task's own loss is minimised: logistic
    regression of classes and labels, least squares, Poisson regression. For ordered classes and for times to an event, all outputs have the
    same slopes and offsets of their own (proportional odds).
    """
    train, test, task = federation.task.data, federation.evaluation.samples, federation.task.task
    encoder = federation.encoder
    if task.name not in _TASKS or encoder is None or encoder.data.text or federation.evaluation.at_clients or not len(test):
        return None
    if train.tensor.numel() > _MAX_VALUES:
        return None
    targets = train.targets.cpu()
    weights = _fit(task.name, _with_constant(train), targets.double() if targets.is_floating_point() else targets, encoder.outputs)
    outputs, test_targets = _with_constant(test) @ weights, test.targets.cpu()
    scores = task.measured(iter([(outputs.float(), test_targets)]), every=True)
    return evaluate_outputs(federation, outputs, test_targets, scores).scores


def _with_constant(samples: Samples) -> Tensor:
    """Return the inputs (N, F) float64 of a table's ``samples``. Their last column is the constant 1."""
    return F.pad(samples.tensor.cpu().double(), (0, 1), value=1.0)


def _fit(name: str, rows: Tensor, targets: Tensor, outputs: int) -> Tensor:
    """Return the weights (F, ``outputs``) that fit the ``targets`` of ``rows`` (N, F) best, for the task called ``name``.

    Half the squared weights is added to the negative log-likelihood, summed over the rows, as in scikit-learn's logistic regression.
    Without this penalty, a rare event and many hashed words would give weights that fit the training rows alone. Offsets, the last row of
    the weights, are not penalised. The first of several classes has the weights 0, since only differences between classes matter.
    """
    task, features = tasks.create(name, outputs), rows.shape[1]
    # The factor makes the task's loss a negative log-likelihood: half the squared error, and the sum over outputs instead of their mean.
    factor = outputs if name in _MEANS else 0.5 if name == "regression" else 1.0
    offsets = outputs - 1 if name == "classification" else outputs  # number of free offsets
    # Parallel outputs share one slope for each column. Other free outputs have slopes of their own.
    size = features - 1 + offsets if task.targets in tasks.PARALLEL else features * offsets

    def weights_of(parameters: Tensor) -> Tensor:
        """Return the weights (F, outputs) that follow from the free numbers (``size``,). The offsets are the last free numbers."""
        if task.targets in tasks.PARALLEL:
            return torch.cat([parameters[:-offsets, None].expand(-1, outputs), parameters[None, -offsets:]])
        return F.pad(parameters.view(features, offsets), (outputs - offsets, 0))  # zeros for the first of several classes

    def objective(values: Floats) -> tuple[float, Floats]:
        """Return the penalised loss of the free numbers ``values`` (``size``,), divided by the number of rows, and its gradient."""
        parameters = torch.from_numpy(values).requires_grad_()
        loss = factor * task.losses(rows @ weights_of(parameters), targets).sum() + parameters[:-offsets].square().sum() / 2
        (gradient,) = torch.autograd.grad(loss / len(rows), parameters)
        return float(loss.detach()) / len(rows), gradient.numpy()

    options = {"maxiter": _MAX_STEPS, "ftol": 1e-12, "gtol": 1e-7}
    return weights_of(torch.from_numpy(minimize(objective, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x))
