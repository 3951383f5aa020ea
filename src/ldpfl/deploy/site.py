"""The folders of a deployment: one for each party, with the files that it would have on a machine of its own, and no others'."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from ldpfl.deploy.certificates import Authority, node_key, write_private
from ldpfl.deploy.plan import LINKED, RECIPE, Plan
from ldpfl.errors import ConfigError
from ldpfl.files import write_text
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.policy import Policy
from ldpfl.relay.schema import open_engine
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.shuffling.sealing import generate_key, public_text, save_key

WINDOW_S = 1.0
"""Seconds that the relay takes uploads for at least. It waits for all clients anyway, so a slow machine loses none."""

_NODES_WAIT_S = 120.0
_REPLIES_WAIT_S = 180.0


@dataclass(frozen=True)
class NodeSite:
    """A client's folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def policy(self) -> Path:
        return self.path / "policy.toml"

    @property
    def budget(self) -> Path:
        return self.path / "budget.sqlite"

    @property
    def key(self) -> Path:
        return self.path / "node.key"

    @property
    def token(self) -> Path:
        return self.path / "relay.token"

    @property
    def log(self) -> Path:
        return self.path / "supernode.log"

    @property
    def flower_home(self) -> Path:
        return self.path / "flwr"


@dataclass(frozen=True)
class Site:
    """All folders of a deployment, under ``path``.

    ``superlink`` is the aggregator's machine, ``operator`` that of whoever submits the run; both trust ``authority``.
    """

    path: Path
    nodes: tuple[NodeSite, ...]

    @property
    def run(self) -> Path:
        """The run folder, as of ``ldpfl run``."""
        return self.path / "run"

    @property
    def authority(self) -> Path:
        return self.path / "ca.crt"

    @property
    def superlink(self) -> Path:
        return self.path / "superlink"

    @property
    def relay(self) -> Path:
        return self.path / "relay"

    @property
    def relay_store(self) -> Path:
        return self.relay / "relay.sqlite"

    @property
    def operator(self) -> Path:
        return self.path / "operator"

    @property
    def app(self) -> Path:
        return self.operator / "app"

    @property
    def aggregator_key(self) -> Path:
        return self.superlink / "aggregator.key"

    @property
    def aggregator_token(self) -> Path:
        return self.superlink / "relay.token"

    @classmethod
    def make(cls, path: Path, nodes: int) -> Site:
        """Make the folders, which only their owner may enter.

        Raises:
            ConfigError: there is something in ``path``, or it cannot be made.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"output folder {path} is not empty: give another --out")
        own = path.absolute()
        site = cls(own, tuple(NodeSite(own / f"node-{number}") for number in range(nodes)))
        try:
            own.mkdir(parents=True, exist_ok=True)
            own.chmod(0o700)
            for folder in (site.superlink, site.relay, site.operator, *(node.path for node in site.nodes)):
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"output folder {path} cannot be made: {error.strerror}") from None
        return site

    def secrets(self) -> list[Path]:
        """Return keys, tokens, certificates and what relay and Flower keep: of no use when the deployment has ended."""
        files = [*self.path.rglob("*.key"), *self.path.rglob("*.key.pub"), *self.path.rglob("*.token"), *self.path.rglob("*.crt")]
        return [*files, *self.relay.glob(f"{self.relay_store.name}*"), *self.path.rglob("flwr")]

    def remove_secrets(self) -> None:
        """Remove what :meth:`secrets` names; policies, budgets, logs and the run stay."""
        for path in self.secrets():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def equip(site: Site, policy: Policy) -> None:
    """Write every party's certificates, keys, tokens, policies and budgets."""
    authority = Authority()
    authority.save(site.authority)
    for name, folder in (("superlink", site.superlink), ("relay", site.relay)):
        authority.issue(name, folder / "server.crt", folder / "server.key")
    key = generate_key()
    save_key(key, site.aggregator_key)
    own = policy.model_copy(update={"aggregator_keys": (public_text(key),)})
    engine = open_engine(str(site.relay_store))
    try:
        tokens = Tokens(engine)
        write_private(site.aggregator_token, tokens.add("aggregator", Role.AGGREGATOR).encode())
        for node in site.nodes:
            write_private(node.token, tokens.add(node.name, Role.CLIENT).encode())
            node_key(node.key)
            write_text(node.policy, tomli_w.dumps(own.model_dump(mode="json")))
            set_limit(node.budget, own.lifetime_epsilon, own.delta)
    finally:
        engine.dispose()


def write_app(site: Site, plan: Plan) -> None:
    """Write the Flower app that the operator submits: ldpfl's own ServerApp and ClientApp, with this run's settings."""
    package = site.app / "ldpfl_demo"
    package.mkdir(parents=True)
    write_text(package / "__init__.py", '"""The demo of ldpfl."""\n')
    for side in ("server", "client"):
        write_text(package / f"{side}_app.py", f'from ldpfl.flower.apps import {side}_app as app\n\n__all__ = ["app"]\n')
    settings = {
        "recipe": RECIPE,
        "set": "; ".join(plan.changes),
        "out": str(site.run),
        "nodes": plan.clients,
        "wait-s": _NODES_WAIT_S,
        "timeout-s": _REPLIES_WAIT_S,
        "transport": "relay",
        "linked": LINKED,
        "min-clients": plan.clients,
        "window-s": WINDOW_S,
        "reply-s": plan.reply_s,
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
