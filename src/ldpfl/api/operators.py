"""Functions for operators: run a relay, make keys and certificates, check a node, try a deployment on one machine.

Each function needs packages of an extra, ``ldpfl[relay]`` or ``ldpfl[flower]``, and names the extra in its error if they are missing. These
packages are imported only when a function is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing, Trial
from ldpfl.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from ldpfl.deploy.certificates import Issued
    from ldpfl.deploy.demo import DemoObserver, DemoOutcome
    from ldpfl.relay.rounds_listed import ListedRound
    from ldpfl.relay.store import Store
    from ldpfl.relay.tokens import Tokens

__all__ = ["Finding", "IssuedFiles", "ListedToken", "NodeSetUp", "Standing", "Trial", "add_token", "aggregator_key"]
__all__ += ["cancel_round", "check_node", "demo", "issue_certificates", "left_open", "list_rounds", "list_tokens", "need_deployment"]
__all__ += ["node_key", "node_metrics", "renew_token", "revoke_token", "serve_relay"]

_RELAY_PACKAGES = ("httpx", "sqlalchemy", "starlette", "uvicorn")
_DEPLOYMENT_PACKAGES = ("flwr", "httpx", "sqlalchemy", "starlette", "trustme", "uvicorn")


@dataclass(frozen=True)
class ListedToken:
    """A token of the relay, without the token itself.

    Attributes:
        role: ``client`` or ``aggregator``.
        name: name of the token's owner.
        signs_as: the 16 digits by which messages name the client's signing key for sums; None without a key.
        older: whether the name has two tokens, and this is the older one.
    """

    role: str
    name: str
    signs_as: str | None
    older: bool


@dataclass(frozen=True)
class IssuedFiles:
    """Certificates of a deployment.

    Attributes:
        servers: one for each server.
        authority, authority_key: files of the authority that issued them.
        until: end of the authority's validity.
    """

    servers: tuple[Issued, ...]
    authority: Path
    authority_key: Path
    until: datetime


def serve_relay(
    store: str, host: str, port: int, *, tls_cert: Path | None = None, tls_key: Path | None = None, connections_per_address: int = 100
) -> None:
    """Serve the relay until it is stopped.

    Args:
        store: SQLite file, or the URL of a PostgreSQL database.
        tls_cert, tls_key: certificate chain and its private key, PEM.
        connections_per_address: maximum number of simultaneous connections from one address; 0 for no maximum.

    Raises:
        ConfigError: packages are missing, the address needs TLS, or only one of certificate and key is given.
    """
    _require_packages("the relay", _RELAY_PACKAGES, "relay")
    from ldpfl.relay.serve import Tls, serve
    from ldpfl.relay.usage_limits import ConnectionLimits

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("only one of --tls-cert and --tls-key is set: give both or none")
    tls = Tls(tls_cert, tls_key) if tls_cert and tls_key else None
    serve(store, host, port, tls, connections=ConnectionLimits(per_address=connections_per_address))


def add_token(store: str, name: str, role: str, signing_key: str | None = None) -> str:
    """Make a token for ``name`` and return it. Nobody can read it again, because the relay stores only its hash.

    Args:
        signing_key: public line of a client's signing key, as ``ldpfl deploy node-key`` prints it. A client needs one for sums.

    Raises:
        ConfigError: the role is unknown, ``name`` has a token already, or ``signing_key`` is not a key's line.
    """
    with _open_tokens(store) as tokens:
        from ldpfl.relay.tokens import Role

        if role not in {known.value for known in Role}:
            raise ConfigError(f"--role is {role!r}, expected client or aggregator")
        return tokens.add(name, Role(role), _public_key(signing_key))


def list_tokens(store: str) -> tuple[ListedToken, ...]:
    """Return who has the tokens of the relay. The relay does not store the tokens themselves."""
    with _open_tokens(store) as tokens:
        from ldpfl.transport.sums import signer_of

        return tuple(
            ListedToken(owner.role.value, owner.name, signer_of(owner.signing_key).hex() if owner.signing_key else None, owner.older)
            for owner in tokens.all()
        )


def renew_token(store: str, name: str, signing_key: str | None = None) -> str:
    """Make a second token for ``name`` and return it. The first keeps working until it is revoked, so that a client can change over.

    Raises:
        ConfigError: ``name`` has no token, or two already, or ``signing_key`` is not a key's line.
    """
    with _open_tokens(store) as tokens:
        return tokens.renew(name, _public_key(signing_key))


def revoke_token(store: str, name: str, *, older: bool = False) -> None:
    """Revoke the token of ``name``, or only the ``older`` one of two. The next request with a revoked token is rejected.

    Raises:
        ConfigError: ``name`` has no such token.
    """
    with _open_tokens(store) as tokens:
        tokens.revoke(name, older=older)


def list_rounds(store: str) -> list[ListedRound]:
    """Return the rounds that the relay holds. Nothing in them names a client."""
    with _open_store(store) as opened:
        from ldpfl.relay import rounds_listed

        return rounds_listed.list_rounds(opened)


def cancel_round(store: str, run: str, number: int) -> bool:
    """End a round and delete what the relay holds of it. Return false if the relay had deleted the round before.

    Raises:
        Unknown: the relay never held such a round.
    """
    with _open_store(store) as opened:
        from ldpfl.relay import rounds_listed

        return rounds_listed.cancel_round(opened, run, number)


def aggregator_key(file: Path, *, make: bool = True) -> str:
    """Return the public half of the aggregator's key in ``file``. The key is made first unless ``make`` is false.

    Raises:
        ConfigError: ``make`` is true and ``file`` exists, or ``file`` holds no key.
    """
    need_deployment()
    from ldpfl.transport.shuffling.sealing import generate_key, load_key, public_text
    from ldpfl.util.key_files import save_key

    if make:
        _refuse_existing(file)
        save_key(generate_key(), file)
    return public_text(load_key(file))


def node_key(file: Path, *, make: bool = True) -> str:
    """Return the public line of the node's signing key in ``file``. The key is made first unless ``make`` is false.

    Raises:
        ConfigError: as for :func:`aggregator_key`.
    """
    need_deployment()
    from ldpfl.transport.sums.node_keys import line_of, load_key, make_key

    if make:
        _refuse_existing(file)
        make_key(file)
    return line_of(load_key(file))


def issue_certificates(folder: Path, hosts: Sequence[str], days: int, *, renew: bool = False) -> IssuedFiles:
    """Write certificates of the servers at ``hosts`` to ``folder``, and first the authority that issues them if the folder has none.

    Raises:
        ConfigError: a host is neither a name nor an address, or it has a certificate already and ``renew`` is false.
    """
    need_deployment()
    from ldpfl.deploy.certificates import AUTHORITY, AUTHORITY_KEY, expiry_of, issue

    servers = tuple(issue(folder, hosts, days, renew=renew))
    return IssuedFiles(servers, folder / AUTHORITY, folder / AUTHORITY_KEY, expiry_of(folder / AUTHORITY))


def check_node(node: NodeSetUp, trial: Trial | None = None) -> Iterator[Finding]:
    """Check a node's set-up as its SuperNode would, and yield each finding. No data is sent. Nothing is checked before the first ``next``.

    Args:
        trial: if given, run the app's code for one round with these settings, and discard the report.

    Raises:
        ConfigError: packages of a deployment are missing. This, too, is raised at the first ``next``.
    """
    need_deployment()
    from ldpfl.deploy import node_check

    yield from node_check.check_node(node, trial=trial)


def demo(
    clients: int,
    rounds: int,
    folder: Path,
    *,
    watch: Callable[[int], AbstractContextManager[tuple[DemoObserver, Callable[[float], None]]]],
    settings: Sequence[str] = (),
    data_dir: Path | None = None,
    reply_s: float = 20.0,
    by_sum: bool = False,
    keep: bool = False,
) -> DemoOutcome:
    """Train on this machine as in a deployment: SuperLink, relay and SuperNodes with TLS, keys, policies and budgets.

    Args:
        folder: new or empty folder for all files.
        watch: called with the number of rounds. It returns a context that yields the observer of each step, and a function that waits a
            number of seconds and may raise to end the demo.
        settings: changes of the quickstart, as ``key=value``.
        reply_s: seconds after which each node replies, trained or not.
        by_sum: whether reports are added up, so that no server sees a single report.
        keep: whether ``folder`` keeps keys, tokens, certificates, and the files that the relay and Flower stored.

    Raises:
        ConfigError: packages are missing, a setting does not fit, or ``folder`` is not empty.
        DeploymentError: a process ended or did not answer, a node refused, or the run failed.
    """
    need_deployment()
    if sys.platform == "win32":
        raise ConfigError("the demo does not work on Windows: run it on Linux or macOS")
    from ldpfl.deploy.demo import run_demo
    from ldpfl.deploy.demo_files import Site
    from ldpfl.deploy.demo_settings import trial_of

    trial = trial_of(clients, rounds, settings, data_dir, reply_s, "sum" if by_sum else "relay")
    site = Site.make(folder, trial.clients)
    try:
        with watch(trial.rounds) as (observer, pause):
            return run_demo(trial, site, observer, pause)
    finally:
        if not keep:
            site.remove_secrets()


def node_metrics(budget: Path, log: Path | None = None, policy: Path | None = None) -> str:
    """Return a node's metrics in Prometheus' text format, for its operator alone: some depend on the node's data."""
    from ldpfl.deploy.node_metrics import metrics_text

    return metrics_text(budget, log, policy)


def left_open(
    run: Path, *, relay: str | None = None, token: Path | None = None, relay_ca: Path | None = None, cancel: bool = False
) -> Iterator[str]:
    """Yield a line for each thing that a stopped run on Flower has left open. Nothing is done before the first ``next``.

    If ``cancel`` is true, the relay deletes the run's reports that it still holds.

    Raises:
        ConfigError: there is no such run, the run is under way, or its reports go over a relay and ``relay`` or ``token`` is missing.
        RelayRefused, RelayUnreachable: the relay does not answer, or does not know the token.
    """
    need_deployment()
    from ldpfl.deploy import stopped_runs
    from ldpfl.experiments.run_folder import RunFolder

    stopped_run = stopped_runs.read_left_open(RunFolder(run))
    yield from stopped_runs.progress_lines(stopped_run)
    if not stopped_run.over_relay:
        if cancel:
            yield "the run's reports go over no relay, so there is nothing to cancel"
        return
    if relay is None or token is None:
        raise ConfigError(
            "the run's reports go over a relay, which may still hold some of them: set LDPFL_RELAY to the relay's URL, and "
            "LDPFL_AGGREGATOR_TOKEN to the file of the aggregator's token"
        )
    with stopped_runs.operator_aggregator(relay, token, relay_ca) as aggregator:
        if cancel:
            yield from stopped_runs.cancel_at_relay(aggregator, stopped_run)
        else:
            yield from stopped_runs.relay_lines(aggregator, stopped_run, run)


def _refuse_existing(file: Path) -> None:
    """Raise a :class:`ConfigError` if ``file`` exists, because a key in it would be overwritten."""
    if file.exists():
        raise ConfigError(f"{file} already exists: to print its public key use --show; to make a new key give another file")


def need_deployment() -> None:
    """Raise a ConfigError that names the packages of a deployment that are missing."""
    _require_packages("a deployment", _DEPLOYMENT_PACKAGES, "flower")


def _require_packages(purpose: str, packages: Sequence[str], extra: str) -> None:
    """Raise a :class:`ConfigError` that names the missing ``packages``, if any, and ``extra``, the extra of ldpfl that installs them."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{purpose} needs {', '.join(missing)}: pip install 'ldpfl[{extra}]'")


def _public_key(line: str | None) -> Ed25519PublicKey | None:
    """Return the signing key in the ``line`` of ``ldpfl deploy node-key``; None without a line."""
    if line is None:
        return None
    from ldpfl.transport.sums.node_keys import public_key

    return public_key(line)


@contextmanager
def _open_store(store: str) -> Iterator[Store]:
    """Yield the relay's store, and close it at the end."""
    _require_packages("the relay", _RELAY_PACKAGES, "relay")
    from ldpfl.relay.database import open_engine
    from ldpfl.relay.store import Store

    relay_store = Store(open_engine(store))
    try:
        yield relay_store
    finally:
        relay_store.close()


@contextmanager
def _open_tokens(store: str) -> Iterator[Tokens]:
    """Yield the relay's tokens, and close their database at the end."""
    _require_packages("the relay", _RELAY_PACKAGES, "relay")
    from ldpfl.relay.database import open_engine
    from ldpfl.relay.tokens import Tokens

    engine = open_engine(store)
    try:
        yield Tokens(engine)
    finally:
        engine.dispose()
