"""The question before a round: would a node take part in it? A node answers from public facts alone, and the answer costs nothing.

The question holds the round's terms and the layers' sizes, and no model. An answer is no promise: when a node is told to train, it checks
everything again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import ConfigRecord, RecordDict

from ldpfl.errors import ProtocolError
from ldpfl.flower.round_request import Ask, read_terms
from ldpfl.flower.sent_vectors import vector_form
from ldpfl.flower.terms import RECORD, RoundTerms
from ldpfl.flower.wire import LayerSizes, WireFields
from ldpfl.mechanisms.base import PublicState
from ldpfl.models.layout import ParameterLayout

QUESTION = "query.takes_part"
"""Type of the message."""

_RECORD = "question"
"""Name of the question's own record, beside the record of the terms."""

_MAX_WEIGHTS = 2**28
"""Maximum length of the vector, or number of the model's weights, in a question. A few bytes must not make a node use up its memory."""


class _Wire(WireFields):
    """The fields of the question's own record."""

    sizes: LayerSizes


@dataclass(frozen=True)
class Answers:
    """Answers of several nodes to the question.

    Attributes:
        agreed: the nodes that would take part.
        reasons: reasons that nodes gave for not taking part, by node.
        declined: number of nodes in ``reasons`` whose operators do not allow the round.
        silent: the nodes that did not answer in time.
    """

    agreed: tuple[int, ...] = ()
    reasons: Mapping[int, str] = field(default_factory=dict)
    declined: int = 0
    silent: tuple[int, ...] = ()

    @property
    def asked(self) -> int:
        """Number of nodes that were asked."""
        return len(self.agreed) + len(self.reasons) + len(self.silent)

    def joined(self, later: Answers, *, asked_again: bool = False) -> Answers:
        """Return these answers together with ``later`` ones.

        Args:
            asked_again: whether the nodes of ``later`` are those that agreed here. Then only their later agreement counts.
        """
        agreed = later.agreed if asked_again else (*self.agreed, *later.agreed)
        return Answers(agreed, {**self.reasons, **later.reasons}, self.declined + later.declined, (*self.silent, *later.silent))


def question_of(terms: RoundTerms, sizes: Sequence[int]) -> RecordDict:
    """Return the content of the question, the same for all nodes; ``sizes`` are the numbers of weights of the layers."""
    return RecordDict({RECORD: terms.to_record(), _RECORD: ConfigRecord({"sizes": list(sizes)})})


def read_question(content: RecordDict, run_config: str) -> Ask:
    """Return the release that the question in ``content`` is about.

    Args:
        run_config: digest of the node's own run config, which the server's terms must name.

    Raises:
        LdpflError: the content is no question, its parts contradict each other, or it names another run config.
    """
    if set(content) != {RECORD, _RECORD} or _RECORD not in content.config_records:
        raise ProtocolError(f"the server's question must hold the records {RECORD!r} and {_RECORD!r} and no others")
    terms = read_terms(content, run_config)
    wire = _Wire.of(content.config_records[_RECORD], "the server's question")
    if len(set(terms.layers)) != len(terms.layers) or len(wire.sizes) != len(terms.layers):
        raise ProtocolError(
            f"the server's question names {len(terms.layers)} layers and has {len(wire.sizes)} sizes: expected one size for each layer, "
            "and no layer twice"
        )
    dimension = sum(wire.sizes)  # number of the model's weights
    if max(dimension, terms.size) > _MAX_WEIGHTS:  # terms.size: length of the vector asked for, which may be one of sums
        raise ProtocolError(f"the server's question is for a vector of at most {_MAX_WEIGHTS:,} values, got {max(dimension, terms.size):,}")
    # A mechanism's release depends on the round's number and the layers' sizes, not on the model's weights: zeros replace them.
    public = PublicState(terms.planned.trained + 1, torch.zeros(()).expand(dimension), previous=None, sizes=tuple(wire.sizes))
    flat_layers = ParameterLayout(terms.layers, tuple((size,) for size in wire.sizes))  # the layers' true shapes do not matter either
    form = vector_form(terms, flat_layers, public)
    return Ask(terms, form.mechanism, form.ranges, agreement="", chosen_by=form.chosen_by)
