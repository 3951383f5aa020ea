"""Plan a training with a target epsilon for everything that is sent: the noise that it needs, and how much that disturbs the mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import ceil, inf, log, sqrt
from typing import Any, Literal, cast, get_args

from ldpfl.errors import ConfigError
from ldpfl.experiments.planning.evaluation_noise import ENTRIES_OF_CLASSES, bit_rounds, epsilon_of_bit
from ldpfl.experiments.planning.planner import MOST_CLIENTS, MOST_REPORTS
from ldpfl.experiments.planning.search import MAX_STRENGTH, MIN_STRENGTH, STRENGTH_TOLERANCE, reachable_range, smallest_argument
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.dp_sgd import DpSgd
from ldpfl.mechanisms.lattice import Lattice, LatticeMechanism
from ldpfl.mechanisms.privunit import PrivUnitG
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.mechanisms.record_clipping import RecordClip
from ldpfl.mechanisms.rotated_sign import RotatedSign
from ldpfl.mechanisms.settings import Part
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accountants.registry import least_epsilon
from ldpfl.privacy.accounting import DELTA, account_groups, check_delta
from ldpfl.privacy.authors import released
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import Channel
from ldpfl.privacy.guarantee import Statement
from ldpfl.util.displays import Shown

Regime = Literal["shuffled", "local", "records", "records-summed", "clients-summed"]
"""``shuffled``: signs of each client's gradient, of which only counts are seen. ``local``: one report of each client in the whole run.
``records``: noise of each client that protects each of its records. ``records-summed``: the same, but only the sum over clients is seen.
``clients-summed``: each client adds its share of the noise that protects a whole client, behind a sum."""

_SMALL_NOISE = 0.1
"""Length of noise in the mean of directions of length 1 that hardly disturbs a step of training."""
_CLOSE_ENOUGH = 0.1
"""Relative error of the noise at which an estimated number of clients is close enough."""


@dataclass(frozen=True)
class RegimePlan(Shown):
    """The settings of a regime that reach a target epsilon, and their cost.

    Attributes:
        parameter, value: name of the mechanism's parameter, and its value that reaches the target.
        noise: length of the noise in the mean of directions of length 1: its standard deviation times sqrt(weights).
        trusted_noise: length of the noise that a trusted server would add for the same unit and target.
        wanted: number of clients, or of records per client, at which the noise has a tenth of a direction's length.
        group: size of groups of coordinates of which a client sends one; 1 if it sends all.
        relay_records: number of messages in which a client's report goes to the relay.
        bytes_per_client: number of bytes that one client sends in one of its rounds.
        reports: number of rounds that a client takes part in.
        linked: number of coordinates that travel in one message and stay together behind the shuffler.
        colluding: number of clients that reveal to the adversary what they sent.
        part: the unit that ``records`` counts in the regimes ``records`` and ``records-summed``: records, or persons.
        evaluation_epsilon: part of the target epsilon that clients spend on measuring the model.
    """

    regime: Regime
    target: float
    clients: int
    records: int
    weights: int
    rounds: int
    mechanism: str
    parameter: str
    value: float
    noise: float
    trusted_noise: float
    wanted: int
    group: int
    relay_records: int
    bytes_per_client: int
    reports: int
    linked: int
    colluding: int
    part: Part
    evaluation_epsilon: float
    statement: Statement

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        fields = {name: value for name, value in asdict(self).items() if name != "statement"}
        return {**fields, **self.statement.to_dict()}


def plan_regime(
    regime: str,
    target: float,
    *,
    clients: int,
    weights: int,
    rounds: int,
    records: int = 1,
    group: int = 1,
    linked: int = 1,
    delta: float = DELTA,
    colluding: int = 0,
    part: Part = "record",
    evaluation_epsilon: float = 0.0,
) -> RegimePlan:
    """Find the noise that keeps the epsilon of everything that is ever sent within ``target``, and its cost. Takes seconds on one core.

        ldpfl.plan_regime("records", 2.0, clients=100, records=600, weights=2000, rounds=15).noise

    Args:
        regime: shuffled, local, records, records-summed or clients-summed, see :data:`Regime`.
        target: target epsilon.
        clients, weights, rounds: number of clients, of trained weights, and of training rounds.
        records: number of records per client, in the regimes of records.
        group: size of groups of rotated coordinates of which a client secretly draws one and sends it, in the regime shuffled.
        linked: number of sent coordinates that stay together behind the shuffler, in the regime shuffled.
        delta: failure probability of the guarantee.
        colluding: number of clients that reveal to the adversary what they sent.
        part: ``person`` to protect persons in the regimes of records; ``records`` is then the number of persons per client.
        evaluation_epsilon: part of the target that clients spend on measuring the model on held-out records; 0 for none. In the regime
            shuffled, the model classifies.

    Raises:
        ConfigError: the regime is unknown, a value is out of range, or no noise reaches the target.
    """
    request = RegimeRequest(
        regime=regime_named(regime),
        target=target,
        clients=clients,
        weights=weights,
        rounds=rounds,
        records=records,
        group=group,
        linked=linked,
        delta=delta,
        colluding=colluding,
        part=part,
        evaluation_epsilon=evaluation_epsilon,
    )
    request.check()
    strength = _strength_for_target(request)
    return request.plan(strength, _count_for_small_noise(request, request.noise(strength)))


def _strength_for_target(request: RegimeRequest, tolerance: float = STRENGTH_TOLERANCE) -> float:
    """Return the largest strength of the mechanism that keeps the target, up to a relative ``tolerance``.

    Raises:
        ConfigError: no noise reaches the target.
    """
    try:
        # The search varies 1 / strength, because it needs a function that decreases.
        low, high = 1 / MAX_STRENGTH, 1 / MIN_STRENGTH
        inverse = smallest_argument(lambda inverse: request.epsilon(1 / inverse), request.guess, request.target, low, high, tolerance)
    except ConfigError as error:  # the mechanism takes no such noise
        raise ConfigError(_unreachable_message(request, f" ({error})")) from error
    if inverse is None:
        raise ConfigError(_unreachable_message(request, ""))
    return 1 / inverse


def _count_for_small_noise(request: RegimeRequest, noise: float) -> int:
    """Return the number of clients, or of records per client, at which the noise has a tenth of the length of a direction, which is 1.

    ``noise`` is the length of the noise at the request's number. Noise is taken to be a power of the number, found by planning for others.
    If these reach no target, or noise hardly falls, the result is the last estimate.
    """
    count = request.records if request.protects_records else request.clients
    power = 0.5 if request.reports_once else 1.0
    for is_last in (False, False, True):
        estimate: int = ceil(min(MOST_CLIENTS, count * (noise / _SMALL_NOISE) ** (1 / power)))
        if is_last or estimate == count or abs(noise / _SMALL_NOISE - 1) < _CLOSE_ENOUGH:
            break
        other = replace(request, records=estimate) if request.protects_records else replace(request, clients=estimate)
        try:
            other.check()
            other_noise = other.noise(_strength_for_target(other, _CLOSE_ENOUGH / 5))
        except ConfigError:  # too few clients for the colluding ones or the rounds, or a target out of reach
            break
        power = min(2.0, max(0.25, log(noise / other_noise) / log(estimate / count)))
        count, noise = estimate, other_noise
    return estimate


def _unreachable_message(request: RegimeRequest, why: str) -> str:
    """Return the message that no noise reaches the target, with the range of reachable epsilons and the mechanism's error ``why``."""
    reachable = reachable_range(request.epsilon)
    limits = f": it reaches about {reachable} here" if reachable else ""
    return (
        f"a target of epsilon {request.target:g} is out of reach of the regime {request.regime}{limits}{why}; set another target; "
        "more clients or fewer rounds lower the epsilon that is reached"
    )


@dataclass(frozen=True)
class RegimeRequest:
    """The arguments of :func:`plan_regime`.

    The ``strength`` in its methods is the epsilon of the regime's mechanism, or 1 / noise multiplier: a larger strength means less noise.
    """

    regime: Regime
    target: float
    clients: int
    weights: int
    rounds: int
    records: int
    group: int
    linked: int
    delta: float
    colluding: int
    part: Part
    evaluation_epsilon: float = 0.0

    def check(self) -> None:
        """Raise a :class:`ConfigError` if an argument is out of range, or does not fit the regime."""
        check_delta(self.delta)
        if not 0 < self.target < inf:
            raise ConfigError(f"the target must be positive and finite, got {self.target:g}")
        counts = (self.honest, self.weights, self.rounds, self.records, self.group, self.linked)
        if min(counts) < 1 or self.clients > MOST_CLIENTS or self.weights * self.rounds > MOST_REPORTS:
            raise ConfigError(
                "expected 1 or more each of honest clients (clients less colluding), weights, rounds, records, group and linked, at most "
                f"{MOST_CLIENTS:.0e} clients, and at most {MOST_REPORTS:.0e} weights x rounds; got {', '.join(map(str, counts))}"
            )
        if max(self.group, self.linked) > 1 and self.regime != "shuffled":
            raise ConfigError(f"the options group and linked apply only to the regime shuffled, not to {self.regime}: leave both out")
        if self.part not in get_args(Part) or (self.part != "record" and not self.protects_records):
            raise ConfigError(
                f"part is {self.part!r}, but persons are protected only in the regimes records and records-summed, not in {self.regime}: "
                "leave it out"
            )
        if self.evaluation_epsilon and (self.reports_once or not 0 < self.evaluation_epsilon < self.target):
            raise ConfigError(
                f"evaluation_epsilon is {self.evaluation_epsilon:g}: expected a number above 0 and below the target of {self.target:g}, "
                "in any regime but local, in which a client reports once"
            )
        if self.reports_once and self.clients < self.rounds:
            raise ConfigError(
                f"{self.clients:,} clients cannot take part once each in {self.rounds:,} rounds: set rounds to {self.clients:,} or less"
            )

    @property
    def honest(self) -> int:
        """Number of clients that do not collude."""
        return self.clients - self.colluding

    @property
    def reports_once(self) -> bool:
        """Whether each client takes part in one round of the run."""
        return self.regime == "local"

    @property
    def protects_records(self) -> bool:
        """Whether records, or persons, are protected rather than clients."""
        return self.regime.startswith("records")

    @property
    def is_summed(self) -> bool:
        """Whether only the sum of the clients' reports is seen."""
        return self.regime.endswith("summed")

    @property
    def ranges(self) -> LayerRanges:
        """Clipping ranges of one layer with center 0 and radius or norm 1."""
        return LayerRanges(0.0, 1.0, (self.weights,))

    def mechanism(self, strength: float) -> Mechanism:
        """Return the mechanism of the regime with this strength.

        Sums use a lattice of integers, so coarse that the sum over all clients fits into the number of bits that each client sends.
        """
        if self.regime == "shuffled":
            return RotatedSign(strength, group=self.group)
        if self.regime == "local":
            return PrivUnitG(strength, norm=1.0)
        noise = 1 / strength
        vectors = float(self.records) if self.protects_records else 1.0  # number of vectors that each client adds up
        lattice = Lattice.for_sum(self.clients, vectors, noise, self.weights) if self.is_summed else Lattice()
        clip = RecordClip(norm=1.0, steps=lattice.steps)
        if self.protects_records:
            return DpSgd(clip, noise, summed=self.is_summed, bits=lattice.bits, records=vectors, part=self.part)
        return DpFedAvg(clip, noise, summed=self.is_summed, bits=lattice.bits)

    def rounds_at(self, strength: float) -> RoundGroup:
        """Return the training rounds that a client would be charged for with a mechanism of this strength."""
        release = released(self.mechanism(strength), self.ranges)
        channel: Channel = "secure-sum" if self.is_summed else "direct" if self.protects_records else "ideal-shuffler"
        times, sampling = (1, "once") if self.reports_once else (self.rounds, "everyone")
        return RoundGroup(
            release=release,
            cohort=self.honest,
            population=self.honest,
            rounds=times,
            sampling=sampling,  # type: ignore[arg-type]
            channel=channel,
            linked=self.linked,
        )

    def groups_at(self, strength: float) -> list[RoundGroup]:
        """Return all rounds that a client would be charged for: training, and the measurement of the model at clients."""
        rounds = self.rounds_at(strength)
        if not self.evaluation_epsilon:
            return [rounds]
        # Below, known=False: no data set is known to attain the epsilon of both together, so no lower bound is stated.
        if self.regime == "shuffled":
            bit = epsilon_of_bit(self.evaluation_epsilon, self.delta, rounds.channel, self.honest, ENTRIES_OF_CLASSES, evaluations=1)
            return [replace(rounds, known=False), bit_rounds(bit, rounds.channel, self.honest, ENTRIES_OF_CLASSES, evaluations=1)]
        # The privacy parameter mu of a client's own noise. In a sum, the noise of all honest clients adds up, so each may add less. A noise
        # multiplier of 2 / mu gives mu, and strength is 1 / noise multiplier.
        mu = gaussian_mu(self.evaluation_epsilon, self.delta) * sqrt(self.honest if self.is_summed else 1)
        release = released(self.mechanism(mu / 2), self.ranges)
        return [replace(rounds, known=False), replace(rounds, release=release, rounds=1, histograms=True, known=False)]

    def epsilon(self, strength: float) -> float:
        """Return the smallest proved epsilon of everything that is sent."""
        return least_epsilon(self.groups_at(strength), self.delta)

    @property
    def guess(self) -> float:
        """Start of the search: an estimate of 1 / strength, by the mu (of Gaussian differential privacy) of the target."""
        mu = gaussian_mu(self.target, self.delta)
        # Behind a shuffler, mu is about epsilon sqrt(bits of a client / honest clients) if epsilon is small (central limit theorem).
        if self.regime == "shuffled":
            return sqrt(ceil(self.weights / self.group) * self.rounds / self.honest) / mu
        if self.regime == "local":
            return 1 / 7  # an epsilon of 7, usual for a single report
        # Rounds of noise multiplier s have mu = 2 sqrt(rounds) / s. In a sum, the noise of honest clients adds up.
        return 2 * sqrt(self.rounds / (self.honest if self.is_summed else 1)) / mu

    def noise(self, strength: float) -> float:
        """Return the length of the noise vector in the mean: the standard deviation in one coordinate times sqrt(weights)."""
        cohort = self.clients // self.rounds if self.reports_once else self.clients
        return float(self.mechanism(strength).noise(self.ranges).largest_std(cohort)[0]) * sqrt(self.weights)

    def plan(self, strength: float, wanted: int) -> RegimePlan:
        """Return the plan for a mechanism of this strength. ``wanted`` is the number of clients or records for small noise."""
        mechanism = self.mechanism(strength)
        units = self.clients * self.records if self.protects_records else self.clients
        has_multiplier = isinstance(mechanism, LatticeMechanism)
        return RegimePlan(
            regime=self.regime,
            target=self.target,
            clients=self.clients,
            records=self.records,
            weights=self.weights,
            rounds=self.rounds,
            mechanism=mechanism.name,
            parameter="noise_multiplier" if has_multiplier else "epsilon",
            value=1 / strength if has_multiplier else strength,
            noise=self.noise(strength),
            # A trusted server adds noise with multiplier 2 sqrt(rounds) / mu to the sum over all units, and divides by their number.
            trusted_noise=2 * sqrt(self.rounds) / (units * gaussian_mu(self.target, self.delta)) * sqrt(self.weights),
            wanted=wanted,
            group=self.group,
            relay_records=ceil(mechanism.release(self.ranges).units / self.linked),
            bytes_per_client=(payload_bits(mechanism, self.ranges) + 7) // 8,  # whole bytes
            reports=1 if self.reports_once else self.rounds,
            linked=self.linked,
            colluding=self.colluding,
            part=self.part,
            evaluation_epsilon=self.evaluation_epsilon,
            statement=account_groups(self.groups_at(strength), self.delta),
        )


def regime_named(name: str) -> Regime:
    """Return the regime called ``name``.

    Raises:
        ConfigError: there is no such regime.
    """
    if name not in get_args(Regime):
        raise ConfigError(f"unknown regime {name!r}: known: {', '.join(get_args(Regime))}")
    return cast(Regime, name)
