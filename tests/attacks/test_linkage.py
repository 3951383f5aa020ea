"""Linkage by arrival times: closed forms, enumeration of all matchings, and what delays, waits, jitter and watched rounds change."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise, permutations
from math import sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad
from scipy.stats import norm, t

from grids import each
from ldpfl.attacks.linkage import (
    LinkagePlan,
    LinkageSetting,
    Mixing,
    Success,
    attack_release,
    attack_windows,
    epsilon_of_linked,
    linkage,
    uniform_mixing,
    window_starts,
)
from ldpfl.attacks.linkage_posterior import CONFIDENCE, Array, arrival_density, matching_probabilities
from ldpfl.errors import ConfigError
from ldpfl.privacy.accountants.randomized_response import composed_epsilon
from ldpfl.privacy.accountants.shuffled_bits import single_epsilon
from ldpfl.relay.uniform_order import scatter

KNOWN = LinkageSetting(clients=2, parameters=4_000, jitter=0, uncertainty=0, watched=(1,))
SMALL = LinkageSetting(clients=20, parameters=50, watched=(1, 100))


def generator(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def within(share: float, expected: float, trials: int) -> bool:
    """|z| < 4.5 for a share of so many independent trials: a false alarm once in 150,000 seeds; the seeds are fixed."""
    return abs(share - expected) <= 4.5 * sqrt(expected * (1 - expected) / trials) + 1e-9


# Closed forms.


@pytest.mark.parametrize("clients", [2, 7, 40])
def test_reports_sent_at_once_at_different_times_are_all_linked(clients: int) -> None:
    found = attack_windows(np.arange(clients) * 3.0, 0, replace(KNOWN, parameters=30), generator())
    assert found == Success((1.0,), 1.0, 30)


@pytest.mark.parametrize(("delay", "jitter"), [(0, 0), (5, 0), (0, 0.1), (5, 0.1)])
@pytest.mark.parametrize("clients", [2, 7, 40])
def test_windows_that_coincide_say_nothing(clients: int, delay: float, jitter: float) -> None:
    """Times are the same in law for all clients, so all is chance, exactly."""
    found = attack_windows(np.full(clients, 3.0), delay, replace(KNOWN, parameters=30, jitter=jitter), generator())
    assert found.attributed[0] == pytest.approx(1 / clients, abs=1e-9)
    assert found.auc == 0.5
    assert found.linked == 0


@pytest.mark.parametrize("gap", [0.5, 3.0, 8.0, 10.0, 12.0])
def test_two_windows_that_overlap(gap: float) -> None:
    """A parameter is undecided if both reports fall where the windows, 10 s long, overlap: with probability q^2, q = 1 - gap / 10.

    Then both reports are a coin toss, and otherwise both are certain.
    """
    found = attack_windows(np.array([0.0, gap]), 10, KNOWN, generator())
    undecided = max(0.0, 1 - gap / 10) ** 2
    assert within((1 - found.attributed[0]) * 2, undecided, KNOWN.parameters)
    assert within(found.linked / KNOWN.parameters, 1 - undecided, KNOWN.parameters)
    # Of 8,000 pairs of pairs; the shares of undecided pairs of parameters are not independent, hence the wider bound.
    certain = (1 - undecided) ** 2
    assert found.auc == pytest.approx(1 - (1 - certain) ** 2 / 2, abs=0.02)


@pytest.mark.slow
@pytest.mark.thorough
def test_two_clients_whose_usual_times_are_known_within_an_error() -> None:
    """Windows are told apart, and whose is which is guessed rightly with probability Phi(gap / (sqrt(2) u))."""
    setting = replace(KNOWN, parameters=2, uncertainty=1.0, watched=(1, 4))
    draws = [attack_windows(np.array([0.0, 0.7]), 0, setting, generator(seed)).attributed for seed in range(500)]
    for share, rounds in zip(np.mean(draws, axis=0), setting.watched, strict=True):
        assert within(share, norm.cdf(0.7 * sqrt(rounds / 2)), len(draws))


@pytest.mark.parametrize(("delay", "jitter"), [(0, 1), (1, 0.3), (4, 0.05), (0.1, 2), (3, 0)])
def test_arrivals_follow_the_density_that_the_observer_uses(delay: float, jitter: float) -> None:
    """Share of one million draws below each of nine lags, |z| < 4.5 for 45 lags: a false alarm once in 3,000 seeds."""
    draws = delay * generator(3).random(10**6) + jitter * generator(4).standard_normal(10**6)
    low, high = -7 * jitter, delay + 7 * jitter

    def density(lag: float) -> float:
        return float(arrival_density(np.array(lag), delay, jitter))

    edges = [0.0, delay, low, high]
    total = quad(density, low, high, points=edges, limit=200)[0]
    for lag in np.linspace(low, high, 11)[1:-1]:
        share = quad(density, low, lag, points=[edge for edge in edges if low <= edge <= lag], limit=200)[0] / total
        assert within(float(np.mean(draws <= lag)), min(share, 1.0), draws.size)


# Enumeration.


def marginals(weights: Array) -> Array:
    """Return the exact posterior of each report's window, by all n! matchings of every parameter."""
    orders = np.array(list(permutations(range(weights.shape[-1]))))
    reports = np.arange(orders.shape[1])
    likelihood = weights[:, reports, orders].prod(axis=2)
    members = (orders[:, :, None] == reports).astype(float)
    found = np.einsum("pm,mrk->prk", likelihood, members)
    return np.asarray(found / found.sum(axis=2, keepdims=True))


@pytest.mark.parametrize("delay", [0.1, 0.5, 1.0, 5.0])
def test_six_clients_are_named_and_linked_as_by_enumeration(delay: float) -> None:
    """The observer's share of right names is that of the exact posterior, up to 2.5 % of it and 4.5 standard errors of the sampling."""
    starts, jitter, parameters = np.array([0.02, 0.04, 0.27, 0.64, 0.81, 0.91]), 0.05, 1_000
    setting = replace(KNOWN, clients=6, parameters=parameters, jitter=jitter)
    found = attack_windows(starts, delay, setting, generator())
    lags = starts + delay * generator(9).random((parameters, 6)) + jitter * generator(8).standard_normal((parameters, 6))
    exact = marginals(arrival_density(lags[:, :, None] - starts, delay, jitter))
    best = float(exact.max(axis=2).mean())  # the expected share, for the exact posterior is right as often as it says
    assert found.attributed[0] == pytest.approx(best, rel=0.025, abs=4.5 * sqrt(best * (1 - best) / parameters))
    # Large sets are as large; of small ones the rehearsed threshold takes in reports that are less sure one by one.
    linked = int((exact.max(axis=1) >= CONFIDENCE).sum(axis=0).max())
    assert 0.85 * linked - 5 <= found.linked <= (1.1 * linked if linked > 200 else 3 * linked + 25)


def test_scaling_is_exact_where_one_or_every_matching_is_possible() -> None:
    np.testing.assert_allclose(matching_probabilities(np.ones((3, 5, 5))), 0.2)
    order = generator().permutation(6)
    np.testing.assert_array_equal(matching_probabilities(np.eye(6)[order] * generator().random((6, 1))), np.eye(6)[order])


# What a relay's order gives away.

FALSE_ALARM = 1e-6  # of each t test below, were its seed not fixed


def relay_mixing(parts: int) -> Mixing:
    """The relay's own code, over so many parts, on records that hold their number."""

    def mixing(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        numbers = np.arange(count, dtype="<i8").tobytes()
        scattered = scatter([numbers], 8, parts, lambda some: generator.bit_generator.random_raw(some).astype(np.int32), io.BytesIO())
        return np.frombuffer(b"".join(scattered.part(number) for number in range(parts)), dtype="<i8").astype(np.int64)

    return mixing


def kept(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    return np.arange(count)


def shuffled_but(share: float) -> Mixing:
    """A mixing that leaves a share of the reports where they came."""

    def mixing(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        order = np.arange(count)
        moved = np.flatnonzero(generator.random(count) >= share)
        order[moved] = order[generator.permutation(moved)]
        return order

    return mixing


def in_stretches(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """A mixing whose parts are mixed each, and filled one after the other: a quarter of the uploads each."""
    return np.concatenate([generator.permutation(part) for part in np.array_split(np.arange(count), 4)])


def by_client(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """A mixing of whole uploads: whose is which, it hides, but not what belongs together."""
    blocks = np.arange(count).reshape(SMALL.clients, -1)
    return blocks[generator.permutation(SMALL.clients)].ravel()


def released(mixing: Mixing, trials: int = 20) -> list[Success]:
    draws = [generator(seed) for seed in range(trials)]
    return [attack_release(window_starts(SMALL, "direct", draw), SMALL, draw, mixing) for draw in draws]


def departures(found: list[Success]) -> list[float]:
    """Return p-values: how easily chance alone brings as many right names after 1 and 100 rounds, and pairs told apart."""
    named = [p_value([one.attributed[place] for one in found], 1 / SMALL.clients) for place in range(2)]
    return [*named, p_value([one.auc for one in found], 0.5)]


def p_value(values: list[float], expected: float) -> float:
    """Of a t test, two-sided, also where all values are the same."""
    error = max(float(np.std(values, ddof=1)), 1e-9) / sqrt(len(values))
    return float(2 * t.sf(abs(np.mean(values) - expected) / error, len(values) - 1))


@pytest.mark.slow
@pytest.mark.parametrize("mixing", [uniform_mixing, relay_mixing(1), relay_mixing(8)], ids=["uniform", "relay", "relay, 8 parts"])
@pytest.mark.thorough_for("uniform", "relay")
def test_an_order_that_is_mixed_gives_nothing_away(mixing: Mixing) -> None:
    found = released(mixing)
    assert min(departures(found)) > FALSE_ALARM
    assert max(one.linked for one in found) <= 1


@pytest.mark.parametrize(
    ("mixing", "linked"),
    [(kept, SMALL.parameters), (shuffled_but(0.95), 40), (shuffled_but(0.05), 0), (in_stretches, 0), (by_client, 0)],
    ids=["kept", "5 % moved", "5 % kept", "parts in order", "whole uploads"],
)
@pytest.mark.slow
@pytest.mark.thorough_for("kept", "5 % moved", "parts in order")
def test_a_mixing_that_keeps_some_order_is_caught(mixing: Mixing, linked: int) -> None:
    """The same tests; those orders fail at least one of them a thousand times more clearly than chance is allowed to."""
    found = released(mixing)
    assert min(departures(found)) < FALSE_ALARM / 1_000
    assert min(one.linked for one in found) >= linked


def test_a_relay_that_keeps_the_order_is_as_bad_as_none() -> None:
    setting = replace(SMALL, jitter=0.0)
    starts = window_starts(setting, "direct", generator())
    assert attack_release(starts, setting, generator(2), kept) == attack_windows(starts, 0, setting, generator(2))


# What a setting changes.


def rows(setting: LinkageSetting, delays: list[float], trials: int = 3) -> dict[tuple[str, float | None], Any]:
    return {(row.channel, row.delay): row for row in linkage(setting, LinkagePlan(tuple(delays), trials)).rows}


def test_the_relay_is_chance_and_direct_is_not() -> None:
    found = rows(SMALL, [30.0])
    relay, direct = found["relay", None], found["direct", None]
    for place in range(2):
        assert within(relay.attributed(place).mean, 1 / 20, 3 * 20 * SMALL.parameters)
    assert relay.auc.mean == pytest.approx(0.5, abs=0.02)  # 0.005 is the standard deviation of one trial
    assert relay.linked.mean <= 1
    assert relay.epsilon == single_epsilon(1, 20, 1e-5)
    assert direct.auc.mean > 0.99
    assert direct.linked.mean == SMALL.parameters


def test_longer_delays_and_waits_leave_less() -> None:
    found = rows(SMALL, [0.0, 5.0, 60.0, 600.0])
    direct = found["direct", None]
    for channel, delays in (("unaligned", [5.0, 60.0, 600.0]), ("delayed", [0.0, 5.0, 60.0, 600.0])):
        line = [direct, *(found[channel, delay] for delay in delays)]
        for before, after in pairwise(line):
            assert after.auc.mean <= before.auc.mean + 0.02
            assert after.attributed(1).mean <= before.attributed(1).mean + 0.005
            assert after.linked.mean <= before.linked.mean + 0.5
    for delay in (5.0, 60.0):
        assert found["delayed", delay].auc.mean < found["unaligned", delay].auc.mean - 0.05
    assert ("unaligned", 0.0) not in found


def test_perfect_waits_are_exactly_chance() -> None:
    """Clocks without error and a true T_S: the paper's claim holds, at any T, as far as arrival times go."""
    row = rows(replace(SMALL, clock=0.0), [0.0, 10.0])["delayed", 10.0]
    # Windows differ by rounding alone, of which the observer makes nothing.
    assert row.attributed(1).mean == pytest.approx(1 / 20, abs=0.005)
    assert row.auc.mean == pytest.approx(0.5, abs=0.02)
    assert row.linked.mean <= 1


def test_a_slow_client_that_is_late_is_linked() -> None:
    """Waits without error, but T_S 20 s too low: whoever finishes in the last 20 s stands apart."""
    exact = replace(SMALL, clock=0.0)
    late, in_time = (rows(setting, [5.0])["delayed", 5.0] for setting in (replace(exact, shortfall=20.0), exact))
    assert in_time.linked.mean <= 1
    assert late.linked.mean > 20
    assert late.auc.mean > in_time.auc.mean + 0.05


@pytest.mark.slow
def test_more_clients_hide_better_and_jitter_helps() -> None:
    few, many = (rows(replace(SMALL, clients=count), [20.0])["unaligned", 20.0] for count in (5, 40))
    assert many.attributed(0).mean < few.attributed(0).mean / 2
    assert many.linked.mean < few.linked.mean
    quiet, loud = (rows(replace(SMALL, jitter=jitter), [5.0])["direct", None] for jitter in (0.05, 10.0))
    assert loud.auc.mean < quiet.auc.mean - 0.1
    assert loud.linked.mean < quiet.linked.mean / 2


def test_watched_rounds_name_more_up_to_what_known_windows_allow() -> None:
    row = rows(replace(SMALL, uncertainty=5.0, watched=(1, 10, 100_000)), [5.0], trials=4)["unaligned", 5.0]
    first, second, last = (row.attributed(place).mean for place in range(3))
    assert first < second < last
    known = rows(replace(SMALL, uncertainty=0.0, watched=(1,)), [5.0], trials=4)["unaligned", 5.0]
    assert last == pytest.approx(known.attributed(0).mean, abs=0.03)


def test_parameters_in_several_blocks_are_the_same_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming and linking are exact whatever the block; pairs are drawn within blocks, so the AUC varies within its sampling error."""
    starts = window_starts(SMALL, "direct", generator())
    whole = attack_windows(starts, 10, SMALL, generator(2))
    monkeypatch.setattr("ldpfl.attacks.linkage._BLOCK", 1)
    parts = attack_windows(starts, 10, SMALL, generator(2))
    assert parts.attributed == pytest.approx(whole.attributed)
    assert parts.linked == whole.linked
    assert parts.auc == pytest.approx(whole.auc, abs=0.03)


def ends_and(*between: float) -> list[Any]:
    """Sizes of which those in between are thorough."""
    return [0.0, *(pytest.param(size, marks=pytest.mark.thorough) for size in between), 1e9]


@pytest.mark.parametrize("jitter", [1e-9, *ends_and(1e-6, 1.0)])
@pytest.mark.parametrize("spread", ends_and(60.0))
@pytest.mark.parametrize("delay", [1e-9, *ends_and(1e-3, 1.0)])
def test_times_of_any_size_give_shares_that_are_finite(delay: float, jitter: float, spread: float) -> None:
    setting = LinkageSetting(5, 4, spread=spread, jitter=jitter, clock=1e-9, uncertainty=1e-9)
    for row in linkage(setting, LinkagePlan((delay,), 1)).rows:
        (found,) = row.found
        assert all(0 <= share <= 1 for share in found.attributed)
        assert 0 <= found.auc <= 1
        assert 0 <= found.linked <= 4


def test_seeds_repeat_and_every_trial_is_announced() -> None:
    calls: list[tuple[int, int]] = []
    first = linkage(SMALL, LinkagePlan((5.0,), 2, 3), lambda done, total: calls.append((done, total)))
    assert calls == [(done, 8) for done in range(1, 9)]
    assert first == linkage(SMALL, LinkagePlan((5.0,), 2, 3))
    assert first.rows[1].found != linkage(SMALL, LinkagePlan((5.0,), 2, 4)).rows[1].found
    written = json.loads(json.dumps(first.to_dict()))
    assert [row["channel"] for row in written["rows"]] == ["direct", "unaligned", "delayed", "relay"]
    assert len(written["rows"][0]["found"]) == 2


# What linking costs.


def test_linked_reports_compose_and_a_single_one_is_shuffled() -> None:
    assert epsilon_of_linked(0, 1, 100, 1e-5) == epsilon_of_linked(1, 1, 100, 1e-5) == single_epsilon(1, 100, 1e-5)
    assert epsilon_of_linked(2, 1, 100, 1e-5) == pytest.approx(2, abs=1e-3)
    assert epsilon_of_linked(200, 1, 100, 1e-5) == composed_epsilon(1, 200, 1e-5) < 200
    costs = [epsilon_of_linked(count, 1, 100, 1e-5) for count in range(1, 60)]
    assert costs == sorted(costs)


# Bad input.


@each(
    ("change", "message"),
    [
        ({"clients": 1}, "clients must be 2"),
        ({"clients": 2_001}, "clients must be 2"),
        ({"parameters": 1}, "parameters must be 2"),
        *(
            ({name: bad}, f"{name} must be")
            for name in ("spread", "jitter", "clock", "uncertainty")
            for bad in (-1.0, np.nan, np.inf, 1e-10, 1e10)
        ),
        ({"shortfall": 61.0}, "shortfall"),
        ({"watched": ()}, "watched"),
        ({"watched": (0,)}, "watched"),
        ({"watched": (10, 1)}, "watched"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LinkageSetting(), **change)


@pytest.mark.parametrize("delays", [(), (-1.0,), (np.nan,), (np.inf,), (1.0, 1.0)])
def test_delays_that_cannot_be_are_refused(delays: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="delays"):
        LinkagePlan(delays)


def test_trials_seeds_and_channels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="trials"):
        LinkagePlan((1.0,), 0)
    with pytest.raises(ConfigError, match="seed"):
        LinkagePlan((1.0,), 1, -1)
    with pytest.raises(ConfigError, match="no time windows"):
        window_starts(SMALL, "relay", generator())
