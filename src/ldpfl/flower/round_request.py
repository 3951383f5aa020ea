"""A round's request to a client, as the client itself derives it, and the decisions that the client's node takes on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from flwr.app import RecordDict

from ldpfl.errors import OtherRunConfig, ProtocolError, shown
from ldpfl.flower.arrays import layout_of, only_arrays, to_vector
from ldpfl.flower.sent_vectors import vector_form
from ldpfl.flower.terms import RECORD, RoundTerms, agreement_of
from ldpfl.mechanisms import Mechanism
from ldpfl.mechanisms.base import is_finite
from ldpfl.mechanisms.dp_sgd import on_users_code
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.privacy.policy import OVER_RELAY
from ldpfl.server import ServerState


@dataclass(frozen=True, eq=False)
class Ask:
    """The release that a round asks of this client, as the client itself derives it from the terms.

    Attributes:
        mechanism: mechanism of this round, built here from the server's settings. Its guarantee is computed here as well.
        ranges: public ranges of the vector that is asked for.
        agreement: digest of everything that the server asks for, see :func:`ldpfl.flower.terms.agreement_of`; empty if there is no relay
            to compare it with.
        chosen_by: mechanism of the run, which returned ``mechanism`` for this round. The guarantee rests on its author's code as well.
    """

    terms: RoundTerms
    mechanism: Mechanism
    ranges: LayerRanges
    agreement: str
    chosen_by: object = None

    def of_own_app(self) -> Ask:
        """Return this request to an app that is not ldpfl's own: its model is its author's, whatever model the terms name."""
        return replace(self, mechanism=on_users_code(self.mechanism))


class Node(Protocol):
    """Decisions of a node, by its operator's settings. If a method raises, nothing leaves. ``Declined``: the operator forbids it."""

    def admit(self, ask: Ask) -> float:
        """Decide on the release, and charge it durably. From here on exactly one report leaves, whatever the data are.

        Called once a round, before the data are touched. Return for how many seconds from now the report can be delivered.
        """
        ...

    def would_admit(self, ask: Ask) -> None:
        """Raise if :meth:`admit` would decline, as far as this can be known before the round is opened.

        The server may ask this question any number of times, so nothing is charged or recorded. Passing is no promise: ``admit`` checks
        everything again.
        """
        ...

    def keeps_state(self, ask: Ask) -> bool:
        """Return whether the app's state of this round is kept for the next."""
        ...

    def seal(self, ask: Ask, payload: bytes) -> bytes:
        """Encrypt ``payload`` in the form that the relay expects."""
        ...

    def upload(self, ask: Ask, sealed: bytes, within_s: float) -> None:
        """Send ``sealed``, which :meth:`seal` returned, to the relay. Retry for up to ``within_s`` seconds."""
        ...


@dataclass(frozen=True, eq=False)
class RoundRequest:
    """A message's request, and the server's state that the message holds: all of it public.

    Attributes:
        layout: layers of the vector that is asked for.
        state: the model's weights and ranges, and the number of training rounds before this round.
    """

    ask: Ask
    layout: ParameterLayout
    state: ServerState


def read_request(content: RecordDict, message_type: str, run_config: str) -> RoundRequest:
    """Read a round's request from the ``content`` of a message of type ``message_type``, and check that its parts fit together.

    ``run_config`` is the digest of the node's own run config.

    Raises:
        LdpflError: the message is no round of ``LdpStrategy``, its parts contradict each other, it names another run config, or the model
            is not finite.
    """
    terms = read_terms(content, run_config)
    arrays = only_arrays(content, allowed=tuple(content.config_records))
    layout = layout_of(arrays, terms.layers)
    state = ServerState(terms.planned.trained, to_vector(arrays, layout), terms.ranges(layout))
    if not is_finite(state.weights):
        layer = next(name for name, values in layout.unflatten(state.weights).items() if not values.isfinite().all())
        raise ProtocolError(
            f"the model that the server sent has NaN or infinity in the layer {shown(layer)}; nothing was charged or sent. The server's "
            "operator should check the initial model, and lower the learning rate"
        )
    form = vector_form(terms, layout, state.public())
    agreement = agreement_of(content, message_type) if terms.transport in OVER_RELAY else ""
    return RoundRequest(Ask(terms, form.mechanism, form.ranges, agreement, form.chosen_by), form.layout, state)


def read_terms(content: RecordDict, run_config: str) -> RoundTerms:
    """Return the terms in a message. ``run_config`` is the digest of the node's own run config.

    Raises:
        ProtocolError: the message holds no terms, or they cannot be read.
        OtherRunConfig: the terms name another run config than the node's.
    """
    records = content.config_records
    if RECORD not in records:
        raise ProtocolError(f"the server's message has no record {RECORD!r}: the server must use LdpStrategy")
    terms = RoundTerms.from_record(records[RECORD])
    if terms.run_config != run_config:
        raise OtherRunConfig(
            "this node's run config differs from the one that the server states: "
            "the server must use LdpStrategy(..., run_config=context.run_config)"
        )
    return terms
