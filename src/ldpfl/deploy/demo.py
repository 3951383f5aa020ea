"""Deploy a trial, follow its rounds by the files that its parties write, and say how it ended."""

from __future__ import annotations

import json
import re
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import httpx

from ldpfl.deploy.demo_files import NodeSite, Site, write_all_parties_files
from ldpfl.deploy.demo_settings import Trial, settings_of
from ldpfl.deploy.processes import (
    HOST,
    Processes,
    Programs,
    Running,
    export_commands,
    free_ports,
    inherited_environment,
    last_lines,
    shell_line,
    without_colour,
)
from ldpfl.errors import DataError, DeploymentError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.record_sums import is_evaluated
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower.confined_process import TOO_LONG
from ldpfl.flower.new_app import write_app
from ldpfl.flower.ready_server import ROUNDS_OVER
from ldpfl.flower.round_kinds import PlannedRound, last_round, planned_round
from ldpfl.privacy.budget_file import Books, read_books
from ldpfl.util.files import write_text

COMPLETED = "finished:completed"

_MAX_START_S = 90.0
_MAX_ROUND_S = 240.0
_MAX_COMMAND_S = 90.0
_MAX_DETAILS = 500  # characters


@dataclass(frozen=True)
class Relayed:
    """What the relay logged and counted.

    Attributes:
        released: log entries of the rounds that it mixed and handed out.
        terms: log entries of the rounds that it opened.
        received, handed_out: bytes of uploads, and of mixed records.
    """

    released: tuple[dict[str, Any], ...]
    terms: tuple[dict[str, Any], ...]
    received: int
    handed_out: int


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, as Flower says. The exit code of ``flwr run`` does not tell: it is 0 even if the run failed.

    Attributes:
        status: such as "finished:completed".
        details: why it failed, as far as Flower knows: the last error of the ServerApp.
    """

    status: str
    details: str

    @classmethod
    def read(cls, listing: Path) -> RunEnd:
        """Read how a run ended from ``listing``, a file with the output of ``flwr ls --format json``.

        Raises:
            DeploymentError: the text cannot be read, or lists not exactly one run.
        """
        text = listing.read_text(encoding="utf-8", errors="replace")
        try:
            (run,) = json.loads(text[text.index("{") :])["runs"]  # flwr may print other lines before the JSON
            return cls(str(run["status"]), str(run["status-details"]))
        except (ValueError, KeyError, TypeError):
            raise DeploymentError(f"the output of flwr ls in {listing} cannot be read: expected one run in JSON") from None

    def check_completed(self, log: Path) -> None:
        """Raise a :class:`DeploymentError`, with Flower's details and the end of the aggregator's ``log``, unless the run was completed."""
        if self.status != COMPLETED:
            problem = f"Flower says that the run is {self.status}, expected {COMPLETED}. Details: {self.details[:_MAX_DETAILS]}"
            raise DeploymentError(f"{problem}; the aggregator's log: {log}", last_lines(log))


@dataclass(frozen=True)
class DemoOutcome:
    """How a demo ended.

    Attributes:
        config: settings of the run.
        status: Flower's status of the run.
        result: figures of the run, as in ``result.json``.
        books: for each node's name, what its budget was charged.
    """

    site: Site
    config: RunConfig
    status: str
    result: dict[str, Any]
    relayed: Relayed
    books: Mapping[str, Books]


def run_demo(trial: Trial, site: Site, observer: DemoObserver, pause: Callable[[float], None]) -> DemoOutcome:
    """Deploy ``trial`` in ``site``, wait for the end of its run, and stop everything that was started, whatever happens.

    ``observer`` is told what happens. ``pause`` is called with a number of seconds to wait, and may raise to end the demo.

    Raises:
        DeploymentError: a process ended or did not answer, a node refused, or Flower says that the run failed.
    """
    observer.step(f"certificates, keys, tokens, policies and budgets of {trial.clients} nodes")
    write_all_parties_files(site, trial.policy)
    write_app(site.app, settings_of(site, trial))
    relay_port, superlink_port, *node_ports = free_ports(2 + trial.clients)
    inherited = inherited_environment(trial.data_dir)
    programs = Programs(site, relay_port, superlink_port, tuple(node_ports), inherited, trial.layers)
    programs.write_flower_config()
    _write_commands(programs, inherited)
    with Processes(pause) as processes:
        return _deploy(trial, programs, processes, observer)


def _deploy(trial: Trial, programs: Programs, processes: Processes, observer: DemoObserver) -> DemoOutcome:
    """Start all programs, follow the run to its end, check that it is complete, and return its outcome.

    ``processes`` ends the programs when the caller leaves its block. Errors are those of :func:`run_demo`.
    """
    site = programs.site
    observer.step(f"relay on {HOST}:{programs.relay_port} and SuperLink on {programs.superlink_address}, both with TLS")
    processes.start(programs.relay())
    processes.start(programs.superlink())
    with httpx.Client(verify=ssl.create_default_context(cafile=str(site.authority)), trust_env=False, timeout=5.0) as http:
        for url in (programs.relay_url, f"https://{programs.superlink_address}"):
            processes.wait(partial(_is_healthy, http, url), _MAX_START_S, f"an answer of {url}/health")
        observer.step(f"checking {site.nodes[0].name}, with one round's local work on trial: ldpfl deploy check-node --try")
        processes.run([programs.check(0)], _MAX_COMMAND_S + trial.reply_s)  # one node will do, because all have the same settings
        observer.step(f"registering the nodes' public keys; starting {trial.clients} SuperNodes; submitting the run")
        processes.run([programs.register(node) for node in site.nodes], _MAX_COMMAND_S)
        watch = Watch(site, _node_names(site), observer, trial.config)
        for number in range(trial.clients):
            processes.start(programs.supernode(number))
        _follow(trial, Running(programs.submit()), processes, watch)
        observer.step("asking Flower how the run ended")
        listing = programs.list_runs()
        processes.run([listing], _MAX_COMMAND_S)
        run_end = RunEnd.read(listing.log)
        run_end.check_completed(site.superlink / "superlink.log")
        _check_reports(trial, site)
        watch.check_trained(trial.rounds)
        relayed = _read_relayed(site, http.get(f"{programs.relay_url}/metrics").text)
    observer.step("stopping everything")
    result = RunFolder(site.run).result()
    if result is None:
        raise DataError(f"the run has completed, but {site.run} holds no result")
    if is_evaluated(trial.config) and not result["at_clients"]:
        log = site.superlink / "superlink.log"
        raise DeploymentError(
            f"nodes measured nothing on the records that they hold back; the aggregator's log says why: {log}", last_lines(log)
        )
    return DemoOutcome(site, trial.config, run_end.status, result, relayed, {node.name: read_books(node.budget) for node in site.nodes})


def _is_healthy(http: httpx.Client, url: str) -> bool:
    """Tell whether the server at ``url`` answers that it works."""
    try:
        return http.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def _node_names(site: Site) -> dict[int, str]:
    """Return the name of each node by the number that Flower gave it when it was registered."""
    names = {}
    for node in site.nodes:
        text = (site.operator / f"register-{node.name}.log").read_text(encoding="utf-8", errors="replace")
        number = re.search(r'"node-id":\s*"?(\d+)', text)
        if number is not None:
            names[int(number[1])] = node.name
    return names


def _follow(trial: Trial, submitted: Running, processes: Processes, watch: Watch) -> None:
    """Wait until ``submitted``, the command that follows the run, has ended. ``watch`` tells its observer what happens meanwhile.

    Raises:
        DeploymentError: a node has refused, the ServerApp cannot start, a program has ended, the run takes too long, or the command has
            failed.
    """

    def has_ended() -> bool:
        """Report news to the observer. Return whether the run has ended. Raise if it cannot go on."""
        watch.tell_news()
        _check_no_refusal(watch.site)
        check_server_app_starts(watch.site)
        return submitted.code is not None

    try:
        processes.wait(has_ended, _MAX_START_S + trial.rounds * (_MAX_ROUND_S + trial.reply_s), "the run to end")
    finally:
        submitted.stop()
    watch.tell_news()  # of what came after the last look, while the run ended
    if submitted.code != 0:
        raise submitted.failure(f"ended with exit code {submitted.code}")


def _check_no_refusal(site: Site) -> None:
    """Raise if the log of any node says that the node sent no report."""
    for node in site.nodes:
        for reason in refusal_reasons(node):
            raise DeploymentError(f"{node.name} sent no report; its log says why: {node.log}", [reason])


def check_server_app_starts(site: Site) -> None:
    """Raise if Flower has rejected the token of the ServerApp's process :data:`_MAX_REJECTIONS` times before the first round.

    Flower gives each process a token that expires if the process takes too long to start, and then starts another process, for ever.

    Raises:
        DeploymentError: the ServerApp's token was rejected this often.
    """
    log = site.superlink / "superlink.log"
    if RunFolder(site.run).participation_path.exists():  # the ServerApp has started
        return
    rejections = sum(_TOKEN_REJECTED.search(line) is not None for line in _lines_if_any(log))
    if rejections >= _MAX_REJECTIONS:
        raise DeploymentError(
            f"Flower has rejected the ServerApp's token {rejections} times, because this machine starts the app's process more slowly than "
            f"the token lives: end other programs, or use a faster machine; the SuperLink's log: {log}",
            last_lines(log),
        )


def _check_reports(trial: Trial, site: Site) -> None:
    """Raise unless each round has a report of each client."""
    rounds = finished_rounds(site)
    for number in range(1, trial.rounds + 1):
        reports = rounds[number - 1]["clients"] if number <= len(rounds) else 0
        if reports != trial.clients:
            log = site.superlink / "superlink.log"
            raise DeploymentError(
                f"round {number} has {reports} of {trial.clients} reports; the aggregator's log says why: {log}", last_lines(log)
            )


def _read_relayed(site: Site, metrics: str) -> Relayed:
    """Return the rounds in the relay's log, and the bytes in its ``metrics``, a text in Prometheus' format.

    In the log, each line of JSON is an event; in the metrics, a line has a counter's name, a blank and its value.
    """
    lines = (site.relay / "relay.log").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    opened = tuple(event for event in events if event.get("event") == "round_opened")
    released = tuple(event for event in events if event.get("event") == "round_released")
    counters = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#"))
    return Relayed(
        released,
        opened,
        int(counters["ldpfl_relay_received_bytes_total"]),
        int(counters["ldpfl_relay_handed_out_bytes_total"]),
    )


def _write_commands(programs: Programs, inherited: Mapping[str, str]) -> None:
    """Write all commands of the demo as lines for a shell, as a template for a deployment on several machines."""
    site = programs.site
    order = [
        programs.relay(),
        programs.superlink(),
        programs.check(0),
        *(programs.register(node) for node in site.nodes),
        *(programs.supernode(number) for number in range(len(site.nodes))),
        programs.submit(),
        programs.list_runs(),
    ]
    parts = [f"# for all\n{export_commands(inherited)}", *(f"# {program.name}\n{shell_line(program, inherited)}\n" for program in order)]
    write_text(site.path / "commands.txt", "\n".join(parts))


class DemoObserver(Protocol):
    """Receives the events of a demo."""

    def step(self, text: str) -> None:
        """A step of the demo begins, described by ``text``."""
        ...

    def asked(self, round_: PlannedRound, names: tuple[str, ...]) -> None:
        """The nodes with these names are asked to take part in a round."""
        ...

    def round_done(self, round_: int, reports: int, accuracy: float) -> None:
        """A round is over, with so many reports and this accuracy of the model."""
        ...


@dataclass
class Watch:
    """Reads the files of a running deployment, and tells an observer what is new in them.

    Attributes:
        names: name of each node, by its number at Flower.
        config: settings of the run.
    """

    site: Site
    names: Mapping[int, str]
    observer: DemoObserver
    config: RunConfig
    _replacements_told: Counter[str] = field(default_factory=Counter)
    _late_nodes: Counter[int] = field(default_factory=Counter)  # by round
    _rounds_asked: int = 0
    _rounds_told: int = 0
    _end_told: bool = False

    def tell_news(self) -> None:
        """Tell the observer what has happened since the last call: late nodes, finished rounds, the next round, the end of the rounds."""
        for node in self.site.nodes:
            for reason in islice(replacement_reasons(node), self._replacements_told[node.name], None):  # skip those told before
                self._tell_replacement(node, reason)
        participation = self._read_participation()  # read first, so that finished rounds are told before the next one
        for metrics in finished_rounds(self.site)[self._rounds_told :]:
            self._rounds_told += 1
            self.observer.round_done(metrics["round"], metrics["clients"], metrics["score"])
        if participation is not None and participation.begun > self._rounds_asked:
            self._rounds_asked = participation.begun
            # The demo asks all nodes in each round, so a node that is asked now has been asked in every round.
            names = (self.names.get(node, str(node)) for node, rounds in participation.rounds.items() if rounds == self._rounds_asked)
            self.observer.asked(planned_round(self.config, self._rounds_asked), tuple(sorted(names)))
        if not self._end_told and any(ROUNDS_OVER in line for line in _lines_if_any(self.site.operator / "run.log")):
            self._end_told = True
            self.observer.step("the rounds are over; the aggregator computes the figures and the guarantee of the run")

    def _tell_replacement(self, node: NodeSite, reason: str) -> None:
        """Tell why ``node`` reported no change. If it was too slow, count it, and tell if no node was in time in that round."""
        self._replacements_told[node.name] += 1
        self.observer.step(f"{node.name}: {reason}")
        late = _LATE_REASON.match(reason)
        if late is not None:
            round_number = int(late[1])
            self._late_nodes[round_number] += 1
            if self._is_lost(round_number):
                self.observer.step(f"round {round_number}: no node has trained in time: {_TOO_SLOW}")

    def check_trained(self, rounds: int) -> None:
        """Raise if no node has trained in time in any of the run's ``rounds`` training rounds."""
        numbers = range(1, last_round(self.config, rounds) + 1)
        if all(self._is_lost(number) for number in numbers if planned_round(self.config, number).is_training):
            raise DeploymentError(f"no round has trained the model, because all nodes took too long: {_TOO_SLOW}")

    def _is_lost(self, number: int) -> bool:
        """Whether all nodes have reported no change in this round, because they took too long to train."""
        return self._late_nodes[number] == len(self.site.nodes)

    def _read_participation(self) -> Participation | None:
        """Return the participation that the aggregator wrote last; None if there is no readable file yet."""
        path = RunFolder(self.site.run).participation_path
        try:
            return Participation.load(path) if path.exists() else None
        except DataError:
            return None


def finished_rounds(site: Site) -> list[dict[str, Any]]:
    """Return the figures of each finished round."""
    path = RunFolder(site.run).metrics_path
    if not path.exists():
        return []
    *complete_lines, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last line break is empty, or is being written
    return [json.loads(line) for line in complete_lines]


def refusal_reasons(node: NodeSite) -> Iterator[str]:
    """Yield the reasons why a node sent no report, from its log. They hold no private value."""
    return _matches_in_log(node, _REFUSAL_LINE)


def replacement_reasons(node: NodeSite) -> Iterator[str]:
    """Yield the reasons why a node reported no change instead of what it trained, from its log."""
    return _matches_in_log(node, _REPLACEMENT_LINE)


def _matches_in_log(node: NodeSite, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the first group of each line of the node's log that ``pattern`` matches."""
    matches = (pattern.match(without_colour(line)) for line in _lines_if_any(node.log))
    return (match[1] for match in matches if match is not None)


def _lines_if_any(path: Path) -> list[str]:
    """Return the lines of a file, none if the file does not exist."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


_REFUSAL_LINE = re.compile(r"(?:WARN|WARNING|ERROR)\s*:\s*((?:declined|failed|would decline|not answered): .*)")
_REPLACEMENT_LINE = re.compile(r"ERROR\s*:\s*replaced: (.*)")
_TOKEN_REJECTED = re.compile(r"/runtime/pull-task-input\b.* 401\b")
_MAX_REJECTIONS = 3
_LATE_REASON = re.compile(rf"round (\d+) .*{TOO_LONG}")
_TOO_SLOW = "this machine is too slow for so many nodes at once. Give fewer --clients, or a longer --reply-s"
