"""What a caller hands over: numbers of whatever library, settings however they are named, and what is refused in one plain line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import ldpfl
from grids import each
from ldpfl import ConfigError, DataError
from ldpfl.experiments.build import choose_device
from ldpfl.experiments.config import toml_value
from ldpfl.privacy import Ledger

any_of: Any = ldpfl
"""The front door as it is to who runs no type checker."""


def test_numbers_of_numpy_and_pytorch_are_numbers() -> None:
    config = ldpfl.configure(
        count=np.int64(3),
        epsilon=np.float64(1.5),
        seed=np.uint8(4),
        learning_rate=np.float32(0.5),
        once=np.bool_(False),
        epochs=torch.tensor(2),
    )
    assert (config.clients.count, config.mechanism.epsilon_and_budget, config.seed) == (3, (1.5, "unit"), 4)
    assert (config.training.learning_rate, config.clients.once, config.training.epochs) == (0.5, False, 2)
    configs = [ldpfl.configure(epsilon=epsilon) for epsilon in np.linspace(1, 2, 2)]
    assert [config.mechanism.epsilon_and_budget for config in configs] == [(1.0, "unit"), (2.0, "unit")]
    own = ldpfl.configure(
        "own", {"data.path": "rows.csv", "data.target": "ill"}, bounds={"age": np.array([0, 120])}, target_epsilon=np.float64(2)
    )
    assert own.data.bounds == {"age": [0, 120]}
    assert own.privacy.target_epsilon == 2
    assert toml_value(np.longdouble(2)) == "2.0"


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers_of_an_audit() -> None:
    audited = ldpfl.audit("duchi", trials=np.int64(2000), seed=np.int64(1))  # type: ignore[arg-type]
    assert audited == ldpfl.audit("duchi", trials=2000, seed=1)


@each(
    "overrides",
    [
        {"clients.count": 5},
        {"clients": {"count": 5}},
        {"settings": {"clients": {"count": 5}}},
        {"settings": "clients.count=5"},
        {"settings": None, "count": 5},
    ],
)
def test_a_setting_may_be_named_in_each_of_these_ways(overrides: dict[str, Any]) -> None:
    assert any_of.configure("quickstart", **overrides) == any_of.configure("quickstart", count=5)


def test_a_section_leaves_what_it_does_not_name_and_may_choose_the_mechanism() -> None:
    config = ldpfl.configure("ldp-fl/mnist", clients={"count": 5}, mechanism={"name": "harmony", "group": 2})
    assert config == ldpfl.configure("ldp-fl/mnist", ["clients.count=5", "mechanism.name=harmony", "mechanism.group=2"])


@each(
    ("overrides", "said"),
    [
        ({"epsilom": 1}, "configure has no argument 'epsilom': did you mean 'epsilon'?"),
        ({"eps": 1}, "configure has no argument 'eps': did you mean 'epsilon'?"),
        ({"group": 1}, "configure has no argument 'group' with the mechanism duchi: "),
        (
            {"clients": 5},
            "configure has no argument 'clients': it is a section of settings, so give a dict of them, such as {'count': ...}",
        ),
        ({"clients.cuont": 5}, "unknown setting 'clients.cuont' in recipe quickstart: did you mean 'clients.count'?"),
        (
            {"settings": [("clients.count", 5)]},
            "settings has an item of the type tuple, expected a dict of keys and values, or texts such as 'clients.count=5'",
        ),
        ({"settings": ["clients"]}, "setting 'clients' is not of the form key=value"),
        ({"settings": ["seed=1", "seed.more=1"]}, "setting 'seed.more': 'seed' is a setting with a value, not a section"),
    ],
)
def test_advice_can_be_followed(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        any_of.configure("quickstart", **overrides)
    assert str(refused.value).startswith(said)


def test_advice_is_of_the_arguments_of_who_was_called() -> None:
    with pytest.raises(ConfigError, match="run has no argument 'foldr': did you mean 'folder'"):
        ldpfl.run(foldr="run")
    frame = pd.DataFrame({"age": [1, 2], "ill": [0, 1]})
    with pytest.raises(ConfigError, match="run has no argument 'epsilon' with the mechanism dp-sgd: did you mean 'target_epsilon'"):
        ldpfl.run(data=frame, target="ill", target_epsilon=4.0, epsilon=2)


ROWS = pd.DataFrame({"secret": [123456]})


@each(
    ("call", "said"),
    [
        (lambda: any_of.configure(None), "configure: what is None, expected str | Path | RunConfig"),
        (lambda: any_of.configure({}), "configure: what is of the type dict, expected str | Path | RunConfig"),
        (lambda: any_of.run(5), "run: what is 5, expected str | Path | RunConfig | None"),
        (lambda: any_of.run(ROWS), "run: what is of the type DataFrame, expected str | Path | RunConfig | None: give it as data=..."),
        (
            lambda: any_of.check(nn.Linear(3, 2)),
            "check: what is of the type Linear, expected str | Path | RunConfig | None: give it as model=...",
        ),
        (
            lambda: any_of.run(data=None, model=nn.Linear(3, 2)),
            "model is given, but data is None: give data=... (yours, or the name of a built-in data set), or name a recipe ('quickstart')",
        ),
        (
            lambda: any_of.run(data=None, target="died", rounds=1),
            "target names a column of your data, but data is None: give data=..., a file, a folder or a data frame",
        ),
        (
            lambda: any_of.run(settings={"data.target": "died"}, rounds=1),
            "data.target names a column of your data, but data is None: give data=..., a file, a folder or a data frame",
        ),
        (lambda: any_of.run(device=5), "run: device is 5, expected str | device | None"),
        (lambda: any_of.run(settings=5), "run: settings is 5, expected Mapping[str, Any] | Sequence[str] | None"),
        (lambda: any_of.run(folder=5), "run: folder is 5, expected str | Path | None"),
        (lambda: any_of.run(folder="a\0b"), "run: folder contains a null character: remove it"),
        (lambda: any_of.run(data_dir=5), "run: data_dir is 5, expected str | Path | None"),
        (lambda: any_of.run(more_rounds="2"), "run: more_rounds is '2', expected int"),
        (lambda: any_of.run(more_rounds=1.5), "run: more_rounds is 1.5, expected int"),
        (lambda: any_of.run(more_rounds=True), "run: more_rounds is True, expected int"),
        (lambda: any_of.run(on_round=5), "run: on_round is 5, expected Callable[[RoundMetrics], None] | None"),
        (lambda: any_of.run(model=nn.Linear), "run: model is the class Linear: give an instance, Linear(...)"),
        (lambda: any_of.account(5), "account: what is 5, expected Ledger | RunResult | RunConfig | str | Path"),
        (lambda: any_of.account("quickstart", 5), "account: others is 5, expected Ledger | RunResult | RunConfig | str | Path"),
        (lambda: any_of.account("quickstart", delta="1e-5"), "account: delta is '1e-5', expected float | None"),
        (lambda: any_of.account("quickstart", colluding=0.5), "account: colluding is 0.5, expected int"),
        (lambda: any_of.account(Ledger()), "the ledger is empty, because nothing was released yet: finish a round first"),
        (lambda: any_of.reproduce(None), "reproduce: name is None, expected str"),
        (lambda: any_of.reproduce("ldp-fl/fig5", size="big"), "the size is 'big', expected desk or paper"),
        (lambda: any_of.audit(5), "audit: mechanism is 5, expected str | Mechanism"),
        (lambda: any_of.audit("duchi", trials=0), "an audit needs a whole number of trials, at least 1000, got 0"),
        (lambda: any_of.load_run(None), "load_run: folder is None, expected str | Path"),
        (lambda: any_of.predict(None, ROWS), "predict: folder is None, expected str | Path"),
        (lambda: any_of.plan(target_central="4"), "plan: target_central is '4', expected float | None"),
    ],
)
def test_what_is_of_another_kind_is_refused_in_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert str(refused.value) == said


def test_a_device_may_be_one_of_pytorch() -> None:
    assert choose_device(torch.device("cpu")) == choose_device("cpu")
    assert choose_device(None) == choose_device("auto")
    with pytest.raises(ConfigError, match="mps does not support float64"):
        ldpfl.run(device="mps")
    with pytest.raises(ConfigError, match="unknown device 'meta'"):
        choose_device(torch.device("meta"))


def test_what_is_no_config_is_told_what_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: 1")
    for what, said in (
        (
            Path("quickstart"),
            "there is no config file quickstart: to run the recipe of this name, give the text 'quickstart' instead of a path",
        ),
        (str(tmp_path), f"{tmp_path} is a folder: expected the name of a recipe, or a config file (*.toml)"),
        (
            "run.yaml",
            "run.yaml is not a config, because its name does not end in .toml: rename it, or if it is your data, give --data run.yaml",
        ),
        ("none.toml", "config file none.toml cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError) as refused:
            ldpfl.configure(what)
        assert str(refused.value) == said
    (tmp_path / "quickstart").mkdir()
    assert ldpfl.configure("quickstart").seed == 0


def test_a_missing_file_is_named_once() -> None:
    for call, said in (
        (lambda: ldpfl.account("none.json"), "ledger none.json cannot be read: No such file or directory"),
        (lambda: ldpfl.certify("none"), "ledger none cannot be read: No such file or directory"),
        (lambda: ldpfl.sweep("none.toml"), "sweep file none.toml cannot be read: No such file or directory"),
        (lambda: ldpfl.run(data=Path("none"), target="ill"), f"there is no file {Path('none').resolve()}"),
    ):
        with pytest.raises((ConfigError, DataError)) as refused:
            call()
        assert str(refused.value) == said
