"""Rounds that ask nodes for the sums of a linear head, or for histograms of their columns before training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message
from relayed_parts import CLIENTS, World, world_in
from table_parts import ANY, ROWS, config_of, deployed, open_policy, rows, write_tables

from ldpfl import api
from ldpfl.data.scaling import STAGES
from ldpfl.errors import AllDeclined, ProtocolError, TooFewTakePart
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import LdpStrategy, apps
from ldpfl.flower.policy_init import Offer, fitting_policy, ranges_for
from ldpfl.flower.statistics import read_edges
from ldpfl.flower.terms import RoundTerms
from ldpfl.simulation.evaluating_records import RIGHT

SQUARES: dict[str, Any] = {"training__method": "least-squares", "training__rounds": 1, "least_squares__feature_norm": 2.0}
MEASURED: dict[str, Any] = {"data__scaling": "measured"}
QUIET: dict[str, Any] = {"mechanism__noise_multiplier": 0.01, "evaluation__epsilon": 1e4}
ALONE: dict[str, Any] = {"evaluation__epsilon": "off", "mechanism__records": ROWS}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LDPFL_DATA", write_tables(tmp_path))
    with world_in(tmp_path) as made:
        made.policy, made.min_clients, made.budget = open_policy(**ANY), CLIENTS, 1e9
        yield made


def together(folder: Path) -> dict[str, str]:
    """Write all nodes' rows as one table, and rows to test on; return the settings by which the simulator reads them."""
    frames = [pd.read_csv(folder / f"{node}.csv").assign(hospital=node) for node in range(CLIENTS)]
    pd.concat(frames).to_csv(folder / "together.csv", index=False)
    rows(9).to_csv(folder / "test.csv", index=False)
    paths = {"data__path": str(folder / "together.csv"), "data__test_path": str(folder / "test.csv")}
    return {"data__name": "given", "data__client": "hospital", **paths}


def model_of(folder: RunFolder) -> torch.Tensor:
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    return checkpoint.state.model


def simulated(folder: Path, **more: Any) -> Any:
    return api.run(config_of(**{**more, **together(folder)}), baseline=False, progress=False)


def flat(simulated: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in simulated.module().state_dict().values()])


# --- least squares ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_of_nodes_is_that_of_the_simulator(world: World, tmp_path: Path) -> None:
    """With next to no noise; one round, one charge, and the ledger of the plan."""
    theirs = simulated(tmp_path, **{**SQUARES, **QUIET, **ALONE})
    folder = deployed(world, **{**SQUARES, **QUIET, **ALONE})
    torch.testing.assert_close(model_of(folder), flat(theirs), atol=1e-2, rtol=1e-2)
    assert world.charges() == [1] * CLIENTS
    assert folder.ledger() == planned_ledger(folder.config()) == theirs.ledger
    assert world.asked[0].terms.kind == "least-squares"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_may_come_in_replies(world: World) -> None:
    """Nobody trusted: each node has all of its own noise."""
    world.policy = open_policy(**ANY, transports=("direct", "sum"))
    summed = deployed(world, **{**SQUARES, **QUIET, **ALONE})
    world.folder = world.folder / "direct"
    world.folder.mkdir()
    direct = deployed(world, transport="direct", **{**SQUARES, **QUIET, **ALONE, "shuffling__channel": "direct"})
    torch.testing.assert_close(model_of(direct), model_of(summed), atol=1e-2, rtol=1e-2)
    assert [event.channel for event in direct.ledger().events] == ["direct"]


@pytest.mark.slow
def test_sums_of_another_length_are_declined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LdpStrategy._terms
    monkeypatch.setattr(
        LdpStrategy, "_terms", lambda self, progress: replace(honest(self, progress), size=progress.round.ranges.dimension + 1)
    )
    with pytest.raises(AllDeclined, match="asks for something else than its config says"):
        deployed(world, **{**SQUARES, **ALONE})
    assert sum(world.charges()) == 0


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_columns_of_nodes_are_scaled_as_in_the_simulator(world: World, tmp_path: Path) -> None:
    """With next to no noise, both find the same quantiles and class shares, to some percent of a spread, and the same model."""
    more = {**MEASURED, **QUIET, **ALONE, "training__rounds": 3}
    theirs = simulated(tmp_path, **more)
    folder = deployed(world, data__test_path=str(tmp_path / "test.csv"), **more)
    ours, encoder = folder.encoder(), theirs.encoder
    assert encoder is not None
    for own, other in zip(ours.knots, encoder.knots, strict=True):
        assert own is not None
        assert other is not None
        places = np.linspace(other[0][0], other[0][-1], 9)
        np.testing.assert_allclose(np.interp(places, *own), np.interp(places, *other), atol=0.05)
    assert ours.shares == pytest.approx(encoder.shares, abs=0.01)
    torch.testing.assert_close(model_of(folder), flat(theirs), atol=0.05, rtol=0.05)
    assert folder.ledger() == planned_ledger(folder.config()) == theirs.ledger
    assert world.charges() == [STAGES + 3] * CLIENTS


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_of_all_kinds_is_planned_charged_and_verified(world: World, tmp_path: Path) -> None:
    """Statistics, training and evaluation: ledger, plan, nodes' budgets, policy and the second accountant say the same."""
    folder = deployed(world, **MEASURED, evaluation__every=1, data__test_path=str(tmp_path / "0.csv"))
    config, ledger = folder.config(), folder.ledger()
    assert ledger == planned_ledger(config)
    assert [event.histograms for event in ledger.events] == [True] * STAGES + [False, True, False, True]
    assert world.charges() == [STAGES + 4] * CLIENTS
    offer = Offer(config, "sum", CLIENTS)
    assert fitting_policy(offer, ranges_for(offer, ())).rounds == STAGES + 4
    assert api.verify(api.certify(folder.path)).holds
    result = folder.result()
    assert result is not None
    assert [own["round"] for own in result["at_clients"]] == [1, 2]
    assert result["at_clients"][-1]["figures"][RIGHT]["value"] > 0.6


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_that_is_killed_while_columns_are_measured_ends_the_run_and_it_goes_on(world: World) -> None:
    """A stage of which nothing came is passed over: the others say where the columns lie."""

    def killed(client: int) -> None:
        if client == 2 and world.asked[-1].terms.round == 2:
            raise SystemExit

    world.before_upload = killed
    with pytest.raises(TooFewTakePart):
        deployed(world, **MEASURED)
    world.before_upload = lambda client: None
    folder = deployed(world, **MEASURED)
    assert world.charges()[:3] == [STAGES + 3] * 3  # those after it were not asked in the round that was ended
    assert len(folder.ledger().events) == STAGES + 3
    knots = folder.encoder().knots
    assert all(own is not None for own in knots)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_whose_table_cannot_be_read_sends_counts_of_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def failing(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("private reason")
        return apps.train(message, context)

    with caplog.at_level(logging.INFO, "flwr.ldpfl"):
        folder = deployed(world, failing, **MEASURED)
    assert world.charges() == [STAGES + 3] * CLIENTS
    assert "private reason" not in caplog.text
    assert folder.ledger() == planned_ledger(folder.config())


@pytest.mark.slow
@pytest.mark.parametrize("change", ["fewer columns", "more bins than said"])
def test_histograms_of_other_columns_are_declined(change: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LdpStrategy._terms

    def lying(self: LdpStrategy, progress: Any) -> RoundTerms:
        terms = honest(self, progress)
        if terms.kind != "statistics":
            return terms
        edges = json.loads(terms.measured)
        others = edges[1:] if change == "fewer columns" else [[*edges[0], 2 * edges[0][-1]], *edges[1:]]
        return replace(terms, measured=json.dumps(others))

    monkeypatch.setattr(LdpStrategy, "_terms", lying)
    with pytest.raises(AllDeclined, match="asks for something else than its config says"):
        deployed(world, **MEASURED)
    assert sum(world.charges()) == 0


@pytest.mark.parametrize("text", ["", "[]", "[[1.0]]", "[[1.0, 1.0]]", "[[2.0, 1.0]]", '[["a", "b"]]', "[[0, NaN]]", "{}"])
def test_edges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="edges"):
        read_edges(text)
