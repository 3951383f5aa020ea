"""Results show themselves, can be sent to another process, say what a ledger says, and come whatever PyTorch was set to."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from rich.console import Console

import ldpfl
import ldpfl.api.auditing  # with which audits show themselves
from ldpfl.api.results import SweepResult
from ldpfl.attacks.canary import CanaryRow, RunAudit
from ldpfl.auditing import MechanismAudit
from ldpfl.auditing.checks import Check
from ldpfl.experiments.figures import as_released
from ldpfl.experiments.planning.planner import Setting, plan
from ldpfl.experiments.sweep_config import SweepConfig
from ldpfl.experiments.sweep_rows import Curve, Row
from ldpfl.privacy import Ledger, RoundEvent, UnprotectedRelease
from ldpfl.privacy.accounting import account
from ldpfl.privacy.events import OURS
from ldpfl.privacy.guarantee import REPLACE_ONE, Guarantee, Statement
from ldpfl.util.displays import Shown

SMALL = {"model.name": "logistic-regression", "data.name": "mnist", "shuffling.channel": "direct"}
FORGED = 0.001

run = partial(ldpfl.run, "quickstart", settings=SMALL, count=5, rounds=1, epochs=1, baseline=False, progress=False)


@pytest.fixture(scope="module")
def finished(tiny_data: Path) -> ldpfl.RunResult:
    return run(data_dir=tiny_data)


@pytest.fixture(scope="module")
def of_rows() -> ldpfl.RunResult:
    return run_of_rows()


def run_of_rows(seed: int | None = 1) -> ldpfl.RunResult:
    frame = pandas.DataFrame({"a": [0.0, 1.0] * 50, "b": [0.5, 0.25, 1.0, 0.0] * 25, "y": ["no", "yes"] * 50})
    seeds: dict[str, Any] = {} if seed is None else {"seed": seed}
    return ldpfl.run(data=frame, target="y", target_epsilon=8.0, rounds=1, count=10, baseline=False, progress=False, **seeds)


def printed(result: object) -> str:
    console = Console(file=StringIO(), width=110)
    console.print(result)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def statement() -> Statement:
    row = Guarantee(inf, 1e-5, "client", 1, REPLACE_ONE, "local", "proved", scope="run")
    return Statement(1e-5, (row,), ("because",), ("too large",))


SHOWN: tuple[tuple[Shown, tuple[str, ...]], ...] = (
    (statement(), ("This is no protection", "one client, whole run", "because", "warning: too large")),
    (plan(Setting(1.0, 10, 5, 2, channel="direct")), ("plan: duchi", "sent by a client in a round", "one client, whole run")),
    (ldpfl.plan_regime("local", 4.0, clients=100, weights=20, rounds=2), ("plan: local", "noise in the mean", "one client, whole run")),
    (
        MechanismAudit("duchi", 1.0, 0.5, 1000, 1e-4, (Check("a bias", 0.1, 1.0, 1e-5, True, "said"),), 6.5, 3.2),
        ("6.5, mu 3.2", "a bias", "ok"),
    ),
    (RunAudit("mine", 9, 5, "duchi", 1.0, 100, 1e-5, (CanaryRow(5, 0.9, 0.8, 0.95, 1.5, 0.73),)), ("mine: what a round's pool", "80.0%")),
)


@pytest.mark.parametrize(("result", "words"), SHOWN, ids=lambda value: type(value).__name__)
def test_what_a_call_returns_is_a_table_in_a_notebook_and_in_a_terminal(result: Shown, words: tuple[str, ...]) -> None:
    for text in (printed(result), result._repr_html_().replace("&#x27;", "'")):
        assert all(word in text for word in words), text
        assert type(result).__name__ not in text
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_kind_that_nobody_registered_is_shown_as_its_repr() -> None:
    @dataclass(frozen=True)
    class Unknown(Shown):
        name: str = "[bold]"

    assert "Unknown(name='[bold]')" in printed(Unknown())
    assert "Unknown" in Unknown()._repr_html_()


def test_lines_and_plans_are_rows_of_a_frame() -> None:
    frame = statement().to_dataframe()
    assert frame.to_dict("records") == [asdict(statement().rows[0])]
    assert list(Statement(1e-5, ()).to_dataframe().columns) == list(frame.columns)
    plans = [plan(Setting(epsilon, 10, 5, 2, mechanism=name, channel="direct")) for name, epsilon in (("duchi", 1.0), ("none", 1.0))]
    rows = pandas.concat([one.to_dataframe() for one in plans], ignore_index=True)
    assert rows["local_pure"].tolist() == [10.0, inf]
    assert rows["bytes_per_client"].tolist() == [one.bytes_per_client for one in plans]


@pytest.mark.slow
def test_a_result_says_of_privacy_what_its_ledger_says(finished: ldpfl.RunResult, tiny_data: Path, tmp_path: Path) -> None:
    """Whatever its file says: loaded, resumed, printed or as a dictionary."""
    folder = tmp_path / "run"
    told = run(data_dir=tiny_data, folder=folder).to_dict()
    figures = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    for line in figures["privacy"]["guarantees"]:
        line["epsilon"] = FORGED
    (folder / "result.json").write_text(json.dumps({**figures, "epsilon_per_unit": FORGED}), encoding="utf-8")
    for result in (ldpfl.load_run(folder, data_dir=tiny_data), run(data_dir=tiny_data, folder=folder, resume=True)):
        assert result.to_dict() == told
        assert result.to_dict()["privacy"] == result.privacy.to_dict() == finished.privacy.to_dict()
        assert str(FORGED) not in printed(result)
    ledger = folder / "ledger.json"
    text = ledger.read_text(encoding="utf-8")
    ledger.unlink()
    run(data_dir=tiny_data, folder=folder, resume=True)
    assert ledger.read_text(encoding="utf-8") == text  # written again without the forged figures
    Ledger((RoundEvent(1, UnprotectedRelease("none", "values leave as they are", author=OURS), 5, 5, 1),)).save(ledger)
    for read in (partial(ldpfl.load_run, folder), partial(run, folder=folder, resume=True)):
        with pytest.raises(ldpfl.DataError, match="does not belong to this run's checkpoint"):
            read(data_dir=tiny_data)


def test_a_seed_that_determines_no_noise_is_called_public(finished: ldpfl.RunResult, of_rows: ldpfl.RunResult) -> None:
    assert f"quickstart, seed {finished.config.seed}" in printed(finished)
    assert "public seed" not in printed(of_rows)  # the noise follows from the given seed
    assert "own, public seed " in printed(run_of_rows(seed=None))


def test_a_finished_run_can_be_sent_to_another_process(finished: ldpfl.RunResult, of_rows: ldpfl.RunResult) -> None:
    text = pickle.dumps(finished)
    assert len(text) < 100_000  # the model and the figures, and not the 280 kB of samples
    again = pickle.loads(text)
    assert again.to_dict() == finished.to_dict()
    assert again.privacy == finished.privacy
    assert [tensor.tolist() for tensor in again.module().parameters()] == [tensor.tolist() for tensor in finished.module().parameters()]
    rows = pandas.DataFrame({"a": [0.0, 1.0], "b": [0.5, 0.25]})
    assert pickle.loads(pickle.dumps(of_rows)).predict(rows).equals(of_rows.predict(rows))


def test_each_module_is_one_s_own(finished: ldpfl.RunResult) -> None:
    before = finished.module().state_dict()
    with torch.no_grad():
        for parameter in finished.module().parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in finished.module().state_dict().items())


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.thorough_except("float64")
@pytest.mark.parametrize(
    "state", [torch.no_grad(), torch.inference_mode(), by_default(torch.float64)], ids=["no grad", "inference", "float64"]
)
def test_a_run_is_the_same_whatever_pytorch_was_set_to(state: AbstractContextManager[None], tiny_data: Path, tmp_path: Path) -> None:
    """The noise of this mechanism is drawn in PyTorch, and so would be in another dtype."""
    usual = run(data_dir=tiny_data, folder=tmp_path, mechanism="laplace")
    with state:
        results = [run(data_dir=tiny_data, mechanism="laplace"), ldpfl.load_run(tmp_path, data_dir=tiny_data)]
        assert ldpfl.check(settings=SMALL, data_dir=tiny_data).is_fit
        assert ldpfl.api.audit_run(tmp_path, trials=100, data_dir=tiny_data).trials == 100
    for result in results:
        weights = zip(result.module().state_dict().values(), usual.module().state_dict().values(), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in weights)


def test_a_budget_is_solved_for_whatever_pytorch_was_set_to(of_rows: ldpfl.RunResult) -> None:
    with by_default(torch.float64):
        found = run_of_rows()
    assert found.config == of_rows.config
    assert found.score == of_rows.score


@pytest.mark.slow
def test_a_sweep_draws_its_noise_where_there_is_a_schedule() -> None:
    sweep = SweepConfig.model_validate({"name": "try", "recipe": "quickstart", "seeds": [0], "variants": {"Full DP": []}})
    row = Row("Full DP", (), (0.5,), 10, {"local": 5.0}, 1.0)
    noisy, plain = Curve(row, ((0.1, 0.5),), ((1.0, 2.0),), ((0.01, 0.02),)), Curve(row, ((0.1, 0.5),))
    picture = SweepResult(sweep, (row,), (noisy,), None).plot_noise()
    assert picture is not None
    assert "<svg" in picture.svg
    assert SweepResult(sweep, (row,), (plain,), None).plot_noise() is None


def test_what_left_as_it_is_is_said_of_a_result(finished: ldpfl.RunResult) -> None:
    """A file that claims an epsilon a weight does not hide it."""
    nothing = Ledger((RoundEvent(1, UnprotectedRelease("none", "values leave as they are", author=OURS), 5, 5, 1),))
    assert as_released(finished.to_dict(), nothing, account(nothing, 1e-5))["epsilon_per_unit"] is None


def test_a_sweep_has_a_row_a_seed_with_all_figures() -> None:
    figures: dict[str, tuple[float | None, ...]] = {"AUROC": (0.7, 0.8), "accuracy": (0.9, None)}
    row = Row("own", (("clients.count", 5),), (0.7, 0.8), 10, {"local": 4.0}, 1.0, metric="AUROC", scores=figures)
    config = SweepConfig(name="s", recipe="quickstart", seeds=[0, 1], variants={"own": []}, axes={"clients.count": [5]})
    result = SweepResult(config, (row,), (), None)
    by_seed = result.to_dataframe(by_seed=True)
    assert by_seed[["variant", "clients.count", "run", "AUROC"]].to_numpy().tolist() == [["own", 5, 1, 0.7], ["own", 5, 2, 0.8]]
    assert by_seed["accuracy"].isna().tolist() == [False, True]
    means = result.to_dataframe()
    assert means.loc[0, "means.accuracy"] == 0.9
    assert means.loc[0, "mean"] == means.loc[0, "means.AUROC"] == pytest.approx(0.75)


def test_a_statement_is_its_table_in_a_console_too(of_rows: ldpfl.RunResult) -> None:
    for text in (repr(of_rows.privacy), str(of_rows.privacy)):
        assert "one record, whole run" in text
        assert "Guarantee(" not in text


@pytest.mark.slow
@pytest.mark.thorough
def test_a_guarantee_shows_itself_where_nothing_but_the_package_was_imported(tmp_path: Path, tiny_data: Path) -> None:
    run(folder=tmp_path / "run", data_dir=tiny_data)
    code = "import sys, ldpfl; print(ldpfl.load_run(sys.argv[1], data_dir=sys.argv[2]).privacy)"
    said = subprocess.run([sys.executable, "-c", code, tmp_path / "run", tiny_data], check=True, capture_output=True, text=True).stdout
    assert "epsilon" in said
    assert " object at " not in said
