"""The commands of a deployment, with the environment of each: what one would type on each party's machine."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.deploy.processes import Program
from ldpfl.deploy.site import NodeSite, Site
from ldpfl.errors import ConfigError
from ldpfl.files import write_text

HOST = "127.0.0.1"
CONNECTION = "demo"
"""How the operator's Flower config calls the SuperLink."""

_TASK_POLL_S = "0.25"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _TASK_POLL_S,
    "PYTHONUNBUFFERED": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
_OURS = ("FLWR_", "LDPFL_", "RAY_")
_KEPT = ("LDPFL_CACHE_DIR", DATA_DIR_VARIABLE)


@dataclass(frozen=True)
class Programs:
    """The programs of a deployment in ``site``.

    Attributes:
        relay_port: of the relay.
        superlink_port: of the SuperLink.
        node_ports: of each SuperNode's own interface, for its processes on the same machine.
        inherited: environment that all of them get.
    """

    site: Site
    relay_port: int
    superlink_port: int
    node_ports: tuple[int, ...]
    inherited: Mapping[str, str] = field(repr=False)

    @property
    def relay_url(self) -> str:
        return f"https://{HOST}:{self.relay_port}"

    @property
    def superlink_address(self) -> str:
        return f"{HOST}:{self.superlink_port}"

    def relay(self) -> Program:
        """Return the relay."""
        folder = self.site.relay
        serve = (sys.executable, "-m", "ldpfl", "relay", "serve", "--host", HOST, "--port", str(self.relay_port))
        tls = ("--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key"))
        return self._program("relay", (*serve, *tls), folder / "relay.log", {"LDPFL_RELAY_STORE": str(self.site.relay_store)})

    def superlink(self) -> Program:
        """Return the SuperLink, whose ServerApp is the aggregator."""
        folder = self.site.superlink
        listen = (_script("flower-superlink"), "--host", HOST, "--port", str(self.superlink_port))
        tls = ("--ssl-certfile", folder / "server.crt", "--ssl-keyfile", folder / "server.key", "--ssl-ca-certfile", self.site.authority)
        own: dict[str, str | Path] = {
            "FLWR_HOME": folder / "flwr",
            "LDPFL_RELAY": self.relay_url,
            "LDPFL_RELAY_CA": self.site.authority,
            "LDPFL_AGGREGATOR_TOKEN": self.site.aggregator_token,
            "LDPFL_AGGREGATOR_KEY": self.site.aggregator_key,
        }
        command = (*listen, *map(str, tls), "--enable-supernode-auth", "--disable-runtime-dependency-installation")
        return self._program("SuperLink", command, folder / "superlink.log", own)

    def supernode(self, number: int) -> Program:
        """Return one of the SuperNodes."""
        node = self.site.nodes[number]
        link = (_script("flower-supernode"), "--superlink", self.superlink_address, "--root-certificates", str(self.site.authority))
        here = ("--host", HOST, "--port", str(self.node_ports[number]), "--auth-supernode-private-key", str(node.key))
        config = ("--node-config", f"partition-id={number} num-partitions={len(self.site.nodes)}")
        own: dict[str, str | Path] = {
            "FLWR_HOME": node.flower_home,
            "LDPFL_POLICY": node.policy,
            "LDPFL_BUDGET": node.budget,
            "LDPFL_RELAY": self.relay_url,
            "LDPFL_RELAY_CA": self.site.authority,
            "LDPFL_RELAY_TOKEN": node.token,
        }
        return self._program(node.name, (*link, *here, *config), node.log, own)

    def register(self, node: NodeSite) -> Program:
        """Return the command that tells the SuperLink a node's public key; its output names the node."""
        command = ("supernode", "register", f"{node.key}.pub", CONNECTION, "--format", "json")
        return self._operator(f"registration of {node.name}", command, f"register-{node.name}.log")

    def submit(self) -> Program:
        """Return the command that submits the run and follows it to its end."""
        return self._operator("flwr run", ("run", str(self.site.app), CONNECTION, "--stream"), "run.log")

    def list_runs(self) -> Program:
        """Return the command that says how the run ended."""
        return self._operator("flwr ls", ("ls", CONNECTION, "--format", "json"), "ls.log")

    def write_flower_config(self) -> None:
        """Tell the operator's Flower where the SuperLink is, and whom to trust."""
        home = self.site.operator / "flwr"
        home.mkdir(mode=0o700)
        link = {"address": self.superlink_address, "root-certificates": str(self.site.authority)}
        write_text(home / "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}}))

    def _operator(self, name: str, arguments: tuple[str, ...], log: str) -> Program:
        folder = self.site.operator
        return self._program(name, (_script("flwr"), *arguments), folder / log, {"FLWR_HOME": folder / "flwr"})

    def _program(self, name: str, command: tuple[str, ...], log: Path, own: Mapping[str, str | Path]) -> Program:
        return Program(name, command, {**self.inherited, **{key: str(value) for key, value in own.items()}}, log)


def inherited_environment(data_dir: Path | None) -> dict[str, str]:
    """Return the environment that every program gets: this one's, but settings of Flower, Ray and ldpfl only as the demo has them.

    Flower starts its own programs by name, so their folder comes first in PATH.
    """
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith(_OURS)}
    own = {**_QUIET, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), kept.get("PATH", os.defpath)])}
    if data_dir is not None:
        own[DATA_DIR_VARIABLE] = str(data_dir)
    return {"OMP_NUM_THREADS": "1", **kept, **own}


def exports(inherited: Mapping[str, str]) -> str:
    """Return what all commands need in a shell's environment beside what it has: telemetry off, the data's place."""
    names = sorted({*_QUIET, DATA_DIR_VARIABLE, "OMP_NUM_THREADS"} & inherited.keys())
    return "".join(f"export {name}={shlex.quote(inherited[name])}\n" for name in names)


def as_typed(program: Program, inherited: Mapping[str, str]) -> str:
    """Return a program as one would type it in a shell, its own settings before the command."""
    own = {key: value for key, value in program.environment.items() if inherited.get(key) != value}
    return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in own.items()), shlex.join(program.command)])


def _script(name: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise ConfigError(f"{name} is not in {path.parent}: pip install 'ldpfl[flower]' there")
    return str(path)
