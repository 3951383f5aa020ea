"""The sensitivity of one client's update to replacing its data, and the noise that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Literal

from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.gaussian import classical_sigma, gaussian_sigma, ladp_constant

SensitivityMode = Literal["theorem", "per_batch", "per_dataset", "update_clip"]
"""``theorem``: 2 eta E C (LaDP-FL, Theorem 2); ``per_batch``, ``per_dataset``: the same over the batch or data set size;
``update_clip``: 2 S, because the update is clipped to the norm S."""

Constant = Literal["theorem3", "classical", "exact"]
"""The factor of D / epsilon in the noise: LaDP-FL's Theorem 3, the classical sqrt(2 ln(1.25 / delta)), or the smallest valid one."""

_SMALLEST_SIGMA, _LARGEST_SIGMA = 1e-20, 1e20
"""Outside, float32 cannot hold the noise."""


@dataclass(frozen=True)
class LocalSteps:
    """Parameters of a client's local training: learning rate eta, epochs E, batch size B, clipping norm C of gradients.

    Raises:
        ConfigError: a parameter is not positive.
    """

    learning_rate: float
    epochs: int
    batch_size: int
    clip_norm: float

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epochs", "batch_size", "clip_norm"):
            require_positive(name, getattr(self, name))


@dataclass(frozen=True)
class Sensitivity:
    """The sensitivity D: an upper bound, proved or only assumed, of the L2 distance of two updates of one client.

    Only ``update_clip`` is proved, for any two data sets of a client. The bound 2 eta E C holds for E full-batch steps, not for
    mini-batches. Divided by the batch size B or by the data set size, it does not hold for neural networks at all. With
    ``per_batch`` the noise is closest to what LaDP-FL published.

    Attributes:
        mode: how D is computed.
        steps: local training, for all modes except ``update_clip``.
        norm: clipping norm S, for ``update_clip``.
        samples: smallest data set size of any client, which is assumed to be public, for ``per_dataset``. It is one number for all clients,
            because the published noise did not change with the clients' data set sizes.

    Source: LaDP-FL, Theorem 2 and equation (9). Confidence: high for the theorem's form, low for the divisor.

    Raises:
        ConfigError: a value that the mode needs is missing or not positive.
    """

    mode: SensitivityMode
    steps: LocalSteps | None = None
    norm: float | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.mode == "update_clip":
            self._check_given("norm", self.norm)
        elif self.mode not in ("theorem", "per_batch", "per_dataset"):
            raise ConfigError(f"unknown sensitivity mode {self.mode!r}: expected theorem, per_batch, per_dataset or update_clip")
        elif self.steps is None:
            raise ConfigError(f"sensitivity mode {self.mode!r} needs steps: learning rate, epochs, batch size and gradient norm")
        elif self.mode == "per_dataset":
            self._check_given("samples", self.samples)

    def _check_given(self, name: str, value: float | None) -> None:
        """Raise a ConfigError unless the parameter ``name``, which the mode needs, has a positive ``value``."""
        if value is None:
            raise ConfigError(f"sensitivity mode {self.mode!r} needs {name}: give a positive number")
        require_positive(name, value)

    @property
    def proved(self) -> bool:
        """Whether D is proved to bound the distance of any two updates."""
        return self.mode == "update_clip"

    @property
    def value(self) -> float:
        """The sensitivity D: 2 S if updates are clipped to the norm S.

        Otherwise 2 eta E C for the learning rate eta, E epochs and the clipping norm C of gradients. In the modes ``per_batch`` and
        ``per_dataset`` this is divided by the batch size or the data set size.
        """
        if self.mode == "update_clip" and self.norm is not None:
            return 2 * self.norm
        steps = self.steps  # all other modes have steps: the checks for None are for the type checker
        assumed = 0.0 if steps is None else 2 * steps.learning_rate * steps.epochs * steps.clip_norm
        if self.mode == "per_batch" and steps is not None:
            return assumed / steps.batch_size
        if self.mode == "per_dataset" and self.samples is not None:
            return assumed / self.samples
        return assumed

    @property
    def reason(self) -> str:
        """Reason why D is not proved, in a few words; empty if it is."""
        return "" if self.proved else f"the sensitivity ({self.mode}) is not proved: updates are not clipped to it"


@lru_cache(maxsize=256)
def noise_constant(constant: Constant, epsilon: float, delta: float) -> float:
    """Return the factor c of the noise: its standard deviation is c D / ``epsilon`` for the sensitivity D.

    ``exact`` is the smallest factor, ``classical`` is sqrt(2 ln(1.25 / delta)), and ``theorem3`` is from LaDP-FL.

    Raises:
        ConfigError: epsilon or delta out of range, or ``classical`` for epsilon >= 1, where it is not proved.
    """
    if constant == "exact":
        return gaussian_sigma(epsilon, delta) * epsilon
    if constant == "classical":
        return classical_sigma(epsilon, delta) * epsilon
    if constant == "theorem3":
        return ladp_constant(epsilon, delta)
    raise ConfigError(f"unknown noise constant {constant!r}: expected theorem3, classical or exact")


def require_positive(name: str, value: float) -> float:
    """Return ``value`` after checking that it is a positive finite number.

    Raises:
        ConfigError: ``value`` is not positive and finite.
    """
    if isinstance(value, bool) or not (isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be positive and finite, got {value}")
    return value


def require_share(name: str, value: float, *, one_allowed: bool) -> float:
    """Return ``value`` after checking that it lies in (0, 1), or in (0, 1] if ``one_allowed``.

    Raises:
        ConfigError: ``value`` lies outside.
    """
    if not (0 < value < 1 or (one_allowed and value == 1)):
        raise ConfigError(f"{name} must lie in (0, 1{']' if one_allowed else ')'}, got {value}")
    return value


def usable_sigma(sigma: float) -> bool:
    """Whether float32 can hold noise of this standard deviation."""
    return _SMALLEST_SIGMA <= sigma <= _LARGEST_SIGMA


def require_usable(sigma: float) -> float:
    """Return ``sigma`` after checking that float32 can hold noise of this standard deviation.

    Raises:
        ConfigError: ``sigma`` lies outside [1e-20, 1e20].
    """
    if not usable_sigma(sigma):
        raise ConfigError(f"the noise has standard deviation {sigma:.3g}, expected 1e-20 to 1e20: change epsilon or the clipping norm")
    return sigma
