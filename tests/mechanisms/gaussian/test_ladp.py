"""LaDP-FL as published and in the form that holds: its noise, its layers, its shares, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gaussian_states import CLIPPED, SIZES, THEOREM, client_state, public_state
from hypothesis import given, settings, strategies as st
from scipy.special import rel_entr, softmax

from ldpfl import ConfigError, PrivacyError
from ldpfl.mechanisms.base import PublicState
from ldpfl.mechanisms.gaussian import FullDP, LadpPaper, LadpSound, LayerSelection
from ldpfl.privacy.accountants.gaussian import composed_mu, gaussian_mu, ladp_constant

EVERYTHING = LayerSelection("abs_l2", 0.0)


def paper(**changed: Any) -> LadpPaper:
    return LadpPaper(0.2, 0.02, **{"sensitivity": THEOREM, "selection": EVERYTHING, **changed})


# --- as published ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p_max", [1e-7, 1e-5, 1e-4, 1.0])
@pytest.mark.parametrize("step", [1e-4, 1e-2, 0.1])
def test_noise_is_that_of_full_dp_times_p_max_over_kl(p_max: float, step: float) -> None:
    public = public_state()
    clients = client_state(public, step=step)
    sigma = paper(p_max=p_max, p_min=1e-12).sigma(public, clients)
    full = ladp_constant(0.2, 0.02) * THEOREM.value / 0.2
    assert bool((sigma >= full * (1 - 1e-15)).all())
    for client in range(3):
        pairs = zip(clients.trained[client].split_with_sizes(SIZES, dim=-1), public.weights.split_with_sizes(SIZES, dim=-1), strict=True)
        for layer, (own, base) in enumerate(pairs):
            kl = rel_entr(softmax(own.double().numpy()), softmax(base.double().numpy())).sum()
            assert float(sigma[client, layer]) == pytest.approx(full * max(1.0, p_max / kl), rel=1e-6)


def test_a_layer_that_did_not_move_gets_the_most_noise() -> None:
    public = public_state()
    clients = client_state(public)
    clients.trained[:, :40] = public.weights[:40]
    flat = torch.cat([torch.full((40,), 0.5), public.weights[40:]])
    sigma = paper(p_max=1e-5, p_min=1e-8).sigma(public, clients)
    assert sigma[:, 0].tolist() == pytest.approx([1e3 * paper().full_sigma] * 3, rel=1e-12)
    constant = replace(public, weights=flat)
    clients.trained[:, :40] = 0.7  # another constant is the same distribution
    sigma = paper(p_max=1e-5, p_min=1e-8).sigma(constant, clients)
    assert sigma[:, 0].tolist() == pytest.approx([1e3 * paper().full_sigma] * 3, rel=1e-12)


def test_only_the_ratio_of_p_max_and_kl_matters_and_equal_bounds_give_full_dp() -> None:
    public = public_state()
    clients = client_state(public)
    same = paper(p_max=1e-5, p_min=1e-5).sigma(public, clients)
    assert torch.allclose(same, FullDP(0.2, 0.02, THEOREM).sigma(public, clients), rtol=1e-14)


def test_unselected_layers_leave_without_noise() -> None:
    public = public_state()
    clients = client_state(public)
    norms = torch.stack([part.double().norm(dim=1) for part in clients.trained.split_with_sizes(SIZES, dim=-1)], dim=1)
    assert bool((norms[:, 2] > 1).all())  # the large one
    sigma = paper(selection=LayerSelection("abs_l2", 1.0)).sigma(public, clients)
    assert (sigma > 0).tolist() == [[False, False, True, False]] * 3
    schedule = paper(selection=LayerSelection("abs_l2", 1.0))
    full = paper().paper_epsilon(public, paper().sigma(public, clients))
    assert schedule.paper_epsilon(public, sigma) < full / 3
    assert torch.equal(schedule.clipped_updates(public, clients), clients.trained - public.weights)


def test_a_threshold_above_everything_sends_all_without_noise_and_the_ledger_is_told() -> None:
    public = public_state()
    schedule = paper(selection=LayerSelection("rms", math.inf))
    sigma = schedule.sigma(public, client_state(public))
    assert torch.equal(sigma, torch.zeros(3, 4, dtype=torch.float64))
    assert schedule.paper_epsilon(public, sigma) == 0.0
    assert schedule.mu(public) is None
    assert "without noise" in schedule.why_unproved()


@pytest.mark.parametrize("sensitivity", [THEOREM, CLIPPED])
def test_the_published_form_has_no_guarantee(sensitivity: Any) -> None:
    schedule = paper(sensitivity=sensitivity)
    assert schedule.data_dependent
    assert schedule.mu(public_state()) is None
    assert "depends on the client's weights" in schedule.why_unproved()


def test_what_the_paper_charges_is_never_above_full_dp() -> None:
    public = public_state()
    clients = client_state(public)
    moved = paper(p_max=1e-12, p_min=1e-12)
    assert moved.paper_epsilon(public, moved.sigma(public, clients)) == pytest.approx(0.2, rel=1e-12)
    still = paper(p_max=1.0, p_min=1e-9)
    assert 0 < still.paper_epsilon(public, still.sigma(public, clients)) < 0.2 * 1e-3


def test_the_noise_does_not_depend_on_the_batch() -> None:
    public = public_state()
    clients = client_state(public, 7)
    schedule = paper()
    together = schedule.sigma(public, clients)
    for row in range(7):
        alone = type(clients)(clients.trained[row : row + 1].clone(), clients.samples[:1], clients.joined[:1], {})
        assert torch.equal(schedule.sigma(public, alone)[0], together[row])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_stop(bad: float) -> None:
    public = public_state()
    clients = client_state(public)
    clients.trained[0, 0] = bad
    for call in (paper().sigma, paper().clipped_updates):
        with pytest.raises(PrivacyError, match="NaN or infinity"):
            call(public, clients)


# --- which layers -------------------------------------------------------------------------------------------------------------------


def test_the_three_rules() -> None:
    norms = torch.tensor([[4.0, 1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    sizes = (100, 1, 4, 1)
    assert LayerSelection("abs_l2", 2.0).chosen(norms, sizes).tolist() == [[True, False, True, False], [False] * 4]
    assert LayerSelection("rms", 0.9).chosen(norms, sizes).tolist() == [[False, True, True, True], [False, True, False, True]]
    assert LayerSelection("top_fraction", 0.5).chosen(norms, sizes).tolist() == [[True, False, True, False], [True, True, False, False]]


@given(fraction=st.floats(1e-6, 1.0), layers=st.integers(1, 62))
@settings(max_examples=60)
def test_a_fraction_selects_that_many_layers(fraction: float, layers: int) -> None:
    norms = torch.rand(2, layers, generator=torch.Generator().manual_seed(layers)).double()
    chosen = LayerSelection("top_fraction", fraction).chosen(norms, (3,) * layers)
    assert chosen.sum(dim=1).tolist() == [max(1, math.ceil(fraction * layers - 1e-9))] * 2
    assert bool((norms.masked_fill(~chosen, 2).min(dim=1).values >= norms.masked_fill(chosen, -1).max(dim=1).values).all())


# --- the form that holds ----------------------------------------------------------------------------------------------------------------


@given(
    rule=st.sampled_from(["kl", "size"]),
    smallest=st.floats(1e-6, 0.2),
    clips=st.one_of(st.floats(1e-3, 1e3), st.tuples(*[st.floats(1e-3, 1e3)] * 4)),
    epsilon=st.floats(0.05, 20.0),
    step=st.floats(0.0, 1.0),
    round_number=st.integers(1, 3),
)
@settings(max_examples=100)
def test_all_layers_together_spend_exactly_mu(
    rule: Any, smallest: float, clips: Any, epsilon: float, step: float, round_number: int
) -> None:
    schedule = LadpSound(epsilon, 1e-5, clips, share_rule=rule, smallest_share=smallest)
    public = public_state(round_number, step=step)
    shares = schedule.shares(public)
    assert bool((shares >= smallest).all())
    assert float(shares.sum()) == pytest.approx(1.0, rel=1e-12)
    spent = composed_mu((2 * schedule.layer_clipping_norms(SIZES) / schedule.public_sigma(public)).tolist())
    assert spent == pytest.approx(gaussian_mu(epsilon, 1e-5), rel=1e-12)
    assert schedule.mu(public) == pytest.approx(spent, rel=1e-12)


def test_every_layer_is_clipped_to_its_own_norm() -> None:
    public = public_state()
    clients = client_state(public, step=5.0)
    limits = (0.1, 0.2, 0.3, 0.4)
    bounded = LadpSound(0.5, 1e-5, limits).clipped_updates(public, clients)
    for part, limit in zip(bounded.split_with_sizes(SIZES, dim=-1), limits, strict=True):
        assert bool((part.double().norm(dim=1) <= limit).all())
        assert part.double().norm(dim=1).tolist() == pytest.approx([limit] * 3, rel=2e-6)


def test_one_norm_shared_by_size_is_full_dp() -> None:
    """With S_l = S sqrt(d_l / d) and shares d_l / d each weight gets the noise of a whole update clipped to S."""
    public = public_state()
    schedule = LadpSound(0.5, 1e-5, 0.5, share_rule="size", smallest_share=1e-12)
    full = FullDP(0.5, 1e-5, CLIPPED).public_sigma(public)
    assert torch.allclose(schedule.public_sigma(public), full, rtol=1e-8)
    assert float(schedule.layer_clipping_norms(SIZES).square().sum()) == pytest.approx(0.25, rel=1e-12)


def test_sharing_by_size_makes_the_least_noise() -> None:
    limits = (0.3, 0.1, 2.0, 0.05)
    sizes = torch.tensor(SIZES).double()
    schedule = LadpSound(0.5, 1e-5, limits, share_rule="size", smallest_share=1e-12)
    energy = float((sizes * schedule.public_sigma(public_state()).square()).sum())
    optimum = (2 * float((torch.tensor(limits).double() * sizes.sqrt()).sum()) / gaussian_mu(0.5, 1e-5)) ** 2
    assert energy == pytest.approx(optimum, rel=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        shares = torch.rand(4, generator=generator).double()
        sigma = 2 * torch.tensor(limits).double() / gaussian_mu(0.5, 1e-5) / (shares / shares.sum()).sqrt()
        assert float((sizes * sigma.square()).sum()) >= energy * (1 - 1e-9)


def test_sharing_by_kl_gives_noise_in_inverse_proportion_to_it() -> None:
    public = public_state(2, step=1e-4)
    schedule = LadpSound(0.5, 1e-5, (0.3, 0.1, 2.0, 0.05), share_rule="kl", smallest_share=1e-15, p_min=1e-15, p_max=1.0)
    assert public.previous is not None
    kl = []
    for now, before in zip(public.weights.split_with_sizes(SIZES, dim=-1), public.previous.split_with_sizes(SIZES, dim=-1), strict=True):
        kl.append(float(rel_entr(softmax(now.double().numpy()), softmax(before.double().numpy())).sum()))
    products = schedule.public_sigma(public) * torch.tensor(kl).double()
    assert products.tolist() == pytest.approx([float(products[0])] * 4, rel=1e-4)


def test_a_model_that_stands_still_shares_by_clips_alone() -> None:
    public = public_state(2, step=0.0)
    schedule = LadpSound(0.5, 1e-5, (1.0, 1.0, 1.0, 1.0), share_rule="kl")
    assert schedule.shares(public).tolist() == pytest.approx([0.25] * 4, rel=1e-12)
    first = public_state(1)
    assert torch.equal(schedule.shares(first), replace(schedule, share_rule="size").shares(first)), "nothing to compare with yet"


def test_what_the_paper_would_charge_for_the_sound_form() -> None:
    public = public_state()
    one = LadpSound(0.5, 1e-5, 0.5, layers_separately=True)
    charged = one.paper_epsilon(public, one.public_sigma(public)[None])
    assert charged == pytest.approx(0.5 * float(one.shares(public).sqrt().sum()), rel=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: paper(p_max=0.0), "p_max must be positive"),
        (lambda: paper(p_max=-1.0), "p_max must be positive"),
        (lambda: paper(p_min=0.0), "p_min must be positive"),
        (lambda: paper(p_max=1e-9, p_min=1e-8), "more than p_max"),
        (lambda: paper(p_max=math.nan), "p_max must be positive"),
        (lambda: paper(p_max=1.0, p_min=1e-300), "expected 1e-20 to 1e20"),
        (lambda: paper(normaliser="max"), "unknown normaliser"),
        (lambda: LadpPaper(0.2, 0.0, THEOREM, selection=EVERYTHING), "delta must lie between 0 and 1"),
        (lambda: LayerSelection("abs_l2", -1.0), "must not be negative"),
        (lambda: LayerSelection("rms", math.nan), "must not be negative"),
        (lambda: LayerSelection("top_fraction", 0.0), r"top_fraction must lie in \(0, 1\]"),
        (lambda: LayerSelection("top_fraction", 1.1), r"top_fraction must lie in \(0, 1\]"),
        (lambda: LayerSelection("largest", 1.0), "unknown layer selection"),  # type: ignore[arg-type]
        (lambda: LadpSound(0.5, 1e-5, 0.0), "clip must be positive"),
        (lambda: LadpSound(0.5, 1e-5, (1.0, -1.0)), "clip must be positive"),
        (lambda: LadpSound(0.5, 1.0, 1.0), "delta must lie between 0 and 1"),
        (lambda: LadpSound(0.5, 1e-5, 1.0, smallest_share=0.0), r"smallest_share must lie in \(0, 1\)"),
        (lambda: LadpSound(0.5, 1e-5, 1.0, share_rule="equal"), "unknown share rule"),  # type: ignore[arg-type]
        (lambda: LadpSound(0.5, 1e-5, 1.0, p_max=1e-9, p_min=1e-8), "more than p_max"),
        (lambda: LadpSound(0.5, 1e-5, 1.0, smallest_share=0.25).shares(public_state()), "must be below 1/4: the model has 4 layers"),
        (lambda: LadpSound(0.5, 1e-5, (1.0, 1.0)).public_sigma(public_state()), "clip has 2 entries, but the model has 4 layers"),
    ],
)
def test_bad_settings_are_refused_in_one_line(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        build()
    assert "\n" not in str(refusal.value)


def test_public_weights_that_are_not_finite_stop() -> None:
    with pytest.raises(PrivacyError, match="broadcast weights contain NaN"):
        PublicState(1, torch.full((3,), math.nan), None, (3,))
