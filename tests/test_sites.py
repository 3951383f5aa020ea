"""Files that run a federation on other people's machines: images, systemd units, Kubernetes manifests. They name what ldpfl has."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy" / "containers" / "Dockerfile"
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
PROGRAMS = {"flower-superlink": ["flower-superlink"], "flower-supernode": ["flower-supernode"], "ldpfl": ["ldpfl", "relay", "serve"]}
SERVICES = ["aggregator", "node", "relay"]


def without_continuations(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("\\\n", " ")


def dockerfile_command(service: str) -> list[str]:
    stage = without_continuations(DOCKERFILE).split(f"AS {service}\n")[1].split("\nFROM ")[0]
    words: list[str] = yaml.safe_load(re.findall(r"^(?:CMD|ENTRYPOINT) (\[.*\])$", stage, re.M)[-1])
    return words[2:] if words[0] == "tini" else words


def unit_command(service: str) -> list[str]:
    text = without_continuations(ROOT / "deploy" / "systemd" / f"ldpfl-{service}.service")
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    return shlex.split(line)


def unit_environment(unit: Path) -> dict[str, str]:
    lines = re.findall(r"^Environment=(.*)$", unit.read_text(encoding="utf-8"), re.M)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def workload(manifest: Path) -> Any:
    (found,) = (tree for tree in yaml.safe_load_all(manifest.read_text(encoding="utf-8")) if tree["kind"] == "StatefulSet")
    return found["spec"]["template"]["spec"]


@pytest.mark.slow
@pytest.mark.thorough_except("relay-dockerfile_command")
@pytest.mark.parametrize("command", [dockerfile_command, unit_command])
@pytest.mark.parametrize("service", SERVICES)
def test_each_option_is_one_that_the_program_has(service: str, command: Any) -> None:
    program, *rest = command(service)
    asked = [Path(sys.executable).with_name(word) if place == 0 else word for place, word in enumerate(PROGRAMS[Path(program).name])]
    shown = subprocess.run([*asked, "--help"], capture_output=True, text=True, check=True).stdout
    options = {word for word in rest if word.startswith("--")}
    assert options
    assert {option for option in options if option not in shown} == set()


@pytest.mark.parametrize("path", [DOCKERFILE, *UNITS, *MANIFESTS], ids=lambda path: path.name)
def test_each_variable_is_one_that_ldpfl_reads(path: Path) -> None:
    described = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"\bLDPFL_\w+", path.read_text(encoding="utf-8")) if name not in described} == set()


@pytest.mark.parametrize(
    ("file", "variables"),
    [
        ("containers/Dockerfile", ["LDPFL_NODE_KEYS", "LDPFL_SIGNING_KEY"]),
        ("systemd/ldpfl-aggregator.service", ["LDPFL_NODE_KEYS"]),
        ("systemd/ldpfl-node.service", ["LDPFL_SIGNING_KEY"]),
        ("kubernetes/node.yaml", ["LDPFL_SIGNING_KEY"]),
    ],
)
def test_the_first_lines_name_what_sums_need(file: str, variables: list[str]) -> None:
    lines = (ROOT / "deploy" / file).read_text(encoding="utf-8").splitlines()
    first = " ".join(itertools.takewhile(lambda line: not line or line.startswith("#"), lines))
    assert {name for name in variables if name not in first} == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_an_image_a_unit_and_a_manifest_that_run_the_same_command(service: str) -> None:
    def options(words: list[str]) -> set[str]:
        return {word for word in words if word.startswith("--")}

    assert options(dockerfile_command(service)) == options(unit_command(service))
    pod = workload(ROOT / "deploy" / "kubernetes" / f"{service}.yaml")
    assert {container["image"] for container in (*pod["initContainers"], *pod["containers"])} == {f"ldpfl-{service}"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_pod_is_one_user_without_rights_whose_mounts_exist(manifest: Path) -> None:
    pod = workload(manifest)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
    assert {mount["name"] for part in (container, *pod["initContainers"]) for mount in part["volumeMounts"]} == volumes


def test_only_the_ingress_controller_reaches_the_aggregator() -> None:
    manifest = ROOT / "deploy" / "kubernetes" / "aggregator.yaml"
    trees = {tree["kind"]: tree for tree in yaml.safe_load_all(manifest.read_text(encoding="utf-8"))}
    policy, labels = trees["NetworkPolicy"]["spec"], trees["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}]
    assert [port["port"] for port in rule["ports"]] == [port["port"] for port in trees["Service"]["spec"]["ports"]]


def test_the_relay_is_reached_by_ingress_and_monitoring_alone_and_has_time_to_end_a_release() -> None:
    """Its page says so of /metrics and of SIGTERM; kubectl and systemd would kill it after 30 and 90 seconds."""
    manifest = ROOT / "deploy" / "kubernetes" / "relay.yaml"
    trees = {tree["kind"]: tree for tree in yaml.safe_load_all(manifest.read_text(encoding="utf-8"))}
    policy, template = trees["NetworkPolicy"]["spec"], trees["StatefulSet"]["spec"]["template"]
    assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    namespaces = [source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for source in rule["from"]]
    assert namespaces == ["ingress-nginx", "monitoring"]
    assert [port["port"] for port in rule["ports"]] == [port["port"] for port in trees["Service"]["spec"]["ports"]]
    assert template["spec"]["terminationGracePeriodSeconds"] == 900
    assert "\nTimeoutStopSec=15min\n" in (ROOT / "deploy" / "systemd" / "ldpfl-relay.service").read_text(encoding="utf-8")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / unit.name
    copy.write_text(re.sub("/opt/ldpfl/bin/[a-z-]+", sys.executable, unit.read_text(encoding="utf-8")), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_the_path_of_a_unit_has_the_folder_of_its_program(unit: Path) -> None:
    program, *_ = unit_command(unit.stem.removeprefix("ldpfl-"))
    assert str(Path(program).parent) in unit_environment(unit)["PATH"].split(":")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_superlink_starts_with_its_unit_s_environment_alone(tmp_path: Path) -> None:
    text = " ".join(unit_command("aggregator"))
    text = re.sub(r" --(ssl-\S+|host|port|database) \S+", "", text).replace(" --enable-supernode-auth", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**unit_environment(ROOT / "deploy" / "systemd" / "ldpfl-aggregator.service"), "FLWR_HOME": str(tmp_path / "flwr")}
    programs = str(Path(sys.executable).parent)
    words = [*text.replace("/opt/ldpfl/bin", programs).split(), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    given = [f"{name}={value.replace('/opt/ldpfl/bin', programs)}" for name, value in environment.items()]
    log = tmp_path / "log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            ["env", "-i", *given, *words, "--database", str(tmp_path / "superlink.db")],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until = time.monotonic() + 120
        while not listens(port):
            assert started.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
