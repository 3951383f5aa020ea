"""Schedules fixed before the run: the same noise in every round, or a geometric series over rounds."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, fsum, log, sqrt
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from ldpfl.errors import ConfigError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian.norms import clip_rows
from ldpfl.mechanisms.gaussian.schedule import ClientState, NoiseSchedule, PublicSchedule, raw_update, same_for_all_layers
from ldpfl.mechanisms.gaussian.sensitivity import Constant, Sensitivity, noise_constant, require_positive, require_share, require_usable
from ldpfl.mechanisms.gaussian.settings import GaussianSettings, GeometricSettings, SensitivitySettings, Variant
from ldpfl.mechanisms.settings import Facts
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.util.quantities import Count, Positive, Share


@dataclass(frozen=True)
class SensitivitySchedule(NoiseSchedule):
    """Base class of schedules that have one sensitivity D of the whole update.

    Attributes:
        sensitivity: D; with ``update_clip`` the update is clipped to D / 2.
        constant: rule for the constant c of the noise c D / epsilon; by default ``exact`` where D is proved, else ``theorem3``.

    Raises:
        ConfigError: a value out of range.
    """

    sensitivity: Sensitivity
    constant: Constant | None = None

    def __post_init__(self) -> None:
        require_usable(self.full_sigma)

    @property
    def proved(self) -> bool:
        """Whether the sensitivity is proved to bound the distance of any two updates of a client."""
        return self.sensitivity.proved

    @property
    def c(self) -> float:
        """The constant c of the noise's standard deviation c D / epsilon."""
        return noise_constant(self.constant or ("exact" if self.proved else "theorem3"), self.epsilon, self.delta)

    @property
    def full_sigma(self) -> float:
        """Standard deviation c D / epsilon, that of Full DP in every layer and round."""
        return self.c * self.sensitivity.value / self.epsilon

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return the updates (K, d), clipped to the norm D / 2 if D is proved. Otherwise D is only assumed, and nothing is clipped."""
        if self.sensitivity.proved:
            return clip_rows(raw_update(public, clients), public.sizes, self.sensitivity.value / 2)
        return super().clipped_updates(public, clients)

    def clipping_norms(self, public: PublicState) -> Tensor | None:
        """Return the clipping norm D / 2 (1,) if the sensitivity D is proved: then any two updates are at most D apart. Else None."""
        return torch.tensor([self.sensitivity.value / 2], dtype=torch.float64) if self.sensitivity.proved else None

    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        return self._mean_cost(self.c * self.sensitivity.value, sigma)  # c D / sigma for each layer


@dataclass(frozen=True)
class UniformSchedule(SensitivitySchedule, PublicSchedule):
    """One public standard deviation a round, the same for all clients and layers.

    Guarantee: mu = D / sigma for a client's whole message, if D is proved.
    """

    @abstractmethod
    def round_sigma(self, round_number: int) -> float:
        """Return the standard deviation in round ``round_number``, from 1."""

    def public_sigma(self, public: PublicState) -> Tensor:
        return same_for_all_layers(self.round_sigma(public.round), public)

    def mu(self, public: PublicState) -> float | None:
        """Return D / sigma of this round if the sensitivity D is proved, else None."""
        return self.sensitivity.value / self.round_sigma(public.round) if self.sensitivity.proved else None

    def why_unproved(self) -> str:
        return self.sensitivity.reason  # mu is known exactly if the sensitivity is proved


@dataclass(frozen=True)
class FullDP(UniformSchedule):
    """Add the same noise to every layer in every round: sigma = c D / epsilon.

    Guarantee: with ``update_clip`` and the exact constant, (epsilon, delta) for a client's whole message of one round under
    replacement of its data; otherwise as the sensitivity says. Source: what LaDP-FL compares itself with under
    the name of Wei et al. 2020.
    """

    name: ClassVar[str] = "full-dp"
    deployable: ClassVar[bool] = True
    confidence: ClassVar[str] = "high for the form; medium that LaDP-FL ran this one and not NbAFL"

    def round_sigma(self, round_number: int) -> float:
        return self.full_sigma  # the same in every round


class FullDPSettings(SensitivitySettings):
    """Settings of ``full-dp``."""

    name: Literal["full-dp"] = "full-dp"

    def schedule(self, facts: Facts) -> FullDP:
        return FullDP(**self.shared(facts))


@dataclass(frozen=True)
class NbAFL(PublicSchedule):
    """Clip a client's weights to the norm C and add noise sigma = 2 c L C / (m epsilon), c = sqrt(2 ln(1.25 / delta)).

    Guarantee: mu = 2 C / sigma = m epsilon / (c L) for a client's message under replacement of its data. The paper's own
    sensitivity, 2 C / m, assumes that the best weights for m samples are an average over samples. For networks they are not, so
    there is m times too little noise. Two parts of the paper are not here: the proximal term, which belongs to local training, and noise
    on the broadcast, which the server adds (none up to L sqrt(N) rounds). Source: Wei et al. 2020, section III.

    Attributes:
        epsilon, delta: budget of ``exposures`` rounds of a client together, as the paper counts.
        norm: C, the clipping norm of the weights themselves, not of their change.
        samples: m, smallest data set size of any client, which is assumed to be public.
        exposures: L, number of rounds in which one client's upload is seen.

    Raises:
        ConfigError: a value out of range, or epsilon / L >= 1.
    """

    name: ClassVar[str] = "nbafl"
    confidence: ClassVar[str] = "high: the upload's noise, from memory and checked against two implementations"
    assumptions: ClassVar[tuple[str, ...]] = ("broadcasts and the size of the smallest data set are public",)

    norm: float
    samples: int
    exposures: int = 1

    def __post_init__(self) -> None:
        for name in ("epsilon", "norm", "samples", "exposures"):
            require_positive(name, getattr(self, name))
        require_usable(self._sigma)

    @property
    def foreseeable(self) -> bool:
        return False  # it depends on the size of the smallest data set

    @property
    def _c(self) -> float:
        """The constant c at epsilon / L, which must be below 1."""
        return noise_constant("classical", self.epsilon / self.exposures, self.delta)

    @property
    def _sigma(self) -> float:
        """Standard deviation 2 c L C / (m epsilon), see the class."""
        return 2 * self._c * self.exposures * self.norm / (self.samples * self.epsilon)

    def public_sigma(self, public: PublicState) -> Tensor:
        return same_for_all_layers(self._sigma, public)

    def clipped_updates(self, public: PublicState, clients: ClientState) -> Tensor:
        """Return the trained weights, clipped to the norm C. They get the noise, and :meth:`correct` turns them into updates."""
        raw_update(public, clients)  # checks the shapes
        return clip_rows(clients.trained, public.sizes, self.norm)

    def clipping_norms(self, public: PublicState) -> Tensor:
        return torch.tensor([self.norm], dtype=torch.float64)

    def correct(self, public: PublicState, clients: ClientState, sent: Tensor) -> Tensor:
        """Turn noised weights into updates. Subtracting before the noise could, by rounding, make a vector longer than the norm C."""
        return sent - public.weights

    def mu(self, public: PublicState) -> float | None:
        return 2 * self.norm / self._sigma  # two clipped vectors of weights are at most 2 C apart

    def why_unproved(self) -> str:
        return ""  # mu is always known

    def paper_epsilon(self, public: PublicState, sigma: Tensor) -> float:
        return self._mean_cost(self._c * 2 * self.norm / self.samples, sigma)  # c D / sigma, with the paper's D = 2 C / m


class NbAFLSettings(GaussianSettings):
    """Settings of ``nbafl``."""

    name: Literal["nbafl"] = "nbafl"
    norm: Positive = 1.0
    """Clipping norm of the trained weights: a longer vector of weights is shortened to it."""
    exposures: Count = 1
    """L: number of rounds in which one client's upload is seen."""

    needs_training: ClassVar[bool] = True

    def schedule(self, facts: Facts) -> NbAFL:
        return NbAFL(self.epsilon, self.delta, self.norm, facts.smallest, self.exposures, layers_separately=self.layers_separately)


@dataclass(frozen=True)
class GeometricSchedule(UniformSchedule):
    """Base class of time-varying DP and DPA: noise that changes by the factor ``decay`` in each round.

    In the variant ``equal_budget`` the costs 1 / sigma^2 of the ``participations`` costliest rounds, which are the last ones, add up to
    mu^2 / D^2. So a client that joins at most this many rounds stays within (epsilon, delta) altogether, whichever rounds it joins.
    sigma_t = (D / mu) decay^(t - T) sqrt(sum_{j < k} decay^(2 j)) for t = 1..T, where D is the sensitivity and mu follows from (epsilon,
    delta). ``constant`` then has no effect on the noise.

    Attributes:
        rounds: T, number of rounds.
        participations: k, largest number of rounds that one client joins; T by default.
        variant: see :data:`Variant`.

    Raises:
        ConfigError: a value out of range; or, when it runs, a round beyond T.
    """

    rounds: int = field(kw_only=True)
    participations: int | None = field(default=None, kw_only=True)
    variant: Variant = field(default="equal_budget", kw_only=True)

    @property
    @abstractmethod
    def decay(self) -> float:
        """Ratio of the standard deviations of two successive rounds, in (0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("equal_budget", "paper"):
            raise ConfigError(f"unknown variant {self.variant!r} of {self.name}: expected equal_budget or paper")
        require_positive("rounds", self.rounds)
        if self.participations is not None and not 1 <= self.participations <= self.rounds:
            raise ConfigError(f"participations must lie between 1 and the {self.rounds} rounds, got {self.participations}")
        for round_number in (1, self.rounds):  # the rounds with the most and the least noise
            require_usable(self.round_sigma(round_number))

    def claimed_epsilon(self) -> float | None:
        return self.epsilon if self.variant == "paper" else None  # no paper shares epsilon over the run in this way

    def round_sigma(self, round_number: int) -> float:
        """Return the standard deviation in round t. For the variant ``paper``, it is full_sigma decay^(t - 1).

        For ``equal_budget`` it is the class's (D / mu) length decay^(t - T), for the sensitivity D, the mu of (epsilon, delta), and T
        rounds. The length is sqrt(sum_{j < k} decay^(2 j)), where a client joins at most k rounds: all T if ``participations`` is None.
        """
        if round_number > self.rounds:
            raise ConfigError(
                f"round {round_number} is beyond the {self.rounds} rounds that the noise of {self.name} is planned for: "
                f"set rounds to {round_number} or more"
            )
        if self.variant == "paper":
            return self.full_sigma * _power(self.decay, round_number - 1)
        series_length = _series_length(self.decay, self.participations or self.rounds)
        last_sigma = self.sensitivity.value / gaussian_mu(self.epsilon, self.delta) * series_length
        return last_sigma * _power(self.decay, round_number - self.rounds)


@lru_cache(maxsize=64)
def _series_length(ratio: float, count: int) -> float:
    """Return the Euclidean length of (1, ratio, ..., ratio^(count - 1)). Cached, because it is the same in every round."""
    return sqrt(fsum(_power(ratio, 2 * j) for j in range(count)))


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent, or e^690 if that would overflow. :func:`require_usable` refuses so large a standard deviation."""
    return exp(min(exponent * log(base), 690.0))


@dataclass(frozen=True)
class TimeVarying(GeometricSchedule):
    """Noise in a geometric series over rounds: sigma_t = sigma_1 ratio^(t - 1).

    Guarantee: see :class:`GeometricSchedule`, if the sensitivity is proved. Source: the abstract of Yuan et al. 2023 (arXiv 2303.04274);
    the paper's online refinement is not here. With the default ratio, the variant ``paper`` spends 57.3 % more budget than Full DP over
    400 rounds, as published.

    Attributes:
        ratio: ratio of the standard deviations of two successive rounds, in (0, 1].
    """

    name: ClassVar[str] = "time-varying"
    deployable: ClassVar[bool] = True
    confidence: ClassVar[str] = "medium for the geometric form; low for the ratio; no online refinement"

    ratio: float = field(default=0.99789, kw_only=True)

    def __post_init__(self) -> None:
        require_share("ratio", self.ratio, one_allowed=True)
        super().__post_init__()

    @property
    def decay(self) -> float:
        return self.ratio


class TimeVaryingSettings(GeometricSettings):
    """Settings of ``time-varying``."""

    name: Literal["time-varying"] = "time-varying"
    ratio: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.99789
    """Ratio of the noise's standard deviations in two successive rounds."""

    def schedule(self, facts: Facts) -> TimeVarying:
        return TimeVarying(**self.shared(facts), ratio=self.ratio)


@dataclass(frozen=True)
class Dpa(GeometricSchedule):
    """Share the budget over rounds so that the final error is least when each round shrinks earlier noise by the factor a.

    The noise of round t contributes contraction^(T - t) sigma_t^2 to the squared error after T rounds. For a fixed sum of 1 / sigma^2, that
    is least if sigma_(t + 1) / sigma_t = contraction^(1/4). Guarantee: see :class:`GeometricSchedule`, if the sensitivity is proved.

    Source: Zhang, Fay, Johansson 2024 (arXiv 2308.01139) for the problem; the solution was derived anew. The paper adds noise to gradients
    of strongly convex problems. For networks the contraction is a tuning knob. With the default, the variant ``paper`` spends 26 % more
    budget than Full DP over 400 rounds, as published.

    Attributes:
        contraction: a, the factor by which a round shrinks the square of earlier noise, in (0, 1).
    """

    name: ClassVar[str] = "dpa"
    deployable: ClassVar[bool] = True
    confidence: ClassVar[str] = "medium to high for the form, derived anew; low for the constants"

    contraction: float = field(default=0.9956, kw_only=True)

    def __post_init__(self) -> None:
        require_share("contraction", self.contraction, one_allowed=False)
        super().__post_init__()

    @property
    def decay(self) -> float:
        return sqrt(sqrt(self.contraction))  # the best ratio for this contraction, see the class


class DpaSettings(GeometricSettings):
    """Settings of ``dpa``."""

    name: Literal["dpa"] = "dpa"
    contraction: Share = 0.9956
    """a: factor by which a round shrinks the square of earlier noise."""

    def schedule(self, facts: Facts) -> Dpa:
        return Dpa(**self.shared(facts), contraction=self.contraction)
