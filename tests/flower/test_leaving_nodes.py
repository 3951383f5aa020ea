"""A node that leaves in the middle of a run: who is missing, what is lost, and how its operator goes on without it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType, UserConfig
from relayed_parts import CLIENTS, KEY, World, world_in
from table_parts import ANY, changes_of, deployed, open_policy, write_tables

from conftest import CommandLine
from ldpfl.errors import AllDeclined, TooFewTakePart
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, apps
from ldpfl.flower.policy_init import fitting_policy, offer_of_settings, ranges_for
from ldpfl.flower.run_settings import RunSettings
from ldpfl.privacy.accounting import run_epsilon
from ldpfl.privacy.policy import Policy
from ldpfl.transport.shuffling.sealing import public_text
from ldpfl.util.number_format import number

LEFT = CLIENTS + 1
"""Flower's id of the last node, which leaves."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("LDPFL_DATA", write_tables(tmp_path))
    with world_in(tmp_path) as made:
        made.policy, made.min_clients, made.budget = open_policy(**ANY), CLIENTS, 1e9
        yield made


class Leaving(InProcessGrid):
    """A grid from which the last node is away while ``is_away`` holds for the last round that was begun."""

    def __init__(self, is_away: Callable[[int], bool], world: World, settings: UserConfig) -> None:
        app = LdpClientApp(apps.train, node=world.node, source=world.source)
        super().__init__(app, CLIENTS, run_config=settings)
        self._asked, self._is_away = RunFolder(Path(str(settings["ldpfl.out"]))).participation_path, is_away

    def get_node_ids(self) -> list[int]:
        nodes = list(super().get_node_ids())
        return nodes[:-1] if self._is_away(Participation.load(self._asked).begun) else nodes


@pytest.mark.slow
def test_an_evaluation_for_which_a_node_is_missing_brings_no_figures_and_training_goes_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The evaluation after round 2 is lost, the one after round 3 is not. The ledger counts both; nodes paid for one."""
    away = partial(Leaving, lambda begun: begun == 2)
    with caplog.at_level(logging.INFO, "flwr.ldpfl"):
        folder = deployed(world, own={"ldpfl.wait-s": 0.1}, grid=away, training__rounds=3, evaluation__every=2)
    assert "evaluation after round 2 has no result, and the run goes on. 4 of the 5 nodes" in caplog.text
    assert f"not connected, but asked in earlier rounds of this run: node {LEFT}" in caplog.text
    assert "evaluation after round 2: 0 reports" in caplog.text
    assert "either alone sees no report, and the noise of all clients protects the sum; the run begins" in caplog.text
    assert f"the run's model, figures and ledger are in {folder.path}: see ldpfl show" in caplog.messages[-1]
    assert world.charges() == [4] * CLIENTS
    result: Any = folder.result()
    assert [own["round"] for own in result["at_clients"]] == [3]
    assert [json.loads(line)["round"] for line in folder.metrics_path.read_text().splitlines()] == [1, 2, 3]
    (note,) = [note for note in result["caveats"] if "figures are missing" in note]
    assert note.startswith("clients' figures are missing after round 2: too few clients sent theirs in time")
    assert folder.ledger() == planned_ledger(folder.config())  # no less than what nodes were charged
    assert [event.histograms for event in folder.ledger().events] == [False, False, True, False, True]


@pytest.mark.slow
def test_a_result_says_in_how_many_rounds_the_model_was_trained(world: World, ldpfl: CommandLine) -> None:
    class Refused(Leaving):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
            asked = list(messages)
            if asked[0].metadata.message_type != MessageType.TRAIN:
                return super().send_and_receive(asked, timeout=timeout)
            return iter([Message(Error(0, "failed"), reply_to=message) for message in asked])

    more: dict[str, Any] = {"training__rounds": 2, "evaluation__epsilon": "off"}
    with pytest.raises(TooFewTakePart, match="round 1 was ended"):
        deployed(world, grid=partial(Refused, lambda begun: False), **more)
    folder = deployed(world, **more)
    said = "only 1 of 2 rounds had reports and changed the model; the guarantee counts all 2"
    assert said in str(folder.result())
    assert said in " ".join(ldpfl("show", folder.path).out.split())
    assert ldpfl("export", folder.path, world.folder / "out").code == 0
    assert said in (world.folder / "out" / "README.md").read_text(encoding="utf-8")


class Renamed(Leaving):
    """A grid whose last node is away, and whose last but one has registered anew, after the first round."""

    def get_node_ids(self) -> list[int]:
        nodes = super().get_node_ids()
        return nodes if len(nodes) == CLIENTS else [*nodes[:-1], LEFT + 1]


@pytest.mark.slow
def test_ids_that_nodes_had_before_they_registered_anew_are_not_taken_for_nodes(world: World) -> None:
    grid = partial(Renamed, lambda begun: begun == 1)
    with pytest.raises(TooFewTakePart, match=rf"rounds of this run: nodes {LEFT - 1}, {LEFT} \(some of these ids are former ones"):
        deployed(world, own={"ldpfl.wait-s": 0.1}, grid=grid, training__rounds=2, evaluation__epsilon="off")


def policy_for(nodes: int) -> tuple[Policy, dict[str, Any]]:
    """Return what ``ldpfl policy init`` writes for a run of so many nodes at epsilon 4, and the settings of the run."""
    more = {"clients__count": nodes, "privacy__target_epsilon": 4.0, "mechanism__noise_multiplier": None, "evaluation__epsilon": "off"}
    offer = offer_of_settings(RunSettings(recipe="own", changes=";".join(changes_of(**more)), transport="sum", min_clients=nodes))
    return fitting_policy(offer, ranges_for(offer, ()), [public_text(KEY)]), more


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_with_a_target_goes_on_without_a_node_that_has_left_for_good_as_its_message_says(world: World, tmp_path: Path) -> None:
    """As the page on sums has it: another run for one node fewer keeps the target, once the nodes' operators allow it."""
    world.policy, more = policy_for(CLIENTS)
    with pytest.raises(TooFewTakePart) as raised:
        deployed(world, own={"ldpfl.wait-s": 0.1}, grid=partial(Leaving, lambda begun: begun == 1), **more)
    said, first = str(raised.value), RunFolder(world.folder / "run")
    assert f"not connected, but asked in earlier rounds of this run: node {LEFT}" in said
    assert "with clients.count, ldpfl.nodes and ldpfl.min-clients set to 4 (in a custom app: the path of RunFolder and nodes of" in said
    spent = run_epsilon(first.ledger(), first.config().privacy.delta)
    assert f"What this run has released stays charged in addition: epsilon {number(spent)} so far" in said
    fewer = first.config().model_copy(update={"clients": first.config().clients.model_copy(update={"count": CLIENTS - 1})})
    same_noise = run_epsilon(planned_ledger(fewer), fewer.privacy.delta)
    assert 4 < same_noise < 5
    assert f"with this run's noise, 4 nodes would give epsilon {number(same_noise)}" in said

    world.min_clients = CLIENTS - 1
    fitting, more = policy_for(CLIENTS - 1)
    own: UserConfig = {"ldpfl.out": str(tmp_path / "second"), "ldpfl.min-clients": CLIENTS - 1, "ldpfl.nodes": CLIENTS - 1}
    gone = partial(Leaving, lambda begun: True)
    with pytest.raises(AllDeclined, match=r"4 said \"declined: its policy's min_clients does not allow the round\""):
        deployed(world, own=own, grid=gone, **more)
    world.policy = fitting.model_copy(
        update={
            "rounds": fitting.rounds + 1,
            "lifetime_epsilon": 2 * fitting.lifetime_epsilon,
            "sum_epsilon": 2 * float(fitting.sum_epsilon),
        }
    )
    second = deployed(world, own=own, grid=gone, **more)
    assert world.charges() == [3] * (CLIENTS - 1) + [1]
    assert run_epsilon(second.ledger(), second.config().privacy.delta) <= 4.0
    assert [event.cohort for event in second.ledger().events] == [CLIENTS - 1] * 2
    noise = [getattr(run.config().mechanism, "noise_multiplier") for run in (first, second)]  # noqa: B009
    assert noise[1] / noise[0] == pytest.approx((CLIENTS / (CLIENTS - 1)) ** 0.5, rel=0.01)


@pytest.mark.slow
def test_a_run_with_a_target_for_records_goes_on_with_fewer_nodes_where_each_hides_its_own(world: World) -> None:
    """A shuffler hides no sum over records, so the target was met by each node's own noise, and still is."""
    world.policy = open_policy(**ANY, transports=("relay",), min_clients=CLIENTS - 1)
    more: dict[str, Any] = {"training__rounds": 3, "privacy__target_epsilon": 4.0, "evaluation__epsilon": 1.0}
    more["mechanism__noise_multiplier"] = None
    with pytest.raises(TooFewTakePart, match=r"set ldpfl.nodes and ldpfl.min-clients to 4 \(in .* operator_relay\), and start the run"):
        deployed(world, transport="relay", own={"ldpfl.wait-s": 0.1}, grid=partial(Leaving, lambda begun: begun == 1), **more)
    world.min_clients = CLIENTS - 1
    own: UserConfig = {"ldpfl.min-clients": CLIENTS - 1, "ldpfl.nodes": CLIENTS - 1}
    folder = deployed(world, transport="relay", own=own, grid=partial(Leaving, lambda begun: True), **more)
    assert {event.cohort for event in folder.ledger().events} == {CLIENTS, CLIENTS - 1}
    assert len(set(world.charges())) == 2
    assert 3.9 < run_epsilon(folder.ledger(), folder.config().privacy.delta) <= 4.0


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_without_a_target_goes_on_in_its_folder_with_fewer_nodes(world: World, ldpfl: CommandLine) -> None:
    """Each round is charged with the noise of the nodes that took part."""
    world.policy = open_policy(**ANY, min_clients=CLIENTS - 1)
    more: dict[str, Any] = {"training__rounds": 3, "evaluation__epsilon": "off"}
    with pytest.raises(TooFewTakePart, match=r"set ldpfl.nodes and ldpfl.min-clients to 4 \(in .* operator_sum\), and start the run again"):
        deployed(world, own={"ldpfl.wait-s": 0.1}, grid=partial(Leaving, lambda begun: begun == 1), **more)
    world.min_clients = CLIENTS - 1
    own: UserConfig = {"ldpfl.min-clients": CLIENTS - 1, "ldpfl.nodes": CLIENTS - 1}
    folder = deployed(world, own=own, grid=partial(Leaving, lambda begun: True), **more)
    assert [event.cohort for event in folder.ledger().events] == [CLIENTS, CLIENTS - 1, CLIENTS - 1]
    assert world.charges() == [3] * (CLIENTS - 1) + [1]
    assert f"{CLIENTS}, {CLIENTS - 1} to {CLIENTS} a round; 3" in ldpfl("show", folder.path).out
