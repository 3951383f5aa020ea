"""Full DP, NbAFL, time-varying noise and DPA: closed forms, composition, optimality, and what the types promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_states import CLIPPED, SIZES, STEPS, THEOREM, client_state, public_state
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from torch import Tensor

from ldpfl import ConfigError, PrivacyError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian import ClientState, Dpa, FullDP, LadpSound, NbAFL, PublicSchedule, SensitiveDP, Sensitivity, TimeVarying
from ldpfl.mechanisms.gaussian.fixed import GeometricSchedule
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_delta, gaussian_epsilon, gaussian_mu, gaussian_sigma, ladp_constant

SOUND: tuple[PublicSchedule | SensitiveDP, ...] = (
    FullDP(0.5, 1e-5, CLIPPED),
    FullDP(0.5, 1e-5, CLIPPED, constant="theorem3"),
    NbAFL(0.5, 1e-5, norm=2.0, samples=10),
    TimeVarying(4.0, 1e-5, CLIPPED, rounds=10, ratio=0.9),
    TimeVarying(0.5, 1e-5, CLIPPED, rounds=10, variant="paper", ratio=0.9),
    Dpa(4.0, 1e-5, CLIPPED, rounds=10, participations=4, contraction=0.8),
    SensitiveDP(0.5, 1e-5, THEOREM, lam=0.0, clip_to_estimate=True),
    LadpSound(0.5, 1e-5, 0.5, share_rule="kl"),
    LadpSound(0.5, 1e-5, (0.1, 0.2, 0.3, 0.4), share_rule="size"),
)


def noise(schedule: PublicSchedule, round_number: int) -> float:
    values = schedule.public_sigma(public_state(round_number))
    assert values.dtype == torch.float64
    assert len(set(values.tolist())) == 1
    return float(values[0])


class _Untouchable:
    """Stands for private data; whoever looks at it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"private data were read: {name}")


# --- what sound schedules promise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SOUND, ids=lambda schedule: schedule.name)
def test_noise_is_bit_identical_whatever_the_clients_hold(schedule: PublicSchedule | SensitiveDP) -> None:
    assert not schedule.data_dependent
    for public in (public_state(1), public_state(2)):
        first = schedule.sigma(public, client_state(public, 3, seed=1))
        assert first.shape == (3, len(SIZES))
        assert first.dtype == torch.float64
        assert bool((first > 0).all())
        for other in (client_state(public, 3, seed=2, step=10.0), client_state(public, 3, seed=3, step=0.0, joined=0)):
            assert torch.equal(schedule.sigma(public, other), first)


@pytest.mark.parametrize("schedule", SOUND, ids=lambda schedule: schedule.name)
def test_noise_does_not_even_read_private_data(schedule: PublicSchedule | SensitiveDP) -> None:
    public = public_state(2)
    clients = client_state(public, 3)
    expected = schedule.sigma(public, clients)
    for name in ("trained", "memory", "joined"):
        object.__setattr__(clients, name, _Untouchable())
    assert torch.equal(schedule.sigma(public, clients), expected)


@pytest.mark.parametrize("schedule", SOUND, ids=lambda schedule: schedule.name)
def test_mu_is_the_largest_distance_of_two_updates_in_units_of_the_noise(schedule: PublicSchedule | SensitiveDP) -> None:
    assert schedule.why_unproved() == ""
    for public in (public_state(1), public_state(2, step=1e-4)):
        clients = client_state(public, 2, step=100.0)
        far = clients.trained - public.weights
        opposite = ClientState(torch.stack([public.weights + far[0], public.weights - far[0]]), clients.samples, clients.joined, {})
        bounded = schedule.clipped_updates(public, opposite)
        scaled = ((bounded[0].double() - bounded[1].double()).split_with_sizes(SIZES, dim=-1), schedule.sigma(public, opposite)[0])
        reached = math.sqrt(sum(float((part / sigma).square().sum()) for part, sigma in zip(*scaled, strict=True)))
        mu = schedule.mu(public)
        assert mu is not None
        assert reached <= mu
        assert reached == pytest.approx(mu, rel=1e-4)  # two opposite updates are as far apart as clipping lets them


@pytest.mark.parametrize("schedule", [s for s in SOUND if isinstance(s, FullDP | LadpSound | SensitiveDP)], ids=lambda s: s.name)
def test_a_round_costs_what_was_asked_for(schedule: FullDP | LadpSound | SensitiveDP) -> None:
    mu = schedule.mu(public_state(2))
    assert mu is not None
    spent = gaussian_delta(mu, 0.5)
    if isinstance(schedule, FullDP) and schedule.constant == "theorem3":
        assert spent < 1e-5
    else:
        assert spent == pytest.approx(1e-5, rel=1e-6)


# --- Full DP ----------------------------------------------------------------------------------------------------------------


def test_full_dp_is_c_d_over_epsilon() -> None:
    d = 2 * 0.1 * 2 * 1.5
    assert noise(FullDP(0.2, 0.02, THEOREM), 1) == pytest.approx(2.75157 * d / 0.2, rel=2e-6)
    assert noise(FullDP(0.2, 0.02, THEOREM, "classical"), 7) == pytest.approx(math.sqrt(2 * math.log(62.5)) * d / 0.2, rel=1e-13)
    assert noise(FullDP(0.2, 0.02, THEOREM, "exact"), 7) == pytest.approx(0.97048 * d / 0.2, rel=6e-6)
    assert noise(FullDP(0.5, 1e-5, CLIPPED), 3) == pytest.approx(7.0318 * 1.0, abs=6e-5)


def test_the_published_noise_scale() -> None:
    """LaDP-FL, Table III: 727,901 over 4000 uploads of ResNet-18; delta 0.02, E C = 1 and /B is within 1.1 % of it."""
    steps = type(STEPS)(0.1, 1, 50, 1.0)
    sigma = noise(FullDP(0.2, 0.02, Sensitivity("per_batch", steps)), 1)
    assert 4000 * sigma * math.sqrt(11_173_962) == pytest.approx(735_825, rel=1e-5)


@pytest.mark.parametrize("mode", ["theorem", "per_batch", "per_dataset"])
def test_without_a_proved_sensitivity_there_is_no_mu(mode: Any) -> None:
    schedule = FullDP(0.2, 0.02, Sensitivity(mode, STEPS, samples=500))
    assert schedule.mu(public_state()) is None
    assert "not proved" in schedule.why_unproved()
    public = public_state()
    clients = client_state(public)
    assert torch.equal(schedule.clipped_updates(public, clients), clients.trained - public.weights)


def test_what_the_paper_charges() -> None:
    public = public_state()
    clients = client_state(public)
    for schedule in (FullDP(0.2, 0.02, THEOREM), FullDP(0.2, 0.02, THEOREM, "classical"), FullDP(0.2, 0.02, CLIPPED)):
        assert schedule.paper_epsilon(public, schedule.sigma(public, clients)) == pytest.approx(0.2, rel=1e-12)
    separate = FullDP(0.2, 0.02, THEOREM, layers_separately=True)
    sigma = separate.sigma(public, clients)
    assert separate.paper_epsilon(public, sigma) == pytest.approx(0.8, rel=1e-12)
    sigma[0, :2] = 0  # the paper counts what leaves without noise as free
    sigma[1] *= 2
    assert separate.paper_epsilon(public, sigma) == pytest.approx((0.4 + 0.4 + 0.8) / 3, rel=1e-12)


def test_forty_rounds_of_the_published_setting() -> None:
    for epsilon, delta, mu, total in ((0.2, 0.02, 0.460, 1.82), (0.5, 0.02, 1.128, 5.03), (0.2, 1e-5, None, 0.99), (0.5, 1e-5, None, 2.72)):
        one = Sensitivity("update_clip", norm=1.0)
        found = FullDP(epsilon, delta, one, "theorem3").mu(public_state())
        assert found is not None
        composed = composed_mu([found] * 40)
        assert composed == pytest.approx(math.sqrt(40) * epsilon / ladp_constant(epsilon, delta), rel=1e-12)
        assert mu is None or composed == pytest.approx(mu, abs=6e-4)
        assert gaussian_epsilon(composed, 1e-5) == pytest.approx(total, abs=6e-3)


# --- NbAFL --------------------------------------------------------------------------------------------------------------------


def test_nbafl_is_its_formula_and_m_times_too_little() -> None:
    schedule = NbAFL(50.0, 0.01, norm=3.0, samples=100, exposures=60)
    c = math.sqrt(2 * math.log(125))
    assert noise(schedule, 1) == pytest.approx(2 * c * 60 * 3 / (100 * 50), rel=1e-13)
    assert schedule.mu(public_state()) == pytest.approx(100 * 50 / (c * 60), rel=1e-13)
    public = public_state()
    assert schedule.paper_epsilon(public, schedule.public_sigma(public)[None]) == pytest.approx(50 / 60, rel=1e-12)
    with pytest.raises(ConfigError, match="proved for epsilon < 1"):
        NbAFL(50.0, 0.01, norm=3.0, samples=100)


def test_nbafl_clips_weights_and_not_their_change() -> None:
    public = public_state()
    clients = client_state(public)
    short = NbAFL(0.5, 0.01, norm=0.25, samples=100)
    norms = short.clipped_updates(public, clients).double().norm(dim=1)
    assert norms.tolist() == pytest.approx([0.25] * 3, rel=1e-5)
    long = NbAFL(0.5, 0.01, norm=1e3, samples=100)
    assert torch.equal(long.clipped_updates(public, clients), clients.trained)
    # The broadcast is taken off what was noised, not off what is.
    assert torch.equal(long.correct(public, clients, clients.trained), clients.trained - public.weights)


# --- noise that changes over rounds ---------------------------------------------------------------------------------------------


@given(
    rounds=st.integers(1, 60),
    ratio=st.floats(0.5, 1.0),
    epsilon=st.floats(0.1, 20.0),
    share=st.floats(0.01, 1.0),
)
@settings(max_examples=60)
def test_equal_budget_composes_to_the_target(rounds: int, ratio: float, epsilon: float, share: float) -> None:
    participations = max(1, round(share * rounds))
    schedule = TimeVarying(epsilon, 1e-5, CLIPPED, rounds=rounds, participations=participations, ratio=ratio)
    mus = [schedule.mu(public_state(t)) or math.nan for t in range(1, rounds + 1)]
    dearest = composed_mu(sorted(mus)[-participations:])
    assert dearest == pytest.approx(gaussian_mu(epsilon, 1e-5), rel=1e-10)
    assert gaussian_epsilon(dearest, 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_time_varying_is_a_geometric_series() -> None:
    schedule = TimeVarying(2.0, 1e-5, CLIPPED, rounds=20, ratio=0.9)
    mu, d = gaussian_mu(2.0, 1e-5), 1.0
    first = d / mu * math.sqrt((0.9**-40 - 1) / (0.9**-2 - 1))
    for t in (1, 2, 20):
        assert noise(schedule, t) == pytest.approx(first * 0.9 ** (t - 1), rel=1e-12)
    paper = TimeVarying(0.2, 0.02, THEOREM, rounds=20, variant="paper", ratio=0.9)
    for t in (1, 2, 20):
        assert noise(paper, t) == pytest.approx(noise(FullDP(0.2, 0.02, THEOREM), 1) * 0.9 ** (t - 1), rel=1e-12)
    public = public_state(3)
    assert paper.paper_epsilon(public, paper.public_sigma(public)[None]) == pytest.approx(0.2 / 0.81, rel=1e-12)
    constant = TimeVarying(2.0, 1e-5, CLIPPED, rounds=16, ratio=1.0)
    assert noise(constant, 5) == pytest.approx(4 * gaussian_sigma(2.0, 1e-5), rel=1e-12)


@pytest.mark.parametrize(("schedule", "inflation"), [(TimeVarying, 0.573), (Dpa, 0.2604)])
def test_the_default_decay_is_what_the_published_inflation_means(schedule: type[GeometricSchedule], inflation: float) -> None:
    run = schedule(0.2, 0.02, THEOREM, rounds=400, variant="paper")
    spent = sum(run.full_sigma / run.round_sigma(t) for t in range(1, 401))
    assert spent / 400 == pytest.approx(1 + inflation, rel=0.02)


def test_dpa_is_the_best_share_of_its_budget() -> None:
    """Brute force: minimise sum a^(T - t) sigma_t^2 for a fixed sum of 1 / sigma_t^2."""
    rounds, a = 12, 0.7
    schedule = Dpa(3.0, 1e-5, CLIPPED, rounds=rounds, contraction=a)
    sigmas = np.array([schedule.round_sigma(t) for t in range(1, rounds + 1)])
    budget = (gaussian_mu(3.0, 1e-5) / CLIPPED.value) ** 2
    assert (sigmas**-2).sum() == pytest.approx(budget, rel=1e-12)
    assert sigmas[1:] / sigmas[:-1] == pytest.approx(np.full(rounds - 1, a**0.25), rel=1e-12)
    counts = a ** np.arange(rounds - 1, -1, -1.0)
    start = np.log(np.full(rounds, 1 / rounds))

    def error(logits: Any) -> float:  # precisions of any shares, normalised
        shares = np.exp(logits) / np.exp(logits).sum()
        return float((counts / (shares * budget)).sum())

    brute = minimize(error, start, method="BFGS", options={"gtol": 1e-10 * error(start)})
    closed = ((1 - a ** (rounds / 2)) / (1 - a**0.5)) ** 2 / budget
    assert (counts * sigmas**2).sum() == pytest.approx(closed, rel=1e-12)
    assert closed == pytest.approx(brute.fun, rel=1e-6)
    assert closed < 0.9 * error(start)


def test_a_round_beyond_the_plan_is_refused() -> None:
    schedule = TimeVarying(2.0, 1e-5, CLIPPED, rounds=3)
    with pytest.raises(ConfigError, match="round 4 is beyond the 3 rounds"):
        schedule.public_sigma(public_state(4))
    with pytest.raises(ConfigError, match="round 4 is beyond the 3 rounds"):
        schedule.mu(public_state(4))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FullDP(0.2, 1.0, CLIPPED), "delta must lie between 0 and 1"),
        (lambda: FullDP(0.2, math.nan, CLIPPED), "delta must lie between 0 and 1"),
        (lambda: FullDP(0.0, 0.1, THEOREM), "epsilon must be positive"),
        (lambda: FullDP(1.0, 0.1, THEOREM, "classical"), "proved for epsilon < 1"),
        (lambda: FullDP(0.2, 0.1, Sensitivity("update_clip", norm=1e30)), "expected 1e-20 to 1e20"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=3, ratio=0.0), r"ratio must lie in \(0, 1\]"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=3, ratio=1.1), r"ratio must lie in \(0, 1\]"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=3, ratio=math.nan), r"ratio must lie in \(0, 1\]"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=400, ratio=0.1), "expected 1e-20 to 1e20"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=400, ratio=0.1, variant="paper"), "expected 1e-20 to 1e20"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=3, participations=4), "participations must lie between 1 and the 3"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=0), "rounds must be positive"),
        (lambda: TimeVarying(1.0, 1e-5, CLIPPED, rounds=3, variant="fast"), "unknown variant"),  # type: ignore[arg-type]
        (lambda: Dpa(1.0, 1e-5, CLIPPED, rounds=3, contraction=1.0), r"contraction must lie in \(0, 1\)"),
        (lambda: Dpa(1.0, 1e-5, CLIPPED, rounds=3, contraction=0.0), r"contraction must lie in \(0, 1\)"),
        (lambda: NbAFL(0.5, 0.01, norm=0.0, samples=10), "norm must be positive"),
        (lambda: NbAFL(0.5, 0.01, norm=1.0, samples=0), "samples must be positive"),
        (lambda: NbAFL(0.5, 0.01, norm=1.0, samples=10, exposures=0), "exposures must be positive"),
    ],
)
def test_bad_settings_are_refused_in_one_line(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        build()
    assert "\n" not in str(refusal.value)


# --- states -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [FullDP(0.2, 0.02, THEOREM), *SOUND], ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_leave(schedule: PublicSchedule, bad: float) -> None:
    public = public_state()
    clients = client_state(public)
    clients.trained[1, 5] = bad
    with pytest.raises(PrivacyError, match="NaN or infinity") as refusal:
        schedule.clipped_updates(public, clients)
    assert "\n" not in str(refusal.value)


def test_states_that_do_not_fit_are_refused() -> None:
    weights, one = torch.zeros(5), torch.ones(2, dtype=torch.int64)
    for build in (
        lambda: PublicState(0, weights, None, (5,)),
        lambda: PublicState(1, weights, None, (4,)),
        lambda: PublicState(2, weights, torch.zeros(4), (5,)),
        lambda: PublicState(1, weights / 0, None, (5,)),
        lambda: ClientState(torch.zeros(2, 5, dtype=torch.float64), one, one, {}),
        lambda: ClientState(torch.zeros(5), one, one, {}),
        lambda: ClientState(torch.zeros(3, 5), one, one, {}),
        lambda: ClientState(torch.zeros(2, 5), one, one, {"moved": torch.zeros(3)}),
        lambda: FullDP(0.2, 0.02, THEOREM).clipped_updates(
            PublicState(1, weights, None, (5,)), ClientState(torch.zeros(2, 1), one, one, {})
        ),
    ):
        with pytest.raises(PrivacyError, match="nothing was sent") as refusal:
            build()
        assert "\n" not in str(refusal.value)


def test_schedules_without_memory_keep_none() -> None:
    public = public_state()
    clients = client_state(public)
    schedule = FullDP(0.2, 0.02, THEOREM)
    sent: Tensor = schedule.clipped_updates(public, clients)
    assert schedule.initial_memory(10, 350) == {}
    assert schedule.remember(public, clients, sent) == {}
    assert schedule.memory_after_round({}) == {}
    assert schedule.correct(public, clients, sent) is sent
