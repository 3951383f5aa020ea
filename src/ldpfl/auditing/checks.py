"""The checks of an audit, and the share of the error rate that each check gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, isinf, log, sqrt

import numpy as np
from scipy import stats

from ldpfl.auditing.bounds import (
    Bins,
    Correlation,
    Counts,
    Floats,
    Mask,
    clopper_pearson,
    event_epsilon,
    mean_bound,
    mean_bound_empirical,
    most_correlated_lag,
    most_correlated_pair,
)
from ldpfl.auditing.claims import (
    ClaimResult,
    check_unit_blanket,
    claims_blanket,
    mu_of_perfect_trials,
    results_by_computation,
    tests_by_experiment,
)
from ldpfl.auditing.mechanism_trials import CENTERS, RADII, STREAM_KEY, Bench, Sample, Tally, histograms
from ldpfl.auditing.report_bits import PAIRS as BIT_PAIRS, BitBench, epsilon_of_bits
from ldpfl.auditing.reports import FAR
from ldpfl.errors import ConfigError
from ldpfl.mechanisms import Mechanism, guarantee_of, payload_bits
from ldpfl.privacy import GaussianRelease
from ldpfl.util.randomness import COORDINATE_BLOCK, Purpose, RandomSource, SecureSource, SeededStreams

PAIRS = ((1.0, -1.0), (10.0, -10.0), (FAR, -1.0), (0.0, 1.0))
"""Pairs of inputs that an observer tries to distinguish, as distances from the center in radii."""

INSIDE = (-1.0, -0.5, 0.0, 0.25, 1.0)
OUTSIDE = (-10.0, 10.0, FAR)
"""Inputs whose estimates are tested for bias and variance, as distances from the center in radii: in the range, and beyond it."""

_BLOCK = 1 << 19
"""Largest number of values in one call of ``encode``."""

_WIDE_ROWS = 8
_WIDE = 3 * COORDINATE_BLOCK // 2
"""Number of weights of a client, if there are enough trials. It exceeds a mechanism's block, so that reused random bits are found."""

_TALL_ROWS = 256
_VECTOR_ROWS = 1 << 13
_BIT_ROWS = 1 << 10
_NEIGHBOUR_DRAWS = 6
"""Number of calls of ``encode`` for each of two rows: one orders events, one chooses an event, the others test it."""
_VECTOR_WIDTH = 4

_LEVELS = 512
"""Number of quantiles of each input's estimates that are edges of bins. Values with more than 1 / 512 of the mass get their own bin."""

_PILOT = 1 << 15
"""Number of trials of each input from which the quantiles are computed."""

_NO_NOISE = 1e-12
"""Standard deviation of estimates below which they differ by rounding only."""

_FAR = 3.0
"""Number of standard deviations to which noise is cut before the noise of two weights is correlated."""

_MULTIPLES = (-3.5, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 3.5)
_NORMAL_SLACK = 0.02
"""Multiples of a standard deviation at which noise is compared with the normal law, and how far rounding may move it."""

_COHORT = 10**6
"""Number of clients of the mean whose stated noise is compared with that of one client. The mean's noise is then small."""

_MOST_TOO_SMALL, _MOST_TOO_LARGE = 2.0, 16.0
"""Factor by which the stated variance of a mean may be wrong, since a formula may be exact for many clients only. Factor by which the
square of ``largest_std`` may exceed the largest variance found: the largest noise may belong to values that were not tried."""

_CLOSED_FORM = 1e-6
"""Relative rounding error of a variance in float32."""

_AGREEMENT = 2.0**-18
"""Largest rounding error of a mean in float32, relative to the largest estimate."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: short name of the check.
        figure: the measured value.
        bound: largest allowed value of ``figure``.
        error_rate: probability that a sound mechanism fails this check; 0 if the check is deterministic.
        passed: whether the check passed; ``None`` if the mechanism claims no privacy, so that it cannot fail.
        sentence: the result as a sentence.
    """

    name: str
    figure: float
    bound: float
    error_rate: float
    passed: bool | None
    sentence: str


def _bit_bench_clients(trials: int) -> int:
    """Return the number of clients whose bits on the wire are counted."""
    return max(1000, min(20_000, trials // 50))


def _whole_reports(trials: int) -> int:
    """Return the number of whole reports of each input that test the stated numbers."""
    return max(500, min(10_000, trials // 20))


def _source(seed: int | None, rows: int) -> RandomSource:
    """Return the random bits for ``rows`` clients: the operating system's if ``seed`` is None."""
    if seed is None:
        return SecureSource()
    return SeededStreams.of(range(rows), seed, Purpose.MECHANISM, STREAM_KEY, 0)


def _position_name(position: float) -> str:
    """Return the name of an input, such as "c+10r" for ten radii above the center."""
    if position == 0:
        return "c"
    factor = "" if abs(position) == 1 else f"{abs(position):g}"
    return f"c{'+' if position > 0 else '-'}{factor}r"


class Examination:
    """One audit: the benches that run the mechanism, the statistics of their trials, and the checks of these statistics."""

    def __init__(self, mechanism: Mechanism, trials: int, seed: int | None, error_rate: float) -> None:
        """Build the benches, which run the mechanism, and share the ``error_rate`` equally among all checks.

        Half of the ``trials`` choose the events that an observer would look for, and the other half tests them.
        """
        self.mechanism, self.trials_per_half = mechanism, ceil(trials / 2)
        # For facts that do not depend on the number of clients and weights.
        self.probe = probe = Bench(mechanism, 1, _VECTOR_WIDTH, SecureSource())
        guarantee = guarantee_of(mechanism, probe.ranges)
        self.epsilon, self.delta = guarantee.epsilon, guarantee.delta
        # Where units are mixtures of weights, a trial replaces a client's whole row, which may change all units.
        self.epsilon_of_trial = guarantee.epsilon * (guarantee.units_per_round if guarantee.unit == "coordinate" else 1)
        # A mechanism that claims no privacy need not clip, so it is not tested with inputs beyond the range.
        self.positions = (*INSIDE, *(() if isinf(self.epsilon) else OUTSIDE))
        self.release = mechanism.release(probe.ranges)
        if isinstance(self.release, GaussianRelease) and mechanism.properties.delta == 0:  # no epsilon would be finite, so none tested
            raise ConfigError(
                f"{mechanism.name} states a GaussianRelease, but no delta, so no epsilon can be tested: "
                "let its property `properties` return a Properties with a delta above 0, such as Properties(delta=1e-5)"
            )
        self._reports = _whole_reports(trials)
        self.claims = tests_by_experiment(mechanism, self._reports, seed)
        is_normal = isinstance(self.release, GaussianRelease)  # its noise must be independent in all weights
        self.noise_is_fresh_in_weights = probe.by_weight or is_normal
        chance_checks = len(PAIRS) + 2 * len(self.positions)  # privacy loss; bias and variance
        chance_checks += 2 + self.noise_is_fresh_in_weights + 2 * is_normal  # noise of clients, calls, weights; its directions and law
        chance_checks += 3 if probe.by_weight else 2  # the lag and two checks of each weight's bits; two of neighbouring rows
        chance_checks += len(BIT_PAIRS) + len(self.claims) + claims_blanket(self.release)  # bits on the wire; stated numbers
        self.error_per_check = error_rate / chance_checks
        self.bit_bench = BitBench(mechanism, _bit_bench_clients(trials), _source(seed, _BIT_ROWS), STREAM_KEY)
        if probe.by_weight:  # a weight is a trial; otherwise a client's whole row is one
            self._source = _source(seed, _TALL_ROWS)
            self.blocks_per_half = ceil(self.trials_per_half / _BLOCK)
            self.bench, self.tall_bench = self._make_wide_bench(), self._make_tall_bench()
        else:
            self.blocks_per_half = ceil(self.trials_per_half / _VECTOR_ROWS)
            rows = ceil(self.trials_per_half / self.blocks_per_half)
            self.bench = self.tall_bench = Bench(mechanism, rows, _VECTOR_WIDTH, _source(seed, rows))
        self.tallies = {position: Tally(self.bench.expected(position)) for position in (*INSIDE, *OUTSIDE)}

    def _make_wide_bench(self) -> Bench:
        """Return the bench of few clients with many weights each, which finds bits that are reused within a client."""
        values = ceil(self.trials_per_half / self.blocks_per_half)
        return self._make_bench(max(2, min(_WIDE_ROWS, values // _WIDE)), values)

    def _make_tall_bench(self) -> Bench:
        """Return the bench of many clients with few weights each, which finds noise that clients share."""
        values = min(self.trials_per_half, _BLOCK)
        return self._make_bench(max(2, min(_TALL_ROWS, values // _TALL_ROWS)), values)

    def _make_bench(self, rows: int, values: int) -> Bench:
        """Return a bench of ``rows`` clients that have some ``values`` weights together."""
        return Bench(self.mechanism, rows, ceil(values / (rows * len(RADII))), self._source)

    @property
    def trials(self) -> int:
        """Number of randomised units for each input. Half of them choose the events that the other half tests."""
        return 2 * self.blocks_per_half * self.bench.trials * (self.bench.groups if self.bench.by_weight else 1)

    @cached_property
    def epsilon_checks(self) -> tuple[Check, ...]:
        """Checks of the privacy loss. They draw all samples, on which the checks of bias and variance rely, so they come first."""
        return tuple(self._epsilon_checks())

    @property
    def epsilon_findable(self) -> float:
        """Largest epsilon of a unit that the checks could show, if two inputs had different outcomes in all trials."""
        rows = self.bit_bench.clients
        # One input sets every bit in all reports, and the other input sets none.
        every_bit = np.full(8 * ceil(payload_bits(self.mechanism, self.bit_bench.ranges) / 8), float(rows))
        found = epsilon_of_bits(every_bit, 0 * every_bit, rows, self.delta, self.error_per_check)
        if self.epsilon_of_trial != self.epsilon:  # only bits are about one unit each
            return found
        # Number of groups, and of trials that test an event: of the checks of the privacy loss, and of neighbouring rows.
        sizes = [(self.bench.groups, self.blocks_per_half * self.bench.trials)]
        if not self.bench.by_weight:
            sizes.append((1, (_NEIGHBOUR_DRAWS - 2) * self.bench.rows))
        for groups, trials in sizes:
            # All trials of one input have the outcome 0, and all of the other the outcome 1.
            outcomes = np.broadcast_to(trials * np.eye(2, dtype=np.int64)[:, None, None], (2, 3, groups, 2))
            found = max(found, self._epsilon_lower_bound({0.0: outcomes[0], 1.0: outcomes[1]}, (0.0, 1.0)))
        return found

    @property
    def mu_findable(self) -> float | None:
        """Largest mu that the checks could show; None unless the release is Gaussian and protects a client."""
        is_tested = isinstance(self.release, GaussianRelease) and bool(self.claims)
        return mu_of_perfect_trials(self._reports, self.error_per_check) if is_tested else None

    def checks(self) -> tuple[Check, ...]:
        """Run all checks, and return their results."""
        # The checks run in this order, in which they draw random bits, so that a seed gives the same results.
        privacy_loss = self.epsilon_checks
        estimates = (*self._bias_checks(), *self._variance_checks(), *self._independence_checks())
        stated_numbers = tuple(self._claim_checks())
        bits = tuple(self._bit_checks())
        deterministic = (self._agreement_check(), *self._mean_noise_checks(), *self._wire_checks(), *self._input_checks())
        return (*privacy_loss, *stated_numbers, *bits, *estimates, *deterministic)

    # --- privacy ----------------------------------------------------------------------------------------------------

    def _epsilon_checks(self) -> Iterator[Check]:
        """Yield a check of the privacy loss of one trial for each of ``PAIRS`` of inputs, such as lowest and highest value."""
        counts = self.counts
        for first, second in PAIRS:
            lower = self._epsilon_lower_bound(counts, (first, second))
            pair = f"{_position_name(first)} against {_position_name(second)}"
            if isinf(self.epsilon):
                passed, sentence = None, f"nothing is protected: {pair} can be distinguished, which costs epsilon {lower:.4g} at least"
            else:
                passed = lower <= self.epsilon_of_trial
                claim = "no more than" if passed else "more than"
                shown = f"the best test found for {pair} shows that epsilon is at least {lower:.4g}"
                sentence = f"{shown}, {claim} the claimed {self.epsilon_of_trial:g}"
            yield Check(f"epsilon, {pair}", lower, self.epsilon_of_trial, self.error_per_check, passed, sentence)

    def _claim_checks(self) -> Iterator[Check]:
        """Yield a check of each number of the release that accountants use. It is tested by experiments, or computed again."""
        if claims_blanket(self.release):
            counts = [position_counts.sum(axis=1) for position_counts in self.counts.values()]
            yield self._claim_check(check_unit_blanket(counts, self.release, self.error_per_check), self.error_per_check)
        for test in self.claims:
            yield self._claim_check(test(self.error_per_check), self.error_per_check)
        for result in results_by_computation(self.mechanism):
            yield self._claim_check(result, error=0.0)

    def _claim_check(self, result: ClaimResult, error: float) -> Check:
        """Return the check of a stated number; ``error`` is the error rate that its test was given."""
        return Check(result.name, result.figure, result.bound, error, result.passed, result.sentence)

    @cached_property
    def counts(self) -> dict[float, Counts]:
        """Histograms of all samples, as :meth:`_draw_and_count` returns them."""
        return self._draw_and_count()

    def _draw_and_count(self) -> dict[float, Counts]:
        """Draw all samples, and return (3, G, B) counts for each position: for ordering, choosing and testing events.

        An event is a set of bins of the evidence. G is the number of groups, B the number of bins. Ordering and choosing share the first
        half of the trials; testing has the second.
        """
        samples = self._draw_samples()
        # The first samples fix the bins. They belong to the first half, so the half that tests is independent of the bins.
        bins = Bins.covering([sample.evidence[:_PILOT].ravel() for sample in samples.values()], _LEVELS)
        counts = {position: np.zeros((3, self.bench.groups, bins.count), dtype=np.int64) for position in samples}
        for block in range(2 * self.blocks_per_half):
            for position, sample in (samples if block == 0 else self._draw_samples()).items():
                if block < self.blocks_per_half:
                    counts[position][0] += histograms(bins, sample.evidence[::2])
                    counts[position][1] += histograms(bins, sample.evidence[1::2])
                else:
                    counts[position][2] += histograms(bins, sample.evidence)
        return counts

    def _draw_samples(self) -> dict[float, Sample]:
        """Draw one sample at each position, and add it to the position's tally."""
        samples = {position: self.bench.draw(position) for position in self.tallies}
        for position, sample in samples.items():
            self.tallies[position].add(sample)
        return samples

    def _epsilon_lower_bound(self, counts: dict[float, Counts], pair: tuple[float, float]) -> float:
        """Return the largest lower bound of epsilon for a ``pair`` of inputs, over both directions, all groups, and all groups together.

        ``counts`` are (3, G, B) for each input, as :meth:`_draw_and_count` returns them.
        """
        groups = counts[pair[0]].shape[1]
        error = self.error_per_check / (2 * (groups + (groups > 1)))  # two directions; each group, and all groups if there are several
        best = 0.0
        for first, second in (pair, pair[::-1]):
            for first_counts, second_counts in zip(_with_total(counts[first]), _with_total(counts[second]), strict=True):
                best = max(best, event_epsilon(first_counts, second_counts, test_row=2, delta=self.delta, error=error))
        return best

    # --- what bytes are -----------------------------------------------------------------------------------------------

    def _bit_checks(self) -> Iterator[Check]:
        """Yield the checks of single bits on the wire, and of noise that two weights share."""
        clients, first = self.bit_bench.clients, self.bit_bench.set_bit_counts("first")
        for pair in BIT_PAIRS:
            second = self.bit_bench.set_bit_counts(pair)
            lower = epsilon_of_bits(first, second, clients, self.delta, self.error_per_check)
            yield self._epsilon_check(f"epsilon of bits, {pair}", lower, self.epsilon, f"single bits of the payload ({pair}) show")
        if self.bench.by_weight:
            yield self._weight_bias_check()
            yield self._other_weights_check(first, second)  # the two inputs of the last pair differ in one weight only
        else:
            yield from self._neighbour_checks()
        if self.noise_is_fresh_in_weights:
            noise = self.bit_bench.noise()
            yield self._shared_noise_check(noise)
            if isinstance(self.release, GaussianRelease):
                yield self._direction_check(noise)
                yield self._normal_check(noise)

    def _weight_bias_check(self) -> Check:
        """Check the mean estimate of each weight where weights are unequal, so that a bit about the wrong weight shows."""
        figures, bounds = self.bit_bench.mean_deviations(self.error_per_check)
        return self._worst_check("bias, unequal weights", figures, bounds, "the mean estimate of a weight differs from it by", "radii")

    def _other_weights_check(self, first: Floats, second: Floats) -> Check:
        """Check that changing one weight changes no bits of other weights.

        ``first`` and ``second`` count the set bits of two inputs that differ in one weight. The bits of that weight may differ. Which bits
        these are is not known, so as many bits as a weight has are left out, those that differ most.
        """
        length, clients = min(first.size, second.size), self.bit_bench.clients
        allowed = ceil(payload_bits(self.mechanism, self.bit_bench.ranges) / self.bit_bench.ranges.dimension)
        differences = np.sort(np.abs(first[:length] - second[:length]) / clients)
        figure = float(differences[: length - allowed].max(initial=0.0))
        bound = sqrt(log(2 * length / self.error_per_check) / clients)  # Hoeffding 1963, for a difference of two means
        sentence = (
            f"changing one weight changes the frequency of other weights' bits by {figure:.3g}, and chance explains up to {bound:.3g}"
        )
        return Check("bits of other weights", figure, bound, self.error_per_check, figure <= bound, sentence)

    def _direction_check(self, noise: Floats) -> Check:
        """Check that normal noise (K, d) has the stated variance in each weight, in differences of neighbouring weights and in sums.

        Noise that weights share would be larger in some directions, and missing in others.
        """
        standard = noise / np.sqrt(self.bit_bench.stated_variance())
        signs = np.sign(self.bit_bench.inputs["first"])
        sums = standard @ np.stack([np.ones_like(signs), signs], axis=1) / np.sqrt(signs.size)
        projections = np.concatenate([standard, np.diff(standard, axis=1) / np.sqrt(2), sums], axis=1)
        variances, freedom = projections.var(axis=0, ddof=1), len(noise) - 1
        # The variance of normal noise follows a chi-squared law. Each of its two tails gets half of the error rate.
        share = self.error_per_check / (2 * variances.size)
        largest, smallest = stats.chi2.isf(share, freedom) / freedom, stats.chi2.ppf(share, freedom) / freedom
        excess = np.maximum(variances / largest, smallest / np.maximum(variances, 1e-300))
        figure = float(excess.max())  # NaN if any is
        sentence = f"the noise of a weight, a sum or a difference of weights is off by {figure:.3g} times what chance explains"
        return Check("noise of sums and differences", figure, 1.0, self.error_per_check, figure <= 1, sentence)

    def _normal_check(self, noise: Floats) -> Check:
        """Check how often normal noise (K, d) exceeds multiples of its stated standard deviation. Cut noise fails, for example."""
        clients = len(noise)
        # The noise lacks its mean over clients, which makes its variance smaller by 1 / clients.
        standard = np.sort((noise * sqrt(clients / (clients - 1)) / np.sqrt(self.bit_bench.stated_variance())).ravel())
        figure = 0.0
        for multiple in _MULTIPLES:
            hits = standard.size - int(np.searchsorted(standard, multiple, side="right"))
            low, high = clopper_pearson(hits, standard.size, self.error_per_check / len(_MULTIPLES))
            most, least = (float(stats.norm.sf(multiple + slack)) for slack in (-_NORMAL_SLACK, _NORMAL_SLACK))
            figure = max(figure, low / most, least / high)
        sentence = f"how often noise exceeds multiples of its standard deviation is off by {figure:.3g} times what chance explains"
        return Check("normal noise", figure, 1.0, self.error_per_check, figure <= 1, sentence)

    def _shared_noise_check(self, noise: Floats) -> Check:
        """Check that no two weights have correlated noise (K, d)."""
        deviation = noise.std(axis=0)
        noisy = deviation > _NO_NOISE
        # A mechanism may send nothing but 0 most of the time. A weight without any other report is then no fault, if such weights are
        # likely: d (1 - rate)^K of them are expected.
        rate = float((noise != np.median(noise, axis=0)).mean())
        may_be_chance = noisy.size * (1 - rate) ** len(noise) > self.error_per_check
        if not noisy.all() and noisy.any() and may_be_chance:
            noise, deviation = noise[:, noisy], deviation[noisy]
        elif not noisy.all():
            return Check(
                "noise of each weight",
                figure=0.0,
                bound=0.0,
                error_rate=self.error_per_check,
                passed=None if isinf(self.epsilon) else False,
                sentence="a weight has no noise, expected noise in each",
            )
        # Rare large noise would loosen the bound so far that not even equal noise of two weights exceeded it.
        bounded = np.clip(noise / deviation, -_FAR, _FAR)
        bounded -= bounded.mean(axis=0)
        correlation = most_correlated_pair((bounded / bounded.std(axis=0)).T, None, self.error_per_check)
        return self._correlation_check("noise of each weight", correlation, "the noise of two weights")

    def _neighbour_checks(self) -> Iterator[Check]:
        """Check how well a row can be distinguished from a row that differs from it in the sign of one weight, by two projections.

        The second projection is the best one (Fisher 1936): it cancels noise that weights share.
        """
        of_row, of_neighbour = (
            [self.bench.draw_neighbours(turned=turned) for _ in range(_NEIGHBOUR_DRAWS)] for turned in (False, True)
        )  # (n, d) for each draw
        covariance = np.atleast_2d(np.cov(of_row[0].T))
        first_weight = np.eye(len(covariance))[0]  # the direction in which the two rows differ
        regular = covariance + (1e-9 * np.trace(covariance) + 1e-300) * np.eye(len(covariance))
        best = np.linalg.solve(regular, first_weight) if np.isfinite(regular).all() else first_weight
        for name, direction in (("one sign turned", self.bench.neighbour_direction), ("one sign turned, without shared noise", best)):
            yield self._neighbour_check(name, [[drawn @ direction for drawn in draws] for draws in (of_row, of_neighbour)])

    def _neighbour_check(self, name: str, projections: list[list[Floats]]) -> Check:
        """Check how well the ``projections`` of rows can be distinguished from those of their neighbours: (n,) for each draw of either."""
        bins = Bins.covering([draws[0] for draws in projections], _LEVELS)
        counts = {}
        for turned, (orders, chooses, *test) in enumerate(projections):  # 0 for the row and 1 for its neighbour stand for positions
            # The first draw orders events, the second chooses an event, and the others test it.
            counts[float(turned)] = np.stack([bins.histogram(part)[None] for part in (orders, chooses, np.concatenate(test))])
        lower = self._epsilon_lower_bound(counts, (0.0, 1.0))
        shown = "comparing a row with a copy in which one sign is changed shows"
        return self._epsilon_check(f"epsilon, {name}", lower, self.epsilon_of_trial, shown)

    def _epsilon_check(self, name: str, lower: float, claimed: float, shown: str) -> Check:
        """Return the check that a lower bound of epsilon is not above the claimed epsilon; ``shown`` begins the sentence."""
        passed = None if isinf(claimed) else lower <= claimed
        claim = "nothing is protected" if passed is None else f"claimed is epsilon {claimed:g}"
        return Check(name, lower, claimed, self.error_per_check, passed, f"{claim}; {shown} that it is at least {lower:.4g}")

    # --- what the estimates are ---------------------------------------------------------------------------------------

    def _bias_checks(self) -> Iterator[Check]:
        """Yield a check of the mean estimate at each position."""
        for position in self.positions:
            tally = self.tallies[position]
            figures, bounds = np.abs(tally.mean_deviation), self._bias_bounds(position, tally)
            yield self._worst_group_check(
                f"bias at {_position_name(position)}", figures, bounds, "the mean estimate differs from the input by", "radii"
            )

    def _bias_bounds(self, position: float, tally: Tally) -> Floats:
        """Return how far (G,) chance can move the mean estimate of an unbiased mechanism from its expectation at ``position``."""
        largest, error = self._largest(position, "largest_deviation"), self.error_per_check / self.bench.groups
        if self.bench.by_weight:
            stated = self.bench.expected_squared_errors(position)
            bounds = [mean_bound(tally.count, variance, distance, error) for variance, distance in zip(stated, largest, strict=True)]
        else:  # the closed form gives no variance of a row's projection, since the errors of its weights may depend on each other
            # Twice the largest deviation bounds the width of the range of values.
            variances_and_widths = zip(tally.variance, 2 * largest, strict=True)
            bounds = [mean_bound_empirical(tally.count, variance, width, error) for variance, width in variances_and_widths]
        return np.array(bounds) + self.bench.rounding(np.abs(tally.expected) + tally.largest_deviation)

    def _variance_checks(self) -> Iterator[Check]:
        """Yield a check of the mean squared error at each position against the mechanism's closed form."""
        for position in self.positions:
            tally, expected = self.tallies[position], self.bench.expected_squared_errors(position)
            largest, error = self._largest(position, "largest_squared_error"), self.error_per_check / self.bench.groups
            variances_and_widths = zip(tally.squared_error_variance, largest, strict=True)
            bounds = [mean_bound_empirical(tally.count, variance, width, error) for variance, width in variances_and_widths]
            rounding = self.bench.rounding(np.abs(tally.expected) + np.sqrt(largest))
            # An estimate that is rounded by r has a squared error that differs by at most 2 r times its error, plus r^2.
            slack = 2 * rounding * np.sqrt(largest) + rounding**2 + _CLOSED_FORM * expected
            figures = np.abs(tally.mean_squared_error - expected)
            name = f"variance at {_position_name(position)}"
            yield self._worst_group_check(name, figures, bounds + slack, "the variance differs from the stated formula by", "squared radii")

    def _largest(self, position: float, figure: str) -> Floats:
        """Return for each group the largest value (G,) of the tallies' attribute ``figure``, at ``position`` and inside the range.

        A rare large value may have occurred only at another position, or in another layer. So all are compared, relative to the standard
        deviation that is stated for each layer, or for squared errors, to its square.
        """
        largest = np.max([getattr(self.tallies[other], figure) for other in (*INSIDE, position)], axis=0)
        variance = self.bench.expected_squared_errors(0.0)
        stated = variance if figure == "largest_squared_error" else np.sqrt(variance)
        return np.asarray(stated * (largest / stated).max() if bool((stated > 0).all()) else largest)

    def _worst_group_check(self, name: str, figures: Floats, bounds: Floats, prefix: str, unit: str) -> Check:
        """Return the check of the group whose figure is largest relative to its bound. ``prefix`` is the beginning of its sentence."""
        worst = _worst_place(figures, bounds)
        layer = f"{_layer_name(worst)}: " if self.bench.groups > 1 else ""
        return self._worst_check(name, figures, bounds, f"{layer}{prefix}", unit)

    def _worst_check(self, name: str, figures: Floats, bounds: Floats, prefix: str, unit: str) -> Check:
        """Return the check of the figure that is largest relative to its bound. ``prefix`` is the beginning of its sentence."""
        worst = _worst_place(figures, bounds)
        figure, bound = float(figures.flat[worst]), float(bounds.flat[worst])
        passed = figure <= bound  # False where an estimate is no number
        sentence = f"{prefix} {figure:.3g} {unit}, and chance explains up to {bound:.3g}"
        return Check(name, figure, bound, self.error_per_check, passed, sentence)

    # --- fresh noise --------------------------------------------------------------------------------------------------

    def _independence_checks(self) -> Iterator[Check]:
        """Yield the checks that the noise of clients, of calls and of weights is independent."""
        if not self._noise_is_shown_or_rare():
            passed = None if isinf(self.epsilon) else False
            sentence = "the estimates of a layer do not differ or are not finite, so the stated noise is missing"
            yield Check("independent noise", figure=0.0, bound=0.0, error_rate=0.0, passed=passed, sentence=sentence)
            return
        first, second, wide = (self._standardised_noise(bench) for bench in (self.tall_bench, self.tall_bench, self.bench))
        if not self.bench.by_weight:  # each row has the noise of all clients in one group
            clients = most_correlated_lag(first, self.error_per_check)
            calls = most_correlated_pair(first.reshape(1, -1), second.reshape(1, -1), self.error_per_check)
        else:
            clients = most_correlated_pair(first, None, self.error_per_check)
            calls = most_correlated_pair(first, second, self.error_per_check)
        yield self._correlation_check("independent clients", clients, "the noise of two clients")
        yield self._correlation_check("independent calls", calls, "the noise of two calls")
        if self.bench.by_weight:
            lag = most_correlated_lag(wide, self.error_per_check)
            yield self._correlation_check("independent weights", lag, f"the noise of weights {lag.place} apart")

    @property
    def _is_noisy(self) -> Mask:
        """Whether the estimates of each group (G,) at the center differ by more than rounding. False if an estimate is no number."""
        tally = self.tallies[0.0]
        return np.asarray(np.sqrt(tally.variance) > self.bench.rounding(tally.largest_deviation))

    def _noise_is_shown_or_rare(self) -> bool:
        """Return whether each group of weights has noise, or states noise so rare that an audit may well not see it.

        If V is the stated mean squared error, and L the largest squared error, two estimates are at most 2 sqrt(L) apart. So if estimates
        are equal but for a probability p, then V <= 4 L p: p is at least V / (4 L).
        """
        tally, stated, largest = self.tallies[0.0], self.bench.expected_squared_errors(0.0), self._largest(0.0, "largest_squared_error")
        rate = np.minimum(1.0, stated / np.maximum(4 * largest, 1e-300))
        is_rare = (stated > 0) & (self.bench.groups * (1 - rate) ** tally.count > self.error_per_check)
        return bool((self._is_noisy | is_rare).all())

    def _standardised_noise(self, bench: Bench) -> Floats:
        """Draw the noise of one call at the center, less its mean, over its standard deviation. Groups without noise are 0.

        If a trial is a weight, the result is (clients, d), with weights in the model's order, so that lags count weights. If a trial is a
        client's row, it is (G, clients) for G groups. Mean and variance are those of all samples. If they were those of one call, noise
        that all clients share would go unnoticed.
        """
        tally = self.tallies[0.0]
        mean, deviation = tally.expected + tally.mean_deviation, np.where(self._is_noisy, np.sqrt(tally.variance), inf)
        standard = (bench.draw(0.0).statistic - mean) / deviation  # (trials, G)
        if not bench.by_weight:
            return np.ascontiguousarray(standard.T)
        # Here a group is a layer, and trials are ordered by client, then by weight. All layers have equally many weights.
        by_client_and_layer = standard.reshape(bench.rows, -1, bench.groups).transpose(0, 2, 1)
        return np.ascontiguousarray(by_client_and_layer.reshape(bench.rows, -1))

    def _correlation_check(self, name: str, correlation: Correlation, noises: str) -> Check:
        """Return the check that chance explains a correlation. ``noises`` is the beginning of its sentence."""
        sentence = f"{noises} is correlated by {correlation.figure:.3g} standard errors, and chance explains up to {correlation.bound:.3g}"
        return Check(name, correlation.figure, correlation.bound, self.error_per_check, correlation.figure <= correlation.bound, sentence)

    # --- where chance plays no part -----------------------------------------------------------------------------------

    def _agreement_check(self) -> Check:
        """Compare the mean of all estimates with the aggregate of the same reports, received in three batches.

        If payloads cannot be read, there is a single batch. The figure is the largest difference in a layer, relative to the largest
        estimate of that layer.
        """
        bench = self.tall_bench
        sent, payloads = bench.send(0.7)  # any position inside the range would do
        reports = bench.receive(sent, payloads)
        third = ceil(len(payloads) / 3)
        parts = [payloads[start : start + third] for start in range(0, len(payloads), third)]
        # After an error of reading, `receive` returns all reports as they were sent, whichever payloads it is given.
        batches = [reports] if bench.read_error else [bench.receive(sent, part) for part in parts]
        estimates = self.mechanism.decode(reports, bench.ranges).double()
        differences = (self.mechanism.aggregate(batches, bench.ranges).double() - estimates.mean(dim=0)).abs()
        # There is one layer for each of RADII, and all are equally wide: (rows, layers, weights of a layer).
        scale = estimates.abs().reshape(bench.rows, len(RADII), -1).amax(dim=(0, 2)).clamp_min(1e-300)
        figure = float((differences.reshape(len(RADII), -1).amax(dim=1) / scale).max())
        sentence = (
            f"the aggregate and the mean of the estimates differ by {figure:.2g} of a layer's largest estimate, allowed is {_AGREEMENT:g}"
        )
        return Check("aggregate is the mean", figure, _AGREEMENT, error_rate=0.0, passed=figure <= _AGREEMENT, sentence=sentence)

    def _mean_noise_checks(self) -> Iterator[Check]:
        """Yield the checks of the stated noise of a mean, against the closed form of one client's noise, which is tested by trials.

        If no estimate of the variance is unbiased, ``mean_variance`` may be larger, up to the square of ``largest_std``. Both are infinite
        if the server does not know the noise.
        """
        variances, estimated, largest, slack = self.probe.mean_noise(_COHORT)
        # The largest variance in each layer, for each weight (d,).
        found = variances.reshape(len(variances), len(RADII), -1).max(axis=(0, 2)).repeat(_VECTOR_WIDTH)
        smallest, highest = variances[: len(estimated)] / _MOST_TOO_SMALL, _MOST_TOO_SMALL * np.maximum(largest, found)
        yield _range_check("mean_variance", estimated, smallest, highest, slack)
        yield _range_check("largest_std", largest, found / _MOST_TOO_SMALL, _MOST_TOO_LARGE * found, slack)

    def _wire_checks(self) -> Iterator[Check]:
        """Yield the checks of the payloads: that all are equally long and as long as stated, and that they can be read."""
        benches = {id(bench): bench for bench in (self.bench, self.tall_bench)}.values()  # the two may be one object
        excess = max(max(bench.lengths) - min(bench.lengths) for bench in benches)
        lengths = (
            "all reports are equally long" if excess == 0 else f"reports differ by up to {excess} bytes in length, which may show the data"
        )
        yield Check("equal lengths", float(excess), bound=0.0, error_rate=0.0, passed=excess == 0, sentence=lengths)
        # Take the bench whose reports differ most from the stated length.
        longest, stated = max(
            ((max(bench.lengths), ceil(payload_bits(self.mechanism, bench.ranges) / 8)) for bench in benches),
            key=lambda longest_and_stated: abs(longest_and_stated[0] - longest_and_stated[1]),
        )
        sentence = f"a report has {longest} bytes; the mechanism states {stated}"
        yield Check("stated length", float(longest), float(stated), error_rate=0.0, passed=longest == stated, sentence=sentence)
        accepted = self.probe.accepted_lengths()
        sentence = "payloads of a wrong length are refused"
        if accepted:
            sentence = f"read must raise a ProtocolError for payloads of a wrong length, and does not for {', '.join(accepted)}"
        yield Check("refusal of wrong lengths", float(len(accepted)), bound=0.0, error_rate=0.0, passed=not accepted, sentence=sentence)
        refused = next((bench.read_error for bench in benches if bench.read_error), "")
        sentence = f"a report could not be read from its own payload: {refused}" if refused else "every report is read back"
        yield Check("readable reports", float(bool(refused)), bound=0.0, error_rate=0.0, passed=not refused, sentence=sentence)

    def _input_checks(self) -> Iterator[Check]:
        """Yield the checks of what ``encode`` does with its input, and of the numbers that it adds to a sum."""
        yield self._finite_check()
        changed = self.bit_bench.changed_values
        sentence = "encode changes the values that it is given" if changed else "encode leaves the values that it is given as they are"
        yield Check("unchanged values", float(changed), bound=0.0, error_rate=0.0, passed=not changed, sentence=sentence)
        numbers = self.probe.summed_numbers() if isinstance(self.release, GaussianRelease) and self.release.adds_up else None
        if numbers is not None:
            fractions = int((numbers != np.rint(numbers)).sum())
            sentence = f"the release states that reports are integers, and {fractions} of {numbers.size} numbers in reports are not"
            yield Check("integers", float(fractions), bound=0.0, error_rate=0.0, passed=not fractions, sentence=sentence)

    def _finite_check(self) -> Check:
        """Check that ``encode`` refuses NaN and infinity: a report of them would show that its client's training has failed."""
        encoded = [value for value in ("nan", "inf", "-inf") if self.bench.encodes(float(value))]
        sentence = f"encode must raise for values that are not finite, but it accepts {' and '.join(encoded)}"
        return Check(
            "refusal of NaN and infinity",
            figure=float(len(encoded)),
            bound=0.0,
            error_rate=0.0,
            passed=not encoded,
            sentence=sentence if encoded else "values that are not finite are refused",
        )


def _range_check(name: str, stated: Floats, low: Floats, high: Floats, slack: Floats) -> Check:
    """Return the check that the ``stated`` variances of a mean lie between ``low`` and ``high``, or are infinite."""
    too_small = np.where(stated < 0, inf, low / (np.abs(stated) + slack))
    too_large = np.where(np.isinf(stated), 0.0, stated) / (high + slack)
    figure = float(np.max([too_small.max(), too_large.max()]))  # NaN if any is
    wrong = "larger" if too_large.max() > too_small.max() else "smaller"
    sentence = f"the variance by {name} is {figure:.4g} times {wrong} than the noise of one client allows"
    if figure <= 1:
        sentence = f"{name} is as large as the noise of one client implies"
    return Check(name, figure, bound=1.0, error_rate=0.0, passed=figure <= 1, sentence=sentence)


def _worst_place(figures: Floats, bounds: Floats) -> int:
    """Return the flat index of the figure that is largest relative to its bound; that of a NaN, if there is one."""
    return int(np.argmax(np.nan_to_num(figures / np.maximum(bounds, 1e-300), nan=inf)))


def _with_total(counts: Counts) -> list[Counts]:
    """Return the G arrays (3, B) of ``counts`` (3, G, B), and their sum if there are several."""
    groups = [counts[:, group] for group in range(counts.shape[1])]
    return [*groups, counts.sum(axis=1)] if len(groups) > 1 else groups


def _layer_name(index: int) -> str:
    return f"layer with center {CENTERS[index]:g} and radius {RADII[index]:g}"
