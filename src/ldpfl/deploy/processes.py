"""The commands of a deployment on this machine, with the environment of each; start them, watch them, and end all that they started."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import tomli_w

from ldpfl.data.loading import DATA_DIR_VARIABLE
from ldpfl.deploy.site import NodeSite, Site
from ldpfl.errors import ConfigError, DeploymentError
from ldpfl.util import supervisor
from ldpfl.util.files import write_text

GRACE_S = 3.0
"""Seconds that a process has to end by itself."""

_FORCED_S = 30.0
_POLL_S = 0.05
_TAIL = 12
_LONGEST_LINE = 200


@dataclass(frozen=True)
class Program:
    """What to start.

    Attributes:
        name: for people.
        command: program and arguments.
        environment: all of it; nothing is inherited.
        log: file that takes its output.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    log: Path


class Running:
    """A program that was started under a supervisor, which ends all of it with this process, however this process ends."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with program.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(GRACE_S), *program.command],
                env=dict(program.environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
            )

    @property
    def code(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._supervisor.poll()

    def check_alive(self) -> None:
        """Raise if the program has ended.

        Raises:
            DeploymentError: it has, although nobody told it to.
        """
        if self.code is not None:
            raise self.failure(f"ended with exit code {self.code}")

    def failure(self, what: str) -> DeploymentError:
        """Return the error that says what became of it, with the end of its log."""
        return DeploymentError(f"{self.program.name} {what}; its log: {self.program.log}", last_lines(self.program.log))

    def tell_to_stop(self) -> None:
        """Tell it to end, and return at once."""
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()

    def stop(self) -> None:
        """End it, and return when nothing of it runs any more."""
        self.tell_to_stop()
        try:
            self._supervisor.wait(_FORCED_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()


class Processes:
    """The processes of a deployment. On leaving the block all of them are ended, the last one first."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        """``pause`` is called between two looks at the processes; it may raise to end the wait."""
        self._pause = pause
        self._running: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def start(self, program: Program) -> Running:
        """Start ``program`` and keep it in view."""
        running = Running(program)
        self._running.append(running)
        return running

    def run(self, programs: Sequence[Program], seconds: float) -> None:
        """Run ``programs`` side by side, and return when all have ended well.

        Raises:
            DeploymentError: one ended with another exit code than 0, or not in time, or a process in view ended.
        """
        started = [Running(program) for program in programs]
        try:
            self.wait(lambda: all(one.code is not None for one in started), seconds, "the commands to end")
            for one in started:
                if one.code != 0:
                    one.check_alive()
        finally:
            for one in started:
                one.stop()

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until ``until`` holds.

        Raises:
            DeploymentError: it does not hold in time, or a process in view ended.
        """
        end = time.monotonic() + seconds
        while not until():
            self.check_alive()
            if time.monotonic() > end:
                raise DeploymentError(f"waited {seconds:g} s for {what}, which did not come")
            self._pause(_POLL_S)

    def check_alive(self) -> None:
        """Raise DeploymentError if a process in view has ended."""
        for running in self._running:
            running.check_alive()

    def stop(self) -> None:
        """End all processes."""
        for running in reversed(self._running):
            running.tell_to_stop()
        while self._running:
            self._running[-1].stop()
            self._running.pop()


def free_ports(count: int) -> tuple[int, ...]:
    """Return so many different ports of 127.0.0.1 that nobody listens on now, chosen by the system.

    Flower's programs cannot choose one themselves. Until they listen, another process may take it; then they end, and say so.
    """
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return tuple(int(one.getsockname()[1]) for one in sockets)
    finally:
        for one in sockets:
            one.close()


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the end of a log, as far as it can be shown: what the programs log on purpose, and of exceptions kind and place.

    An exception's text, and whatever else a program prints, may repeat private values: such lines stay in the file.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    shown = (_shown(without_colour(line)) for line in lines)
    return tuple(line[:_LONGEST_LINE] for line in shown if line)[-_TAIL:]


def without_colour(line: str) -> str:
    """Return ``line`` as it reads on a terminal: Flower colours its log also where there is none."""
    return _COLOUR.sub("", line)


def _shown(line: str) -> str:
    """Return what of a line may be shown."""
    printable = "".join(character if character.isprintable() else " " for character in line).rstrip()
    if _LOGGED.match(printable) or _FRAME.match(printable):
        return "" if _REQUEST in printable else printable
    raised = _RAISED.match(printable)
    return "" if raised is None else raised[1]


_REQUEST = "[uvicorn.access]"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGGED = re.compile(
    r"(?:[\dT:.Z-]+ )?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)(?:\s*:| \[[\w.]+\])"  # Flower, uvicorn
    r"|ldpfl: |cannot start |\{\"(?:event|error)\"|flower-\w+: error:|Error: "
)
_FRAME = re.compile(r' +File "[^"]+", line \d+, in ')
_RAISED = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Declined|Exhausted))(?::|$)")


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
        layers: sizes of the model's arrays, for the check of a node.
    """

    site: Site
    relay_port: int
    superlink_port: int
    node_ports: tuple[int, ...]
    inherited: Mapping[str, str] = field(repr=False)
    layers: tuple[int, ...] = ()

    @property
    def relay_url(self) -> str:
        return f"https://{HOST}:{self.relay_port}"

    @property
    def superlink_address(self) -> str:
        return f"{HOST}:{self.superlink_port}"

    def relay(self) -> Program:
        """Return the relay."""
        folder = self.site.relay
        serve = (sys.executable, "-P", "-m", "ldpfl", "relay", "serve", "--host", HOST, "--port", str(self.relay_port))
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
            "LDPFL_NODE_KEYS": self.site.node_keys,
        }
        command = (*listen, *map(str, tls), "--enable-supernode-auth", "--disable-runtime-dependency-installation")
        return self._program("SuperLink", command, folder / "superlink.log", own)

    def supernode(self, number: int) -> Program:
        """Return one of the SuperNodes."""
        node = self.site.nodes[number]
        link = (_script("flower-supernode"), "--superlink", self.superlink_address, "--root-certificates", str(self.site.authority))
        here = ("--host", HOST, "--port", str(self.node_ports[number]), "--auth-supernode-private-key", str(node.key))
        config = ("--node-config", f"partition-id={number} num-partitions={len(self.site.nodes)}")
        return self._program(node.name, (*link, *here, *config), node.log, self._of_node(node))

    def check(self, number: int) -> Program:
        """Return the command by which a node's operator checks the node, and tries one round's local work there."""
        node, site = self.site.nodes[number], self.site
        link = ("--superlink", self.superlink_address, "--superlink-ca", str(site.authority), "--node-key", str(node.key))
        layers = ("--layers", ",".join(map(str, self.layers))) if self.layers else ()
        what = ("--app", str(site.app), "--try", "--partition", str(number), *layers)
        command = (sys.executable, "-P", "-m", "ldpfl", "deploy", "check-node", *link, *what)
        return self._program(f"check of {node.name}", command, node.log.with_name("check.log"), self._of_node(node))

    def _of_node(self, node: NodeSite) -> dict[str, str | Path]:
        """Return what the operator of a node sets in the environment."""
        return {
            "FLWR_HOME": node.flower_home,
            "LDPFL_POLICY": node.policy,
            "LDPFL_BUDGET": node.budget,
            "LDPFL_RELAY": self.relay_url,
            "LDPFL_RELAY_CA": self.site.authority,
            "LDPFL_RELAY_TOKEN": node.token,
            "LDPFL_SIGNING_KEY": node.signing_key,
        }

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
