"""Test the numbers that a mechanism states in its release against the reports that it sends.

Accountants rely on these numbers. Each is tested here, by experiments on whole reports or by computing it again. A test can contradict a
number, but cannot prove it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log2, sqrt
from typing import TypeGuard

import numpy as np
from scipy import special, stats

from ldpfl.auditing.bounds import Counts, Floats, Mask, clopper_pearson, epsilon_lower_bound, mean_bound, telling_bins, wilson
from ldpfl.auditing.reports import Outcomes, WholeReports, source_of
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.hooks import record_rate_of
from ldpfl.privacy import BinaryRelease, GaussianRelease, PureRelease, Release
from ldpfl.util.randomness import SecureSource

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Found:
    """The result of testing one number: ``figure`` must not exceed ``bound``."""

    name: str
    figure: float
    bound: float
    sentence: str

    @property
    def passed(self) -> bool:
        return self.figure <= self.bound + _ROUNDING * abs(self.bound)


Test = Callable[[float], Found]
"""A test by experiment. Its argument is the largest allowed probability that a sound mechanism fails it."""


def experiments(mechanism: Mechanism, trials: int, seed: int | None) -> list[Test]:
    """Draw whole reports of ``mechanism``, and return the tests of these reports.

    Args:
        trials: number of reports for each input.
        seed: seed of the random bits; None for the operating system's source.
    """
    tests: list[Test] = []
    source = source_of(seed)
    for width in (1, 4):
        drawn = WholeReports.of(mechanism, width, source)
        if drawn is None:
            continue
        release = mechanism.release(drawn.ranges)
        if not release.protected or release.unit in (
            "record",
            "person",
        ):  # a guarantee for records says nothing of replacing a client's values
            continue
        tests += _of_release(drawn, release, drawn.outcomes(trials), f"{drawn.ranges.dimension} weights")
        if release.units > 1 and not isinstance(release, GaussianRelease):
            tests += _of_mixing(drawn)
    return tests


def _of_release(drawn: WholeReports, release: Release, seen: Outcomes, of: str) -> Iterator[Test]:
    if isinstance(release, GaussianRelease):
        yield lambda error: _mu(seen, release, of, error)
        if release.alike:
            yield lambda error: _alike(seen, of, error)
        return
    yield lambda error: _epsilon(seen, release, of, error)
    common = _common_part(release)
    if common is not None:
        yield lambda error: _blanket(seen.counts, common, f"blanket, {of}", error)
    if isinstance(release, BinaryRelease) and release.sampled == 1:
        yield lambda error: _bits(drawn, seen, release, of, error)
    if isinstance(release, BinaryRelease) and release.realised is not None and release.units == release.sampled == 1:
        yield lambda error: _attained(seen, release.realised or 0.0, of, error)
    if isinstance(release, PureRelease) and release.signed and drawn.ranges.dimension == 1:
        yield lambda error: _signed(seen, release.blanket or 0.0, error)


def _common_part(release: Release) -> float | None:
    """Return the blanket that is claimed for a whole report: the share that does not depend on the input. None if none is used."""
    if isinstance(release, PureRelease):
        return None if release.blanket is None else float(release.blanket) ** release.units
    if isinstance(release, BinaryRelease):
        return (2 / (1 + exp(release.epsilon))) ** release.units
    return None


def claims_blanket(release: Release) -> TypeGuard[PureRelease]:
    """Whether a share of each unit is stated to be the same for all inputs."""
    return isinstance(release, PureRelease) and release.blanket is not None


def blanket_of_units(counts: Sequence[Counts], release: PureRelease, error: float) -> Found:
    """Test what units are claimed to have in common by counts (3, B) of a unit for each input."""
    return _blanket(counts, float(release.blanket or 0.0), "blanket of a unit", error)


def _blanket(counts: Sequence[Counts], claimed: float, name: str, error: float) -> Found:
    """Bound from above what reports have in common: outcomes are shared out among the inputs, each to one under which it is rare.

    If every input gives at least ``claimed`` times one common law, what the inputs give to their own shares adds up to ``claimed`` at
    least. Outcomes are shared out by other trials than those they are judged by.
    """
    pairs = [(first, second) for first in range(len(counts)) for second in range(first)]
    best, chosen = inf, _shared_out(counts, pairs[0])
    for inputs in (*pairs, tuple(range(len(counts)))):
        shares = _shared_out(counts, inputs)
        guess = sum(float(wilson(one[1][own].sum(), int(one[1].sum()), error / len(shares))[1]) for one, own in shares)
        if guess < best:
            best, chosen = guess, shares
    ends = [clopper_pearson(int(one[2][own].sum()), int(one[2].sum()), 2 * error / len(chosen))[1] for one, own in chosen]
    upper = min(1.0, sum(ends))
    sentence = f"a share of {claimed:.4g} of each report is claimed to be the same for all inputs, and it is {upper:.4g} at most"
    return Found(name, claimed, upper, sentence)


def _shared_out(counts: Sequence[Counts], inputs: Sequence[int]) -> list[tuple[Counts, Mask]]:
    """Return the counts of each of ``inputs``, and the outcomes (B,) that are rarest under it."""
    rarest = np.stack([(counts[each][0] + 0.5) / counts[each][0].sum() for each in inputs]).argmin(axis=0)
    return [(counts[each], rarest == place) for place, each in enumerate(inputs) if bool((rarest == place).any())]


def _epsilon(seen: Outcomes, release: Release, of: str, error: float) -> Found:
    """Tell the two inputs apart that are told apart best, by whole reports: units and epsilon of each together bound that."""
    claimed = release.pure_epsilon * release.units
    best, pair = -inf, (0, 1)
    for first, one in enumerate(seen.counts):
        for second, other in enumerate(seen.counts):
            event = telling_bins((one[0], other[0]), (one[1], other[1]), error)
            chosen = int(one[1][event].sum()), int(other[1][event].sum())
            lower = epsilon_lower_bound(chosen, (int(one[1].sum()), int(other[1].sum())), 0.0, error) if first != second else -inf
            if lower > best:
                best, pair = lower, (first, second)
    one, other = (seen.counts[place] for place in pair)
    event = telling_bins((one[0], other[0]), (one[1], other[1]), error)
    hits = int(one[2][event].sum()), int(other[2][event].sum())
    lower = max(0.0, epsilon_lower_bound(hits, (int(one[2].sum()), int(other[2].sum())), 0.0, error))
    sentence = f"{release.units} units at epsilon {release.pure_epsilon:g} are claimed for {of}, which cost {lower:.4g} at least"
    return Found(f"units and epsilon, {of}", lower, claimed, sentence)


def _attained(seen: Outcomes, claimed: float, of: str, error: float) -> Found:
    """Compare the budget that is said to be really spent with the most that any two inputs, and any outcome, can show."""
    most, share = 0.0, error / (2 * len(seen.counts) * seen.counts[0].shape[1])
    came = np.flatnonzero(np.sum([one[2] for one in seen.counts], axis=0))  # a bit has two values, and no third one
    for outcome in came:
        ends = [clopper_pearson(int(one[2][outcome]), int(one[2].sum()), 2 * share) for one in seen.counts]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        most = max(most, log(high / low) if low > 0 else inf)
    return Found(f"realised epsilon, {of}", claimed, most, f"epsilon {claimed:g} is said to be really spent, and it is {most:.4g} at most")


def _bits(drawn: WholeReports, seen: Outcomes, release: BinaryRelease, of: str, error: float) -> Found:
    """Look for bits of the wire that are rarer, or more frequent, than randomised response at the stated epsilon makes them."""
    low = 1 / (1 + exp(release.epsilon))
    rarest = 1.0
    share = error / (len(seen.ones) * seen.ones[0].size)
    padding = 8 * ceil(payload_bits(drawn.mechanism, drawn.ranges) / 8) - payload_bits(drawn.mechanism, drawn.ranges)
    uppers = []
    for ones, count in zip(seen.ones, seen.rows, strict=True):
        each = [min(clopper_pearson(int(hits), count, share)[1], clopper_pearson(count - int(hits), count, share)[1]) for hits in ones]
        uppers.append(each)
    worst = np.sort(np.min(np.array(uppers), axis=0))[padding:]
    rarest = float(worst[0]) if worst.size else 1.0
    said = f"a bit at epsilon {release.epsilon:g} has either value with probability {low:.4g} at least, and one has {rarest:.4g} at most"
    return Found(f"probabilities of bits, {of}", low, rarest, said)


def _signed(seen: Outcomes, blanket: float, error: float) -> Found:
    """Compare how often a report about an end of the range has the wrong sign with what is claimed: half of the blanket."""
    lower = 0.0
    for end in (1.0, -1.0):
        statistic = seen.statistics[seen.names.index(f"all at {end:+g}")]
        lower = max(lower, clopper_pearson(int((end * statistic < 0).sum()), statistic.size, error)[0])
    said = f"a report about an end of the range is said to be wrong about the sign with probability {blanket / 2:.4g}; it is {lower:.4g}"
    return Found("sign of a report", lower, blanket / 2, f"{said} at least")


def _mu(seen: Outcomes, release: GaussianRelease, of: str, error: float) -> Found:
    """Bound mu from below by one threshold: mu is what separates two Gaussians that are told apart as well as these inputs are."""
    claimed = release.mu * sqrt(release.units)
    best, chosen = -inf, (0, 1, 0.0)
    for first, high in enumerate(seen.statistics):
        for second, low in enumerate(seen.statistics):
            if first != second:
                at = float(np.median(high[::2]) + np.median(low[::2])) / 2
                apart = _apart(high[::2], low[::2], at, error)
                if apart > best:
                    best, chosen = apart, (first, second, at)
    first, second, middle = chosen
    lower = max(0.0, _apart(seen.statistics[first][1::2], seen.statistics[second][1::2], middle, error))
    return Found(f"mu, {of}", lower, claimed, f"mu {claimed:g} is claimed for a report of {of}, and it is {lower:.4g} at least")


def _apart(high: Floats, low: Floats, at: float, error: float) -> float:
    first = clopper_pearson(int((high > at).sum()), high.size, error)[0]
    second = clopper_pearson(int((low > at).sum()), low.size, error)[1]
    return float(special.ndtri(first) - special.ndtri(second)) if first > 0 and second < 1 else -inf


def _alike(seen: Outcomes, of: str, error: float) -> Found:
    """Compare the noise of different inputs: of one law it has one variance."""
    share = error / (2 * len(seen.statistics))
    ends = []
    for statistic in seen.statistics:
        free, spread = statistic.size - 1, float(statistic.var(ddof=1)) * (statistic.size - 1)
        ends.append((spread / float(stats.chi2.isf(share, free)), spread / float(stats.chi2.ppf(share, free))))
    largest, smallest = max(low for low, _ in ends), min(high for _, high in ends)
    said = f"the same noise is claimed for all inputs, and its variance differs by a factor of {largest / smallest:.4g} at least"
    return Found(f"noise alike, {of}", largest, smallest, said)


def _of_mixing(drawn: WholeReports) -> Iterator[Test]:
    mixed = drawn.mixed()
    if mixed is not None:
        yield lambda error: _order(mixed, error)
        yield lambda error: _linked(mixed, error)


def _order(mixed: Floats, error: float) -> Found:
    """Look for the order of clients in mixed reports: the first half of the clients held the one end, the others the other one."""
    half = len(mixed) // 2
    width = np.ptp(mixed, axis=0)
    apart = np.abs(mixed[:half].mean(axis=0) - mixed.mean(axis=0)) / np.maximum(width, 1e-300)
    bound = sqrt(log(2 * mixed.shape[1] / error) / (2 * half))  # Hoeffding 1963, section 6: drawn without replacement
    said = f"mixed reports of the first and the second half of clients differ by {apart.max():.3g}, and chance explains up to {bound:.3g}"
    return Found("order in the pool", float(apart.max()), bound, f"{said}: who sent what can be told")


def _linked(mixed: Floats, error: float) -> Found:
    """Look for units of one client that stay together in the pool: a client's values were all at one end."""
    clients, units = mixed.shape
    deviation = mixed.std(axis=0)
    standard = (mixed - mixed.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    products = np.abs(np.triu(standard.T @ standard, k=1)) / sqrt(clients)
    largest = float(np.abs(standard).max()) ** 2
    bound = sqrt(clients) * mean_bound(clients, 1.0, largest, error / max(1, units * (units - 1) // 2))
    figure = float(products.max()) if units > 1 else 0.0
    said = f"two units of the mixed reports are correlated by {figure:.3g} standard errors, and chance explains up to {bound:.3g}"
    return Found("units apart in the pool", figure, bound, f"{said}: units of one client stay together")


def computed(mechanism: Mechanism) -> Iterator[Found]:
    """Yield what can be computed again without chance: counts of units and of coordinates, and how records take part."""
    for width in (1, 4, 24):
        drawn = WholeReports.of(mechanism, width, SecureSource())
        if drawn is None:
            continue
        release, ranges, of = mechanism.release(drawn.ranges), drawn.ranges, f"{drawn.ranges.dimension} weights"
        messages = mechanism.units(ranges).count
        if release.protected and release.units > 1:
            said = f"{release.units} units of {of} are accounted apart, and a report is mixed in {messages} messages"
            yield Found(f"units apart, {of}", float(release.units), float(messages), said)
        if isinstance(release, BinaryRelease):
            yield from _of_bits(mechanism, release, drawn, of)
        if release.unit in ("record", "person"):
            rate = release.rate if isinstance(release, GaussianRelease) else 1.0
            said = f"records are accounted with probability {rate:g}, and take part with {record_rate_of(mechanism):g}"
            yield Found("rate of records", record_rate_of(mechanism), rate, said)
            return


def _of_bits(mechanism: Mechanism, release: BinaryRelease, drawn: WholeReports, of: str) -> Iterator[Found]:
    bits, ranges = payload_bits(mechanism, drawn.ranges), drawn.ranges
    most = release.units * (1 + (ceil(log2(release.sampled)) if release.sampled > 1 else 0))
    said = f"{release.units} bits about one of {release.sampled} coordinates take {most} bits on the wire, and a report has {bits}"
    yield Found(f"one bit a unit, {of}", float(bits), float(most), said)
    coordinates = mechanism.units(ranges).dimension
    said = f"a bit is said to be about one of {release.sampled} coordinates, and there are {coordinates}"
    yield Found(f"coordinates, {of}", float(release.sampled), float(max(1, coordinates)), said)
