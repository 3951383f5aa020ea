"""Check the settings of a node before its SuperNode starts. None of the node's data is sent anywhere.

Each check yields findings of one line each. A finding says what was found and, if something is wrong, what to do.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from math import inf
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ldpfl.deploy.certificates import expiry_of
from ldpfl.deploy.local_round import try_round
from ldpfl.deploy.node_data import check_data
from ldpfl.deploy.node_set_up import Finding, NodeSetUp, Standing, Trial, wrong_finding
from ldpfl.errors import ConfigError, Declined, LdpflError, RelayRefused, RelayUnreachable, printable
from ldpfl.flower.app_imports import unwrapped_code, unwrapped_code_text
from ldpfl.flower.confined_process import one_thread
from ldpfl.flower.named_by_server import check_config, check_mechanism
from ldpfl.flower.operator_node import other_signer_error, read_token
from ldpfl.flower.policy_init import Offer, offer_of, ranges_for, releases_of
from ldpfl.flower.terms import check_window
from ldpfl.privacy.accountants.adaptive import filtered_epsilon
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import LOST_RUN, Books, Charged, Sent, as_stored, read_books, read_charges
from ldpfl.privacy.budget_move import is_moved
from ldpfl.privacy.events import Release
from ldpfl.privacy.policy import OVER_RELAY, Policy, Request, Transport, read_policy
from ldpfl.relay import Patience, RelayClient
from ldpfl.transport.sums import signer_of
from ldpfl.transport.sums.node_keys import load_key, public_text
from ldpfl.util.file_owners import require_own
from ldpfl.util.number_format import counted, number
from ldpfl.util.quantities import cohort_size

_EXPIRY_WARNING = timedelta(days=30)
"""A certificate that ends within this time gets a finding."""

_MAX_AHEAD_S, _MAX_BEHIND_S = 4.0, 250.0
"""Differences of clocks, in seconds, that get a finding: a little below Flower's SYSTEM_TIME_TOLERANCE and TIMESTAMP_TOLERANCE."""

_ANSWER_S = 10.0
_PATIENCE = Patience(tries=1, timeout_s=_ANSWER_S, total_s=2 * _ANSWER_S)

_NEEDED_TO_TRY = ("policy", "budget", "signing", "app", "data")
"""Checks that must succeed before a round's local work can be tried."""

_TRANSPORT_TEXTS: Mapping[Transport, str] = {
    "direct": "sent in replies, whose sender the server sees",
    "relay": "mixed by the relay",
    "sum": "added up by relay and aggregator",
}
"""How reports leave, by transport."""

_TRIED_RUN = "check"
"""Name of the run in which a round is tried against policy and budget."""

Connect = Callable[[str, str, ssl.SSLContext | bool], RelayClient]


def _connect(url: str, token: str, verify: ssl.SSLContext | bool) -> RelayClient:
    """Return a client of the relay that asks only once."""
    return RelayClient(url, token, verify=verify, patience=_PATIENCE)


@dataclass
class _ReadSettings:
    """The policy and the app's offer, as far as the check of a node has read them."""

    policy: Policy | None = None
    offer: Offer | None = None


def check_node(node: NodeSetUp, connect: Connect = _connect, trial: Trial | None = None) -> Iterator[Finding]:
    """Check ``node`` and yield the findings; ``connect`` opens the connection to its relay.

    With a ``trial`` the app's code is run: one round's local work is done on the node's data, and the report is thrown away.
    """
    known = _ReadSettings()  # filled by _check_settings while its findings are read
    can_be_tried = True
    # try_round, the trial below, forks. PyTorch hangs in the child if the checks before it have computed in several threads.
    with nullcontext() if trial is None else one_thread():
        for finding in _check_settings(node, connect, known):
            if finding.standing is Standing.WRONG and finding.what in _NEEDED_TO_TRY:
                can_be_tried = False
            yield finding
        if node.app and known.offer is not None:
            yield from _check_code(Path(node.app))
    if trial is None:
        return
    if can_be_tried and known.offer is not None and known.policy is not None:
        # Any key that the policy allows will do, because the encrypted report is thrown away.
        yield from try_round(node, known.offer, trial, _any_aggregator_key(known.policy))
    else:  # not WRONG, as the check that failed has said so
        yield Finding("try", Standing.LOOK, "no round was tried, because a check above failed: correct what it names, and check again")


def _check_settings(node: NodeSetUp, connect: Connect, known: _ReadSettings) -> Iterator[Finding]:
    """Check all settings and yield the findings. Keep the policy, and the app's offer, in ``known`` for the trial.

    An error in one setting becomes a finding. Checks that need this setting are then left out, and the others go on.
    """
    policy, books = None, None
    try:
        policy = known.policy = read_policy(_require_path(node.policy, "policy", "LDPFL_POLICY"))
        yield from _check_policy(policy)
    except LdpflError as error:
        yield wrong_finding("policy", error)
    try:
        books = read_books(_require_path(node.budget, "budget", "LDPFL_BUDGET"), policy.protects if policy else "client")
        yield from _check_budget(books, policy)
        if policy and books.charges:
            yield from _check_spent(Budget(_require_path(node.budget, "budget", "LDPFL_BUDGET"), policy))
    except LdpflError as error:
        yield wrong_finding("budget", error)
    if node.relay or (policy and set(OVER_RELAY) & set(policy.transports)):
        yield from _check_relay(node, connect, sums=policy is not None and "sum" in policy.transports)
    if policy and "sum" in policy.transports:
        yield _check_signing_key(node.signing_key)
    if node.node_key:
        yield _check_node_key(node.node_key)
    if node.superlink:
        yield _check_server("SuperLink", node.superlink, node.superlink_ca)
    offer = None
    if node.app:
        try:
            offer = known.offer = offer_of(node.app, node.config)
        except LdpflError as error:
            yield wrong_finding("app", error)
    if offer and policy:
        yield from _check_app(offer, node, policy, books)
    yield from check_data(node, offer)


def _check_code(app: Path) -> Iterator[Finding]:
    """Check that Flower runs no code of the app outside of ``LdpClientApp``. A trial is done all the same, because it may say more."""
    if not (app / "pyproject.toml").is_file():  # a recipe or a config has no code of its own
        return
    try:
        if places := tuple(unwrapped_code(app)):
            yield Finding("app", Standing.WRONG, printable(unwrapped_code_text(places)))
    except LdpflError as error:
        yield wrong_finding("app", error)


def _check_policy(policy: Policy) -> Iterator[Finding]:
    """Check that the policy allows something, and name what in it needs the operator's attention."""
    missing = [name for name in ("mechanisms", "rounds", "lifetime_epsilon", "transports") if not getattr(policy, name)]
    if missing:
        yield Finding("policy", Standing.WRONG, f"allows nothing: set {', '.join(missing)}, or make one with ldpfl policy init")
        return
    transports = " or ".join(_TRANSPORT_TEXTS[transport] for transport in policy.transports)
    allowed = f"{counted(policy.rounds, 'report')} of {' or '.join(policy.mechanisms)} at most, {transports}"
    bounds = [f"{number(policy.lifetime_epsilon)} against whoever keeps all of them"]
    if policy.relay_epsilon != "off":
        bounds.append(f"{number(policy.relay_epsilon)} against whoever sees what the relay has mixed")
    if policy.sum_epsilon != "off":
        bounds.append(f"{number(policy.sum_epsilon)} against whoever sees sums alone")
    yield Finding("policy", Standing.FINE, f"allows {allowed}; epsilon of all reports at delta {policy.delta:g}: {', '.join(bounds)}")
    key_count = len(policy.aggregator_keys)
    if set(OVER_RELAY) & set(policy.transports) and not key_count:
        yield Finding(
            "policy", Standing.WRONG, "has no aggregator's key, so no report leaves over the relay: add one with ldpfl policy key add KEY"
        )
    elif key_count > 1:
        text = f"has {key_count} aggregators' keys: if one replaced another, remove the older with ldpfl policy key remove"
        yield Finding("policy", Standing.LOOK, text)
    if policy.allow_unprotected:
        yield Finding("policy", Standing.LOOK, "allow_unprotected lets values leave without protection: remove it unless this is intended")
    if policy.immediate_replies:
        yield Finding("policy", Standing.LOOK, "immediate_replies lets a server see how long this node trained: use it in simulations only")


def _check_budget(books: Books, policy: Policy | None) -> Iterator[Finding]:
    """Check that the budget is not spent, and that it fits the policy."""
    limit = books.limit
    spent = books.spent(limit.delta)
    if limit.epsilon == 0:
        reason = f" ({books.refusals.reason})" if books.refusals else ""
        or_set = "" if is_moved(books) else ", or set a budget (ldpfl budget set)"  # a moved budget cannot be set again
        remedy = f"set LDPFL_BUDGET to the file in use{or_set}"
        yield Finding("budget", Standing.WRONG, printable(f"is 0, so nothing leaves{reason}: {remedy}"))
    elif spent >= limit.epsilon:
        yield Finding("budget", Standing.WRONG, f"is spent: epsilon {number(spent)} of {limit.epsilon:g}; this node takes part no more")
    else:
        if_new = (
            "" if books.charges else ": this is a new client's file. A client that took part before needs its old file (ldpfl budget move)"
        )
        text = f"epsilon {number(spent)} of {limit.epsilon:g} spent at delta {limit.delta:g}, {counted(books.charges, 'report')} charged"
        yield Finding("budget", Standing.FINE, f"{text}{if_new}")
    if policy and policy.delta != limit.delta:
        text = f"has delta {limit.delta:g}, but the policy has delta {policy.delta:g}. Both limit what leaves: set them to the same delta"
        yield Finding("budget", Standing.LOOK, f"{text} (ldpfl budget set --delta {policy.delta:g})")
    if policy and books.charges >= policy.rounds > 0:
        text = f"{counted(books.charges, 'report')} charged, and the policy allows rounds = {policy.rounds:,}: no further report leaves"
        yield Finding("budget", Standing.WRONG, text)
    if os.environ.get("LDPFL_BUDGETS"):
        yield Finding("budget", Standing.WRONG, "LDPFL_BUDGETS is set, which is for simulations only: unset it")


def _check_spent(budget: Budget) -> Iterator[Finding]:
    """Check how much was spent of the policy's bounds on mixed and on summed reports. The next round's cost is checked with the app.

    ``lifetime_epsilon`` is named only if no epsilon bounds what was sent. Otherwise :func:`_check_budget` has named the epsilon spent.
    """
    for spend in budget.spent_of_policy():
        if spend.setting == "lifetime_epsilon" and spend.epsilon < inf:
            continue
        used_up = spend.epsilon >= spend.allowed
        end = "; this node takes part no more" if used_up else ""
        text = f"epsilon {number(spend.epsilon)} of the policy's {spend.setting} = {spend.allowed:g} spent, against {spend.against}{end}"
        yield Finding("budget", Standing.WRONG if used_up else Standing.FINE, text)


def _check_relay(node: NodeSetUp, connect: Connect, *, sums: bool) -> Iterator[Finding]:
    """Check the node's token, and that the relay answers and knows this token. With ``sums``, check the signing key as well."""
    try:
        token = read_token(_require_path(node.token, "relay's token", "LDPFL_RELAY_TOKEN"))
        yield Finding("token", Standing.FINE, f"{node.token} can be read by this user only")
    except LdpflError as error:
        yield wrong_finding("token", error)
        return
    if not node.relay:
        yield Finding("relay", Standing.WRONG, "the policy sends reports over a relay, but no relay is set: set LDPFL_RELAY to its URL")
        return
    address = node.relay.removeprefix("https://").split("/")[0]
    if node.relay.startswith("https://"):
        finding = _check_server("relay", address, node.relay_ca)
        yield finding
        if finding.standing is Standing.WRONG:
            return
    try:
        with connect(node.relay, token, _tls_context(node.relay_ca)) as relay:
            asked_at_s = time.time()
            signer = relay.signer()
            yield from _check_clock(asked_at_s, time.time(), relay.answer_date)
        yield Finding("relay", Standing.FINE, "answers, and accepts the token as a client's")
        if sums:
            yield from _check_signer(node.signing_key, signer)
    except RelayRefused as refusal:
        text = {
            401: "does not know this token: ask the relay's operator for one (ldpfl relay token add, or renew)",
            403: "has this token as an aggregator's, expected a client's: ask the relay's operator for one",
        }.get(refusal.status, str(refusal))
        yield Finding("relay", Standing.WRONG, text)
    except LdpflError as error:
        yield wrong_finding("relay", error)
        if node.relay.startswith("http://") and isinstance(error, RelayUnreachable):
            yield Finding("relay", Standing.LOOK, f"if the relay uses TLS, its URL is https://{node.relay.removeprefix('http://')}")


def _check_clock(asked_at_s: float, answered_at_s: float, answer_date: str) -> Iterator[Finding]:
    """Compare this machine's clock with the relay's, which showed ``answer_date`` at some moment between question and answer.

    The date is cut to whole seconds, and the moment is unknown, so only bounds on the difference of the clocks are known. The smallest
    difference within these bounds is compared with the limits.
    """
    try:
        relay_s = parsedate_to_datetime(answer_date).timestamp()
    except ValueError:  # no date, or none that can be read
        return
    # When the relay read its clock, it showed relay_s to relay_s + 1, and this machine's clock showed asked_at_s to answered_at_s.
    ahead_s, behind_s = asked_at_s - (relay_s + 1), relay_s - answered_at_s
    if ahead_s > _MAX_AHEAD_S or behind_s > _MAX_BEHIND_S:
        difference = f"{ahead_s:.0f} s ahead of" if ahead_s > 0 else f"{behind_s:.0f} s behind"
        text = f"this machine's clock is {difference} the relay's, and Flower's SuperLink refuses nodes more than 5 s ahead or 300 s behind"
        yield Finding("clock", Standing.WRONG, f"{text}: synchronise the clock (NTP)")


def _check_signer(path: Path | None, signer: str | None) -> Iterator[Finding]:
    """Check whether the relay's token is for this node's signing key. :func:`_check_signing_key` reports a key that cannot be read."""
    with suppress(LdpflError):
        node_signer = signer_of(load_key(_require_path(path, "signing key", "LDPFL_SIGNING_KEY")).public_key()).hex()
        if signer == node_signer:
            yield Finding("relay", Standing.FINE, f"accepts this node's signatures for sums, by the key {node_signer}")
        else:
            yield Finding("relay", Standing.WRONG, str(other_signer_error(signer, node_signer)))


def _check_server(server: str, address: str, authority: Path | None) -> Finding:
    """Try a TLS handshake with the ``server`` (its name in the finding) at ``address``, which is ``host:port``, or a host at port 443."""
    host, _, port = address.rpartition(":") if ":" in address else (address, "", "443")
    if "://" in address:
        return Finding(server, Standing.WRONG, f"its address is {address}: expected HOST:PORT, without {address.partition('://')[0]}://")
    try:
        context = _tls_context(authority)
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as tcp,
            context.wrap_socket(tcp, server_hostname=host.strip("[]")) as tls,
        ):
            end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str((tls.getpeercert() or {})["notAfter"])), UTC)
    except LdpflError as error:
        return wrong_finding(server, error)
    except ssl.SSLCertVerificationError as error:
        # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED, for which Python has no names
        advice = "this machine's clock, and the certificate's dates" if error.verify_code in (9, 10) else "the authority, and the name"
        text = f"{address} has a certificate that is not trusted here ({error.verify_message}): check {advice}"
        return Finding(server, Standing.WRONG, text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        text = f"{address} cannot be reached with TLS ({reason}): check address, firewall, and that it runs"
        return Finding(server, Standing.WRONG, text)
    expiries = [(end, "its certificate")]
    if authority:
        expiries.append((expiry_of(authority), f"the authority {authority}"))
    for expiry, certificate in expiries:
        if expiry - datetime.now(UTC) < _EXPIRY_WARNING:
            text = f"{certificate} ends on {expiry:%Y-%m-%d}: have it renewed (docs/deploy.md, rotating keys)"
            return Finding(server, Standing.LOOK, text)
    return Finding(server, Standing.FINE, f"{address} has a certificate that is trusted here, valid until {end:%Y-%m-%d}")


def _tls_context(authority: Path | None) -> ssl.SSLContext:
    """Return a TLS context that trusts only ``authority``; without an authority, those that this system trusts.

    Raises:
        ConfigError: the file holds no certificate, or other users can change it.
    """
    if authority is None:
        return ssl.create_default_context()
    expiry_of(authority)  # raises if the file holds no certificate
    return ssl.create_default_context(cafile=require_own(authority, "the certificate authority", ConfigError, secret=False))


def _check_node_key(path: Path) -> Finding:
    """Check that the key by which the SuperLink recognises the node is private and of the kind that Flower needs."""
    if path.suffix == ".pub":
        return Finding("node key", Standing.WRONG, f"{path} is the public half: name the private key, {path.with_suffix('')}")
    try:
        checked_path = require_own(path, "the node's key", ConfigError, secret=True)
        key = serialization.load_ssh_private_key(checked_path.read_bytes(), password=None)
    except LdpflError as error:
        return wrong_finding("node key", error)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        return Finding(
            "node key",
            Standing.WRONG,
            f"{path} is not a P-384 key in OpenSSH's format: make one with ssh-keygen -t ecdsa -b 384 -N '' -f node.key",
        )
    text = f"{path} can be read by this user only. Ask the SuperLink's operator whether {path}.pub is registered"
    return Finding("node key", Standing.FINE, text)


def _check_signing_key(path: Path | None) -> Finding:
    """Check that the node's key for sums is there and private."""
    try:
        public = public_text(load_key(_require_path(path, "signing key", "LDPFL_SIGNING_KEY")))
    except LdpflError as error:
        return wrong_finding("signing", error)
    text = f"{path} can be read by this user only. Ask the aggregator's operator whether the list of nodes has its line: {public}"
    return Finding("signing", Standing.FINE, text)


def _check_app(offer: Offer, node: NodeSetUp, policy: Policy, books: Books | None) -> Iterator[Finding]:
    """Check whether the policy allows all rounds of an app, and whether the rest of the budget does.

    Args:
        offer: what the app asks of the node.
        books: contents of the budget file; None if it cannot be read. Then only the policy is checked.
    """
    try:
        check_mechanism(offer.config.mechanism.name, policy)
        check_config(offer.config, policy)
        policy.check_reply(offer.reply_s, offer.transport)
        if offer.transport in OVER_RELAY:
            clients = offer.config.clients
            check_window(offer.window_s, offer.reply_s, fewest=offer.cohort, asked=cohort_size(clients.fraction, clients.count))
        planned = releases_of(offer, ranges_for(offer, node.layers))  # one for each round
        for release in dict.fromkeys(planned):  # each different release once
            policy.check(_request_of(release, offer, policy))
    except Declined as refusal:
        text = f"would be declined: {_why_declined(refusal)}. Change the policy only if you would have agreed to the app beforehand"
        yield Finding("app", Standing.WRONG, text)
        return
    except LdpflError as error:
        yield wrong_finding("app", error)
        return
    which_rounds = "its only round" if len(planned) == 1 else f"each of its {len(planned):,} rounds"
    yield Finding("app", Standing.FINE, f"the policy allows {which_rounds}; reports are {_TRANSPORT_TEXTS[offer.transport]}")
    if books is not None and all(release.protected for release in planned):
        yield from _check_app_fits_budget(offer, planned, policy, _require_path(node.budget, "budget", "LDPFL_BUDGET"), books)


def _check_app_fits_budget(offer: Offer, planned: Sequence[Release], policy: Policy, budget: Path, books: Books) -> Iterator[Finding]:
    """Check whether the ``budget`` file, with the contents ``books``, allows all rounds of an app, whose releases are ``planned``.

    Args:
        offer: what the app asks of the node.
    """
    run, charged_rounds = _unfinished_run(read_charges(budget), planned)
    to_come = planned[charged_rounds:]  # not empty: a run with all its rounds is not unfinished
    if charged_rounds:
        text = f"run {run}, probably of this app, has charged {charged_rounds:,} of {len(planned):,} rounds"
        text = f"{text}: only the other {len(to_come):,} are counted below"
        yield Finding("budget", Standing.FINE, printable(text))
    try:  # the same check as for the server's question, including the policy's limits on sums and on mixed bits
        Budget(budget, policy).check(_request_of(to_come[0], offer, policy))
    except Declined as refusal:
        yield Finding("budget", Standing.WRONG, f"the app's next round would be declined: {_why_declined(refusal)}")
        return
    together = 1 if offer.transport == "direct" else books.together  # nodes that share the budget
    new_counts = Counter({release: count * together for release, count in Counter(to_come).items()})
    all_counts = (Counter(books.counts) + new_counts).items()
    new_reports = [
        Sent(as_stored(release), offer.cohort, offer.transport, offer.linked, count, together) for release, count in new_counts.items()
    ]
    # Policy and budget each limit the epsilon of all reports, by a privacy filter of a fixed Rényi order.
    lifetime, limit = policy.lifetime, books.limit
    costs = [
        (filtered_epsilon(all_counts, lifetime.order, lifetime.delta), "", lifetime.epsilon, "the policy's lifetime_epsilon"),
        (filtered_epsilon(all_counts, books.order, limit.delta), "", limit.epsilon, "the budget"),
    ]
    for spend in Budget(budget, policy).spends_behind_relay(new_reports):
        costs.append((spend.epsilon, f" for {spend.against}", spend.allowed, f"the policy's {spend.setting}"))
    for cost, against, allowed, source in costs:
        if cost > allowed:
            text = (
                f"all rounds of the app would cost epsilon {number(cost)}{against}, above {source} = {allowed:g}: later rounds are declined"
            )
            yield Finding("budget", Standing.LOOK, text)
    reports_to_come = len(to_come) * together
    if books.charges + reports_to_come > policy.rounds:
        reports = counted(books.charges, "report")
        text = f"{reports} and the app's {reports_to_come:,} exceed the policy's rounds = {policy.rounds:,}: later rounds are declined"
        yield Finding("budget", Standing.LOOK, text)


def _request_of(release: Release, offer: Offer, policy: Policy) -> Request:
    """Return the request by which ``offer`` asks for ``release``, as policy and budget judge it: in a made-up run and round."""
    return Request(_TRIED_RUN, 1, release, offer.cohort, offer.transport, _any_aggregator_key(policy), offer.linked)


def _unfinished_run(charges: Sequence[Charged], planned: Sequence[Release]) -> tuple[str, int]:
    """Return the run that was charged last, and how many rounds it has charged. Return "", 0 if it cannot be an unfinished run of the app.

    An app may be checked while it runs. Its charged rounds must not be counted again, as rounds of a new run. Such a run is recognised by
    its releases: each charged round has the release that the app plans for the round with this number.
    """
    run = next((charge.run for charge in reversed(charges) if charge.run != LOST_RUN), "")
    releases = {charge.round: charge.release for charge in charges if charge.run == run}
    last_round = max(releases, default=0)
    # A run that has charged as many rounds as the app plans is finished.
    is_same_app = last_round < len(planned) and all(release == as_stored(planned[number - 1]) for number, release in releases.items())
    return (run, last_round) if is_same_app and last_round else ("", 0)


def _why_declined(refusal: Declined) -> str:
    """Return why a round would be declined, without the made-up name of the round that was tried."""
    return str(refusal).removeprefix(f"run {_TRIED_RUN}, round 1: ").removesuffix("; nothing was sent")


def _any_aggregator_key(policy: Policy) -> bytes:
    """Return any of the policy's aggregator keys, since the app does not say which of them the aggregator has; empty if there is none."""
    return base64.b64decode(policy.aggregator_keys[0]) if policy.aggregator_keys else b""


def _require_path(path: Path | None, setting: str, variable: str) -> Path:
    """Return ``path``, or raise a :class:`ConfigError` that tells how to set it."""
    if path is None:
        raise ConfigError(f"no file is set for the {setting}: set {variable} to its path")
    return path
