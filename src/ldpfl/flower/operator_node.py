"""The operator's settings of a node: the policy, the lifetime budget, and the access to the relay.

The operator names each file or address in the environment of the SuperNode. No setting comes from the server: not from the message, the
run's config or the node's id. No setting comes from Flower's node config either: the SuperNode passes it to its processes over a loopback
interface, where other users of the machine can change it.

| environment           | meaning                                                                               |
|-----------------------|---------------------------------------------------------------------------------------|
| ``LDPFL_POLICY``      | policy file; without one nothing leaves                                               |
| ``LDPFL_BUDGET``      | file of the lifetime budget                                                           |
| ``LDPFL_BUDGETS``     | in place of ``LDPFL_BUDGET``, for simulations, where many clients share a machine and |
|                       | an environment: a folder with a file for each ``partition-id``, created when needed   |
|                       | with the policy's lifetime budget                                                     |
| ``LDPFL_RELAY``       | URL of the relay                                                                      |
| ``LDPFL_RELAY_TOKEN`` | file with the client's token                                                          |
| ``LDPFL_RELAY_CA``    | file with the relay's certificate authority, if it has its own                        |
| ``LDPFL_SIGNING_KEY`` | file with the private key that signs the node's shares of sums                        |
| ``LDPFL_DEVICE``      | where the recipes train: auto, cpu (if left out) or cuda                              |
"""

from __future__ import annotations

import hashlib
import os
import secrets
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from flwr.app import Context

from ldpfl.errors import ConfigError, Declined, NoRelay, NoSigningKey, NotSetUp, OtherSigningKey, ProtocolError, TooLate
from ldpfl.flower.named_by_server import check_config, check_mechanism
from ldpfl.flower.round_request import Ask
from ldpfl.flower.sent_vectors import check_sums
from ldpfl.flower.terms import numbers_in_sum, require_adding_up
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.policy import OVER_RELAY, UPLOAD_S, Policy, Request, read_policy
from ldpfl.relay import Patience, RelayClient, RoundStatus, SumTerms, Terms as RelayTerms
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import OVERHEAD, Binding, seal
from ldpfl.transport.sums import SumBinding, new_seed, seal_seed, shard, signer_of
from ldpfl.transport.sums.node_keys import load_key
from ldpfl.util.file_owners import require_own

Connect = Callable[[], RelayClient]
Signing = Callable[[], Ed25519PrivateKey]

_GRACE_S = 30.0
"""Seconds after the end of a round's window during which an upload is still tried."""

_SHORTEST_UPLOAD_S = UPLOAD_S / 2
"""Minimum number of seconds that a round must leave for an upload when a node is asked. The server plans twice as many, because nodes are
asked one after another."""

PATIENCE = Patience(tries=26, all_tries_s=300.0)
"""How long a node tries each of its one or two requests to the relay before the charge. A relay that takes no connection is tried for 2.5
minutes at least, so that its restart costs no round. A relay that answers slowly holds the node for 10 minutes in all at most."""

_GRACE_WITHOUT_END_S = 600.0
"""Seconds for which an upload is still tried after the window of a round that cannot end without all clients."""


def _no_signing_key() -> Ed25519PrivateKey:
    """Raise the error for a node without a signing key. Default of :attr:`OperatorNode.signing`."""
    raise NoSigningKey("this node cannot take part in sums, because it has no signing key (LDPFL_SIGNING_KEY); nothing was sent")


@dataclass(frozen=True)
class OperatorNode:
    """The operator's settings of a node, read anew for each message.

    Attributes:
        policy: what may leave the node.
        budget: the lifetime budget, in a file, which each release is charged to.
        connect: function that opens a connection to the operator's relay.
        signing: function that returns the key by which this node signs its shares of sums.
    """

    policy: Policy
    budget: Budget
    connect: Connect
    signing: Signing = _no_signing_key

    def check_mechanism(self, name: str) -> None:
        """Raise if a server may not name the mechanism ``name``. The refusal is recorded in the budget's file.

        Raises:
            Declined: :func:`ldpfl.flower.named_by_server.check_mechanism` does not allow it.
        """
        try:
            check_mechanism(name, self.policy)
        except Declined as refusal:
            raise self.budget.refused(refusal) from None

    def keeps_state(self, ask: Ask) -> bool:
        """Return whether the app's state is kept for the next round. Over a relay the policy must allow it: a state can mark a client."""
        return ask.terms.transport == "direct" or self.policy.keep_state

    def would_admit(self, ask: Ask) -> None:
        """Check the policy, the budget and the relay settings as :meth:`admit` does, but record neither a charge nor a refusal.

        Raises:
            Declined: the operator does not allow the release.
            LdpflError: the relay does not answer.
        """
        self.would_allow(ask)
        if ask.terms.transport in OVER_RELAY:
            with self.connect() as relay:  # reads the operator's files, and raises if they cannot be used
                self._check_signer(ask, relay)  # for a sum, asks the relay, which gets this node's token

    def would_allow(self, ask: Ask) -> None:
        """Check the policy and the budget as :meth:`admit` does, but record nothing. The relay is not asked.

        Raises:
            Declined: the operator does not allow the release.
        """
        self._check_terms(ask)
        self.budget.check(self._request(ask))
        if ask.terms.transport == "sum":
            self.signing()  # raises if there is no signing key

    def admit(self, ask: Ask) -> float:
        """Check that the policy allows the release, and that a relay expects the same release of all clients. Then charge the budget.

        Return the number of seconds during which the report can be delivered: infinite for a report in a Flower reply.

        Raises:
            Declined: the operator does not allow the release, or the relay's round ends before this client could upload.
            LdpflError: the relay does not answer, or its round is for other reports.
        """
        try:
            self._check_terms(ask)
        except Declined as refusal:
            raise self.budget.refused(refusal) from None
        request = self._request(ask)
        if ask.terms.transport == "direct":
            self.budget.charge(request)
            return inf
        self.budget.check_policy(request)  # before this node contacts the relay
        if ask.terms.transport == "sum":
            self.signing()  # raises if there is no signing key, and must do so before the charge: without the key nothing can be sent
        try:
            status = self._relay_round(ask)
        except TooLate:
            self.budget.check(request)  # a repeated message is refused as such: it is no sign that nothing of the round was charged
            raise
        status_time = time.monotonic()
        self.budget.charge(request)  # may wait for the budget's file, so the waiting time is subtracted below
        return self._upload_seconds(status) - (time.monotonic() - status_time)

    def _check_terms(self, ask: Ask) -> None:
        """Raise if the policy does not allow what the terms name, or the terms contradict themselves."""
        check_config(ask.terms.config, self.policy)
        check_sums(ask.terms)  # after check_config, because this may load code that the config names
        self.policy.check_reply(ask.terms.reply_s, ask.terms.transport)

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        """Encrypt ``payload`` for the aggregator's key, which the policy has allowed, in the form that the relay expects.

        For a mixing relay, the result is the payload's encrypted records. For a sum, ``payload`` holds integers of 8 bytes each: a mask is
        drawn, and the result is the masked vector followed by the mask's seed, encrypted and signed.
        """
        terms = ask.terms
        aggregator = X25519PublicKey.from_public_bytes(terms.key)
        if terms.transport == "relay":
            plan = self._record_plan(ask)
            return seal(plan.split(payload), aggregator, Binding(terms.run, terms.round, plan.fingerprint))
        bits = require_adding_up(ask.mechanism).bits
        seed = new_seed()
        numbers = numbers_in_sum(ask.mechanism, ask.ranges)
        binding = SumBinding(terms.run, terms.round, bytes.fromhex(ask.agreement), numbers, bits)
        return shard(np.frombuffer(payload, dtype="<i8"), seed, bits) + seal_seed(seed, aggregator, self.signing(), binding)

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        """Upload ``sealed`` to the operator's relay, resuming after interruptions for up to ``within_s`` seconds."""
        run, number = ask.terms.run, ask.terms.round
        with self.connect() as relay:
            if ask.terms.transport == "sum":
                relay.upload_share(run, number, sealed, within_s=within_s)
            else:
                # The random text is the upload's id: the relay stores one upload under it, however often it is sent.
                relay.upload(run, number, secrets.token_urlsafe(24), sealed, within_s=within_s)

    def _relay_round(self, ask: Ask) -> RoundStatus:
        """Return the relay's status of the round. Raise if relay and server ask for different things, or the report would not be accepted.

        If they ask for different things, a refusal is recorded in the budget's file, because it may be an attack: a node that is asked for
        something else than the others could be recognised by its report.
        """
        with self.connect() as relay:
            self._check_signer(ask, relay)
            status = relay.round_status(ask.terms.run, ask.terms.round)
        if status.terms.agreement != ask.agreement:
            reason = (
                "the server's message does not have the digest that the relay states to all clients, so other clients may have been asked "
                "for something else"
            )
            raise self.budget.refused(self._request(ask).declined(reason))
        if status.terms.min_clients != ask.terms.min_clients:
            fewest, stated = status.terms.min_clients, ask.terms.min_clients
            reason = f"the relay waits for {fewest} reports, but the server's message says min_clients = {stated}"
            raise self.budget.refused(self._request(ask).declined(reason))
        if status.state in ("released", "gone"):
            raise TooLate(
                f"round {ask.terms.round} is over at the relay; nothing was charged or sent. If nodes are asked too late, the server "
                "should set a longer window (ldpfl.window-s)"
            )
        # A round that waits for all its clients does not end with its window.
        left_s = self._upload_seconds(status) if _waits_for_all(status.terms) else status.seconds_left
        reply_s = ask.terms.reply_s
        if reply_s and left_s < reply_s + _SHORTEST_UPLOAD_S:
            raise TooLate(
                f"the relay's round ends in {left_s:.0f} s, but clients send after {reply_s:g} s and need {_SHORTEST_UPLOAD_S:g} s for "
                "the upload: the server must set a longer window (ldpfl.window-s); nothing was charged or sent"
            )
        self._check_form(ask, status.terms)
        return status

    def _check_signer(self, ask: Ask, relay: RelayClient) -> None:
        """Raise if the relay expects another signing key than this node's. Otherwise the relay would refuse the report after the charge."""
        if ask.terms.transport != "sum":
            return
        expected, node_signer = relay.signer(), signer_of(self.signing().public_key()).hex()
        if expected != node_signer:
            raise other_signer_error(expected, node_signer)

    def _check_form(self, ask: Ask, terms: RelayTerms | SumTerms) -> None:
        """Raise if the relay's round expects reports of another form or length than this node's report will have."""
        if ask.terms.transport == "sum":
            numbers = numbers_in_sum(ask.mechanism, ask.ranges)
            fits = isinstance(terms, SumTerms) and (terms.dimension, terms.bits) == (numbers, require_adding_up(ask.mechanism).bits)
        else:
            plan = self._record_plan(ask)
            sizes = (plan.plaintext_bytes + OVERHEAD, plan.records)
            fits = isinstance(terms, RelayTerms) and (terms.record_bytes, terms.records_per_upload) == sizes
        if not fits:
            raise ProtocolError(
                f"the relay expects reports of another form or length than the server's terms of round {ask.terms.round}; nothing was "
                "charged or sent. Check that server, relay and node run the same version of ldpfl"
            )

    def _upload_seconds(self, status: RoundStatus) -> float:
        """Return for how many seconds to try the upload: longer than the round's window, but no longer than the policy allows.

        The round may still be open after its window. If it is over, a late try costs little, because the relay replies at once.
        """
        return min(status.seconds_left + (_GRACE_WITHOUT_END_S if _waits_for_all(status.terms) else _GRACE_S), self.policy.longest_upload_s)

    def _record_plan(self, ask: Ask) -> RecordPlan:
        """Return how the report is cut into the records that a relay mixes."""
        return RecordPlan(ask.mechanism, ask.ranges, ask.terms.linked, unprotected=self.policy.allow_unprotected)

    def _request(self, ask: Ask) -> Request:
        """Return the release that ``ask`` asks for, in the form in which policy and budget judge it."""
        terms = ask.terms
        return Request.of(
            ask.mechanism,
            ask.ranges,
            run=terms.run,
            round=terms.round,
            cohort=terms.cohort,
            transport=terms.transport,
            key=terms.key,
            linked=terms.linked,
            chosen_by=ask.chosen_by,
        )


def operator_node(context: Context) -> OperatorNode:
    """Return the operator's settings of this node. ``context`` says which client this node is in a simulation, and gives its id in Flower.

    Raises:
        Declined: no policy or budget is named, or its file cannot be trusted.
    """
    policy = read_policy(_setting_path("policy"))
    return OperatorNode(policy, Budget(_budget_file(context, policy), policy, _name_in_budget(context)), _connector(), _key_loader())


def other_signer_error(expected: str | None, node_signer: str) -> OtherSigningKey:
    """Return the error of a node that signs as ``node_signer``, although its token at the relay is for ``expected``, or for no key."""
    expected_key = f"the signing key {expected}" if expected else "no signing key"
    return OtherSigningKey(
        f"this node's token at the relay is for {expected_key}, but the node signs with {node_signer}: send the line that ldpfl deploy "
        "node-key FILE --show prints to the relay's operator, who makes another token by ldpfl relay token renew NAME --signing-key LINE; "
        "nothing was sent"
    )


def _budget_file(context: Context, policy: Policy) -> Path:
    """Return the file of this node's budget. In a simulation, it is created if it does not exist."""
    folder = operator_setting("budgets")
    if folder is None:
        return _setting_path("budget")
    if operator_setting("budget"):
        raise Declined("LDPFL_BUDGET and LDPFL_BUDGETS are both set: unset one of them; nothing was sent")
    client = context.node_config.get("partition-id")
    if client is None:  # the node's id is no substitute: the server could choose an id whose budget is unspent
        raise Declined(
            f"the node's config has no partition-id, which decides the node's budget file in {folder} (LDPFL_BUDGETS): add it by "
            '--node-config "partition-id=N"; nothing was sent'
        )
    budget_file = Path(folder) / f"client-{int(client)}.sqlite"
    if not budget_file.exists():
        set_limit(budget_file, policy.lifetime_epsilon, policy.delta)
    return budget_file


def _name_in_budget(context: Context) -> str:
    """Return the name by which the budget's file recognises a repeated message to this node, which is not charged again.

    It is a digest of the node's token for the relay, because the relay takes one report a round for each token. Without a token it is
    Flower's id of the node. Under a new token or id a repeated message may be charged again, which only counts too much.
    """
    if token_file := operator_setting("relay-token"):
        with suppress(ConfigError, OSError):  # a token that cannot be used is reported by the connection to the relay, before any charge
            return hashlib.sha256(f"budget of {read_token(Path(token_file))}".encode()).hexdigest()[:16]
    return str(context.node_id)


def _connector() -> Connect:
    """Return a function that connects to the operator's relay.

    It reads the operator's files at the first call only, which comes before the charge and before the app, which could change the files.
    """

    @cache
    def settings() -> tuple[str, str, ssl.SSLContext | bool]:
        """Return the relay's URL, the token, and what to verify the relay's certificate with: True for the system's authorities."""
        authority, url = operator_setting("relay-ca"), operator_setting("relay")
        if not url:
            raise NoRelay(f"no relay is set up on this node: set {_variable_name('relay')} to the relay's URL; nothing was sent")
        verify = ssl.create_default_context(cafile=_checked_authority(Path(authority))) if authority else True
        return url, read_token(_setting_path("relay-token", NoRelay)), verify

    def connect() -> RelayClient:
        """Return a client of the relay. Raise ``NoRelay`` if a setting is missing or its file cannot be used."""
        try:
            url, token, verify = settings()
            return RelayClient(url, token, verify=verify, patience=PATIENCE)
        except (ConfigError, OSError) as error:  # its text names only the operator's own files, so it may be logged
            raise NoRelay(f"the relay is not set up on this node: {error}; nothing was sent") from None

    return connect


def _key_loader() -> Signing:
    """Return a function that loads the node's signing key.

    It reads the file at the first call only, which comes before the charge and before the app, which could change the file.
    """

    @cache
    def key() -> Ed25519PrivateKey:
        """Return the signing key. Raise ``NoSigningKey`` if none is named or its file cannot be used."""
        try:
            return load_key(_setting_path("signing-key", NoSigningKey))
        except ConfigError as error:  # its text names only the operator's own file, so it may be logged
            raise NoSigningKey(f"the signing key is not set up on this node: {error}; nothing was sent") from None

    return key


def _checked_authority(authority: Path) -> Path:
    """Return ``authority`` if no other user can change the file at this path. Whoever can change it can pose as the relay."""
    return require_own(authority, "the relay's certificate authority", ConfigError, secret=False)


def read_token(path: Path) -> str:
    """Return the token for the relay in the file at ``path``.

    Raises:
        ConfigError: the file holds no token, or other users can read it.
    """
    token_file = require_own(path, "the relay's token", ConfigError, secret=True)
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token:
        raise ConfigError(f"{path} holds no token for the relay: write the token that ldpfl relay token add printed into this file")
    return token


def operator_setting(name: str) -> str | None:
    """Return the operator's setting ``name``, such as "relay-ca", from the environment variable LDPFL_RELAY_CA; None if unset or empty."""
    return os.environ.get(_variable_name(name)) or None


def _setting_path(name: str, missing: type[Declined] = NotSetUp) -> Path:
    """Return the path that the operator's setting ``name`` holds. Raise the error ``missing`` if the setting is not set."""
    value = operator_setting(name)
    if not value:
        raise missing(
            f"no {name} is set up on this node: set {_variable_name(name)} to its file, in the environment of the SuperNode "
            f"(ldpfl-{name} in --node-config is ignored, because others could change it); nothing was sent"
        )
    return Path(value)


def _variable_name(name: str) -> str:
    """Return the name of the environment variable for the operator's setting ``name``, such as LDPFL_RELAY_CA for "relay-ca"."""
    return f"LDPFL_{name.upper().replace('-', '_')}"


def _waits_for_all(terms: RelayTerms | SumTerms) -> bool:
    """Tell whether the relay keeps the round open until every client that was asked has uploaded, whatever its window."""
    return terms.min_clients >= terms.max_uploads
