"""What a share keeps of its reports: as much as a round needs, however many clients there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ldpfl.data import Dataset
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.mechanisms import BitReports, VectorReports
from ldpfl.mechanisms.reports.vectors import VectorTotal
from ldpfl.simulation.cohort_training import train_cohort
from ldpfl.simulation.shares import ClientFacts, RoundStart, Share, collect

KEPT = {"duchi": BitReports, "privunit-g": VectorTotal}


@pytest.mark.parametrize("mechanism", KEPT)
def test_a_share_keeps_one_report_for_all_its_clients_and_the_mean_is_that_of_all(mechanism: str, tiny_task: Dataset) -> None:
    settings = ["clients.count=40", "model.name=linear", f"mechanism.name={mechanism}", "mechanism.epsilon=4.0", "training.epochs=1"]
    federation, start = build(parse_config("", settings, origin="test"), tiny_task, torch.device("cpu"))
    cohort, ranges = federation.cohort(1), start.state.ranges
    facts = ClientFacts(torch.from_numpy(federation.samples.sizes), torch.zeros(len(cohort), dtype=torch.int64), {}).take(cohort)
    for chunk in (16, 40):
        found = collect(federation, RoundStart(start.state, federation.mechanism, chunk), Share(cohort, facts))
        (kept,) = found.reports
        assert isinstance(kept, KEPT[mechanism])
        assert kept.clients == len(cohort)
        values = train_cohort(federation, start.state, cohort, chunk)
        all_of_them = federation.mechanism.encode(values, ranges, federation.streams(start.state, cohort, values, federation.mechanism))
        assert kept.bytes_per_client == all_of_them.bytes_per_client
        mean = federation.mechanism.aggregate([all_of_them], ranges)
        assert torch.equal(federation.mechanism.aggregate([type(kept).mix([kept], np.random.default_rng(0))], ranges), mean)


def test_sums_of_vectors_add_up() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    total = VectorReports(rows[:1]).to_total().plus(VectorReports(rows[1:]))
    assert (total.clients, total.dimension, total.bytes_per_client) == (4, 3, 12)
    found = np.zeros(3)
    total.add_to(found)
    assert found.tolist() == rows.double().sum(dim=0).tolist()
