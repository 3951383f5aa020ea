"""What is known of a run that has not come to its end, in the form of the figures of one that has."""

from __future__ import annotations

from typing import Any

from ldpfl.errors import ConfigError
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.figures import last_trained, metric_before_data, of_unit
from ldpfl.experiments.run_folder import Kind, RunFolder
from ldpfl.util.files import finite


def figures_so_far(folder: RunFolder, config: RunConfig) -> dict[str, Any]:
    """Return what the finished rounds of the run in ``folder`` came to; nothing that its config names is opened or run.

    Raises:
        ConfigError: no round is finished.
        DataError: the checkpoint is damaged.
    """
    last = folder.checkpoint()
    if last is None or not last.history:
        raise ConfigError(f"{folder.path} holds a run of which no round is finished")
    trained = last_trained(last)
    figures = {
        "name": config.name,
        "seed": config.seed,
        "seed_is_secret": config.hides_seed,
        "own_data": config.data.brought,
        "metric": metric_before_data(config, folder.kind()),
        "score": last.history[-1].score,
        "scores": {},
        "score_per_round": [metrics.score for metrics in last.history],
        "noise_free_score": None,
        "noise_free_score_per_round": None,
        "evaluated_on": config.data.evaluate_on,
        "mechanism": config.mechanism.name,
        **of_unit(last.ledger, config.privacy.delta),
        "clients": config.clients.count,
        "clients_per_round": trained.clients,
        "rounds": len(last.history),
        "weights": last.state.weights.numel(),
        "uplink_bytes_per_client_round": max(metrics.uplink_bytes_per_client for metrics in last.history),
        "layers": {
            name: {
                "weights": size,
                "radius": radius if config.mechanism.uses_ranges else None,
                "noise_std": trained.noise_std.get(name),
                "clipped_fraction": trained.clipped_fraction.get(name),
            }
            for (name, radius), size in zip(trained.radius.items(), last.state.ranges.sizes, strict=False)
        },
        "clipped_records_per_round": [metrics.clipped_records for metrics in last.history],
        "seconds": sum(metrics.seconds for metrics in last.history),
        "device": last.origin.rpartition(" on ")[2],
    }
    strict: dict[str, Any] = finite(figures)
    return strict


def progress_of(folder: RunFolder, config: RunConfig, rounds: int) -> str:
    """Return how far a run is, in a sentence."""
    if folder.kind() is Kind.OWN_APP:
        return f"Round {rounds:,}; how many there are to be, and on which data, its own app alone knows."
    return f"Round {rounds:,} of {config.training.rounds:,} so far; what is said of the whole run is of these."
