"""Personal layers: each client trains them on its own data and keeps them. They are never randomised or sent.

Only the other layers, the shared ones, have a place in the vector that a mechanism sees. So ranges, noise and accounting do not know of
personal layers. Sources: FedPer, Arivazhagan et al. 2019 (the last layers are personal); FedBN, Li et al. 2021 (the normalisation layers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation.local_steps import BatchSchedule
from ldpfl.simulation.local_training import VectorizedTrainer


@dataclass(frozen=True, eq=False)
class PersonalTrainer:
    """Trains whole models, whose shared layers start from the broadcast and whose personal layers start from the client's own values.

    Attributes:
        whole: trainer of the whole model.
        shared, personal: layouts of the layers that are sent, d weights, and of the layers that stay, p weights.
        initial: (p,) public initial values of the personal layers.
    """

    whole: VectorizedTrainer
    shared: ParameterLayout
    personal: ParameterLayout
    initial: Tensor

    def train(self, weights: Tensor, schedule: BatchSchedule, round_number: int = 1) -> Tensor:
        """Return the shared layers (K, d) of clients that train for the first time, with the initial personal layers."""
        return self.train_both(weights, self.initial.expand(schedule.clients, -1), schedule, round_number)[0]

    def train_both(self, weights: Tensor, before: Tensor, schedule: BatchSchedule, round_number: int) -> tuple[Tensor, Tensor]:
        """Return the shared layers (K, d) and the personal layers (K, p) of clients whose personal layers were ``before`` (K, p)."""
        trained = self.whole.train(self.whole_models(weights, before), schedule, round_number)
        layers = self.whole.task.layout.unflatten(trained)
        shared, personal = ({name: layers[name] for name in layout.names} for layout in (self.shared, self.personal))
        return self.shared.flatten(shared), self.personal.flatten(personal)

    def whole_models(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return the weights (K, d + p) of whole models with the shared layers ``weights`` (d,) and personal layers ``values`` (K, p)."""
        shared = self.shared.unflatten(weights.to(values.device).expand(len(values), -1))
        return self.whole.task.layout.flatten(shared | self.personal.unflatten(values))


@dataclass(frozen=True, eq=False)
class KeptLayers:
    """The personal layers ``values`` (k, p) of ``clients`` (k,) after a round."""

    clients: NDArray[np.int64]
    values: Tensor

    @classmethod
    def of(cls, clients: NDArray[np.int64], values: Tensor) -> KeptLayers:
        """Return the layers that ``clients`` keep.

        Raises:
            PrivacyError: a value is not finite. Its client could never train again.
        """
        if not bool(values.isfinite().all()):
            raise PrivacyError(
                "a client's personal layers became NaN or infinite, so nothing was sent: set a smaller training.learning_rate"
            )
        return cls(clients, values)


def personal_layers_after_round(before: Tensor, kept: Sequence[KeptLayers]) -> Tensor:
    """Return the personal layers (N, p) of all clients after a round. Clients that did not take part keep theirs."""
    after = before.clone()  # the checkpoint before this round still uses the original
    for layers in kept:
        after[torch.from_numpy(layers.clients)] = layers.values
    return after
