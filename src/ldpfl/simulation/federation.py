"""What stays the same over the rounds of a simulated federation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.division import Division
from ldpfl.data.encoder import Encoder
from ldpfl.data.persons import Persons
from ldpfl.data.samples import Samples
from ldpfl.mechanisms import Mechanism, Perturbed, Reports
from ldpfl.mechanisms.gaussian.mechanism import Gaussian
from ldpfl.mechanisms.hooks import record_clip_of
from ldpfl.mechanisms.ranges import RangeRule
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.privacy.events import Channel
from ldpfl.server import RoundMetrics, ServerOptimiser, ServerRules, ServerState, has_stopped, once_cohort, round_cohort
from ldpfl.simulation.evaluating import ClientEvaluation
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.local_training import LocalTask, Trainer, evaluated, mean_loss
from ldpfl.util.randomness import Purpose, SeededStreams, bound_stream, known, stream


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and what stands between clients and server.

    Attributes:
        fraction: fraction of clients that the server samples in each round.
        self_sampling: lowest probability with which a client joins, if each decides for itself (then ``fraction`` has no effect).
        once_over: number of rounds that the clients are divided over, if each takes part once (then ``fraction`` has no effect).
        channel: what stands between clients and server in the deployment that is simulated; only the ledger depends on it.
        colluding: clients of each round whose noise is not relied on; only the ledger depends on it.
    """

    fraction: float
    self_sampling: float | None = None
    once_over: int | None = None
    channel: Channel = "ideal-shuffler"
    colluding: int = 0


@dataclass(frozen=True)
class LocalWork:
    """How much a client trains in a round.

    Attributes:
        epochs, batch_size: of local training.
        full_weight: number of records at which a client gets full weight; None if all clients weigh the same.
    """

    epochs: int
    batch_size: int
    full_weight: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """Samples that the global model is measured on after each round, and what is known of them.

    Attributes:
        samples: the samples.
        persons: name of the person of each; None where the data do not say.
        clients: client of each, a number among ``client_names``; None where the data do not say.
        client_names: names of the clients, where the data say so.
        threshold: risk from which on rows count as flagged, beside 0.5 and the base rate; None without.
    """

    samples: Samples
    persons: NDArray[np.object_] | None = None
    clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    threshold: float | None = None


@dataclass(frozen=True)
class Stopping:
    """When a run stops early: once the loss on ``samples`` has not fallen for ``patience`` rounds."""

    samples: Samples
    patience: int


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over the rounds of a run.

    Attributes:
        seed: all random streams derive from it that may be known: divisions, batches, whom a server asks.
        secret_seed: of noise; None where the secret of the run is not there, so that no noise can be drawn.
        coin_seed: of records that take part by chance, clients that decide for themselves or are in a secret order; None likewise.
        own_data: whether the data are a user's own: then noise follows from what it hides as well, see :meth:`SeededStreams.bound`.
        task: model, layout, training samples and optimiser.
        trainer: turns a broadcast vector into the clients' trained vectors.
        samples: for each client the positions of its samples in the task's data; or the numbers of its persons, where the trainer
            protects persons.
        evaluation: samples that the global model is measured on after each round.
        mechanism: what clients do to their values before they leave.
        perturbed: whether those values are trained weights, their change, or gradients.
        rule: how the server chooses the next ranges.
        optimiser: what the server makes of a mean update or gradient.
        participation: who takes part in a round, and what stands between clients and server.
        work: how much a client trains in a round.
        measured: histograms that all clients took part in before the first round; the ledger counts them as rounds.
        notes: what is to be said of the data beside the guarantee.
        encoder: makes inputs of other rows, where the data are a table.
        stopping: when the run stops early; None where it does not.
        persons: whose the rows are, where the mechanism protects persons; None elsewhere.
        head: how the only round is solved by least squares; None where rounds train by steps.
        judged: what clients measure on records that they hold back; None where they measure nothing.
        chunk_size: clients trained at once; ``None`` lets a probe choose. On a CPU it changes speed, never results.
    """

    seed: int
    secret_seed: int | None
    coin_seed: int | None
    task: LocalTask
    trainer: Trainer
    samples: Division
    evaluation: Evaluation
    mechanism: Mechanism
    perturbed: Perturbed
    rule: RangeRule
    optimiser: ServerOptimiser
    participation: Participation
    work: LocalWork
    chunk_size: int | None = None
    own_data: bool = False
    measured: int = 0
    notes: tuple[str, ...] = ()
    encoder: Encoder | None = None
    stopping: Stopping | None = None
    persons: Persons | None = None
    head: LeastSquares | None = None
    judged: ClientEvaluation | None = None

    @cached_property
    def batch_width(self) -> int:
        """Batch size, or the size of the largest client where that is smaller or all its samples are taken; the same in every chunk."""
        largest = int(self.samples.sizes.max())
        return largest if self.perturbed == "gradient" else min(self.work.batch_size, largest)

    def cohort(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients of a round, in ascending order; none, if all of them decide so."""
        asked = self.participation
        if asked.once_over is not None:
            return once_cohort(known(self.coin_seed), round_number, len(self.samples), asked.once_over)
        seed = self.seed if asked.self_sampling is None else known(self.coin_seed)
        return round_cohort(seed, round_number, len(self.samples), asked.fraction, asked.self_sampling)

    def streams(self, state: ServerState, clients: NDArray[np.int64], values: Tensor, mechanism: Mechanism) -> SeededStreams:
        """Return the random bits by which ``clients`` randomise ``values`` (k, d) by ``mechanism`` in the round after ``state``."""
        number = state.round + 1
        if not self.own_data:
            return self.public_streams(state, clients)
        keys = [(number, int(client)) for client in clients]
        # How large a schedule's noise is follows from the number of rounds, and from how many records others have.
        variance = mechanism.noise(state.ranges).variance(values) if isinstance(mechanism, Gaussian) else None
        context = state.weights.numpy().tobytes()
        if record_clip_of(mechanism) is None:  # whose noise is of the size of its ranges; that of records is of lattice points
            ranges = state.ranges
            context += ranges.center.numpy().tobytes() + ranges.radius.numpy().tobytes() + repr(ranges.sizes).encode()
        return SeededStreams.bound(known(self.secret_seed), Purpose.MECHANISM, keys, values, context, variance)

    def public_streams(self, state: ServerState, clients: NDArray[np.int64]) -> SeededStreams:
        """Return the random bits of ``clients`` in the round after ``state`` where data are public, whatever their values are."""
        return SeededStreams.for_clients(known(self.secret_seed), state.round + 1, clients)

    def mixing(self, state: ServerState, reports: Sequence[Reports]) -> np.random.Generator:
        """Return the randomness by which the round after ``state`` mixes ``reports``: an order, and of a secure sum all noise."""
        number = state.round + 1
        if not self.own_data:
            return stream(self.seed, Purpose.MIXING, number)
        context = state.weights.numpy().tobytes() + SummedReports.kind_of(reports)
        return bound_stream(known(self.secret_seed), Purpose.MIXING, (number,), SummedReports.total_of(reports), context)

    @property
    def rules(self) -> ServerRules:
        """The server's part of all this."""
        names = self.task.layout.names
        validate = None if self.stopping is None else partial(mean_loss, self.task, samples=self.stopping.samples)
        return ServerRules(names, self.perturbed, self.rule, self.optimiser, self.score, validate)

    def score(self, weights: Tensor) -> float:
        """Return the figure by which the model with ``weights`` (d,) is judged."""
        return self.score_of(evaluated(self.task, weights, self.evaluation.samples))

    def score_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return that figure from what the model makes of the evaluation samples, and their targets, as ``evaluated`` yields both."""
        task = self.task.task
        return task.measured(iter(batches), every=False)[task.metric] if len(self.evaluation.samples) else nan

    def has_stopped(self, history: Sequence[RoundMetrics]) -> bool:
        """Whether what was trained so far has not become better for long enough."""
        return self.stopping is not None and has_stopped(history, self.stopping.patience)

    def charged_as(self, round_number: int) -> int:
        """Return the number under which the ledger charges a round: histograms and what clients measure are numbered with the rounds."""
        return self.measured + round_number + (0 if self.judged is None else self.judged.before(round_number))

    def weighed(self, broadcast: Tensor, trained: Tensor, clients: NDArray[np.int64]) -> Tensor:
        """Return what ``clients`` (k,) make of ``trained`` (k, d) where one with few records counts for less."""
        if self.work.full_weight is None:
            return trained
        sizes = torch.from_numpy(self.samples.sizes[clients]).float()
        shares = (sizes / self.work.full_weight).clamp_max(1.0).unsqueeze(1)
        return trained.mul_(shares) if self.perturbed == "gradient" else torch.lerp(broadcast.expand_as(trained), trained, shares)

    @property
    def device(self) -> torch.device:
        return self.task.data.device
