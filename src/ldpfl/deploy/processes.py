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
from ldpfl.deploy.demo_files import NodeSite, Site
from ldpfl.errors import ConfigError, DeploymentError
from ldpfl.util import supervisor
from ldpfl.util.files import write_text

GRACE_S = 3.0
"""Seconds that a process has to end by itself."""

_SUPERVISOR_S = 30.0  # for the supervisor to end a process, by force after GRACE_S
_POLL_S = 0.05
_TAIL_LINES, _MAX_LINE_LENGTH = 12, 200  # of a log, in an error's text


@dataclass(frozen=True)
class Program:
    """A command to start.

    Attributes:
        name: name of the program in messages.
        command: program and arguments.
        environment: the whole environment; nothing is inherited.
        log: file that takes its output.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    log: Path


class Running:
    """A program that was started under a supervisor. The supervisor ends all its processes when this process ends, for whatever reason."""

    def __init__(self, program: Program) -> None:
        self.program = program
        with program.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(GRACE_S), *program.command],  # -I: it imports nothing from PYTHONPATH
                env=dict(program.environment),
                stdin=subprocess.PIPE,  # the supervisor ends the program when this pipe is closed
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
            )

    @property
    def code(self) -> int | None:
        """Exit code, or None while the program runs."""
        return self._supervisor.poll()

    def check_alive(self) -> None:
        """Raise a :class:`DeploymentError` if the program has ended."""
        if self.code is not None:
            raise self.failure(f"ended with exit code {self.code}")

    def failure(self, problem: str) -> DeploymentError:
        """Return an error with the ``problem``, such as "ended with exit code 1", and the end of the program's log."""
        return DeploymentError(f"{self.program.name} {problem}; its log: {self.program.log}", last_lines(self.program.log))

    def tell_to_stop(self) -> None:
        """Tell the program to end, and return at once."""
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()

    def stop(self) -> None:
        """End the program, and return when none of its processes runs any more."""
        self.tell_to_stop()
        try:
            self._supervisor.wait(_SUPERVISOR_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()


class Processes:
    """The background programs of a deployment. On leaving the block all of them are ended, the last one first."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        """``pause`` waits a number of seconds between two checks of the programs; it may raise to end the wait."""
        self._pause = pause
        self._running: list[Running] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def start(self, program: Program) -> Running:
        """Start ``program`` as a background program: :meth:`run` and :meth:`wait` raise an error if it ends."""
        running = Running(program)
        self._running.append(running)
        return running

    def run(self, programs: Sequence[Program], seconds: float) -> None:
        """Run ``programs`` side by side, and return when all have ended with exit code 0.

        Raises:
            DeploymentError: one of ``programs`` ended with another exit code than 0, or not in time; or a background program ended.
        """
        started = [Running(program) for program in programs]
        try:
            self.wait(lambda: all(running.code is not None for running in started), seconds, "the commands to end")
            for running in started:
                if running.code != 0:
                    raise running.failure(f"ended with exit code {running.code}")
        finally:
            for running in started:
                running.stop()

    def wait(self, is_over: Callable[[], bool], seconds: float, awaited: str) -> None:
        """Wait until ``is_over`` returns True. ``awaited`` names the awaited event in an error.

        Raises:
            DeploymentError: ``seconds`` have passed, or a background program ended.
        """
        end = time.monotonic() + seconds
        while not is_over():
            self.check_alive()
            if time.monotonic() > end:
                logs = [str(running.program.log) for running in self._running]
                raise DeploymentError(f"waited {seconds:g} s in vain for {awaited}; look into the programs' logs: {', '.join(logs)}")
            self._pause(_POLL_S)

    def check_alive(self) -> None:
        """Raise a :class:`DeploymentError` if a background program has ended."""
        for running in self._running:
            running.check_alive()

    def stop(self) -> None:
        """End all background programs. All are told first, so that they end at the same time."""
        for running in reversed(self._running):
            running.tell_to_stop()
        while self._running:  # a program is removed once it has ended, so that a call after an interruption ends the others
            self._running[-1].stop()
            self._running.pop()


def free_ports(count: int) -> tuple[int, ...]:
    """Return ``count`` different free ports of 127.0.0.1, chosen by the system.

    Flower's programs cannot choose a port themselves. If another process takes a port before they listen on it, they end with an error.
    """
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return tuple(int(listener.getsockname()[1]) for listener in sockets)
    finally:
        for listener in sockets:
            listener.close()


def last_lines(log: Path) -> tuple[str, ...]:
    """Return the last lines of a log without private values: lines that a logger wrote, and kind and place of exceptions.

    Exceptions' texts, and other lines that a program prints, may repeat private values. They are left out.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    shareable = (_shareable_part(without_colour(line)) for line in lines)
    return tuple(line[:_MAX_LINE_LENGTH] for line in shareable if line)[-_TAIL_LINES:]


def without_colour(line: str) -> str:
    """Return ``line`` without codes for colours, which Flower writes to files as well."""
    return _COLOUR_CODE.sub("", line)


def _shareable_part(line: str) -> str:
    """Return the part of a log's line that holds no private value; empty if there is none, or if the line is about an HTTP request."""
    text = "".join(character if character.isprintable() else " " for character in line).rstrip()
    if _LOG_LINE.match(text) or _TRACEBACK_LINE.match(text):
        return "" if _ACCESS_LOG in text else text
    exception = _EXCEPTION_LINE.match(text)
    return "" if exception is None else exception[1]


_ACCESS_LOG = "[uvicorn.access]"
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_LOG_LINE = re.compile(
    r"(?:[\dT:.Z-]+ )?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)(?:\s*:| \[[\w.]+\])"  # Flower, uvicorn
    r"|ldpfl: |cannot start |\{\"(?:event|error)\"|flower-\w+: error:|Error: "
)
_TRACEBACK_LINE = re.compile(r' +File "[^"]+", line \d+, in ')
_EXCEPTION_LINE = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Declined|Exhausted))(?::|$)")


HOST = "127.0.0.1"
CONNECTION = "demo"
"""Name of the SuperLink in the operator's Flower config."""

_TASK_POLL_S = "0.25"
_FIXED_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _TASK_POLL_S,
    "PYTHONUNBUFFERED": "1",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
_FILTERED_PREFIXES = ("FLWR_", "LDPFL_", "RAY_")  # of variables that programs do not inherit, except _KEPT_VARIABLES
_KEPT_VARIABLES = ("LDPFL_CACHE_DIR", DATA_DIR_VARIABLE)


@dataclass(frozen=True)
class Programs:
    """The programs of a deployment in ``site``.

    Attributes:
        relay_port, superlink_port: ports of the relay and of the SuperLink.
        node_ports: port of each SuperNode, for its own processes on the same machine.
        inherited: environment that all programs get.
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
        """Return the command that starts the relay."""
        folder = self.site.relay
        serve = (sys.executable, "-P", "-m", "ldpfl", "relay", "serve", "--host", HOST, "--port", str(self.relay_port))
        tls = ("--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key"))
        return self._program("relay", (*serve, *tls), folder / "relay.log", {"LDPFL_RELAY_STORE": str(self.site.relay_store)})

    def superlink(self) -> Program:
        """Return the command that starts the SuperLink, whose ServerApp is the aggregator."""
        folder = self.site.superlink
        listen = (_script_path("flower-superlink"), "--host", HOST, "--port", str(self.superlink_port))
        tls = ("--ssl-certfile", folder / "server.crt", "--ssl-keyfile", folder / "server.key", "--ssl-ca-certfile", self.site.authority)
        settings: dict[str, str | Path] = {
            "FLWR_HOME": folder / "flwr",
            "LDPFL_RELAY": self.relay_url,
            "LDPFL_RELAY_CA": self.site.authority,
            "LDPFL_AGGREGATOR_TOKEN": self.site.aggregator_token,
            "LDPFL_AGGREGATOR_KEY": self.site.aggregator_key,
            "LDPFL_NODE_KEYS": self.site.node_keys,
        }
        command = (*listen, *map(str, tls), "--enable-supernode-auth", "--disable-runtime-dependency-installation")
        return self._program("SuperLink", command, folder / "superlink.log", settings)

    def supernode(self, number: int) -> Program:
        """Return the command that starts the SuperNode with this ``number``, from 0."""
        node = self.site.nodes[number]
        link = (_script_path("flower-supernode"), "--superlink", self.superlink_address, "--root-certificates", str(self.site.authority))
        local = ("--host", HOST, "--port", str(self.node_ports[number]), "--auth-supernode-private-key", str(node.key))
        config = ("--node-config", f"partition-id={number} num-partitions={len(self.site.nodes)}")
        return self._program(node.name, (*link, *local, *config), node.log, self._node_environment(node))

    def check(self, number: int) -> Program:
        """Return the command by which a node's operator checks the node, and tries one round's local work there."""
        node, site = self.site.nodes[number], self.site
        link = ("--superlink", self.superlink_address, "--superlink-ca", str(site.authority), "--node-key", str(node.key))
        layers = ("--layers", ",".join(map(str, self.layers))) if self.layers else ()
        tried = ("--app", str(site.app), "--try", "--partition", str(number), *layers)
        command = (sys.executable, "-P", "-m", "ldpfl", "deploy", "check-node", *link, *tried)
        return self._program(f"check of {node.name}", command, node.log.with_name("check.log"), self._node_environment(node))

    def _node_environment(self, node: NodeSite) -> dict[str, str | Path]:
        """Return the settings that a node's operator makes in the environment."""
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
        return self._operator_program(f"registration of {node.name}", command, f"register-{node.name}.log")

    def submit(self) -> Program:
        """Return the command that submits the run and follows it to its end."""
        return self._operator_program("flwr run", ("run", str(self.site.app), CONNECTION, "--stream"), "run.log")

    def list_runs(self) -> Program:
        """Return the command that says how the run ended."""
        return self._operator_program("flwr ls", ("ls", CONNECTION, "--format", "json"), "ls.log")

    def write_flower_config(self) -> None:
        """Write the operator's Flower config: the SuperLink's address, and the certificate authority to trust."""
        home = self.site.operator / "flwr"
        home.mkdir(mode=0o700)
        link = {"address": self.superlink_address, "root-certificates": str(self.site.authority)}
        write_text(home / "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}}))

    def _operator_program(self, name: str, arguments: tuple[str, ...], log: str) -> Program:
        """Return a ``flwr`` command of the operator who submits the run."""
        folder = self.site.operator
        return self._program(name, (_script_path("flwr"), *arguments), folder / log, {"FLWR_HOME": folder / "flwr"})

    def _program(self, name: str, command: tuple[str, ...], log: Path, settings: Mapping[str, str | Path]) -> Program:
        """Return a program with its own ``settings`` beside the inherited environment."""
        return Program(name, command, {**self.inherited, **{key: str(value) for key, value in settings.items()}}, log)


def inherited_environment(data_dir: Path | None) -> dict[str, str]:
    """Return the environment that every program gets: this process's, with the demo's own settings of Flower, Ray and ldpfl.

    Flower starts its own programs by name, so their folder comes first in PATH.
    """
    kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES or not name.startswith(_FILTERED_PREFIXES)}
    fixed = {**_FIXED_ENVIRONMENT, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), kept.get("PATH", os.defpath)])}
    if data_dir is not None:
        fixed[DATA_DIR_VARIABLE] = str(data_dir)
    return {"OMP_NUM_THREADS": "1", **kept, **fixed}  # a number of threads in this process's environment takes precedence over 1


def export_commands(inherited: Mapping[str, str]) -> str:
    """Return shell commands that export the settings which all programs share, such as the folder of the data.

    PATH begins with the folder of Flower's commands, which start each other by name.
    """
    names = sorted({*_FIXED_ENVIRONMENT, DATA_DIR_VARIABLE, "OMP_NUM_THREADS"} & inherited.keys())
    path = f'export PATH={shlex.quote(sysconfig.get_path("scripts"))}:"$PATH"\n'
    return path + "".join(f"export {name}={shlex.quote(inherited[name])}\n" for name in names)


def shell_line(program: Program, inherited: Mapping[str, str]) -> str:
    """Return ``program`` as a line for a shell: the settings that only this program gets, then the command."""
    settings = {key: value for key, value in program.environment.items() if inherited.get(key) != value}
    return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in settings.items()), shlex.join(program.command)])


def _script_path(name: str) -> str:
    """Return the path of a command that is installed in this Python's environment."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise ConfigError(f"the command {name} is not in {path.parent}: run pip install 'ldpfl[flower]' in that environment")
    return str(path)
