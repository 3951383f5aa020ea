"""The app in examples/flower-own-app, which docs/flower.md explains, runs from its files to a report about its run."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

from conftest import CommandLine
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid
from ldpfl.privacy.budget_file import read_charges

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("imports-of-apps")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-own-app"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of the example."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "own-app", ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.thorough
def test_it_trains_what_its_nodes_tables_teach(app: Path, ldpfl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--config", app / "own_app" / "config.toml", "--layers", "2,1")
    assert "3 reports of duchi (direct)" in ldpfl("policy", "init", app, *asked).out
    rows = np.random.default_rng(4).normal(size=(40, 2))
    table = np.column_stack([rows, rows @ [1.0, -1.0] + 0.5])
    np.savetxt("table.csv", table, delimiter=",", header="a,b,c")
    Path("table.csv").chmod(0o600)
    for variable, name in (("POLICY", "policy.toml"), ("BUDGET", "budget.sqlite"), ("DATA", "table.csv")):
        monkeypatch.setenv(f"LDPFL_{variable}", str(Path(name).absolute()))
    assert ldpfl("deploy", "check-node", "--app", app, *asked).code == 0
    sent = ("--layers", "weight=1x2,bias=1", "--train-config", "epochs=20 learning-rate=0.1")
    trial = ldpfl("deploy", "check-node", "--app", app, *asked[:2], *sent, "--try")
    assert "trained 3 values" in trial.out, trial.out
    assert read_charges(Path("budget.sqlite")) == ()
    monkeypatch.delenv("LDPFL_BUDGET")
    Path("budgets").mkdir()
    monkeypatch.setenv("LDPFL_BUDGETS", str(Path("budgets").absolute()))
    monkeypatch.syspath_prepend(app)
    from own_app import client_app, server_app  # type: ignore[import-not-found]

    settings = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]["ldpfl"]
    grid = InProcessGrid(client_app.app, 3, run_config={f"ldpfl.{name}": value for name, value in settings.items()})
    server_app.app(grid, grid.server_context())
    last = RunFolder(Path("run")).checkpoint()
    assert last is not None
    assert [metrics.clients for metrics in last.history] == [3, 3, 3]
    assert [len(read_charges(path)) for path in Path("budgets").iterdir()] == [3, 3, 3]
    assert set(np.load("run/weights.npz").files) == {"weight", "bias"}
    assert "3 rounds done" in ldpfl("show", "run").out
    assert ldpfl("report", "run").code == 0
