"""Sensitive DP and AdapLDP: their formulas step by step, their sound variant, and the ends of AdapLDP's logarithm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_states import CLIPPED, SIZES, STEPS, THEOREM, client_state, fresh_clients, public_state

from ldpfl import ConfigError, PrivacyError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian import AdapLDP, ClientState, FullDP, SensitiveDP
from ldpfl.privacy.accountants.gaussian import gaussian_mu, ladp_constant

# --- Sensitive DP -------------------------------------------------------------------------------------------------------------


def test_sensitive_dp_follows_both_movements() -> None:
    schedule = SensitiveDP(0.2, 0.02, THEOREM, lam=0.3, kappa=0.5)
    first = public_state(1)
    clients = fresh_clients(schedule, first)
    full = FullDP(0.2, 0.02, THEOREM).full_sigma
    assert schedule.sigma(first, clients).flatten().tolist() == pytest.approx([full] * 12, rel=1e-14)
    memory = schedule.memory_after_round(schedule.remember(first, clients, torch.zeros_like(clients.trained)))
    moved = (clients.trained - first.weights).double().norm(dim=1)
    assert memory["moved"].tolist() == pytest.approx(moved.tolist(), rel=1e-12)

    second = public_state(2)
    assert second.previous is not None
    shift = float((second.weights - second.previous).double().norm())
    sigma = schedule.sigma(second, client_state(second, memory=memory))
    for client in range(3):
        estimate = 0.5 * (0.3 * float(moved[client]) + 0.7 * shift)
        assert 1e-3 * THEOREM.value < estimate < THEOREM.value
        assert sigma[client].tolist() == pytest.approx([ladp_constant(0.2, 0.02) * estimate / 0.2] * 4, rel=1e-10)
    newcomers = client_state(second, joined=0, memory=memory)
    assert schedule.sigma(second, newcomers).flatten().tolist() == pytest.approx([full] * 12, rel=1e-14)


def test_the_estimate_stays_between_a_thousandth_and_the_whole_of_the_sensitivity() -> None:
    for kappa, part in ((1e6, 1.0), (1e-9, 1e-3)):
        schedule = SensitiveDP(0.2, 0.02, THEOREM, kappa=kappa)
        public = public_state(2)
        clients = client_state(public, memory=schedule.initial_memory(3, 350))
        expected = part * schedule.full_sigma
        assert schedule.sigma(public, clients).flatten().tolist() == pytest.approx([expected] * 12, rel=1e-12)


def test_a_private_estimate_has_no_guarantee() -> None:
    public = public_state()
    for schedule in (SensitiveDP(0.2, 0.02, THEOREM), SensitiveDP(0.2, 0.02, CLIPPED, lam=1.0)):
        assert schedule.data_dependent
        assert schedule.mu(public) is None
        assert "depends on" in schedule.why_unproved()
    global_only = SensitiveDP(0.2, 0.02, THEOREM, lam=0.0)
    assert not global_only.data_dependent
    assert global_only.mu(public) is None, "public, but no bound"
    assert "follows from what was released before" in global_only.why_unproved()


def test_clipping_to_the_estimate_costs_the_budget_in_every_round() -> None:
    schedule = SensitiveDP(0.2, 1e-5, THEOREM, lam=0.0, clip_to_estimate=True)
    estimates = set()
    for public in (public_state(1), public_state(2), public_state(3, step=0.0)):
        assert schedule.mu(public) == pytest.approx(gaussian_mu(0.2, 1e-5), rel=1e-12)
        estimates.add(schedule.public_sensitivity(public))
        bounded = schedule.clipped_updates(public, client_state(public, step=10.0))
        assert bounded.double().norm(dim=1).tolist() == pytest.approx([schedule.public_sensitivity(public) / 2] * 3, rel=2e-6)
    assert len(estimates) == 3
    assert min(estimates) > 0, "a model that stands still keeps some noise"
    assert schedule.initial_memory(3, 350) == {}


def test_noise_that_follows_from_what_was_released_has_no_guarantee() -> None:
    """Each round's mu would be known only after the rounds before it: two of them, added up as if fixed, were exceeded twice over."""
    schedule = SensitiveDP(0.2, 1e-5, CLIPPED, lam=0.0)
    public = public_state(2)
    assert CLIPPED.value / schedule.public_sensitivity(public) > 1.01
    assert schedule.mu(public) is None
    assert not schedule.proved
    assert "follows from what was released before" in schedule.why_unproved()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": -0.1}, r"lam must lie in \[0, 1\]"),
        ({"lam": math.nan}, r"lam must lie in \[0, 1\]"),
        ({"kappa": 0.0}, "kappa must be positive"),
        ({"clip_to_estimate": True}, "needs lam = 0"),
    ],
)
def test_bad_settings_of_sensitive_dp_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SensitiveDP(0.2, 0.02, THEOREM, **settings)


# --- AdapLDP ---------------------------------------------------------------------------------------------------------------------


def adap(**settings: Any) -> AdapLDP:
    return AdapLDP(**{"epsilon": 0.5, "delta": 1e-5, "steps": STEPS, **settings})


def expected_sigma(scaler: float, taken: int, *, delta: float = 1e-5, decay: float = 0.995) -> float:
    rate = 0.1 * decay**taken
    return math.sqrt(2 * math.log(1.25 / (delta * scaler))) * 2 * rate * 1.5 / 500 / 0.5


def test_adapldp_rescales_delta_by_how_far_the_client_moved() -> None:
    schedule = adap()
    first = public_state(1)
    clients = fresh_clients(schedule, first)
    assert schedule.sigma(first, clients).flatten().tolist() == pytest.approx([expected_sigma(1e-3, 20)] * 12, rel=1e-12)

    second = public_state(2)
    memory = {"scaler": torch.tensor([-0.7, 0.2, 0.5], dtype=torch.float64), "sent": torch.zeros(3, sum(SIZES))}
    clients = client_state(second, joined=3, memory=memory)
    moved = (clients.trained - second.weights).double().norm(dim=1)
    sigma = schedule.sigma(second, clients)
    kept = schedule.remember(second, clients, torch.zeros_like(clients.trained))["scaler"]
    for client, before in enumerate((0.7, 0.2, 0.5)):
        scaler = 0.6 * before + 0.4 * float(moved[client]) / (0.1 * 0.995**80)  # 4 rounds of 2 epochs of 10 batches
        assert float(kept[client]) == pytest.approx(scaler, rel=1e-9)
        assert sigma[client].tolist() == pytest.approx([expected_sigma(scaler, 80)] * 4, rel=1e-9)


def test_scalers_become_z_scores_of_all_clients() -> None:
    schedule = adap()
    memory = {"scaler": torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64), "sent": torch.ones(4, 2)}
    settled = schedule.memory_after_round(memory)
    deviation = math.sqrt((4 + 1 + 0 + 9) / 4)
    assert settled["scaler"].tolist() == pytest.approx([-2 / deviation, -1 / deviation, 0, 3 / deviation], rel=1e-14)
    assert settled["sent"] is memory["sent"]
    for clients in (1, 2, 3, 7, 100):
        same = schedule.memory_after_round(schedule.initial_memory(clients, 2))
        assert same["scaler"].tolist() == [0.0] * clients, "all alike: no score, and no division by zero"


@pytest.mark.parametrize("delta", [1e-5, 0.02, 0.9])
def test_every_scaler_gives_noise(delta: float) -> None:
    schedule = adap(delta=delta, decay=1.0)
    public = public_state(2)
    still = ClientState(
        public.weights.repeat(2, 1), torch.full((2,), 500), torch.ones(2, dtype=torch.int64), schedule.initial_memory(2, 350)
    )
    zero = replace(still, memory={**still.memory, "scaler": torch.zeros(2, dtype=torch.float64)})
    ends = {"low": schedule.sigma(public, zero)}
    huge = replace(still, memory={**still.memory, "scaler": torch.full((2,), 1e12, dtype=torch.float64)})
    ends["high"] = schedule.sigma(public, huge)
    for scaler, sigma in ((1e-12, ends["low"]), (1 / delta, ends["high"])):
        assert sigma.flatten().tolist() == pytest.approx([expected_sigma(scaler, 0, delta=delta)] * 8, rel=1e-9)
    first = replace(huge, memory={**still.memory, "scaler": torch.tensor([-1.0, 0.0], dtype=torch.float64)})
    assert bool((schedule.sigma(public_state(1), first) > 0).all())


def test_a_learning_rate_that_decayed_to_nothing_stops() -> None:
    schedule = adap(decay=0.5)
    public = public_state(2)
    clients = client_state(public, joined=100, memory=schedule.initial_memory(3, 350))
    with pytest.raises(PrivacyError, match="its noise is too small") as refusal:
        schedule.sigma(public, clients)
    assert "\n" not in str(refusal.value)


def direction(schedule: AdapLDP, joined: int = 1) -> tuple[PublicState, ClientState, torch.Tensor, torch.Tensor]:
    public = public_state(3, sizes=(5000, 3000))
    memory = {"scaler": torch.zeros(2), "sent": public_state(1, seed=8, sizes=(5000, 3000)).weights.repeat(2, 1)}
    clients = client_state(public, 2, joined=joined, memory=memory)
    sent = clients.trained - public.weights
    return public, clients, sent, schedule.correct(public, clients, sent)


def test_the_direction_step_of_the_published_program_shrinks_the_model() -> None:
    public, _, sent, corrected = direction(adap(degrees_bug=True))
    influence = ((public.weights + corrected).double() / (public.weights + sent).double() - 1)[(public.weights + sent).abs() > 0.01]
    assert float(influence.median()) == pytest.approx(0.02 * math.cos(90.0), abs=3e-5)
    assert 0.02 * math.cos(90.0) == pytest.approx(-0.00896, abs=5e-6)


def test_the_direction_step_that_was_meant() -> None:
    public, clients, sent, corrected = direction(adap(degrees_bug=False))
    assert public.previous is not None
    model = (public.weights + sent).double()
    for part in (slice(0, 5000), slice(5000, 8000)):
        own = (model - clients.memory["sent"])[:, part]
        shift = (public.weights - public.previous).double()[part]
        u = own * shift / (own.norm(dim=1, keepdim=True) * shift.norm() + 1e-4)
        expected = model[:, part] * (1 + 0.02 * u)
        assert torch.allclose((public.weights + corrected).double()[:, part], expected, atol=1e-7)
    assert float((corrected - sent).abs().max()) > 1e-6


def test_there_is_no_direction_before_the_second_round_of_a_client() -> None:
    schedule = adap()
    _, _, sent, corrected = direction(schedule, joined=0)
    assert torch.equal(corrected, sent)
    first = public_state(1)
    clients = fresh_clients(schedule, first)
    update = clients.trained - first.weights
    assert schedule.correct(first, clients, update) is update
    assert torch.equal(schedule.remember(first, clients, update)["sent"], first.weights + update)


def test_the_paper_charges_adapldp_in_full_and_there_is_no_guarantee() -> None:
    public = public_state()
    for schedule, epsilon in ((adap(), 0.5), (adap(layers_separately=True), 2.0), (SensitiveDP(0.5, 1e-5, THEOREM), 0.5)):
        sigma = torch.rand(3, 4, dtype=torch.float64) + 0.1
        assert schedule.paper_epsilon(public, sigma) == pytest.approx(epsilon, rel=1e-12)
        assert schedule.mu(public) is None
        assert schedule.why_unproved()
        assert schedule.data_dependent


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epsilon": 0.0}, "epsilon must"), ({"delta": 1.0}, "delta must"), ({"decay": 0.0}, "decay must"), ({"decay": 1.5}, "decay must")],
)
def test_bad_settings_of_adapldp_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adap(**settings)
