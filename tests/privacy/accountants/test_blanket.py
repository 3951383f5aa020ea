"""What reports have in common hides them: against data sets of few clients, and against the sum that bounds them, by enumeration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, permutations, product
from math import comb, exp, factorial, inf, log, prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ldpfl import ConfigError
from ldpfl.privacy.accountants.behind_shuffler import BlanketedReports, ClonedReports
from ldpfl.privacy.accountants.blanket import Bits, Hidden, Report, blanket_epsilon
from ldpfl.privacy.accountants.clones import clone_probability, composed_clone_epsilon
from ldpfl.privacy.accountants.registry import accountant, behind_shuffler
from ldpfl.privacy.accountants.shuffled_bits import single_delta
from ldpfl.privacy.accountants.shuffled_composition import ShuffledRounds, certified_epsilon
from ldpfl.privacy.accounting import account
from ldpfl.privacy.charged_rounds import RoundGroup
from ldpfl.privacy.events import BinaryRelease, PureRelease, RoundEvent
from ldpfl.privacy.ledger import Ledger

Record = tuple[int, ...]
Law = dict[Record, float]
View = tuple[Record, ...]

EPSILONS = (0.0, 0.05, 0.3, 0.8, 1.5)


def record_law(epsilon0: float, signs: tuple[int, ...]) -> Law:
    """Return the probability of each record of bits, for a client whose bits are ``signs``."""
    p = 1 / (1 + exp(-epsilon0))
    return {y: prod(p if a == b else 1 - p for a, b in zip(y, signs, strict=True)) for y in product((0, 1), repeat=len(signs))}


def place_law(epsilon0: float, signs: tuple[int, ...]) -> Law:
    """Return the probability of each (place, bit), for a client that draws one of its places."""
    p = 1 / (1 + exp(-epsilon0))
    return {(j, b): (p if b == sign else 1 - p) / len(signs) for j, sign in enumerate(signs) for b in (0, 1)}


def shuffled(laws: list[Law]) -> dict[View, float]:
    """Return the law of the multiset that clients with these laws make."""
    seen: dict[View, float] = {(): 1.0}
    for law in laws:
        after: dict[View, float] = {}
        for before, chance in seen.items():
            for y, p in law.items():
                view = tuple(sorted((*before, y)))
                after[view] = after.get(view, 0.0) + chance * p
        seen = after
    return seen


def distance(first: Mapping[Any, float], second: Mapping[Any, float], epsilon: float) -> float:
    return float(sum(max(0.0, p - exp(epsilon) * second.get(y, 0.0)) for y, p in first.items()))


@pytest.mark.parametrize(("law", "bits"), [(record_law, 2), (place_law, 2), (record_law, 1), (place_law, 3)])
@pytest.mark.parametrize("epsilon0", [0.3, 1.2])
@pytest.mark.thorough_for("0.3-place_law-3")
def test_no_data_set_of_few_clients_exceeds_the_bound(law: Callable[[float, Record], Law], bits: int, epsilon0: float) -> None:
    """All inputs of three clients, in both directions: 3 of the records, of which one may be replaced."""
    linked = bits if law is record_law else 1
    inputs = list(product((0, 1), repeat=bits))
    bounds = {epsilon: Bits(epsilon0, linked).delta(3, epsilon) for epsilon in EPSILONS}
    reached = dict.fromkeys(EPSILONS, 0.0)
    for others in combinations_with_replacement(inputs, 2):
        rest = [law(epsilon0, other) for other in others]
        views = {own: shuffled([law(epsilon0, own), *rest]) for own in inputs}
        for one, other in product(inputs, inputs):
            for epsilon in EPSILONS:
                reached[epsilon] = max(reached[epsilon], distance(views[one], views[other], epsilon))
    for epsilon in EPSILONS:
        assert reached[epsilon] <= bounds[epsilon] + 1e-12
    assert reached[0.0] > 0.5 * bounds[0.0]  # and it is no bound that says nothing


@pytest.mark.parametrize(("epsilon0", "bits", "clients"), [(0.4, 2, 9), (0.4, 3, 7), (1.5, 2, 6), (0.1, 4, 8)])
def test_the_lattice_adds_next_to_nothing_to_the_sum_it_bounds(epsilon0: float, bits: int, clients: int) -> None:
    p = 1 / (1 + exp(-epsilon0))
    uniform = (2 * (1 - p)) ** bits
    weights = [comb(bits, k) / 2**bits for k in range(bits + 1)]
    for epsilon in EPSILONS:
        gains = [
            (2 * p) ** k * (2 - 2 * p) ** (bits - k) - exp(epsilon) * (2 * p) ** (bits - k) * (2 - 2 * p) ** k for k in range(bits + 1)
        ]
        expected = 0.0
        for size in range(clients + 1):
            chance = comb(clients, size) * uniform**size * (1 - uniform) ** (clients - size)
            for drawn in combinations_with_replacement(range(bits + 1), size):
                ways = factorial(size) / prod(factorial(times) for times in Counter(drawn).values())
                expected += chance * ways * prod(weights[k] for k in drawn) * max(0.0, sum(gains[k] for k in drawn))
        exact = expected / (uniform * clients)
        found = Bits(epsilon0, bits).delta(clients, epsilon)
        assert exact <= found + 1e-13
        assert found == pytest.approx(min(exact, found), rel=3e-3, abs=1e-9)


@pytest.mark.slow
@pytest.mark.thorough
def test_composition_holds_for_two_records_of_two_clients() -> None:
    """By enumeration of all four-tuples of shuffled views, for the inputs that are worst: all bits differ."""
    epsilon0, delta = 0.5, 0.01
    epsilon = blanket_epsilon([Hidden(Bits(epsilon0, 2), 2, 2)], delta)
    ones, zeros = record_law(epsilon0, (1, 1)), record_law(epsilon0, (0, 0))
    for rest in (ones, zeros, record_law(epsilon0, (1, 0))):
        first, second = shuffled([ones, rest]), shuffled([zeros, rest])
        both = {(a, b): first[a] * first[b] for a in first for b in first}
        other = {(a, b): second[a] * second[b] for a in second for b in second}
        assert distance(both, other, epsilon) <= delta * (1 + 1e-9)


@dataclass(frozen=True)
class Reporting:
    """What clients of made-up mechanisms send one after another; which law they draw from may depend on all that was sent before."""

    epsilon0: float
    share: float
    random: np.random.Generator
    outcomes: int = 3
    known: dict[tuple[str, tuple[int, ...]], list[float]] = field(default_factory=dict)

    def law(self, client: str, before: tuple[int, ...]) -> list[float]:
        """Return densities between ``share`` and ``share`` e^epsilon0 times those of a law that clients have in common."""
        common = self.known.setdefault(("", before), self.random.dirichlet(np.ones(self.outcomes)).tolist())
        if (client, before) not in self.known:
            self.known[client, before] = self._tilted(np.array(common))
        return self.known[client, before]

    def _tilted(self, common: NDArray[np.float64]) -> list[float]:
        while True:
            tilt = self.random.integers(0, 2, self.outcomes) * self.random.choice([1.0, self.random.random()])
            most = float(common @ tilt) * self.share * (exp(self.epsilon0) - 1)
            if most >= 1 - self.share:
                return list(common * (self.share + (1 - self.share) * tilt * self.share * (exp(self.epsilon0) - 1) / most))

    def views(self, own: str, others: tuple[str, ...]) -> dict[tuple[int, ...], float]:
        """Return the law of what is seen of clients in a secret random order."""
        seen: dict[tuple[int, ...], float] = {}
        orders = list(permutations((own, *others)))
        for order in orders:
            for view in product(range(self.outcomes), repeat=len(order)):
                chance = 1.0
                for place, client in enumerate(order):
                    chance *= self.law(client, view[:place])[view[place]]
                seen[view] = seen.get(view, 0.0) + chance / len(orders)
        return seen


@pytest.mark.parametrize(("epsilon0", "share"), [(0.7, 0.75), (0.7, 2 / (1 + exp(0.7))), (2.0, 0.4), (2.0, 0.2)])
@pytest.mark.thorough_for("0.7-0.6636244556636678", "2.0-0.2", "2.0-0.4")
@pytest.mark.slow
def test_no_reports_with_a_blanket_exceed_the_bound_in_whatever_order_they_come(epsilon0: float, share: float) -> None:
    """Forty made-up systems of three clients, whose mechanisms, and what they have in common, depend on what was seen before."""
    bounds = {epsilon: Report(epsilon0, share).delta(3, epsilon) for epsilon in EPSILONS}
    random, nearest = np.random.default_rng(0), 0.0
    for _ in range(40):
        system = Reporting(epsilon0, share, random)
        first, second = (system.views(own, ("a", "b")) for own in ("one", "other"))
        for epsilon in EPSILONS:
            reached = max(distance(first, second, epsilon), distance(second, first, epsilon))
            assert reached <= bounds[epsilon] + 1e-12
            nearest = max(nearest, reached / bounds[epsilon]) if epsilon == 0 else nearest
    assert nearest > 0.3  # and it is no bound that says nothing


@pytest.mark.parametrize(("epsilon0", "share", "clients"), [(1.0, exp(-0.5), 9), (1.0, 2 / (1 + exp(1)), 9), (6.0, 0.1, 8), (1.0, 0.45, 7)])
def test_the_lattice_adds_next_to_nothing_to_the_sum_of_three_kinds(epsilon0: float, share: float, clients: int) -> None:
    high = share * exp(epsilon0)
    often = (1 - share) / (high - share)
    chances = (min(often, 1 - often), min(often, 1 - often), abs(1 - 2 * often))
    both = share if often <= 0.5 else high
    for epsilon in EPSILONS[: 4 if epsilon0 < 1.5 else 5]:
        gains = (high - exp(epsilon) * share, share - exp(epsilon) * high, both * (1 - exp(epsilon)))
        expected = 0.0
        for a, b, c in product(range(clients + 1), repeat=3):
            if a + b + c <= clients:
                ways = factorial(clients) / prod(map(factorial, (a, b, c, clients - a - b - c)))
                drawn = a + b + c
                chance = share**drawn * (1 - share) ** (clients - drawn) * prod(q**k for q, k in zip(chances, (a, b, c), strict=True))
                expected += ways * chance * max(0.0, a * gains[0] + b * gains[1] + c * gains[2])
        found = Report(epsilon0, share).delta(clients, epsilon)
        assert expected / (share * clients) <= found + 1e-13
        assert found == pytest.approx(expected / (share * clients), rel=3e-3, abs=1e-9)


@pytest.mark.slow
@pytest.mark.thorough
def test_more_in_common_hides_more_and_never_less_than_any_report_does() -> None:
    """And a report whose two halves are all that it tells is a bit."""

    def epsilon(share: float) -> float:
        return blanket_epsilon([Hidden(Report(1.0, share), 500, 20)], 1e-6)

    bits = 2 / (1 + exp(1.0))
    assert epsilon(0.8) < epsilon(exp(-0.5)) < epsilon(bits)
    assert epsilon(bits) == pytest.approx(blanket_epsilon([Hidden(Bits(1.0, 1), 500, 20)], 1e-6), rel=5e-3)
    assert epsilon(bits) < composed_clone_epsilon(1.0, 500, 20, 1e-6, clone_probability(1.0))


def cloned(group: RoundGroup) -> ClonedReports:
    return ClonedReports([group], accountant([(group.release, group.rounds)]))


@pytest.mark.parametrize("linked", [1, 3])
@pytest.mark.slow
@pytest.mark.thorough
def test_reports_behind_a_shuffler_are_between_what_a_data_set_attains_and_what_is_certified(linked: int) -> None:
    release = PureRelease("laplace", 0.5, 12, "weight", blanket=exp(-0.25), signed=True)
    group = RoundGroup(release, 400, 400, 5, linked=linked)
    found = behind_shuffler([group])
    assert isinstance(found, BlanketedReports)
    bounds = found.bounds(1e-6)
    assert bounds.adaptive < cloned(group).epsilon(1e-6)
    assert bounds.attained is not None
    assert 0.3 / linked * bounds.adaptive < bounds.attained <= bounds.adaptive


@pytest.mark.slow
@pytest.mark.thorough
def test_two_more_rounds_among_fewer_cost_more_behind_a_shuffler() -> None:
    group = RoundGroup(PureRelease("laplace", 0.5, 12, "weight", blanket=exp(-0.25), signed=True), 400, 400, 5)
    alike, unlike = behind_shuffler([group]), behind_shuffler([group, replace(group, rounds=2, cohort=300)])
    assert alike is not None
    assert unlike is not None
    assert alike.bounds(1e-6).adaptive < unlike.epsilon(1e-6)


@pytest.mark.parametrize("epsilon0", [1e-6, 1e-3, 0.5])
def test_a_lone_report_costs_the_mean_of_its_gain_above_zero(epsilon0: float) -> None:
    """The characteristic function of one term is 0 at some frequencies, and 0 has no logarithm: a warning would fail this test."""
    record = Report(epsilon0, (1 + exp(-epsilon0)) / 2)
    for part in (1e-9, 0.1, 0.5):
        values, chances = record.gains(part * epsilon0)
        exact = float(np.dot(np.maximum(values, 0.0), chances))
        assert exact <= record.delta(1, part * epsilon0) <= 1.005 * exact


@pytest.mark.slow
@pytest.mark.thorough
def test_a_single_bit_costs_little_more_than_its_count() -> None:
    assert single_delta(0.1, 500, 0.01) <= Bits(0.1, 1).delta(500, 0.01) <= 1.2 * single_delta(0.1, 500, 0.01)
    counted = certified_epsilon([ShuffledRounds(0.1, 2000, 64, 10)], 1e-5)[1]
    linked = blanket_epsilon([Hidden(Bits(0.1, 1), 2000, 640)], 1e-5)
    assert counted <= linked <= 1.05 * counted


@pytest.mark.slow
@pytest.mark.thorough
def test_links_cost_more_the_longer_they_are_and_far_less_than_any_report_would() -> None:
    release = BinaryRelease("rotated-sign", 0.06, 4096, unit="coordinate")
    groups = {linked: RoundGroup(release, 20_000, 20_000, 5, linked=linked) for linked in (1, 2, 8, 32)}
    found = {}
    for linked, group in groups.items():
        composed = behind_shuffler([group])
        assert composed is not None
        found[linked] = composed.epsilon(1e-5)
    assert found[1] < found[2] < found[8] < found[32]
    assert found[8] < 1.3 * found[1]
    assert found[32] < 0.25 * cloned(groups[32]).epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sampled_coordinate_costs_what_a_known_one_costs_to_a_blanket() -> None:
    """s of D bits at sqrt(D / s) times the epsilon: as private, while epsilon is small."""
    whole = RoundGroup(BinaryRelease("rotated-sign", 0.02, 256, unit="coordinate"), 2000, 2000, 5)
    part = RoundGroup(BinaryRelease("rotated-sign", 0.08, 16, unit="coordinate", sampled=16), 2000, 2000, 5)
    figures = [behind_shuffler([group]).epsilon(1e-5) for group in (whole, part)]  # type: ignore[union-attr]
    assert figures[0] < figures[1] < 1.1 * figures[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_of_different_sizes_add_up_and_fewer_clients_hide_less() -> None:
    def epsilon(*sizes: int) -> float:
        return blanket_epsilon([Hidden(Bits(0.2, 4), size, 50) for size in sizes], 1e-5)

    assert epsilon(900) < epsilon(900, 1000) < epsilon(900, 900)
    many = [Hidden(Bits(0.2, 4), size, 10) for size in range(900, 1000, 25)]
    assert blanket_epsilon(many, 1e-5) >= blanket_epsilon([Hidden(Bits(0.2, 4), 1000, 40)], 1e-5)


def test_where_nothing_is_hidden_the_local_figures_hold() -> None:
    assert blanket_epsilon([Hidden(Bits(1.0, 2), 5, 3)], 0.0) == pytest.approx(6.0)
    assert blanket_epsilon([Hidden(Bits(0.5, 100), 10**6, 1)], 1e-5) <= 50.0
    assert blanket_epsilon([], 1e-5) == 0.0
    assert Bits(0.5, 2).delta(100, 1.0) == 0.0
    assert Bits(0.5, 2).delta(1, 0.5) > 0.0


@pytest.mark.parametrize("sampled", [0, -1, 10**13])
def test_a_bit_about_no_coordinate_is_refused(sampled: int) -> None:
    with pytest.raises(ConfigError, match="coordinates"):
        RoundEvent(1, BinaryRelease("rotated-sign", 0.1, 8, sampled=sampled), cohort=5, population=5, joined=1)


def test_the_budget_of_a_bit_may_be_huge() -> None:
    assert blanket_epsilon([Hidden(Bits(20.0, 2), 100, 1)], 1e-5) < inf


@pytest.mark.slow
@pytest.mark.thorough
def test_what_is_attained_is_not_said_of_clients_that_decide_in_secret() -> None:
    release = PureRelease("piecewise", 2.0, 100, "weight", blanket=exp(-1.0), signed=True)
    secret = behind_shuffler([RoundGroup(release, 90, 10_000, 20, sampling="secret", rate=0.01)])
    assert secret is not None
    assert secret.bounds(1e-5).attained is None


def test_nothing_is_said_to_be_attained_by_a_blanket_alone() -> None:
    """Hadamard response on 4 levels has this blanket, and no two of its inputs are as far apart as the blanket would allow."""
    epsilon, delta = 1.0, 0.2
    share = 2 / (exp(epsilon) + 1)
    alone = behind_shuffler([RoundGroup(PureRelease("hadamard", epsilon, 1, "weight", blanket=share), 1, 1)])
    assert alone is not None
    found, right = alone.bounds(delta), exp(epsilon) / (1 + exp(epsilon))
    assert found.attained is None
    assert found.adaptive > log((right - 2 * delta) / (1 - right))  # what two of its inputs cost, of which half the columns differ


@pytest.mark.thorough
def test_what_was_not_said_of_a_round_is_not_said_of_a_run() -> None:
    """A run that began before it was said: then nothing is said to be attained, in whatever order, and whatever was accounted before."""
    silent = PureRelease("laplace", 0.5, 2, "weight", blanket=exp(-0.25))
    signed = replace(silent, signed=True)

    def attained(*releases: PureRelease) -> float | None:
        events = (RoundEvent(number, release, 40, 40, number) for number, release in enumerate(releases, start=1))
        found = account(Ledger(tuple(events)), 1e-6).find("hidden", "run")
        assert found is not None
        return found.lower

    assert attained(signed, signed) is not None
    assert attained(silent, silent) is attained(signed, silent) is attained(silent, signed) is None
    assert attained(signed, signed) is not None
