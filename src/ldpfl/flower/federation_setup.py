"""Load the data and build the federation of a config: the first step of both ready apps, server and client."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from ldpfl.data import Dataset
from ldpfl.data.features import feature_map
from ldpfl.data.features.registry import NONE
from ldpfl.data.loading import DATA_DIR_VARIABLE, is_bundled
from ldpfl.data.samples import TOKENS, tensors_by_name
from ldpfl.data.settings import DataConfig
from ldpfl.data.tokens import vocabulary_digest
from ldpfl.errors import ConfigError
from ldpfl.experiments.build import build, choose_device, count_weights
from ldpfl.experiments.config import RunConfig, parse_config
from ldpfl.experiments.dataset import Description, data_settings_of, load_dataset
from ldpfl.flower.statistics import read_encoder
from ldpfl.models.adapters import base_digest
from ldpfl.models.pretrained import licence_of
from ldpfl.server import Checkpoint
from ldpfl.simulation import Federation
from ldpfl.util.user_code import is_code, is_pretrained

_DATA_DIR = "data-dir"
"""Key of the folder with data sets in the config of a simulated node."""


def data_dir_of(context: Context) -> Path | None:
    """Return the folder with data sets that the operator named in the environment.

    Without one, as in a simulation, it comes from the node's config, which other users of the machine can change.
    """
    folder = os.environ.get(DATA_DIR_VARIABLE) or context.node_config.get(_DATA_DIR)
    return Path(str(folder)) if folder else None


def check_no_download_needed(data: DataConfig, data_dir: Path | None) -> None:
    """Raise if a client would have to download the data set. A client downloads nothing that a server names.

    Raises:
        ConfigError: the terms name a data set that is not bundled, and this client has no folder with data sets.
    """
    if not data.at_nodes and data_dir is None and not is_bundled(data.name):
        raise ConfigError(f"{DATA_DIR_VARIABLE} is not set: in the SuperNode's environment, set it to the folder with the data sets")


@dataclass(frozen=True)
class Prepared:
    """A config, its data set, and the federation and first checkpoint that are built from them."""

    config: RunConfig
    data: Dataset
    federation: Federation
    start: Checkpoint


@lru_cache(maxsize=2)
def prepare(
    config_text: str,
    data_dir: Path | None,
    device: str,
    weights_sent: int | None = None,
    table: Path | None = None,
    measured: str = "",
    *,
    write_cache: bool = True,
) -> Prepared:
    """Load the data and build the federation of a config. Cached, because a simulation's clients share a process.

    Args:
        config_text: the config as TOML.
        data_dir: folder with data sets.
        device: ``auto``, ``cpu`` or ``cuda``.
        weights_sent: number of weights that came with the terms. A built-in model of another size is refused before it takes memory.
        table: the node's own table.
        measured: how the table's columns are scaled, in the form of ``RoundTerms.measured``.
        write_cache: whether data and features may be written to the user's cache.

    Raises:
        LdpflError: the config, the data or the model cannot be used, or the model has another size than ``weights_sent``.
    """
    config = parse_config(config_text, origin="the round's terms")
    data = load_dataset(config, data_dir, table=table, write_cache=write_cache)
    if weights_sent is not None and not is_code(config.model.name):
        size = count_weights(config, Description.of(data))
        if size != weights_sent:
            raise ConfigError(
                f"the model in the server's config has {size:,} weights, but the server sent {weights_sent:,}: start with that model"
            )
    federation, start = build(config, data, choose_device(device), measured=read_encoder(measured))
    resolved = {"server_learning_rate": federation.optimiser.learning_rate, "server_weight_decay": federation.optimiser.decay}
    config = config.model_copy(update={"training": config.training.model_copy(update=resolved)})  # replaces the value "auto"
    return Prepared(_with_digests(config, data, federation), data, federation, start)


def _with_digests(config: RunConfig, data: Dataset, federation: Federation) -> RunConfig:
    """Return ``config`` with digests of the feature encoder, or else of the pretrained model and its tokenizer, if it names one of them.

    The server computes the digests from its own files. A node compares them with its files, so that all train with the same.
    """
    if config.data.features != NONE:
        return _with_digests_of_features(config)
    if not is_pretrained(config.model.name):
        return config
    model = {"base": base_digest(federation.task.module), "licence": licence_of(config.model.name, config.model.licence)}
    digest = vocabulary_digest(data_settings_of(config).tokenizer) if TOKENS in tensors_by_name(data.train.inputs) else ""
    changed = {"model": config.model.model_copy(update=model), "data": config.data.model_copy(update={"tokenizer_digest": digest})}
    return config.model_copy(update=changed)


def _with_digests_of_features(config: RunConfig) -> RunConfig:
    """Return ``config`` with digests of the server's feature encoder, and of its tokenizer if the encoder reads texts."""
    digest = feature_map(config.data.features, config.data.feature_options).digest
    tokenizer = data_settings_of(config).tokenizer
    changed = {"features_digest": digest, "tokenizer_digest": vocabulary_digest(tokenizer) if tokenizer else ""}
    return config.model_copy(update={"data": config.data.model_copy(update=changed)})
