"""What a trial runs: the quickstart with changes, the policy that allows it, and the Flower app that the operator submits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from ldpfl.deploy.site import Site
from ldpfl.errors import ConfigError
from ldpfl.experiments import RunConfig, load_recipe
from ldpfl.experiments.build import build, choose_device
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.dataset import load_dataset
from ldpfl.files import write_text
from ldpfl.flower.policy_init import Offer, fitting_policy
from ldpfl.privacy.policy import Policy

RECIPE = "quickstart"

LINKED = 16
"""Weights that stay together in a sealed record. LDP-FL's parameter shuffling has 1, which takes 16 times as long to seal and open."""

REPLY_S = 20.0
"""Seconds after its charge at which each node replies. A node that has not trained by then, on a busy machine, reports no change."""

_FEWEST = 2
_SHORTER = ("training.epochs=2",)

WINDOW_S = 1.0
"""Seconds that the relay takes uploads for at least. It waits for all clients anyway, so a slow machine loses none."""

_NODES_WAIT_S = 120.0
_REPLIES_WAIT_S = 180.0


@dataclass(frozen=True)
class Trial:
    """A run to deploy on one machine.

    Attributes:
        changes: to the recipe ``RECIPE``, as ``key=value``.
        policy: what each node allows; the aggregator's key is still missing in it.
        data_dir: folder with data sets, if they are not found otherwise.
        reply_s: seconds after its charge at which each node replies.
    """

    config: RunConfig
    changes: tuple[str, ...]
    policy: Policy
    data_dir: Path | None
    reply_s: float

    @property
    def clients(self) -> int:
        return self.config.clients.count

    @property
    def rounds(self) -> int:
        return self.config.training.rounds


def trial_of(clients: int, rounds: int, changes: Sequence[str] = (), data_dir: Path | None = None, reply_s: float = REPLY_S) -> Trial:
    """Return the trial of ``clients`` nodes and so many ``rounds`` of the quickstart, changed by ``key=value``.

    Loads the data once, so that a mistake is found here, and the nodes find them decoded.

    Raises:
        LdpflError: the settings, the model or the data do not fit, or nothing would be protected.
    """
    for change in changes:
        if ";" in change:
            raise ConfigError(f"setting {change!r} holds a semicolon, which separates settings on Flower's wire")
    every = (f"clients.count={clients}", f"training.rounds={rounds}", *_SHORTER, *changes)
    config = settled(load_recipe(RECIPE, every))
    if config.clients.count < _FEWEST or config.clients.fraction != 1:
        raise ConfigError(f"the demo asks all of at least {_FEWEST} clients in each round; leave clients.fraction at 1")
    return Trial(config, every, _policy(config, data_dir, reply_s), None if data_dir is None else data_dir.absolute(), reply_s)


def write_app(site: Site, trial: Trial) -> None:
    """Write the Flower app that the operator submits: ldpfl's own ServerApp and ClientApp, with this run's settings."""
    package = site.app / "ldpfl_demo"
    package.mkdir(parents=True)
    write_text(package / "__init__.py", '"""The demo of ldpfl."""\n')
    for side in ("server", "client"):
        write_text(package / f"{side}_app.py", f'from ldpfl.flower.apps import {side}_app as app\n\n__all__ = ["app"]\n')
    settings = {
        "recipe": RECIPE,
        "set": "; ".join(trial.changes),
        "out": str(site.run),
        "nodes": trial.clients,
        "wait-s": _NODES_WAIT_S,
        "timeout-s": _REPLIES_WAIT_S,
        "transport": "relay",
        "linked": LINKED,
        "min-clients": trial.clients,
        "window-s": WINDOW_S,
        "reply-s": trial.reply_s,
    }
    tree = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": "ldpfl-demo", "version": "1.0.0", "description": "ldpfl", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [package.name]}}}},
            "flwr": {
                "app": {
                    "publisher": "ldpfl",
                    "components": {"serverapp": "ldpfl_demo.server_app:app", "clientapp": "ldpfl_demo.client_app:app"},
                    "config": {"ldpfl": settings},
                }
            },
        },
    }
    write_text(site.app / "pyproject.toml", tomli_w.dumps(tree))


def _policy(config: RunConfig, data_dir: Path | None, reply_s: float) -> Policy:
    """Return the policy that allows what ``config`` releases, and hardly more."""
    _, start = build(config, load_dataset(config, data_dir), choose_device("cpu"))
    return fitting_policy(Offer(config, "relay", config.clients.count, LINKED, reply_s), start.state.ranges)
