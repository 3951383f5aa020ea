"""The vector that a node sends in a round: its layers, its length, and the mechanism that protects it.

Server and nodes derive it by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from ldpfl.errors import AskedForOther, ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import describe_data
from ldpfl.experiments.record_sums import evaluation_vector_layout, least_squares_solver
from ldpfl.flower.round_kinds import Kind
from ldpfl.flower.statistics import read_edges
from ldpfl.flower.terms import RoundTerms
from ldpfl.mechanisms import Mechanism, payload_bits
from ldpfl.mechanisms.base import PublicState, in_round
from ldpfl.mechanisms.ranges import LayerRanges
from ldpfl.models.layout import ParameterLayout
from ldpfl.simulation.evaluating_records import RecordScores
from ldpfl.simulation.least_squares import LeastSquares
from ldpfl.simulation.record_sums import ranges_of

SUMS = "sums"
"""Name of the array that holds a client's sums over its records."""


@dataclass(frozen=True, eq=False)
class VectorForm:
    """Form of the vector that a node sends in a round.

    Attributes:
        layout: layers of the vector: the model's layers, or a single layer of sums over records.
        ranges: public ranges of the vector.
        mechanism: mechanism of this round.
        chosen_by: mechanism of the run, which returned ``mechanism`` for this round.
    """

    layout: ParameterLayout
    ranges: LayerRanges
    mechanism: Mechanism
    chosen_by: Mechanism


def sums_layout(size: int) -> ParameterLayout:
    """Return the layout of a client's sums over its records: a single layer of ``size`` numbers."""
    return ParameterLayout((SUMS,), ((size,),))


def vector_form(terms: RoundTerms, layout: ParameterLayout, public: PublicState) -> VectorForm:
    """Return the form of the vector that ``terms`` ask for. No data are used, and no code that the terms name is run.

    Args:
        layout: layers of the model.
        public: public state at the beginning of the round, to which the mechanism may adapt.

    Raises:
        AskedForOther: the terms ask for something else than their config plans.
        LdpflError: the terms, the layout or the mechanism contradict each other.
    """
    ranges, kind = terms.ranges(layout), terms.planned.kind
    if kind == "training":
        check_length(terms, layout.dimension)
    else:
        layout, ranges = sums_layout(terms.size), ranges_of(terms.size)
    chosen_by = terms.mechanism(ranges)
    mechanism = in_round(chosen_by, public)
    payload_bits(mechanism, ranges)  # raises if the mechanism does not fit the layers
    return VectorForm(layout, ranges, mechanism, chosen_by)


def check_sums(terms: RoundTerms) -> None:
    """Raise if a round for sums over records asks for a vector of the wrong length. This may run code that the terms name.

    Raises:
        AskedForOther: the vector has another length than the sums, or the histograms are of another number of columns.
    """
    if terms.kind == "statistics":  # here `measured` holds the edges of the histograms
        edges, columns = read_edges(terms.measured), len(describe_data(terms.config).unscaled)
        if len(edges) != columns:
            raise AskedForOther(
                f"the server asks for histograms of {len(edges)} columns in round {terms.round}, but the config that it sent names "
                f"{columns}: the server's operator has to correct this; nothing was sent"
            )
        check_length(terms, sum(column_edges.size - 1 for column_edges in edges))
    elif terms.kind != "training":
        check_length(terms, summed_vectors(terms.config, terms.kind).ranges.dimension)


def check_length(terms: RoundTerms, size: int) -> None:
    """Raise unless ``terms`` ask for a vector of this ``size``.

    Raises:
        AskedForOther: the terms ask for another length.
    """
    if terms.size != size:
        raise AskedForOther(
            f"the server asks for {terms.size:,} values in round {terms.round}, but {terms.kind} needs {size:,}: the server's operator has "
            "to correct this; nothing was sent"
        )


def summed_vectors(config: RunConfig, kind: Kind) -> RecordScores | LeastSquares:
    """Return the definition of the vectors that records (or clients) add to the sums of a round of this ``kind``.

    Raises:
        ConfigError: a round of this kind has no sums over records, or its config does not fit them.
    """
    data = describe_data(config)
    if kind == "evaluation":
        return evaluation_vector_layout(config, data.outputs, data.encoder)
    head = least_squares_solver(config, data)
    if head is None:
        raise ConfigError(
            f"the server's round asks for {kind} sums, but the server's training.method is 'gradient', which has no such sums: set it to "
            "'least-squares'"
        )
    return head
