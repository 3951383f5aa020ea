"""Plan a run before anything is sent: its privacy guarantees, its noise, and the settings that would reach a target epsilon."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, inf, nan, tanh
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from ldpfl import mechanisms
from ldpfl.errors import ConfigError, shown
from ldpfl.experiments.planning.search import smallest_argument, smallest_argument_of_slow, smallest_count
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.privacy.accountants.binomial import binomial_quantile, sigmoid
from ldpfl.privacy.accountants.gaussian import gaussian_mu
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, attained_epsilon, certified_epsilon
from ldpfl.privacy.accounting import DELTA, account_groups, check_delta
from ldpfl.privacy.authors import released
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import BinaryRelease, Channel, Release
from ldpfl.privacy.guarantee import Statement, json_number
from ldpfl.util.displays import Shown
from ldpfl.util.quantities import Positive, cohort_size
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    import pandas

MOST_CLIENTS, MOST_REPORTS = 10**8, 10**10
"""Maximum number of clients, and of weights x rounds, that can be planned. Larger ones would take minutes."""
LARGEST_EPSILON = 50.0
"""Largest epsilon of a report that is solved for. Larger ones protect nothing."""

_TOLERANCE = 1e-3
"""Maximum relative excess of a solved number over the best one. The solved number itself is proved to be enough."""

_MAX_LAYERS = 10_000

_SHORTFALL_PROBABILITY = 1e-6
"""Probability that some round of a run has fewer clients than planned."""


def _to_python(value: Any) -> Any:
    """Convert a NumPy number to a Python number, because strict validation accepts only those."""
    return value.item() if isinstance(value, np.generic) else value


def _to_whole(value: Any) -> Any:
    """Convert a NumPy number to a Python number, and a whole float such as 1e6 to an int."""
    plain = _to_python(value)
    return int(plain) if isinstance(plain, float) and plain.is_integer() else plain


_Whole = Annotated[int, BeforeValidator(_to_whole)]
_Number = Annotated[Positive, BeforeValidator(_to_python)]


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Setting:
    """A federation to plan.

    Attributes:
        epsilon: epsilon of one report.
        clients: number of clients.
        weights: number of parameters of the model.
        rounds: number of training rounds.
        delta: failure probability of the guarantees that are not pure.
        mechanism: name of the mechanism.
        participation: fraction of clients sampled in each round.
        self_sampling: whether each client decides in secret whether it takes part (random check-in).
        radius: clipping range: weights are clipped to plus or minus this.
        channel: what stands between clients and server.
        colluding: number of clients that reveal to the adversary what they sent.
        layers: number of parameter tensors of the model, assumed to have about the same size. Needed if reports depend on layers.

    Raises:
        ConfigError: a value is missing, unknown, of the wrong type, or out of range.
    """

    epsilon: _Number
    clients: _Whole
    weights: _Whole
    rounds: _Whole
    delta: Annotated[float, BeforeValidator(_to_python)] = DELTA
    mechanism: str = "duchi"
    participation: Annotated[_Number, Field(le=1)] = 1.0
    self_sampling: Annotated[bool, BeforeValidator(_to_python)] = False
    radius: _Number = 0.075
    channel: Channel = "ideal-shuffler"
    colluding: _Whole = 0
    layers: _Whole | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _report_first_error(cls, arguments: Any, validate: Callable[[Any], Setting]) -> Setting:
        """Turn an error of pydantic into a :class:`ConfigError` of one line that names the argument.

        Pydantic reports a positional argument by its number, which is replaced by the argument's name.
        """
        try:
            return validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            place, value = (first["loc"] or ("setting",))[-1], first["input"]  # no location: an error of the setting as a whole
            name = dict(enumerate(cls.__dataclass_fields__)).get(place, place) if isinstance(place, int) else place
            if name == "channel":
                raise ConfigError(f"unknown channel {shown(value)}: {did_you_mean(str(value), get_args(Channel))}") from None
            got = "" if first["type"] == "missing" else f", got {shown(value)}"
            raise ConfigError(f"plan, {name}: {first['msg'].lower()}{got}") from None

    def __post_init__(self) -> None:
        """Refuse values that are out of range or do not fit each other."""
        if min(self.clients, self.weights, self.rounds) < 1:
            raise ConfigError(f"clients, weights and rounds must be at least 1, got {self.clients}, {self.weights}, {self.rounds}")
        for name, value, most in (
            ("clients", self.clients, MOST_CLIENTS),
            ("weights x rounds", self.weights * self.rounds, MOST_REPORTS),
        ):
            if value > most:
                raise ConfigError(f"{name} is {value:,}, expected at most {int(most):,}: plan for fewer")
        check_delta(self.delta)
        if not 0 <= self.colluding < self.cohort:
            raise ConfigError(
                f"colluding, the number of clients that collude, must lie between 0 and {self.cohort - 1}, since {self.cohort} clients "
                f"take part, got {self.colluding}"
            )
        if self.layers is not None and not 1 <= self.layers <= min(self.weights, _MAX_LAYERS):
            raise ConfigError(f"a model of {self.weights:,} weights has 1 to {min(self.weights, _MAX_LAYERS):,} layers, got {self.layers}")
        # If one layer and two layers have the same release, the number of layers does not matter and may be missing.
        if self.layers is None and self.weights > 1 and self._release_with(layers=1) != self._release_with(layers=2):
            raise ConfigError(
                f"the reports of {self.mechanism} depend on the number of layers, which is missing: give it as layers (--layers). Layers "
                "are the model's parameter tensors, such as 8 in two-layer-cnn"
            )

    @property
    def participates_in_secret(self) -> bool:
        """True if participation is secret and so amplifies privacy.

        The members of a secure sum are known, and so are those of a round that all clients join.
        """
        return self.self_sampling and self.participation < 1 and self.channel == "ideal-shuffler"

    @property
    def cohort(self) -> int:
        """Number of clients that take part in a round; with secret participation, the expected number."""
        return cohort_size(self.participation, self.clients)

    @cached_property
    def release(self) -> Release:
        """What a client's report of one round releases, for the accountants. The mechanism decides which unit of it has ``epsilon``."""
        return released(self.build(), self.ranges())

    def ranges(self) -> LayerRanges:
        """Return clipping ranges for ``layers`` layers, or for one layer if that is None."""
        return self._ranges_in_layers(self.layers or 1)

    def _release_with(self, layers: int) -> Release:
        """Return the release of a model with this number of layers."""
        return released(self.build(), self._ranges_in_layers(layers))

    def _ranges_in_layers(self, layers: int) -> LayerRanges:
        """Return clipping ranges that divide the weights into this number of ``layers``, as equally as possible."""
        size, remainder = divmod(self.weights, layers)
        sizes = (size + 1,) * remainder + (size,) * (layers - remainder)
        return LayerRanges(0.0, self.radius, sizes)

    def build(self) -> Mechanism:
        """Return the mechanism with this ``epsilon`` and its default settings."""
        return mechanisms.with_defaults(self.mechanism, self.epsilon)


@dataclass(frozen=True)
class Plan(Shown):
    """The guarantees and the cost of a setting.

    Attributes:
        statement: the privacy guarantees.
        noise_std: standard deviation of the noise in the mean of one weight, in the unit of the weights.
        bytes_per_client: number of bytes that one client sends in one round.
        solution: the settings that reach a target epsilon; None if no target was given.
    """

    setting: Setting
    statement: Statement
    noise_std: float
    bytes_per_client: int
    solution: Solution | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        inputs = {name: getattr(self.setting, name) for name in _INPUT_NAMES}
        if not self.setting.release.protected:
            inputs["epsilon"] = None
        return {
            **inputs,
            "cohort": self.setting.cohort,
            **self.statement.to_dict(),
            "noise_std": self.noise_std,
            "bytes_per_client": self.bytes_per_client,
            "bytes_per_client_run": self.bytes_per_client * self.setting.rounds,
            **(self.solution.to_dict() if self.solution else {}),
        }

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table of one row with the setting, its cost and each epsilon. Use ``pandas.concat`` to compare several plans."""
        import pandas

        figures = {name: value for name, value in self.to_dict().items() if not isinstance(value, list)}  # a list does not fit in a cell
        return pandas.DataFrame([{name: inf if value == "infinity" else value for name, value in figures.items()}])


_INPUT_NAMES = (
    *("mechanism", "epsilon", "clients", "weights", "layers", "rounds", "participation", "self_sampling", "radius", "channel", "colluding"),
)


def plan(setting: Setting) -> Plan:
    """Compute the guarantees and the cost of ``setting``. Takes a second on one core, half a minute for the largest settings.

    Raises:
        ConfigError: a value is out of range.
    """
    mechanism, ranges, release = setting.build(), setting.ranges(), setting.release
    hiding_cohort = _hiding_cohort(setting, release)
    group = RoundGroup(
        release=release,
        cohort=max(1, hiding_cohort - setting.colluding),
        population=setting.clients - setting.colluding,
        rounds=setting.rounds,
        sampling="everyone" if setting.participation == 1 else "secret" if setting.participates_in_secret else "visible",
        rate=setting.participation,
        channel=setting.channel,
        known=setting.participation == 1,  # whether some client takes part in every round for certain, so that a lower bound holds
    )
    statement = account_groups([group], setting.delta)
    if group.sampling == "visible":
        note = "for a client that takes part in every round; how often a client takes part is random, and a run's ledger charges for that"
        statement = replace(statement, notes=(*statement.notes, note))
    statement = replace(statement, warnings=(*mechanism.properties.caveats, *statement.warnings))
    if hiding_cohort < setting.cohort:
        note = (
            f"the number of clients in a round is random: this holds if each round has at least {hiding_cohort:,}, which fails with "
            f"probability {_SHORTFALL_PROBABILITY:g}"
        )
        statement = replace(statement, notes=(*statement.notes, note))
    noise = float(mechanism.noise(ranges).largest_std(setting.cohort).max())
    return Plan(setting, statement, noise_std=noise, bytes_per_client=(payload_bits(mechanism, ranges) + 7) // 8)  # whole bytes


def _hiding_cohort(setting: Setting, release: Release) -> int:
    """Return the number of clients among which a client hides in a round.

    With random check-in this number is random. For bits, the accountant averages over it, so the expected number is returned. Otherwise the
    result is so low that with probability 1 - ``_SHORTFALL_PROBABILITY`` no round of the run has fewer clients.
    """
    is_averaged = setting.participates_in_secret and isinstance(release, BinaryRelease) and release.sampled == 1
    if setting.participation == 1 or not setting.self_sampling or is_averaged:
        return setting.cohort
    return max(1, binomial_quantile(_SHORTFALL_PROBABILITY / setting.rounds, setting.clients, setting.participation))


@dataclass(frozen=True)
class Solution:
    """Numbers of clients, or an epsilon of a report, that reach a target for the central epsilon behind an ideal shuffler.

    Attributes:
        target: the target central epsilon.
        clients: number of clients that is proved to be enough at the setting's epsilon, also for adaptive inputs; None above 1e8.
        clients_necessary: with fewer clients some data set exceeds the target. None above 1e8, or if not all take part in each round.
        epsilon: epsilon of a report at which the setting's number of clients is enough. ``LARGEST_EPSILON`` if a larger one would do
            too; None if it would be below 1e-6.
    """

    target: float
    clients: int | None = None
    clients_necessary: int | None = None
    epsilon: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "target_central": json_number(self.target),
            "clients_needed": self.clients,
            "clients_necessary": self.clients_necessary,
            "epsilon_allowed": self.epsilon,
        }


def solve(setting: Setting, target: float, *, clients: bool, epsilon: bool) -> Solution:
    """Find the number of clients, or the epsilon of a report, at which the run's central epsilon is at most ``target``.

    ``clients`` and ``epsilon`` say which of the two to find. Central means behind an ideal shuffler. The clients' inputs may depend on
    earlier releases, as in training. Each of the two searches takes a few seconds on one core.

    Raises:
        ConfigError: the target is not positive, the mechanism does not send bits, or no epsilon behind a shuffler is known.
    """
    if not isinstance(target, Real) or isinstance(target, bool) or not 0 < target < inf:
        raise ConfigError(f"the target must be positive and finite, got {shown(target)}")
    check_central_is_solvable(setting)
    solution = Solution(target)
    if clients:
        necessary = _necessary_cohort(setting, target)
        solution = replace(solution, clients=_clients_for_cohort(setting, _sufficient_cohort(setting, target, necessary)))
        if setting.participation == 1:
            solution = replace(solution, clients_necessary=_clients_for_cohort(setting, necessary))
    return replace(solution, epsilon=_allowed_epsilon(setting, target)) if epsilon else solution


def solve_missing_argument(target: float, *, epsilon: float | None, clients: int | None, **others: Any) -> tuple[Setting, Solution]:
    """Find whichever of ``epsilon`` and ``clients`` is None, so that the central epsilon is at most ``target``.

    Return the setting with the found value, and the solution. If neither is None, the setting is unchanged, and both are solved for.
    ``others`` are further arguments of :class:`Setting`.

    Raises:
        ConfigError: both are None, no value reaches the target, or as for :func:`solve`.
    """
    if epsilon is None and clients is None:
        raise ConfigError(
            "the target is set, but epsilon and clients are both missing: give epsilon to find the clients, or clients to find the epsilon"
        )
    # A missing value is replaced by any valid one, since a setting is checked when it is made.
    setting = Setting(1.0 if epsilon is None else epsilon, MOST_CLIENTS if clients is None else clients, **others)
    if clients is None:
        # The search varies the cohort, and needs a valid setting: the smallest one with an honest client in a round.
        setting = replace(setting, clients=ceil((setting.colluding + 1) / setting.participation))
    both_given = clients is not None and epsilon is not None
    solution = solve(setting, target, clients=clients is None or both_given, epsilon=epsilon is None or both_given)
    if clients is None:
        if solution.clients is None:
            raise ConfigError(
                f"no number of clients up to {MOST_CLIENTS:.0e} reaches a central epsilon of {target:g}: set a smaller epsilon for each "
                "weight, or a larger target"
            )
        setting = replace(setting, clients=solution.clients)
    if epsilon is None:
        if solution.epsilon is None:
            raise ConfigError(
                f"a central epsilon of {target:g} with {setting.clients} clients needs a local epsilon below 1e-6, too small to learn "
                "from: set a larger target, or more clients"
            )
        setting = replace(setting, epsilon=solution.epsilon)
    return setting, solution


def check_central_is_solvable(setting: Setting) -> None:
    """Raise a :class:`ConfigError` unless the setting's epsilon behind an ideal shuffler can be solved for and plotted."""
    if setting.channel != "ideal-shuffler" or (setting.self_sampling and setting.participation < 1):
        raise ConfigError(
            "a target central epsilon, or a plot, needs the channel ideal-shuffler, and no self-sampling: change these settings, or leave "
            "the target and the plot out"
        )
    release = setting.release
    restriction = ""
    if type(release) is not BinaryRelease:  # a subclass may have other properties
        restriction = f"one-bit reports, which {setting.mechanism} does not send"
    elif release.sampled > 1:
        restriction = f"bits about known coordinates, but {setting.mechanism} draws coordinates at random"
    if restriction:
        raise ConfigError(f"a target central epsilon, or a plot, needs {restriction}: {_ADVICE_WITHOUT_TARGET}")


_ADVICE_WITHOUT_TARGET = (
    "leave the target and the plot out, and ldpfl plan prints the guarantee for an epsilon and a number of clients; or set "
    "privacy.target_epsilon in a run, which then computes its noise"
)


def client_counts_to_plot(setting: Setting) -> list[int]:
    """Return the numbers of clients at which to plot epsilon: from 10 to well above the number in ``setting``, on a logarithmic scale."""
    most = min(MOST_CLIENTS, 10_000 * setting.clients)
    # 17 points draw a smooth curve. Rounding may make small ones equal, which ``unique`` removes.
    points = np.unique(np.round(np.geomspace(max(10, setting.colluding + 2), max(most, 100_000), 17)).astype(np.int64))
    return [int(point) for point in points]


def central_epsilon_bounds(setting: Setting, clients: int) -> tuple[float, float]:
    """Return a lower and an upper bound of the central epsilon of ``setting`` with ``clients`` clients.

    The lower bound is NaN if not all clients take part in each round. The guarantee charges a client for every round, and then there may
    be no client that took part in every round.
    """
    check_central_is_solvable(setting)
    cohort = max(1, cohort_size(setting.participation, clients) - setting.colluding)
    rounds = _shuffled_rounds(setting, cohort)
    lower = _lower_bound(rounds, setting.delta) if setting.participation == 1 else nan
    return lower, _upper_bound(rounds, setting.delta)


def _shuffled_rounds(setting: Setting, cohort: int) -> ShuffledRounds:
    """Return the rounds of ``setting`` with ``cohort`` honest clients in each, as the accountants take them."""
    return ShuffledRounds(setting.release.parameter, cohort, setting.release.units, setting.rounds)


def _upper_bound(rounds: ShuffledRounds, delta: float) -> float:
    """Return the upper bound of epsilon of ``rounds`` for adaptive inputs."""
    _fixed_inputs, adaptive_inputs = certified_epsilon([rounds], delta)
    return adaptive_inputs


def _lower_bound(rounds: ShuffledRounds, delta: float) -> float:
    """Return the epsilon of ``rounds`` that some data set attains, a lower bound."""
    return attained_epsilon([rounds], delta)


def _clients_for_cohort(setting: Setting, cohort: float | None) -> int | None:
    """Return the smallest number of clients so that ``cohort`` honest clients take part in each round. None stays None."""
    if cohort is None:
        return None
    # A cohort is participation * clients, rounded up. It is large enough as soon as the product exceeds the number below by any amount.
    one_too_few = ceil(cohort) + setting.colluding - 1
    return floor(one_too_few / setting.participation + 1e-9) + 1  # 1e-9 against rounding errors of the quotient


def _necessary_cohort(setting: Setting, target: float) -> int | None:
    """Return the smallest cohort at which the lower bound of epsilon is at most ``target``; None if it has above 1e8 clients.

    With a smaller cohort, some data set exceeds the target.
    """
    return smallest_count(
        lambda cohort: _lower_bound(_shuffled_rounds(setting, cohort), setting.delta),
        guess=_guessed_cohort(setting, target),
        target=target,
        highest=MOST_CLIENTS,
        tolerance=1e-6,
    )


def _sufficient_cohort(setting: Setting, target: float, necessary: int | None) -> float | None:
    """Return a cohort at which the upper bound of epsilon is at most ``target``; None if it has above 1e8 clients.

    ``necessary`` is the result of :func:`_necessary_cohort`, from which the search starts.
    """

    def by_cohort(bound: Callable[[ShuffledRounds, float], float]) -> Callable[[float], float]:
        """Return ``bound`` as a function of the cohort, which the search varies."""
        return lambda cohort: bound(_shuffled_rounds(setting, max(1, ceil(cohort))), setting.delta)

    if necessary is None:
        return None
    return smallest_argument_of_slow(
        by_cohort(_upper_bound), by_cohort(_lower_bound), necessary, target, 1.0, float(MOST_CLIENTS), _TOLERANCE
    )


def _allowed_epsilon(setting: Setting, target: float) -> float | None:
    """Return the largest epsilon of a report with which the central epsilon is at most ``target``; None if it is below 1e-6."""
    honest = setting.cohort - setting.colluding

    def by_inverse(bound: Callable[[ShuffledRounds, float], float]) -> Callable[[float], float]:
        """Return ``bound`` as a decreasing function of 1 / epsilon, which the searches need."""

        def central_epsilon(inverse: float) -> float:
            """Return the bound for reports with an epsilon of 1 / ``inverse``."""
            changed = replace(setting, epsilon=1 / inverse)
            check_central_is_solvable(changed)
            return bound(_shuffled_rounds(changed, honest), setting.delta)

        return central_epsilon

    if "epsilon" not in mechanisms.settings_of(setting.mechanism).model_fields:
        raise ConfigError(
            f"the mechanism {setting.mechanism} has no epsilon to solve for: leave the target out, and ldpfl plan prints the guarantee"
        )
    # For a small epsilon, mu (of Gaussian differential privacy) is close to epsilon * sqrt(reports / clients). The guessed epsilon is mu at
    # most, since this does not hold for large ones.
    mu, reports = gaussian_mu(target, setting.delta), setting.release.units * setting.rounds
    guess = max(1.0, (reports / honest) ** 0.5) / mu
    low, high = 1 / LARGEST_EPSILON, 1e6  # of 1 / epsilon
    # The lower bound is fast to compute. Its solution is where the search with the slow upper bound starts.
    start = smallest_argument(by_inverse(_lower_bound), guess, target, low, high, _TOLERANCE)
    if start is None:
        return None
    inverse = smallest_argument_of_slow(by_inverse(_upper_bound), by_inverse(_lower_bound), start, target, low, high, _TOLERANCE)
    return None if inverse is None else 1 / inverse


def _guessed_cohort(setting: Setting, target: float) -> float:
    """Return the cohort that the central limit theorem suggests, as the start of a search."""
    # A client that changes its value shifts the count of each of its units * rounds bits by tanh(epsilon / 2) on average. By the central
    # limit theorem, the counts are mu-GDP (Gaussian differential privacy) with mu^2 = units * rounds * shift^2 / (cohort * variance of a
    # bit). This is solved for the cohort.
    mu = gaussian_mu(target, setting.delta)
    epsilon, units = setting.release.parameter, setting.release.units
    shift, variance = tanh(epsilon / 2), sigmoid(epsilon) * sigmoid(-epsilon)
    return float(units * setting.rounds * shift**2 / (mu**2 * variance))
