"""An app of one's own whose records are protected one by one: its author gives model, loss and samples, and ldpfl the gradients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flower_parts  # switches Flower's telemetry off before it is imported
import numpy as np
import pytest
import torch
from flower_parts import OpenNode, ask, instruction, simulator_bits, start_vector, terms_of
from flwr.app import Context, RecordDict
from test_same_model import CASES, SimulatedNode, deployed, simulator_source
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import TINY_TOML
from ldpfl import api
from ldpfl.api.policies import read_budget
from ldpfl.data import Dataset
from ldpfl.errors import AllDeclined, ConfigError, PrivacyError
from ldpfl.experiments.build import build
from ldpfl.experiments.config import parse_config
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, LdpStrategy, RecordTask, apps
from ldpfl.flower.app_imports import client_output, unwrapped_code
from ldpfl.flower.arrays import layout_of, to_arrays, to_vector
from ldpfl.flower.policy_init import fitting_policy, offer_of, policy_text, ranges_for
from ldpfl.flower.records import RecordGradients
from ldpfl.mechanisms.record_clipping import STEPS, RecordClip
from ldpfl.privacy.budget_file import read_charges, set_limit
from ldpfl.privacy.events import OURS, USERS_CODE
from ldpfl.simulation import train_clients

NORM = 0.5
TERMS = terms_of(config=parse_config("", ["mechanism.name=dp-sgd", "mechanism.records=6", f"mechanism.clip_norm={NORM}"], origin="test"))
COUNT = 6


def rows(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def task_of(loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, model: nn.Module | None = None) -> RecordTask:
    return RecordTask(model or nn.Linear(4, 3), *rows(), loss)


def summed(task: RecordTask) -> Tensor:
    """What the app hands to the mechanism, (d,) lattice points."""
    message = instruction(TERMS)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    (arrays,) = RecordGradients(lambda _: task)(message, context).content.array_records.values()
    return to_vector(arrays, layout_of(flower_parts.start_arrays()), torch.int64)


def one_by_one(task: RecordTask, places: range) -> Tensor:
    """The same by autograd, record by record, in the order of the arrays that were sent."""
    model = nn.Linear(4, 3)
    nn.utils.vector_to_parameters(start_vector(), model.parameters())
    total = torch.zeros(15, dtype=torch.float64)
    inputs = task.inputs
    assert isinstance(inputs, Tensor)
    for place in places:
        loss = task.loss(model(inputs[place : place + 1]), task.targets[place : place + 1])
        found = torch.cat([part.flatten() for part in torch.autograd.grad(loss.sum(), list(model.parameters()))])
        total -= RecordClip(NORM).points(found[None])[0]
    return total


def test_gradients_are_taken_of_single_records_and_bounded() -> None:
    torch.testing.assert_close(summed(task_of()).double(), one_by_one(task_of(), range(COUNT)), atol=COUNT * 8, rtol=1e-5)
    assert float(one_by_one(task_of(), range(1)).norm()) == pytest.approx(STEPS, rel=1e-4)  # and none of these is short


def test_a_node_s_log_says_that_no_record_had_a_gradient(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    summed(task_of())
    assert "unusable" not in caplog.text
    inputs, targets = rows()
    assert not summed(RecordTask(nn.Linear(4, 3), inputs * torch.nan, targets, F.cross_entropy)).any()
    assert "unusable: no record of this node's app has a gradient that is finite and not 0" in caplog.text
    assert "check-node --app APP --try" in caplog.text


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_where_clients_are_protected_the_gradient_is_that_of_the_mean_loss(reduction: str) -> None:
    terms = replace(TERMS, config=parse_config("", ["mechanism.name=rotated-sign", "mechanism.perturbed=gradient"], origin="test"))
    task = task_of(lambda outputs, targets: F.cross_entropy(outputs, targets, reduction=reduction))
    app = RecordGradients(lambda _: task)
    (arrays,) = app(instruction(terms), Context(1, 2, {}, RecordDict(), {})).content.array_records.values()
    found = to_vector(arrays, layout_of(flower_parts.start_arrays()))
    model = nn.Linear(4, 3)
    nn.utils.vector_to_parameters(start_vector(), model.parameters())
    inputs, targets = rows()
    every = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
    torch.testing.assert_close(found, -torch.cat([part.flatten() for part in every]))


class Fails(Exception):
    pass


def raising(outputs: Tensor, targets: Tensor) -> Tensor:
    if bool((targets > 2).any()):
        raise Fails("a record's value")
    return F.cross_entropy(outputs, targets)


def exiting(outputs: Tensor, targets: Tensor) -> Tensor:
    if bool((targets > 2).any()):
        raise SystemExit("a record's value")
    return F.cross_entropy(outputs, targets)


HOSTILE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, int]] = {
    "another class": (F.cross_entropy, 1.0, 2),
    "huge": (lambda outputs, targets: F.cross_entropy(outputs, targets) * 1e30, 1e8, 0),
    "overflowing": (F.cross_entropy, 3e38, 0),
    "NaN": (F.cross_entropy, float("nan"), 0),
    "infinite": (lambda outputs, targets: outputs.exp().exp().sum(), 100.0, 0),
    "no such class": (F.cross_entropy, 1.0, 7),
    "raises": (raising, 1.0, 7),
    "asks to exit": (exiting, 1.0, 7),
}


@pytest.mark.thorough_except("huge", "infinite")
@pytest.mark.parametrize("case", HOSTILE)
def test_replacing_a_record_moves_the_sum_by_two_norms_at_most(case: str) -> None:
    """Whatever the author's loss makes of it; and what other records add stays the same to the last bit."""
    loss, value, target = HOSTILE[case]
    before = task_of(loss)
    sums = [summed(before)]
    for place in (0, 3, COUNT - 1):
        inputs, targets = (part.clone() for part in rows())
        inputs[place], targets[place] = value, target
        sums.append(summed(replace(before, inputs=inputs, targets=targets)))
        without = summed(replace(before, inputs=torch.where(torch.arange(COUNT)[:, None] == place, torch.nan, rows()[0])))
        for difference in (sums[-1] - sums[0], sums[0] - without, sums[-1] - without):
            assert sum(part**2 for part in difference.tolist()) <= (2 * STEPS) ** 2
        # A record alone: no longer than one norm, to the last bit, so nothing of the others has moved.
        assert sum(part**2 for part in (sums[-1] - without).tolist()) <= STEPS**2
        if case not in ("another class", "huge"):
            assert torch.equal(sums[-1], without)
    assert not torch.equal(sums[0], torch.zeros_like(sums[0]))


@pytest.mark.thorough
def test_an_own_app_and_the_ready_one_end_in_the_same_model_ledger_and_certificate(
    tiny_data: Path, tiny_task: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit; and the ready one ends in the simulator's model, see ``test_same_model``."""
    config = parse_config(TINY_TOML, [*CASES["records"], "training.rounds=2"], origin="test")
    monkeypatch.setattr("ldpfl.flower.ready_server.load_recipe", lambda name, changes: config)
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    deployed({"ldpfl.recipe": "own records", "ldpfl.out": str(tmp_path / "ready")}, config, tiny_data)
    federation, start = build(config, tiny_task, torch.device("cpu"))

    def records(context: Context) -> RecordTask:
        client = int(context.node_config["partition-id"])
        own = federation.task.batch(torch.from_numpy(federation.samples[client]))
        return RecordTask(nn.Sequential(nn.Flatten(), nn.Linear(400, 10)), *own, nn.CrossEntropyLoss())

    app = LdpClientApp(records=records, node=lambda context: SimulatedNode(), source=simulator_source)
    strategy = LdpStrategy(config, folder=RunFolder(tmp_path / "own"))
    strategy.start(InProcessGrid(app, config.clients.count), to_arrays(start.state.weights, federation.task.layout))
    ready = RunFolder(tmp_path / "ready").checkpoint()
    assert ready is not None
    assert torch.equal(strategy.checkpoint.state.weights, ready.state.weights)
    assert not torch.equal(ready.state.weights, start.state.weights)
    own_events = strategy.checkpoint.ledger.events
    assert {event.release.author for event in own_events} == {USERS_CODE}
    assert tuple(replace(event, release=replace(event.release, author=OURS)) for event in own_events) == ready.ledger.events
    assert {event.release.unit for event in ready.ledger.events} == {"record"}
    own, as_ready = (api.certify(tmp_path / name).statement.guarantees for name in ("own", "ready"))
    assert {line.status for line in own} == {"author's claim"}
    assert tuple(replace(line, status="proved") for line in own) == as_ready


def test_server_and_nodes_agree_that_the_guarantee_of_an_own_app_rests_on_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever built-in model the server's config names."""
    settings = ["mechanism.name=dp-sgd", "mechanism.records=6", "training.rounds=2", "clients.count=1", "shuffling.channel=direct"]
    config = parse_config("", [*settings, "model.name=linear"], origin="test")
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    offer = offer_of(str(tmp_path / "config.toml"))
    (tmp_path / "policy.toml").write_text(policy_text(fitting_policy(offer, ranges_for(offer, [12, 3])), "test"), encoding="utf-8")
    set_limit(tmp_path / "budget.sqlite", 100.0, 1e-5)
    monkeypatch.setenv("LDPFL_POLICY", str(tmp_path / "policy.toml"))
    monkeypatch.setenv("LDPFL_BUDGET", str(tmp_path / "budget.sqlite"))
    strategy = LdpStrategy(config, folder=RunFolder(tmp_path / "run"))
    strategy.start(InProcessGrid(LdpClientApp(records=lambda _: task_of()), 1), flower_parts.start_arrays())
    released, charged = strategy.checkpoint.ledger.events, read_charges(tmp_path / "budget.sqlite")
    assert [event.release for event in released] == [charge.release for charge in charged]
    assert [charge.release.author for charge in charged] == [USERS_CODE] * 2
    assert api.account(tmp_path / "run").status == "author's claim"
    assert read_budget(tmp_path / "budget.sqlite").claims == (f"dp-sgd ({USERS_CODE})",)


def test_at_nodes_what_protects_a_whole_client_is_proved_with_any_model() -> None:
    """Each client has a process of its own, so no model passes data between clients."""
    strategy = LdpStrategy(flower_parts.config_of("model.name=net.py:Net"))
    strategy.start(InProcessGrid(flower_parts.app_of(), 3), flower_parts.start_arrays(), 1)
    (event,) = strategy.checkpoint.ledger.events
    assert (event.release.mechanism, event.release.author) == ("duchi", OURS)


class Picky(nn.Sequential):
    """Raises for an image that is darker than made-up ones are."""

    darkest = -10.0

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(400, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.mean()) < self.darkest:
            raise Fails("PATIENT-4711")
        found: Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.thorough
def test_a_record_for_which_a_model_raises_adds_nothing_in_the_ready_app_either(
    tiny_data: Path, tiny_task: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model may be code that the policy names."""
    config = parse_config(TINY_TOML, [*CASES["records"], "model.name=test_own_records:Picky"], origin="test")
    federation, start = build(config, tiny_task, torch.device("cpu"))
    of, layout = federation.samples[0], federation.task.layout
    means = federation.task.batch(torch.from_numpy(of))[0].mean(dim=(1, 2, 3))  # type: ignore[union-attr]
    monkeypatch.setenv("LDPFL_DATA_DIR", str(tiny_data))
    terms = terms_of(config=config, layers=layout.names, center=(0.0, 0.0), radius=(1.0, 1.0))
    message = instruction(terms, to_arrays(start.state.weights, layout))

    def trained() -> Tensor:
        (arrays,) = apps.train(message, Context(1, 2, {"partition-id": 0}, RecordDict(), {})).content.array_records.values()
        return to_vector(arrays, layout, torch.int64)

    every = trained()
    monkeypatch.setattr("test_own_records.Picky.darkest", float(means.min()) + 1e-6)
    others = trained()
    with pytest.raises(Fails):
        train_clients(federation, start.state, np.array([0]))
    assert 0 < sum(part**2 for part in (every - others).tolist()) <= STEPS**2
    assert torch.equal(trained(), others)


def app_of(task: RecordTask, node: OpenNode | None = None) -> LdpClientApp:
    return LdpClientApp(records=lambda _: task, node=lambda context: node or OpenNode(), source=simulator_bits)


class Remembers(nn.Linear):
    """Its result for a record follows from those before."""

    def __init__(self, patient_4711: str) -> None:
        super().__init__(4, 3)
        self.__dict__[patient_4711] = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        found = super().forward(inputs)
        self.__dict__["patient-4711"] = found.detach().clone()
        return found


class Centered(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - inputs.mean(dim=0))


UNFIT: dict[str, tuple[RecordTask, type[Exception], str]] = {
    "mixes": (task_of(model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), PrivacyError, "batch normalisation mixes private samples"),
    "mixes by a mean": (task_of(model=Centered(4, 3)), PrivacyError, "it mixes the samples of a batch"),
    "draws": (task_of(model=nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))), PrivacyError, "dropout in 1 draws"),
    "remembers": (task_of(model=Remembers("patient-4711")), PrivacyError, "changed patient-4711 while it ran"),
    "other inputs": (RecordTask(nn.Linear(4, 3), rows()[0][:, :3], rows()[1], F.cross_entropy), ConfigError, "cannot be trained on"),
    "a loss of no number": (task_of(lambda outputs, targets: "none"), ConfigError, "gives a loss that is a str"),  # type: ignore[arg-type, return-value]
}
NOTHING = task_of(lambda outputs, targets: outputs.sum() * torch.nan)


@pytest.mark.parametrize("case", UNFIT)
def test_a_model_that_does_not_fit_is_found_by_a_test_of_its_author_and_reports_no_change_on_a_node(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, error, said = UNFIT[case]
    with pytest.raises(error, match=said):
        task.check()
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert ask(app_of(task), instruction(TERMS)).content == ask(app_of(NOTHING), instruction(TERMS)).content
    assert "to see why, run ldpfl deploy check-node --app APP --try on this node, or RecordTask.check() in a test" in caplog.text
    assert "4711" not in caplog.text  # how an author calls things may be private


def test_a_model_of_other_arrays_than_the_server_sent_reports_no_change(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    for model in (nn.Linear(4, 3, bias=False), nn.Sequential(nn.Linear(4, 3))):
        task = task_of(model=model)
        task.check()
        assert ask(app_of(task), instruction(TERMS)).content == ask(app_of(NOTHING), instruction(TERMS)).content
        assert "differ in name or shape from the arrays that the server sent" in caplog.text
    fits = ask(app_of(task_of()), instruction(TERMS)).content
    assert fits != ask(app_of(NOTHING), instruction(TERMS)).content


def test_what_the_terms_ask_for_and_the_app_does_not_give_is_declined_for_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    node = OpenNode()
    asked = {
        "GivesWeights": (flower_parts.app_of(node=node), TERMS, "LdpClientApp(records=...)"),
        "GivesGradients": (app_of(task_of(), node), terms_of(), "set mechanism.perturbed to 'gradient'"),
        "NotReadyApp": (app_of(task_of(), node), replace(TERMS, ready_app=True), "give the app a ServerApp with LdpStrategy"),
    }
    for app, terms, said in asked.values():
        reply = ask(app, instruction(terms))
        reason = str(reply.error.reason)
        assert said in reason
        assert len(reason) <= 80  # or the server's error would cut it off
    assert "should use LdpClientApp(records=...): see docs/flower.md" in caplog.text
    assert "should set mechanism.perturbed to 'gradient'" in caplog.text
    assert node.steps == []


def test_a_server_that_counts_on_ldpfls_own_app_gets_no_gradients_of_another() -> None:
    """Its ledger would call them proved, and the nodes' budgets would not. What protects whole clients is proved for every app."""
    config = parse_config("", ["mechanism.name=dp-sgd", "mechanism.records=6", "training.rounds=1"], origin="test")
    strategy, node = LdpStrategy(config, kind=Kind.READY_APP), OpenNode()
    with pytest.raises(AllDeclined, match="give the app a ServerApp with LdpStrategy"):
        strategy.start(InProcessGrid(app_of(task_of(), node), 3), flower_parts.start_arrays())
    assert node.steps == []
    assert ask(flower_parts.app_of(node=node), instruction(terms_of(ready_app=True))).has_content()


def test_a_server_is_told_what_its_clients_apps_lack() -> None:
    config = parse_config("", ["mechanism.name=dp-sgd", "mechanism.records=6", "training.rounds=3"], origin="test")
    strategy = LdpStrategy(config)
    with pytest.raises(AllDeclined, match=r"round 1: none of 3 nodes takes part: 3 said .*gradients need LdpClientApp\(records=\.\.\.\)"):
        strategy.start(InProcessGrid(flower_parts.app_of(), 3), flower_parts.start_arrays())


@pytest.mark.slow
@pytest.mark.thorough
def test_records_named_by_their_path_are_read_where_they_are_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "records_of_a_user.py").write_text(
        "from test_own_records import task_of\n\n\ndef records(context):\n    return task_of()\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = LdpClientApp(records="records_of_a_user:records", node=lambda context: OpenNode(), source=simulator_bits)
    assert ask(app, instruction(TERMS)).content == ask(app_of(task_of()), instruction(TERMS)).content
    assert "records_of_a_user" not in sys.modules


@pytest.mark.parametrize("given", ["module", "a.b", ":app", "a:", "a b:app", 3])
def test_an_app_that_is_neither_a_function_nor_an_import_path_is_refused(given: str | int) -> None:
    with pytest.raises(ConfigError, match=rf"`app` of LdpClientApp must be a function or its import path, got {given!r}: give it as in"):
        LdpClientApp(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"`records` of LdpClientApp must be .*, got {given!r}: .*records=.package\.module:name"):
        LdpClientApp(records=given)  # type: ignore[arg-type]


def test_a_task_whose_loss_or_model_is_only_named_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`loss` of RecordTask must be a function .*, got 'mse_loss': give one such as torch"):
        RecordTask(nn.Linear(4, 3), *rows(), "mse_loss")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`model` of RecordTask must be a torch\.nn\.Module, got 'linear'"):
        RecordTask("linear", *rows(), F.cross_entropy)  # type: ignore[arg-type]


def test_an_app_of_nothing_or_of_two_things_is_refused() -> None:
    for given in ({}, {"app": "a:b", "records": "a:c"}):
        with pytest.raises(ConfigError, match="give one of them"):
            LdpClientApp(**given)  # type: ignore[arg-type]
    inputs, targets = rows()
    for parts, said in (
        ((inputs.double(), targets), "`inputs` has torch.float64 and shape .* expected rows of float32 or int64"),
        ((inputs, targets.byte()), "`targets` has torch.uint8"),
        (({}, targets), "`inputs` is an empty dict"),
        ((inputs.numpy(), targets), "must be PyTorch tensors"),
        ((inputs, targets[:4]), "`inputs` has 6 rows and `targets` has 4"),
        ((inputs[:0], targets[:0]), "RecordTask has no records"),
    ):
        with pytest.raises(ConfigError, match=said):
            RecordTask(nn.Linear(4, 3), *parts, F.cross_entropy)  # type: ignore[call-arg]


class Ward(nn.Module):
    """Several tensors a record, one of them a category."""

    def __init__(self) -> None:
        super().__init__()
        self.ward, self.out = nn.Embedding(3, 2), nn.Linear(6, 1)

    def forward(self, numbers: Tensor, ward: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([numbers, self.ward(ward)], dim=1))
        return found.squeeze(1)


def test_a_model_may_take_several_tensors_and_know_few_categories() -> None:
    inputs = {"numbers": rows()[0], "ward": torch.tensor([0, 1, 2, 0, 1, 2])}
    RecordTask(Ward(), inputs, torch.ones(COUNT), nn.functional.binary_cross_entropy_with_logits).check()


def folder_of(path: Path, call: str) -> Path:
    (path / "mine").mkdir(parents=True)
    (path / "mine" / "__init__.py").touch()
    (path / "pyproject.toml").write_text('[tool.flwr.app.components]\nclientapp = "mine.client_app:app"\n', encoding="utf-8")
    (path / "mine" / "client_app.py").write_text(f"from ldpfl.flower import LdpClientApp\n\napp = {call}\n", encoding="utf-8")
    return path


CALLS = {
    'LdpClientApp("mine.training:app")': "weights",
    'LdpClientApp(records="mine.training:records")': "gradients",
    'LdpClientApp(records="mine.training:records", persons=True)': "gradients of persons",
    "made()": "unknown",
    'LdpClientApp(records="mine.training:records")\nfrom ldpfl.flower.apps import trial_app': "gradients",  # an import decides nothing
    'LdpClientApp(records="a:b")\nother = LdpClientApp("a:b")': "gradients",
    'None\napp = LdpClientApp(records="a:b")': "gradients",
    'LdpClientApp(records="a:b")\nif True:\n    app = None': "unknown",
    "None\nfrom ldpfl.flower.apps import client_app as app": "ready",
    "None\nfrom ldpfl.flower.apps import server_app as app": "unknown",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_policy_is_written_only_for_an_app_that_gives_what_its_server_asks_for(call: str, tmp_path: Path) -> None:
    given, app = CALLS[call], folder_of(tmp_path / "app", call)
    assert client_output(app) == given
    for name, asked in (("dp-sgd", "gradients"), ("duchi", "weights")):
        own = tmp_path / f"{name}.toml"
        own.write_text(f'[mechanism]\nname = "{name}"\n' + ("records = 40\n" if name == "dp-sgd" else ""), encoding="utf-8")
        if given in ("unknown", "ready") or given.startswith(asked):
            policy = fitting_policy(offer := offer_of(str(app), own), ranges_for(offer, (12, 3)))
            assert offer.own_model == (given != "ready")
            assert policy.protects == ("record" if name == "dp-sgd" else "client")
        else:
            with pytest.raises(ConfigError, match="each node would decline"):
                offer_of(str(app), own)


def test_no_policy_is_written_for_gradients_of_an_own_app_that_ldpfls_server_would_call_proved(tmp_path: Path) -> None:
    app = folder_of(tmp_path / "app", 'LdpClientApp(records="mine.training:records")')
    changes = 'mechanism.name="dp-sgd"; mechanism.perturbed="gradient"; mechanism.records=40'
    settings = f"serverapp = 'mine.server:server_app'\n[tool.flwr.app.config.ldpfl]\nset = '{changes}'\n"
    project = (app / "pyproject.toml").read_text(encoding="utf-8")
    (app / "pyproject.toml").write_text(project + settings, encoding="utf-8")
    assert offer_of(str(app)).own_model
    (app / "mine" / "server.py").write_text("from ldpfl.flower.apps import server_app\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="should write a ServerApp with LdpStrategy"):
        offer_of(str(app))


@pytest.mark.slow
@pytest.mark.xdist_group("imports-of-apps")
def test_a_wrapper_of_records_is_as_quiet_as_one_of_an_app(tmp_path: Path) -> None:
    for name, more in (("quiet", ""), ("of persons", ", persons=True")):
        assert list(unwrapped_code(folder_of(tmp_path / name, f'LdpClientApp(records="mine.training:records"{more})'))) == []
    assert list(unwrapped_code(folder_of(tmp_path / "loud", 'LdpClientApp(records="a:b", persons=made())'))) == ["mine/client_app.py:3"]
    for place, call in enumerate(("LdpClientApp(records=load())", 'LdpClientApp(records="a:b", node=made())', 'LdpClientApp(node="a:b")')):
        assert list(unwrapped_code(folder_of(tmp_path / str(place), call))) == ["mine/client_app.py:3"]


def test_a_layer_under_several_names_is_accepted() -> None:
    same = nn.Linear(4, 4)
    task_of(model=nn.Sequential(same, nn.Tanh(), same, nn.Linear(4, 3))).check()


def test_the_rows_of_one_person_may_be_mixed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken together anyway, and bounded together."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    replace(task_of(model=Centered(4, 3)), persons=[0, 0, 1, 1, 2, 2]).check()
    assert "it mixes the samples of a batch. In training these are the rows of one person" in caplog.text
