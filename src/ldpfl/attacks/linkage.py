"""Which reports come from one client, judged by when they arrive: what random delays are worth against an observer.

The observer sees of each report when it arrived and for which parameter it is; no sender, and nothing of its value is used. Client i
sends one report for each parameter. It arrives at s_i + D + J: s_i is where the client's window starts, D is uniform on (0, T) and
J is normal, both drawn anew for each report. Four channels:

* ``direct``: no delays (T = 0); s_i is when the client is done, uniform on (0, spread) over the clients.
* ``unaligned``: delays alone, as LDP-FL's Algorithm 3 prints them; s_i as in ``direct``.
* ``delayed``: delays and waits, as the paper adds them: each client waits until a common time T_S. What remains of s_i is a normal error
  in each client's clock and predictions, and being late, for clients slower than a T_S that was agreed on too low.
* ``relay``: clients upload as in ``direct``; all reports are released at once, in an order that is drawn uniformly. Their place in it
  is all that is left, and the observer takes it for the order of uploads.

The observer is told where the windows of the round start, though not whose they are. With many parameters it could estimate them, so
this only helps it. Whose window is which it judges by where each client's started in earlier rounds. Given the windows, parameters are
independent, and each is a random matching of n reports to n windows, of which the observer takes the posterior marginals. So what is
measured bounds every observer that has arrival times alone, but for one approximation: exact marginals are permanents, and Sinkhorn
scaling stands in for them. For six clients it names at most 2.5 % fewer of the reports rightly than enumeration does. For ``relay``
the observer's model is wrong on purpose; that line is what this attack finds, and that no other one finds more is the proof in
:mod:`ldpfl.relay.uniform_order`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite, sqrt
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ldpfl.attacks.linkage_posterior import (
    CONFIDENCE,
    PASSES,
    Array,
    area_under_curve,
    arrival_density,
    client_probabilities,
    matching_probabilities,
    max_linked_reports,
    pair_scores,
    probability_right,
    separate_probabilities,
)
from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import single_epsilon

LinkChannel = Literal["direct", "unaligned", "delayed", "relay"]

Mixing = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""Function that returns the relay's order for a number of reports: for each place, the report's number in the order of uploads."""

MOST_CLIENTS = 2_000
"""Maximum number of clients. More would need over a gigabyte, because every report is compared with every window."""

_BLOCK = 200_000
"""Number of pairs of report and window that are processed together, to fit the processor's cache."""

_MIN_DENSITY = 1e-30
"""Density that is added to each pair. With it, a report that rounding put outside all windows may still belong to any of them."""

_MIN_SECONDS, _MAX_SECONDS = 1e-9, 1e9
"""Times in seconds between which the ratio of any two can be squared in single precision."""

_TIMES = f"0, or {_MIN_SECONDS:g} to {_MAX_SECONDS:g} seconds"

_PAIRS = 8_000
"""Number of pairs of reports by which a round's area under the curve is estimated."""

_MOST_TRIALS = 10_000


@dataclass(frozen=True)
class LinkageSetting:
    """A federation whose arrival times are watched; all times in seconds.

    Attributes:
        clients, parameters: number n of clients, and number of reports that each sends in a round.
        spread: the clients' finishing times are uniform on (0, spread).
        jitter: standard deviation of the network's part in each arrival.
        clock: standard deviation of the lasting error in a client's wait, from its clock and its predictions. ``delayed`` only.
        shortfall: how much earlier than the slowest client finishes the time is that all agreed to wait for (the paper's T_S). A client
            that is slower than that time is late. ``delayed`` only.
        uncertainty: standard deviation of the estimate of a window's start from one watched round; 0: the start is known exactly.
        watched: numbers of earlier rounds that the observer has seen; after r rounds the standard deviation is uncertainty / sqrt(r).
        epsilon: budget of one report.
        delta: delta at which budgets are composed.

    Raises:
        ConfigError: a number is out of range.
    """

    clients: int = 100
    parameters: int = 200
    spread: float = 60.0
    jitter: float = 0.05
    clock: float = 1.0
    shortfall: float = 0.0
    uncertainty: float = 1.0
    watched: tuple[int, ...] = (1, 100)
    epsilon: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not 2 <= self.clients <= MOST_CLIENTS:
            raise ConfigError(f"clients must be 2 to {MOST_CLIENTS:,}, got {self.clients}")
        if self.parameters < 2:
            raise ConfigError(f"parameters must be 2 or more, since a single report cannot be linked with another; got {self.parameters}")
        for name in ("spread", "jitter", "clock", "shortfall", "uncertainty"):
            value = getattr(self, name)
            if not _is_time(value):
                raise ConfigError(f"{name} must be {_TIMES}, got {value}")
        if self.shortfall > self.spread:
            raise ConfigError(f"shortfall is {self.shortfall:g} s, longer than spread, {self.spread:g} s: lower shortfall or raise spread")
        if not self.watched or min(self.watched) < 1 or list(self.watched) != sorted(set(self.watched)):
            raise ConfigError(f"watched must be round numbers in ascending order, each 1 or more, got {self.watched}")
        if not (isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be above 0 and finite, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be between 0 and 1, got {self.delta}")


@dataclass(frozen=True)
class LinkagePlan:
    """How the attack is run.

    Attributes:
        delays: longest random delays T to try, in seconds, 0 or more. With 0 clients only wait for the agreed time.
        trials: number of simulated rounds for each line of the table.
        seed: seed of the simulation. Trial t draws the same clients for every channel and every T, so that lines differ by the channel
            alone.

    Raises:
        ConfigError: there is no delay, a delay is out of range or repeated, or the number of trials or the seed is out of range.
    """

    delays: tuple[float, ...]
    trials: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.trials <= _MOST_TRIALS:
            raise ConfigError(f"trials must be 1 to {_MOST_TRIALS:,}, got {self.trials}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        if not self.delays or not all(map(_is_time, self.delays)):
            raise ConfigError(f"delays must be one or more of {_TIMES}, got {list(self.delays)}")
        if len(set(self.delays)) < len(self.delays):
            raise ConfigError(f"delays must all be different, got {list(self.delays)}")


@dataclass(frozen=True)
class Success:
    """The observer's success in one round.

    Attributes:
        attributed: fraction of reports that are attributed to the right client, for each number of watched rounds; ties are split.
            Guessing gives 1/n.
        auc: probability that two reports of one client look more alike than two of different clients; ties count half. Guessing gives 0.5.
        linked: maximum number of reports of one window that are linked to this window with a confidence of ``CONFIDENCE`` or more each.
    """

    attributed: tuple[float, ...]
    auc: float
    linked: int


@dataclass(frozen=True)
class LinkageRow:
    """The observer's success for one channel, over all trials.

    Attributes:
        delay: T in seconds; None for channels without a delay.
        found: one entry for each trial.
        epsilon: epsilon of the linked reports, see :func:`epsilon_of_linked`.
    """

    channel: LinkChannel
    delay: float | None
    found: tuple[Success, ...]
    epsilon: float

    def attributed(self, place: int) -> Figure:
        """Share of reports that are attributed to the right client after ``watched[place]`` rounds."""
        return Figure.of([success.attributed[place] for success in self.found])

    @property
    def auc(self) -> Figure:
        """Probability that two reports of one client look more alike than two of different clients, see :class:`Success`."""
        return Figure.of([success.auc for success in self.found])

    @property
    def linked(self) -> Figure:
        """Size of the largest linked set."""
        return Figure.of([float(success.linked) for success in self.found])


@dataclass(frozen=True)
class Figure:
    """A mean over trials and its spread, the standard deviation of one trial (0 for a single one)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Return mean and deviation of ``values``."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class LinkageResult:
    """All channels of one setting, in the order of a table."""

    setting: LinkageSetting
    plan: LinkagePlan
    rows: tuple[LinkageRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "setting": asdict(self.setting),
            "plan": asdict(self.plan),
            "confidence": CONFIDENCE,
            "rows": [
                {
                    "channel": row.channel,
                    "delay": row.delay,
                    "attributed": [asdict(row.attributed(place)) for place in range(len(self.setting.watched))],
                    "auc": asdict(row.auc),
                    "linked": asdict(row.linked),
                    "epsilon": row.epsilon,
                    "found": [asdict(found) for found in row.found],
                }
                for row in self.rows
            ],
        }


def linkage(setting: LinkageSetting, plan: LinkagePlan, progress: Callable[[int, int], None] = lambda done, total: None) -> LinkageResult:
    """Attack every channel: ``direct``, the two with delays for each longest delay of the plan, and ``relay``.

    For 100 clients and 200 parameters, each trial of a channel takes a fifth of a second on one core. The time grows with the square of the
    number of clients.

    Args:
        progress: called after each trial with (trials done, trials).
    """
    lines = _channels_and_delays(sorted(plan.delays))
    rows = []
    for number, (channel, delay) in enumerate(lines):
        successes = []
        for trial in range(plan.trials):
            generator = np.random.default_rng((plan.seed, trial))  # the same for all lines, which so differ by the channel alone
            successes.append(_simulate_and_attack(setting, channel, delay or 0.0, generator))
            progress(number * plan.trials + trial + 1, len(lines) * plan.trials)
        linked = Figure.of([float(success.linked) for success in successes]).mean
        epsilon = epsilon_of_linked(ceil(linked), setting.epsilon, setting.clients, setting.delta)
        rows.append(LinkageRow(channel, delay, tuple(successes), epsilon))
    return LinkageResult(setting, plan, tuple(rows))


def _is_time(seconds: float) -> bool:
    """Whether ``seconds`` is 0, or in the range that can be squared in single precision."""
    return seconds == 0 or _MIN_SECONDS <= seconds <= _MAX_SECONDS


def _channels_and_delays(delays: Sequence[float]) -> list[tuple[LinkChannel, float | None]]:
    """Return the channel and the longest delay of each line of the table; None for a channel without delays."""
    unaligned: list[tuple[LinkChannel, float | None]] = [("unaligned", delay) for delay in delays if delay > 0]  # 0 would be ``direct``
    return [("direct", None), *unaligned, *(("delayed", delay) for delay in delays), ("relay", None)]


def _simulate_and_attack(setting: LinkageSetting, channel: LinkChannel, delay: float, generator: np.random.Generator) -> Success:
    """Simulate one round over ``channel`` with delays up to ``delay`` seconds, and return the observer's success.

    With a relay, ``delay`` does not matter: clients upload to it when they finish, as they would directly to the server.
    """
    if channel == "relay":
        uploads = window_starts(setting, "direct", generator)
        return attack_release(uploads, setting, generator)
    starts = window_starts(setting, channel, generator)
    return attack_windows(starts, delay, setting, generator)


def uniform_mixing(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return a uniformly random order of ``count`` reports. It is a :data:`Mixing` with the same law as the relay's."""
    return generator.permutation(count)


def epsilon_of_linked(linked: int, epsilon: float, clients: int, delta: float) -> float:
    """Return the epsilon at ``delta`` of ``linked`` one-bit reports of one client; exact up to 1,024 clients.

    Linked reports compose as without a shuffler. A report that is linked to no other one is hidden among the reports of all clients for its
    parameter. The client's other reports cost extra (``ldpfl ledger``).
    """
    if linked < 2:
        return single_epsilon(epsilon, clients, delta)
    return composed_epsilon(epsilon, linked, delta)


def window_starts(setting: LinkageSetting, channel: LinkChannel, generator: np.random.Generator) -> Array:
    """Draw the start of each client's window, (n,) float64, in seconds after the start of the round. ``relay`` has no windows.

    Raises:
        ConfigError: a channel without windows.
    """
    finished = generator.uniform(0, setting.spread, setting.clients)
    errors = generator.standard_normal(setting.clients)  # drawn even if unused, so that later draws do not depend on the channel
    if channel in ("direct", "unaligned"):
        return finished
    if channel != "delayed":
        raise ConfigError(
            f"in the channel {channel!r} clients have no time windows: expected one of {', '.join(get_args(LinkChannel)[:3])}"
        )  # all channels but the last, relay
    # LDP-FL, section 3: a client that is done at t waits T_W = T_S - t for the agreed time T_S. A client slower than T_S does not wait.
    agreed_time = max(0.0, float(finished.max()) - setting.shortfall)
    waited = np.maximum(0.0, agreed_time - finished)
    return np.asarray(finished + waited + setting.clock * errors)


def attack_windows(starts: Array, delay: float, setting: LinkageSetting, generator: np.random.Generator) -> Success:
    """Simulate one round, and return how well an observer who sees arrival times tells which client sent which report.

    A client's window begins at its time in ``starts`` (clients,), and lasts ``delay`` seconds. The client sends one report for each
    parameter, each at a random time in the window. Only the setting's parameters, jitter, uncertainty and watched are used. The other
    fields describe how ``starts`` are drawn.
    """
    owner_probabilities = _owner_probabilities_by_watched(starts, setting, generator)
    size = (setting.parameters, len(starts))
    time_after_start = delay * generator.random(size) + setting.jitter * generator.standard_normal(size)
    return _observe(starts + time_after_start, starts, delay, setting, owner_probabilities, generator, calibrated=True)


def attack_release(starts: Array, setting: LinkageSetting, generator: np.random.Generator, mixing: Mixing = uniform_mixing) -> Success:
    """Simulate one round of clients that upload to a relay at ``starts`` (n,), and return the observer's success with the released order.

    The observer assumes that the relay keeps the order of uploads. So it takes the first reports as those of the client that uploaded
    first, as if they had arrived at its upload. A relay that forwards reports in their order is then ``direct`` without jitter. The
    observer rehearses how often such guesses are right. The same fields of ``setting`` are used as in :func:`attack_windows`.
    """
    owner_probabilities = _owner_probabilities_by_watched(starts, setting, generator)
    # Reports are numbered by upload: those of the first upload come first, one for each parameter. The report at each place of the released
    # order is taken to have arrived at the upload to which that place would belong if the order had been kept.
    upload, parameter = np.divmod(mixing(setting.parameters * len(starts), generator), setting.parameters)
    arrivals = np.empty((setting.parameters, len(starts)))
    arrivals[parameter, np.argsort(starts, kind="stable")[upload]] = np.repeat(np.sort(starts), setting.parameters)
    return _observe(arrivals, starts, 0.0, setting, owner_probabilities, generator, calibrated=False)


def _observe(
    arrivals: Array,
    starts: Array,
    delay: float,
    setting: LinkageSetting,
    owner_probabilities: Sequence[Array | None],
    generator: np.random.Generator,
    *,
    calibrated: bool,
) -> Success:
    """Return the observer's success with ``arrivals`` (parameters, clients), the time of each client's report for each parameter.

    Args:
        owner_probabilities: see :func:`_owner_probabilities`, one for each number of watched rounds.
        calibrated: whether reports arrived as the observer's model assumes. Then the probability by a report's own arrival time is exact,
            and links the report to a window without a rehearsal, an estimate of how often such guesses are right.
    """
    clients = len(starts)
    # Arrays of probabilities have the axes parameter, report (by its true client), and window or client. ``correct`` counts the reports
    # that are attributed to the right client, for each number of watched rounds.
    correct = np.zeros(len(owner_probabilities))
    scores, hits, sure, alike, unlike = [], [], [], [], []  # each gets one array for each block of parameters
    blocks = max(1, setting.parameters // max(2, _BLOCK // clients**2))  # of two parameters at least, which pairs of reports need
    for block in np.array_split(arrivals, blocks):
        lag = (block[:, :, None] - starts).astype(np.float32)
        exact_by_own_arrival = separate_probabilities(arrival_density(lag, delay, setting.jitter) + _MIN_DENSITY)
        # Also uses that each window has one report for each parameter. That says more, but the probabilities are approximate.
        posterior = matching_probabilities(exact_by_own_arrival)
        sure.append((exact_by_own_arrival.max(axis=1) >= CONFIDENCE) & calibrated)
        client_posteriors = [posterior if owners is None else client_probabilities(posterior, owners) for owners in owner_probabilities]
        correct += [float(probability_right(client_posterior, axis=2).sum()) for client_posterior in client_posteriors]
        scores.append(posterior.max(axis=1))
        hits.append(probability_right(posterior, axis=1))
        same_client, different_clients = pair_scores(posterior, ceil(_PAIRS / blocks), generator)
        alike.append(same_client)
        unlike.append(different_clients)
    return Success(
        tuple((correct / (setting.parameters * clients)).tolist()),
        area_under_curve(np.concatenate(alike), np.concatenate(unlike)),
        max_linked_reports(np.concatenate(scores), np.concatenate(hits), np.concatenate(sure)),
    )


def _owner_probabilities_by_watched(starts: Array, setting: LinkageSetting, generator: np.random.Generator) -> list[Array | None]:
    """Return :func:`_owner_probabilities` for each number of rounds that the observer has watched."""
    return [_owner_probabilities(starts, setting.uncertainty / sqrt(rounds), generator) for rounds in setting.watched]


def _owner_probabilities(starts: Array, uncertainty: float, generator: np.random.Generator) -> Array | None:
    """Return the probability (clients, clients) that an unnamed client's window (row) is that of a known client (column).

    A window is the time span of one client's uploads. From earlier rounds the observer has estimated when each client starts to upload,
    with normal errors of the standard deviation ``uncertainty``, in seconds. None if that is 0: then the observer knows all start times.
    """
    # Drawn even if unused, so that later draws do not depend on the uncertainty.
    expected = starts + uncertainty * generator.standard_normal(len(starts))
    if uncertainty == 0:
        return None
    log_densities = -(((starts[:, None] - expected) / uncertainty) ** 2) / 2
    densities = np.exp(log_densities - log_densities.max(axis=1, keepdims=True))  # each row's largest is 1: no row underflows to zeros
    return matching_probabilities(densities, 10 * PASSES).astype(np.float32)
