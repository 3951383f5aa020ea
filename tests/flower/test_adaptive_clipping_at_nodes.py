"""Adaptive clipping on Flower: nodes clip to the norm that the terms carry, and the server moves it, by any way of the reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flower_parts import app_of, config_of, start_arrays, start_vector
from relayed_parts import CLIENTS, World, policy_of, world_in

from ldpfl.experiments import RunConfig
from ldpfl.experiments.build import range_rule_of
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpStrategy, Waiting
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms.dp_fedavg import DpFedAvg
from ldpfl.mechanisms.ranges import LayerRanges, NormQuantile
from ldpfl.server import Checkpoint
from ldpfl.util.randomness import SeededStreams

SETTINGS = (
    *("mechanism.name=dp-fedavg", "mechanism.clip_norm=0.5", "mechanism.noise_multiplier=2.0", "clients.count=5", "training.rounds=3"),
    *("clipping.target_quantile=0.5", "clipping.learning_rate=0.3"),
)
SIZES = (12, 3)
WAYS = {"direct": "direct", "relay": "ideal-shuffler", "sum": "secure-sum"}


def adaptive(way: str) -> RunConfig:
    return config_of(*SETTINGS, f"shuffling.channel={WAYS[way]}")


def run(config: RunConfig, way: str, tmp_path: Path, rounds: int, folder: RunFolder | None = None) -> Checkpoint:
    if way == "direct":
        strategy = LdpStrategy(config, folder=folder, waiting=Waiting(1, 0.0))
        strategy.start(InProcessGrid(app_of(), CLIENTS), start_arrays(), rounds)
        return strategy.checkpoint
    with world_in(tmp_path) as world:
        world.policy = policy_of(mechanisms=("dp-fedavg",), transports=(way,), sum_epsilon=900.0 if way == "sum" else "off", linked=1)
        strategy = LdpStrategy(config, collector=collector(world, way), folder=folder)
        strategy.start(world.grid(), start_arrays(), rounds, timeout=100.0)
    return strategy.checkpoint


def collector(world: World, way: str):  # type: ignore[no-untyped-def]
    return world.adding_up() if way == "sum" else world.collector()


def expected(config: RunConfig, rounds: int) -> tuple[torch.Tensor, list[float]]:
    """Return the model and the norms that the same random bits lead to, from each client's lattice points."""
    weights, ranges, rule, norms = start_vector(), LayerRanges(0.0, 0.5, SIZES), range_rule_of(config), [0.5]
    assert isinstance(rule, NormQuantile)
    summed = config_of(*SETTINGS, "shuffling.channel=secure-sum")
    mechanism = deployable_mechanism(summed, ranges)
    assert isinstance(mechanism, DpFedAvg)
    for number in range(1, rounds + 1):
        updates = [torch.full((1, sum(SIZES)), 0.1 * (1 + client)) for client in range(CLIENTS)]
        sources = (SeededStreams.for_clients(4, number, [client]) for client in range(CLIENTS))
        points = [mechanism.points(update, ranges, source)[0] for update, source in zip(updates, sources, strict=True)]
        total = mechanism.reports_from_sum(np.sum(points, axis=0), CLIENTS)
        weights = weights + mechanism.aggregate([total], ranges)
        ranges = rule.ranges_after_round(ranges, mechanism.fraction_within([total], ranges))
        norms.append(float(ranges.radii[0]))
    return weights, norms


@pytest.mark.slow
@pytest.mark.thorough_except("direct")
@pytest.mark.parametrize("way", WAYS)
def test_nodes_clip_to_the_norm_of_the_round_and_the_server_moves_it(way: str, tmp_path: Path) -> None:
    last = run(adaptive(way), way, tmp_path, 3)
    weights, norms = expected(adaptive(way), 3)
    torch.testing.assert_close(last.state.weights, weights, atol=1e-5, rtol=0)
    used = [max(metrics.radius.values()) for metrics in last.history]
    assert [*used, float(last.state.ranges.radii[0])] == pytest.approx(norms, rel=1e-5)
    assert len(set(norms)) == 4
    assert [event.release.mechanism for event in last.ledger.events] == ["dp-fedavg"] * 3


@pytest.mark.slow
def test_a_run_on_flower_goes_on_with_the_norm_that_it_had(tmp_path: Path) -> None:
    config, folder = adaptive("direct"), RunFolder(tmp_path / "run")
    run(config, "direct", tmp_path, 1, folder)
    resumed, whole = run(config, "direct", tmp_path, 3, folder), run(config, "direct", tmp_path, 3)
    assert torch.equal(resumed.state.weights, whole.state.weights)
    assert torch.equal(resumed.state.ranges.radius, whole.state.ranges.radius)
