"""Nodes whose tables have several rows of a person: they protect all of them together, as the simulator does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flower_parts  # switches Flower's telemetry off before it is imported
import numpy as np
import pandas as pd
import pytest
import torch
from flower_parts import OpenNode, ask, instruction, simulator_bits, terms_of
from flwr.app import Context, RecordDict
from test_invitation import question
from test_node_tables import CLIENTS, deployed, listed, rows
from test_own_records import folder_of
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl import ConfigError, DataError, PrivacyError, api
from ldpfl.data.nodes import check_node_table, read_node_table, server_view_of_node_tables
from ldpfl.data.persons import Persons
from ldpfl.errors import Declined, NamesNoPersons
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.dataset import target_kind_of
from ldpfl.flower import LdpClientApp, RecordTask
from ldpfl.flower.arrays import layout_of, to_vector
from ldpfl.flower.named_by_server import check_config
from ldpfl.flower.policy_init import fitting_policy, offer_of, ranges_for
from ldpfl.flower.records import RecordGradients
from ldpfl.mechanisms.record_clipping import STEPS
from ldpfl.privacy.policy import Policy
from ldpfl.simulation import Federation
from ldpfl.util.randomness import SeededStreams


def of_persons(node: int) -> pd.DataFrame:
    """Rows of a node; every fourth is of one person, and the others of persons with one or two rows."""
    frame = rows(30 + 10 * node, node)
    frame["patient"] = [f"P{node}-{'x' if place % 4 == 0 else place // 2}" for place in range(len(frame))]
    return frame.drop(columns="name")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    for node in range(CLIENTS):
        of_persons(node).to_csv(tmp_path / f"{node}.csv", index=False)
    rows(100, 9).drop(columns="name").to_csv(tmp_path / "test.csv", index=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.thorough
def test_they_end_in_the_model_of_a_simulation_on_all_their_rows(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with persons who have more rows than count in one round."""
    more = {"data__person": "patient", "data__person_rows": 3, "mechanism__records": 20}
    folder = deployed(tables, monkeypatch, data__test_path=str(tables / "test.csv"), **more)
    together = pd.concat([pd.read_csv(tables / f"{node}.csv").assign(hospital=node) for node in range(CLIENTS)])
    together.to_csv(tables / "together.csv", index=False)
    own = {
        "data.scaling": "bounds",
        "data.path": str(tables / "together.csv"),
        "data.test_path": str(tables / "test.csv"),
        "data.client": "hospital",
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    plain = lambda self, state, clients, values, mechanism: SeededStreams.for_clients(self.seed, state.round + 1, clients.tolist())  # noqa: E731
    monkeypatch.setattr(Federation, "streams", plain)
    simulated = api.run("own", settings=listed(own), baseline=False, progress=False)
    checkpoint = folder.checkpoint()
    assert checkpoint is not None
    assert torch.equal(checkpoint.state.model, torch.cat([value.flatten() for value in simulated.module().state_dict().values()]))
    assert folder.ledger() == simulated.ledger
    assert {event.release.unit for event in simulated.ledger.events} == {"person"}


def config_of(**more: Any) -> RunConfig:
    return load_recipe("own", listed({"data.name": "node", "data.person": "patient", **more}))


def test_a_row_of_nobody_is_left_out_at_a_node_and_named_to_its_operator(tables: Path) -> None:
    config, frame = config_of(), of_persons(0)
    frame.loc[[4, 7], "patient"] = [None, "n/a"]
    frame.to_csv(tables / "0.csv", index=False)
    found = read_node_table(config.data, target_kind_of(config), tables / "0.csv")
    assert len(found.train) == len(frame) - 2
    assert found.persons is not None
    assert len(set(found.persons.tolist())) == frame.patient.drop([4, 7]).nunique()
    with pytest.raises(DataError, match=r"line 6: data.person 'patient' has no value"):
        check_node_table(config.data, target_kind_of(config), tables / "0.csv")
    frame["patient"] = None
    frame.to_csv(tables / "0.csv", index=False)
    with pytest.raises(DataError, match=r"the column 'patient' \(data.person\) is empty in all rows of"):
        read_node_table(config.data, target_kind_of(config), tables / "0.csv")


def test_a_server_has_no_say_in_who_is_somebody(tables: Path) -> None:
    """Settings say what stands for no value; if they did so of names, a server could have all persons but one left out."""
    config = config_of(**{"data.missing_words": ["P0-x", "P0-1"], "data.words": ["town", "patient"]})
    found = read_node_table(config.data, target_kind_of(config), tables / "0.csv")
    assert len(found.train) == len(of_persons(0))
    assert found.persons is not None
    assert len(set(found.persons.tolist())) == of_persons(0).patient.nunique()


def test_persons_are_no_input_and_no_target(tables: Path) -> None:
    for more in ({"data.columns": ["age", "ward", "town", "patient"], "data.words": ["town", "patient"]}, {"data.person": "outcome"}):
        config = config_of(**more)
        with pytest.raises(ConfigError):
            server_view_of_node_tables(config.data, target_kind_of(config))


def test_a_policy_names_what_a_person_is(tmp_path: Path) -> None:
    """Else a server could take each visit for a person, and the policy would count on what is not there."""
    check_config(config_of(), Policy(person="patient"))
    for policy, named in ((Policy(), "''"), (Policy(person="stay"), "'stay'")):
        with pytest.raises(Declined, match=rf"rows into persons by the column 'patient', but the policy has person = {named}"):
            check_config(config_of(), policy)
    check_config(config_of(**{"data.person": None}), Policy(person="patient"))  # protects records, which the policy judges by its protects


def test_a_partition_that_is_code_is_not_run_for_a_server(tmp_path: Path) -> None:
    with pytest.raises(Declined, match=r"data\.partition is 'os:getcwd', which is code"):
        check_config(config_of(**{"data.person": None, "data.partition": "os:getcwd"}), Policy())


def test_the_policy_of_an_app_that_protects_persons_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config_of().to_toml())
    offer = offer_of(str(tmp_path / "config.toml"))
    policy = fitting_policy(offer, ranges_for(offer, ()))
    assert (policy.protects, policy.person) == ("person", "patient")


def test_an_app_of_one_s_own_for_persons_has_a_policy_that_fits(tmp_path: Path) -> None:
    """Its nodes read what no config names, and say themselves whose their records are."""
    changes = [
        "data.person=patient",
        "mechanism.name=dp-sgd",
        "mechanism.perturbed=gradient",
        "mechanism.records=3",
        "shuffling.channel=direct",
    ]
    (tmp_path / "config.toml").write_text(parse_config("", [*changes, "privacy.target_epsilon=4.0"], origin="test").to_toml())
    offer = offer_of(str(tmp_path / "config.toml"))
    assert fitting_policy(offer, ranges_for(offer, [12, 3])).protects == "person"


# --- an app of one's own ----------------------------------------------------------------------------------------------


NORM = 0.5
TERMS = terms_of(
    config=parse_config(
        "", ["mechanism.name=dp-sgd", "mechanism.records=3", f"mechanism.clip_norm={NORM}", "data.person=patient"], origin="test"
    )
)
WHOSE = ["b", "a", "b", "c", "b", "a"]


def task_of(whose: object = WHOSE, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> RecordTask:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return RecordTask(nn.Linear(4, 3), inputs, targets, loss, persons=whose)  # type: ignore[arg-type]


def summed(task: RecordTask) -> Tensor:
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    (arrays,) = RecordGradients(lambda _: task)(instruction(TERMS), context).content.array_records.values()
    return to_vector(arrays, layout_of(flower_parts.start_arrays()), torch.int64)


def by_person(task: RecordTask) -> Tensor:
    model, total = nn.Linear(4, 3), torch.zeros(15, dtype=torch.float64)
    nn.utils.vector_to_parameters(flower_parts.start_vector(), model.parameters())
    inputs = task.inputs
    assert isinstance(inputs, Tensor)
    for name in "bac":
        own = torch.tensor([place for place, whose in enumerate(WHOSE) if whose == name])
        found = torch.autograd.grad(F.cross_entropy(model(inputs[own]), task.targets[own]), list(model.parameters()))
        gradient = -torch.cat([part.flatten() for part in found]).double()
        total += gradient * min(1.0, NORM / float(gradient.norm()))
    return total


@pytest.mark.parametrize("whose", [WHOSE, np.array([7, 3, 7, 9, 7, 3]), torch.tensor([7, 3, 7, 9, 7, 3])])
def test_an_own_app_says_whose_its_records_are(whose: object) -> None:
    task = task_of(whose.tolist() if isinstance(whose, np.ndarray) else whose)
    task.check()
    torch.testing.assert_close(summed(task).double() * NORM / STEPS, by_person(task), atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 40])
def test_replacing_all_records_of_a_person_moves_the_sum_by_two_norms_at_most(count: int) -> None:
    """Also where the loss gives one mean for all that it is shown, or looks at values."""
    for loss in (F.cross_entropy, lambda outputs, targets: F.cross_entropy(outputs, targets) * (2 if float(targets[0]) > 0 else 1)):
        before = task_of(loss=loss)
        assert isinstance(before.inputs, Tensor)
        others = torch.tensor([whose != "b" for whose in WHOSE])
        inputs = torch.cat([torch.full((count, 4), 9.0), before.inputs[others]])
        targets = torch.cat([torch.full((count,), 2), before.targets[others]])
        after = replace(before, inputs=inputs, targets=targets, persons=["B"] * count + [whose for whose in WHOSE if whose != "b"])
        assert sum(part**2 for part in (summed(after) - summed(before)).tolist()) <= (2 * STEPS) ** 2


def test_terms_for_persons_need_an_app_that_says_whose_its_records_are() -> None:
    with pytest.raises(PrivacyError, match="RecordTask has no persons"):
        summed(task_of(None))
    with pytest.raises(ConfigError, match="`persons` has 2 entries and `targets` has 6 rows"):
        task_of(["a", "b"])
    assert task_of(None).persons_by(3) is None
    assert isinstance(task_of().persons_by(3), Persons)


def test_an_app_that_does_not_say_that_it_names_persons_declines_before_anything_is_charged() -> None:
    """What records say is known only when they are read, and then the round is charged already."""
    node = OpenNode()

    def app_of(persons: bool, task: RecordTask) -> LdpClientApp:
        return LdpClientApp(records=lambda _: task, persons=persons, node=lambda context: node, source=simulator_bits)

    for message in (instruction(TERMS), question(TERMS)):
        reply = ask(app_of(False, task_of(None)), message)
        assert reply.error.reason == NamesNoPersons.public
        assert len(NamesNoPersons.public) <= 80  # or the server's error would cut it off
    assert node.steps == []
    assert ask(app_of(True, task_of()), instruction(TERMS)).has_content()
    assert node.steps != []


def test_a_policy_is_written_for_persons_only_where_the_app_names_them(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(TERMS.config.to_toml(), encoding="utf-8")
    for name, persons in (("forgets", ""), ("denies", ", persons=False"), ("names", ", persons=True")):
        app = folder_of(tmp_path / name, f'LdpClientApp(records="mine.training:records"{persons})')
        if name == "names":
            policy = fitting_policy(offer := offer_of(str(app), own), ranges_for(offer, (12, 3)))
            assert policy.person == "patient"
        else:
            with pytest.raises(ConfigError, match=r"LdpClientApp\(records=\.\.\., persons=True\)"):
                offer_of(str(app), own)


@pytest.mark.thorough_except("nobody7", "nobody10", "nobody6", " ")
@pytest.mark.parametrize("nobody", [None, float("nan"), "", " ", "NaN", "n/a", pd.NA, pd.NaT, 1.5, True, ("a", 1)])
def test_a_row_that_names_nobody_adds_nothing_and_its_author_is_told(nobody: object) -> None:
    """Each NaN would be a person of its own, whoever it is. That such a row stopped a node would be one person's doing, to all others."""
    whose = ["b", "a", nobody, "c", nobody, "a"]
    with_nobody, known = task_of(whose), [0, 1, 3, 5]
    assert isinstance(with_nobody.inputs, Tensor)
    alone = replace(with_nobody, inputs=with_nobody.inputs[known], targets=with_nobody.targets[known], persons=["b", "a", "c", "a"])
    assert torch.equal(summed(with_nobody), summed(alone))
    with pytest.raises(ConfigError, match=r"`persons` is empty in row 2 \(counted from 0\)") as caught:
        with_nobody.check()
    assert "('a', 1)" not in str(caught.value)


def test_the_same_name_is_the_same_person_however_it_is_written() -> None:
    for names in (["é", "e\u0301", " é ", "b", "b", "b"], [7, "7", 7.0, np.int64(8), " 8", "8"], torch.tensor([1, 1, 1, 2, 2, 2])):
        persons = task_of(names).persons_by(6)
        assert persons is not None
        assert persons.counts.tolist() == [3, 3]
