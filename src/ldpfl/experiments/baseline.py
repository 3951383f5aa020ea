"""The noise-free baseline: its config, its folder in the cache, and whether a cached result can be used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ldpfl
from ldpfl.data import Dataset
from ldpfl.errors import LdpflError
from ldpfl.experiments.config import PrivacyConfig, RangesConfig, RunConfig, ShufflingConfig, TrainingConfig
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.mechanisms.identity import IdentitySettings
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation
from ldpfl.util.user_cache import cache_dir

Build = Callable[[RunConfig, Dataset], tuple[Federation, Checkpoint]]


@dataclass(frozen=True)
class Baseline:
    """A run without noise.

    Attributes:
        config: the run's config, with the noise removed.
        data: data that the config is trained on.
        federation: the simulation.
        start: state before the first round.
        folder: folder of the run in the cache, where a result of an earlier run may lie.
    """

    config: RunConfig
    data: Dataset
    federation: Federation
    start: Checkpoint
    folder: RunFolder

    @property
    def has_user_code(self) -> bool:
        """Whether the model is a user's code or pretrained, and so may have changed since a result was cached."""
        return ":" in self.config.model.name

    def cached_result(self) -> dict[str, Any] | None:
        """Return the cached result; None if there is none, or if it may be outdated or damaged."""
        return None if self.has_user_code or self.folder.is_damaged() else self.folder.result()

    def last_checkpoint(self) -> Checkpoint:
        """Return the last checkpoint in the cache folder; the start if there is none, or if it may be outdated or cannot be read."""
        try:
            return self.start if self.has_user_code else self.folder.checkpoint_or(self.start)
        except (LdpflError, OSError):
            return self.start


_SERVER_KEYS = ("server_learning_rate", "server_momentum", "server_schedule")
_DEFAULT_SERVER = {key: TrainingConfig.model_fields[key].default for key in _SERVER_KEYS}
"""Default settings of the server's steps. These settings have no effect if the server averages the weights of the clients."""


def config_with_clipping_only(config: RunConfig) -> RunConfig:
    """Return ``config`` without noise, but with clipping to its ranges. Its score shows how much clipping alone costs."""
    mechanism = IdentitySettings(perturbed=config.mechanism.perturbed, clamp=True)
    evaluation = config.evaluation.model_copy(update={"epsilon": "off"})
    unprotected = {"shuffling": ShufflingConfig(), "privacy": PrivacyConfig(), "evaluation": evaluation}
    return config.model_copy(update={"mechanism": mechanism, **unprotected})


def config_without_noise(config: RunConfig) -> RunConfig:
    """Return ``config`` without noise. Settings that then have no effect get their defaults, so that recipes share one baseline.

    A mechanism that transforms values (``nearly_noise_free``) is kept with negligible noise, since its transformation affects the model.
    """
    training, perturbed = config.training, config.mechanism.perturbed
    if perturbed == "weights":
        training = training.model_copy(update=_DEFAULT_SERVER)
    elif perturbed == "update" and all(getattr(training, name) == value for name, value in _DEFAULT_SERVER.items()):
        # Without noise, the broadcast weights plus the mean update are the mean of the trained weights, so both kinds share one baseline.
        perturbed = "weights"
    return config.model_copy(
        update={
            "name": "noise-free",
            "description": "",
            "training": training,
            "mechanism": config.mechanism.nearly_noise_free or IdentitySettings(perturbed=perturbed),
            "ranges": RangesConfig(),
            # With the other channels each client draws its own noise, which takes long for the sums of least squares.
            "shuffling": ShufflingConfig(channel="secure-sum") if training.method == "least-squares" else ShufflingConfig(),
            "privacy": PrivacyConfig(),
            "evaluation": config.evaluation.model_copy(update={"epsilon": "off"}),
        }
    )


def baseline_of(config: RunConfig, data: Dataset, build: Build) -> Baseline:
    """Return the baseline of ``config`` on ``data``, with its folder in the cache. ``build`` is :func:`ldpfl.experiments.build.build`.

    The folder's name is a hash of the config, the data, the device, the versions, the generator of random words, and the initial model. It
    does not cover the code of a model that is named by import path, so such a baseline is run again each time.
    """
    baseline = config_without_noise(config)
    federation, start = build(baseline, data)
    # The digest covers the trained weights. The origin names the data, the device, and the frozen weights of a pretrained model.
    initial_digest = hashlib.sha256(start.state.weights.numpy().tobytes()).hexdigest()
    key_parts = (baseline.to_toml(), start.origin, initial_digest, ldpfl.__version__, torch.__version__, start.words)
    folder = RunFolder(cache_dir() / "baselines" / hashlib.sha256("\n".join(key_parts).encode()).hexdigest()[:16])
    return Baseline(baseline, data, federation, start, folder)
