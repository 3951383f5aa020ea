"""Privacy events: what was released, round by round. An event states only facts, so its meaning never changes; accountants interpret it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite
from typing import ClassVar, Literal, NamedTuple

from ldpfl.errors import ConfigError
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope, TrustModel, Unit

Channel = Literal["ideal-shuffler", "secure-sum", "random-delay", "direct"]
"""What stands between client and server. ``ideal-shuffler``: the server sees only how often each value was sent. ``secure-sum``: the
server sees only the sum of integer reports over all clients. ``random-delay``: each report arrives separately after a random wait; anyone
who watches the network, or sees stragglers, can still link it to its client. ``direct``: the server sees senders."""

Sampling = Literal["everyone", "visible", "secret", "once"]
"""Who takes part. ``visible``: some of the clients, and others know which. ``secret``: each client decides for itself, and only the number
of participants is seen. ``once``: each client joins one round of the whole run, in a secret random order."""


OURS, UNKNOWN = "ldpfl", "unknown"
"""Author of a release: this project, or an unknown author. Any other author is named by a class, ``module:Class``."""

USERS_CODE = "code that is not ldpfl's"
"""Author of a release by this project's mechanism of values that other code computed: a model, loss, features or a data loader. One
record's share is bounded only if that code treats each record by itself. In a simulation, one process runs that code for all clients, so
the same holds for one client's share."""


class Claim(NamedTuple):
    """The privacy guarantee that a paper claims for a release, over a whole run or one round (``scope``)."""

    epsilon: float
    delta: float
    trust_model: TrustModel
    scope: Scope
    source: str

    def guarantee(self) -> Guarantee:
        """Return the claim as a :class:`Guarantee` with status ``claimed``."""
        return Guarantee(**self._asdict(), unit="client", units_per_round=1, adjacency=REPLACE_ONE, status="claimed")


class _Stated:
    """Properties of any release that accounting and policies use, apart from its parameter. Subclasses override the defaults."""

    protected: ClassVar[bool] = True
    """Whether anything is guaranteed."""

    by_round: ClassVar[bool] = False
    """Whether the release is accounted as a whole round, without an epsilon for each unit. Then a larger parameter always costs more."""

    not_shuffled: ClassVar[str] = ""
    """Reason why no epsilon behind a shuffler is given; empty if one is given."""

    author: str = UNKNOWN
    """Author of the code on which the release rests, as :func:`ldpfl.privacy.authors.released` finds it. Only :data:`OURS` has proofs."""

    @property
    def why_unprotected(self) -> str:
        """The values that were sent without protection, in a few words; empty if everything was protected."""
        return ""

    @property
    def claimed(self) -> Claim | None:
        """The cost that the mechanism's paper claims; None if it claims none."""
        return None


class _ByUnit(_Stated):
    """A release whose units are each ``epsilon``-LDP."""

    epsilon: float
    claim: str

    @property
    def parameter(self) -> float:
        """Parameter of the accounting: the epsilon of one unit."""
        return self.epsilon

    @property
    def pure_epsilon(self) -> float:
        """Epsilon of one unit at delta 0, against an adversary who knows the sender."""
        return self.epsilon

    @property
    def claimed(self) -> Claim | None:
        return Claim(self.epsilon, 0.0, "shuffled", "run", self.claim) if self.claim else None


@dataclass(frozen=True)
class BinaryRelease(_ByUnit):
    """One client's round: ``units`` bits, each by randomised response at ``epsilon``.

    Attributes:
        mechanism: its name.
        epsilon: epsilon of one bit; its probabilities lie in [1 / (1 + e^epsilon), e^epsilon / (1 + e^epsilon)].
        units: number of bits that depend on the client's data.
        unit: what one bit stands for.
        realised: the epsilon that a bit really has, if finite precision keeps it below ``epsilon``; else None.
        sampled: number of coordinates, at most, from which the client secretly drew the one that a bit is about; 1 if it is fixed.
        claim: source of the paper's claim that ``epsilon`` holds for the whole run, as a sentence; empty if the paper claims nothing.
        author: author of the code, as :func:`ldpfl.privacy.authors.released` finds it.
    """

    mechanism: str
    epsilon: float
    units: int
    unit: Unit = "weight"
    realised: float | None = None
    sampled: int = 1
    claim: str = field(default="", compare=False)
    author: str = UNKNOWN


@dataclass(frozen=True)
class PureRelease(_ByUnit):
    """One client's round: ``units`` reports by any mechanism, each ``epsilon``-LDP. Other fields as in :class:`BinaryRelease`.

    Attributes:
        blanket: a share g in (0, 1) such that, for every input, a report is between g and g e^epsilon times as likely as under a law U
            that is the same for all clients of a round. So with probability g a report is a draw of U, which reveals nothing. None if no
            such share is known.
        signed: whether a report on an input at an end of the range shows which end it is, and is wrong with probability ``blanket`` / 2.
            Then a data set is known that nearly attains the epsilon of the blanket; otherwise no lower bound is stated.
        author: as in :class:`BinaryRelease`.
    """

    mechanism: str
    epsilon: float
    units: int
    unit: Unit
    claim: str = field(default="", compare=False)
    blanket: float | None = None
    signed: bool = False
    author: str = UNKNOWN


def usable_blanket(epsilon: float, share: float) -> float | None:
    """Return ``share`` as the ``blanket`` of a :class:`PureRelease`, or None if it is useless.

    The blanket is the probability that a report does not depend on its client's data. Behind a shuffler, such reports of others hide a
    client. It is useless if epsilon is so large that they are too rare, or if rounding moved it out of its range (e^-epsilon, 1).
    """
    return share if epsilon <= LARGEST_HIDDEN and exp(-epsilon) < share < 1 else None


LARGEST_HIDDEN = 30.0
"""Epsilon of a report above which no number of other clients hides it."""


@dataclass(frozen=True)
class GaussianRelease(_Stated):
    """One client's round: one vector with independent Gaussian noise, fixed before the data were looked at.

    With the unit ``record``, mu is the cost to one of the client's records. With ``person``, it is the cost to all records of one person at
    the client. Neither protects the client as a whole. The reports are then integers, so that a sum over clients has the noise of all.

    Attributes:
        mechanism: its name.
        mu: sensitivity under replacement (twice the clipping norm) over the noise's standard deviation.
        rate: probability that a record, or person, took part, decided by an independent secret coin for each; 1 if all took part.
        alike: whether all clients of the round clipped their vectors to the same ball, of radius mu / 2 standard deviations, and added
            noise of the same law. Then they hide each other behind a shuffler.
        integers: whether reports are integers, so that a sum over clients has the noise of all. Always so for the units record and person.
        author: as in :class:`BinaryRelease`.
    """

    by_round: ClassVar[bool] = True

    mechanism: str
    mu: float
    units: int = 1
    unit: Unit = "vector"
    rate: float = 1.0
    alike: bool = False
    integers: bool = False
    author: str = UNKNOWN

    @property
    def adds_up(self) -> bool:
        """Whether a sum of such reports reveals no more than the exact sum with Gaussian noise of the total variance would."""
        return self.of_part or self.integers

    @property
    def of_part(self) -> bool:
        """Whether the protected unit is a part of a client's data: a record or a person. The report is then a sum of integers."""
        return self.unit in _PARTS_OF_CLIENT

    @property
    def not_shuffled(self) -> str:  # type: ignore[override]  # in the other classes it is a constant
        if self.of_part:
            return "how much the sums over records of two clients differ is not bounded; the local figures hold"
        return "" if self.alike else "the release does not state that all clients add the same noise; the local figures hold"

    @property
    def parameter(self) -> float:
        """Parameter of the accounting: mu."""
        return self.mu

    @property
    def pure_epsilon(self) -> float:
        """Infinite: Gaussian noise has no epsilon at delta 0."""
        return inf


@dataclass(frozen=True)
class UnprotectedRelease(_Stated):
    """One client's round in which something left without protection, or with noise that depended on the data in an unproved way.

    Attributes:
        mechanism: its name.
        reason: what left unprotected, in a few words.
        claimed_epsilon, claimed_delta: cost of one client's round that the mechanism's paper claims; None if it claims none.
        claim: source of that claim, as a sentence.
        author: as in :class:`BinaryRelease`.
    """

    protected: ClassVar[bool] = False
    not_shuffled: ClassVar[str] = "values leave without protection, and a shuffler shows them as they are"

    mechanism: str
    reason: str
    units: int = 1
    unit: Unit = "vector"
    claimed_epsilon: float | None = None
    claimed_delta: float | None = None
    claim: str = field(default="", compare=False)
    author: str = UNKNOWN

    @property
    def parameter(self) -> float:
        """Infinite: no epsilon bounds what was released."""
        return inf

    @property
    def pure_epsilon(self) -> float:
        """Infinite."""
        return inf

    @property
    def why_unprotected(self) -> str:
        return self.reason

    @property
    def claimed(self) -> Claim | None:
        if self.claimed_epsilon is None or self.claimed_delta is None:
            return None
        return Claim(self.claimed_epsilon, self.claimed_delta, "local", "round", self.claim)


MAX_COUNT = 10**12
"""Largest number of units, linked units, clients or rounds that is accounted."""

_PARTS_OF_CLIENT: tuple[Unit, ...] = ("record", "person")

Release = BinaryRelease | PureRelease | GaussianRelease | UnprotectedRelease

KINDS: Mapping[str, type[Release]] = {
    "binary": BinaryRelease,
    "pure": PureRelease,
    "gaussian": GaussianRelease,
    "unprotected": UnprotectedRelease,
}
"""Kinds of release, by the names that ledgers, budget files and certificates use."""

KIND_NAMES: Mapping[type[Release], str] = {kind: name for name, kind in KINDS.items()}
"""Name of each kind. A foreign subclass has none, since it may answer accountants in its own way."""


def for_one_record(release: Release) -> Release:
    """Return ``release`` as it counts for one record. The client's numbers of records and persons are public and stay fixed.

    If the release protects persons, replacing one record by a record of another person changes two persons' vectors. Each moves the sum
    by up to mu standard deviations, so the record is accounted at 2 mu. If persons are sampled, the two are sampled independently. The
    distance is at most 2 mu whichever of them are sampled, so the rate is set to 1.
    """
    if isinstance(release, GaussianRelease) and release.unit == "person":
        return replace(release, mu=2 * release.mu, unit="record", rate=1.0)
    return release


def resting_on_users_code(release: Release) -> Release:
    """Return ``release`` with the author :data:`USERS_CODE` if its author is this project. Releases without protection stay as they are."""
    return replace(release, author=USERS_CODE) if release.protected and release.author == OURS else release


def without_claim(release: Release) -> Release:
    """Return ``release`` without the claim of its mechanism's paper, for a use of the mechanism that the paper does not describe."""
    return replace(release, claim="") if isinstance(release, BinaryRelease | PureRelease) else release


@dataclass(frozen=True)
class RoundEvent:
    """A round: what each client of the cohort released, and what others could see of it.

    Attributes:
        round: its number, from 1.
        release: what one client sent.
        cohort: number of clients whose reports were pooled, without dropped clients. May be 0 only if clients need not take part.
        population: number of clients that could have taken part.
        joined: the largest number of rounds that any one client has taken part in so far, this one included.
        sampling: how the cohort came about.
        rate: probability that a client takes part, for ``secret`` sampling.
        channel: how reports travelled.
        linked: number of units that travel in one message and stay together in the shuffler; 1 in the papers.
        histograms: whether the round released counts instead of a model update: histograms of columns before the first round, or a model's
            accuracy on held-out records. No lower bound is stated for such rounds.
        colluding: number of clients in the cohort whose reports and noise are assumed to hide nobody. It is the number that the run was
            planned for; a statement may be computed for a larger one.

    Raises:
        ConfigError: values that contradict each other.
    """

    round: int
    release: Release
    cohort: int
    population: int
    joined: int
    sampling: Sampling = "everyone"
    rate: float = 1.0
    channel: Channel = "ideal-shuffler"
    linked: int = 1
    histograms: bool = field(default=False, compare=False)
    colluding: int = 0

    def __post_init__(self) -> None:
        """Raise a ConfigError for a round that is not possible, or that no accountant can interpret."""
        is_empty_round = self.cohort == 0 and self.sampling != "everyone"
        if not (1 <= self.cohort <= self.population or (is_empty_round and self.population >= 1)):
            raise ConfigError(f"round {self.round}: a cohort of {self.cohort} out of {self.population} clients is not possible")
        if not (0 if is_empty_round else 1) <= self.joined <= self.round:
            raise ConfigError(f"round {self.round}: a client cannot have joined {self.joined} rounds up to and including this one")
        # No single release protects a client: that guarantee follows from all its releases. Bits and pure reports protect no record alone.
        may_protect_part = isinstance(self.release, GaussianRelease | UnprotectedRelease)
        if self.release.unit == "client" or (self.release.unit in _PARTS_OF_CLIENT and not may_protect_part):
            raise ConfigError(
                f"{self._release_text}: its unit is {self.release.unit!r}, but a {type(self.release).__name__} does not protect a "
                f"{self.release.unit} as one unit"
            )
        if self.sampling == "once" and self.joined > 1:
            raise ConfigError(f"round {self.round}: a client that takes part once cannot have joined {self.joined} rounds")
        if isinstance(self.release, BinaryRelease) and not 1 <= self.release.sampled <= MAX_COUNT:
            raise ConfigError(f"{self._release_text}: sampled is {self.release.sampled}, expected 1 to {MAX_COUNT:.0e} coordinates")
        if self.release.units < 1 or self.linked < 1:
            raise ConfigError(
                f"round {self.round}: units and linked must be at least 1, got units = {self.release.units} and linked = {self.linked}"
            )
        self._check_fields_of_release()
        if not 0 <= self.colluding < self.population:
            raise ConfigError(
                f"round {self.round}: {self.colluding} of {self.population} clients cannot collude: at least one has to be honest"
            )
        if not 0 < self.rate <= 1:
            raise ConfigError(f"round {self.round}: rate must lie in (0, 1], got {self.rate}")
        if max(self.release.units, self.linked, self.population, self.round) > MAX_COUNT:
            raise ConfigError(f"round {self.round}: units, linked, population and round must be at most {MAX_COUNT:.0e} each")
        parameter = self.release.parameter
        if not (parameter > 0 and (isfinite(parameter) or isinstance(self.release, UnprotectedRelease))):
            raise ConfigError(f"{self._release_text}: its epsilon or mu must be positive and finite, got {parameter}")

    @property
    def _release_text(self) -> str:
        """The beginning of a message on the release: round and mechanism."""
        return f"round {self.round}, release of the mechanism {self.release.mechanism[:40]!r}"

    def _check_fields_of_release(self) -> None:
        """Raise a ConfigError if fields of the release, such as ``blanket``, contradict each other. The release's class explains them."""
        match self.release:
            case BinaryRelease(epsilon=epsilon, realised=float(realised)) if not 0 < realised <= epsilon:
                raise ConfigError(f"{self._release_text}: realised is {realised}, expected above 0 and at most epsilon = {epsilon:g}")
            case PureRelease(epsilon=epsilon, blanket=share) if share is not None and not (
                isinstance(share, float) and exp(-min(epsilon, 700.0)) <= share < 1
            ):
                raise ConfigError(
                    f"{self._release_text}: blanket is {share}, expected {exp(-epsilon):.4g} (e^-epsilon) or more, and below 1"
                )
            case PureRelease(signed=True, blanket=share, unit=unit) if share is None or unit != "weight":
                raise ConfigError(
                    f"{self._release_text}: signed is true, but blanket is {share} and unit is {unit!r}: state signed only with a "
                    "blanket and the unit 'weight'"
                )
            case GaussianRelease(of_part=True, alike=True, unit=unit):
                raise ConfigError(
                    f"{self._release_text}: alike must be false for the unit {unit!r}, because sums over records have no common bound"
                )
            case GaussianRelease(rate=rate) if not 0 < rate <= 1:
                raise ConfigError(f"{self._release_text}: rate, the sampling rate of records, must lie in (0, 1], got {rate}")
            case GaussianRelease(rate=rate, of_part=False, unit=unit) if rate != 1:
                raise ConfigError(
                    f"{self._release_text}: rate, the sampling rate of records, is {rate}, but unit is {unit!r}: only the units 'record' "
                    "and 'person' allow a rate below 1"
                )
            case UnprotectedRelease(claimed_epsilon=epsilon, claimed_delta=delta) if not _is_valid_claim(epsilon, delta):
                raise ConfigError(
                    f"{self._release_text}: claimed_epsilon must be above 0 and claimed_delta in (0, 1), or both left out, got {epsilon} "
                    f"and {delta}"
                )


def _is_valid_claim(epsilon: float | None, delta: float | None) -> bool:
    """Whether a paper's claim has a valid epsilon and delta, or neither."""
    if epsilon is None or delta is None:
        return epsilon is None and delta is None
    return isfinite(epsilon) and epsilon > 0 and 0 < delta < 1
