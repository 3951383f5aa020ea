"""The parts of a simulated federation that stay the same over all rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.encoder import Encoder
from ldpfl.data.persons import Persons
from ldpfl.data.samples import Division, Samples
from ldpfl.mechanisms import Mechanism, Perturbed, Reports
from ldpfl.mechanisms.base import record_clip_of
from ldpfl.mechanisms.gaussian.mechanism import Gaussian
from ldpfl.mechanisms.ranges import NormQuantile, RangeRule
from ldpfl.mechanisms.reports.summed import SummedReports
from ldpfl.privacy.events import Channel, Release, resting_on_users_code
from ldpfl.server import RoundMetrics, ServerOptimiser, ServerRules, ServerState, has_stopped, once_cohort, round_cohort
from ldpfl.simulation.evaluating_records import ClientEvaluation
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.local_training import LocalTask, Trainer, evaluated, mean_loss
from ldpfl.simulation.personal_layers import PersonalTrainer
from ldpfl.util.randomness import Purpose, SeededStreams, bound_stream, require_secret, stream


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and what stands between clients and server.

    Attributes:
        fraction: fraction of clients that the server samples in each round.
        self_sampling: lowest probability with which a client joins, if each decides for itself (then ``fraction`` has no effect).
        once_over: number of rounds that the clients are divided over, if each takes part once (then ``fraction`` has no effect).
        channel: what stands between clients and server in the deployment that is simulated; only the ledger depends on it.
        colluding: number of clients of each round whose noise is not counted, since they may reveal it; only the ledger depends on it.
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
        epochs, batch_size: epochs and batch size of local training.
        full_weight: number of records at which a client gets full weight; None if all clients weigh the same.
    """

    epochs: int
    batch_size: int
    full_weight: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """Samples that the global model is evaluated on after each round.

    Attributes:
        samples: the samples.
        persons: name of each sample's person; None if the data do not say.
        clients: index of each sample's client in ``client_names``; None if the data do not say.
        client_names: names of the clients, if the data give them.
        threshold: additional risk from which rows count as flagged, beside 0.5 and the base rate; None if there is none.
        at_clients: whether the samples are records that the clients hold back from training, sorted by client.
    """

    samples: Samples
    persons: NDArray[np.object_] | None = None
    clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    threshold: float | None = None
    at_clients: bool = False


@dataclass(frozen=True)
class Stopping:
    """When a run stops early: once the loss on ``samples`` has not fallen for ``patience`` rounds."""

    samples: Samples
    patience: int


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same over the rounds of a run.

    Attributes:
        seed: seed of all random streams that may be public: divisions, batches, the server's choice of clients.
        secret_seed: seed of the noise; None if the run's secret is missing, so that no noise can be drawn.
        coin_seed: seed of the secret choice of clients, and of records within a client; None if the run's secret is missing.
        users_code: whether code that is not ldpfl's, such as a user's model, takes part. See :meth:`charged`.
        own_data: whether the data are a user's own. Then noise also depends on the values that it hides, see :meth:`SeededStreams.bound`.
        task: model, layout, training samples and optimiser.
        trainer: turns a broadcast vector into the clients' trained vectors.
        samples: indices of each client's samples in the task's data; if the trainer protects persons, numbers of its persons.
        evaluation: samples that the global model is evaluated on after each round.
        mechanism: local randomiser.
        perturbed: whether the randomised values are trained weights, updates, or gradients.
        rule: rule by which the server chooses the next ranges, or the next clipping norm.
        optimiser: optimiser of the server.
        participation: who takes part in a round, and through which channel.
        work: how much a client trains in a round.
        measured: number of histograms that all clients took part in before the first round. The ledger numbers them with the rounds.
        notes: assumptions on the data, to be stated with the guarantee.
        encoder: encoder of new rows, if the data are a table.
        stopping: rule for early stopping, or None.
        persons: which rows belong to which person, if the mechanism protects persons; else None.
        head: least-squares solver for the only round; None if rounds train by steps.
        judged: evaluation at clients on held-back records, or None.
        chunk_size: number of clients that are trained at once; ``None`` lets a probe choose. On a CPU it changes speed, never results.
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
    rule: RangeRule | NormQuantile
    optimiser: ServerOptimiser
    participation: Participation
    work: LocalWork
    chunk_size: int | None = None
    own_data: bool = False
    users_code: bool = False
    measured: int = 0
    notes: tuple[str, ...] = ()
    encoder: Encoder | None = None
    stopping: Stopping | None = None
    persons: Persons | None = None
    head: LeastSquares | None = None
    judged: ClientEvaluation | None = None

    @cached_property
    def batch_width(self) -> int:
        """Number of samples in a step, the same for all clients: the batch size, or the largest client's size if that is smaller.

        For gradients, which use all samples of a client in one step, it is always the largest client's size.
        """
        largest = int(self.samples.sizes.max())
        return largest if self.perturbed == "gradient" else min(self.work.batch_size, largest)

    def cohort(self, round_number: int) -> NDArray[np.int64]:
        """Return the clients of a round, in ascending order. With random check-in there may be none."""
        participation = self.participation
        if participation.once_over is not None:  # each client takes part in one of so many rounds
            return once_cohort(require_secret(self.coin_seed), round_number, len(self.samples), participation.once_over)
        seed = self.seed if participation.self_sampling is None else require_secret(self.coin_seed)  # check-in is secret
        return round_cohort(seed, round_number, len(self.samples), participation.fraction, participation.self_sampling)

    def streams(self, state: ServerState, clients: NDArray[np.int64], values: Tensor, mechanism: Mechanism) -> SeededStreams:
        """Return the random bits with which ``clients`` randomise ``values`` (k, d) in the round after ``state``.

        On a user's own data they depend on the values, and on all that decides the size of the noise. So different values, or the same
        values under another noise, never share random bits, which would reveal their difference.
        """
        round_number = state.round + 1
        if not self.own_data:
            return self.public_streams(state, clients)
        keys = [(round_number, int(client)) for client in clients]
        # The noise of a schedule depends on the number of rounds and on other clients' sizes, so its variance goes into the seed.
        variance = mechanism.noise(state.ranges).variance(values) if isinstance(mechanism, Gaussian) else None
        context = state.weights.numpy().tobytes()
        if record_clip_of(mechanism) is None:  # this noise scales with the ranges; noise for records is in lattice points
            ranges = state.ranges
            context += ranges.center.numpy().tobytes() + ranges.radius.numpy().tobytes() + repr(ranges.sizes).encode()
        return SeededStreams.bound(require_secret(self.secret_seed), Purpose.MECHANISM, keys, values, context, variance)

    def public_streams(self, state: ServerState, clients: NDArray[np.int64]) -> SeededStreams:
        """Return the random bits of ``clients`` in the round after ``state`` for public data. They do not depend on the values."""
        return SeededStreams.for_clients(require_secret(self.secret_seed), state.round + 1, clients)

    def mixing_generator(self, state: ServerState, reports: Sequence[Reports]) -> np.random.Generator:
        """Return the generator that mixes ``reports`` in the round after ``state``: it draws their order, or all noise of a secure sum.

        On a user's own data it depends on the sum of the reports and on the weights, since it draws noise that hides this sum.
        """
        round_number = state.round + 1
        if not self.own_data:
            return stream(self.seed, Purpose.MIXING, round_number)
        context = state.weights.numpy().tobytes() + SummedReports.noise_parameter_bytes(reports)
        return bound_stream(
            require_secret(self.secret_seed), Purpose.MIXING, (round_number,), SummedReports.total_without_noise(reports), context
        )

    def charged(self, release: Release) -> Release:
        """Return ``release``, marked as resting on a user's code if such code takes part.

        A simulation runs all clients in one process, so a user's code could pass one client's data to others. Nothing is then proved.
        """
        return resting_on_users_code(release) if self.users_code else release

    @property
    def rules(self) -> ServerRules:
        """The settings that the server needs. ``validate`` computes the loss by which a run is stopped early."""
        names = self.task.layout.names
        validate = None if self.stopping is None else partial(mean_loss, self.task, samples=self.stopping.samples)
        return ServerRules(names, self.perturbed, self.rule, self.optimiser, self.score, validate)

    def score(self, weights: Tensor, personal: Tensor | None = None) -> float:
        """Return the main metric of the model with ``weights`` (d,) on the evaluation samples; for ``personal`` see :meth:`outputs`."""
        return self.score_of(self.outputs(weights, personal))

    def outputs(self, weights: Tensor, personal: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs and targets of the evaluation samples, in their order, batch by batch.

        Args:
            personal: (N, p) personal layers of all clients, with which each client's samples are evaluated; None if the model has none.
        """
        samples, clients, trainer = self.evaluation.samples, self.evaluation.clients, self.trainer
        if personal is None or clients is None or not isinstance(trainer, PersonalTrainer):
            yield from evaluated(self.task, weights, samples)
            return
        owners, starts = np.unique(clients, return_index=True)  # samples are sorted by client, so each client has one slice
        for client, start, stop in zip(owners, starts, [*starts[1:], len(samples)], strict=True):
            [model] = trainer.whole_models(weights, personal[client : client + 1])  # broadcast and personal layers together
            yield from evaluated(trainer.whole.task, model, samples.take(slice(int(start), int(stop))))

    def score_of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Return the main metric from ``batches`` of outputs and targets of the evaluation samples, as ``evaluated`` yields them."""
        task = self.task.task
        return task.measured(iter(batches), every=False)[task.metric] if len(self.evaluation.samples) else nan

    def has_stopped(self, history: Sequence[RoundMetrics]) -> bool:
        """Return whether early stopping applies: the validation loss has not fallen for ``patience`` rounds."""
        return self.stopping is not None and has_stopped(history, self.stopping.patience)

    def ledger_number(self, round_number: int) -> int:
        """Return the number of a round in the ledger, which also numbers histograms and evaluations at clients."""
        return self.measured + round_number + (0 if self.judged is None else self.judged.before(round_number))

    def scaled_by_size(self, broadcast: Tensor, trained: Tensor, clients: NDArray[np.int64]) -> Tensor:
        """Return ``trained`` (k, d), scaled down for those of ``clients`` (k,) that have few records. ``trained`` may be overwritten.

        A gradient is scaled itself. Weights are moved towards ``broadcast`` (d,), so that their change is scaled.
        """
        if self.work.full_weight is None:
            return trained
        sizes = torch.from_numpy(self.samples.sizes[clients]).float()
        shares = (sizes / self.work.full_weight).clamp_max(1.0).unsqueeze(1)
        return trained.mul_(shares) if self.perturbed == "gradient" else torch.lerp(broadcast.expand_as(trained), trained, shares)

    @property
    def device(self) -> torch.device:
        return self.task.data.device
