"""The mechanism that adds a schedule's noise to a client's update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import inf, isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.mechanisms.base import PerRound, PublicState, require_finite
from ldpfl.mechanisms.exact_noise import NORMAL, draw_rounded_noise
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.privacy import GaussianRelease, UnprotectedRelease
from ldpfl.util.randomness import COORDINATE_BLOCK, RandomSource, as_source, blocks

_ROUNDED_UP = 1 + 2.0**-48
"""Factor on mu = sensitivity / sigma, so that it is an upper bound in spite of rounding."""

STEPS = 2.0**20
"""Number of lattice points per standard deviation of the noise."""

_MAX_POINTS = 2.0**31
"""Largest norm of an update, in lattice points: squares are added up in 63 bits."""

_NORM_ERROR = 2.0**-30
"""Upper bound of the relative floating-point error of a squared norm; the true error is far smaller."""

Floats = NDArray[np.float64]

_PAPERS_CLAIM = (
    "LaDP-FL, Theorem 3 and its comparison: each round is (epsilon, delta)-DP, layers without noise and noise that follows private "
    "weights included; the first cost infinitely much, the second are outside the theorem"
)


@dataclass(frozen=True, eq=False)
class NoisyReports(VectorReports):
    """Noised updates, and the size of their noise. Only the clients know the size: it is not sent, and mixing drops it.

    Attributes:
        sigma: (K, L) float64 standard deviation by client and layer; private if the schedule depends on the data.
        noise_norm: (K,) float64 L2 norm of the noise that was added.
    """

    sigma: Tensor
    noise_norm: Tensor


@dataclass(frozen=True)
class Gaussian(VectorMechanism, PerRound):
    """Add Gaussian noise to each layer of a client's update, as much as a schedule says.

    Guarantee: that of the schedule's ``mu`` for a client's whole vector of one round, replacing the client's data; none if the schedule
    has no ``mu``. Assumes public broadcasts and an unguessable source of random bits. It holds for the bits that are sent: sigma / 2^20 is
    the step of a lattice. The clipped update is rounded to it towards 0, so that no norm grows, and the real noise to the nearest point.
    Norms are checked, and both are added, as integers.

    ``values`` are updates, offset by the ranges' center, which is 0 for updates. The ranges' radius is not used, because schedules clip by
    norm. A new mechanism is for a first round in which the broadcast weights are 0. :meth:`in_round` returns that of another round, and
    :meth:`for_clients` that of certain clients.

    Attributes:
        schedule: decides the noise and the clipping.
        public: public state of the round. None: the first round, with broadcast weights 0.
        clients: what the clients of a call know, by name, one row for each client: ``samples``, ``joined``, and what the schedule
            remembers. None for clients before their first round.
    """

    schedule: NoiseSchedule
    public: PublicState | None = None
    clients: Mapping[str, Tensor] | None = None

    @property
    def name(self) -> str:  # type: ignore[override]  # other mechanisms have one name each
        return self.schedule.name

    @property
    def terms(self) -> NoiseSchedule:
        """The schedule alone. The broadcast follows from the round, and clients do not tell the server their private facts."""
        return self.schedule

    def in_round(self, public: PublicState) -> Gaussian:
        return replace(self, public=public)

    def for_clients(self, facts: Mapping[str, Tensor]) -> Gaussian:
        """Return the mechanism for clients with these ``facts``, as :meth:`first_facts` returns them. Only a simulation knows them."""
        return replace(self, clients=facts)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> NoisyReports:
        """Clip the updates, add noise on each client's lattice, check that norms hold exactly, and apply the schedule's correction.

        Norms are checked only if the schedule has a guarantee that needs them.
        """
        source = as_source(generator)
        public, clients = self._public_state(ranges), self._client_state(require_finite(values, ranges), ranges)
        sigma, sent = self.schedule.sigma(public, clients), self.schedule.clipped_updates(public, clients)
        if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
            raise PrivacyError(f"{self.name} computed a negative or infinite noise level: check epsilon and clipping; nothing was sent")
        clipping_norms = None if self.schedule.mu(public) is None else self.schedule.clipping_norms(public)
        finest_steps = sigma.amin(dim=0) / STEPS  # (L,) smallest distance of lattice points over all clients
        if clipping_norms is not None and not bool((clipping_norms < _MAX_POINTS * finest_steps).all()):
            raise PrivacyError("epsilon is too large: the noise is too fine for updates of this size. Lower epsilon; nothing was sent")
        lattice = _Lattice((sigma / STEPS).numpy(), ranges.sizes)
        # ``round_and_add`` changes ``sent`` in place, because ``numpy`` returns a view of it.
        for rows, columns in blocks(len(sent), ranges.dimension, values=COORDINATE_BLOCK):  # small: noise takes several float64 arrays
            noise = draw_rounded_noise(NORMAL, STEPS, source, rows, columns.stop - columns.start)
            lattice.round_and_add(sent[rows.start : rows.stop, columns].numpy(), noise, rows, columns)
        if clipping_norms is not None and not lattice.norms_within(clipping_norms.numpy()):
            raise PrivacyError("a clipped update is longer than its clipping norm, which the noise is computed for; nothing was sent")
        sent = self.schedule.correct(public, clients, sent)
        if not isfinite(sent.sum(dtype=torch.float64)):
            raise PrivacyError("the update with noise has NaN or infinity: lower the learning rate, or raise epsilon; nothing was sent")
        return NoisyReports(sent, sigma, torch.from_numpy(lattice.noise_norms()))

    def remember(self, values: Tensor, ranges: LayerRanges, reports: NoisyReports) -> dict[str, Tensor]:
        """Return the schedule's memory of the clients that sent ``reports`` for ``values``: tensors (K, ...) by name. Private."""
        return self.schedule.remember(self._public_state(ranges), self._client_state(values, ranges), reports.values)

    def noise(self, ranges: LayerRanges) -> Noise:
        return _ScheduledNoise(self, ranges)

    @property
    def properties(self) -> Properties:
        schedule = self.schedule
        # A schedule has mu in all rounds or in none, so any public state shows which.
        guaranteed = schedule.mu(PublicState(round=1, weights=torch.zeros(1), previous=None, sizes=(1,))) is not None
        return replace(
            super().properties,
            assumptions=(*schedule.assumptions, "random bits are uniform and secret"),
            delta=schedule.delta,
            deployable=schedule.deployable and guaranteed,
            foreseeable=schedule.foreseeable,
        )

    def release(self, ranges: LayerRanges) -> GaussianRelease | UnprotectedRelease:
        """Return a release at the schedule's mu; without mu, an unprotected one, with the reason and the epsilon that the paper claims."""
        mu = self.schedule.mu(self._public_state(ranges))
        if mu is not None:
            return GaussianRelease(self.name, mu * _ROUNDED_UP, alike=not self.schedule.data_dependent)
        claimed = self.schedule.claimed_epsilon()
        delta, claim = (None, "") if claimed is None else (self.schedule.delta, _PAPERS_CLAIM)
        reason = self.schedule.why_unproved()
        return UnprotectedRelease(self.name, reason, claimed_epsilon=claimed, claimed_delta=delta, claim=claim)

    def _public_state(self, ranges: LayerRanges) -> PublicState:
        """Return the public state of the round; by default that of round 1 with broadcast weights 0."""
        # The expanded scalar takes no memory for the zeros of a large model.
        return self.public or PublicState(round=1, weights=torch.zeros(()).expand(ranges.dimension), previous=None, sizes=ranges.sizes)

    def _client_state(self, values: Tensor, ranges: LayerRanges) -> ClientState:
        """Return the state of the clients whose updates are ``values``; by default with one sample each, before their first round."""
        trained = (values - ranges.expand()[0]).float() + self._public_state(ranges).weights
        memory = dict(self.clients or self.first_facts(torch.ones(len(values), dtype=torch.int64), ranges.dimension))
        samples, joined = memory.pop("samples"), memory.pop("joined")  # the other facts are the schedule's memory
        return ClientState(trained, samples, joined, memory)

    def first_facts(self, samples: Tensor, dimension: int) -> dict[str, Tensor]:
        """Return the facts of clients with ``samples`` (K,) samples before their first round, by name, one row for each client."""
        return {"samples": samples, "joined": torch.zeros_like(samples), **self.schedule.initial_memory(len(samples), dimension)}

    def sigmas(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the standard deviation (K, L) of the noise that clients with the updates ``values`` add to each layer. Private."""
        return self.schedule.sigma(self._public_state(ranges), self._client_state(values, ranges))


@dataclass(frozen=True, eq=False)
class _ScheduledNoise(Noise):
    """Noise of the size sigma that a schedule sets. For a server, it is infinite if it depends on the clients' private data."""

    mechanism: Gaussian
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        """Return sigma^2 of the client and layer for each weight."""
        sigma = self.mechanism.sigmas(values, self.ranges)
        return sigma.square().repeat_interleave(torch.tensor(self.ranges.sizes), dim=1).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """Return sigma^2 / n for n = ``clients``, for each weight."""
        return self._public_sigma().square().div(clients).repeat_interleave(torch.tensor(self.ranges.sizes)).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """Return each layer's sigma / sqrt(n), the noise of a mean of n = ``clients`` updates."""
        return np.asarray(self._public_sigma() / sqrt(clients))

    def _public_sigma(self) -> Tensor:
        """Return sigma of each layer, (L,), as the server knows it: infinite if it depends on private data."""
        if self.mechanism.schedule.data_dependent:
            return torch.full((len(self.ranges.sizes),), inf, dtype=torch.float64)
        return self.mechanism.sigmas(torch.zeros(1, self.ranges.dimension), self.ranges)[0]  # the same for any values, such as zeros


class _Lattice:
    """Rounds values to a lattice for each client and layer, adds noise there, and keeps the norms of values and noise.

    Args:
        steps: (K, L) float64 distance of lattice points; a layer whose step is 0 gets no noise.
        sizes: number of weights of each layer.
    """

    def __init__(self, steps: Floats, sizes: tuple[int, ...]) -> None:
        self._steps, self._ends = steps, np.cumsum(sizes)
        # Squares of norms, (K, L), in squares of steps: of the noise; of the values, in floating point and as integers.
        self._noise_squares, self._squares = np.zeros(steps.shape), np.zeros(steps.shape)
        self._exact_squares = np.zeros(steps.shape, dtype=np.int64)

    def round_and_add(self, values: NDArray[np.float32], noise: Floats, rows: range, columns: slice) -> None:
        """Round ``values`` (k, b), of k clients ``rows`` at b coordinates ``columns``, and add ``noise`` (lattice points) in place."""
        first, last = np.searchsorted(self._ends, [columns.start, columns.stop - 1], side="right").tolist()  # layers that ``columns`` meets
        for layer in range(first, last + 1):
            start, stop = max(columns.start, int(self._ends[layer - 1]) if layer else 0), min(columns.stop, int(self._ends[layer]))
            part = slice(start - columns.start, stop - columns.start)
            self._add_in_layer(values[:, part], noise[:, part], slice(rows.start, rows.stop), layer)

    def _add_in_layer(self, values: NDArray[np.float32], noise: Floats, rows: slice, layer: int) -> None:
        """Do what :meth:`round_and_add` does, for coordinates of one ``layer``. Add the squares of values and noise to sums for norms."""
        step = self._steps[rows, layer, None]
        with np.errstate(over="ignore", invalid="ignore"):  # too large values are refused before they are sent
            points = values / np.where(step > 0, step, 1.0)  # not by 0; such layers keep their values, see the end
            np.trunc(points, out=points)
            squares = np.square(points).sum(axis=1)
            self._squares[rows, layer] += squares
            # Float64 sums of integers are exact below 2^53, else they are summed as integers. Where even 63 bits overflow, ``norms_within``
            # refuses the update by the floating-point squares alone.
            exact = squares if squares.max() < 2.0**53 else np.square(points.astype(np.int64)).sum(axis=1)
            self._exact_squares[rows, layer] += exact.astype(np.int64)
            self._noise_squares[rows, layer] += np.square(noise).sum(axis=1)
            points += noise  # both are integers far below 2^53: their sum is exact
            points *= step
            # Layers without noise (step 0) keep their values unrounded.
            np.copyto(values, points, where=True if step.all() else step > 0, casting="same_kind")

    def noise_norms(self) -> Floats:
        """Return the norm of each client's noise, (K,)."""
        return np.asarray(np.sqrt((self._noise_squares * self._steps**2).sum(axis=1)))

    def norms_within(self, limits: Floats) -> bool:
        """Whether the norms of all rounded values, without noise, are at most ``limits``.

        ``limits`` has one norm for each layer, (L,), or one for all layers together, (1,). Floating point decides where norms are clearly
        shorter or longer. Exact fractions decide where they are close to a limit.
        """
        squares, squared_limits = self._squares * self._steps**2, limits**2
        if len(limits) == 1:  # one limit for all layers together
            squares = squares.sum(axis=1, keepdims=True)
        if not bool((squares < squared_limits * (1 + _NORM_ERROR)).all()):
            return False
        doubtful = np.flatnonzero((squares > squared_limits * (1 - _NORM_ERROR)).any(axis=1))
        return all(_client_norms_within(self._exact_squares[row].tolist(), self._steps[row].tolist(), limits.tolist()) for row in doubtful)


def _client_norms_within(squares_in_steps: list[int], steps: list[float], limits: list[float]) -> bool:
    """Whether a client's norms are at most ``limits``, in exact arithmetic.

    ``squares_in_steps`` are the squares of the norms of its layers, each in squares of the layer's step.
    """
    squares = [square * _exact_square(step) for square, step in zip(squares_in_steps, steps, strict=True)]
    if len(limits) == 1:  # one limit for all layers together
        squares = [sum(squares, Fraction())]
    return all(square <= _exact_square(limit) for square, limit in zip(squares, limits, strict=True))


@lru_cache(maxsize=64)
def _exact_square(value: float) -> Fraction:
    """Return the square of ``value``, not rounded. Cached, because clients share steps and limits."""
    return Fraction(value) ** 2
