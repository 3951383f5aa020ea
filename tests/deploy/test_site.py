"""Each party has its own files and nobody else's; a node's policy allows the planned run and nothing beside it."""

from __future__ import annotations

import base64
import ssl
import stat
import subprocess
import sysconfig
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ldpfl import ConfigError, LayerRanges, LdpflError
from ldpfl.data import load
from ldpfl.deploy.demo_files import VALID_FOR, Site, write_all_parties_files, write_node_key
from ldpfl.deploy.demo_settings import LINKED, Trial, settings_of, trial_of
from ldpfl.deploy.processes import Programs, export_commands, inherited_environment, shell_line
from ldpfl.errors import Declined
from ldpfl.experiments.build import build, choose_device
from ldpfl.flower.new_app import write_app
from ldpfl.flower.terms import deployable_mechanism
from ldpfl.mechanisms import create
from ldpfl.mechanisms.base import in_round
from ldpfl.privacy.accountants.adaptive import epsilon_needed
from ldpfl.privacy.accountants.registry import unit_epsilon
from ldpfl.privacy.budget_file import read_books
from ldpfl.privacy.policy import Request, read_policy
from ldpfl.relay.database import open_engine
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.transport.shuffling.sealing import load_key
from ldpfl.transport.sums import read_nodes, signer_of
from ldpfl.transport.sums.node_keys import load_key as load_signing_key

TINY = ("data.name=mnist", "model.name=logistic-regression", "mechanism.epsilon=2")
PIXELS = ("data.features=none",)
"""To describe the digits of the demo by their strokes takes seconds."""
PARTIES = ("relay", "superlink", "operator", "node-0", "node-1", "node-2")


@pytest.fixture(scope="module")
def tiny_trial(tiny_data: Path) -> Trial:
    return trial_of(3, 2, TINY, tiny_data)


@pytest.fixture
def site(tiny_trial: Trial, tmp_path: Path) -> Site:
    made = Site.make(tmp_path / "demo", tiny_trial.clients)
    write_all_parties_files(made, tiny_trial.policy)
    write_app(made.app, settings_of(made, tiny_trial))
    return made


@pytest.fixture
def programs(site: Site, tiny_trial: Trial) -> Programs:
    return Programs(site, 1001, 1002, (1003, 1004, 1005), inherited_environment(tiny_trial.data_dir))


def test_folders_and_secrets_are_for_their_owner_alone(site: Site) -> None:
    assert {path.name for path in site.path.iterdir() if path.is_dir()} == set(PARTIES)
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (site.path, *(site.path / name for name in PARTIES)))
    secret = [*site.path.rglob("*.key"), *site.path.rglob("*.token"), site.relay_store, *(node.budget for node in site.nodes)]
    assert len(secret) == 3 + 1 + 3 * 3 + 1 + 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


def test_the_aggregator_lists_the_signing_key_of_each_node(site: Site) -> None:
    own = {signer_of(load_signing_key(node.signing_key).public_key()) for node in site.nodes}
    assert set(read_nodes(site.node_keys)) == own
    assert len(own) == len(site.nodes)


def test_a_trial_of_a_sum_protects_records_and_its_policy_says_both_figures() -> None:
    trial = trial_of(4, 3, PIXELS, transport="sum")
    assert (trial.policy.transports, trial.policy.protects, trial.policy.min_clients) == (("sum",), "record", 4)
    assert trial.policy.sum_epsilon != "off"
    assert 4 <= trial.policy.sum_epsilon < trial.policy.lifetime_epsilon < 12
    assert trial.config.shuffling.channel == "secure-sum"
    assert settings_of(Site(Path("/nowhere"), ()), trial).transport == "sum"


def test_a_trial_of_a_sum_of_what_does_not_add_up_is_refused_before_anything_starts() -> None:
    changes = (*PIXELS, "mechanism.name=duchi", "mechanism.perturbed=update", "privacy.target_epsilon=off")
    with pytest.raises(ConfigError, match="mechanism 'duchi' has reports that cannot be added up"):
        trial_of(4, 3, changes, transport="sum")


def test_the_authority_cannot_issue_later(site: Site) -> None:
    assert not [path for path in site.path.rglob("*") if path.name.startswith("ca.") and path != site.authority]


def shake_hands(folder: Path, trusted: Path, name: str) -> None:
    """Do a TLS handshake in memory: a server with the certificate in ``folder``, a client that trusts ``trusted`` and calls ``name``."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server.crt", folder / "server.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = ssl.create_default_context(cafile=str(trusted))
    ends = [calling.wrap_bio(to_client, to_server, server_hostname=name), serving.wrap_bio(to_server, to_client, server_side=True)]
    done = [False, False]
    for _ in range(10):
        for place, end in enumerate(ends):
            try:
                end.do_handshake()
                done[place] = True
            except ssl.SSLWantReadError:
                continue
    assert all(done)


def test_who_trusts_the_authority_accepts_its_servers_by_their_names_and_no_others(site: Site, tiny_trial: Trial, tmp_path: Path) -> None:
    for folder in (site.relay, site.superlink):
        for name in ("localhost", "127.0.0.1"):
            shake_hands(folder, site.authority, name)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for|mismatch"):
        shake_hands(site.relay, site.authority, "relay.example")
    other = Site.make(tmp_path / "other", 1)
    write_all_parties_files(other, tiny_trial.policy)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(site.relay, other.authority, "localhost")


def test_a_server_cannot_issue_certificates_and_is_certified_for_a_day(site: Site) -> None:
    certificate = x509.load_pem_x509_certificate((site.relay / "server.crt").read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_after_utc <= datetime.now(UTC) + VALID_FOR


def test_a_node_has_a_key_of_the_curve_and_format_that_flower_wants_and_it_is_not_overwritten(tmp_path: Path) -> None:
    public = serialization.load_ssh_public_key(write_node_key(tmp_path / "node.key").read_bytes())
    before = (tmp_path / "node.key").read_bytes()
    private = serialization.load_ssh_private_key(before, password=None)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(public.curve, ec.SECP384R1)
    assert private.public_key() == public
    with pytest.raises(FileExistsError):
        write_node_key(tmp_path / "node.key")
    assert (tmp_path / "node.key").read_bytes() == before


def test_each_token_is_its_owners(site: Site) -> None:
    engine = open_engine(str(site.relay_store))
    tokens = Tokens(engine)
    assert tokens.owner(site.aggregator_token.read_text()).role is Role.AGGREGATOR
    for node in site.nodes:
        owner = tokens.owner(node.token.read_text())
        assert (owner.name, owner.role) == (node.name, Role.CLIENT)
        assert owner.signing_key == load_signing_key(node.signing_key).public_key()
    engine.dispose()


def test_policies_allow_the_run_and_no_more(site: Site, tiny_trial: Trial) -> None:
    weights = 20 * 20 * 10 + 10
    key = base64.b64encode(load_key(site.aggregator_key).public_key().public_bytes_raw()).decode()
    for node in site.nodes:
        policy = read_policy(node.policy)
        assert policy.mechanisms == ("duchi",)
        assert policy.epsilon_per_unit == 2.0
        assert policy.aggregator_keys == (key,)
        assert (policy.transports, policy.min_clients, policy.linked) == (("relay",), 3, LINKED)
        assert (policy.rounds, policy.allow_unprotected) == (2, False)
        assert policy.epsilon_per_round < 2 * weights < 2 * policy.epsilon_per_round  # composed, not added up
        assert policy.epsilon_per_round < policy.lifetime_epsilon <= 2.1 * policy.epsilon_per_round
        books = read_books(node.budget)
        assert (books.limit, books.charges) == (policy.lifetime, 0)


def test_the_app_holds_settings_and_no_secret(site: Site, tiny_trial: Trial) -> None:
    settings = tomllib.loads((site.app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]["ldpfl"]
    assert settings["set"] == "; ".join(tiny_trial.changes)
    assert (settings["transport"], settings["nodes"], settings["min-clients"], settings["linked"]) == ("relay", 3, 3, LINKED)
    secrets = [path.read_text() for path in site.path.rglob("*.token")]
    for path in site.app.rglob("*.*"):
        assert not any(secret in path.read_text() for secret in secrets)


def test_no_party_is_told_of_anothers_secrets(programs: Programs) -> None:
    site = programs.site
    own = {
        "relay": programs.relay(),
        "superlink": programs.superlink(),
        "operator": programs.submit(),
        **{node.name: programs.supernode(number) for number, node in enumerate(site.nodes)},
    }
    for party, program in own.items():
        told = " ".join([*program.command, *(value for name, value in program.environment.items() if name.startswith(("LDPFL", "FLWR")))])
        others = [f"{site.path}/{name}/" for name in own if name != party]
        assert f"{site.path}/{party}/" in told
        assert not [other for other in others if other in told]


def test_settings_of_whoever_starts_it_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LDPFL_POLICY", "FLWR_OIDC_ENABLED", "RAY_ADDRESS", "LDPFL_CACHE_DIR", "MINE", "FLWR_TELEMETRY_ENABLED"):
        monkeypatch.setenv(name, "1")
    environment = inherited_environment(None)
    assert not environment.keys() & {"LDPFL_POLICY", "FLWR_OIDC_ENABLED", "RAY_ADDRESS"}
    assert (environment["LDPFL_CACHE_DIR"], environment["MINE"]) == ("1", "1")
    off = ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED")
    on = ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
    assert [environment[name] for name in (*off, *on)] == ["0", "0", "1", "1"]


def test_what_all_commands_need_is_exported(programs: Programs, tmp_path: Path) -> None:
    told = export_commands(inherited_environment(tmp_path / "my data"))
    assert "export FLWR_TELEMETRY_ENABLED=0\n" in told
    assert f"export LDPFL_DATA_DIR='{tmp_path}/my data'\n" in told
    found = subprocess.run(
        ["sh", "-c", f"{told}command -v flower-superexec; echo $PATH"], capture_output=True, text=True, env={"PATH": "/bin"}
    )
    first, path = found.stdout.splitlines()
    assert Path(first).parent == Path(sysconfig.get_path("scripts"))
    assert path == f"{Path(first).parent}:/bin"  # whoever types the commands keeps what is installed


def test_commands_are_written_as_one_types_them(programs: Programs) -> None:
    typed = shell_line(programs.supernode(1), programs.inherited)
    assert typed.startswith("FLWR_HOME=")
    assert typed.endswith("--node-config 'partition-id=1 num-partitions=3'")
    assert "PATH=" not in typed


def test_removing_secrets_leaves_policies_budgets_logs_and_the_run(site: Site) -> None:
    (site.run).mkdir()
    (site.run / "result.json").touch()
    site.nodes[0].log.touch()
    (site.nodes[0].flower_home / "apps").mkdir(parents=True)
    site.remove_secrets()
    left = {str(path.relative_to(site.path)) for path in site.path.rglob("*") if path.is_file()}
    app = {
        "operator/ldpfl-demo/pyproject.toml",
        *(f"operator/ldpfl-demo/ldpfl_demo/{name}.py" for name in ("__init__", "client_app", "server_app")),
    }
    books = {f"node-{number}/{name}" for number in range(3) for name in ("policy.toml", "budget.sqlite")}
    assert left == {"run/result.json", "node-0/supernode.log", "superlink/nodes.txt"} | app | books


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty: give another --out"):
        Site.make(tmp_path, 2)
    with pytest.raises(ConfigError, match="is not empty"):
        Site.make(tmp_path / "mine", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("mechanism.name=full-dp", "mechanism.sensitivity=theorem", "training.clip_norm=1"), "guarantee"),
        (("clients.fraction=0.5",), "leave clients.fraction at 1, got 0.5"),
        (("clients.count=1",), "needs at least 2 clients, got 1"),
        (("name=a;b",), "semicolon"),
        (("mechanism.epsilom=1",), "epsilon"),
        (("data.name=fashion_mnist",), "fashion_mnist"),
    ],
)
def test_mistakes_are_found_before_anything_starts(changes: tuple[str, ...], message: str, tiny_data: Path) -> None:
    with pytest.raises(LdpflError, match=message):
        trial_of(2, 1, (*TINY, *changes), tiny_data)


@pytest.mark.parametrize("name", ["time-varying", "dpa", "full-dp"])
def test_a_policy_allows_every_round_of_a_noise_schedule(name: str, tiny_data: Path) -> None:
    changes = ("data.name=mnist", "model.name=logistic-regression", f"mechanism.name={name}", "mechanism.norm=0.5")
    own = trial_of(3, 4, changes, tiny_data)
    _, start = build(own.config, load("mnist", tiny_data), choose_device("cpu"))
    mechanism, ranges = deployable_mechanism(own.config, start.state.ranges), start.state.ranges
    releases = [in_round(mechanism, replace(start.state.public(), round=number)).release(ranges) for number in range(1, 5)]
    assert all(unit_epsilon(release, own.policy.delta) <= own.policy.epsilon_per_unit for release in releases)
    needed = epsilon_needed([(release, 1) for release in releases], own.policy.delta)
    assert needed <= own.policy.lifetime_epsilon <= needed * 1.01


def test_a_policy_admits_the_planned_report_and_no_other(site: Site) -> None:
    policy = read_policy(site.nodes[0].policy)
    ranges = LayerRanges(torch.zeros(2, dtype=torch.float64), torch.full((2,), 0.02, dtype=torch.float64), (4000, 10))
    key = load_key(site.aggregator_key).public_key().public_bytes_raw()

    def request(epsilon: float = 2.0) -> Request:
        mechanism = create("duchi", epsilon=epsilon)
        terms: dict[str, Any] = {"run": "r", "round": 1, "cohort": 3, "key": key, "linked": LINKED}
        return Request.of(mechanism, ranges, transport="relay", **terms)

    policy.check(request())
    refused = {
        "aggregator_keys": replace(request(), key=bytes(32)),
        "min_clients": replace(request(), cohort=2),
        "linked": replace(request(), linked=LINKED + 1),
        "transport": replace(request(), transport="direct", key=b""),
        "epsilon_per_unit": request(2.001),
    }
    for setting, other in refused.items():
        with pytest.raises(Declined, match=setting):
            policy.check(other)
