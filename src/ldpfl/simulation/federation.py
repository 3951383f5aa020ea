"""What stays the same over the rounds of a simulated federation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.samples import Samples
from ldpfl.mechanisms import Mechanism, Perturbed
from ldpfl.privacy.events import Channel
from ldpfl.ranges import RangeRule
from ldpfl.server import ServerOptimiser, ServerRules, once_cohort, round_cohort
from ldpfl.simulation.local_training import LocalTask, Trainer, measured


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over the rounds of a run.

    Attributes:
        seed: all random streams derive from it.
        task: model, layout, training samples and optimiser.
        trainer: turns a broadcast vector into the clients' trained vectors.
        samples: for each client the positions of its samples in the task's data.
        evaluation: samples that the global model is measured on after each round.
        mechanism: what clients do to their values before they leave.
        perturbed: whether those values are trained weights, their change, or gradients.
        rule: how the server chooses the next ranges.
        optimiser: what the server makes of a mean update or gradient.
        fraction: part of the clients that takes part in a round, drawn by the server.
        self_sampling: lowest probability with which a client joins, if each decides for itself (then ``fraction`` has no effect).
        once_over: over how many rounds the clients are divided, if each takes part once (then ``fraction`` has no effect).
        epochs, batch_size: of local training.
        channel: what stands between clients and server in the deployment that is simulated; only the ledger depends on it.
        measured: histograms that all clients took part in before the first round; the ledger counts them as rounds.
        notes: what is to be said of the data beside the guarantee.
        chunk_size: clients trained at once; ``None`` lets a probe choose. On a CPU it changes speed, never results.
    """

    seed: int
    task: LocalTask
    trainer: Trainer
    samples: tuple[NDArray[np.int64], ...]
    evaluation: Samples
    mechanism: Mechanism
    perturbed: Perturbed
    rule: RangeRule
    optimiser: ServerOptimiser
    fraction: float
    epochs: int
    batch_size: int
    channel: Channel = "ideal-shuffler"
    self_sampling: float | None = None
    once_over: int | None = None
    chunk_size: int | None = None
    measured: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def batch_width(self) -> int:
        """Batch size, or the size of the largest client where that is smaller or all its samples are taken; the same in every chunk."""
        largest = max(own.size for own in self.samples)
        return largest if self.perturbed == "gradient" else min(self.batch_size, largest)

    def cohort(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients of a round, in ascending order; none, if all of them decide so."""
        if self.once_over is not None:
            return once_cohort(self.seed, round_number, len(self.samples), self.once_over)
        return round_cohort(self.seed, round_number, len(self.samples), self.fraction, self.self_sampling)

    @property
    def rules(self) -> ServerRules:
        """The server's part of all this."""
        names = self.task.layout.names
        return ServerRules(names, self.perturbed, self.rule, self.optimiser, self.score)

    def score(self, weights: Tensor) -> float:
        """Return the figure by which the model with ``weights`` (d,) is judged."""
        return measured(self.task, weights, self.evaluation)[self.task.task.metric]

    @property
    def device(self) -> torch.device:
        return self.task.data.device
