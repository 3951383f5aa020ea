"""Run the rounds of the ready ServerApp (:mod:`ldpfl.flower.apps`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid
from torch import Tensor

from ldpfl.errors import TooFewTakePart
from ldpfl.experiments import load_recipe
from ldpfl.experiments.calibration import resolve_settings
from ldpfl.experiments.figures import summarise
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.experiments.runner import model_file_of
from ldpfl.flower.arrays import to_arrays
from ldpfl.flower.federation_setup import Prepared, data_dir_of, prepare
from ldpfl.flower.policy_init import config_for_nodes, config_for_transport
from ldpfl.flower.relay_collection import operator_relay, operator_sum
from ldpfl.flower.report_collection import Collector
from ldpfl.flower.run_settings import RunSettings
from ldpfl.flower.server_invitations import Waiting
from ldpfl.flower.statistics import ColumnScaling
from ldpfl.flower.strategy import LdpStrategy
from ldpfl.server import ServerRules

LOGGER = logging.getLogger("flwr.ldpfl")

ROUNDS_OVER = "the rounds are over"
"""Beginning of the log line after a run's last round."""


def serve(grid: Grid, context: Context) -> None:
    """Run the rounds of the recipe, and leave a run folder if one is named.

    The settings come from the run config in Flower's ``context`` of the server, see :class:`~ldpfl.flower.run_settings.RunSettings`.
    """
    settings = RunSettings.of_run(context.run_config)
    collector = _collector(settings)
    recipe = load_recipe(settings.recipe, settings.change_list)
    config = resolve_settings(config_for_transport(recipe, settings.transport, settings.linked, settings.min_clients))
    prepared = prepare(config.to_toml(), data_dir_of(context), settings.device)
    federation, start = prepared.federation, prepared.start
    latest = [prepared]  # a list, so that `on_measured`, which the strategy calls, can replace its only entry

    def on_measured(scaled: ColumnScaling) -> tuple[Tensor, ServerRules]:
        """Build the federation again, with columns scaled as ``scaled`` says. Return its initial weights and rules."""
        rescaled = prepare(config.to_toml(), data_dir_of(context), settings.device, measured=scaled.text)
        with_notes = replace(rescaled.federation, notes=(*rescaled.federation.notes, *scaled.notes))
        latest[:] = [replace(rescaled, federation=with_notes)]
        return rescaled.start.state.weights, with_notes.rules

    folder = RunFolder(Path(settings.out)) if settings.out else None
    strategy = LdpStrategy(
        config_for_nodes(prepared.config),
        collector=collector,
        folder=folder,
        waiting=Waiting(settings.nodes or len(federation.samples), settings.wait_s, settings.agreeing, settings.answer_s),
        score=federation.rules.score,
        origin=start.origin,
        reply_s=settings.reply_s,
        run_config=context.run_config,
        kind=Kind.READY_APP,
        on_measured=on_measured,
    )
    initial = to_arrays(start.state.weights, federation.task.layout)
    try:
        strategy.start(grid, initial, timeout=settings.timeout_s)
    except TooFewTakePart:
        if any(metrics.clients for metrics in strategy.checkpoint.history):  # otherwise nothing was trained, and there is no model to save
            _save_result(strategy, latest[0], folder, "the run ends before its last round")
        raise
    _save_result(strategy, latest[0], folder, ROUNDS_OVER)


def _save_result(strategy: LdpStrategy, prepared: Prepared, folder: RunFolder | None, ending: str) -> None:
    """Save the run's result and model in ``folder``, if there is one. ``ending`` tells the log how the run ended."""
    federation = prepared.federation
    if folder is None:
        LOGGER.warning("%s, and the model was not saved: next time set ldpfl.out to a folder for it", ending)
        return
    LOGGER.info("%s: computing the run's figures and guarantee, which may take some minutes", ending)
    result = summarise(strategy.config, federation, prepared.data, strategy.checkpoint, None)
    described = model_file_of(prepared.config, federation, prepared.data)
    folder.save_result(strategy.checkpoint, federation.task, result, described, federation.encoder)
    LOGGER.info("the run's model, figures and ledger are in %s: see ldpfl show and ldpfl ledger", folder.path)


def _collector(settings: RunSettings) -> Collector | None:
    """Return the collector for the transport in ``settings``. None stands for reports in the Flower replies."""
    if settings.transport == "direct":
        return None
    if settings.transport == "sum":
        return operator_sum(min_clients=settings.min_clients, window_s=settings.window_s)
    return operator_relay(linked=settings.linked, min_clients=settings.min_clients, window_s=settings.window_s)
