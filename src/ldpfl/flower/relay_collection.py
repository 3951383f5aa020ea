"""Collect a round's reports over the relay, for the aggregator: open the round, and decode the mixed records or the masked sum."""

from __future__ import annotations

import logging
import os
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import MessageType, RecordDict
from pydantic import ValidationError

from ldpfl.errors import ConfigError, LdpflError, ProtocolError
from ldpfl.flower.operator_node import read_token
from ldpfl.flower.report_collection import OpenRound, Received
from ldpfl.flower.terms import Answer, agreement_of, check_window, numbers_in_sum, require_adding_up
from ldpfl.privacy.events import Channel
from ldpfl.relay import RelayAggregator, RelayNotReleased, RelayRefused, RelayRoundOver, RoundStatus, SumTerms, Terms
from ldpfl.simulation.workers import cores
from ldpfl.transport.shuffling import ReportPool
from ldpfl.transport.shuffling.opening import open_in_batches
from ldpfl.transport.shuffling.sealing import OVERHEAD, Binding, load_key
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, open_seeds, read_nodes, unshard
from ldpfl.util.number_format import counted

LOGGER = logging.getLogger("flwr.ldpfl")

_NOTE_EVERY_S = 300.0
"""Seconds between two lines in the log about a round that waits for uploads."""
_LOOK_EVERY_S = 5.0
"""Seconds after which the relay is asked again whether its window has ended."""

_NO_AGREEMENT = "0" * 64
"""Placeholder for the agreement, where only the sizes in a relay's terms are needed."""

_UNKNOWN_ROUND = 404
_NOTHING_TO_ACKNOWLEDGE = (_UNKNOWN_ROUND, 409, 410)
"""HTTP statuses by which a relay answers the acknowledgement of a round that was never opened, not released, or already deleted."""


@dataclass(frozen=True, kw_only=True)
class RelayedRounds(ABC):
    """Base of collectors over the relay: open a round there, wait for it, cancel it, recover it after a restart, and delete it.

    Attributes:
        relay: connection to the relay, with the aggregator's token.
        key: the aggregator's private key.
        min_clients: minimum number of uploads for the relay to release a round.
        window_s: seconds during which the relay accepts uploads, from the moment that clients are asked: the time to train and upload.
        before: the aggregator's previous private key. A round that was begun with it is decrypted with it after a restart.
    """

    relay: RelayAggregator
    key: X25519PrivateKey
    min_clients: int = 2
    window_s: float = 60.0
    before: X25519PrivateKey | None = None

    @abstractmethod
    def terms(self) -> Mapping[str, Any]:
        """Return what clients are told about this transport, as fields of ``RoundTerms``."""

    @abstractmethod
    def relay_terms(self, round_: OpenRound, agreement: str) -> Terms | SumTerms:
        """Return the terms on which a round is opened at the relay: ``SumTerms`` if the relay adds reports up, else ``Terms``.

        ``agreement`` is the digest, in hex, of what all nodes must agree on in this round.

        Raises:
            ValidationError: the relay's limits do not allow such a round: its reports are too long, for example.
        """

    @abstractmethod
    def read_release(self, round_: OpenRound) -> Received:
        """Pull the reports of a round that the relay has released, and decode them. Errors are those of :meth:`collect`."""

    def collector_for(self, terms: Mapping[str, str | int]) -> Self:
        """Return this collector, with the previous key if the round with these ``terms`` was begun with that key."""
        if self.before is None or terms.get("key") != self.before.public_key().public_bytes_raw().hex():
            return self
        return replace(self, key=self.before)

    def check_ready(self, round_: OpenRound, reply_s: float) -> None:
        """Check that the round could be opened now. The relay is asked for the round's status, to see that it answers.

        Raises:
            ConfigError: the round does not fit a relay (for example, fewer clients are asked than it needs to mix), or its window is
                over before clients have uploaded.
            RelayRefused, RelayUnreachable: the relay does not answer, or does not know this token.
        """
        terms = self._checked_terms(round_, _NO_AGREEMENT)  # clients have not been asked, so there is no agreement yet
        if round_.timeout < self.window_s:
            raise ConfigError(
                f"the relay's window is {self.window_s:g} s, longer than a round's timeout of {round_.timeout:g} s: lower window_s "
                "(ldpfl.window-s), or raise the timeout (ldpfl.timeout-s)"
            )
        check_window(self.window_s, reply_s, fewest=terms.min_clients, asked=terms.max_uploads)
        self._status(round_)  # raises if the relay does not answer

    def open(self, round_: OpenRound, content: RecordDict) -> None:
        """Open the round at the relay, which tells every client the same agreement, a digest of ``content``.

        Raises:
            ConfigError, RelayRefused, RelayUnreachable: as for :meth:`check_ready`; or the relay has other terms for this round.
        """
        self.relay.open_round(round_.run, round_.number, self._checked_terms(round_, agreement_of(content, MessageType.TRAIN)))

    def _checked_terms(self, round_: OpenRound, agreement: str) -> Terms | SumTerms:
        """Return :meth:`relay_terms`, or raise a ConfigError if the round does not fit a relay."""
        try:
            return self.relay_terms(round_, agreement)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")  # pydantic puts these words before a validator's message
            raise ConfigError(f"the relay cannot run round {round_.number}: {reason}") from None

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        """Wait up to ``left_s`` seconds for the relay to release the round, and read it. Cancel it if the relay does not release it.

        If the relay's operator has cancelled the round, there are no reports. ``answers`` are not used: over a relay, they hold no reports.

        Raises:
            RelayRefused, RelayUnreachable: the relay does not answer, or not as it should. It keeps the round, and the run goes on with
                this round when it is started again.
        """
        try:
            self.relay.wait(round_.run, round_.number, left_s, on_poll=self.wait_notes(round_))
            return self.read_release(round_)
        except RelayRoundOver:
            LOGGER.warning("round %d was cancelled at the relay, which has deleted its reports: the round stays charged", round_.number)
            return Received(None)
        except RelayNotReleased:
            self.relay.cancel(round_.run, round_.number)
            reason = f"fewer than {self.min_clients} nodes have uploaded within {round_.timeout:g} s, so the relay released nothing"
            return Received(None, refused=(reason,))

    def wait_notes(self, round_: OpenRound) -> Callable[[float], None]:
        """Return a function that logs that the relay waits for uploads: once the round's window has ended, then every few minutes.

        A node that died after its charge may hold up the round until its timeout. The log says how to end it earlier.
        """
        next_note_at_s = round_.timeout - self.window_s  # seconds left at the next note

        def note(left_s: float) -> None:
            """Log the state of the wait, which ends in ``left_s`` seconds, if a note is due."""
            nonlocal next_note_at_s
            if left_s > next_note_at_s:
                return
            next_note_at_s = left_s - _NOTE_EVERY_S
            with suppress(LdpflError):  # the wait itself raises if the relay does not answer
                status = self._status(round_)
                if status is not None and status.state == "waiting":
                    LOGGER.info("round %d: %s", round_.number, _wait_text(round_, status, left_s))
                elif status is not None and status.state == "open":  # the relay's window ends a little later than this one
                    next_note_at_s = left_s - _LOOK_EVERY_S

        return note

    def give_up(self, round_: OpenRound) -> bool:
        """Cancel the round and return True. If the relay has enough uploads to release it, return False instead.

        The relay may have more uploads than the server has replies: a node whose reply is lost may have uploaded its report.

        Raises:
            RelayRefused, RelayUnreachable: as for :meth:`collect`.
        """
        status = self._status(round_)
        if status is None:  # the relay does not have this round, so there is nothing to cancel or to release
            return True
        uploads = status.uploads or 0  # the relay tells their number only to the aggregator that opened the round
        if status.state == "released" or uploads >= self.min_clients:
            return False
        self.relay.cancel(round_.run, round_.number)
        return True

    def recover(self, round_: OpenRound) -> Received | None:
        """Return the reports of a round that the relay still holds; None if it holds none. Errors are those of :meth:`collect`."""
        status = self._status(round_)
        if status is None or status.state == "gone":
            return None
        if status.state != "released":
            LOGGER.info("round %d was begun before this start, and %s", round_.number, _wait_text(round_, status, round_.timeout))
        return self.collect(round_, (), round_.timeout)

    def delete_round(self, run: str, number: int) -> None:
        """Have the relay delete everything that it holds of the round."""
        for delete in (self.relay.acknowledge, self.relay.cancel):  # a round that was never released cannot be acknowledged, only cancelled
            try:
                delete(run, number)
                return
            except RelayRefused as refusal:
                if refusal.status not in _NOTHING_TO_ACKNOWLEDGE:
                    raise
                LOGGER.info("round %d: the relay has no release to acknowledge: %s", number, refusal)

    def _status(self, round_: OpenRound) -> RoundStatus | None:
        """Return the relay's status of a round; None if the relay does not know it."""
        try:
            return self.relay.round_status(round_.run, round_.number)
        except RelayRefused as refusal:
            if refusal.status != _UNKNOWN_ROUND:
                raise
            return None


@dataclass(frozen=True, kw_only=True)
class RelayCollector(RelayedRounds):
    """Collects reports that the relay has mixed: the server sees the encrypted records' content, but not who sent them.

    The ledger counts the relay as a shuffler. This is right only if relay and aggregator do not collude.

    Attributes:
        linked: number of units of a report that stay together in a record; 1 is LDP-FL's parameter shuffling.
    """

    linked: int = 1
    channel: Channel = field(default="ideal-shuffler", init=False)  # no argument, because the ledger relies on it

    def terms(self) -> Mapping[str, Any]:
        return {
            "transport": "relay",
            "key": self.key.public_key().public_bytes_raw(),
            "linked": self.linked,
            "min_clients": self.min_clients,
        }

    def relay_terms(self, round_: OpenRound, agreement: str) -> Terms:
        """Return the terms for uploads of encrypted records. Encryption makes a record :data:`OVERHEAD` bytes longer."""
        plan = round_.plan
        return Terms(
            record_bytes=plan.plaintext_bytes + OVERHEAD,
            records_per_upload=plan.records,
            min_clients=self.min_clients,
            closes_in_s=self.window_s,
            max_uploads=round_.asked,
            agreement=agreement,
        )

    def read_release(self, round_: OpenRound) -> Received:
        """Decrypt the round's records, and join them into a pool of reports."""
        plan = round_.plan
        binding = Binding(round_.run, round_.number, plan.fingerprint)
        sizes = self.relay_terms(round_, _NO_AGREEMENT)  # not the relay's own statement, which is not trusted to bound sizes
        joining = plan.joining()
        decrypted, refused_by_reason = 0, Counter[str]()  # numbers of records
        encrypted_records = self.relay.pull(round_.run, round_.number, sizes)
        expected = plan.records * round_.asked
        for plaintexts, refused in open_in_batches(
            encrypted_records, plan.plaintext_bytes, self.key, binding, expected=expected, workers=cores()
        ):
            joining.add(plaintexts)
            decrypted += len(plaintexts)
            refused_by_reason.update({entry.reason: entry.count for entry in refused})
        # The number of clients is computed from the number of records, because each upload has as many. The number that the relay stated
        # before may be too low: an upload may have come between the end of the wait and the release.
        clients = (decrypted + refused_by_reason.total()) // plan.records
        joined = joining.joined(max(1, clients))  # it takes no 0, not even if there are no records
        refused_by_reason.update({entry.reason: entry.count for entry in joined.refused})
        reasons = [f"{counted(count, 'record')}: {reason}" for reason, count in refused_by_reason.items()]
        return Received(joined.pool, plan.records * sizes.record_bytes, tuple(reasons))


@dataclass(frozen=True, kw_only=True)
class SumCollector(RelayedRounds):
    """Collects the sum of the reports: the relay adds up masked vectors, and the aggregator removes the masks from the sum.

    The ledger counts it as a secure sum. This is right only if relay and aggregator do not collude.

    Attributes:
        nodes: public keys of the nodes that may take part, by :func:`ldpfl.transport.sums.signer_of`. Only shares signed by one of them
            count, so that a relay cannot invent the other members of a sum.

    Raises:
        ConfigError: there are fewer nodes than a sum needs, so that every round would be charged for nothing.
    """

    nodes: Mapping[bytes, Ed25519PublicKey]
    # No arguments: the ledger relies on them.
    linked: int = field(default=1, init=False)
    channel: Channel = field(default="secure-sum", init=False)

    def __post_init__(self) -> None:
        if len(self.nodes) < self.min_clients:
            raise ConfigError(
                f"LDPFL_NODE_KEYS names {counted(len(self.nodes), 'node')}, but a sum needs {self.min_clients} (ldpfl.min-clients): add "
                "the missing lines, as ldpfl deploy node-key FILE --show prints them on the nodes"
            )

    def terms(self) -> Mapping[str, Any]:
        return {"transport": "sum", "key": self.key.public_key().public_bytes_raw(), "min_clients": self.min_clients}

    def relay_terms(self, round_: OpenRound, agreement: str) -> SumTerms:
        """Return the terms for shares of a sum: how many numbers a client adds, and of how many bits."""
        return SumTerms(
            dimension=numbers_in_sum(round_.mechanism, round_.ranges),
            bits=require_adding_up(round_.mechanism).bits,
            min_clients=self.min_clients,
            closes_in_s=self.window_s,
            max_uploads=round_.asked,
            agreement=agreement,
        )

    def read_release(self, round_: OpenRound) -> Received:
        """Pull the masked sum and remove the masks.

        If the masks cannot be removed, a client or the relay has misbehaved. Then the result has a ``decoding_error``, which ends the run,
        because the next round would fail in the same way. The relay keeps the sum until it is acknowledged, and hands out the same sum
        again. A sum that is longer than honest clients can make it is dropped.
        """
        sizes, mechanism = self.relay_terms(round_, _NO_AGREEMENT), require_adding_up(round_.mechanism)
        total, envelopes = self.relay.pull_sum(round_.run, round_.number, sizes)
        # The agreement that the relay states need not be trusted: clients have signed theirs, and no envelope opens with another agreement.
        agreement = bytes.fromhex(self.relay.round_status(round_.run, round_.number).terms.agreement)
        binding = SumBinding(round_.run, round_.number, agreement, sizes.dimension, sizes.bits)
        try:
            seeds = open_seeds(envelopes, self.key, self.nodes, binding, self.min_clients)
        except ProtocolError as error:
            return Received(None, decoding_error=str(error))
        unmasked = unshard(total, seeds)  # (dimension,) int64 lattice points: the sum of the clients' noisy vectors
        longest = mechanism.max_sum_length(len(seeds), round_.asked, sizes.dimension, round_.max_length)
        length = float(np.linalg.norm(unmasked.astype(np.float64)))
        if length > longest:
            return Received(None, refused=(_too_long_reason(length, longest, len(seeds)),))
        return Received(ReportPool(mechanism.reports_from_sum(unmasked, len(seeds))), total.nbytes + ENVELOPE_BYTES)


def _wait_text(round_: OpenRound, status: RoundStatus, left_s: float) -> str:
    """Return how many uploads the relay has, how long they are waited for, and how to end the round."""
    uploads = counted(status.uploads or 0, "upload")
    return (
        f"the relay has {uploads} of the {status.terms.min_clients} it needs: waiting up to {left_s:.0f} s, because nodes may still "
        f"upload. To end the round without reports, run at the relay: ldpfl relay cancel {round_.run} {round_.number}"
    )


def _too_long_reason(length: float, longest: float, clients: int) -> str:
    """Return the reason for dropping a sum of this Euclidean ``length``, above the ``longest`` that honest clients can reach."""
    return (
        f"the sum over {clients} clients is a vector of length {length:.4g}, but honest reports add up to a length of at most "
        f"{longest:.4g}: a client or the relay has changed it. The sum is dropped and the model stays as it was"
    )


def operator_relay(*, linked: int, min_clients: int, window_s: float) -> RelayCollector:
    """Return the collector of mixed records, for the relay that the operator named in the ServerApp's environment.

    The arguments are as for :class:`RelayCollector`.

    ``LDPFL_RELAY`` is the relay's URL, ``LDPFL_RELAY_CA`` its certificate authority if it has its own,
    ``LDPFL_AGGREGATOR_TOKEN`` a file with the token, and ``LDPFL_AGGREGATOR_KEY`` a file with the private key. After a change of the key,
    ``LDPFL_AGGREGATOR_KEY_BEFORE`` may name the file of the previous key, for a round that was begun with it.

    Raises:
        ConfigError: one of these variables is missing, or its value cannot be used.
    """
    return RelayCollector(**_settings_from_environment(), linked=linked, min_clients=min_clients, window_s=window_s)


def operator_sum(*, min_clients: int, window_s: float) -> SumCollector:
    """Return the collector of sums, for the relay that the operator named as for :func:`operator_relay`.

    ``LDPFL_NODE_KEYS`` names the file of the nodes' public keys, see :func:`ldpfl.transport.sums.read_nodes`.

    Raises:
        ConfigError: one of these variables is missing, or its value cannot be used.
    """
    return SumCollector(
        **_settings_from_environment(),
        nodes=read_nodes(Path(_required_variable("LDPFL_NODE_KEYS"))),
        min_clients=min_clients,
        window_s=window_s,
    )


def _settings_from_environment() -> dict[str, Any]:
    """Return the fields of a collector that the operator sets in the ServerApp's environment."""
    url, token, key = (_required_variable(f"LDPFL_{name}") for name in ("RELAY", "AGGREGATOR_TOKEN", "AGGREGATOR_KEY"))
    authority = os.environ.get("LDPFL_RELAY_CA")
    verify = ssl.create_default_context(cafile=authority) if authority else True
    before = os.environ.get("LDPFL_AGGREGATOR_KEY_BEFORE")
    relay = RelayAggregator(url, read_token(Path(token)), verify=verify)
    return {"relay": relay, "key": load_key(Path(key)), "before": load_key(Path(before)) if before else None}


def _required_variable(name: str) -> str:
    """Return the value of the environment variable ``name``, which must be set."""
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set: rounds over a relay need it in the environment of the ServerApp")
    return value
