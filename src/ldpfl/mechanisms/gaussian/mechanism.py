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
from ldpfl.mechanisms.gaussian.norms import layer_slices
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule
from ldpfl.mechanisms.reports.vectors import VectorMechanism, VectorReports
from ldpfl.privacy import GaussianRelease, UnprotectedRelease
from ldpfl.randomness import RandomSource, as_source
from ldpfl.ranges import LayerRanges

_UP = 1 + 2.0**-48
"""More than what rounding sensitivity over sigma to floating point can take off."""

STEPS = 2.0**20
"""Lattice points to a standard deviation of the noise."""

_MOST_STEPS = 2.0**31
"""Lattice points to the longest update: their squares are added up in 63 bits."""

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
class Gaussian(VectorMechanism):
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
        norms = torch.empty(len(sent), dtype=torch.float64)
        limits = None if self.schedule.mu(public) is None else self.schedule.limits(public)
        if limits is not None and not bool((limits < _MOST_STEPS * sigma.amin(dim=0) / STEPS).all()):
            raise PrivacyError("epsilon is so large that updates have no room on the noise's lattice; nothing was sent")
        for row in range(len(sent)):
            noise = torch.from_numpy(rounded(NORMAL, STEPS, source, row, ranges.dimension))
            norms[row] = _noised(sent[row], noise, sigma[row] / STEPS, ranges.sizes, limits)
        sent = self.schedule.correct(public, clients, sent)
        if not isfinite(sent.sum(dtype=torch.float64)):
            raise PrivacyError("the noised update is not finite; nothing was sent")
        return NoisyReports(sent, sigma, norms)

    def remember(self, values: Tensor, ranges: LayerRanges, reports: NoisyReports) -> dict[str, Tensor]:
        """Return what the clients that sent ``reports`` for ``values`` remember, by name (K, ...). Private."""
        return self.schedule.remember(self._public(ranges), self._clients(values, ranges), reports.values)

    def variance(self, values: Tensor, ranges: LayerRanges) -> Tensor:
        """sigma^2 of the client and layer."""
        sigma = self.schedule.sigma(self._public(ranges), self._clients(values, ranges))
        return sigma.square().repeat_interleave(torch.tensor(ranges.sizes), dim=1).to(values.dtype)

    def mean_variance(self, mean: Tensor, ranges: LayerRanges, clients: int) -> Tensor:
        """sigma^2 / n; infinite where sigma depends on the clients' data, and the server cannot know it."""
        return self._public_sigma(ranges).square().div(clients).repeat_interleave(torch.tensor(ranges.sizes)).float()

    def noise_std(self, ranges: LayerRanges, clients: int) -> NDArray[np.float64]:
        """sigma / sqrt(n); infinite where sigma depends on the clients' data: it has no known bound then."""
        return np.asarray(self._public_sigma(ranges) / sqrt(clients))

    @property
    def delta(self) -> float:
        return self.schedule.delta

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (*self.schedule.assumptions, "random bits are uniform and secret")

    @property
    def deployable(self) -> bool:
        return self.schedule.deployable and self.schedule.mu(PublicState(1, torch.zeros(1), None, (1,))) is not None

    @property
    def foreseeable(self) -> bool:
        return self.schedule.foreseeable

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

    def _public_sigma(self, ranges: LayerRanges) -> Tensor:
        if self.schedule.data_dependent:
            return torch.full((len(ranges.sizes),), inf, dtype=torch.float64)
        nobody = self._clients(torch.zeros(1, ranges.dimension), ranges)
        return self.schedule.sigma(self._public(ranges), nobody)[0]


def _noised(values: Tensor, noise: Tensor, steps: Tensor, sizes: tuple[int, ...], limits: Tensor | None) -> float:
    """Add ``noise`` (d,), in lattice steps of ``steps`` (L,), to ``values`` (d,) in place; return the noise's norm.

    A layer whose step is 0 gets none.

    Raises:
        PrivacyError: rounded to the lattice, ``values`` exceed one of ``limits``: for each layer, or one for all of them.
    """
    squares, total = [], 0.0
    parts, known = layer_slices(sizes), steps.tolist()
    if len(set(known)) == 1 and (limits is None or len(limits) == 1):  # the same noise everywhere: one layer
        parts, known = [slice(0, sum(sizes))], known[:1]
    for part, step in zip(parts, known, strict=True):
        if step == 0:
            continue
        points = (values[part].double() / step).trunc_()
        if limits is not None:
            squares.append(int(points.to(torch.int64).square().sum()))
        added = noise[part].double()
        total += float(added.square().sum()) * step**2
        values[part] = (points + added) * step  # both are integers far below 2^53: their sum is exact
    if limits is not None and not _within(squares, known, limits.tolist()):
        raise PrivacyError("an update is longer than its sensitivity allows; nothing was sent")
    return sqrt(total)


def _within(squares: list[int], steps: list[float], limits: list[float]) -> bool:
    """Whether the norms, whose squares are given in lattice steps, keep the limits: in exact arithmetic."""
    norms = [square * _square(step) for square, step in zip(squares, steps, strict=True)]
    if len(limits) == 1:
        norms = [sum(norms, Fraction())]
    return all(norm <= _square(limit) for norm, limit in zip(norms, limits, strict=True))


@lru_cache(maxsize=64)
def _square(value: float) -> Fraction:
    return Fraction(value) ** 2
