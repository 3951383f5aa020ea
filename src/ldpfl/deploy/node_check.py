"""What a node's operator set up, looked over before its SuperNode starts: nothing of the node's data is sent anywhere.

Each check yields findings, a line each, that say what was found and, where something is wrong, what to do.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ldpfl.data.nodes import table_path
from ldpfl.data.tables import read_table
from ldpfl.deploy.certificates import end_of
from ldpfl.errors import ConfigError, Declined, LdpflError, RelayRefused, printable
from ldpfl.file_owners import require_own
from ldpfl.flower.named_by_server import check_config, check_mechanism
from ldpfl.flower.operator_node import other_signer, read_token
from ldpfl.flower.policy_init import Offer, fitting_rows, offer_of, ranges_for, releases_of
from ldpfl.flower.terms import check_window
from ldpfl.number_format import number
from ldpfl.privacy.accountants.adaptive import filtered_epsilon
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import Books, read_books
from ldpfl.privacy.policy import OVER_RELAY, Policy, Request, read_policy
from ldpfl.quantities import cohort_size
from ldpfl.relay import Patience, RelayClient
from ldpfl.summing import signer_of
from ldpfl.summing.node_keys import load_key, public_text

_SOON = timedelta(days=30)
"""A certificate that ends within this time is mentioned."""

_ANSWER_S = 10.0
_PATIENCE = Patience(tries=1, timeout_s=_ANSWER_S, total_s=2 * _ANSWER_S)
_READABLE = stat.S_IRWXG | stat.S_IRWXO


class Standing(StrEnum):
    """How a finding is to be taken."""

    FINE = "ok"
    LOOK = "look"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: ``said`` is for the node's operator alone, for it may tell of the data."""

    what: str
    standing: Standing
    said: str


@dataclass(frozen=True)
class NodeSetUp:
    """What is checked, as a SuperNode is given it; None where nothing is named.

    Attributes:
        app: folder of the app that is going to run, to see whether policy, budget and table fit it.
        config: that of a ServerApp of its own.
        layers: values in each array of a model of its own.
        partition: number of the node, where ``data`` names its table by ``{partition}``.
    """

    policy: Path | None
    budget: Path | None
    relay: str | None = None
    token: Path | None = None
    relay_ca: Path | None = None
    data: str | None = None
    data_dir: Path | None = None
    node_key: Path | None = None
    superlink: str | None = None
    superlink_ca: Path | None = None
    app: str | None = None
    config: Path | None = None
    layers: tuple[int, ...] = ()
    partition: int | None = None
    signing_key: Path | None = None


Connect = Callable[[str, str, ssl.SSLContext | bool], RelayClient]


def _connected(url: str, token: str, verify: ssl.SSLContext | bool) -> RelayClient:
    return RelayClient(url, token, verify=verify, patience=_PATIENCE)


def check_node(node: NodeSetUp, connect: Connect = _connected) -> Iterator[Finding]:
    """Yield what is found of ``node``; the relay is asked through ``connect``."""
    policy, books = None, None
    try:
        policy = read_policy(_named(node.policy, "policy", "LDPFL_POLICY"))
        yield from _of_policy(policy)
    except LdpflError as error:
        yield _wrong("policy", error)
    try:
        books = read_books(_named(node.budget, "budget", "LDPFL_BUDGET"))
        yield from _of_budget(books, policy)
    except LdpflError as error:
        yield _wrong("budget", error)
    if node.relay or (policy and set(OVER_RELAY) & set(policy.transports)):
        yield from _of_relay(node, connect, sums=policy is not None and "sum" in policy.transports)
    if policy and "sum" in policy.transports:
        yield _of_signing_key(node.signing_key)
    if node.node_key:
        yield _of_node_key(node.node_key)
    if node.superlink:
        yield _of_server("SuperLink", node.superlink, node.superlink_ca)
    offer = None
    if node.app:
        try:
            offer = offer_of(node.app, node.config)
        except LdpflError as error:
            yield _wrong("app", error)
    if offer and policy:
        yield from _of_app(offer, node, policy, books)
    yield from _of_data(node, offer)


def _of_policy(policy: Policy) -> Iterator[Finding]:
    nothing = [name for name in ("mechanisms", "rounds", "lifetime_epsilon", "transports") if not getattr(policy, name)]
    if nothing:
        yield Finding("policy", Standing.WRONG, f"allows nothing: set {', '.join(nothing)}, or make one with ldpfl policy init")
        return
    what = f"{policy.rounds:,} reports of {', '.join(policy.mechanisms)} ({', '.join(policy.transports)})"
    yield Finding("policy", Standing.FINE, f"allows {what}, epsilon {number(policy.lifetime_epsilon)} at delta {policy.delta:g} in all")
    keys = len(policy.aggregator_keys)
    if set(OVER_RELAY) & set(policy.transports) and not keys:
        yield Finding("policy", Standing.WRONG, "names no aggregator's key, so no report leaves over the relay: ldpfl policy key add KEY")
    elif keys > 1:
        yield Finding("policy", Standing.LOOK, f"names {keys} aggregators' keys: when one is replaced, ldpfl policy key remove the older")
    if policy.allow_unprotected:
        yield Finding("policy", Standing.LOOK, "allow_unprotected lets values leave without protection: take it out unless you mean that")
    if policy.immediate_replies:
        yield Finding("policy", Standing.LOOK, "immediate_replies lets a server see how long this node trained: it is for simulations")


def _of_budget(books: Books, policy: Policy | None) -> Iterator[Finding]:
    limit = books.limit
    spent = books.spent(limit.delta)
    if limit.epsilon == 0:
        why = f" ({books.refusals.reason})" if books.refusals else ""
        yield Finding("budget", Standing.WRONG, printable(f"is 0, so nothing leaves{why}: name the file that counts, or set a budget"))
    elif spent >= limit.epsilon:
        yield Finding("budget", Standing.WRONG, f"is spent: epsilon {number(spent)} of {limit.epsilon:g}; this node takes part no more")
    else:
        new = ": for a new client. One that took part before brings its old file (ldpfl budget move)" if not books.charges else ""
        said = f"epsilon {number(spent)} of {limit.epsilon:g} spent at delta {limit.delta:g}, {books.charges:,} reports charged{new}"
        yield Finding("budget", Standing.FINE, said)
    if policy and policy.delta != limit.delta:
        said = (
            f"is kept at delta {limit.delta:g}, and the policy at delta {policy.delta:g}: each bounds what leaves, so set both to the same"
        )
        yield Finding("budget", Standing.LOOK, f"{said} (ldpfl budget set --delta {policy.delta:g})")
    if policy and books.charges >= policy.rounds > 0:
        said = f"{books.charges:,} reports were charged, and the policy's rounds = {policy.rounds:,}: nothing more leaves under it"
        yield Finding("budget", Standing.WRONG, said)
    if os.environ.get("LDPFL_BUDGETS"):
        yield Finding("budget", Standing.WRONG, "LDPFL_BUDGETS is set, which is for simulations: unset it")


def _of_relay(node: NodeSetUp, connect: Connect, *, sums: bool) -> Iterator[Finding]:
    try:
        token = read_token(_named(node.token, "relay's token", "LDPFL_RELAY_TOKEN"))
        yield Finding("token", Standing.FINE, f"{node.token} is this user's alone")
    except LdpflError as error:
        yield _wrong("token", error)
        return
    if not node.relay:
        yield Finding("relay", Standing.WRONG, "the policy sends reports over a relay, and none is named: set LDPFL_RELAY to its URL")
        return
    address = node.relay.removeprefix("https://").split("/")[0]
    if node.relay.startswith("https://"):
        found = _of_server("relay", address, node.relay_ca)
        yield found
        if found.standing is Standing.WRONG:
            return
    try:
        with connect(node.relay, token, _context(node.relay_ca)) as relay:
            signer = relay.signer()
        yield Finding("relay", Standing.FINE, "answers, and knows the token as a client's")
        if sums:
            yield from _of_signer(node.signing_key, signer)
    except RelayRefused as refusal:
        said = {
            401: "does not know this token: ask its operator for one (ldpfl relay token add, or renew)",
            403: "knows this token as an aggregator's: a node needs a client's",
        }.get(refusal.status, str(refusal))
        yield Finding("relay", Standing.WRONG, said)
    except LdpflError as error:
        yield _wrong("relay", error)


def _of_signer(path: Path | None, signer: str | None) -> Iterator[Finding]:
    """Say whether the relay's token is for this node's signing key; without a key that can be read, another finding says so."""
    with suppress(LdpflError):
        own = signer_of(load_key(_named(path, "signing key", "LDPFL_SIGNING_KEY")).public_key()).hex()
        if signer == own:
            yield Finding("relay", Standing.FINE, f"takes what this node signs for sums, as {own}")
        else:
            yield Finding("relay", Standing.WRONG, str(other_signer(signer, own)))


def _of_server(what: str, address: str, authority: Path | None) -> Finding:
    """Shake hands with a server at ``host:port`` under TLS, and say what that brings."""
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "443")
    try:
        context = _context(authority)
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure,
        ):
            end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str((secure.getpeercert() or {})["notAfter"])), UTC)
    except LdpflError as error:
        return _wrong(what, error)
    except ssl.SSLCertVerificationError as error:
        said = f"{address} has a certificate that is not trusted here ({error.verify_message}): check the authority, and the name"
        return Finding(what, Standing.WRONG, said)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        return Finding(what, Standing.WRONG, f"{address} cannot be reached with TLS ({why}): check address, firewall, and that it runs")
    ends = [(end, "its certificate"), *([(end_of(authority), f"the authority {authority}")] if authority else [])]
    for until, of in ends:
        if until - datetime.now(UTC) < _SOON:
            return Finding(what, Standing.LOOK, f"{of} ends on {until:%Y-%m-%d}: have it renewed (docs/deploy.md, rotating keys)")
    return Finding(what, Standing.FINE, f"{address} has a certificate that is trusted here, valid until {end:%Y-%m-%d}")


def _context(authority: Path | None) -> ssl.SSLContext:
    """Return what trusts ``authority`` alone, or without one whom this system trusts.

    Raises:
        ConfigError: its file is none, or other users can change it.
    """
    if authority is None:
        return ssl.create_default_context()
    end_of(authority)  # says so, if it holds no certificate
    return ssl.create_default_context(cafile=require_own(authority, "the certificate authority", ConfigError, secret=False))


def _of_node_key(path: Path) -> Finding:
    try:
        own = require_own(path, "the node's key", ConfigError, secret=True)
        key = serialization.load_ssh_private_key(own.read_bytes(), password=None)
    except LdpflError as error:
        return _wrong("node key", error)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        return Finding(
            "node key", Standing.WRONG, f"{path} is no P-384 key in OpenSSH's format: ssh-keygen -t ecdsa -b 384 -N '' -f node.key"
        )
    return Finding("node key", Standing.FINE, f"{path} is this user's alone; the SuperLink's operator has registered {path}.pub?")


def _of_signing_key(path: Path | None) -> Finding:
    try:
        public = public_text(load_key(_named(path, "signing key", "LDPFL_SIGNING_KEY")))
    except LdpflError as error:
        return _wrong("signing", error)
    return Finding("signing", Standing.FINE, f"{path} is this user's alone; the aggregator's list of nodes holds {public}?")


def _of_app(offer: Offer, node: NodeSetUp, policy: Policy, books: Books | None) -> Iterator[Finding]:
    """Say whether policy and budget allow all rounds of an app."""
    try:
        check_mechanism(offer.config.mechanism.name, policy)
        check_config(offer.config, policy)
        policy.check_reply(offer.reply_s, offer.transport)
        if offer.transport in OVER_RELAY:
            clients = offer.config.clients
            check_window(offer.window_s, offer.reply_s, fewest=offer.cohort, asked=cohort_size(clients.fraction, clients.count))
        planned = releases_of(offer, ranges_for(offer, node.layers))
        releases = Counter(planned)
        for release in releases:
            policy.check(Request("check", 1, release, offer.cohort, offer.transport, _some_key(policy), offer.linked))
    except Declined as refusal:
        said = f"would be declined: {refusal}. Change the policy only if you would have agreed to the app beforehand"
        yield Finding("app", Standing.WRONG, said)
        return
    except LdpflError as error:
        yield _wrong("app", error)
        return
    rounds = releases.total()
    yield Finding("app", Standing.FINE, f"the policy allows each of its {rounds:,} rounds, over {offer.transport}")
    if books is None or not all(release.protected for release in releases):
        return
    try:  # what a node finds out when it is asked about a round, sums and bits behind a relay included
        first = Request("check", 1, planned[0], offer.cohort, offer.transport, _some_key(policy), offer.linked)
        Budget(_named(node.budget, "budget", "LDPFL_BUDGET"), policy).check(first)
    except Declined as refusal:
        yield Finding("budget", Standing.WRONG, f"its next round would be declined: {refusal}")
        return
    charged = Counter(books.counts)
    limits = ((policy.lifetime, policy.lifetime.order, "the policy's lifetime_epsilon"), (books.limit, books.order, "the budget"))
    for limit, order, of in limits:
        cost = filtered_epsilon((charged + releases).items(), order, limit.delta)
        if cost > limit.epsilon:
            said = f"all its rounds would bring epsilon to {number(cost)}, above {of} = {limit.epsilon:g}: later ones are declined"
            yield Finding("budget", Standing.LOOK, said)
    if books.charges + rounds > policy.rounds:
        said = f"{books.charges:,} reports and {rounds:,} more exceed the policy's rounds = {policy.rounds:,}: later ones are declined"
        yield Finding("budget", Standing.LOOK, said)


def _some_key(policy: Policy) -> bytes:
    """Return a key that the policy names: which one the aggregator has, the app does not tell."""
    return base64.b64decode(policy.aggregator_keys[0]) if policy.aggregator_keys else b""


def _of_data(node: NodeSetUp, offer: Offer | None) -> Iterator[Finding]:
    """Say whether the node's own table, or folder of data sets, is there and fits. Figures of it are for this terminal alone."""
    if node.data_dir:
        there = node.data_dir.is_dir()
        said = f"{node.data_dir} {'is there' if there else 'is no folder: name it in LDPFL_DATA_DIR'}"
        yield Finding("data", Standing.FINE if there else Standing.WRONG, said)
    if not node.data:
        if offer and offer.config.data.at_nodes:
            yield Finding("data", Standing.WRONG, "the app trains on this node's own table, and none is named: set LDPFL_DATA to its file")
        return
    try:
        table = table_path(node.data, node.partition)
        if offer is None or not offer.config.data.at_nodes:  # an app of one's own knows itself what it reads
            read = read_table(table)
            yield Finding(
                "data", Standing.FINE, f"{table} has {len(read):,} rows and {len(read.columns)} columns; whether it fits, --app tells"
            )
        else:
            rows, without, misfit = fitting_rows(offer.config, table)
            said = f"{table} has {rows:,} rows, {rows - without:,} of which can be trained on"
            standing = Standing.WRONG if without == rows else Standing.LOOK if misfit else Standing.FINE
            yield Finding("data", standing, printable(f"{said}{'. The first that does not fit: ' + misfit if misfit else ''}"))
        if os.name == "posix" and table.stat().st_mode & _READABLE:
            yield Finding("data", Standing.LOOK, f"{table} can be read by other users of this machine: chmod 600 it")
    except LdpflError as error:
        yield _wrong("data", error)
    except OSError as error:
        yield Finding("data", Standing.WRONG, f"{node.data} cannot be read: {error.strerror}")


def _named(path: Path | None, what: str, variable: str) -> Path:
    if path is None:
        raise ConfigError(f"no {what} is named: set {variable} to its file")
    return path


def _wrong(what: str, error: LdpflError) -> Finding:
    return Finding(what, Standing.WRONG, str(error))
