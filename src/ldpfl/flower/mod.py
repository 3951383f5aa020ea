"""The client's end: a Flower mod after which nothing but a randomised report leaves."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from ldpfl.errors import LdpflError, PrivacyError, ProtocolError
from ldpfl.flower.arrays import layout_of, only_arrays, to_vector
from ldpfl.flower.internals import APP_RAISED, REFUSED, is_outermost, message_for_app
from ldpfl.flower.terms import RECORD, Answer, RoundTerms, agreement_of
from ldpfl.layout import ParameterLayout
from ldpfl.mechanisms import Mechanism
from ldpfl.privacy.policy import Declined
from ldpfl.randomness import RandomSource, SecureSource
from ldpfl.ranges import LayerRanges
from ldpfl.server import ServerState, client_values

LOGGER = logging.getLogger("flwr.ldpfl")

DECLINED, FAILED = Declined.public, "failed"
"""All that a server is told when there is no report: the client would not, or it could not."""

NOT_OUTERMOST = "LdpMod must be the first of the ClientApp's own mods, ClientApp(mods=[LdpMod(), ...]); nothing was sent"


@dataclass(frozen=True, eq=False)
class Ask:
    """What a round would release of this client, as the client itself makes it out.

    Attributes:
        mechanism: of this round, built here from the server's settings; all that is said of it follows from it.
        ranges: public, issued by the server.
        agreement: over all that the server asks for, see :func:`ldpfl.flower.terms.agreement_of`; empty where no relay compares it.
    """

    terms: RoundTerms
    mechanism: Mechanism
    ranges: LayerRanges
    agreement: str


class Node(Protocol):
    """What the node's operator has set up. Whatever it raises, nothing leaves; ``Declined`` says that the operator does not allow it."""

    def admit(self, ask: Ask) -> None:
        """Stop here if the operator does not allow the release. Called before training."""
        ...

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        """Make ``payload`` ready for the relay."""
        ...

    def charge(self, ask: Ask, sealed: bytes | None) -> None:
        """Record durably that the release is made; ``sealed`` is what goes to a relay. Called once, just before it is sent."""
        ...

    def upload(self, ask: Ask, sealed: bytes) -> None:
        """Send ``sealed`` to the relay."""
        ...


class LdpMod:
    """Turn a Flower ClientApp into a locally private one: ``ClientApp(mods=[LdpMod(), ...])``.

    The arrays that the app returns, or their change since the broadcast, go through the mechanism that the server names and the
    node's policy allows. The budget is charged before the report is sent. All else that the app returns, metrics included, stays
    on the node: neither loss nor number of examples has noise. Only ``train`` messages are answered.

    Guarantee: that of the mechanism for each round's report. When a client answers, and whether, is not hidden. Assumes that the
    app runs as written: whoever chooses the code that runs on a node can leave this mod out.

    Args:
        node: returns, for a context, what the node's operator set up.
        source: where the random bits come from, for a test; by default the operating system's secure source.
    """

    def __init__(
        self,
        node: Callable[[Context], Node],
        source: Callable[[Ask, Context], RandomSource] = lambda ask, context: SecureSource(),
    ) -> None:
        self._node, self._source = node, source
        self._last: tuple[RecordDict, _Asked] | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer ``message`` with a report, or with an error that says no more than :data:`DECLINED` or :data:`FAILED`."""
        if not is_outermost(self):
            # Says nothing of the data, and the server's operator is the one who can mend the app.
            LOGGER.error(NOT_OUTERMOST)
            return Message(Error(REFUSED, NOT_OUTERMOST), reply_to=message)
        try:
            answer = self._answer(message, context, call_next)
        except Declined as refusal:
            LOGGER.warning("declined: %s", refusal)
            return Message(Error(REFUSED, DECLINED), reply_to=message)
        except LdpflError as error:
            LOGGER.error("failed: %s", error)
        except Exception as error:  # its text may repeat private values: not even the client's own log gets it
            LOGGER.error("failed: %s", _where(error))
        else:
            return Message(RecordDict({RECORD: answer.to_record()}), reply_to=message)
        return Message(Error(APP_RAISED, FAILED), reply_to=message)

    def _answer(self, message: Message, context: Context, call_next: ClientAppCallable) -> Answer:
        category = message.metadata.message_type.partition(".")[0]
        if category != "train":
            raise Declined(f"a message of type {category!r} asks for what has no noise; only train is answered")
        asked = self._asked(message)
        ask, terms = asked.ask, asked.ask.terms
        node = self._node(context)
        node.admit(ask)
        trained = _trained(call_next(message_for_app(message), context), asked.layout)
        values = client_values(trained[None], asked.state, terms.config.mechanism.perturbed)
        payload: bytes = next(iter(ask.mechanism.encode(values, ask.ranges, self._source(ask, context)).payloads()))
        if terms.transport == "direct":
            node.charge(ask, None)
            return Answer(terms.run, terms.round, payload)
        sealed = node.seal(ask, payload)
        node.charge(ask, sealed)
        node.upload(ask, sealed)
        return Answer(terms.run, terms.round)

    def _asked(self, message: Message) -> _Asked:
        """Read a message. Clients of one process get the same content: it is read for the first of them."""
        last = self._last
        if last is None or last[0] is not message.content:
            self._last = last = message.content, _read(message.content)
        return last[1]


@dataclass(frozen=True, eq=False)
class _Asked:
    """What a message asks, and the layers and the state of the server that it tells."""

    ask: Ask
    layout: ParameterLayout
    state: ServerState


def _read(content: RecordDict) -> _Asked:
    records = content.config_records
    if RECORD not in records:
        raise ProtocolError(f"the server's message holds no record {RECORD!r}: its strategy must be LdpStrategy")
    terms = RoundTerms.from_record(records[RECORD])
    arrays = only_arrays(content, allowed=tuple(records))
    layout = layout_of(arrays, terms.layers)
    ranges = terms.ranges(layout)
    state = ServerState(terms.round - 1, to_vector(arrays, layout), ranges)
    agreement = agreement_of(content) if terms.transport == "relay" else ""
    return _Asked(Ask(terms, terms.mechanism(ranges).in_round(state.public()), ranges, agreement), layout, state)


def _trained(reply: Message, layout: ParameterLayout) -> Tensor:
    """Return the app's arrays (d,) float32: PRIVATE. Its metrics are left behind here."""
    if reply.has_error():
        raise PrivacyError("the app replied with an error; nothing was sent")
    return to_vector(only_arrays(reply.content), layout)


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
