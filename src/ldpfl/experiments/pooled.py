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
from ldpfl.experiments.judging import judged_by
from ldpfl.simulation import Federation
from ldpfl.tasks.outcomes import LINEAR_FROM, count_losses
from ldpfl.tasks.weighted_metrics import Floats

_MAX_VALUES = 5 * 10**7
"""Maximum number of values in a table for which the regression is fitted. Larger tables would take minutes."""
_STEPS = 300


def pooled_scores(federation: Federation) -> dict[str, float] | None:
    """Return the figures of the pooled regression on the test rows; None where the data are no table of one target, or
    where the model is evaluated on clients' records, which are among those of this regression.

    All but least squares are fitted without a penalty by L-BFGS, in at most 300 steps:

    - classes: logistic regression; several labels: one for each label;
    - a number: least squares; a count: Poisson regression, with the expected count of ``expected_count``;
    - ordered classes: logistic regression of each threshold, with one slope for all of them (proportional odds);
    - a time to an event: logistic regression of the hazard of each interval, with one slope for all of them.

    It takes the columns as the model of ``federation`` does.
    """
    train, test, task = federation.task.data, federation.evaluation.samples, federation.task.task
    fitted = _FITTED.get(task.name)
    encoder = federation.encoder
    if (
        fitted is None
        or encoder is None
        or federation.evaluation.at_clients
        or encoder.data.text
        or not len(test)
        or train.tensor.numel() > _MAX_VALUES
    ):
        return None
    outputs = torch.from_numpy(_with_one(test) @ fitted(_with_one(train), train.targets.cpu(), encoder.outputs))
    targets = test.targets.cpu()
    return judged_by(federation, outputs, targets, task.measured(iter([(outputs.float(), targets)]), every=True)).scores


def _with_one(samples: Samples) -> Floats:
    rows = samples.tensor.cpu().double().numpy()
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def _linear(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    found: Floats = np.linalg.lstsq(rows, targets.double().numpy().reshape(-1, 1), rcond=None)[0]
    return found


def _poisson(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    counts = targets.double().numpy().reshape(-1)

    def loss(free: Floats) -> tuple[float, Floats]:
        found = torch.from_numpy(rows @ free)
        value = float(count_losses(found, torch.from_numpy(counts)).sum()) / len(rows)
        return value, rows.T @ (np.exp(np.minimum(found.numpy(), LINEAR_FROM)) - counts) / len(rows)

    return _minimise(loss, rows.shape[1]).reshape(-1, 1)


def _labels(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of a logistic regression for each label."""
    columns = [_logistic(rows, label.long(), 2)[:, 1] for label in targets.T]
    return np.stack(columns, axis=1)


def _logistic(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs), those of the first class 0."""
    seen = np.eye(outputs)[targets.numpy()]

    def loss(free: Floats) -> tuple[float, Floats]:
        chances = log_softmax(rows @ _with_first_class(free, outputs), axis=1)
        slope = rows.T @ (np.exp(chances) - seen)[:, 1:] / len(rows)
        return float(-(chances * seen).sum() / len(rows)), slope.ravel()

    return _with_first_class(_minimise(loss, rows.shape[1] * (outputs - 1)), outputs)


def _ordered(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    above = targets[:, None] > torch.arange(outputs)
    return _parallel(rows, above, outputs)


def _parallel(rows: Floats, targets: Tensor, outputs: int) -> Floats:
    """Return weights (F, outputs) of logistic regressions of ``targets`` (n, outputs), each 0, 1 or NaN, which does not count.

    The weights differ between outputs only in the last row, the offsets.
    """
    columns, seen = rows[:, :-1], targets.double().numpy()
    known, events = ~np.isnan(seen), np.nan_to_num(seen)

    def loss(free: Floats) -> tuple[float, Floats]:
        logits = (columns @ free[:-outputs])[:, None] + free[-outputs:]
        residuals = known * (expit(logits) - events)
        slope = np.concatenate([residuals.sum(axis=1) @ columns, residuals.sum(axis=0)])
        return float((known * (np.logaddexp(0, logits) - events * logits)).sum()) / len(rows), slope / len(rows)

    found = _minimise(loss, columns.shape[1] + outputs)
    return np.vstack([np.repeat(found[:-outputs, None], outputs, axis=1), found[-outputs:]])


_FITTED: Mapping[str, Callable[[Floats, Tensor, int], Floats]] = {
    "classification": _logistic,
    "multilabel": _labels,
    "regression": _linear,
    "poisson": _poisson,
    "ordinal": _ordered,
    "survival": _parallel,
}
"""Function from rows (N, F), targets and the number of outputs to weights (F, outputs), by task."""


def _minimise(loss: Callable[[Floats], tuple[float, Floats]], size: int) -> Floats:
    """Return the minimiser of ``loss``, which returns its value and its gradient."""
    options = {"maxiter": _STEPS, "ftol": 1e-12, "gtol": 1e-7}
    found: Floats = minimize(loss, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x
    return found


def _with_first_class(free: Floats, outputs: int) -> Floats:
    own = free.reshape(-1, outputs - 1)
    return np.concatenate([np.zeros((len(own), 1)), own], axis=1)
