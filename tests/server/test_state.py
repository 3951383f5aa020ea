"""The one transition of a round: it knows only what shuffled reports tell."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import ldpfl
from ldpfl import LayerRanges, PrivacyError, SeededStreams
from ldpfl.mechanisms import BitReports, DenseReports, Perturbed, Reports
from ldpfl.mechanisms.ranges import Denoised, Fixed, NoisyMinMax, RangeRule
from ldpfl.server import ServerOptimiser, ServerState, advance, client_values
from ldpfl.transport.shuffling import PartialPool, ReportPool, mix
from ldpfl.transport.shuffling.partial import Part

SIZES = (40, 9)
DIMENSION = sum(SIZES)
CLIENTS = 300
DUCHI = ldpfl.mechanisms.create("duchi", epsilon=1.0)
NONE = ldpfl.mechanisms.create("none")


def start() -> ServerState:
    weights = torch.linspace(-0.3, 0.3, DIMENSION)
    return ServerState(round=4, weights=weights, ranges=LayerRanges(torch.tensor([0.0, 0.1]), torch.tensor([0.4, 0.3]), SIZES))


def one_bit_reports() -> BitReports:
    values = torch.empty(CLIENTS, DIMENSION).uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(6))
    reports = DUCHI.encode(values, start().ranges, SeededStreams.for_clients(1, 5, range(CLIENTS)))
    assert isinstance(reports, BitReports)
    return reports


def rearranged(reports: BitReports, seed: int) -> BitReports:
    """Permute the clients within every parameter id, independently of the code under test."""
    bits = np.unpackbits(reports.packed, axis=1, count=DIMENSION, bitorder="little")
    moved = np.random.default_rng(seed).permuted(bits, axis=0)
    assert not np.array_equal(moved, bits)
    return BitReports(np.packbits(moved, axis=1, bitorder="little"), DIMENSION)


def mixed(reports: Reports, seed: int) -> ReportPool:
    return mix([reports], np.random.default_rng(seed))


def same(left: ServerState, right: ServerState) -> bool:
    pairs = [
        (left.weights, right.weights),
        (left.ranges.center, right.ranges.center),
        (left.ranges.radius, right.ranges.radius),
    ]
    return left.round == right.round and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("perturbed", ["weights", "update"])
@pytest.mark.parametrize("rule", [Fixed(), NoisyMinMax(1e-3), Denoised(1e-3)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2)], ids=["same mixing", "other mixing"])
def test_who_sent_what_leaves_no_trace_in_the_next_state(perturbed: Perturbed, rule: RangeRule, first: int, second: int) -> None:
    reports = one_bit_reports()
    expected = advance(start(), mixed(reports, first), DUCHI, perturbed=perturbed, rule=rule)
    for seed in (10, 11):
        state = advance(start(), mixed(rearranged(reports, seed), second), DUCHI, perturbed=perturbed, rule=rule)
        assert same(state, expected)
    flipped = replace(reports, packed=reports.packed ^ np.eye(CLIENTS, reports.bytes_per_client, dtype=np.uint8))
    assert not same(advance(start(), mixed(flipped, first), DUCHI, perturbed=perturbed, rule=rule), expected)


def test_one_bit_rounds_are_the_same_with_and_without_a_shuffler() -> None:
    reports = one_bit_reports()
    shuffled = advance(start(), mixed(reports, 0), DUCHI, perturbed="weights", rule=Denoised(1e-3))
    assert same(advance(start(), ReportPool(reports), DUCHI, perturbed="weights", rule=Denoised(1e-3)), shuffled)


def test_perturbed_weights_replace_the_model_and_updates_are_added() -> None:
    state, pool = start(), ReportPool(DenseReports(torch.stack([torch.full((DIMENSION,), 1.0), torch.full((DIMENSION,), 0.5)])))
    weights = advance(state, pool, NONE, perturbed="weights", rule=Fixed())
    assert torch.equal(weights.weights, torch.full((DIMENSION,), 0.75))
    update = advance(state, pool, NONE, perturbed="update", rule=Fixed())
    torch.testing.assert_close(update.weights, state.weights + 0.75)
    slow = advance(state, pool, NONE, perturbed="update", rule=Fixed(), optimiser=ServerOptimiser(0.1))
    torch.testing.assert_close(slow.weights, state.weights + 0.075)
    same = advance(state, pool, NONE, perturbed="weights", rule=Fixed(), optimiser=ServerOptimiser(0.1))
    assert torch.equal(same.weights, weights.weights)


def test_client_values_are_what_the_transition_undoes() -> None:
    """Without noise, clients that all trained to the same weights move the server exactly there."""
    state, trained = start(), torch.full((3, DIMENSION), 0.125)
    assert torch.equal(client_values(trained, state, "weights"), trained)
    assert torch.equal(client_values(trained.clone(), state, "update"), trained - state.weights)
    for perturbed in ("weights", "update"):
        chosen: Perturbed = "weights" if perturbed == "weights" else "update"
        values = client_values(trained.clone(), state, chosen)
        pool = mixed(NONE.encode(values, state.ranges, SeededStreams.for_clients(0, 0, range(3))), 0)
        after = advance(state, pool, NONE, perturbed=chosen, rule=Fixed())
        torch.testing.assert_close(after.weights, trained[0])


def test_a_round_counts_up_and_leaves_the_old_state_alone() -> None:
    state = start()
    kept, center, radius = state.weights.clone(), state.ranges.center.clone(), state.ranges.radius.clone()
    after = advance(state, ReportPool(one_bit_reports()), DUCHI, perturbed="update", rule=Denoised(1e-3))
    assert (state.round, after.round) == (4, 5)
    assert torch.equal(state.weights, kept)
    assert torch.equal(state.ranges.center, center)
    assert torch.equal(state.ranges.radius, radius)
    assert after.weights.dtype == torch.float32


@dataclass
class Recording:
    """A range rule that remembers what it was told."""

    told: list[tuple[LayerRanges, Tensor, Tensor]] = field(default_factory=list)

    def update(self, ranges: LayerRanges, mean: Tensor, mean_variance: Tensor) -> LayerRanges:
        self.told.append((ranges, mean, mean_variance))
        return LayerRanges(ranges.center, ranges.radius / 2, ranges.sizes)


@pytest.mark.parametrize("perturbed", ["weights", "update"])
def test_the_range_rule_sees_released_aggregates_only(perturbed: Perturbed) -> None:
    state, rule, reports = start(), Recording(), one_bit_reports()
    after = advance(state, mixed(reports, 0), DUCHI, perturbed=perturbed, rule=rule)
    [(ranges, mean, variance)] = rule.told
    assert ranges is state.ranges
    assert torch.equal(mean, DUCHI.aggregate([reports], state.ranges))
    assert torch.equal(variance, DUCHI.noise(state.ranges).mean_variance(mean, CLIENTS))
    assert torch.equal(after.ranges.radius, state.ranges.radius / 2)


# --- some reports are missing ---------------------------------------------------------------------------------------


def some(*weights: int) -> Tensor:
    chosen = torch.zeros(DIMENSION, dtype=torch.bool)
    chosen[list(weights)] = True
    return chosen


def part_of(reports: BitReports, weights: Tensor, clients: int) -> Part:
    """Return what the first ``clients`` reports say about ``weights``."""
    bits = np.unpackbits(reports.packed, axis=1, count=DIMENSION, bitorder="little")[:clients, weights.numpy()]
    return Part(BitReports(np.packbits(bits, axis=1, bitorder="little"), bits.shape[1]), weights, clients)


def partial(*parts: Part) -> PartialPool:
    return PartialPool(parts, torch.stack([part.weights for part in parts]).any(dim=0))


@pytest.mark.parametrize("perturbed", ["weights", "update"])
def test_weights_move_by_the_reports_that_arrived_about_them(perturbed: Perturbed) -> None:
    state, reports = start(), one_bit_reports()
    many, few = some(*range(0, 30), 41, 42), some(*range(30, 35), 43)
    pool = partial(part_of(reports, many, CLIENTS), part_of(reports, few, 20))
    after = advance(state, pool, DUCHI, perturbed=perturbed, rule=Fixed(), optimiser=ServerOptimiser(0.5))
    whole = advance(state, ReportPool(reports), DUCHI, perturbed=perturbed, rule=Fixed(), optimiser=ServerOptimiser(0.5))
    first = advance(
        state,
        ReportPool(replace(reports, packed=reports.packed[:20])),
        DUCHI,
        perturbed=perturbed,
        rule=Fixed(),
        optimiser=ServerOptimiser(0.5),
    )
    assert torch.equal(after.weights[many], whole.weights[many])
    assert torch.equal(after.weights[few], first.weights[few])
    assert torch.equal(after.weights[~(many | few)], state.weights[~(many | few)])
    assert after.round == state.round + 1
    assert after.previous is state.weights


def test_ranges_follow_the_weights_that_were_heard_alone() -> None:
    state, rule, reports = start(), Recording(), one_bit_reports()
    reported = some(2, 3, 5, 39)
    after = advance(state, partial(part_of(reports, reported, 50)), DUCHI, perturbed="weights", rule=rule)
    [(ranges, mean, variance)] = rule.told
    assert ranges.sizes == (4,)
    expected = DUCHI.aggregate([replace(reports, packed=reports.packed[:50])], state.ranges)
    assert torch.equal(mean, expected[reported])
    assert torch.equal(variance, DUCHI.noise(state.ranges).mean_variance(expected, 50)[reported])
    assert after.ranges.radius.tolist() == [float(state.ranges.radius[0]) / 2, float(state.ranges.radius[1])]
    assert torch.equal(after.ranges.center, state.ranges.center)
    assert after.ranges.sizes == SIZES


@pytest.mark.parametrize("rule", [NoisyMinMax(1e-3), Denoised(1e-3)], ids=lambda rule: type(rule).__name__)
def test_a_part_of_all_weights_is_the_whole(rule: RangeRule) -> None:
    reports = one_bit_reports()
    pool = partial(part_of(reports, some(*range(DIMENSION)), CLIENTS))
    expected = advance(start(), ReportPool(reports), DUCHI, perturbed="weights", rule=rule)
    assert same(advance(start(), pool, DUCHI, perturbed="weights", rule=rule), expected)


def test_a_round_that_nothing_was_heard_in_does_not_advance() -> None:
    for pool in (PartialPool((), some()), PartialPool((part_of(one_bit_reports(), some(1), 5),), some())):
        with pytest.raises(PrivacyError, match="no report to aggregate"):
            advance(start(), pool, DUCHI, perturbed="weights", rule=Fixed())
    with pytest.raises(PrivacyError, match="cover 3 weights"):
        advance(start(), PartialPool((), torch.ones(3, dtype=torch.bool)), DUCHI, perturbed="weights", rule=Fixed())
