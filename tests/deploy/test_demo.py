"""A whole deployment on loopback, as a user starts it: TLS, node keys, relay, policies, budgets, and nothing left at the end."""

from __future__ import annotations

import io
import json
import re
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from ldpfl.cli.demo_display import Display, print_outcome
from ldpfl.data import load
from ldpfl.deploy.demo import COMPLETED, run_demo
from ldpfl.deploy.demo_files import Site
from ldpfl.deploy.demo_settings import trial_of
from ldpfl.experiments.build import build, choose_device
from ldpfl.privacy.budget_file import read_charges

MARKER = "A_TEST_OF_THE_DEMO"
CLIENTS, ROUNDS = 2, 2
CHANGES = (
    "data.name=mnist",
    "model.name=logistic-regression",
    "mechanism.epsilon=8",
    "training.learning_rate=0.05",
    "ranges.radius=0.02",
)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_deployment_trains_privately_and_leaves_nothing(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARKER, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trial, out = trial_of(CLIENTS, ROUNDS, CHANGES, tiny_data), io.StringIO()
    site = Site.make(tmp_path / "demo", trial.clients)
    with Display(Console(file=out, width=160), ROUNDS) as display:
        outcome = run_demo(trial, site, display, time.sleep)
    assert left_over(str(tmp_path)) == []
    assert not [port for port in ports_of(site) if is_listening(port)]

    assert outcome.status == COMPLETED
    weights = outcome.result["weights"]
    records = -(-weights // 16)
    assert [(event["round"], event["uploads"], event["incomplete"]) for event in outcome.relayed.released] == [(1, 2, 0), (2, 2, 0)]
    assert {event["records_per_upload"] for event in outcome.relayed.terms} == {records}
    assert outcome.relayed.received == outcome.relayed.handed_out == ROUNDS * CLIENTS * records * 64

    for node in site.nodes:
        charges = read_charges(node.budget)
        assert [(charge.round, charge.transport, charge.cohort, charge.release.units) for charge in charges] == [
            (number, "relay", CLIENTS, weights) for number in (1, 2)
        ]
    model = load_file(site.run / "model.safetensors")
    federation, start = build(trial.config, load("mnist", tiny_data), choose_device("cpu"))
    trained = federation.task.layout.flatten({name: model[name] for name in federation.task.layout.names})
    moved = (trained - start.state.weights).abs().max()
    assert moved > 0
    assert torch.isfinite(trained).all()
    assert outcome.result["score"] > 0.3  # chance is 0.1

    ledger = json.loads((site.run / "ledger.json").read_text())
    assert "ideal-shuffler" in json.dumps(ledger)
    print_outcome(Console(file=out, width=160), outcome)
    told = out.getvalue()
    for text in (
        "round 1/2: asked node-0, node-1",
        "round 2/2: 2 reports",
        "one client, whole run",
        "charged for 2 reports",
        "what each party saw",
    ):
        assert text in told


def left_over(folder: str) -> list[str]:
    """Return trial still runs with this test's mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != psutil.Process().pid and process.environ().get(MARKER) == folder:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def ports_of(site: Site) -> list[int]:
    ports = [int(port) for port in re.findall(r"--port (\d+)", (site.path / "commands.txt").read_text())]
    assert len(ports) == 2 + CLIENTS
    return ports


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
