"""What a round asks of a client, and what the client's node has to say to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flwr.app import RecordDict

from ldpfl.errors import OtherRunConfig, ProtocolError
from ldpfl.flower.arrays import layout_of, only_arrays, to_vector
from ldpfl.flower.sent_vectors import sent_in
from ldpfl.flower.terms import RECORD, RoundTerms, agreement_of
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import is_finite
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.policy import OVER_RELAY
from ldpfl.server import ServerState


@dataclass(frozen=True, eq=False)
class Ask:
    """What a round would release of this client, as the client itself makes it out.

    Attributes:
        mechanism: of this round, built here from the server's settings; all that is said of it follows from it.
        ranges: public ranges of the vector that is asked for.
        agreement: over all that the server asks for, see :func:`ldpfl.flower.terms.agreement_of`; empty where no relay compares it.
    """

    terms: RoundTerms
    mechanism: Mechanism
    ranges: LayerRanges
    agreement: str


class Node(Protocol):
    """What the node's operator has set up. Whatever it raises, nothing leaves; ``Declined`` says that the operator does not allow it."""

    def admit(self, ask: Ask) -> float:
        """Decide on the release, and record durably that it is made: from here on a report leaves, whatever the data do.

        Called once a round, before the data are touched. Returns for how many seconds from now the report can be delivered.
        """
        ...

    def would_admit(self, ask: Ask, cohort: int) -> None:
        """Raise if :meth:`admit` would decline, as far as that is known before the round is opened.

        The server asks as often as it likes: so this charges nothing, writes nothing and asks no relay. It is no promise: ``admit``
        checks everything again. ``cohort`` is the number of clients that the report will be mixed with, as the server says.
        """
        ...

    def keeps_state(self, ask: Ask) -> bool:
        """Whether what the app remembers of this round is kept for the next."""
        ...

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        """Make ``payload`` ready for the relay."""
        ...

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        """Send ``sealed`` to the relay, trying for ``within_s`` seconds."""
        ...


@dataclass(frozen=True, eq=False)
class Asked:
    """What a message asks, and the state of the server that it tells: all of it public.

    Attributes:
        layout: layers of the vector that is asked for.
    """

    ask: Ask
    layout: ParameterLayout
    state: ServerState


def read_asked(content: RecordDict, message_type: str, run_config: str) -> Asked:
    """Read a message; ``run_config`` is the digest of the node's own.

    Raises:
        LdpflError: it is no round of ``LdpStrategy``, does not fit together, or names another run config than the node's.
    """
    terms = read_terms(content, run_config)
    arrays = only_arrays(content, allowed=tuple(content.config_records))
    layout = layout_of(arrays, terms.layers)
    state = ServerState(terms.planned.trained, to_vector(arrays, layout), terms.ranges(layout))
    if not is_finite(state.weights):
        raise ProtocolError("the server's model is not finite")
    sent = sent_in(terms, layout, state.public())
    agreement = agreement_of(content, message_type) if terms.transport in OVER_RELAY else ""
    return Asked(Ask(terms, sent.mechanism, sent.ranges, agreement), sent.layout, state)


def read_terms(content: RecordDict, run_config: str) -> RoundTerms:
    """Read the terms in a message; ``run_config`` is the digest of the node's own.

    Raises:
        ProtocolError: the message holds none, or they cannot be read.
        OtherRunConfig: they name another run config than the node's.
    """
    records = content.config_records
    if RECORD not in records:
        raise ProtocolError(f"the server's message holds no record {RECORD!r}: its strategy must be LdpStrategy")
    terms = RoundTerms.from_record(records[RECORD])
    if terms.run_config != run_config:
        raise OtherRunConfig(
            "the run config on this node is not the one that the server asks all clients for: "
            "its strategy needs LdpStrategy(..., run_config=context.run_config)"
        )
    return terms
