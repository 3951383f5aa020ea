"""Nodes with tables of their own behind a relay that adds up, for the tests of rounds that ask for sums over records."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
from flwr.app import UserConfig
from relayed_parts import CLIENTS, World, policy_of

from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.config import toml_value
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower import InProcessGrid, LdpClientApp, apps
from ldpfl.privacy.policy import Policy

ROWS, HELD_BACK = 200, 20

SETTINGS: dict[str, Any] = {
    "data.name": "node",
    "data.target": "outcome",
    "data.columns": ["age", "dose"],
    "data.bounds": {"age": [0, 100], "dose": [-10, 10]},
    "data.scaling": "bounds",
    "data.classes": ["alive", "died"],
    "mechanism.records": ROWS - HELD_BACK,
    "mechanism.clip_norm": 1.0,
    "mechanism.noise_multiplier": 1.0,
    "privacy.target_epsilon": "off",
    "shuffling.channel": "secure-sum",
    "clients.count": CLIENTS,
    "training.rounds": 2,
    "training.server_learning_rate": 2.0,
    "training.server_weight_decay": 0.0,
    "evaluation.epsilon": 5.0,
    "seed": 4,
}


def changes_of(**more: Any) -> list[str]:
    """Return the settings with ``more``, whose keys have two underscores for a dot; those that are None are left out."""
    settings = {**SETTINGS, **{key.replace("__", "."): value for key, value in more.items()}}
    return [f"{key}={toml_value(value)}" for key, value in settings.items() if value is not None]


def config_of(**more: Any) -> RunConfig:
    return load_recipe("own", changes_of(**more))


def rows(seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    age, dose = generator.integers(20, 90, ROWS).astype(float), generator.normal(0, 3, ROWS).round(2)
    died = generator.random(ROWS) < 1 / (1 + np.exp(-(age - 55) / 6 - dose / 2))
    return pd.DataFrame({"age": age, "dose": dose, "outcome": np.where(died, "died", "alive")})


def write_tables(folder: Path) -> str:
    """Write a table for each node; return what names them in a node's environment."""
    for node in range(CLIENTS):
        rows(node).to_csv(folder / f"{node}.csv", index=False)
    return str(folder / "{partition}.csv")


ANY: dict[str, Any] = {
    "epsilon_per_unit": 1e9,
    "epsilon_per_round": 1e9,
    "lifetime_epsilon": 1e9,
    "sum_epsilon": "off",
    "rounds": 100,
}
"""Bounds of a policy that allows next to no noise."""


def open_policy(**changes: Any) -> Policy:
    """A policy that lets all rounds of these tests through."""
    allowed = {"mechanisms": ("dp-sgd",), "protects": "record", "transports": ("sum",), "min_clients": CLIENTS, "sum_epsilon": 900.0}
    return policy_of(**{**allowed, "epsilon_per_unit": 900.0, "epsilon_per_round": 900.0, **changes})


def grid_of(world: World, app: Any = apps.train, settings: UserConfig | None = None) -> InProcessGrid:
    with mock.patch.object(apps, "train", app):  # so that `app` counts as ldpfl's own
        client = LdpClientApp(app, node=world.node, source=world.source)
    return InProcessGrid(client, CLIENTS, run_config=settings or {})


def deployed(
    world: World, app: Any = apps.train, *, transport: str = "sum", own: UserConfig | None = None, grid: Any = None, **more: Any
) -> RunFolder:
    """Run the ready apps over the sum, unless another ``transport`` is named, and return their run folder.

    Args:
        own: settings of the run in place of those here, such as ``ldpfl.out``.
        grid: made of the world and these settings; by default :func:`grid_of`.
    """
    folder = world.folder / "run"
    settings: UserConfig = {
        "ldpfl.recipe": "own",
        "ldpfl.set": ";".join(changes_of(**more)),
        "ldpfl.out": str(folder),
        "ldpfl.transport": transport,
        "ldpfl.min-clients": CLIENTS,
        "ldpfl.timeout-s": 100.0,
        **(own or {}),
    }
    nodes = grid_of(world, app, settings) if grid is None else grid(world, settings)
    collectors: dict[str, Any] = {"operator_sum": lambda **own: world.adding_up(), "operator_relay": lambda **own: world.collector()}
    with mock.patch.multiple("ldpfl.flower.ready_server", **collectors):
        apps.server_app(nodes, nodes.server_context())
    return RunFolder(Path(str(settings["ldpfl.out"])))
