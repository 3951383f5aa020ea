"""Test the numbers that a mechanism states in its release against the reports that it sends.

Accountants rely on these numbers. Each is tested here, by experiments on whole reports or by computing it again. A test can contradict a
number, but cannot prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from math import ceil, exp, inf, log, log2, sqrt
from typing import TypeGuard

import numpy as np
from scipy import special, stats

from ldpfl.auditing.bounds import (
    FLOAT32,
    Bins,
    Counts,
    Floats,
    Mask,
    clopper_pearson,
    event_epsilon,
    mean_bound,
    mean_bound_empirical,
    wilson_limits,
)
from ldpfl.auditing.reports import ROWS_AT_ONCE, Outcomes, WholeReports, random_source
from ldpfl.mechanisms import Mechanism, guarantee_of, payload_bits
from ldpfl.mechanisms.base import record_rate_of
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, Release
from ldpfl.util.randomness import RandomSource, SecureSource

_ROUNDING = 1e-9  # relative amount by which a figure may exceed its bound

_CALLS, _WIDTH = 64, 256
"""Number of calls of few clients, and of their weights, if a weight is a trial."""

_ROW_CALLS = 160
"""Number of calls of few clients if a row is a trial."""

_DIFFERENT_CLIENTS = 3
_WIDTH_OF_ONE = 16
"""Number of weights of rows with one nonzero weight."""

_LEVELS = 32  # quantiles of each input's estimates that are edges of bins


@dataclass(frozen=True)
class ClaimResult:
    """The result of testing one number: ``figure`` must not exceed ``bound``."""

    name: str
    figure: float
    bound: float
    sentence: str

    @property
    def passed(self) -> bool:
        """Whether the test did not contradict the number. False if ``figure`` is NaN."""
        return self.figure <= self.bound + _ROUNDING * abs(self.bound)


Test = Callable[[float], ClaimResult]
"""A test by experiment. Its argument is the largest allowed probability that a sound mechanism fails it."""


def tests_by_experiment(mechanism: Mechanism, trials: int, seed: int | None) -> list[Test]:
    """Draw whole reports of ``mechanism``, and return the tests of these reports; none if they do not protect a client's values.

    Args:
        trials: number of reports for each input.
        seed: seed of the random bits; None for the operating system's source.
    """
    tests: list[Test] = []
    source = random_source(seed)
    for width in (1, 4):
        reports = WholeReports.with_width(mechanism, width, source)
        if reports is None:
            continue
        release = mechanism.release(reports.ranges)
        # Experiments replace a client's values, and a guarantee for records says nothing about that.
        if not release.protected or release.unit in ("record", "person"):
            continue
        tests += _tests_of_release(reports, release, reports.collect_outcomes(trials), f"{reports.ranges.dimension} weights")
        if release.units > 1 and not isinstance(release, GaussianRelease):
            tests += _tests_of_mixing(reports)
    return [*tests, *_tests_of_few_clients(mechanism, trials, source)] if tests else tests


def _tests_of_few_clients(mechanism: Mechanism, trials: int, source: RandomSource) -> Iterator[Test]:
    """Yield the tests of a client alone, as on a deployed node, of clients with different rows, and of a row with one nonzero weight.

    In all other experiments several clients hold the same row.
    """
    reports = WholeReports.with_width(mechanism, 4, source)
    if reports is None:
        return
    by_weight = guarantee_of(mechanism, reports.ranges).unit == "weight"
    if by_weight:
        reports = WholeReports.with_width(mechanism, _WIDTH, source) or reports
    for clients, name in ((1, "a client alone"), (_DIFFERENT_CLIENTS, "different clients")):
        rows, turned_rows = (reports.rows(clients, turned=turned) for turned in (False, True))  # (clients, d) each
        calls = _CALLS if by_weight else _ROW_CALLS
        alone, of_turned = (reports.estimates_of_calls(inputs, calls) for inputs in (rows, turned_rows))  # (calls, clients, d) each
        # All weights of the last client's row are 1 or -1. Multiplied by these, the estimates of all weights point the same way.
        projected = [_units(sent * rows[-1], by_weight) for sent in (alone, of_turned)]
        yield partial(_check_epsilon_of_clients, [sent[:, -1] for sent in projected], *_row_guarantee(reports), f"epsilon, {name}")
        if clients > 1:
            yield partial(_check_epsilon_of_clients, [sent[:, :-1] for sent in projected], 0.0, 0.0, "reports of other clients")
        # The same rows again, each in a call in which all clients hold it.
        alike = [reports.estimates_of_calls(np.repeat(row[None], ROWS_AT_ONCE, axis=0), calls=1)[0] for row in rows]
        together = np.stack(alike, axis=1)
        means = [sent * np.sign(rows) for sent in (alone, together)]
        squares = [(sent - rows) ** 2 for sent in (alone, together)]
        for figure, samples in (("mean estimate", means), ("squared error", squares)):
            yield partial(_check_same_mean, [_units(sample, by_weight).ravel() for sample in samples], f"{figure}, {name}")
    yield from _tests_of_one_nonzero_weight(mechanism, trials, source)


def _tests_of_one_nonzero_weight(mechanism: Mechanism, trials: int, source: RandomSource) -> Iterator[Test]:
    """Yield the test of a row in which a single weight is not at the center. The two inputs differ in this weight's sign."""
    reports = WholeReports.with_width(mechanism, _WIDTH_OF_ONE, source)
    if reports is not None:
        rows = np.zeros((min(trials, ROWS_AT_ONCE), reports.ranges.dimension))
        rows[:, 1] = 1.0
        calls = ceil(trials / len(rows))
        # Each report counts as a call of one client with one unit, the weight's estimate.
        sent = [reports.estimates_of_calls(sign * rows, calls)[:, :, 1].reshape(-1, 1, 1) for sign in (1, -1)]
        yield partial(_check_epsilon_of_clients, sent, *_row_guarantee(reports), "epsilon, one nonzero weight")


def _row_guarantee(reports: WholeReports) -> tuple[float, float]:
    """Return epsilon and delta of a weight if that is the unit, else of a client's row, which may change all of its coordinates."""
    guarantee = guarantee_of(reports.mechanism, reports.ranges)
    return guarantee.epsilon * (guarantee.units_per_round if guarantee.unit == "coordinate" else 1), guarantee.delta


def _units(values: Floats, by_weight: bool) -> Floats:
    """Return ``values`` (calls, clients, d) as (calls, clients, units): of each weight if that is the unit, else their mean."""
    return values if by_weight else values.mean(axis=2, keepdims=True)


def _check_epsilon_of_clients(sent: Sequence[Floats], claimed: float, delta: float, name: str, error: float) -> ClaimResult:
    """Check that two inputs cannot be distinguished better than the ``claimed`` epsilon allows.

    The inputs differ in the last client's row alone. ``sent`` has the estimates (calls, clients, units) for each input. Those of other
    clients must not depend on that row at all, so for them 0 is claimed.
    """
    quarter = len(sent[0]) // 4  # one quarter of the calls orders events, one chooses an event, and the others test it
    parts = [(values[:quarter].ravel(), values[quarter : 2 * quarter].ravel(), values[2 * quarter :].ravel()) for values in sent]
    bins = Bins.covering([values[0] for values in parts], _LEVELS)
    counts = [np.stack([bins.histogram(part) for part in values]) for values in parts]
    both_directions = permutations(counts, 2)
    lower = max(0.0, *(event_epsilon(first, second, test_row=2, delta=delta, error=error / 2) for first, second in both_directions))
    sentence = f"when one client's row changes, the best test found shows epsilon {lower:.4g} at least; claimed: {claimed:g}"
    return ClaimResult(name, lower, claimed, sentence)


def _check_same_mean(samples: Sequence[Floats], name: str, error: float) -> ClaimResult:
    """Test whether two samples have the same mean: from a few clients, and from clients that all hold the same row."""
    first, second = samples
    figure = abs(float(first.mean() - second.mean()))
    largest = float(max(np.abs(sample).max() for sample in samples))
    bounds = [mean_bound_empirical(sample.size, float(sample.var(ddof=1)), 2 * largest, error / 2) for sample in samples]
    bound = sum(bounds) + 8 * FLOAT32 * (1 + largest)  # the second term allows for rounding
    sentence = f"it differs by {figure:.3g} from that of clients that all hold one row, and chance explains up to {bound:.3g}"
    return ClaimResult(name, figure, bound, sentence)


def _tests_of_release(reports: WholeReports, release: Release, outcomes: Outcomes, size_name: str) -> Iterator[Test]:
    """Yield a test by experiment for each number that ``release`` states. ``size_name``, such as "4 weights", is for the tests' names."""
    if isinstance(release, GaussianRelease):
        yield lambda error: _check_mu(outcomes, release, size_name, error)
        distances = reports.distances()
        yield lambda error: _check_mu_of_noise(outcomes, distances, release, size_name, error)
        if release.alike:
            yield lambda error: _check_equal_noise(outcomes, size_name, error)
        return
    yield lambda error: _check_total_epsilon(outcomes, release, size_name, error)
    blanket = _claimed_blanket(release)
    if blanket is not None:
        yield lambda error: _check_blanket(outcomes.counts, blanket, f"blanket, {size_name}", error)
    if isinstance(release, BinaryRelease) and release.sampled == 1:
        yield lambda error: _check_bit_probabilities(reports, outcomes, release, size_name, error)
    if isinstance(release, BinaryRelease) and release.realised is not None and release.units == release.sampled == 1:
        realised = release.realised
        yield lambda error: _check_realised_epsilon(outcomes, realised, size_name, error)
    if isinstance(release, PureRelease) and release.signed and reports.ranges.dimension == 1:
        share = release.blanket or 0.0
        yield lambda error: _check_sign_errors(outcomes, share, error)


def _claimed_blanket(release: Release) -> float | None:
    """Return the blanket that is claimed for a whole report: the share that does not depend on the input. None if no blanket is claimed."""
    if isinstance(release, PureRelease):
        return None if release.blanket is None else float(release.blanket) ** release.units
    if isinstance(release, BinaryRelease):
        return (2 / (1 + exp(release.epsilon))) ** release.units
    return None


def claims_blanket(release: Release) -> TypeGuard[PureRelease]:
    """Whether the release states a blanket: a share of each unit that is the same for all inputs."""
    return isinstance(release, PureRelease) and release.blanket is not None


def check_unit_blanket(counts: Sequence[Counts], release: PureRelease, error: float) -> ClaimResult:
    """Test the claimed blanket of a unit, by the counts (3, B) of the unit's outcomes for each input."""
    return _check_blanket(counts, float(release.blanket or 0.0), "blanket of a unit", error)


def _check_blanket(counts: Sequence[Counts], claimed: float, name: str, error: float) -> ClaimResult:
    """Test the claimed blanket: the share of every report that does not depend on the input.

    The outcomes are divided among the inputs, each to an input under which it is rare. If every input gives at least ``claimed`` times one
    common law, the probabilities that the inputs give to their own outcomes sum to at least ``claimed``. An upper bound of this sum is
    computed. The outcomes are divided by other trials than those that are tested.
    """
    pairs = [(first, second) for first in range(len(counts)) for second in range(first)]
    # Row 0 of the counts divides the outcomes, row 1 chooses among the divisions, and row 2 tests the chosen one. A division is a list of
    # (counts of an input, mask of the outcomes that belong to it).
    smallest_guess = inf
    division = _divide_outcomes(counts, pairs[0])
    for inputs in (*pairs, tuple(range(len(counts)))):
        candidate = _divide_outcomes(counts, inputs)
        share = error / len(candidate)
        guess = sum(float(wilson_limits(trials[1][rare].sum(), int(trials[1].sum()), share)[1]) for trials, rare in candidate)
        if guess < smallest_guess:
            smallest_guess, division = guess, candidate
    level = 2 * error / len(division)  # only upper limits are used, which are wrong with half of this probability
    uppers = [clopper_pearson(int(trials[2][rare].sum()), int(trials[2].sum()), level)[1] for trials, rare in division]
    upper = min(1.0, sum(uppers))
    sentence = f"claimed: a share of {claimed:.4g} of each report is the same for all inputs; found: at most {upper:.4g}"
    return ClaimResult(name, claimed, upper, sentence)


def _divide_outcomes(counts: Sequence[Counts], inputs: Sequence[int]) -> list[tuple[Counts, Mask]]:
    """Return the counts of each of ``inputs``, and a mask (B,) of the outcomes that are rarer under it than under the others.

    Row 0 of the counts decides. Inputs under which no outcome is rarest are left out.
    """
    rarest = np.stack([(counts[index][0] + 0.5) / counts[index][0].sum() for index in inputs]).argmin(axis=0)
    return [(counts[index], rarest == place) for place, index in enumerate(inputs) if bool((rarest == place).any())]


def _check_total_epsilon(outcomes: Outcomes, release: Release, size_name: str, error: float) -> ClaimResult:
    """Test the claim that a whole report has the epsilon of one unit times the number of units. Compare it with a lower bound."""
    claimed = release.pure_epsilon * release.units
    # The pair of inputs is chosen by a guess from row 1 of the counts. Row 2 has other trials, so its bound is valid.
    first, second = max(
        permutations(outcomes.counts, 2), key=lambda pair: event_epsilon(pair[0], pair[1], test_row=1, delta=0.0, error=error)
    )
    lower = max(0.0, event_epsilon(first, second, test_row=2, delta=0.0, error=error))
    sentence = (
        f"claimed: {release.units} units at epsilon {release.pure_epsilon:g} for {size_name}; found: epsilon {lower:.4g} in all at least"
    )
    return ClaimResult(f"units and epsilon, {size_name}", lower, claimed, sentence)


def _check_realised_epsilon(outcomes: Outcomes, claimed: float, size_name: str, error: float) -> ClaimResult:
    """Test the stated realised epsilon against an upper bound of the privacy loss over all pairs of inputs and all outcomes."""
    upper = 0.0
    share = error / (2 * len(outcomes.counts) * outcomes.counts[0].shape[1])
    # Outcomes that never occur are left out: a bit has two values, and the code for other payloads is not one of them.
    occurring = np.flatnonzero(np.sum([input_counts[2] for input_counts in outcomes.counts], axis=0))
    for outcome in occurring:
        # Each of the two ends of an interval fails with probability ``share``.
        ends = [clopper_pearson(int(input_counts[2][outcome]), int(input_counts[2].sum()), 2 * share) for input_counts in outcomes.counts]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        upper = max(upper, log(high / low) if low > 0 else inf)
    sentence = f"claimed: the realised epsilon is {claimed:g}; found: at most {upper:.4g}"
    return ClaimResult(f"realised epsilon, {size_name}", claimed, upper, sentence)


def _check_bit_probabilities(
    reports: WholeReports, outcomes: Outcomes, release: BinaryRelease, size_name: str, error: float
) -> ClaimResult:
    """Test whether some bit on the wire is rarer, or more frequent, than randomised response at the stated epsilon allows.

    All tests of bits together fail with probability ``error``. ``size_name`` names the model that was tried, for the result.
    """
    smallest_allowed = 1 / (1 + exp(release.epsilon))
    error_of_bit = error / (len(outcomes.set_bit_counts) * outcomes.set_bit_counts[0].size)  # of each bit under each input
    bits = payload_bits(reports.mechanism, reports.ranges)
    padding = 8 * ceil(bits / 8) - bits  # number of bits that are always 0
    uppers = []  # for each input and bit, an upper limit of the probability of the bit's rarer value
    for ones, count in zip(outcomes.set_bit_counts, outcomes.report_counts, strict=True):
        limits = [[clopper_pearson(int(hits), count, error_of_bit)[1] for hits in (of_one, count - of_one)] for of_one in ones]
        uppers.append([min(of_one, of_zero) for of_one, of_zero in limits])
    worst = np.sort(np.min(np.array(uppers), axis=0))[padding:]  # without the padding: its bits are never 1, so they come first
    rarest = float(worst[0]) if worst.size else 1.0
    claim = f"claimed: a bit at epsilon {release.epsilon:g} has each value with probability {smallest_allowed:.4g} or more"
    return ClaimResult(f"probabilities of bits, {size_name}", smallest_allowed, rarest, f"{claim}; found: at most {rarest:.4g} for one bit")


def _check_sign_errors(outcomes: Outcomes, blanket: float, error: float) -> ClaimResult:
    """Test that a report of a value at an end of the range does not have the wrong sign more often than claimed.

    With the probability ``blanket`` a report does not depend on the value, and has the wrong sign half of the time. If signs were wrong
    more often, the lower bound that the accountant states for such reports would be too high. For each end, the bound of the measured
    frequency fails with probability ``error``.
    """
    lower = 0.0
    for end in (1.0, -1.0):
        statistic = outcomes.statistics[outcomes.names.index(f"all at {end:+g}")]
        lower = max(lower, clopper_pearson(int((end * statistic < 0).sum()), statistic.size, error)[0])
    claim = f"claimed: a report of a value at an end of the range has the wrong sign with probability {blanket / 2:.4g} at most"
    return ClaimResult("sign of a report", lower, blanket / 2, f"{claim}; found: at least {lower:.4g}")


def _check_mu(outcomes: Outcomes, release: GaussianRelease, size_name: str, error: float) -> ClaimResult:
    """Test mu by the pair of inputs that the statistic distinguishes best, and the threshold half-way between their medians.

    Every second trial chooses the pair, and the others test it.
    """
    claimed = release.mu * sqrt(release.units)
    best, best_test = -inf, (0, 1, 0.0)
    for first, high in enumerate(outcomes.statistics):
        for second, low in enumerate(outcomes.statistics):
            if first != second:
                threshold = float(np.median(high[::2]) + np.median(low[::2])) / 2
                lower_bound = _mu_lower_bound(high[::2], low[::2], threshold, error)
                if lower_bound > best:
                    best, best_test = lower_bound, (first, second, threshold)
    first, second, middle = best_test
    lower = max(0.0, _mu_lower_bound(outcomes.statistics[first][1::2], outcomes.statistics[second][1::2], middle, error))
    sentence = f"claimed: mu {claimed:g} for a report of {size_name}; found: at least {lower:.4g}"
    return ClaimResult(f"mu, {size_name}", lower, claimed, sentence)


def _check_mu_of_noise(
    outcomes: Outcomes, distances: Sequence[Floats], release: GaussianRelease, size_name: str, error: float
) -> ClaimResult:
    """Test mu by the distance of two mean estimates, over the standard deviation of the noise, which is normal.

    This finds smaller faults than :func:`_check_mu`, which holds for any noise. The variance of normal noise follows a chi-squared law. If
    all inputs have the same noise, their samples are joined, else the two ends of the range are used, and the noisier one counts.
    """
    claimed = release.mu * sqrt(release.units)
    statistics = (
        outcomes.statistics if release.alike else [outcomes.statistics[outcomes.names.index(f"all at {end}")] for end in ("+1", "-1")]
    )
    freedoms = np.array([statistic.size - 1 for statistic in statistics])
    squares = np.array([statistic.var(ddof=1) for statistic in statistics]) * freedoms
    if release.alike:
        freedoms, squares = freedoms.sum(keepdims=True), squares.sum(keepdims=True)
    variance = float((squares / stats.chi2.ppf(error / (2 * freedoms.size), freedoms)).max())
    share = error / (2 * len(distances))
    distance = max(
        abs(float(differences.mean()))
        - mean_bound_empirical(differences.size, float(differences.var(ddof=1)), float(np.ptp(differences)), share)
        for differences in distances
    )
    lower = max(0.0, distance) / sqrt(variance) if variance > 0 else inf
    sentence = f"claimed: mu {claimed:g} for a report of {size_name}; found by the size of its noise: at least {lower:.4g}"
    return ClaimResult(f"mu of the noise, {size_name}", lower, claimed, sentence)


def _mu_lower_bound(high: Floats, low: Floats, threshold: float, error: float) -> float:
    """Return a lower bound of mu: the distance of two normal laws that exceed a threshold as often as these samples do."""
    first = clopper_pearson(int((high > threshold).sum()), high.size, error)[0]
    second = clopper_pearson(int((low > threshold).sum()), low.size, error)[1]
    return float(special.ndtri(first) - special.ndtri(second)) if first > 0 and second < 1 else -inf


def mu_of_perfect_trials(trials: int, error: float) -> float:
    """Return the lower bound of mu that :func:`_check_mu` finds if each of ``trials`` reports of an input shows its input."""
    return _mu_lower_bound(np.ones(trials // 2), np.zeros(trials // 2), 0.5, error)  # the other half chooses the test


def _check_equal_noise(outcomes: Outcomes, size_name: str, error: float) -> ClaimResult:
    """Test whether the noise has the same variance for all inputs, as it must if its law is the same.

    The confidence interval of each input's variance follows from the chi-squared law. Two intervals that do not overlap fail the test.
    """
    share = error / (2 * len(outcomes.statistics))
    ends = []
    for statistic in outcomes.statistics:
        freedom, squares = statistic.size - 1, float(statistic.var(ddof=1)) * (statistic.size - 1)
        ends.append((squares / float(stats.chi2.isf(share, freedom)), squares / float(stats.chi2.ppf(share, freedom))))
    largest, smallest = max(low for low, _ in ends), min(high for _, high in ends)
    factor = largest / smallest if smallest > 0 else inf  # without noise, nothing is alike
    sentence = f"claimed: the same noise for all inputs; found: its variance differs by a factor of at least {factor:.4g}"
    return ClaimResult(f"noise alike, {size_name}", factor, 1.0, sentence)


def _tests_of_mixing(reports: WholeReports) -> Iterator[Test]:
    """Yield the tests of a pool of mixed reports, if the pool still has single reports."""
    mixed = reports.mixed_estimates()
    if mixed is not None:
        yield lambda error: _check_client_order(mixed, error)
        yield lambda error: _check_unit_correlation(mixed, error)


def _check_client_order(mixed: Floats, error: float) -> ClaimResult:
    """Test whether mixed reports still have the order of the clients: the first half held one end of the range, the rest the other end."""
    half = len(mixed) // 2
    width = np.ptp(mixed, axis=0)
    differences = np.abs(mixed[:half].mean(axis=0) - mixed.mean(axis=0)) / np.maximum(width, 1e-300)
    bound = sqrt(log(2 * mixed.shape[1] / error) / (2 * half))  # Hoeffding 1963, section 6: drawn without replacement
    largest = float(differences.max())
    sentence = f"mixed reports of the first and the second half of clients differ by {largest:.3g}, and chance explains up to {bound:.3g}"
    return ClaimResult("order in the pool", largest, bound, f"{sentence}; a larger difference shows who sent what")


def _check_unit_correlation(mixed: Floats, error: float) -> ClaimResult:
    """Test whether the units of one client's report stay together when reports are mixed.

    All values of a client lie at the same end of their range in this test, so units that stay together are correlated.
    """
    clients, units = mixed.shape
    deviation = mixed.std(axis=0)
    standard = (mixed - mixed.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    products = np.abs(np.triu(standard.T @ standard, k=1)) / sqrt(clients)
    largest = float(np.abs(standard).max()) ** 2
    bound = sqrt(clients) * mean_bound(clients, variance=1.0, largest=largest, error=error / max(1, units * (units - 1) // 2))
    figure = float(products.max()) if units > 1 else 0.0
    sentence = f"two units of the mixed reports are correlated by {figure:.3g} standard errors, and chance explains up to {bound:.3g}"
    return ClaimResult("units apart in the pool", figure, bound, f"{sentence}; a larger one shows which units one client sent")


def results_by_computation(mechanism: Mechanism) -> Iterator[ClaimResult]:
    """Compute numbers that the release states once more, without sampling, and yield the results.

    The release must not state more separate units than a report has messages that are mixed, nor a smaller probability of a record to take
    part than it has. Either would make epsilon too small.
    """
    for width in (1, 4, 24):
        reports = WholeReports.with_width(mechanism, width, SecureSource())
        if reports is None:
            continue
        release = mechanism.release(reports.ranges)
        size_name = f"{reports.ranges.dimension} weights"
        messages = mechanism.units(reports.ranges).count
        if release.protected and release.units > 1:
            sentence = f"claimed: {release.units} separate units for {size_name}; found: a report is mixed as {messages} messages"
            yield ClaimResult(f"units apart, {size_name}", float(release.units), float(messages), sentence)
        if isinstance(release, BinaryRelease):
            yield from _compare_bit_counts(mechanism, release, reports, size_name)
        if release.unit in ("record", "person"):
            rate = release.rate if isinstance(release, GaussianRelease) else 1.0
            sentence = f"claimed: a record takes part with probability {rate:g}; found: {record_rate_of(mechanism):g}"
            yield ClaimResult("rate of records", record_rate_of(mechanism), rate, sentence)
            return  # the rate does not depend on the number of weights


def _compare_bit_counts(mechanism: Mechanism, release: BinaryRelease, reports: WholeReports, size_name: str) -> Iterator[ClaimResult]:
    """Compare the number of bits on the wire, and of coordinates that a bit may be about, with those that the release states."""
    bits, ranges = payload_bits(mechanism, reports.ranges), reports.ranges
    expected_bits = release.units * (1 + (ceil(log2(release.sampled)) if release.sampled > 1 else 0))
    sentence = (
        f"claimed: {release.units} bits, each about one of {release.sampled} coordinates, so {expected_bits} bits sent; found: {bits}"
    )
    yield ClaimResult(f"one bit a unit, {size_name}", float(bits), float(expected_bits), sentence)
    coordinates = mechanism.units(ranges).dimension
    sentence = f"claimed: a bit is about one of {release.sampled} coordinates; found: {coordinates} coordinates"
    yield ClaimResult(f"coordinates, {size_name}", float(release.sampled), float(max(1, coordinates)), sentence)
