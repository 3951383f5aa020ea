"""What a demo tells while it runs is what the aggregator has written, and a node's refusal is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ldpfl.deploy.demo import RunEnd, Watch, check_server_app_starts, refusal_reasons
from ldpfl.deploy.demo_files import Site
from ldpfl.errors import DeploymentError
from ldpfl.experiments import RunConfig
from ldpfl.experiments.nodes_asked import Participation
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.flower.round_kinds import PlannedRound


class Heard:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def step(self, text: str) -> None:
        self.told.append((text,))

    def asked(self, round_: PlannedRound, names: tuple[str, ...]) -> None:
        self.told.append((str(round_), *names))

    def round_done(self, round_: int, reports: int, accuracy: float) -> None:
        self.told.append((round_, reports, accuracy))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site.make(tmp_path / "demo", 3)
    made.run.mkdir()
    return made


def test_each_step_is_told_once(site: Site) -> None:
    reported = Heard()
    watch = Watch(site, {7: "node-0", 9: "node-1"}, reported, RunConfig())
    watch.tell_news()
    assert reported.told == []
    first = Participation(run="r").after_asking(1, [9, 7], [7, 9], {})
    first.save(RunFolder(site.run).participation_path)
    watch.tell_news()
    watch.tell_news()
    assert reported.told == [("round 1", "node-0", "node-1")]
    (site.run / "metrics.jsonl").write_text(json.dumps({"round": 1, "clients": 2, "score": 0.5}) + "\n", encoding="utf-8")
    first.after_asking(2, [7, 9], [7, 9], {}).save(RunFolder(site.run).participation_path)
    watch.tell_news()
    watch.tell_news()
    assert sorted(reported.told[1:], key=str) == [("round 2", "node-0", "node-1"), (1, 2, 0.5)]
    told = len(reported.told)
    site.operator.mkdir(exist_ok=True)
    (site.operator / "run.log").write_text("\x1b[92mINFO \x1b[0m:      the rounds are over: figures are computed\n", encoding="utf-8")
    watch.tell_news()
    watch.tell_news()
    assert reported.told[told:] == [("the rounds are over; the aggregator computes the figures and the guarantee of the run",)]


def test_a_machine_that_is_too_slow_for_all_nodes_of_a_round_is_told_once(site: Site) -> None:
    heard, config = Heard(), RunConfig()
    watch, rounds = Watch(site, {}, heard, config), config.training.rounds
    late = "ERROR :     replaced: round {} is reported as no change, because training failed: the app took too long. See\n"
    for node in site.nodes[1:]:
        node.log.write_text("".join(late.format(number) for number in range(1, rounds + 1)), encoding="utf-8")
    site.nodes[0].log.write_text(late.format(2) + "ERROR :     replaced: round 1 is reported as no change, because of a bug\n", "utf-8")
    watch.tell_news()
    watch.tell_news()
    (advice,) = [str(text) for (text,) in heard.told if "fewer --clients" in str(text)]
    assert advice.startswith("round 2: no node has trained in time: this machine is too slow for so many nodes at once")
    watch.check_trained(rounds)
    with site.nodes[0].log.open("a", encoding="utf-8") as log:
        log.writelines(late.format(number) for number in range(1, rounds + 1) if number != 2)
    watch.tell_news()
    with pytest.raises(DeploymentError, match=r"no round has trained .* fewer --clients"):
        watch.check_trained(rounds)


def listing(path: Path, **run: str) -> Path:
    path.write_text("a line of Flower's\n" + json.dumps({"success": True, "runs": [run]}), encoding="utf-8")
    return path


def test_a_run_that_failed_is_told_with_flowers_details(tmp_path: Path) -> None:
    log = tmp_path / "superlink.log"
    log.write_text("INFO : something\n", encoding="utf-8")
    ended = RunEnd.read(listing(tmp_path / "ls.log", status="finished:failed", **{"status-details": "ProtocolError: round 1 is charged"}))
    with pytest.raises(
        DeploymentError, match=r"is finished:failed, expected finished:completed\. Details: ProtocolError: round 1 is"
    ) as caught:
        ended.check_completed(log)
    assert caught.value.log == ("INFO : something",)
    RunEnd.read(listing(tmp_path / "ls.log", status="finished:completed", **{"status-details": "N/A"})).check_completed(log)
    with pytest.raises(DeploymentError, match=r"the output of flwr ls in .* cannot be read"):
        RunEnd.read(listing(tmp_path / "ls.log", status="running"))


def test_a_refusal_is_found_in_the_nodes_log(site: Site) -> None:
    node = site.nodes[1]
    assert list(refusal_reasons(node)) == []
    node.log.write_text(
        "\x1b[92mINFO \x1b[0m:      Start `flwr-clientapp` process\n"
        "\x1b[93mWARNING \x1b[0m:   declined: run r, round 1: a cohort of 3 is below min_clients = 4; nothing was sent\n"
        "\x1b[93mWARNING \x1b[0m:   would decline: run r, round 2: no budget is left\n"
        "\x1b[91mERROR \x1b[0m:     failed: ValueError at train.py:7\n"
        "they declined: to say\n",
        encoding="utf-8",
    )
    assert list(refusal_reasons(node)) == [
        "declined: run r, round 1: a cohort of 3 is below min_clients = 4; nothing was sent",
        "would decline: run r, round 2: no budget is left",
        "failed: ValueError at train.py:7",
    ]


def test_a_serverapp_whose_token_is_rejected_again_and_again_is_told_before_the_time_is_up(site: Site) -> None:
    site.superlink.mkdir(exist_ok=True)
    log = site.superlink / "superlink.log"
    rejected = (
        "\x1b[91mERROR \x1b[0m:     [/v1/runtime/pull-task-input][ApiError:1008] Runtime task-token authentication failed.\n"
        '2026-11-28T10:18:46.486Z INFO [uvicorn.access] 127.0.0.1:34010 - "POST /v1/runtime/pull-task-input HTTP/1.1" 401\n'
        '2026-11-28T10:18:46.789Z INFO [uvicorn.access] 127.0.0.1:34002 - "POST /v1/runtime/push-task-output HTTP/1.1" 401\n'
    )
    check_server_app_starts(site)
    log.write_text(2 * rejected, encoding="utf-8")
    check_server_app_starts(site)
    log.write_text(3 * rejected, encoding="utf-8")
    with pytest.raises(DeploymentError, match=r"rejected the ServerApp's token 3 times, .*superlink\.log"):
        check_server_app_starts(site)
    Participation(run="r").after_asking(1, [7], [7], {}).save(RunFolder(site.run).participation_path)
    check_server_app_starts(site)
