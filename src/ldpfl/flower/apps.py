"""A ready ServerApp and ClientApp that run ldpfl's recipes on Flower: ``ldpfl.flower.apps:server_app`` and ``:client_app``.

The server's settings come from the run's config, see :mod:`ldpfl.flower.run_settings`. A client reads none of these settings: the round's
terms, which are the same for all clients, say what it trains.

Where ``data.name`` is ``node``, each client trains on the table that its operator names in ``LDPFL_DATA``, in the node's environment. The
terms say how the table's columns are read. The server measures on its own rows, ``data.test_path``. Built-in data come from the folder
``LDPFL_DATA_DIR`` in the node's environment, or in a simulation from ``data-dir`` in the node's config; ``partition-id`` selects a client's
part of them. The node's operator decides what a node allows: see ``ldpfl.flower.operator_node``.

A result that is marked PRIVATE is not randomised yet, so it must not leave the node.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import prod

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from ldpfl.data import Dataset
from ldpfl.data.nodes import node_table_path
from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import load_dataset
from ldpfl.flower.app_failures import TRY_IT, UNUSABLE
from ldpfl.flower.app_imports import app_folders_off_path
from ldpfl.flower.arrays import to_arrays, to_vector
from ldpfl.flower.client_app import LdpClientApp
from ldpfl.flower.federation_setup import check_no_download_needed, data_dir_of, prepare
from ldpfl.flower.operator_node import operator_setting
from ldpfl.flower.records import device_of_node
from ldpfl.flower.round_kinds import Kind
from ldpfl.flower.sent_vectors import sums_layout, vector_form
from ldpfl.flower.statistics import histogram_counts, read_edges
from ldpfl.flower.terms import ARRAYS, RECORD, RoundTerms
from ldpfl.mechanisms.dp_sgd import DpSgd, DpSgdSettings, require_dp_sgd
from ldpfl.server import ServerState
from ldpfl.simulation import Federation, train_clients
from ldpfl.simulation.evaluating_whole_clients import WholeClientEvaluation
from ldpfl.simulation.gradients import confined
from ldpfl.simulation.measuring import count_offset, points_per_row
from ldpfl.simulation.record_sums import RecordVectors, client_sums
from ldpfl.tasks import absent_targets

LOGGER = logging.getLogger("flwr.ldpfl")

_MIN_USABLE_SHARE = 0.5
"""Share of usable rows below which the node's log has a warning."""


def train(message: Message, context: Context) -> Message:
    """Train the node's client on its own part of the data, and reply with its weights: PRIVATE, which ``LdpClientApp`` then randomises.

    Settings come from the round's terms alone, since the node's policy has judged these. It has not judged the run config in ``context``.
    """
    with app_folders_off_path():  # training needs no module of the app's folder, and one there could replace a library's optional import
        return _local_result(message, context)


def train_for_trial(message: Message, context: Context) -> Message:
    """Train as :func:`train` does, but write nothing to the user's cache or the log. A trial prints its own findings."""
    with app_folders_off_path():
        return _local_result(message, context, is_trial=True)


def _local_result(message: Message, context: Context, *, is_trial: bool = False) -> Message:
    """Reply with the vector that the round's terms ask for: PRIVATE.

    It holds the client's trained weights or their gradient, its evaluation figures where clients are protected as a whole, or sums over
    its records. With ``is_trial``, nothing is logged or written to the user's cache.
    """
    terms = RoundTerms.from_record(message.content.config_records[RECORD])
    weights_sent = sum(prod(array.shape) for array in message.content.array_records[ARRAYS].values())
    data_dir = data_dir_of(context)
    table = None
    if terms.config.data.at_nodes:
        table = node_table_path(operator_setting("data"), context.node_config.get("partition-id"))
    check_no_download_needed(terms.config.data, data_dir)
    scaling = "" if terms.kind == "statistics" else terms.measured  # in statistics rounds, `measured` has the histograms' edges instead
    prepared = prepare(
        _uncompiled(terms.config).to_toml(), data_dir, str(device_of_node()), weights_sent, table, scaling, write_cache=not is_trial
    )
    if table and not is_trial:
        _log_unusable_rows(prepared.data)
    federation, layout = prepared.federation, prepared.federation.task.layout
    client = 0 if table else _client_number(context, len(federation.samples))  # a node's own table has a single client
    weights = to_vector(message.content.array_records[ARRAYS], layout)
    state = ServerState(terms.planned.trained, weights, prepared.start.state.ranges)
    if terms.kind == "training":
        federation = replace(federation, trainer=confined(federation.trainer))  # a record for which the model raises contributes nothing
        trained = train_clients(federation, state, np.array([client]))[0]
        return Message(RecordDict({ARRAYS: to_arrays(trained, layout)}), reply_to=message)
    evaluation = federation.judged
    if terms.kind == "evaluation" and isinstance(evaluation, WholeClientEvaluation):
        vectors = evaluation.vectors.fitted_to(weights)
        vector = vectors.client_values(federation.task, weights, evaluation.units[client : client + 1], confined=True)[0]
    elif terms.kind == "statistics":
        mechanism = require_dp_sgd(vector_form(terms, layout, state.public()).mechanism)
        # `prepare` has scaled the columns, but the histograms count unscaled values.
        unscaled = load_dataset(terms.config, data_dir, table=table, write_cache=not is_trial)
        vector = _histogram_sums(terms, unscaled, federation, client, mechanism)
    else:
        mechanism = require_dp_sgd(vector_form(terms, layout, state.public()).mechanism)
        vector = _record_sums(federation, weights, client, terms.kind, mechanism.steps)
    return Message(RecordDict({ARRAYS: to_arrays(vector, sums_layout(terms.size))}), reply_to=message)


def _log_unusable_rows(data: Dataset) -> None:
    """Warn this node's operator if few or none of its rows can be used. Only the log may say this, because it depends on the data."""
    usable = (~absent_targets(data.train.targets)).float().mean()  # a row that cannot be used has been given an absent target
    if not usable >= _MIN_USABLE_SHARE:  # also true for NaN, the mean of no rows
        LOGGER.warning(
            "%s%s of this node's rows can be used: a row is left out if it lacks a value that the app needs, or has one that it does not "
            "allow. The report has the usual form and is charged all the same. To see what does not fit, run %s on this node",
            UNUSABLE,
            "fewer than half" if usable > 0 else "none",
            TRY_IT,
        )


def _uncompiled(config: RunConfig) -> RunConfig:
    """Return ``config`` without compiled gradients of records: compiled code cannot say which record caused an error."""
    if not isinstance(config.mechanism, DpSgdSettings):
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"compile": "off"})})


def _histogram_sums(terms: RoundTerms, unscaled: Dataset, federation: Federation, client: int, mechanism: DpSgd) -> Tensor:
    """Return the counts (size,) int64 of the client's rows in the terms' histograms, less the offset of :func:`count_offset`: PRIVATE.

    Counts are in points of the mechanism's integer lattice. A unit is a person where persons are protected, else a row. Each unit adds the
    same number of points to each column. A person's points are divided among their rows.

    Args:
        unscaled: the client's data, whose columns are not scaled yet.
        client: index of the client in ``federation``.
    """
    units, edges = federation.samples[client], read_edges(terms.measured)
    if federation.persons is None:
        rows, unit_size = units, np.ones_like(units)
    else:
        rows, unit_size = federation.persons.all_rows_of(units)  # unit_size: for each row, how many rows its person has
    points_a_unit = points_per_row(mechanism.steps, len(edges))
    return histogram_counts(unscaled, edges, rows, points_a_unit // unit_size) - count_offset(points_a_unit, mechanism)


def _record_sums(federation: Federation, weights: Tensor, client: int, kind: Kind, steps: int) -> Tensor:
    """Return the sums (size,) int64 over the client's records that a round of this ``kind`` asks for: PRIVATE.

    Args:
        client: index of the client in ``federation``.
        steps: number of lattice points in the clipping norm. Each record's vector is rounded to this lattice.
    """
    evaluation, head = federation.judged, federation.head
    vectors: RecordVectors
    if kind == "evaluation" and evaluation is not None:
        vectors, units = evaluation.vectors.fitted_to(weights), evaluation.units
    elif kind == "least-squares" and head is not None:
        vectors, units = head, federation.samples
    else:
        raise ConfigError(
            f"the server's round asks for {kind} sums, but the server's config plans none: the server must keep one config for all rounds"
        )
    client_units = units[client : client + 1]  # the records, or persons, of this client alone
    return client_sums(vectors, federation.task, weights, client_units, steps, federation.persons, confined=True)[0]


def _client_number(context: Context, clients: int) -> int:
    """Return the number of this node's client, from the ``partition-id`` in the node's config."""
    partition = context.node_config.get("partition-id")
    if not isinstance(partition, int) or not 0 <= partition < clients:
        raise ConfigError(
            f"the node's config needs partition-id, a number from 0 to {clients - 1} that no other node has: start the SuperNode with "
            '--node-config "partition-id=N"'
        )
    return partition


server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds of the recipe, and leave a run folder if one is named."""
    from ldpfl.flower.ready_server import serve  # late: a node imports this module for each message, and needs no server code

    serve(grid, context)


client_app = LdpClientApp("ldpfl.flower.apps:train")
trial_app = LdpClientApp("ldpfl.flower.apps:train_for_trial")
