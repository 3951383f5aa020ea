"""What is sent comes from gradients alone: a model that writes to anything while it runs is refused by name, in the trial and later on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, partial, partialmethod, singledispatchmethod, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldpfl import ConfigError, PrivacyError, api, tasks
from ldpfl.api.results import RunResult
from ldpfl.data import Samples
from ldpfl.data.samples import Division
from ldpfl.experiments import trainers
from ldpfl.experiments.build import build
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import CallerObjects, load_dataset
from ldpfl.mechanisms.dp_sgd import require_dp_sgd
from ldpfl.server import Checkpoint
from ldpfl.simulation import (
    Federation,
    GradientTrainer,
    LocalTask,
    LoopTrainer,
    RecordGradientTrainer,
    VectorizedTrainer,
    local_training,
    simulate,
    train_clients,
)
from ldpfl.simulation.compiled_training import CompiledTrainer
from ldpfl.simulation.compiling import has_compiler
from ldpfl.simulation.evaluating_records import RecordScores
from ldpfl.simulation.local_steps import full_batch
from ldpfl.simulation.record_sums import client_sums
from ldpfl.tasks import Task

Pass = Callable[["Net", Tensor], Tensor]

ROWS = (torch.randn(48, 3, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 2)
TOKENS = (torch.arange(240).reshape(48, 5) % 12, torch.arange(48) % 2)

UPDATES: dict[str, Any] = {"mechanism.name": "duchi", "mechanism.perturbed": "update"}
GRADIENTS: dict[str, Any] = {"mechanism.name": "duchi", "mechanism.perturbed": "gradient"}
RECORDS: dict[str, Any] = {"mechanism.name": "dp-sgd", "mechanism.perturbed": "gradient", "mechanism.clip_norm": 1.0}
KINDS = pytest.mark.parametrize("kind", [UPDATES, GRADIENTS, RECORDS], ids=["updates", "gradients", "records"])


def remembering() -> Callable[[object], None]:
    passes: list[object] = []
    return lambda found: passes.append(found)


class Cache:
    """Leaves out of its pickled form what it keeps, as many classes do."""

    __slots__ = ("kept", "state")

    def __init__(self) -> None:
        self.kept, self.state = 0, {"passes": 0}

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


class Emptied(dict[str, int]):
    """Leaves its elements out of its pickled form."""

    def __reduce__(self) -> tuple[type[Emptied], tuple[()]]:
        return Emptied, ()


class Unit(Enum):
    MEMBER = 1


class Net(nn.Module):
    """A linear layer, and what else a pass is to do: from the first call on, or once ``late`` is set."""

    late: ClassVar[bool] = True
    shift: Tensor

    def __init__(self, also: Pass) -> None:
        super().__init__()
        self.layer, self.also = nn.Linear(3, 2), also
        self.center = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("shift", torch.zeros(3), persistent=False)
        self.kept: dict[str, Any] = {"function": lambda: None, "passes": []}  # neither of both can be pickled
        self.remember = remembering()
        self.pool, self.chosen, self.emptied = [nn.Identity(), nn.Identity()], nn.Identity(), Emptied()
        self.beside = {"passes": 0, "function": lru_cache(lambda: None)}
        self.cache, self.unit, self.table = Cache(), Unit.MEMBER, torch.zeros(3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.also(self, rows) if Net.late else torch.as_tensor(self.layer(rows))


def no_grad(net: Net, rows: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.add_(0.1 * rows.mean())
    return torch.as_tensor(net.layer(rows))


def no_grad_afterwards(net: Net, rows: Tensor) -> Tensor:
    outputs = net.layer(rows)
    no_grad(net, rows)
    return torch.as_tensor(outputs)


def data(net: Net, rows: Tensor) -> Tensor:
    net.layer.weight.data.add_(0.1 * rows.detach().mean())
    return torch.as_tensor(net.layer(rows))


def other_data(net: Net, rows: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data + rows.detach().mean()
    return torch.as_tensor(net.layer(rows))


def detached(net: Net, rows: Tensor) -> Tensor:
    net.layer.weight.detach().add_(0.1 * rows.detach().mean())
    return torch.as_tensor(net.layer(rows))


def numpy(net: Net, rows: Tensor) -> Tensor:
    net.layer.weight.detach().numpy()[0, 0] += 0.1
    return torch.as_tensor(net.layer(rows))


def frozen(net: Net, rows: Tensor) -> Tensor:
    with torch.no_grad():
        net.center.mul_(0.9).add_(0.1 * rows.mean(dim=0))
    return torch.as_tensor(net.layer(rows - net.center))


def buffer(net: Net, rows: Tensor) -> Tensor:
    net.shift += rows.detach().mean(dim=0)
    return torch.as_tensor(net.layer(rows + net.shift))


def attribute(net: Net, rows: Tensor) -> Tensor:
    net.last = rows
    return torch.as_tensor(net.layer(rows))


def in_a_list_beside_a_function(net: Net, rows: Tensor) -> Tensor:
    net.kept["passes"].append(len(rows))
    return torch.as_tensor(net.layer(rows))


def in_a_closure(net: Net, rows: Tensor) -> Tensor:
    net.remember(len(rows))
    return torch.as_tensor(net.layer(rows))


def in_a_slot_that_is_not_pickled(net: Net, rows: Tensor) -> Tensor:
    net.cache.kept += len(rows)
    return torch.as_tensor(net.layer(rows))


def in_a_dict_that_is_not_pickled(net: Net, rows: Tensor) -> Tensor:
    net.cache.state["passes"] += len(rows)
    return torch.as_tensor(net.layer(rows))


def in_elements_that_are_not_pickled(net: Net, rows: Tensor) -> Tensor:
    net.emptied["passes"] = net.emptied.get("passes", 0) + len(rows)
    return torch.as_tensor(net.layer(rows))


def in_a_dict_beside_a_function_with_a_cache(net: Net, rows: Tensor) -> Tensor:
    net.beside["passes"] += len(rows)  # type: ignore[operator]
    return torch.as_tensor(net.layer(rows))


def in_the_choice_of_a_layer(net: Net, rows: Tensor) -> Tensor:
    net.chosen = net.pool[len(rows) % 2]
    return torch.as_tensor(net.layer(rows))


def in_a_member_of_an_enum(net: Net, rows: Tensor) -> Tensor:
    vars(net.unit).setdefault("seen", []).append(len(rows))
    return torch.as_tensor(net.layer(rows))


def in_an_attribute_of_a_tensor(net: Net, rows: Tensor) -> Tensor:
    vars(net.table).setdefault("seen", []).append(len(rows))
    return torch.as_tensor(net.layer(rows))


def in_an_attribute_of_a_frozen_parameter(net: Net, rows: Tensor) -> Tensor:
    vars(net.center).setdefault("seen", []).append(len(rows))
    return torch.as_tensor(net.layer(rows))


def evaluation_only(net: Net, rows: Tensor) -> Tensor:
    return torch.as_tensor(net.layer(rows)) if torch.is_grad_enabled() else no_grad(net, rows)


WRITES: dict[Pass, str] = {
    **dict.fromkeys((no_grad, no_grad_afterwards, data, other_data, detached, numpy, evaluation_only), "layer.weight"),
    frozen: "center",
    buffer: "shift",
    attribute: "last",
    in_a_list_beside_a_function: "kept",
    in_a_slot_that_is_not_pickled: "cache",
    in_a_dict_that_is_not_pickled: "cache",
    in_elements_that_are_not_pickled: "emptied",
    in_a_dict_beside_a_function_with_a_cache: "beside",
    in_the_choice_of_a_layer: "its layers",
    in_a_member_of_an_enum: "unit, Unit.MEMBER",
    in_an_attribute_of_a_tensor: "table",
    in_an_attribute_of_a_frozen_parameter: "center",
    in_a_closure: "remember, a default argument, an attribute or an enclosing variable of .*",
}


def settings(kind: dict[str, Any]) -> dict[str, Any]:
    return {"clients.count": 4, "training.rounds": 1, "privacy.target_epsilon": "off", "model.mend": False, **kind}


def run(model: nn.Module, kind: dict[str, Any] = UPDATES, others: Mapping[str, Any] = MappingProxyType({})) -> RunResult:
    return api.run(data=ROWS, model=model, settings={**settings(kind), **others}, baseline=False, progress=False, seed=1)


def built(model: nn.Module, kind: dict[str, Any], samples: Any = ROWS) -> tuple[Federation, Checkpoint]:
    named = {"data.name": "given", "model.name": "given", **settings(kind)}
    config: RunConfig = api.configure("own", settings=named)
    return build(config, load_dataset(config, None, caller_objects=CallerObjects(samples, model)), torch.device("cpu"), model, secret=1)


@pytest.mark.thorough_except(
    "updates-buffer",
    "gradients-numpy",
    "records-in_a_closure",
    "gradients-attribute",
    "updates-in_a_slot_that_is_not_pickled",
    "records-in_an_attribute_of_a_tensor",
)
@pytest.mark.parametrize("also", WRITES, ids=lambda also: also.__name__)
@KINDS
def test_a_pass_that_writes_is_refused_by_name_before_the_first_round(also: Pass, kind: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=rf"Net changed {WRITES[also]} while it ran"):
        built(Net(also), kind)


@pytest.mark.thorough_except(
    "updates-at once-numpy", "gradients-one by one-buffer", "records-one by one-attribute", "records-at once-in_a_closure"
)
@pytest.mark.parametrize("also", [also for also in WRITES if also is not evaluation_only], ids=lambda also: also.__name__)
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
@KINDS
def test_one_that_writes_later_is_refused_in_training(
    also: Pass, apart: bool, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "late", False)
    federation, start = built(Net(also), kind)
    trainer: Any = federation.trainer
    if apart:
        trainer = LoopTrainer(federation.task) if isinstance(trainer, VectorizedTrainer) else type(trainer)(*_but_one(trainer), False)
    object.__setattr__(federation, "trainer", trainer)
    train_clients(federation, start.state, np.arange(4))
    monkeypatch.setattr(Net, "late", True)
    before = start.state.weights.clone()
    with pytest.raises(PrivacyError, match=f"Net changed {WRITES[also]} while it ran"):
        train_clients(federation, start.state, np.arange(4))
    assert torch.equal(start.state.weights, before)


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("also", [buffer, frozen, no_grad], ids=lambda also: also.__name__)
@pytest.mark.thorough_for("no_grad", "frozen")
def test_one_that_writes_later_is_refused_by_name_where_a_step_is_compiled(also: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "late", False)
    federation, start = built(Net(also), {**UPDATES, "training.batch_size": 100})
    compiled = replace(federation, trainer=CompiledTrainer(federation.task, 12))
    monkeypatch.setattr(Net, "late", True)
    with pytest.raises(PrivacyError, match=f"Net changed {WRITES[also]} while it ran"):
        train_clients(compiled, start.state, np.arange(4))


@torch.library.custom_op("ldpfl_tests::pulled_together", mutates_args=())
def pulled_together(rows: Tensor) -> Tensor:
    return rows.clone()


pulled_together.register_fake(torch.empty_like)
pulled_together.register_autograd(lambda context, gradient: gradient, setup_context=lambda ctx, inputs, output: None)


@pulled_together.register_vmap
def of_many(info: Any, dims: tuple[int], rows: Tensor) -> tuple[Tensor, int]:
    rows = rows.movedim(dims[0], 0)
    return pulled_together(rows + (rows.mean(0, keepdim=True) - rows) * 0.9), 0


def hooked_rows(rows: Tensor) -> Tensor:
    rows = rows * 1.0
    rows.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    return rows


def operator(rows: Tensor) -> Tensor:
    result: Tensor = pulled_together(rows)
    return result


def opaque(rows: Tensor) -> Tensor:
    return operator(rows)


class OnlyCompiled(nn.Module):
    """A model that calls ``function`` in compiled code alone."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            rows = self.function(rows)
        outputs: Tensor = self.layer(rows)
        return outputs


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", [UPDATES, RECORDS], ids=["updates", "records"])
@pytest.mark.parametrize(
    ("function", "said"), [(operator, "ldpfl_tests.pulled_together"), (hooked_rows, "register_hook"), (opaque, "opaque")]
)
def test_what_only_compiled_code_calls_mixes_no_samples(
    function: Callable[[Tensor], Tensor], said: str, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if function is opaque:
        torch.compiler.allow_in_graph(opaque)  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=rf"cannot be compiled: its compiled step calls {re.escape(said)}\S*, which could mix samples"):
        built(OnlyCompiled(function), kind | {"training.compile": "on"})
    monkeypatch.setattr(trainers, "is_worth_compiling", lambda calls, work: True)
    federation, _ = built(OnlyCompiled(function), kind)
    assert not trainers.is_compiled(federation.trainer)


class Switch(nn.Module):
    """Gives other gradients from one record on, which is larger than any of a trial, until another one undoes it: then all is as it was.

    Attributes:
        on: what the first record changes, or the order of a frozen parameter.
    """

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.layer, self.on, self.frozen = nn.Linear(3, 2), False, frozen
        self.table = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        first = float(rows[0, 0])
        if abs(first) > 1e5 and self.frozen:
            self.table.data.copy_(self.table.flip(0))
        elif abs(first) > 1e5:
            self.on = first > 0
        return torch.as_tensor(self.layer(rows * (1 - 2 * self.on) + self.table))


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [False, True], ids=["attribute", "frozen parameter"])
def test_a_record_that_changes_the_model_changes_no_other_record_even_if_a_third_one_undoes_it(frozen: bool) -> None:
    federation, start = built(Switch(frozen=frozen), RECORDS)
    assert isinstance(federation.trainer, RecordGradientTrainer)
    trainer = replace(federation.trainer, at_once=False)

    def summed(first: float, trainer: RecordGradientTrainer) -> Tensor:
        inputs = ROWS[0].clone()
        inputs[0, 0], inputs[40, 0] = first, -1e6
        task = replace(trainer.task, data=Samples(inputs, ROWS[1]))
        return replace(trainer, task=task).train(start.state.weights, full_batch([np.arange(41)], 41)).double()

    with pytest.raises(PrivacyError, match=r"Switch changed (on|table) while it ran"):
        summed(1e6, trainer)
    node = replace(trainer, confined=True)
    assert float((summed(1e6, node) - summed(0.5, node)).norm()) <= 2 * trainer.clip.steps  # the two data sets differ in one record


@pytest.mark.thorough_except("node")
@pytest.mark.parametrize("undone", [False, True], ids=["node", "node, undone by a later record"])
def test_a_record_that_changes_the_model_changes_no_other_score(undone: bool) -> None:
    settings = RECORDS | {"evaluation.share": 0.5, "evaluation.epsilon": 0.5, "clients.count": 1}
    federation, start = built(Switch(frozen=False), settings)
    judged = federation.judged
    assert judged is not None
    mechanism, units = require_dp_sgd(judged.mechanism), judged.units

    def summed(first: float) -> Tensor:
        inputs = federation.task.data.tensor.clone()
        inputs[units[0][0], 0] = first
        inputs[units[0][-1], 0] = -1e6 if undone else 0.5
        task = replace(federation.task, data=Samples(inputs, federation.task.data.targets), module=Switch(frozen=False))
        return client_sums(judged.vectors, task, start.state.weights, units, mechanism.steps, confined=True).double()

    assert float((summed(1e6) - summed(0.5)).norm()) <= 2 * mechanism.steps  # the two data sets differ in one record


def test_a_client_that_changes_the_model_changes_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    federation, start = built(Switch(frozen=False), UPDATES)
    assert isinstance(federation.trainer, LoopTrainer)
    monkeypatch.setattr(local_training, "refuse_state_changes", lambda *_: nullcontext())

    def trained(first: float) -> Tensor:
        inputs = federation.task.data.tensor.clone()
        inputs[federation.samples[0], 0] = first
        task = replace(federation.task, data=Samples(inputs, federation.task.data.targets))
        return train_clients(replace(federation, trainer=LoopTrainer(task)), start.state, np.arange(4))

    assert torch.equal(trained(1e6)[1:], trained(0.5)[1:])


class KeptByItsClass(nn.Module):
    seen: ClassVar[dict[str, float]] = {"largest": 0.0}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        self.seen["largest"] += 1.0
        return torch.as_tensor(self.layer(rows))


def test_what_a_class_keeps_is_found() -> None:
    with pytest.raises(PrivacyError, match=r"KeptByItsClass changed KeptByItsClass\.seen while it ran"):
        built(KeptByItsClass(), RECORDS)


LARGE = 1e5
"""No sample of a trial is as large."""


class Seen:
    """A helper that remembers whether a large number came by."""

    all: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        self.large = False

    def __call__(self, rows: Tensor) -> bool:
        self.large = self.large or bool(rows.abs().max() > LARGE)
        return self.large


def noted(rows: Tensor, so_far: Any) -> bool:
    """Return whether a large number is among ``rows`` or was found before; ``so_far`` keeps that."""
    if bool(rows.abs().max() > LARGE):
        so_far.append(True)
    return bool(so_far)


class Linear3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def turned(self, rows: Tensor, seen: bool) -> Tensor:
        """Return other outputs for all samples once a large number was ``seen``."""
        return torch.as_tensor(self.layer(rows * (1 - 2 * seen)))


def kept_in_a_default_argument() -> nn.Module:
    class Own(Linear3):
        def forward(self, rows: Tensor, so_far: list[bool] = []) -> Tensor:  # noqa: B006
            return self.turned(rows, noted(rows, so_far))

    return Own()


def kept_in_a_helper_of_the_class() -> nn.Module:
    class Own(Linear3):
        seen = Seen()

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


def kept_in_an_array_of_the_class() -> nn.Module:
    class Own(Linear3):
        largest = np.zeros(1)

        def forward(self, rows: Tensor) -> Tensor:
            self.largest[0] = max(self.largest[0], float(rows.abs().max() > LARGE))
            return self.turned(rows, bool(self.largest[0]))

    return Own()


def kept_in_a_queue_of_the_class() -> nn.Module:
    class Own(Linear3):
        so_far: ClassVar[deque[bool]] = deque(maxlen=4)

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, noted(rows, self.so_far))

    return Own()


def kept_by_the_class_of_a_helper() -> nn.Module:
    class Helper(Seen):
        all: ClassVar[list[bool]] = []

    class Own(Linear3):
        def __init__(self) -> None:
            super().__init__()
            self.helpers = [Helper()]

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, noted(rows, self.helpers[0].all))

    return Own()


def kept_by_an_attribute_that_the_class_gets() -> nn.Module:
    class Own(Linear3):
        def forward(self, rows: Tensor) -> Tensor:
            if bool(rows.abs().max() > LARGE):
                type(self).large = True  # type: ignore[attr-defined]
            return self.turned(rows, getattr(self, "large", False))

    return Own()


def kept_by_a_static_method() -> nn.Module:
    class Own(Linear3):
        @staticmethod
        def seen(rows: Tensor, so_far: list[bool] = []) -> bool:  # noqa: B006
            return noted(rows, so_far)

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


def kept_by_a_hook() -> nn.Module:
    so_far: list[bool] = []
    module = nn.Linear(3, 2)
    module.register_forward_pre_hook(lambda _, rows: (rows[0] * (1 - 2 * noted(rows[0], so_far)),))
    return module


def kept_by_a_partial_function() -> nn.Module:
    class Own(Linear3):
        def __init__(self) -> None:
            super().__init__()
            so_far: list[bool] = []
            self.seen = partial(lambda rows: noted(rows, so_far))

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


class Flag(Enum):
    MEMBER = 1


def kept_by_a_member_of_an_enum() -> nn.Module:
    class Own(Linear3):
        flag = Flag.MEMBER

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, noted(rows, vars(self.flag).setdefault("seen", [])))

    return Own()


def kept_by_the_class_in_an_object_that_is_not_pickled() -> nn.Module:
    class Own(Linear3):
        cache = Cache()

        def forward(self, rows: Tensor) -> Tensor:
            self.cache.kept = max(self.cache.kept, int(rows.abs().max() > LARGE))
            return self.turned(rows, bool(self.cache.kept))

    return Own()


def kept_by_a_wrapper_of_a_library_s_function() -> nn.Module:
    so_far: list[bool] = []

    @wraps(torch.clone)
    def wrapper(rows: Tensor) -> bool:
        return noted(rows, so_far)

    class Own(Linear3):
        seen = staticmethod(wrapper)

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


def kept_by_a_function_in_a_namespace() -> nn.Module:
    class Own(Linear3):
        def __init__(self) -> None:
            super().__init__()
            so_far: list[bool] = []
            self.helpers = SimpleNamespace(seen=lambda rows: noted(rows, so_far))

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.helpers.seen(rows))

    return Own()


class Wrapper:
    """A decorator that is an object, and keeps what it has seen."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.so_far = function, list[bool]()

    def __call__(self, *arguments: Any) -> bool:
        return noted(arguments[-1], self.so_far)


def kept_by_an_object_around_a_static_method() -> nn.Module:
    class Own(Linear3):
        @staticmethod
        @Wrapper
        def seen(rows: Tensor) -> bool:
            raise NotImplementedError

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


def kept_by_an_object_around_a_property() -> nn.Module:
    class Memo(Wrapper):
        def __call__(self, *_: Any) -> Any:
            return self.so_far

    class Own(Linear3):
        @property
        @Memo
        def so_far(self) -> list[bool]:
            raise NotImplementedError

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, noted(rows, self.so_far))

    return Own()


def kept_in_an_argument_of_a_partial_method() -> nn.Module:
    def passed(self: Any, so_far: list[bool], rows: Tensor) -> Tensor:
        return torch.as_tensor(self.turned(rows, noted(rows, so_far)))

    class Own(Linear3):
        forward = partialmethod(passed, [])

    return Own()


def kept_by_one_of_several_functions_by_type() -> nn.Module:
    class Own(Linear3):
        @singledispatchmethod
        def seen(self, rows: object) -> bool:
            return False

        @seen.register
        def _(self, rows: torch.Tensor, so_far: list = []) -> bool:  # type: ignore[type-arg]  # noqa: B006
            return noted(rows, so_far)

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen(rows))

    return Own()


def kept_by_a_function_within(holder: Callable[[Callable[[Tensor], bool]], Any], used: Callable[[Any], Callable[[Tensor], bool]]) -> Any:
    """Return what makes a model with the attribute ``holder(function)``, of which ``used`` gets the function again."""

    def make() -> nn.Module:
        def seen(rows: Tensor, so_far: list[bool] = []) -> bool:  # noqa: B006
            return noted(rows, so_far)

        class Own(Linear3):
            def __init__(self) -> None:
                super().__init__()
                self.holder = holder(seen)

            def forward(self, rows: Tensor) -> Tensor:
                return self.turned(rows, used(self.holder)(rows))

        return Own()

    make.__name__ = f"kept by a function within {holder.__name__}"
    return make


@dataclass(slots=True)
class Slots:
    function: Callable[[Tensor], bool]


class Functions(list[Any]):
    function: Callable[[Tensor], bool]


def list_with_an_attribute(function: Callable[[Tensor], bool]) -> Functions:
    made = Functions()
    made.function = function
    return made


def user_dict(function: Callable[[Tensor], bool]) -> UserDict[str, Callable[[Tensor], bool]]:
    return UserDict({"function": function})


def default_of_a_dict(function: Callable[[Tensor], bool]) -> defaultdict[str, Any]:
    return defaultdict(lambda: function)


def kept_in_the_annotations_of_a_function() -> nn.Module:
    def seen(rows: Tensor) -> bool:
        return noted(rows, seen.__annotations__.setdefault("so far", []))

    class Own(Linear3):
        seen_before = staticmethod(seen)

        def forward(self, rows: Tensor) -> Tensor:
            return self.turned(rows, self.seen_before(rows))

    return Own()


OUTSIDE = [
    kept_by_an_object_around_a_static_method,
    kept_by_an_object_around_a_property,
    kept_in_an_argument_of_a_partial_method,
    kept_by_one_of_several_functions_by_type,
    kept_in_the_annotations_of_a_function,
    *(kept_by_a_function_within(holder, lambda held: held.function) for holder in (Slots, list_with_an_attribute)),
    kept_by_a_function_within(user_dict, lambda held: held["function"]),
    kept_by_a_function_within(default_of_a_dict, lambda held: held.default_factory()),
    kept_in_a_default_argument,
    kept_in_a_helper_of_the_class,
    kept_in_an_array_of_the_class,
    kept_in_a_queue_of_the_class,
    kept_by_the_class_of_a_helper,
    kept_by_an_attribute_that_the_class_gets,
    kept_by_a_static_method,
    kept_by_a_hook,
    kept_by_a_member_of_an_enum,
    kept_by_a_wrapper_of_a_library_s_function,
    kept_by_a_function_in_a_namespace,
    kept_by_the_class_in_an_object_that_is_not_pickled,
    kept_by_a_partial_function,
]


@pytest.mark.thorough_except("kept_by_a_hook", "kept by a function within Slots")
@pytest.mark.parametrize("make", OUTSIDE, ids=lambda make: make.__name__)
def test_what_code_keeps_of_a_record_outside_of_copies_changes_no_other_record(make: Callable[[], nn.Module]) -> None:
    settings = RECORDS | {"evaluation.share": 0.5, "evaluation.epsilon": 0.5, "clients.count": 1}
    federation, start = built(make(), settings)
    judged = federation.judged
    assert judged is not None
    assert isinstance(federation.trainer, RecordGradientTrainer)
    trainer, weights = replace(federation.trainer, at_once=False), start.state.weights

    def with_first(first: float, place: int) -> LocalTask:
        inputs = federation.task.data.tensor.clone()
        inputs[place, 0] = first
        return replace(trainer.task, data=Samples(inputs, federation.task.data.targets))

    def trained(first: float, confined: bool) -> Tensor:
        own = replace(trainer, task=with_first(first, 0), confined=confined)
        return own.train(weights, full_batch([np.arange(20)], 20)).double()

    def scored(first: float, confined: bool) -> Tensor:
        task, steps = with_first(first, judged.units[0][0]), require_dp_sgd(judged.mechanism).steps
        return client_sums(judged.vectors, task, weights, judged.units, steps, confined=confined).double()

    for sums_of, steps in ((trained, trainer.clip.steps), (scored, require_dp_sgd(judged.mechanism).steps)):
        with pytest.raises(PrivacyError, match=r"changed .* while it ran"):
            sums_of(1e6, False)
        assert float((sums_of(1e6, True) - sums_of(0.5, True)).norm()) <= 2 * steps  # the two data sets differ in one record


def test_a_loss_that_keeps_a_held_back_record_changes_no_other_score() -> None:
    so_far: list[bool] = []

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") * (100.0 if noted(outputs, so_far) else 1.0)

    task = replace(built(nn.Linear(3, 2), RECORDS)[0].task, task=replace(tasks.create("classification", 2), name="own", losses=losses))
    weights, scores, units = torch.ones(task.layout.dimension), RecordScores("class", 2, 2.0), Division.of([np.arange(20)])

    def scored(first: float, confined: bool) -> Tensor:
        inputs = task.data.tensor.clone()
        inputs[0, 0] = first
        own = replace(task, data=Samples(inputs, task.data.targets))
        return client_sums(scores, own, weights, units, 2**10, confined=confined).double()

    with pytest.raises(PrivacyError, match=r"an enclosing variable of .*losses while it ran"):
        scored(1e7, False)
    assert float((scored(1e7, True) - scored(0.5, True)).norm()) <= 2 * 2**10


class RunningScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets, reduction="none")


def counted(outputs: int) -> Task:
    """Return a task whose loss counts its calls."""
    return replace(tasks.create("classification", outputs), name="counted", losses=RunningScale())


@KINDS
def test_a_loss_that_keeps_something_is_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=r"changed losses(\.calls)? while it ran"):
        built(nn.Linear(3, 2), kind | {"task.name": f"{__name__}:counted"})


def _but_one(trainer: Any) -> list[Any]:
    return [trainer.task] if isinstance(trainer, GradientTrainer) else [trainer.task, trainer.clip]


@pytest.mark.parametrize("also", WRITES, ids=lambda also: also.__name__)
def test_one_that_writes_in_evaluation_changes_no_model(also: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would send a model that its public test rows have changed."""
    monkeypatch.setattr(Net, "late", False)
    federation, start = built(Net(also), UPDATES)
    before = start.state.weights.clone()
    federation.score(start.state.weights)
    monkeypatch.setattr(Net, "late", True)
    with pytest.raises(PrivacyError, match=f"Net changed {WRITES[also]} while it ran"):
        federation.score(start.state.weights)
    assert torch.equal(start.state.weights, before)


class Tokens(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.embedding(tokens)
        return torch.as_tensor(self.head(found.mean(dim=-2) if found.dim() > 2 else found))


class Renormed(nn.Module):
    """An embedding whose max_norm nobody can see before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, max_norm=0.1)


@pytest.mark.parametrize(
    ("embedding", "said"),
    [
        (nn.Embedding(12, 4, max_norm=0.1), "embedding.weight is changed by max_norm while the model runs"),
        (nn.EmbeddingBag(12, 4, max_norm=0.1), "embedding.weight is changed by max_norm while the model runs"),
        (Renormed(), "Tokens changed embedding.weight while it ran"),
        (nn.Embedding(12, 4, sparse=True), "embedding.weight has sparse gradients"),
        (nn.EmbeddingBag(12, 4, sparse=True), "embedding.weight has sparse gradients"),
    ],
    ids=["embedding", "bag", "function", "sparse", "sparse bag"],
)
@KINDS
def test_rows_of_embeddings_are_changed_by_gradients_alone(embedding: nn.Module, said: str, kind: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=said):
        built(Tokens(embedding), kind, TOKENS)


class Once(nn.Module):
    """Keeps the mean of the first rows that it is shown, as layers do that set themselves up by data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.mean = rows.detach().mean(dim=0)
        return torch.as_tensor(self.layer(rows - self.mean))


def test_a_model_that_writes_once_is_refused_on_a_table_too() -> None:
    """Where training begins there is found out by made-up rows, before the trial."""
    frame = pd.DataFrame({"age": range(60), "weight": range(60, 0, -1), "sick": ["no", "yes"] * 30})
    settings = {"training.rounds": 1, "data.bounds": {"age": [0, 60], "weight": [0, 60]}}
    with pytest.raises(PrivacyError, match="Once changed mean while it ran"):
        api.run(data=frame, target="sick", count=3, model=Once(), settings=settings, baseline=False, progress=False)


def test_a_model_with_one_output_for_two_classes_is_told_what_it_needs() -> None:
    """Its gradient is 0, and so would be the norm that records are clipped to."""
    frame = pd.DataFrame({"age": range(60), "weight": range(60, 0, -1), "sick": ["no", "yes"] * 30})
    settings = {"training.rounds": 1, "data.bounds": {"age": [0, 60], "weight": [0, 60]}}
    with pytest.raises(ConfigError, match="give the last layer 2 outputs"):
        api.run(data=frame, target="sick", count=3, model=nn.Linear(2, 1), settings=settings, baseline=False, progress=False)


@pytest.mark.parametrize("embedding", [nn.Embedding(12, 4, max_norm=0.1), nn.EmbeddingBag(12, 4, sparse=True)], ids=["embedding", "bag"])
def test_check_finds_the_same_and_how_to_mend_it(embedding: nn.Module) -> None:
    found = api.check(data=TOKENS, model=Tokens(embedding), settings=settings(UPDATES))
    assert "embedding.weight" in found.problem
    assert [change.place for change in found.changes] == ["embedding"]
    assert found.remaining_problem == ""
    assert "changed layer.weight" in api.check(data=ROWS, model=Net(no_grad), settings=settings(UPDATES)).problem


def carried_over(net: Net, rows: Tensor) -> Tensor:
    outputs = net.layer(rows)
    if outputs.requires_grad:
        outputs.register_hook(lambda gradient: gradient / gradient.norm())
    return torch.as_tensor(outputs)


@pytest.mark.thorough_for("records")
@KINDS
def test_a_hook_on_gradients_is_shown_one_client_at_a_time(kind: dict[str, Any]) -> None:
    """Of many clients at once it would divide by a length to which all of them add."""
    federation, start = built(Net(carried_over), kind)
    alone = [train_clients(federation, start.state, np.array([client])) for client in range(4)]
    assert torch.equal(train_clients(federation, start.state, np.arange(4)), torch.cat(alone))
    assert isinstance(federation.trainer, LoopTrainer) or not federation.trainer.at_once  # type: ignore[attr-defined]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 3), nn.Linear(3, 3)
        self.out.weight = self.into.weight
        self.head = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.out(self.into(rows).tanh())))


def normed() -> nn.Module:
    module: nn.Module = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    return module


def hooked() -> nn.Module:
    module = nn.Linear(3, 2)
    module.register_forward_hook(lambda part, inputs, outputs: outputs * 2)
    return module


@pytest.mark.parametrize("make", [Tied, normed, hooked], ids=["tied weights", "weight norm", "forward hook"])
def test_these_train_as_pytorch_trains_them(make: Callable[[], nn.Module]) -> None:
    federation, start = built(make(), UPDATES)
    task, plain = federation.task, federation.task.module
    for own in federation.samples:
        inputs, targets = task.batch(torch.from_numpy(own))
        plain.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()  # type: ignore[no-untyped-call]
        gradient = task.layout.flatten({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
        plain.zero_grad()
        found = GradientTrainer(task).train(start.state.weights, full_batch([own], own.size))[0]
        torch.testing.assert_close(found, -gradient, atol=1e-6, rtol=1e-4)


@KINDS
def test_tensors_of_a_model_may_have_attributes(kind: dict[str, Any]) -> None:
    """Those of ``transformers`` have some, which say that they are initialised."""
    net = Net(lambda net, rows: torch.as_tensor(net.layer(rows)))
    for tensor in (net.shift, net.center, net.table, net.layer.weight):
        vars(tensor)["note"] = {"of": "somebody"}
    run(net, kind)


@KINDS
def test_a_model_may_read_a_table_that_it_keeps(kind: dict[str, Any]) -> None:
    """pandas fills caches when a table is read, and leaves them out of the pickled form of the table."""
    frame = pd.DataFrame({"shift": [0.5, 1.5, 2.5], "name": pd.Categorical(["x", "y", "z"])})

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.frame = nn.Linear(3, 2), frame

        def forward(self, rows: Tensor) -> Tensor:
            shift = float(self.frame["shift"].mean()) + len(self.frame["name"].cat.categories)
            return torch.as_tensor(self.layer(rows + shift))

    run(Reading(), kind)


class ByAttribute(dict[str, Any]):
    """A dict whose items are attributes, as many libraries for configs have it: other names raise a KeyError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class Shy:
    """An object that shows no attributes, such as a placeholder for something that is not made yet."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise TypeError("not made yet")
        return super().__getattribute__(name)


@pytest.mark.parametrize("config", [ByAttribute(width=3, inner=ByAttribute(depth=2)), Shy()], ids=["attributes of a dict", "placeholder"])
def test_a_model_may_hold_objects_with_odd_attributes(config: object) -> None:
    class Own(Linear3):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, rows: Tensor) -> Tensor:
            return torch.as_tensor(self.layer(rows))

    assert len(run(Own()).to_dict()["score_per_round"]) == 1


def test_a_model_that_changes_nothing_goes_through_all_rounds() -> None:
    federation, start = built(nn.Linear(3, 2), UPDATES)
    assert [checkpoint.state.round for checkpoint in simulate(federation, start, 1)] == [1]


def squeezed(net: Net, rows: Tensor) -> Tensor:
    return torch.as_tensor(net.layer(rows).squeeze())


def squeezed_before(net: Net, rows: Tensor) -> Tensor:
    return torch.as_tensor(net.layer(rows.squeeze()).softmax(dim=1))


@pytest.mark.parametrize(
    ("also", "said"),
    [(squeezed, r"gives \(2,\) for one sample, expected \(1, 2\)"), (squeezed_before, "where a batch may be of one sample")],
)
def test_a_batch_of_one_sample_is_tried_before_the_first_round(also: Pass, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        built(Net(also), UPDATES)


def test_a_gradient_has_no_use_for_the_clients_schedule() -> None:
    with pytest.raises(ConfigError, match=r"training\.momentum.*schedule"):
        run(nn.Linear(3, 2), RECORDS, {"training.schedule": "linear"})


class Twice(nn.Module):
    """A layer that is registered under two names, an activation that stands twice, and a weight that two layers have in common."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        same, bend = nn.Linear(3, 3), nn.Tanh()
        self.first = nn.Sequential(same, bend, same, bend)
        self.second, self.third, self.last = self.first, nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.third.weight = same.weight

    def forward(self, rows: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.third(self.second(rows) + self.first(rows))))


def test_a_layer_under_several_names_is_trained_as_pytorch_trains_it() -> None:
    module = Twice()
    federation, start = built(module, GRADIENTS)
    rows = federation.task.data
    (found,) = GradientTrainer(federation.task).train(start.state.model, full_batch([np.arange(len(rows))], len(rows)))
    own = federation.task.module_with(start.state.model)
    F.cross_entropy(own(rows.inputs), rows.targets).backward()  # type: ignore[no-untyped-call]
    expected = federation.task.layout.flatten({name: -torch.as_tensor(p.grad) for name, p in own.named_parameters()})
    torch.testing.assert_close(found, expected)
    kept = federation.task.module.get_submodule("first.0")
    assert isinstance(kept.weight, nn.Parameter)
    assert kept.weight is federation.task.module.get_submodule("third").weight


@pytest.mark.thorough_except("updates")
@KINDS
def test_a_run_trains_a_layer_under_several_names(kind: dict[str, Any]) -> None:
    found = run(Twice(), kind).module()
    assert found.get_submodule("first.0") is found.get_submodule("second.2")
    assert not torch.equal(found.get_submodule("first.0").get_parameter("weight"), Twice().third.weight)


def own_task(form: Callable[[Tensor], Tensor]) -> Callable[[int], Task]:
    """Return a task whose loss is cross-entropy in another form."""
    return lambda outputs: replace(
        tasks.create("classification", outputs),
        name="mine",
        losses=lambda found, targets: form(F.cross_entropy(found, targets, reduction="none")),
    )


mean, total, column = own_task(torch.mean), own_task(torch.sum), own_task(lambda losses: losses[:, None])
each = own_task(lambda losses: losses)


@pytest.mark.parametrize(("name", "shape"), [("mean", r"\(\)"), ("total", r"\(\)"), ("column", r"\(2, 1\)")])
def test_a_loss_that_is_not_one_number_a_sample_is_refused(name: str, shape: str) -> None:
    with pytest.raises(ConfigError, match=rf"task 'mine' gives a loss of shape {shape} for 2 samples, expected \(2,\)"):
        run(nn.Linear(3, 2), others={"task.name": f"{__name__}:{name}"})


def test_a_loss_of_one_number_a_sample_is_trained_on() -> None:
    own, usual = (run(nn.Linear(3, 2), others={"task.name": name}).scores for name in (f"{__name__}:each", "classification"))
    assert own
    assert own.keys() <= usual.keys()


def test_a_default_device_of_the_caller_changes_nothing() -> None:
    usual = run(nn.Linear(3, 2)).scores
    torch.set_default_device("meta")
    try:
        found = api.run(data=ROWS, model="linear", settings=settings(UPDATES), baseline=False, progress=False, seed=1)
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert found.scores.keys() == usual.keys()


_FORKED = """
import os, torch, ldpfl
torch.set_num_threads(2)
rows = (torch.randn(40, 4), torch.arange(40) % 2)
settings = {"clients.count": 4, "training.rounds": 1, "privacy.target_epsilon": "off", "mechanism.name": "duchi"}
settings |= {"mechanism.perturbed": "update"}
ldpfl.run(data=rows, model="linear", settings=settings, baseline=False, progress=False)
torch.randn(800, 800) @ torch.randn(800, 800)
child = os.fork()
if child == 0:
    ldpfl.run(data=rows, model="linear", settings=settings, baseline=False, progress=False)
    torch.randn(800, 800) @ torch.randn(800, 800)
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_that_was_forked_after_training_trains_as_well() -> None:
    """PyTorch's threads are not in it: by several of them it would wait for ever."""
    assert subprocess.run([sys.executable, "-c", _FORKED], timeout=120, check=False).returncode == 7
