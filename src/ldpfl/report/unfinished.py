"""Figures of an unfinished run, in the form of a finished run's result."""

from __future__ import annotations

from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.figures import fewest_and_most_clients, last_round_with_clients, metric_before_data, unit_epsilon_entries
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.util.files import finite


def figures_so_far(folder: RunFolder, config: RunConfig, metric: str = "") -> dict[str, Any]:
    """Return the figures of the finished rounds of the run in ``folder``. Its data are not read, and its code is not run.

    ``metric`` is the name of the main metric, if the caller knows it. A config need not show it.

    Raises:
        ConfigError: no round is finished.
        DataError: the checkpoint is damaged.
    """
    checkpoint = folder.checkpoint()
    if checkpoint is None or not checkpoint.history:
        raise ConfigError(f"the run in {folder.path} has no finished round yet: wait for one, or resume the run")
    last_metrics = last_round_with_clients(checkpoint)
    figures = {
        "name": config.name,
        "seed": config.seed,
        "seed_is_secret": config.hides_seed,
        "own_data": config.data.brought,
        "metric": metric or metric_before_data(config, folder.kind()),
        "score": checkpoint.history[-1].score,
        "scores": {},
        "score_per_round": [metrics.score for metrics in checkpoint.history],
        "noise_free_score": None,
        "noise_free_score_per_round": None,
        "evaluated_on": config.data.evaluate_on,
        "mechanism": config.mechanism.name,
        **unit_epsilon_entries(checkpoint.ledger, config.privacy.delta),
        "clients": config.clients.count,
        "clients_per_round": last_metrics.clients,
        "clients_in_rounds": fewest_and_most_clients(checkpoint),
        "rounds": len(checkpoint.history),
        "weights": checkpoint.state.weights.numel(),
        "uplink_bytes_per_client_round": max(metrics.uplink_bytes_per_client for metrics in checkpoint.history),
        "layers": {
            name: {
                "weights": size,
                "radius": radius if config.mechanism.uses_ranges else None,
                "noise_std": last_metrics.noise_std.get(name),
                "clipped_fraction": last_metrics.clipped_fraction.get(name),
            }
            for (name, radius), size in zip(last_metrics.radius.items(), checkpoint.state.ranges.sizes, strict=False)
        },
        "clipped_records_per_round": [metrics.clipped_records for metrics in checkpoint.history],
        "seconds": sum(metrics.seconds for metrics in checkpoint.history),
        "device": checkpoint.origin.rpartition(" on ")[2],
    }
    finite_figures: dict[str, Any] = finite(figures)  # figures that are not finite become None, as in result.json
    return finite_figures


def progress_sentence(folder: RunFolder, config: RunConfig, rounds: int) -> str:
    """Return how far a run is, in a sentence."""
    if folder.kind() is Kind.OWN_APP:
        return f"Round {rounds:,}. Only the run's custom app knows the number of rounds and the data."
    return f"Round {rounds:,} of {config.training.rounds:,} so far. Figures of the whole run cover only these rounds."
