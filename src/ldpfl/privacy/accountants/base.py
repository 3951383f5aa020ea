"""The interface that all accountants share. It follows dp-accounting's ``PrivacyAccountant``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import tanh

_DELTAS = tuple(0.8**power for power in range(1, 60))
"""The deltas of :meth:`Accountant._distance_by_deltas`: from 0.8 down to 2e-6."""


class Accountant(ABC):
    """Composes releases. Later ones may depend on the outputs of earlier ones."""

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon that is known to hold with ``delta``. At delta 0 it is the pure epsilon, which may be infinite."""

    def distance(self) -> float:
        """Return an upper bound of the total variation distance between the adversary's views of two inputs: delta at epsilon 0.

        Returns 1, which always holds, if no smaller bound is known or its computation takes long.
        """
        return 1.0

    def _distance_by_deltas(self) -> float:
        """Return the smallest distance that follows from the epsilons at 59 deltas. For accountants that compute epsilon fast.

        (epsilon, delta) in both directions bound it by (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) = tanh(epsilon / 2) (1 - delta) + delta.
        """
        return min(tanh(self.epsilon(delta) / 2) * (1 - delta) + delta for delta in _DELTAS)
