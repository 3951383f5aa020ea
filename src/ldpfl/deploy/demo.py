"""A whole deployment on one machine: SuperLink, relay and SuperNodes as processes of their own, with TLS and keys, for one run."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from ldpfl.deploy.plan import Plan
from ldpfl.deploy.processes import DeploymentError, Processes, Running, free_ports, last_lines
from ldpfl.deploy.programs import HOST, Programs, as_typed, exports, inherited_environment
from ldpfl.deploy.progress import Observer, Watch, refusals, rounds_in
from ldpfl.deploy.site import Site, equip, write_app
from ldpfl.errors import DataError
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.files import write_text
from ldpfl.privacy.budget_file import Books, read_books

COMPLETED = "finished:completed"

_UP_S = 90.0
_ROUND_S = 240.0
_COMMAND_S = 90.0


@dataclass(frozen=True)
class Relayed:
    """What the relay counted.

    Attributes:
        released: log entries of the rounds that it mixed and handed out.
        terms: log entries of those that it opened.
        received, handed_out: bytes.
    """

    released: tuple[dict[str, Any], ...]
    terms: tuple[dict[str, Any], ...]
    received: int
    handed_out: int


@dataclass(frozen=True)
class Outcome:
    """How a demo ended.

    Attributes:
        status: of the run, as Flower has it.
        result: figures of the run, as ``result.json`` has them.
        books: by node, what its budget was charged.
    """

    site: Site
    status: str
    result: dict[str, Any]
    relayed: Relayed
    books: Mapping[str, Books]


def run_demo(plan: Plan, site: Site, observer: Observer, pause: Callable[[float], None]) -> Outcome:
    """Deploy ``plan`` in ``site``, wait for the end of its run, and stop everything that was started, whatever happens.

    ``pause`` is called while waiting, and may raise to end it.

    Raises:
        DeploymentError: a process ended or did not answer, a node refused, or Flower says that the run failed.
    """
    observer.step(f"certificates, keys, tokens, policies and budgets of {plan.clients} nodes")
    equip(site, plan.policy)
    write_app(site, plan)
    relay_port, superlink_port, *node_ports = free_ports(2 + plan.clients)
    inherited = inherited_environment(plan.data_dir)
    programs = Programs(site, relay_port, superlink_port, tuple(node_ports), inherited)
    programs.write_flower_config()
    _write_commands(programs, inherited)
    with Processes(pause) as processes:
        return _deploy(plan, programs, processes, observer)


def _deploy(plan: Plan, programs: Programs, processes: Processes, observer: Observer) -> Outcome:
    site = programs.site
    observer.step(f"relay on {HOST}:{programs.relay_port} and SuperLink on {programs.superlink_address}, both with TLS")
    processes.start(programs.relay())
    processes.start(programs.superlink())
    with httpx.Client(verify=ssl.create_default_context(cafile=str(site.authority)), trust_env=False, timeout=5.0) as http:
        for url in (programs.relay_url, f"https://{programs.superlink_address}"):
            processes.wait(partial(_healthy, http, url), _UP_S, f"an answer of {url}/health")
        observer.step(f"registering the nodes' public keys; starting {plan.clients} SuperNodes; submitting the run")
        processes.run([programs.register(node) for node in site.nodes], _COMMAND_S)
        watch = Watch(site, _node_names(site), observer)
        for number in range(plan.clients):
            processes.start(programs.supernode(number))
        _follow(plan, Running(programs.submit()), processes, watch)
        observer.step("asking Flower how the run ended")
        status = _status(programs, processes)
        _require_success(plan, site, status)
        relayed = _relayed(site, http.get(f"{programs.relay_url}/metrics").text)
    observer.step("stopping everything")
    result = RunFolder(site.run).result()
    if result is None:
        raise DataError(f"the run has completed, but {site.run} holds no result")
    return Outcome(site, status, result, relayed, {node.name: read_books(node.budget) for node in site.nodes})


def _healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def _node_names(site: Site) -> dict[int, str]:
    """Return by Flower's number what a node is called here."""
    names = {}
    for node in site.nodes:
        text = (site.operator / f"register-{node.name}.log").read_text(encoding="utf-8", errors="replace")
        number = re.search(r'"node-id":\s*"?(\d+)', text)
        if number is not None:
            names[int(number[1])] = node.name
    return names


def _follow(plan: Plan, submitted: Running, processes: Processes, watch: Watch) -> None:
    """Wait until Flower has nothing more to tell of the run."""

    def ended() -> bool:
        watch.look()
        _require_willing(watch.site)
        return submitted.code is not None

    try:
        processes.wait(ended, _UP_S + plan.rounds * _ROUND_S, "the run to end")
    finally:
        submitted.stop()
    watch.look()
    if submitted.code != 0:
        raise submitted.failure(f"ended with exit code {submitted.code}")


def _require_willing(site: Site) -> None:
    for node in site.nodes:
        for reason in refusals(node):
            raise DeploymentError(f"{node.name} sent no report; its log says why: {node.log}", [reason])


def _status(programs: Programs, processes: Processes) -> str:
    """Return how Flower says that the run ended; ``flwr run`` itself ends with 0 whatever happens."""
    listing = programs.list_runs()
    processes.run([listing], _COMMAND_S)
    text = listing.log.read_text(encoding="utf-8", errors="replace")
    try:
        (run,) = json.loads(text[text.index("{") :])["runs"]
        return str(run["status"])
    except (ValueError, KeyError, TypeError):
        raise DeploymentError(f"what flwr ls says cannot be read; it is in {listing.log}") from None


def _require_success(plan: Plan, site: Site, status: str) -> None:
    if status != COMPLETED:
        log = site.superlink / "superlink.log"
        raise DeploymentError(f"Flower says that the run is {status}, expected {COMPLETED}; the aggregator's log: {log}", last_lines(log))
    rounds = rounds_in(site)
    for number in range(1, plan.rounds + 1):
        reports = rounds[number - 1]["clients"] if number <= len(rounds) else 0
        if reports != plan.clients:
            log = site.superlink / "superlink.log"
            raise DeploymentError(
                f"round {number} has {reports} of {plan.clients} reports; the aggregator's log says why: {log}", last_lines(log)
            )


def _relayed(site: Site, metrics: str) -> Relayed:
    lines = (site.relay / "relay.log").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    opened, released = (tuple(event for event in events if event.get("event") == name) for name in ("round_opened", "round_released"))
    counters = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#"))
    return Relayed(
        released,
        opened,
        int(counters["ldpfl_relay_received_bytes_total"]),
        int(counters["ldpfl_relay_handed_out_bytes_total"]),
    )


def _write_commands(programs: Programs, inherited: Mapping[str, str]) -> None:
    """Write down what is started, as one would type it, for whoever wants to do it on several machines."""
    site = programs.site
    order = [
        programs.relay(),
        programs.superlink(),
        *(programs.register(node) for node in site.nodes),
        *(programs.supernode(number) for number in range(len(site.nodes))),
        programs.submit(),
        programs.list_runs(),
    ]
    parts = [f"# for all\n{exports(inherited)}", *(f"# {program.name}\n{as_typed(program, inherited)}\n" for program in order)]
    write_text(site.path / "commands.txt", "\n".join(parts))
