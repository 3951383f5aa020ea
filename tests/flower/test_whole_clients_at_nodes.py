"""Nodes whose whole data are protected measure a model: in bits over Flower's replies and over a relay, and by a sum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from relayed_parts import CLIENTS, World, world_in
from table_parts import ANY, config_of, deployed, open_policy, write_tables
from test_evaluation_at_nodes import result_of, together

from ldpfl import api
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.flower.policy_init import Offer, fitting_policy
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.simulation.evaluating_records import LOSS, RIGHT

PLAIN: dict[str, Any] = {"mechanism__records": None, "mechanism__noise_multiplier": None, "mechanism__clip_norm": None}
BITS: dict[str, Any] = {**PLAIN, "mechanism__name": "rotated-sign", "mechanism__epsilon": 2.0, "shuffling__channel": "direct"}
SUMMED: dict[str, Any] = {"mechanism__name": "dp-fedavg", "mechanism__records": None, "mechanism__perturbed": "gradient"}
SHUFFLED: dict[str, Any] = {**BITS, "shuffling__channel": "ideal-shuffler"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LDPFL_DATA", write_tables(tmp_path))
    with world_in(tmp_path) as made:
        allowed = {"mechanisms": ("rotated-sign", "duchi", "harmony", "dp-fedavg"), "protects": "client", "linked": 1}
        allowed |= {"transports": ("direct", "relay", "sum")}
        made.policy, made.min_clients, made.budget = open_policy(**{**ANY, **allowed}), CLIENTS, 1e9
        yield made


def over(world: World, transport: str, **more: Any) -> Any:
    with mock.patch("ldpfl.flower.ready_server.operator_relay", return_value=world.collector()):
        return deployed(world, transport=transport, own={"ldpfl.window-s": 60.0} if transport == "relay" else None, **more)


@pytest.mark.slow
@pytest.mark.thorough_except("direct-settings0")
@pytest.mark.parametrize(("transport", "settings"), [("direct", BITS), ("relay", SHUFFLED), ("sum", SUMMED)])
def test_the_ledger_is_the_plan_and_each_node_is_charged_for_each_round(world: World, transport: str, settings: dict[str, Any]) -> None:
    folder = over(world, transport, **settings, training__rounds=3, evaluation__every=2)
    ledger, config = folder.ledger(), folder.config()
    assert ledger == planned_ledger(config)
    assert [event.histograms for event in ledger.events] == [False, False, True, False, True]
    assert world.charges() == [5] * CLIENTS
    measured = result_of(folder)["at_clients"]
    assert [(own["round"], own["records"], own["unit"]) for own in measured] == [(2, CLIENTS, "client"), (3, CLIENTS, "client")]
    assert "paper's claim" not in str(result_of(folder)["privacy"])


@pytest.mark.slow
@pytest.mark.thorough
def test_nodes_measure_what_the_simulator_does(world: World, tmp_path: Path) -> None:
    """With bits that are hardly ever flipped: what is left is that a node's bits are about its mean, which 1 or -1 rounds at random.

    Each figure is over 5 nodes and 16 bits (8 for the loss) that lie in [-1, 1]; differences beyond 5 deviations (fixed seeds) are faults.
    """
    more = {**SHUFFLED, "evaluation__epsilon": 1e4}
    found = result_of(over(world, "relay", **more))["at_clients"][0]["figures"]
    own = {"data__name": "given", "data__path": str(together(tmp_path)), "data__test_path": str(tmp_path / "test.csv")}
    simulated = api.run(config_of(**more, **own, data__client="hospital"), baseline=False, progress=False).to_dict()["at_clients"]
    assert found[RIGHT]["value"] == pytest.approx(simulated[0]["figures"][RIGHT]["value"], abs=5 * (2 / (16 * CLIENTS)) ** 0.5 / 2)
    assert found[LOSS]["value"] == pytest.approx(simulated[0]["figures"][LOSS]["value"], abs=5 * 5 * (2 / (8 * CLIENTS)) ** 0.5 / 2)
    assert found[RIGHT]["value"] > 0.4


def test_a_policy_allows_both_mechanisms_of_a_run_that_is_evaluated_in_bits() -> None:
    offer = Offer(config_of(**BITS), "direct", CLIENTS, 1, 0.0, 60.0)
    policy = fitting_policy(offer, LayerRanges(0.0, 1.0, (6,)))
    assert policy.mechanisms == ("rotated-sign", "harmony")
    assert policy.rounds == 3
