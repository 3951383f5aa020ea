"""The interface that all accountants share, that of dp-accounting's ``PrivacyAccountant``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import exp, log

from scipy.optimize import brentq

_SMALLEST_DELTA = 1e-300


class Accountant(ABC):
    """Composes what was released; holds for adaptive composition."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon that is known to hold with ``delta``; at 0 the pure one, which may be infinite."""

    def delta(self, epsilon: float) -> float:
        """Return the smallest delta that is known to hold with ``epsilon``."""
        if self.epsilon(0.0) <= epsilon:
            return 0.0
        if self.epsilon(_SMALLEST_DELTA) <= epsilon:
            return _SMALLEST_DELTA
        if self.epsilon(1 - 1e-16) > epsilon:
            return 1.0
        found = exp(brentq(lambda level: self.epsilon(exp(level)) - epsilon, log(_SMALLEST_DELTA), -1e-16, xtol=1e-10))
        return min(1.0, found * (1 + 1e-9))
