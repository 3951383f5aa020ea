"""What the relay does not protect from, shown: docs/threat-model.md states it. What is left then is the noise of each report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from faults_parts import Relay, World, estimates

from ldpfl import LayerRanges, SeededStreams
from ldpfl.mechanisms import create
from ldpfl.transport.shuffling import RecordPlan

CLIENTS = 5


@pytest.mark.slow
@pytest.mark.thorough
def test_whoever_knows_all_other_reports_reads_the_last_one_in_the_new_model(tmp_path: Path) -> None:
    """Four clients that tell what they sent, or a relay that made four of five uploads itself, need the public models only."""
    with Relay(tmp_path) as relay:
        last = World.new(tmp_path, relay).run(1)
    assert last.state.previous is not None
    reports = estimates(last.state.previous, 1, CLIENTS)
    left = (last.state.weights - last.state.previous) * CLIENTS - reports[:-1].sum(dim=0)
    torch.testing.assert_close(left, reports[-1], atol=1e-5, rtol=0)


def test_a_client_of_a_sampling_mechanism_may_vote_on_one_weight_as_often_as_it_samples() -> None:
    """Its records come apart from each other, so nobody can tell that one client sent them all."""
    clients, sampled, weights = 10, 4, 20
    mechanism, ranges = create("laplace", epsilon=1.0, coordinates=sampled), LayerRanges(torch.tensor(0.0), torch.tensor(0.5), (weights,))
    reports = mechanism.encode(torch.zeros(clients, weights), ranges, SeededStreams.for_clients(0, 1, range(clients)))
    plan = RecordPlan(mechanism, ranges)
    honest = np.concatenate([plan.split(payload) for payload in reports.payloads()])
    false = honest.copy()
    false[:sampled] = honest[0]
    before, after = (plan.join(records, clients) for records in (honest, false))
    assert before.pool is not None
    assert after.pool is not None
    assert after.refused == ()
    moved = after.pool.aggregate(mechanism, ranges).mean - before.pool.aggregate(mechanism, ranges).mean
    own = mechanism.decode(reports, ranges)[0]
    places = own.nonzero()[:, 0]
    votes = sorted((moved[places] / own[places] * clients).tolist())
    assert votes == pytest.approx([-1.0] * (sampled - 1) + [sampled - 1.0], rel=1e-4)  # all of its votes instead of one each
