"""Emphasis: how much the samples of each class count in the loss, and the shares of the classes that result."""

from __future__ import annotations

from collections.abc import Sequence

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.tasks import NO_EMPHASIS, Emphasis


def emphasis_of(config: RunConfig, outputs: int, shares: Sequence[float]) -> Emphasis:
    """Return the emphasis that ``task.class_weights`` and ``task.focusing`` set.

    Args:
        outputs: number of classes.
        shares: measured share of each class, which ``data.class_shares`` overrides; empty if none was measured.

    Raises:
        ConfigError: the task is no classification by gradients, the number of weights is wrong, or no shares are known to balance.
    """
    task = config.task
    if task.class_weights == "off" and not task.focusing:
        return NO_EMPHASIS
    if task.name != "classification" or config.training.method != "gradient":
        raise ConfigError(
            "task.class_weights and task.focusing change the loss of a classification that is trained by gradients, and this run has "
            f"task.name = {task.name!r} and training.method = {config.training.method!r}: leave them out"
        )
    if task.class_weights == "off":
        return Emphasis((), task.focusing)
    if task.class_weights == "balanced":
        known_shares = list(config.data.class_shares) or list(shares)
        if not known_shares:
            raise ConfigError(
                "task.class_weights = 'balanced' needs the share of each class, which nothing measures here: state data.class_shares = "
                "[0.9, 0.1], in the order of the classes, or give the weights themselves"
            )
        # The rarest class has weight 1, and a class that is twice as common has weight 1/2.
        return Emphasis(tuple(min(known_shares) / share for share in known_shares), task.focusing)
    weights = task.class_weights
    if len(weights) != outputs:
        raise ConfigError(f"task.class_weights has {len(weights)} values, but there are {outputs} classes: give one weight for each class")
    return Emphasis(tuple(weights), task.focusing)


def weighted_shares(shares: Sequence[float], emphasis: Emphasis) -> tuple[list[float], float]:
    """Return the share of each class in the weighted loss, and the mean weight of a sample.

    Args:
        shares: share of each class among the samples.
        emphasis: class weights. Without them, each sample has the weight 1.
    """
    if not emphasis.class_weights:
        return list(shares), 1.0
    products = [weight * share for weight, share in zip(emphasis.class_weights, shares, strict=True)]
    mean = sum(products) / sum(shares)
    return [product / sum(products) for product in products], mean
