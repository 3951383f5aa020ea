"""Ranges and their rules, the rules driven through the real mechanism round after round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import ldpfl
from ldpfl import ConfigError, LayerRanges, SeededStreams
from ldpfl.mechanisms.ranges import Denoised, Fixed, NoisyMinMax, RangeRule, range_rule

FLOOR = 1e-4
STD = 0.03
WIDE = 4 * STD
"""A radius that covers nearly all of the true weights."""


def vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def true_weights(shape: str, sizes: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if shape == "normal":
        return torch.randn(sum(sizes), generator=generator) * STD
    return (torch.rand(sum(sizes), generator=generator) * 2 - 1) * STD * math.sqrt(3)


def radii(
    rule: RangeRule,
    weights: Tensor,
    sizes: tuple[int, ...],
    *,
    epsilon: float,
    clients: int,
    rounds: int,
    radius: float = 0.1,
    pull: float = 1.0,
) -> Tensor:
    """Return the (rounds, L) radii while ``clients`` report round after round.

    Training is a ``pull`` towards ``weights`` from the noisy mean of the round before; at 1 nothing of its noise stays.
    """
    mechanism = ldpfl.mechanisms.create("duchi", epsilon=epsilon)
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(radius), sizes)
    history, mean = [], weights
    for number in range(rounds):
        trained = mean + pull * (weights - mean)
        reports = mechanism.encode(trained.expand(clients, -1), ranges, SeededStreams.for_clients(77, number, range(clients)))
        mean = mechanism.aggregate([reports], ranges)
        ranges = rule.update(ranges, mean, mechanism.noise(ranges).mean_variance(mean, clients))
        history.append(ranges.radius)
    return torch.stack(history)


# --- LayerRanges ------------------------------------------------------------------------------------------------------


def test_scalars_are_spread_over_all_layers() -> None:
    ranges = LayerRanges(torch.tensor(0.5), torch.tensor(0.25), (2, 3))
    assert ranges.center.tolist() == [0.5, 0.5]
    assert ranges.radius.tolist() == [0.25, 0.25]
    assert ranges.dimension == 5


def test_ranges_are_float64_and_do_not_alias_the_callers_tensors() -> None:
    center = torch.zeros(2, dtype=torch.float64)
    ranges = LayerRanges(center, torch.ones(2, requires_grad=True), (1, 1))
    center += 7
    assert ranges.center.tolist() == [0.0, 0.0]
    assert ranges.center.dtype == ranges.radius.dtype == torch.float64
    assert not ranges.radius.requires_grad


@pytest.mark.parametrize(
    ("center", "radius", "sizes", "message"),
    [
        ([0.0], [1.0, 1.0], (1, 1), "center has shape"),
        ([0.0, 0.0], [1.0], (1, 1), "radius has shape"),
        ([[0.0, 0.0]], [1.0, 1.0], (1, 1), "center has shape"),
        ([math.nan, 0.0], [1.0, 1.0], (1, 1), "center must be finite"),
        ([0.0, math.inf], [1.0, 1.0], (1, 1), "center must be finite"),
        ([0.0, 0.0], [1.0, math.nan], (1, 1), "radius must be finite"),
        ([0.0, 0.0], [math.inf, 1.0], (1, 1), "radius must be finite"),
        ([0.0, 0.0], [1.0, 0.0], (1, 1), "radius must be positive"),
        ([0.0, 0.0], [-1.0, 1.0], (1, 1), "radius must be positive"),
        ([0.0, 0.0], [1.0, 1.0], (1, 0), "sizes must be positive"),
        ([0.0, 0.0], [1.0, 1.0], (-1, 3), "sizes must be positive"),
        ([], [], (), "sizes must be positive"),
    ],
)
def test_impossible_ranges_are_refused(center: Any, radius: Any, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerRanges(vector(center), vector(radius), sizes)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
@pytest.mark.slow
def test_slice_is_a_slice_of_expand(sizes: list[int], data: st.DataObject) -> None:
    layers = len(sizes)
    ranges = LayerRanges(vector([float(layer) for layer in range(layers)]), vector([layer + 0.5 for layer in range(layers)]), tuple(sizes))
    center, radius = ranges.expand()
    assert center.tolist() == [float(layer) for layer, size in enumerate(sizes) for _ in range(size)]
    assert torch.equal(radius, center + 0.5)
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    for part, whole in zip(ranges.slice(start, stop), (center, radius), strict=True):
        assert part.dtype == torch.float64
        assert torch.equal(part, whole[start:stop])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_a_part_has_the_ranges_of_the_chosen_weights(sizes: list[int], data: st.DataObject) -> None:
    layers = [float(layer) for layer in range(len(sizes))]
    ranges = LayerRanges(vector(layers), vector([layer + 0.5 for layer in layers]), tuple(sizes))
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sum(sizes), max_size=sum(sizes)).filter(any)))
    part = ranges.part(chosen)
    for own, whole in zip(part.expand(), ranges.expand(), strict=True):
        assert torch.equal(own, whole[chosen])
    changed = ranges.with_part(LayerRanges(part.center - 100, part.radius * 2, part.sizes), chosen)
    touched = torch.stack([layer.any() for layer in chosen.split_with_sizes(sizes)])
    assert changed.sizes == ranges.sizes
    assert torch.equal(changed.center, torch.where(touched, ranges.center - 100, ranges.center))
    assert torch.equal(changed.radius, torch.where(touched, ranges.radius * 2, ranges.radius))


def test_impossible_parts_are_refused() -> None:
    ranges = LayerRanges(torch.tensor(0.0), torch.tensor(1.0), (2, 3))
    with pytest.raises(ConfigError, match="no weight is chosen"):
        ranges.part(torch.zeros(5, dtype=torch.bool))
    for chosen in (torch.ones(4, dtype=torch.bool), torch.ones(5), torch.ones(1, 5, dtype=torch.bool)):
        with pytest.raises(ConfigError, match="mask of chosen weights is"):
            ranges.part(chosen)
    chosen = torch.tensor([True, False, True, True, False])
    for sizes in ((2, 1), (1,), (1, 2, 3)):
        with pytest.raises(ConfigError, match="which are not the 3 chosen weights"):
            ranges.with_part(LayerRanges(torch.tensor(0.0), torch.tensor(1.0), sizes), chosen)


def test_covering_reaches_the_extremes_with_margin_and_floor() -> None:
    ranges = LayerRanges.covering(torch.tensor([-1.0, 0.5, 3.0, 2.0, 2.0, 7.0]), (3, 2, 1), margin=1.5, floor=0.01)
    assert ranges.center.tolist() == [1.0, 2.0, 7.0]
    assert ranges.radius.tolist() == [3.0, 0.01, 0.01]
    assert ranges.sizes == (3, 2, 1)


def test_covering_refuses_what_gives_no_range() -> None:
    with pytest.raises(ConfigError, match="finite"):
        LayerRanges.covering(torch.tensor([0.0, math.nan]), (2,), margin=1.0, floor=0.1)
    with pytest.raises(ConfigError, match="positive"):
        LayerRanges.covering(torch.zeros(2), (2,), margin=1.0, floor=0.0)


def test_covering_refuses_sizes_that_do_not_add_up() -> None:
    with pytest.raises(ConfigError):
        LayerRanges.covering(torch.zeros(5), (2, 2), margin=1.0, floor=0.1)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_rules_are_found_by_name() -> None:
    assert range_rule("fixed", floor=0.1) == Fixed()
    assert range_rule("noisy-minmax", floor=0.1) == NoisyMinMax(0.1)
    assert range_rule("denoised", floor=0.1) == Denoised(0.1)
    with pytest.raises(ConfigError, match="did you mean 'denoised'"):
        range_rule("denoise", floor=0.1)


def test_fixed_keeps_the_ranges() -> None:
    ranges = LayerRanges(vector([0.0]), vector([1.0]), (3,))
    updated = Fixed().update(ranges, torch.full((3,), 9.0), torch.ones(3))
    assert (updated.center.tolist(), updated.radius.tolist(), updated.sizes) == ([0.0], [1.0], (3,))


def test_noisy_minmax_spans_the_noisy_means() -> None:
    ranges = LayerRanges(vector([0.0, 0.0]), vector([1.0, 1.0]), (3, 2))
    updated = NoisyMinMax(0.25).update(ranges, torch.tensor([-1.0, 0.0, 2.0, 5.0, 5.0]), torch.ones(5))
    assert updated.center.tolist() == [0.5, 5.0]
    assert updated.radius.tolist() == [1.5, 0.25]


def test_noisy_minmax_feeds_its_noise_back_until_it_diverges() -> None:
    # A sqrt(2 ln d / n) is about 3 here: every round multiplies the range.
    history = radii(NoisyMinMax(FLOOR), true_weights("normal", (16000,), 1), (16000,), epsilon=0.3, clients=100, rounds=12)[:, 0]
    assert bool((history[1:] > 1.5 * history[:-1]).all())
    assert float(history[-1]) > 1000 * WIDE


@pytest.mark.parametrize("shape", ["normal", "uniform"])
@pytest.mark.parametrize("pull", [1.0, 0.1])
@pytest.mark.slow
@pytest.mark.thorough_for("1.0-normal", "1.0-uniform", "0.1-uniform")
def test_denoised_neither_diverges_nor_collapses_where_noisy_minmax_does(shape: str, pull: float) -> None:
    """Fixed seeds; the bounds leave room around what other seeds gave, and a runaway or collapsed radius misses them by far.

    A pull below 1 leaves noise of earlier rounds in the model, which a rule must not take for signal.
    """
    sizes = (4000, 500, 10, 1)
    history = radii(Denoised(FLOOR), true_weights(shape, sizes, 0), sizes, epsilon=0.3, clients=100, rounds=60, pull=pull)[10:]
    large, middle, small, single = history.T
    for layer in (large, middle, small, single):
        assert STD / 3 < float(layer.min()) <= float(layer.max()) < 2 * WIDE


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_denoised_does_not_run_away_with_hardly_any_clients(clients: int) -> None:
    # A single report has no sample variance; to take its noise for signal would double the radius every round.
    sizes = (4000, 50)
    history = radii(Denoised(FLOOR), true_weights("normal", sizes, 0), sizes, epsilon=1.0, clients=clients, rounds=30)
    assert float(history[5:].max()) < 3 * WIDE


@pytest.mark.slow
def test_denoised_keeps_tiny_layers_off_the_floor() -> None:
    # Biases of a two-class output layer, fifty times over; some of them may wander, but not all may freeze or run away.
    sizes = (2,) * 50
    history = radii(Denoised(FLOOR), true_weights("normal", sizes, 0), sizes, epsilon=0.3, clients=100, rounds=30)
    assert STD / 10 < float(history[15:].min()) <= float(history[15:].max()) < 2 * WIDE


@pytest.mark.parametrize("start", [0.01, 0.1, 1.0])
@pytest.mark.parametrize(("epsilon", "clients", "kappa"), [(10.0, 500, 1.543), (4.0, 200, 1.523), (1.0, 100, 1.353), (0.3, 100, 0.889)])
@pytest.mark.slow
@pytest.mark.thorough_for(
    "4.0-200-1.523-0.01",
    "4.0-200-1.523-0.1",
    "1.0-100-1.353-0.1",
    "1.0-100-1.353-0.01",
    "1.0-100-1.353-1.0",
    "0.3-100-0.889-0.01",
    "0.3-100-0.889-0.1",
    "10.0-500-1.543-0.1",
    "10.0-500-1.543-0.01",
    "10.0-500-1.543-1.0",
)
def test_denoised_settles_at_as_many_standard_deviations_as_the_noise_allows(
    start: float, epsilon: float, clients: int, kappa: float
) -> None:
    """kappa solves E[min(z^2, kappa^2)] + kappa^2 A^2 / n = 0.8, here to four digits."""
    sizes = (4000, 2000)
    weights = true_weights("normal", sizes, 3)
    history = radii(Denoised(FLOOR), weights, sizes, epsilon=epsilon, clients=clients, rounds=14, radius=start)
    assert history[-1].tolist() == pytest.approx([kappa * STD] * 2, rel=0.15)


def denoised(mean: Tensor, variance: float, *, center: float = 0.0, radius: float = 1.0, floor: float = FLOOR) -> tuple[float, float]:
    ranges = LayerRanges(vector([center]), vector([radius]), (len(mean),))
    updated = Denoised(floor).update(ranges, mean, torch.full((len(mean),), variance))
    return float(updated.center), float(updated.radius)


def test_denoised_without_noise_goes_half_the_way_to_the_contracted_spread() -> None:
    """Radius 1 clips normal weights of sigma 0.5 at 2 sigma; without noise, clipping to 0.8 of the variance is at 1.5587 sigma."""
    grid = torch.erfinv(torch.linspace(-1, 1, 100_001, dtype=torch.float64)[1:-1]) * math.sqrt(2)
    mean = (0.5 * grid).clamp(-1, 1)
    assert denoised(mean, 0.0)[1] == pytest.approx(math.sqrt(1.5587 / 2), rel=2e-3)


def test_denoised_at_most_doubles_or_halves() -> None:
    assert denoised(torch.tensor([-50.0, 50.0]), 0.0)[1] == 2.0
    assert denoised(torch.tensor([0.1, 0.1]), 0.0)[1] == 0.5


def test_denoised_stops_at_its_floor() -> None:
    assert denoised(torch.zeros(4), 1.0, floor=0.75)[1] == 0.75
    assert denoised(torch.zeros(4), 1.0, floor=3.0)[1] == 3.0


def test_denoised_never_falls_below_its_floor() -> None:
    assert denoised(torch.zeros(4), 1.0, radius=0.7, floor=0.7)[1] >= 0.7


def test_denoised_leaves_a_center_alone_that_noise_cannot_tell_from_the_mean() -> None:
    assert denoised(torch.full((4,), 0.11), 1.0, center=0.1)[0] == 0.1


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_denoised_moves_the_center_only_as_far_as_the_noise_allows_to_tell(sign: float) -> None:
    mean = torch.full((100,), sign * 0.5)
    assert denoised(mean, 0.04)[0] == pytest.approx(sign * (0.5 - 2 * 0.2 / 10), rel=1e-6)
    assert denoised(mean, 9.0)[0] == 0.0


def test_ranges_inside_one_layer_take_no_memory() -> None:
    ranges = LayerRanges(vector([1.0, 2.0]), vector([0.5, 0.25]), (100_000, 100_000))
    for told in ranges.slice(100_000, 199_999):
        assert told.shape == (99_999,)
        assert told.untyped_storage().nbytes() == 2 * 8  # that of the layers themselves
