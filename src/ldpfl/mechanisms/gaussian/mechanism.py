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
from ldpfl.mechanisms.base import PublicState, require_finite
from ldpfl.mechanisms.exact_noise import NORMAL, rounded
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule
from ldpfl.mechanisms.hooks import PerRound
from ldpfl.mechanisms.noise import Noise
from ldpfl.mechanisms.properties import Properties
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.reports.base import COORDINATE_BLOCK, blocks
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.privacy import GaussianRelease, UnprotectedRelease
from ldpfl.util.randomness import RandomSource, as_source

_UP = 1 + 2.0**-48
"""More than what rounding sensitivity over sigma to floating point can take off."""

STEPS = 2.0**20
"""Lattice points to a standard deviation of the noise."""

_MOST_STEPS = 2.0**31
"""Lattice points to the longest update: their squares are added up in 63 bits."""

_DOUBT = 2.0**-30
"""Part of a squared norm that floating point may be wrong by: far more than it is."""

Floats = NDArray[np.float64]

_CLAIM = (
    "LaDP-FL, Theorem 3 and its comparison: each round is (epsilon, delta)-DP, layers without noise and noise that follows private "
    "weights included; the first cost infinitely much, the second are outside the theorem"
)


@dataclass(frozen=True, eq=False)
class NoisyReports(VectorReports):
    """Noised updates, and what their clients know of the noise; the latter is no part of what is sent, and mixing drops it.

    Attributes:
        sigma: (K, L) float64 standard deviation by client and layer; private where the schedule depends on the data.
        noise_norm: (K,) float64 L2 norm of the noise that was added.
    """

    sigma: Tensor
    noise_norm: Tensor


@dataclass(frozen=True)
class Gaussian(VectorMechanism, PerRound):
    """Add Gaussian noise to each layer of a client's update, as much as a schedule says.

    Guarantee: that of the schedule's ``mu`` for a client's whole vector of one round, replacing the client's data; none where
    the schedule has none. Assumes public broadcasts and an unguessable source of random bits. It holds for the bits that leave:
    sigma / 2^20 is the step of a lattice, to which the bounded update is rounded towards 0, so that no norm grows, and the real
    noise to the nearest point; norms are checked, and both are added, as integers.

    ``values`` are updates, offset by the ranges' center, which is 0 for updates; the radius has no part in it: schedules bound
    by norm. As built, the mechanism is that of a first round after the broadcast 0; :meth:`in_round` and
    :meth:`for_clients` bind it to another.

    Attributes:
        schedule: how much noise, on what.
        public: what everybody knows in this round.
        clients: by name: what the clients of this call know beside their weights, a row a client: ``samples``, ``joined``, and
            what the schedule remembers.
    """

    schedule: NoiseSchedule
    public: PublicState | None = None
    clients: Mapping[str, Tensor] | None = None

    @property
    def name(self) -> str:  # type: ignore[override]  # other mechanisms have one name each
        return self.schedule.name

    @property
    def terms(self) -> NoiseSchedule:
        """The schedule alone: a round's broadcast is bound to its number, and what clients know of themselves is no term."""
        return self.schedule

    def in_round(self, public: PublicState) -> Gaussian:
        return replace(self, public=public)

    def for_clients(self, facts: Mapping[str, Tensor]) -> Gaussian:
        """Return the mechanism for clients that know ``facts``, by name a row a client; only a simulation knows them."""
        return replace(self, clients=facts)

    def encode(self, values: Tensor, ranges: LayerRanges, generator: RandomSource | torch.Generator) -> NoisyReports:
        source = as_source(generator)
        public, clients = self._public(ranges), self._clients(require_finite(values, ranges), ranges)
        sigma, sent = self.schedule.sigma(public, clients), self.schedule.bounded(public, clients)
        if not bool((torch.isfinite(sigma) & (sigma >= 0)).all()):
            raise PrivacyError(f"{self.name} gave noise of no usable size; nothing was sent")
        limits = None if self.schedule.mu(public) is None else self.schedule.limits(public)
        if limits is not None and not bool((limits < _MOST_STEPS * sigma.amin(dim=0) / STEPS).all()):
            raise PrivacyError("epsilon is so large that updates have no room on the noise's lattice; nothing was sent")
        lattice = _Lattice((sigma / STEPS).numpy(), ranges.sizes)
        for rows, own in blocks(len(sent), ranges.dimension, values=COORDINATE_BLOCK):  # float64, several times, takes more of a cache
            noise = rounded(NORMAL, STEPS, source, rows, own.stop - own.start)
            lattice.add(sent[rows.start : rows.stop, own].numpy(), noise, rows, own)
        if limits is not None and not lattice.within(limits.numpy()):
            raise PrivacyError("an update is longer than its sensitivity allows; nothing was sent")
        sent = self.schedule.correct(public, clients, sent)
        if not isfinite(sent.sum(dtype=torch.float64)):
            raise PrivacyError("the noised update is not finite; nothing was sent")
        return NoisyReports(sent, sigma, torch.from_numpy(lattice.noise_norms()))

    def remember(self, values: Tensor, ranges: LayerRanges, reports: NoisyReports) -> dict[str, Tensor]:
        """Return what the clients that sent ``reports`` for ``values`` remember, by name (K, ...). Private."""
        return self.schedule.remember(self._public(ranges), self._clients(values, ranges), reports.values)

    def noise(self, ranges: LayerRanges) -> Noise:
        return _ScheduledNoise(self, ranges)

    @property
    def properties(self) -> Properties:
        schedule = self.schedule
        return replace(
            super().properties,
            assumptions=(*schedule.assumptions, "random bits are uniform and secret"),
            delta=schedule.delta,
            deployable=schedule.deployable and schedule.mu(PublicState(1, torch.zeros(1), None, (1,))) is not None,
            foreseeable=schedule.foreseeable,
        )

    def release(self, ranges: LayerRanges) -> GaussianRelease | UnprotectedRelease:
        mu = self.schedule.mu(self._public(ranges))
        if mu is not None:
            return GaussianRelease(self.name, mu * _UP, alike=not self.schedule.data_dependent)
        claim = self.schedule.claim()
        delta = None if claim is None else self.schedule.delta
        return UnprotectedRelease(
            self.name, self.schedule.reason(), claimed_epsilon=claim, claimed_delta=delta, claim="" if claim is None else _CLAIM
        )

    def _public(self, ranges: LayerRanges) -> PublicState:
        return self.public or PublicState(1, torch.zeros(()).expand(ranges.dimension), None, ranges.sizes)

    def _clients(self, values: Tensor, ranges: LayerRanges) -> ClientState:
        trained = (values - ranges.expand()[0]).float() + self._public(ranges).weights
        facts = dict(self.clients or self.first_facts(torch.ones(len(values), dtype=torch.int64), ranges.dimension))
        return ClientState(trained, facts.pop("samples"), facts.pop("joined"), facts)

    def first_facts(self, samples: Tensor, dimension: int) -> dict[str, Tensor]:
        """Return what clients with ``samples`` (K,) samples know before their first round, as :meth:`for_clients` wants it."""
        return {"samples": samples, "joined": torch.zeros_like(samples), **self.schedule.initial_memory(len(samples), dimension)}

    def sigmas(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """Return the standard deviation (K, L) of the noise that the clients which hold ``values`` add in each layer. Private."""
        return self.schedule.sigma(self._public(ranges), self._clients(values, ranges))


@dataclass(frozen=True, eq=False)
class _ScheduledNoise(Noise):
    """Noise of the size sigma that a schedule sets; infinite where it depends on the clients' data, and the server cannot know it."""

    mechanism: Gaussian
    ranges: LayerRanges

    def variance(self, values: Tensor) -> Tensor:
        """sigma^2 of the client and layer."""
        sigma = self.mechanism.sigmas(values, self.ranges)
        return sigma.square().repeat_interleave(torch.tensor(self.ranges.sizes), dim=1).to(values.dtype)

    def mean_variance(self, mean: Tensor, clients: int) -> Tensor:
        """sigma^2 / n."""
        return self._public_sigma().square().div(clients).repeat_interleave(torch.tensor(self.ranges.sizes)).float()

    def largest_std(self, clients: int) -> NDArray[np.float64]:
        """sigma / sqrt(n)."""
        return np.asarray(self._public_sigma() / sqrt(clients))

    def _public_sigma(self) -> Tensor:
        if self.mechanism.schedule.data_dependent:
            return torch.full((len(self.ranges.sizes),), inf, dtype=torch.float64)
        return self.mechanism.sigmas(torch.zeros(1, self.ranges.dimension), self.ranges)[0]


class _Lattice:
    """Adds noise to values in steps of each client's and layer's lattice, and keeps the norms of both.

    Args:
        steps: (K, L) float64; a layer whose step is 0 gets no noise.
        sizes: weights of each layer.
    """

    def __init__(self, steps: Floats, sizes: tuple[int, ...]) -> None:
        self._steps, self._ends = steps, np.cumsum(sizes)
        # Squares of norms, (K, L), in squares of steps: of the noise; of the values, in floating point and as integers.
        self._noise, self._lengths, self._exact = np.zeros(steps.shape), np.zeros(steps.shape), np.zeros(steps.shape, dtype=np.int64)

    def add(self, values: NDArray[np.float32], noise: Floats, rows: range, own: slice) -> None:
        """Add the whole numbers ``noise`` (k, b) to the ``values`` (k, b) that the clients in ``rows`` have of the coordinates ``own``."""
        first, last = np.searchsorted(self._ends, [own.start, own.stop - 1], side="right").tolist()
        for layer in range(first, last + 1):
            start, stop = max(own.start, int(self._ends[layer - 1]) if layer else 0), min(own.stop, int(self._ends[layer]))
            part = slice(start - own.start, stop - own.start)
            self._add(values[:, part], noise[:, part], slice(rows.start, rows.stop), layer)

    def _add(self, values: NDArray[np.float32], noise: Floats, some: slice, layer: int) -> None:
        step = self._steps[some, layer, None]
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large is not sent
            points = values / np.where(step > 0, step, 1.0)
            np.trunc(points, out=points)
            squares = np.square(points).sum(axis=1)
            self._lengths[some, layer] += squares
            # Sums of integers are exact below 2^53; and where even 63 bits overflow, ``within`` does not ask for them.
            exact = squares if squares.max() < 2.0**53 else np.square(points.astype(np.int64)).sum(axis=1)
            self._exact[some, layer] += exact.astype(np.int64)
            self._noise[some, layer] += np.square(noise).sum(axis=1)
            points += noise  # both are integers far below 2^53: their sum is exact
            points *= step
            np.copyto(values, points, where=True if step.all() else step > 0, casting="same_kind")

    def noise_norms(self) -> Floats:
        """Return the norm of each client's noise, (K,)."""
        return np.asarray(np.sqrt((self._noise * self._steps**2).sum(axis=1)))

    def within(self, limits: Floats) -> bool:
        """Whether the values' norms, rounded to the lattice, keep ``limits``, one for each layer or one for all.

        Floating point decides where they are clearly shorter or longer, and fractions where not; integers hold such squares.
        """
        norms, squares = self._lengths * self._steps**2, limits**2
        if len(limits) == 1:
            norms = norms.sum(axis=1, keepdims=True)
        if not bool((norms < squares * (1 + _DOUBT)).all()):
            return False
        doubtful = np.flatnonzero((norms > squares * (1 - _DOUBT)).any(axis=1))
        return all(_within(self._exact[row].tolist(), self._steps[row].tolist(), limits.tolist()) for row in doubtful)


def _within(squares: list[int], steps: list[float], limits: list[float]) -> bool:
    """Whether the norms, whose squares are given in lattice steps, keep the limits: in exact arithmetic."""
    norms = [square * _square(step) for square, step in zip(squares, steps, strict=True)]
    if len(limits) == 1:
        norms = [sum(norms, Fraction())]
    return all(norm <= _square(limit) for norm, limit in zip(norms, limits, strict=True))


@lru_cache(maxsize=64)
def _square(value: float) -> Fraction:
    return Fraction(value) ** 2
