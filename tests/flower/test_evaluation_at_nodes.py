"""Nodes measure a model on records that they hold back, in a round of its own: what it says, what it costs, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from flwr.app import Context, Message
from relayed_parts import CLIENTS, World, world_in
from table_parts import ANY, HELD_BACK, config_of, deployed, grid_of, open_policy, write_tables
from test_report_of_flower import text_of

from conftest import CommandLine
from ldpfl import api
from ldpfl.errors import AllDeclined, ConfigError
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower import LdpStrategy, apps
from ldpfl.flower.arrays import to_arrays
from ldpfl.flower.federation_setup import prepare
from ldpfl.flower.terms import RoundTerms
from ldpfl.simulation.evaluating_records import LOSS, RIGHT, RecordScores

NEARLY_NO_NOISE: dict[str, Any] = {"evaluation__epsilon": 1e4, "mechanism__noise_multiplier": 0.01}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LDPFL_DATA", write_tables(tmp_path))
    with world_in(tmp_path) as made:
        made.policy, made.min_clients, made.budget = open_policy(**ANY), CLIENTS, 1e9
        yield made


def result_of(folder: RunFolder) -> dict[str, Any]:
    result = folder.result()
    assert result is not None
    return result


def together(folder: Path) -> Path:
    """Write all nodes' rows as one table, for the simulator."""
    frames = [pd.read_csv(folder / f"{node}.csv").assign(hospital=node) for node in range(CLIENTS)]
    pd.concat(frames).to_csv(folder / "together.csv", index=False)
    frames[0].to_csv(folder / "test.csv", index=False)
    return folder / "together.csv"


@pytest.mark.slow
def test_nodes_measure_what_the_simulator_does(world: World, tmp_path: Path) -> None:
    """The same records are held back, and the figures of both differ by their noise: by 5 of its deviations at most (fixed seeds)."""
    found = result_of(deployed(world, **NEARLY_NO_NOISE))["at_clients"]
    table = together(tmp_path)
    own = {"data__name": "given", "data__path": str(table), "data__test_path": str(tmp_path / "test.csv"), "data__client": "hospital"}
    config = config_of(**NEARLY_NO_NOISE, **own)
    simulated = api.run(config, baseline=False, progress=False).to_dict()["at_clients"]
    assert [own["records"] for own in found] == [own["records"] for own in simulated] == [CLIENTS * HELD_BACK]
    for name, figure in simulated[0]["figures"].items():
        assert figure["noise"] < 0.003
        assert found[0]["figures"][name]["value"] == pytest.approx(figure["value"], abs=5 * 2**0.5 * figure["noise"]), name
        assert found[0]["figures"][name]["sampling"] == pytest.approx(figure["sampling"], rel=0.1)
    assert found[0]["figures"][RIGHT]["value"] > 0.7


@pytest.mark.slow
@pytest.mark.thorough
def test_log_and_report_say_who_sees_what_and_that_the_number_of_records_is_stated(
    world: World, ldpfl: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    """The terms state 25 held-back records a node, and nodes have 20: figures are divided by the first, and the sum counts the second."""
    with caplog.at_level(logging.INFO, "flwr.ldpfl"):
        folder = deployed(world, **NEARLY_NO_NOISE, evaluation__records=25)
    assert "at delta 1e-05 for each record of each report, 1 of them a round, against relay and aggregator together;" in caplog.text
    (measured,) = result_of(folder)["at_clients"]
    assert measured["records"] == CLIENTS * 25
    assert measured["counted"] == pytest.approx([CLIENTS * HELD_BACK] * 3, abs=3)
    assert ldpfl("report", folder.path).code == 0
    text = text_of((folder.path / "report.html").read_text(encoding="utf-8"))
    assert "reports masked, added up by the relay, and unmasked as a sum by the aggregator: neither server sees one of them" in text
    assert "on 125 records that they hold back from training. The figures are released with noise" in text
    assert "The run's terms state the number of records" in text
    assert f"By the released sum itself, {measured['counted'][0]:,.0f} (" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_the_ledger_is_the_plan_and_each_node_is_charged_for_each_round(world: World) -> None:
    """The evaluation after each second round and the last one: rounds 3 and 5 of the run."""
    folder = deployed(world, training__rounds=3, evaluation__every=2)
    ledger, config = folder.ledger(), folder.config()
    assert ledger == planned_ledger(config)
    assert [event.histograms for event in ledger.events] == [False, False, True, False, True]
    assert world.charges() == [5] * CLIENTS
    measured = result_of(folder)["at_clients"]
    assert [own["round"] for own in measured] == [2, 3]
    assert all(own["figures"][RIGHT]["noise"] > 0 for own in measured)
    events = [json.loads(line) for line in (folder.path / "checkpoint.jsonl").read_text().splitlines()]
    assert sum("measured_after" in event for event in events) == 2


@pytest.mark.slow
@pytest.mark.thorough
def test_a_budget_that_allows_training_alone_declines_the_evaluation(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """And the rounds before it are kept; nothing is charged for what is declined."""
    world.policy = open_policy(**{**ANY, "rounds": 2})
    with caplog.at_level(logging.WARNING, "flwr.ldpfl"), pytest.raises(AllDeclined):
        deployed(world)
    assert world.charges() == [2] * CLIENTS
    assert "3 reports would exceed the policy's rounds = 2" in caplog.text
    folder = RunFolder(world.folder / "run")
    assert len(folder.ledger().events) == 2
    assert result_of(folder)["at_clients"] == []
    assert result_of(folder)["rounds"] == 2


@pytest.mark.parametrize("policy", [{"sum_epsilon": 15.0}, {"epsilon_per_round": 18.0, "epsilon_per_unit": 18.0}])
@pytest.mark.slow
@pytest.mark.thorough_except("policy0")
def test_bounds_of_a_policy_hold_for_the_evaluation(policy: dict[str, float], world: World) -> None:
    world.policy = open_policy(**policy)
    with pytest.raises(AllDeclined):
        deployed(world, mechanism__noise_multiplier=4.0, evaluation__epsilon=20.0)
    assert world.charges() == [2] * CLIENTS


# --- a server that asks for something else ----------------------------------------------------------------------------


Change = Callable[[RoundTerms], RoundTerms]
OTHERS: dict[str, Change] = {
    "a longer vector": lambda terms: replace(terms, size=terms.size + 1),
    "a shorter vector": lambda terms: replace(terms, size=terms.size - 1),
    "training in its place": lambda terms: replace(terms, kind="training"),
    "least squares in its place": lambda terms: replace(terms, kind="least-squares"),
    "the evaluation at another time": lambda terms: replace(terms, config=config_of(training__rounds=3)),
    "a round after the last": lambda terms: replace(terms, round=terms.round + 1),
}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("change", OTHERS)
def test_a_server_that_asks_for_something_else_than_its_config_says_is_declined(
    change: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LdpStrategy._terms

    def lying(self: LdpStrategy, progress: Any) -> RoundTerms:
        terms = honest(self, progress)
        return OTHERS[change](terms) if terms.kind == "evaluation" else terms

    monkeypatch.setattr(LdpStrategy, "_terms", lying)
    with pytest.raises(AllDeclined, match="asks for something else than its config says"):
        deployed(world)
    assert world.charges() == [2] * CLIENTS


@pytest.mark.slow
def test_a_longer_vector_of_training_is_declined(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LdpStrategy._terms
    monkeypatch.setattr(LdpStrategy, "_terms", lambda self, progress: replace(honest(self, progress), size=4))
    with pytest.raises(AllDeclined, match="asks for something else than its config says"):
        deployed(world)
    assert sum(world.charges()) == 0


@pytest.mark.slow
def test_an_app_of_ones_own_is_not_asked_for_figures(world: World) -> None:
    config = config_of()
    prepared = prepare(config.to_toml(), None, "cpu")
    initial = to_arrays(prepared.start.state.weights, prepared.federation.task.layout)
    with pytest.raises(ConfigError, match="work only with the app"):
        LdpStrategy(config, collector=world.adding_up(), kind=Kind.OWN_APP).start(grid_of(world), initial, timeout=100.0)


def test_nodes_keep_no_personal_layers(world: World) -> None:
    config = config_of()
    prepared = prepare(config.to_toml(), None, "cpu")
    initial = to_arrays(prepared.start.state.weights, prepared.federation.task.layout)
    personal = config.model_copy(update={"model": config.model.model_copy(update={"personal": ["linear"]})})
    with pytest.raises(ConfigError, match="work only in simulations, because nodes keep no layers"):
        LdpStrategy(personal, collector=world.adding_up(), kind=Kind.READY_APP).start(grid_of(world), initial, timeout=100.0)


def test_the_noise_is_for_as_many_rounds_as_the_config_says(world: World) -> None:
    config = config_of()
    prepared = prepare(config.to_toml(), None, "cpu")
    initial = to_arrays(prepared.start.state.weights, prepared.federation.task.layout)
    with pytest.raises(ConfigError, match="num_rounds is 3, but the noise of the evaluation"):
        LdpStrategy(config, collector=world.adding_up(), kind=Kind.READY_APP).start(grid_of(world), initial, 3, timeout=100.0)


# --- nodes that fail --------------------------------------------------------------------------------------------------


def failing(message: Message, context: Context) -> Message:
    """Train as the ready app does, and fail at the evaluation on two nodes."""
    asked = message.content.config_records["ldpfl"]["kind"]
    if asked == "evaluation" and context.node_config["partition-id"] in (1, 3):
        raise RuntimeError("private reason")
    return apps.train(message, context)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_that_fails_at_the_evaluation_sends_a_report_all_the_same(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Zeros stand for its records, with noise: they count as half right. Nobody but the node's log learns of it."""
    plain = result_of(deployed(world, **NEARLY_NO_NOISE))["at_clients"][0]["figures"]
    world.folder = world.folder / "again"
    world.folder.mkdir()
    found = result_of(deployed(world, failing, **NEARLY_NO_NOISE))["at_clients"][0]["figures"]
    assert world.charges() == [3] * CLIENTS
    assert "private reason" not in caplog.text
    assert "is reported as no change" in caplog.text
    assert abs(found[RIGHT]["value"] - 0.5) < abs(plain[RIGHT]["value"] - 0.5) * 0.9


@pytest.mark.slow
@pytest.mark.thorough
def test_a_node_that_is_killed_in_the_evaluation_costs_its_charge_and_the_figures(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The relay releases no sum of fewer nodes than the noise was planned for. The model stays, and the run comes to its end."""

    def killed(client: int) -> None:
        if client == 2 and world.asked[-1].terms.kind == "evaluation":
            raise SystemExit

    world.before_upload = killed
    with caplog.at_level(logging.WARNING, "flwr.ldpfl"):
        deployed(world)
    assert "evaluation after round 2 has no result, and the run goes on" in caplog.text
    folder, charges = RunFolder(world.folder / "run"), world.charges()
    assert charges[:3] == [3] * 3  # those after it are not asked any more
    assert [event.histograms for event in folder.ledger().events] == [False, False, True]
    assert folder.ledger() == planned_ledger(folder.config())
    assert result_of(folder)["at_clients"] == []
    world.before_upload = lambda client: None
    deployed(world)  # the run is over: nothing is asked again
    assert world.charges() == charges


@pytest.mark.slow
@pytest.mark.thorough
def test_fewer_nodes_than_all_are_enough_where_the_server_says_so(world: World) -> None:
    """The figures are of the records of those that uploaded, with the noise of those alone."""

    def killed(client: int) -> None:
        if client == 2 and world.asked[-1].terms.kind == "evaluation":
            raise SystemExit

    world.before_upload, world.min_clients, world.policy = killed, 3, open_policy(**ANY, min_clients=3)
    folder = deployed(world, **NEARLY_NO_NOISE)
    measured = result_of(folder)["at_clients"][0]
    assert measured["records"] == (CLIENTS - 1) * HELD_BACK
    assert measured["figures"][RIGHT]["value"] > 0.7
    assert folder.ledger().events[-1].cohort == CLIENTS - 1


@pytest.mark.thorough
def test_a_record_for_which_the_model_raises_adds_nothing_and_stops_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training it adds nothing either. A node that failed as a whole would show that it has such a record."""
    vectors = RecordScores.vectors

    def raising(self: RecordScores, task: Any, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == 1 and float(outputs[0, 0]) > float(outputs[0, 1]):
            raise ValueError("a private value")
        return vectors(self, task, outputs, targets)

    plain = result_of(deployed(world, **NEARLY_NO_NOISE))["at_clients"][0]
    world.folder = world.folder / "again"
    world.folder.mkdir()
    monkeypatch.setattr(RecordScores, "vectors", raising)
    measured = result_of(deployed(world, **NEARLY_NO_NOISE))["at_clients"][0]
    assert 0.5 < measured["figures"][RIGHT]["value"] < plain["figures"][RIGHT]["value"]
    assert measured["figures"][LOSS]["value"] > plain["figures"][LOSS]["value"]


# --- a server that is stopped -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_a_server_that_was_stopped_in_the_evaluation_goes_on_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    collect = LdpStrategy._finish_round

    def stopped(self: LdpStrategy, progress: Any, received: Any) -> None:
        if progress.planned.kind == "evaluation":
            raise KeyboardInterrupt
        collect(self, progress, received)

    with monkeypatch.context() as patched:
        patched.setattr(LdpStrategy, "_finish_round", stopped)
        with pytest.raises(KeyboardInterrupt):
            deployed(world, **NEARLY_NO_NOISE)
    folder = RunFolder(world.folder / "run")
    assert len(folder.ledger().events) == 3  # charged before anybody was told to measure
    deployed(world, **NEARLY_NO_NOISE)
    assert world.charges() == [3] * CLIENTS
    assert len(folder.ledger().events) == 3
    assert result_of(folder)["at_clients"][0]["figures"][RIGHT]["value"] > 0.7
