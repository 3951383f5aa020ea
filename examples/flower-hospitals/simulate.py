"""Run the three hospitals in one process, without Ray or sockets: python examples/flower-hospitals/simulate.py FOLDER.

What leaves a hospital is decided as on its own machine: by the policy that ``ldpfl policy init`` writes, and a budget for each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE, FOLDER = Path(__file__).parent, Path(sys.argv[1]).absolute()
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}  # read when Flower is imported
sys.path.insert(0, str(HERE))

import make_tables  # noqa: E402
from flower_hospitals.client_app import app as client_app  # noqa: E402
from flower_hospitals.server_app import app as server_app  # noqa: E402

from ldpfl.cli import app as ldpfl  # noqa: E402
from ldpfl.flower import InProcessGrid  # noqa: E402

make_tables.write(FOLDER)
config, policy, budget = HERE / "flower_hospitals" / "config.toml", FOLDER / "policy.toml", FOLDER / "budget.sqlite"
asked = ["policy", "init", HERE, "--config", config, "--out", policy, "--budget", budget]
ldpfl([str(part) for part in asked], standalone_mode=False)
(FOLDER / "budgets").mkdir(exist_ok=True)
os.environ |= {
    "LDPFL_POLICY": str(policy),
    "LDPFL_BUDGETS": str(FOLDER / "budgets"),
    "HOSPITAL_TABLE": str(FOLDER / "hospital-{partition}.csv"),
}
settings = {"out": str(FOLDER / "run"), "public-rows": str(FOLDER / "public.csv"), "ldpfl.reply-s": 0.0}
grid = InProcessGrid(client_app, clients=3, run_config=settings)
server_app(grid, grid.server_context())
ldpfl(["ledger", str(FOLDER / "run")], standalone_mode=False)
