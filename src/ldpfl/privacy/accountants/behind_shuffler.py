"""Compose all releases of one client against an adversary that sees only what a shuffler or a sum reveals.

Each accountant states which rounds it composes; ``registry`` picks the first that fits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log, sqrt

from ldpfl.privacy.accountants.base import Accountant
from ldpfl.privacy.accountants.blanket import Bits, Hidden, Report, blanket_epsilon
from ldpfl.privacy.accountants.clones import clone_probability, composed_clone_epsilon
from ldpfl.privacy.accountants.gaussian import ROUNDED, gaussian_epsilon
from ldpfl.privacy.accountants.local import GaussianAccountant
from ldpfl.privacy.accountants.participation import self_sampled_epsilon
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, attained_epsilon, certified_epsilon
from ldpfl.privacy.accountants.shuffled_gaussian import Vectors, shuffled_gaussian_attained, shuffled_gaussian_epsilon
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import BinaryRelease, GaussianRelease, PureRelease, Release


@dataclass(frozen=True)
class Bounds:
    """Bounds on epsilon.

    Attributes:
        fixed: upper bound for inputs that are fixed before the first round.
        adaptive: upper bound for inputs that depend on earlier releases, as in training.
        attained: lower bound: the epsilon of some data set; None if unknown.
    """

    fixed: float
    adaptive: float
    attained: float | None = None


class ShuffledAccountant(Accountant):
    """Composes the rounds of one client behind a shuffler or a sum.

    Attributes:
        groups: the rounds, in groups of equal ones.
        local: accountant of the same releases without the shuffler. Its bounds hold behind the shuffler too.
    """

    def __init__(self, groups: Sequence[RoundGroup], local: Accountant) -> None:
        self.groups, self.local = tuple(groups), local

    @classmethod
    @abstractmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        """Whether this accountant composes these rounds."""

    @abstractmethod
    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``."""

    def epsilon(self, delta: float) -> float:
        return self.bounds(delta).adaptive

    def distance(self) -> float:
        return self.local.distance()

    @property
    def joined(self) -> bool:
        """Whether some client sent everything that is charged, in rounds known to others. If not, no lower bound is given."""
        return all(group.joined for group in self.groups)


class CountedBits(ShuffledAccountant):
    """Bits that are mixed one by one: for each unit, only the number of 1s is seen."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return all(_only_ones_are_counted(group) and (group.sampling != "secret" or group.rate == 1) for group in groups)

    def epsilon(self, delta: float) -> float:
        _, adaptive = certified_epsilon([_shuffled_rounds(group) for group in self.groups], delta)
        return adaptive  # without the lower bound, which takes as long again

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``. The lower bound is None unless some client certainly joined all rounds."""
        rounds = [_shuffled_rounds(group) for group in self.groups]
        fixed, adaptive = certified_epsilon(rounds, delta)
        if not self.joined:
            return Bounds(fixed, adaptive)
        # The lower bound depends on the bits that are really sent, so on their realised epsilon.
        realised = [replace(counted, epsilon0=_realised_epsilon(group)) for counted, group in zip(rounds, self.groups, strict=True)]
        return Bounds(fixed, adaptive, min(attained_epsilon(realised, delta), fixed))


class SummedNoise(ShuffledAccountant):
    """Integer reports with Gaussian noise. Only their sum over the cohort is seen, and it has the noise of all honest clients.

    Other reports are not supported. They are rounded to floats one by one, and the low digits of such a sum reveal more than its noise
    hides (decision 0023).
    """

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return all(group.channel == "secure-sum" and _is_summable(group.release) for group in groups)

    def distance(self) -> float:
        return min(1.0, self.sums().distance() * (1 + ROUNDED))

    def sums(self) -> GaussianAccountant:
        """Return the accountant of the noisy sums that are seen."""
        summed = Counter[Release]()
        for group in self.groups:
            summed[_release_in_sum(group)] += group.rounds
        return GaussianAccountant(summed)

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``. Without sampling of records epsilon is exact, and so a lower bound too."""
        epsilon = self.sums().epsilon(delta * (1 - ROUNDED))
        is_attained = self.joined and all(group.batch_rate == 1 for group in self.groups)
        return Bounds(epsilon, epsilon, epsilon if is_attained else None)


def _is_summable(release: Release) -> bool:
    """Whether a sum of such reports has the noise of all clients."""
    return isinstance(release, GaussianRelease) and release.adds_up


class ShuffledVectors(ShuffledAccountant):
    """Vectors that all clients of a round clip to the same ball, and send with the same Gaussian noise."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return all(group.channel == "ideal-shuffler" and _are_alike_vectors(group.release) for group in groups)

    def epsilon(self, delta: float) -> float:
        return shuffled_gaussian_epsilon(self._vectors(), delta, self.local.epsilon(delta))

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``. The lower bound is that of the sums of the vectors, with mu slightly reduced."""
        epsilon = self.epsilon(delta)
        if not self.joined:
            return Bounds(fixed=epsilon, adaptive=epsilon)
        attained = gaussian_epsilon(shuffled_gaussian_attained(self._vectors()) * (1 - _DIGITS), delta)
        return Bounds(fixed=epsilon, adaptive=epsilon, attained=min(attained, epsilon))

    def _vectors(self) -> list[Vectors]:
        """Return the rounds as the arguments of the accountant of shuffled vectors."""
        return [Vectors(group.release.parameter, group.cohort, group.reports) for group in self.groups]


def _are_alike_vectors(release: Release) -> bool:
    """Whether all clients clip one whole vector to the same ball and add the same noise."""
    return isinstance(release, GaussianRelease) and release.alike and release.unit == "vector" and release.units == 1


class SelfSampledBits(ShuffledAccountant):
    """Single bits of clients that decide in secret whether they take part. All rounds are of one kind."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return len(groups) == 1 and _only_ones_are_counted(groups[0]) and groups[0].sampling == "secret"

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``: the smaller of the local one and the one by secret participation."""
        (group,) = self.groups  # ``supports`` allows only one
        rounds = replace(_shuffled_rounds(group), clients=group.population)
        epsilon = min(self.local.epsilon(delta), self_sampled_epsilon(rounds, group.rate, delta))
        return Bounds(fixed=epsilon, adaptive=epsilon)


class LinkedBits(ShuffledAccountant):
    """Bits that travel several in a message, or that are about coordinates which each client drew in secret."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return all(_are_mixed_bits(group) and (group.sampling != "secret" or group.rate == 1) for group in groups)

    def bounds(self, delta: float) -> Bounds:
        epsilon = min(self.local.epsilon(delta), blanket_epsilon([_hidden_bits(group) for group in self.groups], delta))
        return Bounds(fixed=epsilon, adaptive=epsilon)


class BlanketedReports(ShuffledAccountant):
    """Pure reports with a known blanket, also of several units that travel together."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return all(_blanket(group) is not None and group.channel == "ideal-shuffler" for group in groups)

    def epsilon(self, delta: float) -> float:
        return min(self.local.epsilon(delta), blanket_epsilon([_hidden_reports(group) for group in self.groups], delta))

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``. A lower bound is known only for reports that show the end of the range."""
        epsilon = self.epsilon(delta)
        if not self.joined or not all(_is_signed(group) for group in self.groups):
            return Bounds(fixed=epsilon, adaptive=epsilon)
        # For inputs at the ends of the range a report shows the end as one bit, which is wrong with probability blanket / 2. That is
        # randomised response with epsilon log(2 / blanket - 1).
        signs = [replace(_shuffled_rounds(group), epsilon0=log(2 / (_blanket(group) or 1.0) - 1) * (1 - _DIGITS)) for group in self.groups]
        return Bounds(fixed=epsilon, adaptive=epsilon, attained=min(attained_epsilon(signs, delta), epsilon))


class ClonedReports(ShuffledAccountant):
    """Any pure reports, also of several units that travel together. All rounds are of one kind."""

    @classmethod
    def supports(cls, groups: Sequence[RoundGroup]) -> bool:
        return len(groups) == 1 and groups[0].channel == "ideal-shuffler" and groups[0].release.pure_epsilon < inf

    def bounds(self, delta: float) -> Bounds:
        """Return the bounds on epsilon at ``delta``: the smaller of the local one and the one by clones.

        A message holds ``linked`` units of a report, which stay together in the shuffler.
        """
        (group,) = self.groups  # ``supports`` allows only one
        message_epsilon = group.release.pure_epsilon * group.linked
        messages = ceil(group.release.units / group.linked) * group.rounds
        hidden = composed_clone_epsilon(message_epsilon, group.cohort, messages, delta, clone_probability(message_epsilon))
        epsilon = min(self.local.epsilon(delta), hidden)
        return Bounds(fixed=epsilon, adaptive=epsilon)


_DIGITS = 1e-4
"""Relative reduction of epsilon or mu in lower bounds. It makes up for the rounding of reports to a lattice."""

_COUNTING = ("ideal-shuffler", "secure-sum")
"""Channels that reveal only the number of 1s among bits: a sum of bits reveals no more than a shuffler."""


def _only_ones_are_counted(group: RoundGroup) -> bool:
    """Whether the bits are about fixed coordinates and mixed one by one, so that only the number of 1s is seen."""
    release = group.release
    return isinstance(release, BinaryRelease) and release.sampled == 1 and _are_mixed_bits(group) and _bits_per_message(group) == 1


def _are_mixed_bits(group: RoundGroup) -> bool:
    """Whether bits are sent through a shuffler or a sum, other than single bits in the random order of sampling ``once``."""
    # With sampling "once", clients hide among all clients of the run, and later inputs depend on earlier bits. Only ``clones`` proves that.
    in_order = group.sampling == "once" and group.release.units == 1
    return isinstance(group.release, BinaryRelease) and group.channel in _COUNTING and not in_order


def _bits_per_message(group: RoundGroup) -> int:
    """Return the number of bits of one client that stay together."""
    # In a sum, the bits of one message are added separately.
    return 1 if group.channel == "secure-sum" else min(group.linked, group.release.units)


def _release_in_sum(group: RoundGroup) -> GaussianRelease:
    """Return the release of the cohort's sum, which has the noise of all its honest clients."""
    if not isinstance(group.release, GaussianRelease):
        raise TypeError(f"{group.release.mechanism} adds no Gaussian noise")
    return replace(group.release, mu=group.release.mu / sqrt(group.cohort))


def _hidden_bits(group: RoundGroup) -> Hidden:
    """Return the group's messages of several bits as records for the blanket bound."""
    bits = _bits_per_message(group)
    return Hidden(Bits(group.release.parameter, bits), group.cohort, ceil(group.release.units / bits) * group.rounds)


def _blanket(group: RoundGroup) -> float | None:
    """Return the blanket of one report; None if it has none."""
    return group.release.blanket if isinstance(group.release, PureRelease) else None


def _is_signed(group: RoundGroup) -> bool:
    """Whether a report on an input at an end of the range shows that end."""
    return isinstance(group.release, PureRelease) and group.release.signed


def _hidden_reports(group: RoundGroup) -> Hidden:
    """Return the group's messages of pure reports as records for the blanket bound."""
    linked = min(group.linked, group.release.units)
    record = Report(group.release.parameter * linked, (_blanket(group) or 0.0) ** linked)
    return Hidden(record, group.cohort, ceil(group.release.units / linked) * group.rounds)


def _shuffled_rounds(group: RoundGroup) -> ShuffledRounds:
    """Return the group's bits for the composition of single bits."""
    return ShuffledRounds(group.release.parameter, group.cohort, group.release.units, group.rounds)


def _realised_epsilon(group: RoundGroup) -> float:
    """Return the epsilon that a bit really has: below the stated one if finite precision lowers it."""
    realised = group.release.realised if isinstance(group.release, BinaryRelease) else None
    return group.release.parameter if realised is None else realised
