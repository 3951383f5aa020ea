"""Decide which accountant computes a guarantee again, and when none does because it would take too long or is not there.

Every function returns an upper bound on epsilon with a text on how it was computed. The bound is None if nothing was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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

    The bound is the stated epsilon itself if that is proved to hold: finding a smaller epsilon would take many times as long.
    """
    units = {one.release.unit for one in charged}
    if any(one.release.kind == "unprotected" for one in charged):
        return inf, "a report left its client without protection, so no epsilon holds"
    if line.protects == "client" and units & _PARTS_OF_A_CLIENT:
        return inf, f"noise that protects one {'record' if 'record' in units else 'person'} bounds nothing for the client"
    if line.protects == "person" and "record" in units:
        return inf, "noise that protects one record bounds nothing for a person with several records"
    if line.adjacency != _ADJACENCY[line.protects]:
        return inf, f"the stated adjacency does not fit: what is protected is a {line.protects}"
    if line.protects == "record":
        charged = [_for_one_record(one) for one in charged]
    stated = epsilon_of(line)
    if line.trusted == "local":
        return _unshuffled(charged, line.delta, stated)
    channels = {one.channel for one in charged}
    if line.trusted != ("summed" if channels == {"secure-sum"} else "shuffled") or channels & {"direct", "random-delay"}:
        bound, _ = _unshuffled(charged, line.delta, stated)
        return bound, "computed without a shuffler or a sum, because reports did not travel as the guarantee says"
    shuffled, how = _shuffled(charged, line.delta, stated)
    if shuffled is not None and shuffled <= stated * SAME:
        return shuffled, how
    bound, _ = _unshuffled(charged, line.delta, stated)
    if bound is not None and (shuffled is None or bound < shuffled) and bound <= stated * (1 + TOLERANCE):
        return bound, "the bound without a shuffler is enough"
    return shuffled, how


def _for_one_record(one: ChargedRounds) -> ChargedRounds:
    """Return ``one`` as it counts for a record, if persons are protected.

    A record of one person in the place of another person's record changes the vectors of two persons, and each moves the sum by up to mu
    standard deviations. Whether a person takes part is random, but twice mu bounds the distance in any case. So the rate does not count.
    """
    if one.release.unit != "person" or one.release.parameter is None:
        return one
    return replace(one, release=replace(one.release, unit="record", parameter=2 * one.release.parameter, rate=1.0))


def _unshuffled(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    """Return the bound against an observer who knows the sender of every report."""
    pure = [(_parameter(one), one.release.units * one.rounds) for one in charged if one.release.kind != "gaussian"]
    noise = [one for one in charged if one.release.kind == "gaussian"]
    if delta == 0:
        return (inf, "Gaussian noise has no finite epsilon at delta 0") if noise else (float(pure_sum(pure)), "exact sum")
    if any(one.release.rate < 1 for one in noise):
        return None, "this package has no accountant for records that take part at random (Poisson sampling)"
    mu = sqrt(sum(_parameter(one) ** 2 * one.release.units * one.rounds for one in noise))
    if not pure:
        return _stated_or_least(stated, lambda epsilon: gaussian_delta(mu, epsilon), delta), "closed form of Gaussian noise, 150 digits"
    epsilons, number = {epsilon for epsilon, _ in pure}, sum(count for _, count in pure)
    if number > MAX_REPORTS or max(epsilons) > MAX_REPORT_EPSILON:
        limits = f"more than {MAX_REPORTS:,} reports, or an epsilon above {MAX_REPORT_EPSILON:g}"
        return (None if noise else float(pure_sum(pure))), f"exact sum only: {limits}"
    if len(epsilons) == 1 and not noise and number <= MAX_EQUAL_REPORTS:
        (epsilon0,) = epsilons
        return _equal_reports(epsilon0, number, delta, stated)
    if len(epsilons) > MAX_KINDS_OF_REPORTS:
        return None, f"{len(epsilons):,} different epsilons; this package composes at most {MAX_KINDS_OF_REPORTS}"
    if not noise and number <= MAX_EQUAL_REPORTS and stated < inf and different_reports_delta(pure, stated) <= delta * SAME:
        return stated, "exact sum over all outcomes"
    kinds: list[tuple[ReleaseBound, int]] = [(PureReport(epsilon), count) for epsilon, count in pure]
    kinds += [(GaussianReport(mu), 1)] if noise else []
    return composed_epsilon(kinds, delta, stated), "convolution and Renyi divergences"


def _equal_reports(epsilon0: float, number: int, delta: float, stated: float) -> Bound:
    """Return the bound for ``number`` reports at ``epsilon0``: exactly, unless that is a sum of many terms far from the stated epsilon."""

    def exact(epsilon: float) -> float:
        return randomised_response_delta(epsilon0, number, epsilon)

    if number <= FEW_REPORTS:
        return _stated_or_least(stated, exact, delta), "exact sum in interval arithmetic"
    bound = composed_epsilon([(PureReport(epsilon0), number)], delta, min(stated, epsilon0 * number))
    if bound <= stated * SAME:
        return bound, "convolution and Renyi divergences"
    truth = 1 / (1 + exp(-epsilon0))
    terms = number * (truth - 0.5) - stated / epsilon0 / 2 + 40 * sqrt(number * truth * (1 - truth))
    if bound > stated * FAR_APART and terms > MAX_TERMS:
        return bound, "convolution and Renyi divergences, far above the stated epsilon"
    if exact(stated) <= delta * SAME:
        return stated, "exact sum in interval arithmetic"
    return bound, "convolution and Renyi divergences; the exact sum shows that the stated epsilon does not hold"


def _shuffled(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    """Return the bound against an observer who sees what a shuffler or a sum lets through."""
    gaussian_sums = [one for one in charged if one.channel == "secure-sum" and one.release.kind == "gaussian"]
    if not all(_sums_integers(one) for one in gaussian_sums):
        return None, "floats that each client rounds do not add up exactly as their noise does"
    if len(gaussian_sums) == len(charged) and all(one.release.rate == 1 for one in charged):
        mu = sqrt(sum(_parameter(one) ** 2 * one.release.units * one.rounds / one.cohort for one in charged))
        paid = delta * (1 - GAUSSIAN_SUM_MARGIN)
        return _stated_or_least(stated, lambda epsilon: gaussian_delta(mu, epsilon), paid), "closed form of Gaussian noise, 150 digits"
    if len(charged) > MAX_KINDS_OF_SHUFFLED_ROUNDS:
        return None, f"{len(charged):,} kinds of shuffled rounds; this package composes at most {MAX_KINDS_OF_SHUFFLED_ROUNDS}"
    if any(_message_epsilon(one) > MAX_MESSAGE_EPSILON for one in charged if one.release.kind != "gaussian"):
        return None, f"the epsilon of a message is above {MAX_MESSAGE_EPSILON:g}: shuffling adds no protection"
    largest = max(one.cohort for one in charged)
    if largest > MAX_COHORT:
        return None, f"a cohort of {largest:,} clients; this package computes at most {MAX_COHORT:,}"
    if all(one.channel == "ideal-shuffler" and _is_clipped_vector(one) for one in charged):
        return _vectors(charged, delta, stated)
    if all(map(_is_single_counted_bit, charged)):
        return _single_bits(charged, delta, stated)
    if all(one.channel == "ideal-shuffler" and _message_blanket(one) for one in charged):
        return _blanketed_reports(charged, delta, stated)
    if all(map(_is_bits_of_known_clients, charged)):
        return _linked_bits(charged, delta, stated)
    if len(charged) == 1 and _has_clones(charged[0]):
        return _cloned_reports(charged[0], delta, stated)
    return None, "this package has no accountant for such rounds behind a shuffler, such as random check-in"


def _single_bits(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    bits = [(CountedBit(_parameter(one), one.cohort), one) for one in charged]
    if len(charged) == 1 and charged[0].release.units * charged[0].rounds == 1:
        bit = bits[0][0]
        bound = _stated_or_least(stated, lambda epsilon: _delta_at(bit, epsilon), delta, bit.max_loss)
        return bound, "every worst case of the other clients, in extended precision"
    bound = composed_epsilon([(bit, one.release.units * one.rounds) for bit, one in bits], delta, stated)
    if bound > stated * SAME:
        rounds = [(CountedRound(bit, one.release.units), one.rounds) for bit, one in bits]
        bound = min(bound, convolved_epsilon(rounds, delta, stated))
    return bound, "every worst case of the other clients, by convolution"


def _blanketed_reports(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    kinds: list[tuple[ReleaseBound, int]] = []
    for one in charged:
        report = BlanketedReport(_parameter(one) * one.linked, _message_blanket(one), one.cohort)
        if report.takes_long:
            return None, f"the blanket of {one.cohort:,} clients at so small an epsilon takes too long here"
        kinds.append((report, ceil(one.release.units / one.linked) * one.rounds))
    if sum(times for _, times in kinds) == 1:
        return _stated_or_tabulated(kinds[0][0], delta, stated), "blanket of one message, size by size of the anonymity set"
    return composed_epsilon(kinds, delta, stated), "blanket, by convolution"


def _vectors(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    """Return the bound for clipped vectors. The part that is not in the blanket is paid for, at an epsilon near the stated one first."""
    how, highest = "blanket of clipped vectors, by convolution", stated * (1 + TOLERANCE)
    unshuffled, _ = _unshuffled(charged, delta, stated)
    others = sum(one.rounds * (one.cohort - 1) for one in charged)
    if unshuffled is None or min(stated, unshuffled) > MAX_VECTOR_EPSILON or others == 0:
        return None, f"shuffling adds no protection to vectors at an epsilon above {MAX_VECTOR_EPSILON:g}, or to a single client"
    for epsilon in (highest, min(unshuffled, MAX_VECTOR_EPSILON)):
        variation = DELTA_SHARE_OF_BLANKET * delta / (1 + exp(epsilon)) / others
        bound = _vectors_at(charged, (1 - DELTA_SHARE_OF_BLANKET) * delta, stated, variation)
        if bound <= epsilon:
            return bound, how
    return unshuffled, "the bound without a shuffler is enough"


def _vectors_at(charged: Sequence[ChargedRounds], delta: float, stated: float, variation: float) -> float:
    """Return the bound if the blanket may miss a total variation of ``variation``; infinity if the blanket is next to nothing."""
    kinds: list[tuple[ReleaseBound, int]] = []
    for one in charged:
        share = common_share(_parameter(one), variation)
        if share is None:
            return inf
        kinds.append((ShuffledVector(_parameter(one), one.cohort, share), one.rounds))
    return convolved_epsilon(kinds, delta, stated)


def _linked_bits(charged: Sequence[ChargedRounds], delta: float, stated: float) -> Bound:
    kinds: list[tuple[ReleaseBound, int]] = []
    for one in charged:
        linked = _linked_units(one)
        if linked > MAX_LINKED_BITS:
            return None, f"{linked:,} bits stay together; this package computes at most {MAX_LINKED_BITS:,}"
        if linked * log(2 / (1 + exp(-_parameter(one)))) > MAX_LOG_GAIN_OF_LINKED_BITS:
            return None, f"{linked:,} bits that stay together at so large an epsilon identify their client: shuffling adds no protection"
        kinds.append((LinkedBits(_parameter(one), linked, one.cohort), ceil(one.release.units / linked) * one.rounds))
    bound, how = composed_epsilon(kinds, delta, stated), "blanket of linked bits, by convolution"
    many = sum(times for _, times in kinds) > MAX_LINKED_MESSAGES or max(one.cohort for one in charged) > MAX_LINKED_COHORT
    if bound > stated * (1 + TOLERANCE) and many:
        return None, f"{how}: with so many messages or clients it is too coarse to show that the stated epsilon does not hold"
    return bound, how


def _cloned_reports(one: ChargedRounds, delta: float, stated: float) -> Bound:
    linked = min(one.linked, one.release.units)
    report = ClonedReport(_parameter(one) * linked, one.cohort)
    messages = ceil(one.release.units / linked) * one.rounds
    if messages == 1:
        bound = _stated_or_least(stated, lambda epsilon: _delta_at(report, epsilon), delta, report.max_loss)
        return bound, "clones, in extended precision"
    return composed_epsilon([(report, messages)], delta, stated), "clones, by convolution"


def _has_clones(one: ChargedRounds) -> bool:
    """Return whether the theorem on clones covers ``one``: any reports, or single bits whose client joins one round in secret order."""
    single_in_order = one.sampling == "once" and one.release.units == 1
    return one.channel == "ideal-shuffler" and (one.release.kind == "pure" or (one.release.kind == "binary" and single_in_order))


def _sums_integers(one: ChargedRounds) -> bool:
    """Return whether reports consist of integers, so that the noise of a sum over clients is the sum of their noise."""
    return one.release.integers or one.release.unit in _PARTS_OF_A_CLIENT


def _is_bits_of_known_clients(one: ChargedRounds) -> bool:
    """Return whether ``one`` consists of bits, and an observer may know which clients take part, but not in which secret order."""
    everyone = one.sampling != "secret" or one.rate == 1
    single_in_order = one.sampling == "once" and one.release.units == 1
    return one.release.kind == "binary" and one.channel in ("ideal-shuffler", "secure-sum") and everyone and not single_in_order


def _is_single_counted_bit(one: ChargedRounds) -> bool:
    """Return whether an observer sees of each bit only how many clients sent a one."""
    return _is_bits_of_known_clients(one) and one.release.sampled == 1 and _linked_units(one) == 1


def _linked_units(one: ChargedRounds) -> int:
    """Return the number of units that stay together. A sum takes apart what travels together."""
    return 1 if one.channel == "secure-sum" else min(one.linked, one.release.units)


def _is_clipped_vector(one: ChargedRounds) -> bool:
    return one.release.kind == "gaussian" and one.release.alike and one.release.unit == "vector" and one.release.units == 1


def _message_epsilon(one: ChargedRounds) -> float:
    return _parameter(one) * (one.linked if one.release.kind == "pure" else 1)


def _message_blanket(one: ChargedRounds) -> float:
    """Return the blanket of one message, or 0 if none is stated, or one that no message at this epsilon has.

    A bit about a coordinate that its client drew in secret has a uniform place. Its blanket is twice the probability of a lie.
    """
    if one.release.kind == "binary" and one.release.sampled > 1 and min(one.linked, one.release.units) == 1:
        return 2 / (1 + exp(_parameter(one))) if one.sampling != "secret" or one.rate == 1 else 0.0
    if one.release.kind != "pure" or not one.release.blanket:
        return 0.0
    return float(one.release.blanket**one.linked) if one.release.blanket >= exp(-_parameter(one)) else 0.0


def _stated_or_least(stated: float, delta_at: Callable[[float], float], delta: float, most: float = inf) -> float:
    """Return ``stated`` if it holds, and otherwise the smallest epsilon that does, which takes many times as long to find."""
    return stated if stated < inf and delta_at(stated) <= delta * SAME else least_epsilon(delta_at, delta, min(stated, 1.0), most)


def _stated_or_tabulated(release: ReleaseBound, delta: float, stated: float) -> float:
    """Return ``stated`` if it holds, and otherwise an epsilon that does: by a table of delta, and a finer one between two of its points."""
    if _delta_at(release, stated) <= delta * SAME:
        return stated
    low, high = 0.0, release.max_loss
    for _ in range(2):
        places = np.linspace(low, high, CURVE_POINTS, dtype=np.longdouble)
        enough = np.flatnonzero(release.delta(places) <= delta)
        if not enough.size:
            return high  # the largest possible loss
        first = int(enough[0])
        low, high = float(places[max(first - 1, 0)]), float(places[first])
    return high


def _delta_at(release: ReleaseBound, epsilon: float) -> float:
    """Return an upper bound of delta at ``epsilon``: at :data:`MAX_REPORT_EPSILON` if that is less, since delta falls with epsilon."""
    return float(release.delta(np.array([min(epsilon, MAX_REPORT_EPSILON)], dtype=np.longdouble))[0])


def _parameter(one: ChargedRounds) -> float:
    if one.release.parameter is None:
        raise ValueError("an unprotected release has no parameter")
    return one.release.parameter
