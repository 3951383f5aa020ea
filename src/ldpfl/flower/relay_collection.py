"""The aggregator's end of the relay: opens its rounds, and makes a pool of the mixed records, or a sum of the masked vectors."""

from __future__ import annotations

import logging
import os
import ssl
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import MessageType, RecordDict
from pydantic import ValidationError

from ldpfl.errors import ConfigError, ProtocolError
from ldpfl.flower.operator_node import read_token
from ldpfl.flower.report_collection import OpenRound, Received
from ldpfl.flower.terms import Answer, adding_up, agreement_of, check_window
from ldpfl.privacy.events import Channel
from ldpfl.relay import RelayAggregator, RelayNotReleased, RelayRefused, RoundStatus, SumTerms, Terms
from ldpfl.simulation.workers import cores
from ldpfl.transport.shuffling import ReportPool
from ldpfl.transport.shuffling.opening import opened
from ldpfl.transport.shuffling.sealing import OVERHEAD, Binding, load_key
from ldpfl.transport.sums import ENVELOPE_BYTES, SumBinding, open_seeds, read_nodes, unshard
from ldpfl.util.number_format import counted

LOGGER = logging.getLogger("flwr.ldpfl")

_UNKNOWN = 404
_NOTHING_THERE = (_UNKNOWN, 409, 410)
"""How a relay answers to the acknowledgement of a round that was never opened, not released, or deleted."""


@dataclass(frozen=True, kw_only=True)
class RelayedRounds(ABC):
    """What collectors over the relay share: when a round is opened there, waited for, given up, taken up again and forgotten.

    Attributes:
        relay: with the aggregator's token.
        key: the aggregator's private key.
        min_clients: fewest uploads that the relay releases anything of.
        window_s: seconds that the relay takes uploads for, from the moment that clients are asked; they train and upload in this time.
        before: the aggregator's key before ``key``: a round that was begun with it, and is taken up again, is read with it.
    """

    relay: RelayAggregator
    key: X25519PrivateKey
    min_clients: int = 2
    window_s: float = 60.0
    before: X25519PrivateKey | None = None

    @abstractmethod
    def terms(self) -> Mapping[str, Any]:
        """Return what clients are told of it: fields of ``RoundTerms``."""

    @abstractmethod
    def relay_terms(self, round_: OpenRound, agreement: str) -> Terms | SumTerms:
        """Return what the relay is told of a round.

        Raises:
            ValidationError: it does not fit a relay.
        """

    @abstractmethod
    def released(self, round_: OpenRound) -> Received:
        """Return what a round brought that the relay has released; errors as for :meth:`collect`."""

    def begun_on(self, terms: Mapping[str, str | int]) -> Self:
        """Return this collector with the key of before, if a round was begun with that one."""
        if self.before is None or terms.get("key") != self.before.public_key().public_bytes_raw().hex():
            return self
        return replace(self, key=self.before)

    def check_ready(self, round_: OpenRound, reply_s: float) -> None:
        """Ask the relay for the round, which it should not know.

        Raises:
            ConfigError: the round does not fit a relay: fewer clients are asked than it has to mix, for instance; or it is over
                before clients have uploaded.
            RelayRefused, RelayUnreachable: the relay does not answer, or does not know this token.
        """
        terms = self._fitting(round_, "0" * 64)
        if round_.timeout < self.window_s:
            raise ConfigError(f"the relay's window of {self.window_s:g} s is longer than the round waits for reports, {round_.timeout:g} s")
        check_window(self.window_s, reply_s, fewest=terms.min_clients, asked=terms.max_uploads)
        self._status(round_)

    def open(self, round_: OpenRound, content: RecordDict) -> None:
        """Open the round at the relay, which tells every client the same agreement on ``content``.

        Raises:
            ConfigError, RelayRefused, RelayUnreachable: as for :meth:`check_ready`; or it has other terms already.
        """
        self.relay.open_round(round_.run, round_.number, self._fitting(round_, agreement_of(content, MessageType.TRAIN)))

    def _fitting(self, round_: OpenRound, agreement: str) -> Terms | SumTerms:
        try:
            return self.relay_terms(round_, agreement)
        except ValidationError as error:
            raise ConfigError(
                f"round {round_.number} does not fit the relay: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
            ) from None

    def collect(self, round_: OpenRound, answers: Sequence[Answer], left_s: float) -> Received:
        """Wait up to ``left_s`` seconds for the relay to release the round, and read it; a round that it does not release is cancelled.

        Raises:
            RelayRefused, RelayUnreachable: the relay does not answer, or not as it should. It keeps the round: started again, the
                run goes on with it.
        """
        try:
            self.relay.wait(round_.run, round_.number, left_s)
        except RelayNotReleased:
            self.relay.cancel(round_.run, round_.number)
            few = f"fewer than {self.min_clients} nodes have uploaded within {round_.timeout:g} s, so the relay released nothing"
            return Received(None, refused=(few,))
        return self.released(round_)

    def give_up(self, round_: OpenRound) -> bool:
        """Cancel the round, unless the relay has as many uploads as it mixes: a node whose reply is lost may have uploaded before.

        Raises:
            RelayRefused, RelayUnreachable: as for :meth:`collect`.
        """
        status = self._status(round_)
        if status is None:
            return True
        if status.state == "released" or (status.uploads or 0) >= self.min_clients:
            return False
        self.relay.cancel(round_.run, round_.number)
        return True

    def recover(self, round_: OpenRound) -> Received | None:
        """Take up a round that the relay still holds; errors as for :meth:`collect`."""
        status = self._status(round_)
        return None if status is None or status.state == "gone" else self.collect(round_, (), round_.timeout)

    def done(self, run: str, number: int) -> None:
        """Let the relay delete all that it holds of the round."""
        for delete in (self.relay.acknowledge, self.relay.cancel):  # the second one for what was never released
            try:
                delete(run, number)
                return
            except RelayRefused as refusal:
                if refusal.status not in _NOTHING_THERE:
                    raise
                LOGGER.info("round %d: nothing left to acknowledge: %s", number, refusal)

    def _status(self, round_: OpenRound) -> RoundStatus | None:
        """Return what the relay says of a round; None if it does not know it."""
        try:
            return self.relay.round_status(round_.run, round_.number)
        except RelayRefused as refusal:
            if refusal.status != _UNKNOWN:
                raise
            return None


@dataclass(frozen=True, kw_only=True)
class RelayCollector(RelayedRounds):
    """Reports come over the relay, sealed and mixed, so the server sees what was sent and not by whom.

    The ledger counts the relay as a shuffler: that holds as long as relay and aggregator do not work together.

    Attributes:
        linked: units that stay together in a record (linked); 1 is LDP-FL's parameter shuffling.
    """

    linked: int = 1
    channel: Channel = "ideal-shuffler"

    def terms(self) -> Mapping[str, Any]:
        return {"transport": "relay", "key": self.key.public_key().public_bytes_raw(), "linked": self.linked}

    def relay_terms(self, round_: OpenRound, agreement: str) -> Terms:
        plan = round_.plan
        return Terms(
            record_bytes=plan.plaintext_bytes + OVERHEAD,
            records_per_upload=plan.records,
            min_clients=self.min_clients,
            closes_in_s=self.window_s,
            max_uploads=round_.asked,
            agreement=agreement,
        )

    def released(self, round_: OpenRound) -> Received:
        """Open the round's records, and join them."""
        plan = round_.plan
        binding = Binding(round_.run, round_.number, plan.fingerprint)
        sizes = self.relay_terms(round_, "0" * 64)  # as it was opened; what the relay says later bounds nothing
        joining, refused, read = plan.joining(), Counter[str](), 0
        records = self.relay.pull(round_.run, round_.number, sizes)
        expected = plan.records * round_.asked
        for plaintexts, left_out in opened(records, plan.plaintext_bytes, self.key, binding, expected=expected, workers=cores()):
            joining.add(plaintexts)
            read += len(plaintexts)
            refused.update({entry.reason: entry.count for entry in left_out})
        # What was pulled is whole uploads. Counted, not asked: one may have come in between the end of the wait and the release.
        joined = joining.joined(max(1, (read + refused.total()) // plan.records))
        refused.update({entry.reason: entry.count for entry in joined.refused})
        notes = [f"{counted(count, 'record')}: {reason}" for reason, count in refused.items()]
        return Received(joined.pool, plan.records * sizes.record_bytes, tuple(notes))


@dataclass(frozen=True, kw_only=True)
class SumCollector(RelayedRounds):
    """Reports come as a sum that no single server sees: the relay adds up masked vectors, and this end takes the masks off their sum.

    The ledger counts it as a sum of which nothing else is seen: that holds as long as relay and aggregator do not work together.

    Attributes:
        nodes: public keys of the nodes that may take part, by :func:`ldpfl.transport.sums.signer_of`. Only what one of them has signed
            counts, so that a relay cannot invent the others of a sum.
    """

    nodes: Mapping[bytes, Ed25519PublicKey]
    linked: int = 1
    channel: Channel = "secure-sum"

    def terms(self) -> Mapping[str, Any]:
        return {"transport": "sum", "key": self.key.public_key().public_bytes_raw()}

    def relay_terms(self, round_: OpenRound, agreement: str) -> SumTerms:
        return SumTerms(
            dimension=round_.ranges.dimension,
            bits=adding_up(round_.mechanism).bits,
            min_clients=self.min_clients,
            closes_in_s=self.window_s,
            max_uploads=round_.asked,
            agreement=agreement,
        )

    def released(self, round_: OpenRound) -> Received:
        """Take the sum apart. One that cannot be, because of what a client or the relay did, stops the run: so would the next one.

        The relay keeps what it released until it is acknowledged: once more, it hands out the same sum of the same nodes.
        """
        sizes, mechanism = self.relay_terms(round_, "0" * 64), adding_up(round_.mechanism)
        total, envelopes = self.relay.pull_sum(round_.run, round_.number, sizes)
        # What the relay says that clients were asked, they have signed; of anything else no envelope opens.
        agreement = bytes.fromhex(self.relay.round_status(round_.run, round_.number).terms.agreement)
        binding = SumBinding(round_.run, round_.number, agreement, sizes.dimension, sizes.bits)
        try:
            seeds = open_seeds(envelopes, self.key, self.nodes, binding, self.min_clients)
        except ProtocolError as error:
            return Received(None, broken=str(error))
        found = unshard(total, seeds)
        longest = mechanism.longest_sum(len(seeds), round_.asked, sizes.dimension, round_.vector)
        if (length := float(np.linalg.norm(found.astype(np.float64)))) > longest:
            return Received(None, refused=(_too_long(length, longest, len(seeds)),))
        return Received(ReportPool(mechanism.sum_of(found, len(seeds))), total.nbytes + ENVELOPE_BYTES)


def _too_long(length: float, longest: float, clients: int) -> str:
    return (
        f"the sum over {clients} clients has a length of {length:.4g} lattice points, and honest ones make at most {longest:.4g}: a client "
        "or the relay has sent something else; the model stays as it was"
    )


def operator_relay(*, linked: int, min_clients: int, window_s: float) -> RelayCollector:
    """Return the collector for the relay that the ServerApp's operator named in its environment, for records that are mixed.

    ``LDPFL_RELAY`` is the relay's URL, ``LDPFL_RELAY_CA`` its certificate authority if it has its own,
    ``LDPFL_AGGREGATOR_TOKEN`` a file with the token, and ``LDPFL_AGGREGATOR_KEY`` one with the private key. After a change of that key,
    ``LDPFL_AGGREGATOR_KEY_BEFORE`` may name the one before, for a round that was begun with it.

    Raises:
        ConfigError: one of them is missing or cannot be used.
    """
    return RelayCollector(**_operators(), linked=linked, min_clients=min_clients, window_s=window_s)


def operator_sum(*, min_clients: int, window_s: float) -> SumCollector:
    """Return the same for sums. ``LDPFL_NODE_KEYS`` names the file of public keys, see :func:`ldpfl.transport.sums.read_nodes`.

    Raises:
        ConfigError: something is missing or cannot be used.
    """
    return SumCollector(**_operators(), nodes=read_nodes(Path(_variable("LDPFL_NODE_KEYS"))), min_clients=min_clients, window_s=window_s)


def _operators() -> dict[str, Any]:
    url, token, key = (_variable(f"LDPFL_{name}") for name in ("RELAY", "AGGREGATOR_TOKEN", "AGGREGATOR_KEY"))
    authority = os.environ.get("LDPFL_RELAY_CA")
    verify = ssl.create_default_context(cafile=authority) if authority else True
    before = os.environ.get("LDPFL_AGGREGATOR_KEY_BEFORE")
    relay = RelayAggregator(url, read_token(Path(token)), verify=verify)
    return {"relay": relay, "key": load_key(Path(key)), "before": load_key(Path(before)) if before else None}


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"rounds over a relay need {name} in the environment of the ServerApp")
    return value
