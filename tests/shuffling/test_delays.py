"""Random delays: the waits make all clients alike, delays are uniform and independent, bad times are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ldpfl.errors import ConfigError, PrivacyError
from ldpfl.randomness import SecureSource, SeededStreams
from ldpfl.shuffling.delays import ResponseTime, agreed_delay, departures, is_late, random_delays, slowest_response, wait

TIMES = st.floats(0, 1e6)
RESPONSES = st.builds(ResponseTime, TIMES, TIMES)
BAD_TIMES = [-1.0, math.nan, math.inf, -math.inf]


def seeded(clients: int = 1) -> SeededStreams:
    return SeededStreams.for_clients(7, 1, range(clients))


@given(st.lists(RESPONSES, min_size=1, max_size=20))
def test_after_its_wait_every_client_answers_when_the_slowest_does(clients: list[ResponseTime]) -> None:
    slowest = slowest_response(clients)
    for client in clients:
        assert client.total + wait(client, slowest) == pytest.approx(slowest)
        assert not is_late(client, slowest)
    assert min(wait(client, slowest) for client in clients) == 0


def test_the_wait_is_the_papers() -> None:
    clients = [ResponseTime(10, 2), ResponseTime(3, 1), ResponseTime(7, 7)]
    assert slowest_response(clients) == 14
    assert [wait(client, 14) for client in clients] == [2, 10, 0]


def test_a_client_that_is_slower_than_agreed_waits_nothing_and_is_known_to_be_late() -> None:
    late = ResponseTime(20, 1)
    assert wait(late, 14) == 0
    assert is_late(late, 14)
    assert float(departures(late, 14, 3, 1000, seeded()).min()) + late.total > 14


@given(st.lists(st.floats(1, 10), min_size=1, max_size=15), st.data())
def test_fewer_liars_than_honest_clients_cannot_move_the_agreed_delay_away(honest: list[float], data: st.DataObject) -> None:
    liars = data.draw(st.lists(st.floats(1e-6, 1e9), max_size=len(honest) - 1))
    assert min(honest) <= agreed_delay([*honest, *liars]) <= max(honest)


def test_the_agreed_delay_is_the_median() -> None:
    assert agreed_delay([5]) == 5
    assert agreed_delay([9, 1, 2]) == 2
    assert agreed_delay([1, 2, 4, 1000]) == 3


def test_delays_are_uniform_and_independent() -> None:
    """Kolmogorov-Smirnov and the correlation of neighbours: each fails a true source with probability 1e-4; the seed is fixed."""
    delays = random_delays(30.0, 20_000, seeded()).numpy()
    assert delays.dtype == np.float64
    assert delays.min() > 0
    assert delays.max() < 30
    assert stats.kstest(delays / 30, "uniform").pvalue > 1e-4
    assert stats.pearsonr(delays[:-1], delays[1:]).pvalue > 1e-4


def test_arrivals_of_all_clients_in_time_have_one_distribution() -> None:
    """Two-sample Kolmogorov-Smirnov at 1e-4 for the fastest and the slowest client; without the wait they are 58 s apart."""
    clients = [ResponseTime(1, 1), ResponseTime(55, 5)]
    slowest, source = slowest_response(clients), seeded(2)
    arrivals = [(client.total + departures(client, slowest, 20, 5_000, source, row)).numpy() for row, client in enumerate(clients)]
    assert stats.ks_2samp(*arrivals).pvalue > 1e-4
    for own in arrivals:
        assert slowest < own.min()
        assert own.max() < slowest + 20


def test_each_client_draws_its_own_delays_and_seeds_repeat() -> None:
    first, second = (random_delays(1, 50, seeded(2), row) for row in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, random_delays(1, 50, seeded(2), 0))
    secure = [random_delays(1, 50, SecureSource()) for _ in range(2)]
    assert not torch.equal(*secure)


@pytest.mark.parametrize("bad", BAD_TIMES)
def test_times_that_cannot_be_are_refused_without_being_repeated(bad: float) -> None:
    for make in (lambda: ResponseTime(bad, 1), lambda: ResponseTime(1, bad), lambda: wait(ResponseTime(1, 1), bad)):
        with pytest.raises(ConfigError, match="0 or more") as caught:
            make()
        assert str(bad) not in str(caught.value)


@pytest.mark.parametrize("bad", [0.0, *BAD_TIMES])
def test_delays_that_are_not_positive_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        agreed_delay([1, bad, 2])
    with pytest.raises(ConfigError, match="above 0"):
        random_delays(bad, 3, SecureSource())


def test_nobody_and_no_reports_are_refused() -> None:
    with pytest.raises(ConfigError, match="nobody proposed"):
        agreed_delay([])
    with pytest.raises(ConfigError, match="nobody predicted"):
        slowest_response([])
    with pytest.raises(ConfigError, match="1 or more"):
        random_delays(1, 0, SecureSource())


def test_a_source_that_runs_dry_sends_nothing() -> None:
    with pytest.raises(PrivacyError, match="no stream"):
        random_delays(1, 3, seeded(1), row=1)
