"""What was released, round by round. An event says what happened and means the same for ever; accountants interpret it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite
from typing import ClassVar, Literal, NamedTuple

from ldpfl.errors import ConfigError
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Scope, TrustModel, Unit

Channel = Literal["ideal-shuffler", "secure-sum", "random-delay", "direct"]
"""What stands between client and server. ``ideal-shuffler``: only how often each value was sent is seen. ``secure-sum``: only
the sum over all clients is seen, of reports that are integers. ``random-delay``: each report
comes by itself after a random wait; who watches the network, or sees stragglers, can still link. ``direct``: the server sees senders."""

Sampling = Literal["everyone", "visible", "secret", "once"]
"""Who takes part. ``visible``: a part of the clients, known to others. ``secret``: each decides for itself, and only the number is seen.
``once``: each client in one round of the whole run, in a secret random order."""


OURS, UNKNOWN = "ldpfl", "unknown"
"""Author of a release: this project, or nobody that is known. Other authors are a class, ``module:Class``."""


class Claim(NamedTuple):
    """What a paper says of a release: for a whole run, or for one round where it claims no more than that."""

    epsilon: float
    delta: float
    trust_model: TrustModel
    scope: Scope
    source: str

    def guarantee(self) -> Guarantee:
        """Return the line that stands beside the proved ones."""
        return Guarantee(**self._asdict(), unit="client", units_per_round=1, adjacency=REPLACE_ONE, status="claimed")


class _Stated:
    """What accounting and policies ask of any release, beside its parameter."""

    protected: ClassVar[bool] = True
    """Whether anything is guaranteed."""

    by_round: ClassVar[bool] = False
    """Whether it is accounted as a whole round, with no figure for a unit of it; then the larger parameter always costs more."""

    not_shuffled: ClassVar[str] = ""
    """Why there is no figure for it behind a shuffler; empty where there is one."""

    author: str = UNKNOWN
    """Whose code made it: only :func:`ldpfl.privacy.authors.released` says so. Of other code than :data:`OURS` nothing is proved."""

    @property
    def why_unprotected(self) -> str:
        """What left without protection; empty where nothing did."""
        return ""

    @property
    def claimed(self) -> Claim | None:
        """What the mechanism's paper says that it costs, if it says so."""
        return None


class _ByUnit(_Stated):
    """A release whose units are each ``epsilon``-LDP."""

    epsilon: float
    claim: str

    @property
    def parameter(self) -> float:
        """What the release is accounted by: epsilon of one unit."""
        return self.epsilon

    @property
    def pure_epsilon(self) -> float:
        """What one unit costs with no failure probability, against one who knows its sender."""
        return self.epsilon

    @property
    def claimed(self) -> Claim | None:
        return Claim(self.epsilon, 0.0, "shuffled", "run", self.claim) if self.claim else None


@dataclass(frozen=True)
class BinaryRelease(_ByUnit):
    """One client's round: ``units`` bits, each by randomised response at ``epsilon``.

    Attributes:
        mechanism: its name.
        epsilon: budget of one bit; its probabilities lie in [1 / (1 + e^epsilon), e^epsilon / (1 + e^epsilon)].
        units: bits that depend on the client's data.
        unit: what one bit stands for.
        realised: the budget that the bits really spend, where finite precision keeps it below ``epsilon``.
        sampled: of how many coordinates, at most, its client drew in secret the one that a bit is about; 1 where that is fixed.
        claim: what the mechanism's paper says that ``epsilon`` is for the whole run, in a sentence; empty where it says nothing.
        author: whose code made it; :func:`ldpfl.privacy.authors.released` says so, and nothing else.
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
        blanket: a share g for which there is a law U, the same for all clients of a round, such that a report is between g and
            g e^epsilon times as likely as under U, whatever its input: so much of it says nothing. None where none is known.
        signed: whether a report about either end of the range says which, and is wrong with half of the blanket's probability. Then data
            are known that cost nearly what the blanket allows for; else no lower figure is stated.
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
    """Return ``share`` as the ``blanket`` of a :class:`PureRelease`, and None where it says next to nothing, or is lost to rounding."""
    return share if epsilon <= LARGEST_HIDDEN and exp(-epsilon) < share < 1 else None


LARGEST_HIDDEN = 30.0
"""Budget of a report beyond which no crowd hides it."""


@dataclass(frozen=True)
class GaussianRelease(_Stated):
    """One client's round: one vector with independent Gaussian noise, fixed before the data were looked at.

    With the unit ``record``, mu is that of one of the client's records, and with ``person`` that of all records of one person there;
    nothing is said of the client as a whole. What is sent are then integers, so that a sum over clients has the noise of all of them.

    Attributes:
        mechanism: its name.
        mu: sensitivity under replacement (twice the clipping norm) over the noise's standard deviation.
        rate: probability with which each record, or person, took part, by a coin of its own that nobody learns; 1 where all did.
        alike: whether all clients of the round bounded their vectors to the same ball, of radius mu / 2 standard deviations, and added
            noise of the same law: then they hide each other behind a shuffler.
        integers: whether what is sent are integers, so that a sum over clients has the noise of all of them; of parts they always are.
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
        """Whether a sum of such reports tells no more than one Gaussian with the variance of all their noise does."""
        return self.of_part or self.integers

    @property
    def of_part(self) -> bool:
        """Whether it is about a part of what a client holds, a record or a person, and so a sum of integers over such parts."""
        return self.unit in _PARTS

    @property
    def not_shuffled(self) -> str:  # type: ignore[override]  # others have one reason each
        if self.of_part:
            return "how far apart the sums lie that clients send of their records is not bounded; the local figures hold"
        return "" if self.alike else "it is not stated that all clients add the same noise; the local figures hold"

    @property
    def parameter(self) -> float:
        """What the release is accounted by: mu."""
        return self.mu

    @property
    def pure_epsilon(self) -> float:
        """Infinite: Gaussian noise has none."""
        return inf


@dataclass(frozen=True)
class UnprotectedRelease(_Stated):
    """One client's round of which something left without protection, or with one that depended on the data in an unproved way.

    Attributes:
        mechanism: its name.
        reason: what left, in a few words.
        claimed_epsilon, claimed_delta: what the mechanism's paper says one client's round costs, if it says so.
        claim: how it says so, in a sentence.
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
        """Infinite: no figure bounds what left."""
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


_LARGEST = 10**12
_PARTS: tuple[Unit, ...] = ("record", "person")

Release = BinaryRelease | PureRelease | GaussianRelease | UnprotectedRelease


def for_one_record(release: Release) -> Release:
    """Return what ``release`` costs one record, where the numbers of a client's records and persons stay what they are.

    Where persons are protected, a row in the place of another person's row changes the vectors of both persons, and each of them moves the
    sum by up to mu standard deviations: together by twice mu. Each has a coin of its own where persons take part by chance. Whatever the
    coins show, twice mu bounds the distance, so that it holds without a look at them.
    """
    if isinstance(release, GaussianRelease) and release.unit == "person":
        return replace(release, mu=2 * release.mu, unit="record", rate=1.0)
    return release


@dataclass(frozen=True)
class RoundEvent:
    """A round: what each client of the cohort released, and who could see what of it.

    Attributes:
        round: its number, from 1.
        release: what one client sent.
        cohort: clients whose reports were pooled. Dropped clients are not among them. 0 where each decides for itself, and none did.
        population: clients that could have taken part.
        joined: the largest number of rounds that any one client has taken part in so far, this one included.
        sampling: how the cohort came about.
        rate: probability with which a client takes part, for ``secret`` sampling.
        channel: how reports travelled.
        linked: units that travel in one message and stay together in the shuffler; 1 in the papers.
        histograms: whether it told counts, and not of a model: histograms of columns before the first round, or how good a model is on
            records that clients hold back. No two data sets are then said to attain what it is charged.
        colluding: clients of the cohort that are not relied on: nobody hides behind their reports or their noise. It is what a run is
            planned for; who asks for an account may count with more.

    Raises:
        ConfigError: figures that contradict each other.
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
    histograms: bool = field(default=False, compare=False)  # not of runs from before it was said
    colluding: int = 0

    def __post_init__(self) -> None:
        nobody = self.cohort == 0 and self.sampling != "everyone"
        if not (1 <= self.cohort <= self.population or (nobody and self.population >= 1)):
            raise ConfigError(f"round {self.round}: a cohort of {self.cohort} out of {self.population} clients is not possible")
        if not (0 if nobody else 1) <= self.joined <= self.round:
            raise ConfigError(f"round {self.round}: a client cannot have joined {self.joined} rounds")
        gaussian = isinstance(self.release, GaussianRelease | UnprotectedRelease)
        if self.release.unit == "client" or (self.release.unit in _PARTS and not gaussian):
            raise ConfigError(f"round {self.round}: a release of this kind does not protect a {self.release.unit} as one unit")
        if self.sampling == "once" and self.joined > 1:
            raise ConfigError(f"round {self.round}: a client that takes part once cannot have joined {self.joined} rounds")
        if isinstance(self.release, BinaryRelease) and not 1 <= self.release.sampled <= _LARGEST:
            raise ConfigError(f"round {self.round}: a bit cannot be about one of {self.release.sampled} coordinates")
        if self.release.units < 1 or self.linked < 1:
            raise ConfigError(f"round {self.round}: a release has at least one unit, got {self.release.units} and {self.linked} linked")
        match self.release:
            case BinaryRelease(epsilon=epsilon, realised=float(realised)) if not 0 < realised <= epsilon:
                raise ConfigError(f"round {self.round}: a realised budget of {realised} does not fit the stated one")
            case PureRelease(epsilon=epsilon, blanket=share) if share is not None and not (
                isinstance(share, float) and exp(-min(epsilon, 700.0)) <= share < 1
            ):
                raise ConfigError(f"round {self.round}: no report at {epsilon:g} has a blanket of {share}")
            case PureRelease(signed=True, blanket=share, unit=unit) if share is None or unit != "weight":
                raise ConfigError(f"round {self.round}: a report of a {unit} without a blanket has no sign that is known")
            case GaussianRelease(of_part=True, alike=True):
                raise ConfigError(f"round {self.round}: sums over records do not lie in one ball")
            case GaussianRelease(rate=rate, of_part=of_part) if not (0 < rate <= 1 and (rate == 1 or of_part)):
                raise ConfigError(
                    f"round {self.round}: records or persons, and nothing else, take part with a probability in (0, 1], got {rate}"
                )
            case UnprotectedRelease(claimed_epsilon=epsilon, claimed_delta=delta) if not _is_claim(epsilon, delta):
                raise ConfigError(f"round {self.round}: a claim needs an epsilon above 0 and a delta in (0, 1), got {epsilon} and {delta}")
        if not 0 <= self.colluding < self.population:
            raise ConfigError(f"round {self.round}: {self.colluding} of {self.population} clients cannot collude: one has to be honest")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"round {self.round}: rate must lie in (0, 1], got {self.rate}")
        if max(self.release.units, self.linked, self.population, self.round) > _LARGEST:
            raise ConfigError(f"round {self.round}: counts beyond {_LARGEST:.0e} are not accounted")
        parameter = self.release.parameter
        if not (parameter > 0 and (isfinite(parameter) or isinstance(self.release, UnprotectedRelease))):
            name = self.release.mechanism[:40]
            raise ConfigError(f"round {self.round}: the parameter of {name!r} must be positive and finite, got {parameter}")


def _is_claim(epsilon: float | None, delta: float | None) -> bool:
    if epsilon is None or delta is None:
        return epsilon is None and delta is None
    return isfinite(epsilon) and epsilon > 0 and 0 < delta < 1
