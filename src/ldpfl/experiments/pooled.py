"""The pooled reference: a regression on the rows of all clients together, without clipping and without noise.

Only a simulation can compute it, since elsewhere nobody holds all rows. It depends on private rows without protection, and is not
published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_softmax
from torch import Tensor

from ldpfl.data.samples import Samples
from ldpfl.experiments.judging import evaluate_outputs
from ldpfl.simulation import Federation
from ldpfl.tasks.outcomes import LINEAR_FROM, count_losses
from ldpfl.tasks.weighted_metrics import Floats

_MAX_VALUES = 5 * 10**7
"""Maximum number of values in a table for which the regression is fitted. Larger tables would take minutes."""
_MAX_STEPS = 300
"""Maximum number of steps of L-BFGS."""


def pooled_scores(federation: Federation) -> dict[str, float] | None:
    """Return the figures of the pooled regression on the test rows, by name.

    None if the task has no such regression, if the data are texts, too many or not a table, if there are no test rows, or if the model is
    evaluated on records of clients, which this regression is fitted to.

    Half the squared weights is added to the loss, summed over the rows, as in scikit-learn's logistic regression. Without it, a rare event
    and many hashed words would give weights that fit the training rows alone. Offsets are free. All but least squares are fitted by
    L-BFGS, in at most 300 steps:

    - classes: logistic regression; several labels: one for each label;
    - a number: least squares; a count: Poisson regression, with the expected count of ``expected_count``;
    - ordered classes: logistic regression of each threshold, with one slope for all of them (proportional odds);
    - a time to an event: logistic regression of the hazard of each interval, with one slope for all of them.

    The columns are scaled as for the model of ``federation``.
    """
    train, test, task = federation.task.data, federation.evaluation.samples, federation.task.task
    fit = _FITS.get(task.name)
    encoder = federation.encoder
    if fit is None or encoder is None or encoder.data.text or federation.evaluation.at_clients or not len(test):
        return None
    if train.tensor.numel() > _MAX_VALUES:
        return None
    outputs = torch.from_numpy(_with_constant(test) @ fit(_with_constant(train), train.targets.cpu(), encoder.outputs))
    targets = test.targets.cpu()
    return evaluate_outputs(federation, outputs, targets, task.measured(iter([(outputs.float(), targets)]), every=True)).scores


def _with_constant(samples: Samples) -> Floats:
    """Return the inputs (N, F) of a table's ``samples``. Their last column is the constant 1."""
    rows = samples.tensor.cpu().double().numpy()
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def _fit_number(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return the weights (F, 1) of least squares. ``outputs`` is not used: all functions in ``_FITS`` have the same arguments."""
    # The penalty on squared weights is written as further rows, one for each weight, with the target 0. The offset has no such row.
    penalty = np.eye(rows.shape[1])[:-1]
    right_side = np.concatenate([targets.double().numpy().reshape(-1), np.zeros(len(penalty))])
    weights: Floats = np.linalg.lstsq(np.vstack([rows, penalty]), right_side[:, None], rcond=None)[0]
    return weights


def _fit_count(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return the weights (F, 1) of a Poisson regression. ``outputs`` is not used: all functions in ``_FITS`` have the same arguments."""
    counts = targets.double().numpy().reshape(-1)

    def loss(weights: Floats) -> tuple[float, Floats]:
        """Return the mean loss over the rows, and its gradient (F,), for ``weights`` (F,)."""
        # An expected count is exp(output), continued above LINEAR_FROM by the tangent there, so that no count explodes.
        outputs_of_rows = rows @ weights
        value = float(count_losses(torch.from_numpy(outputs_of_rows), torch.from_numpy(counts)).sum()) / len(rows)
        return value, rows.T @ (np.exp(np.minimum(outputs_of_rows, LINEAR_FROM)) - counts) / len(rows)

    return _minimise(loss, rows.shape[1], 1, len(rows)).reshape(-1, 1)


def _fit_labels(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of a logistic regression for each label."""
    columns = [_fit_classes(rows, label.long(), 2)[:, 1] for label in targets.T]
    return np.stack(columns, axis=1)


def _fit_classes(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of a logistic regression of several classes. Those of the first class are 0."""
    one_hot = np.eye(outputs)[targets.numpy()]

    def loss(free_weights: Floats) -> tuple[float, Floats]:
        """Return the mean loss over the rows, and its gradient, for the weights (F * (outputs - 1),) of all classes but the first."""
        log_probabilities = log_softmax(rows @ _with_zero_column(free_weights, outputs), axis=1)
        gradient = rows.T @ (np.exp(log_probabilities) - one_hot)[:, 1:] / len(rows)
        return float(-(log_probabilities * one_hot).sum() / len(rows)), gradient.ravel()

    return _with_zero_column(_minimise(loss, rows.shape[1] * (outputs - 1), outputs - 1, len(rows)), outputs)


def _fit_ordered(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of proportional odds: output j is the logit of a class above j."""
    above = targets[:, None] > torch.arange(outputs)
    return _fit_parallel(rows, above, outputs)


def _fit_parallel(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of logistic regressions of ``targets`` (n, outputs), each 0, 1 or NaN. A NaN adds nothing to the loss.

    The outputs have the same slopes. Only their offsets differ, which are the last row of the weights.
    """
    columns, values = rows[:, :-1], targets.double().numpy()
    is_known, events = ~np.isnan(values), np.nan_to_num(values)

    def loss(slopes_and_offsets: Floats) -> tuple[float, Floats]:
        """Return the mean loss over the rows, and its gradient, for F - 1 slopes followed by an offset for each output."""
        logits = (columns @ slopes_and_offsets[:-outputs])[:, None] + slopes_and_offsets[-outputs:]
        residuals = is_known * (expit(logits) - events)
        gradient = np.concatenate([residuals.sum(axis=1) @ columns, residuals.sum(axis=0)])
        return float((is_known * (np.logaddexp(0, logits) - events * logits)).sum()) / len(rows), gradient / len(rows)

    best = _minimise(loss, columns.shape[1] + outputs, outputs, len(rows))
    # Each output gets a copy of the common slopes, and its own offset below them.
    return np.vstack([np.repeat(best[:-outputs, None], outputs, axis=1), best[-outputs:]])


_FITS: Mapping[str, Callable[[Floats, Tensor, int], Floats]] = {
    "classification": _fit_classes,
    "multilabel": _fit_labels,
    "regression": _fit_number,
    "poisson": _fit_count,
    "ordinal": _fit_ordered,
    "survival": _fit_parallel,
}
"""Function from rows (N, F), targets and the number of outputs to weights (F, outputs), by task."""


def _minimise(loss: Callable[[Floats], tuple[float, Floats]], size: int, offsets: int, rows: int) -> Floats:
    """Return the weights and offsets (``size``,) that minimise ``loss`` plus half the squared weights, divided by the number of ``rows``.

    Args:
        loss: function from weights and offsets to the mean loss over the rows, and its gradient.
        size: number of weights and offsets.
        offsets: number of offsets. They are last, and add no penalty.
        rows: number of rows.
    """

    def penalised(weights: Floats) -> tuple[float, Floats]:
        """Return the loss plus its penalty, and the gradient of this sum, for the weights and offsets (``size``,)."""
        value, gradient = loss(weights)
        penalty = np.concatenate([weights[: size - offsets], np.zeros(offsets)]) / rows
        return value + float(penalty @ weights) / 2, gradient + penalty

    options = {"maxiter": _MAX_STEPS, "ftol": 1e-12, "gtol": 1e-7}
    best: Floats = minimize(penalised, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x
    return best


def _with_zero_column(free_weights: Floats, outputs: int) -> Floats:
    """Return the weights (F, outputs) of all classes, with zeros for the first, from one vector with the weights of the other classes."""
    later_classes = free_weights.reshape(-1, outputs - 1)
    return np.concatenate([np.zeros((len(later_classes), 1)), later_classes], axis=1)
