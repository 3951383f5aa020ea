"""What a node's operator has set up: the policy, the lifetime budget, and the way to the relay.

Each is a file or address that the operator names in the environment in which the SuperNode is started. Nothing of it is read from
what the server sends or chooses: neither from the message nor from the run's config or the node's number. Nor from the node's config,
as Flower calls it: SuperNode hands that to its processes over an interface on loopback, where other users of the machine can change it.

| environment           | what                                                                                  |
|-----------------------|---------------------------------------------------------------------------------------|
| ``LDPFL_POLICY``      | policy file; without one nothing leaves                                               |
| ``LDPFL_BUDGET``      | file of the lifetime budget                                                           |
| ``LDPFL_BUDGETS``     | in place of it, for simulations, where many clients share a machine and an            |
|                       | environment: a folder with a file for each ``partition-id``, made at need with the    |
|                       | policy's lifetime budget                                                              |
| ``LDPFL_RELAY``       | URL of the relay                                                                      |
| ``LDPFL_RELAY_TOKEN`` | file with the client's token                                                          |
| ``LDPFL_RELAY_CA``    | file with the relay's certificate authority, if it has its own                        |
| ``LDPFL_SIGNING_KEY`` | file with the private key by which the node signs what it adds to sums                |
| ``LDPFL_DEVICE``      | where the recipes train: auto, cpu (if left out) or cuda                              |
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from flwr.app import Context

from ldpfl.errors import ConfigError, Declined, NoRelay, NoSigningKey, NotSetUp, OtherSigningKey, ProtocolError
from ldpfl.flower.named_by_server import check_config, check_mechanism
from ldpfl.flower.round_request import Ask
from ldpfl.flower.sent_vectors import check_sums
from ldpfl.flower.terms import adding_up
from ldpfl.privacy.budget import Budget
from ldpfl.privacy.budget_file import set_limit
from ldpfl.privacy.policy import OVER_RELAY, UPLOAD_S, Policy, Request, read_policy
from ldpfl.relay import RelayClient, RoundStatus, SumTerms
from ldpfl.relay import Terms as RelayTerms
from ldpfl.transport.shuffling import RecordPlan
from ldpfl.transport.shuffling.sealing import OVERHEAD, Binding, seal
from ldpfl.transport.sums import SumBinding, new_seed, seal_seed, shard, signer_of
from ldpfl.transport.sums.node_keys import load_key
from ldpfl.util.file_owners import require_own

Connect = Callable[[], RelayClient]
Signing = Callable[[], Ed25519PrivateKey]

_GRACE_S = 30.0
"""Seconds after a round's window in which it may still wait for clients."""

_SHORTEST_UPLOAD_S = UPLOAD_S / 2
"""Seconds that a round has to leave for an upload when a node is asked. The server leaves twice that: nodes are not asked at once."""

_WAITING_S = 600.0
"""The same for a round that cannot end without all of them."""


def _no_signing_key() -> Ed25519PrivateKey:
    raise NoSigningKey("this node adds to no sums: it has no signing key; nothing was sent")


@dataclass(frozen=True)
class OperatorNode:
    """A node as its operator set it up, for the time of one message.

    Attributes:
        policy: what may leave.
        budget: what that costs, in a file.
        connect: opens a connection to the operator's relay.
        signing: gives the key by which this node signs what it adds to sums.
    """

    policy: Policy
    budget: Budget
    connect: Connect
    signing: Signing = _no_signing_key

    def check_mechanism(self, name: str) -> None:
        """Return if a server may name the mechanism ``name``.

        Raises:
            Declined: :func:`ldpfl.flower.named_by_server.check_mechanism` does not allow it.
        """
        try:
            check_mechanism(name, self.policy)
        except Declined as refusal:
            raise self.budget.refused(refusal) from None

    def keeps_state(self, ask: Ask) -> bool:
        """Whether the app may remember this round: over a relay, only if the policy says so."""
        return ask.terms.transport == "direct" or self.policy.keep_state

    def would_admit(self, ask: Ask, cohort: int) -> None:
        """Check policy, budget and the way to the relay as :meth:`admit` does, and write nothing: neither a charge nor a refusal.

        Raises:
            Declined: the operator does not allow the release.
            LdpflError: the relay does not answer.
        """
        self.would_allow(ask, cohort)
        if ask.terms.transport in OVER_RELAY:  # reads what the operator has set up for it; nothing is sent but, for a sum, the token
            with self.connect() as relay:
                self._check_signer(ask, relay)

    def would_allow(self, ask: Ask, cohort: int) -> None:
        """Check policy and budget as :meth:`admit` does, and write nothing. The relay is not asked.

        Raises:
            Declined: the operator does not allow the release.
        """
        self._check_terms(ask)
        self.budget.check(self._request(ask, cohort))
        if ask.terms.transport == "sum":
            self.signing()

    def admit(self, ask: Ask) -> float:
        """Check the policy, and for a relay that its round is open for these reports, and the same for all; then charge the budget.

        Returns for how many seconds the report can be delivered: in a reply, as long as Flower takes it.

        Raises:
            Declined: the operator does not allow the release.
            LdpflError: the relay does not answer, has another round, or takes no more uploads when this client may send.
        """
        try:
            self._check_terms(ask)
        except Declined as refusal:
            raise self.budget.refused(refusal) from None
        request = self._request(ask, ask.terms.asked)
        if ask.terms.transport == "direct":
            self.budget.charge(request)
            return inf
        self.budget.check_policy(request)  # by what the server says, before anything of it is said to the relay
        if ask.terms.transport == "sum":
            self.signing()  # before the charge: without it nothing can be sent
        status = self._relay_round(ask)
        asked = time.monotonic()
        self.budget.charge(self._request(ask, status.terms.min_clients))
        return self._open_for(status) - (time.monotonic() - asked)

    def _check_terms(self, ask: Ask) -> None:
        check_config(ask.terms.config, self.policy)
        check_sums(ask.terms)  # looks up what the config names, and so comes after the policy has allowed that
        self.policy.check_reply(ask.terms.reply_s, ask.terms.transport)

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        """Make ``payload`` ready for the relay, sealed to the aggregator's key, which the policy has allowed.

        For the relay that mixes these are records. For a sum ``payload`` holds points of 8 bytes each: a mask is drawn here, and what is
        returned is the masked vector, and the mask's seed, sealed and signed.
        """
        terms, aggregator = ask.terms, X25519PublicKey.from_public_bytes(ask.terms.key)
        if terms.transport == "relay":
            plan = self._plan(ask)
            return seal(plan.split(payload), aggregator, Binding(terms.run, terms.round, plan.fingerprint))
        bits, seed = adding_up(ask.mechanism).bits, new_seed()
        binding = SumBinding(terms.run, terms.round, bytes.fromhex(ask.agreement), ask.ranges.dimension, bits)
        return shard(np.frombuffer(payload, dtype="<i8"), seed, bits) + seal_seed(seed, aggregator, self.signing(), binding)

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        """Upload to the operator's relay; goes on after breaks, as long as the round may be open."""
        run, number = ask.terms.run, ask.terms.round
        with self.connect() as relay:
            if ask.terms.transport == "sum":
                relay.upload_share(run, number, sealed, within_s=within_s)
            else:
                relay.upload(run, number, secrets.token_urlsafe(24), sealed, within_s=within_s)

    def _relay_round(self, ask: Ask) -> RoundStatus:
        """Return what the relay says of the round, if the report can be uploaded when it is ready."""
        with self.connect() as relay:
            self._check_signer(ask, relay)
            status = relay.round_status(ask.terms.run, ask.terms.round)
        if status.terms.agreement != ask.agreement:
            why = "what the server asks of this client differs from what the relay says it asks of all clients"
            raise self.budget.refused(self._request(ask, status.terms.min_clients).declined(why))
        if status.state in ("released", "gone"):
            raise ProtocolError(f"round {ask.terms.round} is over at the relay; nothing was charged or sent")
        left = self._open_for(status) if _waits_for_all(status.terms) else status.seconds_left
        reply_s = ask.terms.reply_s
        if reply_s and left < reply_s + _SHORTEST_UPLOAD_S:
            raise ProtocolError(
                f"the relay's round is over in {left:.0f} s, and clients send after {reply_s:g} s and need {_SHORTEST_UPLOAD_S:g} s for "
                "it: the server must give its rounds a longer window; nothing was charged or sent"
            )
        self._check_fitting(ask, status.terms)
        return status

    def _check_signer(self, ask: Ask, relay: RelayClient) -> None:
        """Raise if the relay would refuse what this node adds to a sum, which it would do after the charge."""
        if ask.terms.transport != "sum":
            return
        signer, own = relay.signer(), signer_of(self.signing().public_key()).hex()
        if signer != own:
            raise other_signer(signer, own)

    def _check_fitting(self, ask: Ask, terms: RelayTerms | SumTerms) -> None:
        """Raise if the relay's round does not take this report as it is going to be."""
        if ask.terms.transport == "sum":
            fits = isinstance(terms, SumTerms) and (terms.dimension, terms.bits) == (ask.ranges.dimension, adding_up(ask.mechanism).bits)
        else:
            plan = self._plan(ask)
            made = (plan.plaintext_bytes + OVERHEAD, plan.records)
            fits = isinstance(terms, RelayTerms) and (terms.record_bytes, terms.records_per_upload) == made
        if not fits:
            raise ProtocolError("the relay's round takes reports of another form or length than this one; nothing was sent")

    def _open_for(self, status: RoundStatus) -> float:
        """Return for how long to try to upload: the relay says at once if a round is over, so rather longer, as far as the policy lets."""
        return min(status.seconds_left + (_WAITING_S if _waits_for_all(status.terms) else _GRACE_S), self.policy.longest_upload_s)

    def _plan(self, ask: Ask) -> RecordPlan:
        return RecordPlan(ask.mechanism, ask.ranges, ask.terms.linked, unprotected=self.policy.allow_unprotected)

    def _request(self, ask: Ask, cohort: int) -> Request:
        terms = ask.terms
        return Request.of(
            ask.mechanism,
            ask.ranges,
            run=terms.run,
            round=terms.round,
            cohort=cohort,
            transport=terms.transport,
            key=terms.key,
            linked=terms.linked,
        )


def operator_node(context: Context) -> OperatorNode:
    """Return what the operator of this node set up; ``context`` tells simulated nodes apart.

    Raises:
        Declined: no policy or budget is named, or one of them cannot be relied on.
    """
    policy = read_policy(_path("policy"))
    return OperatorNode(policy, Budget(_budget_file(context, policy), policy), _connecting(), _signing())


def other_signer(signer: str | None, own: str) -> OtherSigningKey:
    """Return the error of a node that signs as ``own``, and whose token at the relay is for another key, or for none."""
    other = f"the signing key {signer}" if signer else "no signing key"
    return OtherSigningKey(
        f"the relay's token of this node is for {other}, and the node signs as {own}: "
        "ask the relay's operator for another one (ldpfl relay token renew NAME --signing-key LINE, with the line that ldpfl deploy "
        "node-key FILE --show prints); nothing was sent"
    )


def _budget_file(context: Context, policy: Policy) -> Path:
    simulated = named("budgets")
    if simulated is None:
        return _path("budget")
    if named("budget"):
        raise Declined("LDPFL_BUDGET and LDPFL_BUDGETS are both set, and only one of them can count; nothing was sent")
    client = context.node_config.get("partition-id")
    if client is None:  # the node's number is the server's to choose, and with it a budget that nothing was charged to
        raise Declined(f"no partition-id in this node's config says which file in {simulated} is its own; nothing was sent")
    own = Path(simulated) / f"client-{int(client)}.sqlite"
    if not own.exists():
        set_limit(own, policy.lifetime_epsilon, policy.delta)
    return own


def _connecting() -> Connect:
    """Return what connects to the operator's relay; its files are read the first time only, before the charge: an app may change them."""

    @cache
    def settings() -> tuple[str, str, ssl.SSLContext | bool]:
        authority, url = named("relay-ca"), named("relay")
        if not url:
            raise NoRelay(f"no relay is set up on this node: name its URL in {_variable('relay')}; nothing was sent")
        verify = ssl.create_default_context(cafile=_trusted(Path(authority))) if authority else True
        return url, read_token(_path("relay-token", NoRelay)), verify

    def connect() -> RelayClient:
        try:
            url, token, verify = settings()
            return RelayClient(url, token, verify=verify)
        except (ConfigError, OSError) as error:  # of the operator's own files, which the log may name
            raise NoRelay(f"the relay is not set up on this node: {error}; nothing was sent") from None

    return connect


def _signing() -> Signing:
    """Return what gives the node's signing key; its file is read the first time only, before the charge: an app may change it."""

    @cache
    def key() -> Ed25519PrivateKey:
        try:
            return load_key(_path("signing-key", NoSigningKey))
        except ConfigError as error:  # of the operator's own file, which the log may name
            raise NoSigningKey(f"the signing key is not set up on this node: {error}; nothing was sent") from None

    return key


def _trusted(authority: Path) -> Path:
    """Return a certificate authority's file; whoever could change it could be the relay."""
    return require_own(authority, "the relay's certificate authority", ConfigError, secret=False)


def read_token(path: Path) -> str:
    """Return the relay's token in a file.

    Raises:
        ConfigError: there is none, or other users can read it.
    """
    own = require_own(path, "the relay's token", ConfigError, secret=True)
    try:
        token = own.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not token:
        raise ConfigError(f"{path} holds no token for the relay: put there what ldpfl relay token add printed")
    return token


def named(name: str) -> str | None:
    """Return what the operator named under ``LDPFL_NAME`` in the environment."""
    return os.environ.get(_variable(name)) or None


def _path(name: str, missing: type[Declined] = NotSetUp) -> Path:
    value = named(name)
    if not value:
        raise missing(
            f"no {name} is set up on this node: name its file in {_variable(name)}, in the environment of the SuperNode "
            f"(ldpfl-{name} in --node-config does not count: others could change it); nothing was sent"
        )
    return Path(value)


def _variable(name: str) -> str:
    return f"LDPFL_{name.upper().replace('-', '_')}"


def _waits_for_all(terms: RelayTerms | SumTerms) -> bool:
    """Tell whether the relay keeps the round open until every client that was asked has uploaded, whatever its window."""
    return terms.min_clients >= terms.max_uploads
