"""Decide which accountant computes a guarantee again, and when none does because it would take too long or is not there.

Every function returns an upper bound on epsilon with a text on how it was computed. The bound is None if nothing was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, exp, inf, log, sqrt

import numpy as np

from ldpfl_verify.certificate_file import ChargedRounds, StatedGuarantee, epsilon_of
from ldpfl_verify.closed_forms import gaussian_delta, least_epsilon, pure_sum, randomised_response_delta
from ldpfl_verify.composition import ReleaseBound, composed_epsilon, convolved_epsilon
from ldpfl_verify.shuffled_bits import CountedBit, CountedRound
from ldpfl_verify.shuffled_blankets import LinkedBits, ShuffledVector, common_share
from ldpfl_verify.shuffled_reports import BlanketedReport, ClonedReport
from ldpfl_verify.unshuffled_reports import GaussianReport, PureReport, different_reports_delta

Bound = tuple[float | None, str]
"""Upper bound on epsilon (infinity if none holds, None if nothing was computed), and how it was computed, or why not."""

TOLERANCE = 0.02
"""Largest relative amount by which a bound may exceed the stated epsilon if the guarantee is to count as nearly confirmed."""

SAME = 1 + 1e-9
"""Factor between two figures that count as equal."""

MAX_REPORTS, MAX_EQUAL_REPORTS = 10**10, 10**7
"""Numbers of reports without a shuffler that are composed, and for which the sum of all terms may be taken."""

MAX_KINDS_OF_SHUFFLED_ROUNDS = 16
"""Number of kinds of rounds behind a shuffler. Each takes about 70 MB at a million clients."""

MAX_KINDS_OF_REPORTS = 256
"""Number of different epsilons of reports without a shuffler."""

MAX_COHORT = 10**6
MAX_REPORT_EPSILON = 700.0
"""Epsilon of a report beyond which only basic composition is used: e^epsilon would overflow."""

MAX_MESSAGE_EPSILON = 60.0
"""Epsilon of a message beyond which shuffling adds no protection."""

MAX_LINKED_BITS = 1 << 12
MAX_LOG_GAIN_OF_LINKED_BITS = 350.0
"""How many times as likely bits that stay together may be as uniform ones, as a logarithm. The square is a double up to here. Beyond, a
client draws uniform bits with a probability below e^-350, so that no other client hides among them."""

MAX_LINKED_MESSAGES, MAX_LINKED_COHORT = 3000, 2000
"""Numbers of messages of linked bits, and of clients, beyond which the lattice is too coarse to contradict a figure."""

MAX_VECTOR_EPSILON = 30.0
"""Epsilon of vectors beyond which shuffling adds no protection."""

DELTA_SHARE_OF_BLANKET = 0.01
"""Share of delta that pays for the part of a vector that is not in the blanket."""

CURVE_POINTS = 2049
FEW_REPORTS = 2_000
"""Number of equal reports up to which the exact sum is always taken, because it has few terms."""

FAR_APART, MAX_TERMS = 1.15, 10**5
"""If two accountants differ by more than this factor, and the exact sum has more than so many terms, the sum is not taken."""

GAUSSIAN_SUM_MARGIN = 1e-9
"""Share of delta that pays for the difference between a sum of rounded Gaussians and a rounded Gaussian of the same variance."""

_ADJACENCY = {
    "client": "replace one client's data",
    "person": "replace all records of one person at one client",
    "record": "replace one record of one client",
}
_PARTS_OF_A_CLIENT = {"record", "person"}


def second_bound(line: StatedGuarantee, charged: Sequence[ChargedRounds]) -> Bound:
    """Return an upper bound on the epsilon of ``line`` over the ``charged`` rounds, and how it was computed.

    The bound is the stated epsilon itself if that is proved to hold: finding a smaller epsilon would take many times as long. It is
    infinity if no epsilon holds, and None if no accountant of this package computes it.
    """
    units = {group.release.unit for group in charged}
    if any(group.release.kind == "unprotected" for group in charged):
        return inf, "a report left its client without protection, so no epsilon holds"
    if line.protects == "client" and units & _PARTS_OF_A_CLIENT:
        return inf, f"noise that protects one {'record' if 'record' in units else 'person'} bounds nothing for the client"
    if line.protects == "person" and "record" in units:
        return inf, "noise that protects one record bounds nothing for a person with several records"
    if line.adjacency != _ADJACENCY[line.protects]:
        return inf, f"the stated adjacency does not fit: what is protected is a {line.protects}"
    if line.protects == "record":
        charged = [_for_one_record(group) for group in charged]
    stated_epsilon = epsilon_of(line)
    if line.trusted == "local":
        return _unshuffled_bound(charged, line.delta, stated_epsilon)
    channels = {group.channel for group in charged}
    fitting_trust = "summed" if channels == {"secure-sum"} else "shuffled"
    if line.trusted != fitting_trust or channels & {"direct", "random-delay"}:
        bound, _ = _unshuffled_bound(charged, line.delta, stated_epsilon)
        return bound, "computed without a shuffler or a sum, because reports did not travel as the guarantee says"
    shuffled, how = _shuffled_bound(charged, line.delta, stated_epsilon)
    if shuffled is not None and shuffled <= stated_epsilon * SAME:
        return shuffled, how
    unshuffled, _ = _unshuffled_bound(charged, line.delta, stated_epsilon)
    if unshuffled is not None and (shuffled is None or unshuffled < shuffled) and unshuffled <= stated_epsilon * (1 + TOLERANCE):
        return unshuffled, "the bound without a shuffler is enough"
    return shuffled, how


def _for_one_record(group: ChargedRounds) -> ChargedRounds:
    """Return the rounds of ``group`` as they count for one record, if their noise protects persons.

    If a record of one person is replaced by a record of another person, the vectors of two persons change. Each moves the sum by up to mu
    standard deviations, so twice mu bounds the distance. This holds whether or not a person takes part, so the rate is set to 1.
    """
    if group.release.unit != "person" or group.release.parameter is None:
        return group
    return replace(group, release=replace(group.release, unit="record", parameter=2 * group.release.parameter, rate=1.0))


def _unshuffled_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound against an observer who knows the sender of every report: reports with Gaussian noise, others, or both."""
    pure = [(_parameter_of(group), group.release.units * group.rounds) for group in charged if group.release.kind != "gaussian"]
    gaussian = [group for group in charged if group.release.kind == "gaussian"]
    if delta == 0:
        return (inf, "Gaussian noise has no finite epsilon at delta 0") if gaussian else (float(pure_sum(pure)), "exact sum")
    if any(group.release.rate < 1 for group in gaussian):
        return None, "this package has no accountant for records that take part at random (Poisson sampling)"
    # Gaussian releases compose to one whose mu^2 is the sum of theirs (Gaussian DP).
    mu = sqrt(sum(_parameter_of(group) ** 2 * group.release.units * group.rounds for group in gaussian))
    if not pure:
        bound = _stated_or_least(stated_epsilon, lambda epsilon: gaussian_delta(mu, epsilon), delta)
        return bound, "closed form of Gaussian noise, 150 digits"
    if gaussian and stated_epsilon < inf and gaussian_delta(mu, float(Fraction(stated_epsilon * SAME) - pure_sum(pure))) <= delta:
        return stated_epsilon * SAME, "closed form of Gaussian noise, after the sum of the pure epsilons"
    epsilons, pure_reports = {epsilon for epsilon, _ in pure}, sum(count for _, count in pure)
    if pure_reports > MAX_REPORTS or max(epsilons) > MAX_REPORT_EPSILON:
        limits = f"more than {MAX_REPORTS:,} reports, or an epsilon above {MAX_REPORT_EPSILON:g}"
        return (None if gaussian else float(pure_sum(pure))), f"exact sum only: {limits}"
    if len(epsilons) == 1 and not gaussian and pure_reports <= MAX_EQUAL_REPORTS:
        (epsilon0,) = epsilons
        return _equal_reports_bound(epsilon0, pure_reports, delta, stated_epsilon)
    if len(epsilons) > MAX_KINDS_OF_REPORTS:
        return None, f"{len(epsilons):,} different epsilons; this package composes at most {MAX_KINDS_OF_REPORTS}"
    can_enumerate = not gaussian and pure_reports <= MAX_EQUAL_REPORTS and stated_epsilon < inf
    if can_enumerate and different_reports_delta(pure, stated_epsilon) <= delta * SAME:
        return stated_epsilon, "exact sum over all outcomes"
    kinds: list[tuple[ReleaseBound, int]] = [(PureReport(epsilon), count) for epsilon, count in pure]
    kinds += [(GaussianReport(mu), 1)] if gaussian else []
    return composed_epsilon(kinds, delta, stated_epsilon), "convolution and Renyi divergences"


def _equal_reports_bound(epsilon0: float, number: int, delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for ``number`` reports at ``epsilon0``.

    Many reports get a fast bound first. The exact sum follows if it has few terms, or if the fast bound is close to the stated epsilon.
    """

    def exact(epsilon: float) -> float:
        return randomised_response_delta(epsilon0, number, epsilon)

    if number <= FEW_REPORTS:
        return _stated_or_least(stated_epsilon, exact, delta), "exact sum in interval arithmetic"
    bound = composed_epsilon([(PureReport(epsilon0), number)], delta, min(stated_epsilon, epsilon0 * number))
    if bound <= stated_epsilon * SAME:
        return bound, "convolution and Renyi divergences"
    truth = 1 / (1 + exp(-epsilon0))  # probability that randomised response tells the truth
    # A number B of true answers has the loss epsilon0 (2 B - number). The sum goes from the B whose loss is the stated epsilon to
    # 40 standard deviations above the mean of B.
    terms = number * (truth - 0.5) - stated_epsilon / epsilon0 / 2 + 40 * sqrt(number * truth * (1 - truth))
    if bound > stated_epsilon * FAR_APART and terms > MAX_TERMS:
        return bound, "convolution and Renyi divergences, far above the stated epsilon"
    if exact(stated_epsilon) <= delta * SAME:
        return stated_epsilon, "exact sum in interval arithmetic"
    return bound, "convolution and Renyi divergences; the exact sum shows that the stated epsilon does not hold"


def _shuffled_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound against an observer who sees what a shuffler or a sum lets through."""
    gaussian_sums = [group for group in charged if group.channel == "secure-sum" and group.release.kind == "gaussian"]
    if not all(_sums_integers(group) for group in gaussian_sums):
        return None, "floats that each client rounds do not add up exactly as their noise does"
    if len(gaussian_sums) == len(charged) and all(group.release.rate == 1 for group in charged):
        # In a sum, the noise of all clients of the cohort adds up, so mu^2 is divided by their number.
        mu = sqrt(sum(_parameter_of(group) ** 2 * group.release.units * group.rounds / group.cohort for group in charged))
        delta_without_margin = delta * (1 - GAUSSIAN_SUM_MARGIN)
        bound = _stated_or_least(stated_epsilon, lambda epsilon: gaussian_delta(mu, epsilon), delta_without_margin)
        return bound, "closed form of Gaussian noise, 150 digits"
    if len(charged) > MAX_KINDS_OF_SHUFFLED_ROUNDS:
        return None, f"{len(charged):,} kinds of shuffled rounds; this package composes at most {MAX_KINDS_OF_SHUFFLED_ROUNDS}"
    if any(_message_epsilon(group) > MAX_MESSAGE_EPSILON for group in charged if group.release.kind != "gaussian"):
        return None, f"the epsilon of a message is above {MAX_MESSAGE_EPSILON:g}: shuffling adds no protection"
    largest = max(group.cohort for group in charged)
    if largest > MAX_COHORT:
        return None, f"a cohort of {largest:,} clients; this package computes at most {MAX_COHORT:,}"
    if all(group.channel == "ideal-shuffler" and _is_one_clipped_vector(group) for group in charged):
        return _vectors_bound(charged, delta, stated_epsilon)
    if all(map(_is_single_counted_bit, charged)):
        return _single_bits_bound(charged, delta, stated_epsilon)
    if all(group.channel == "ideal-shuffler" and _message_blanket(group) for group in charged):
        return _blanketed_reports_bound(charged, delta, stated_epsilon)
    if all(map(_is_bits_of_known_clients, charged)):
        return _linked_bits_bound(charged, delta, stated_epsilon)
    if len(charged) == 1 and _has_clones(charged[0]):
        return _cloned_reports_bound(charged[0], delta, stated_epsilon)
    return None, "this package has no accountant for such rounds behind a shuffler, such as random check-in"


def _single_bits_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for shuffled bits. An observer sees only how many clients sent a one."""
    bits = [(CountedBit(_parameter_of(group), group.cohort), group) for group in charged]
    if sum(group.release.units * group.rounds for group in charged) == 1:
        ((bit, _),) = bits
        bound = _stated_or_least(stated_epsilon, lambda epsilon: _delta_at(bit, epsilon), delta, bit.max_loss)
        return bound, "every worst case of the other clients, in extended precision"
    bound = composed_epsilon([(bit, group.release.units * group.rounds) for bit, group in bits], delta, stated_epsilon)
    if bound > stated_epsilon * SAME:  # a sharper bound holds because inputs do not depend on other bits of their round
        rounds = [(CountedRound(bit, group.release.units), group.rounds) for bit, group in bits]
        bound = min(bound, convolved_epsilon(rounds, delta, stated_epsilon))
    return bound, "every worst case of the other clients, by convolution"


def _blanketed_reports_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for shuffled messages. A message is independent of its client's data with a stated probability, the blanket."""
    kinds: list[tuple[ReleaseBound, int]] = []
    for group in charged:
        report = BlanketedReport(_parameter_of(group) * group.linked, _message_blanket(group), group.cohort)
        if report.takes_long:
            return None, f"the blanket of {group.cohort:,} clients at so small an epsilon takes too long here"
        kinds.append((report, ceil(group.release.units / group.linked) * group.rounds))
    if sum(times for _, times in kinds) == 1:
        ((single_report, _),) = kinds
        return _stated_or_tabulated(single_report, delta, stated_epsilon), "blanket of one message, size by size of the anonymity set"
    return composed_epsilon(kinds, delta, stated_epsilon), "blanket, by convolution"


def _vectors_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for shuffled clipped vectors with Gaussian noise. A share of delta pays for their part outside the blanket.

    How much of a vector may lie outside depends on the resulting epsilon. An epsilon near the stated one is tried first, then a safe one.
    """
    unshuffled, _ = _unshuffled_bound(charged, delta, stated_epsilon)
    others = sum(group.rounds * (group.cohort - 1) for group in charged)
    if unshuffled is None or min(stated_epsilon, unshuffled) > MAX_VECTOR_EPSILON or others == 0:
        return None, f"shuffling adds no protection to vectors at an epsilon above {MAX_VECTOR_EPSILON:g}, or to a single client"
    for epsilon in (stated_epsilon * (1 + TOLERANCE), min(unshuffled, MAX_VECTOR_EPSILON)):
        # A total variation of this size in the law of each other vector costs delta (1 + e^epsilon) times as much. That holds for any
        # smaller epsilon, too, so a bound of at most ``epsilon`` is valid.
        variation = DELTA_SHARE_OF_BLANKET * delta / (1 + exp(epsilon)) / others
        bound = _vectors_epsilon(charged, (1 - DELTA_SHARE_OF_BLANKET) * delta, stated_epsilon, variation)
        if bound <= epsilon:
            return bound, "blanket of clipped vectors, by convolution"
    return unshuffled, "the bound without a shuffler is enough"


def _vectors_epsilon(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float, variation: float) -> float:
    """Return an epsilon if vectors may lie outside the blanket with probability ``variation``; infinity if the blanket is too small."""
    kinds: list[tuple[ReleaseBound, int]] = []
    for group in charged:
        share = common_share(_parameter_of(group), variation)
        if share is None:
            return inf
        kinds.append((ShuffledVector(_parameter_of(group), group.cohort, share), group.rounds))
    return convolved_epsilon(kinds, delta, stated_epsilon)


def _linked_bits_bound(charged: Sequence[ChargedRounds], delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for shuffled messages of several bits that stay together."""
    kinds: list[tuple[ReleaseBound, int]] = []
    for group in charged:
        linked = _linked_units(group)
        if linked > MAX_LINKED_BITS:
            return None, f"{linked:,} bits stay together; this package computes at most {MAX_LINKED_BITS:,}"
        # A true bit is 2 p times as likely as a uniform one, with the probability p = 1 / (1 + e^-epsilon) of the truth.
        if linked * log(2 / (1 + exp(-_parameter_of(group)))) > MAX_LOG_GAIN_OF_LINKED_BITS:
            return None, f"{linked:,} bits that stay together at so large an epsilon identify their client: shuffling adds no protection"
        kinds.append((LinkedBits(_parameter_of(group), linked, group.cohort), ceil(group.release.units / linked) * group.rounds))
    bound, how = composed_epsilon(kinds, delta, stated_epsilon), "blanket of linked bits, by convolution"
    is_coarse = sum(times for _, times in kinds) > MAX_LINKED_MESSAGES or max(group.cohort for group in charged) > MAX_LINKED_COHORT
    if bound > stated_epsilon * (1 + TOLERANCE) and is_coarse:
        return None, f"{how}: with so many messages or clients it is too coarse to show that the stated epsilon does not hold"
    return bound, how


def _cloned_reports_bound(group: ChargedRounds, delta: float, stated_epsilon: float) -> Bound:
    """Return the bound for shuffled messages of any epsilon-LDP mechanism, by the theorem on clones."""
    linked = min(group.linked, group.release.units)
    report = ClonedReport(_parameter_of(group) * linked, group.cohort)
    messages = ceil(group.release.units / linked) * group.rounds
    if messages == 1:
        bound = _stated_or_least(stated_epsilon, lambda epsilon: _delta_at(report, epsilon), delta, report.max_loss)
        return bound, "clones, in extended precision"
    return composed_epsilon([(report, messages)], delta, stated_epsilon), "clones, by convolution"


def _has_clones(group: ChargedRounds) -> bool:
    """Return whether the theorem on clones covers ``group``: any reports, or single bits whose client joins one round in secret order."""
    single_in_order = group.sampling == "once" and group.release.units == 1
    return group.channel == "ideal-shuffler" and (group.release.kind == "pure" or (group.release.kind == "binary" and single_in_order))


def _sums_integers(group: ChargedRounds) -> bool:
    """Return whether reports consist of integers, so that the noise of a sum over clients is the sum of their noise."""
    return group.release.integers or group.release.unit in _PARTS_OF_A_CLIENT


def _is_bits_of_known_clients(group: ChargedRounds) -> bool:
    """Return whether ``group`` consists of bits, and an observer may know which clients take part, but not in which secret order."""
    everyone = group.sampling != "secret" or group.rate == 1
    single_in_order = group.sampling == "once" and group.release.units == 1
    return group.release.kind == "binary" and group.channel in ("ideal-shuffler", "secure-sum") and everyone and not single_in_order


def _is_single_counted_bit(group: ChargedRounds) -> bool:
    """Return whether an observer sees of each bit only how many clients sent a one."""
    return _is_bits_of_known_clients(group) and group.release.sampled == 1 and _linked_units(group) == 1


def _linked_units(group: ChargedRounds) -> int:
    """Return the number of units that stay together in a message. A sum separates all units."""
    return 1 if group.channel == "secure-sum" else min(group.linked, group.release.units)


def _is_one_clipped_vector(group: ChargedRounds) -> bool:
    """Return whether each client sends one clipped vector with Gaussian noise, with the same clipping and noise for all clients."""
    return group.release.kind == "gaussian" and group.release.alike and group.release.unit == "vector" and group.release.units == 1


def _message_epsilon(group: ChargedRounds) -> float:
    """Return the epsilon of one message. Units that stay together add up, but bits that stay together have an accountant of their own."""
    return _parameter_of(group) * (group.linked if group.release.kind == "pure" else 1)


def _message_blanket(group: ChargedRounds) -> float:
    """Return the blanket of one message. It is 0 if none is stated, or if the stated one is smaller than epsilon allows.

    A bit about a coordinate that its client drew in secret has a uniform place. Its blanket is twice the probability of a lie.
    """
    if group.release.kind == "binary" and group.release.sampled > 1 and min(group.linked, group.release.units) == 1:
        return 2 / (1 + exp(_parameter_of(group))) if group.sampling != "secret" or group.rate == 1 else 0.0
    if group.release.kind != "pure" or not group.release.blanket:
        return 0.0
    return float(group.release.blanket**group.linked) if group.release.blanket >= exp(-_parameter_of(group)) else 0.0


def _stated_or_least(stated_epsilon: float, delta_at: Callable[[float], float], delta: float, sufficient_epsilon: float = inf) -> float:
    """Return ``stated_epsilon`` if it holds at ``delta``, and otherwise the smallest epsilon that does, which takes many times as long."""
    if stated_epsilon < inf and delta_at(stated_epsilon) <= delta * SAME:
        return stated_epsilon
    return least_epsilon(delta_at, delta, min(stated_epsilon, 1.0), sufficient_epsilon)


def _stated_or_tabulated(release: ReleaseBound, delta: float, stated_epsilon: float) -> float:
    """Return ``stated_epsilon`` if it holds at ``delta``, and otherwise an epsilon that does.

    It is found in a table of delta at many epsilons, and then in a finer table between two of these. If none of them is enough, it is the
    largest possible loss.
    """
    if _delta_at(release, stated_epsilon) <= delta * SAME:
        return stated_epsilon
    low, high = 0.0, release.max_loss
    for _ in range(2):
        epsilons = np.linspace(low, high, CURVE_POINTS, dtype=np.longdouble)
        sufficient = np.flatnonzero(release.delta(epsilons) <= delta)
        if not sufficient.size:
            return high
        first = int(sufficient[0])
        low, high = float(epsilons[max(first - 1, 0)]), float(epsilons[first])
    return high


def _delta_at(release: ReleaseBound, epsilon: float) -> float:
    """Return an upper bound of delta at ``epsilon``. Above :data:`MAX_REPORT_EPSILON`, which would overflow, it is the larger one there."""
    return float(release.delta(np.array([min(epsilon, MAX_REPORT_EPSILON)], dtype=np.longdouble))[0])


def _parameter_of(group: ChargedRounds) -> float:
    """Return the epsilon, or for Gaussian noise the mu, of one unit of a report."""
    if group.release.parameter is None:
        raise ValueError("an unprotected release has no parameter")
    return group.release.parameter
