"""A folder for each party of a trial, with the files that it would have on a machine of its own."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import tomli_w
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ldpfl.errors import ConfigError
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.policy import Policy
from ldpfl.relay.database import open_engine
from ldpfl.relay.tokens import Role, Tokens
from ldpfl.transport.shuffling.sealing import generate_key, public_text
from ldpfl.transport.sums.node_keys import make_key, public_key
from ldpfl.util.files import Inside, write_text
from ldpfl.util.key_files import save_key

VALID_FOR = timedelta(days=1)
"""How long a server's certificate is valid."""


@dataclass(frozen=True)
class NodeSite:
    """A client's folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    policy = Inside("policy.toml")
    budget = Inside("budget.sqlite")
    key = Inside("node.key")
    signing_key = Inside("signing.key")
    token = Inside("relay.token")
    log = Inside("supernode.log")
    flower_home = Inside("flwr")


@dataclass(frozen=True)
class Site:
    """All folders of a deployment, under ``path``.

    ``superlink`` stands for the aggregator's machine, ``operator`` for the machine of the person who submits the run. Both trust
    ``authority``.
    """

    path: Path
    nodes: tuple[NodeSite, ...]

    run = Inside("run")
    """The run folder, with the same files as after ``ldpfl run``."""
    authority = Inside("ca.crt")
    superlink = Inside("superlink")
    relay = Inside("relay")
    relay_store = Inside("relay/relay.sqlite")
    operator = Inside("operator")
    app = Inside("operator/ldpfl-demo")
    aggregator_key = Inside("superlink/aggregator.key")
    node_keys = Inside("superlink/nodes.txt")
    """The aggregator's list of the nodes' public signing keys."""
    aggregator_token = Inside("superlink/relay.token")

    @classmethod
    def make(cls, path: Path, nodes: int) -> Site:
        """Make the folders, which only their owner may enter.

        Raises:
            ConfigError: ``path`` is not empty, or a folder cannot be made.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"output folder {path} is not empty: give another --out")
        root = path.absolute()
        site = cls(root, tuple(NodeSite(root / f"node-{number}") for number in range(nodes)))
        try:
            root.mkdir(parents=True, exist_ok=True)
            root.chmod(0o700)
            for folder in (site.superlink, site.relay, site.operator, *(node.path for node in site.nodes)):
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"output folder {path} cannot be made: {error.strerror}") from None
        return site

    def secrets(self) -> list[Path]:
        """Return the paths of keys, tokens, certificates, and of the stores of relay and Flower. None is of use after the deployment."""
        files = [*self.path.rglob("*.key"), *self.path.rglob("*.key.pub"), *self.path.rglob("*.token"), *self.path.rglob("*.crt")]
        return [*files, *self.relay.glob(f"{self.relay_store.name}*"), *self.path.rglob("flwr")]

    def remove_secrets(self) -> None:
        """Remove all :meth:`secrets`. Policies, budgets, logs and the run folder stay."""
        for path in self.secrets():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def write_all_parties_files(site: Site, policy: Policy) -> None:
    """Write the certificates, keys, tokens, policies and budgets of all parties into their folders."""
    authority = trustme.CA()  # its private key is never written, so nobody can issue further certificates
    authority.cert_pem.write_to_path(site.authority)
    for folder in (site.superlink, site.relay):
        _write_server_certificate(authority, folder)
    key = generate_key()
    save_key(key, site.aggregator_key)
    node_policy = policy.model_copy(update={"aggregator_keys": (public_text(key),)})
    signers: list[str] = []  # a line for each node: its public signing key and its name
    engine = open_engine(str(site.relay_store))
    try:
        tokens = Tokens(engine)
        write_private(site.aggregator_token, tokens.add("aggregator", Role.AGGREGATOR).encode())
        for node in site.nodes:
            signer = make_key(node.signing_key)  # writes the private key, and returns the public one as text
            write_private(node.token, tokens.add(node.name, Role.CLIENT, public_key(signer)).encode())
            write_node_key(node.key)  # for the SuperLink; the signing key is for sums
            signers.append(f"{signer} {node.name}\n")
            write_text(node.policy, tomli_w.dumps(node_policy.model_dump(mode="json")))
            set_limit(node.budget, node_policy.lifetime_epsilon, node_policy.delta)
        write_text(site.node_keys, "".join(signers))
    finally:
        engine.dispose()


def _write_server_certificate(authority: trustme.CA, folder: Path) -> None:
    """Write a server's certificate for localhost and 127.0.0.1, and its private key, which only its owner may read."""
    issued = authority.issue_cert("localhost", "127.0.0.1", not_after=datetime.now(UTC) + VALID_FOR)
    write_private(folder / "server.key", issued.private_key_pem.bytes())
    issued.cert_chain_pems[0].write_to_path(folder / "server.crt")


def write_node_key(private: Path) -> Path:
    """Write a new key of a SuperNode, P-384 in OpenSSH's format as Flower needs it; return the file of its public half, beside it.

    Raises:
        FileExistsError: there is a key already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(private, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
    public = private.with_name(private.name + ".pub")
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n")
    return public


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` to a new file that only its owner may read.

    Raises:
        FileExistsError: there is a file already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
