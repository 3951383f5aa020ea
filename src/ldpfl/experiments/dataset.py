"""The data that a config names or a caller hands over, with the features that the config names in their place."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from ldpfl import tasks
from ldpfl.data import Dataset, load
from ldpfl.data.encoder import Encoder
from ldpfl.data.features import extracted, feature_map
from ldpfl.data.features.extraction import Progress, quietly
from ldpfl.data.features.registry import NONE
from ldpfl.data.loading import image_shape
from ldpfl.data.nodes import described_at_nodes, read_at_node
from ldpfl.data.settings import DataConfig
from ldpfl.data.unscaled import Unscaled
from ldpfl.data.user_data import load_brought
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.config import RunConfig
from ldpfl.models.pretrained import licence_of, local_folder
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import PRETRAINED, is_pretrained

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Given:
    """What a caller handed over, where a config names nothing that could be looked up: data, a model."""

    data: object = None
    module: nn.Module | None = None
    _read: dict[str, Dataset] = field(default_factory=dict, repr=False)

    def read(self, config: DataConfig, targets: tasks.Targets) -> Dataset:
        """Return a user's own data, read once: a run looks at them several times before it begins, and code may make others each time."""
        key = f"{targets} {config.model_dump_json()}"
        if key not in self._read:
            self._read[key] = load_brought(config, targets, self.data)
        return self._read[key]


NOTHING = Given()

_SIMULATION = "this is a simulation: the guarantee is that of a deployment like it, where clients draw their own noise"
_OF_SECRET = (
    f"{_SIMULATION}; here all noise follows from a secret, which the run's folder keeps in the file SECRET-seed: whoever has that file can "
    "take the noise off, so hand the model on by ldpfl export"
)
_OF_SEED = (
    f"{_SIMULATION}; here all noise follows from the seed that was given, which config.toml and result.json hold: whoever knows it can "
    "take the noise off, so give no seed where the model is handed on"
)
_OF_SCORES = "test rows are not protected: scores are exact figures of them"


@dataclass(frozen=True)
class Description:
    """What is public about data before anything is trained.

    Attributes:
        shape: of one sample as the model sees it; None where it is several tensors.
        outputs: of the model.
        vocabulary: tokens that there are, where samples are texts.
        clients: how many the data themselves name; None where a partition makes them.
        unscaled: columns of a table that are still on their own scale.
        encoder: says what the columns of a table are; None where the data are none.
        records: how many are trained on, or how many persons where persons are named.
    """

    shape: tuple[int, ...] | None
    outputs: int
    vocabulary: int | None = None
    clients: int | None = None
    unscaled: tuple[Unscaled, ...] = ()
    encoder: Encoder | None = None
    records: int = 0

    @classmethod
    def of(cls, data: Dataset) -> Description:
        """Return what is public about ``data``."""
        clients = None if data.clients is None else int(data.clients.max()) + 1
        shape = data.shape if isinstance(data.train.inputs, Tensor) else None
        return cls(shape, data.outputs, data.tokens(), clients, data.unscaled, data.encoder, _units(data))


def _units(data: Dataset) -> int:
    """Return how many samples are trained on, or how many persons: these are counted at each client, for each of these counts is public."""
    if data.persons is None:
        return len(data.train)
    clients = [0] * len(data.persons) if data.clients is None else data.clients.tolist()
    return len(set(zip(clients, data.persons.tolist(), strict=True)))


def load_dataset(
    config: RunConfig,
    data_dir: Path | None,
    warn: Warn = _LOG.warning,
    progress: Progress = quietly,
    given: Given = NOTHING,
    table: Path | None = None,
    *,
    write_cache: bool = True,
) -> Dataset:
    """Return the data of ``config``; features are computed once and cached, but for a user's own data. ``table`` is a node's own.

    Without ``write_cache`` nothing is written for that: what is cached already is read.

    Raises:
        LdpflError: the data or the features are unknown, cannot be read, or do not fit each other.
    """
    if is_pretrained(config.model.name):
        licence_of(config.model.name, config.model.licence)
    if config.data.features != NONE:  # whatever is missing is named before data are read
        _check_features(config)
    data = data_of(config)
    check_persons_named(data)
    targets = targets_of(config)
    if data.at_nodes:
        found = described_at_nodes(data, targets) if table is None else read_at_node(data, targets, table)
    elif not data.brought:
        found = load(data.name, data_dir, warn, write_cache=write_cache)
    else:  # nothing is kept beyond a run: what was there may have changed since
        own = load_brought(data, targets) if given is NOTHING else given.read(data, targets)
        _check_persons_apart(own)
        found = own.noted(_OF_SECRET if config.secret_noise else _OF_SEED, _OF_SCORES)
    keep = not (data.brought or data.at_nodes)
    return extracted(
        found,
        data.features,
        data.feature_options,
        warn,
        progress,
        digest=data.features_digest,
        keep=keep,
        write_cache=write_cache,
    )


def _check_features(config: RunConfig) -> None:
    """Raise if the features are unknown, or their weights are not on this machine.

    Raises:
        ConfigError: as said, or a pretrained model would be trained on vectors.
    """
    if is_pretrained(config.model.name):
        raise ConfigError(
            f"model.name is the pretrained {config.model.name!r}, which reads texts or images, and data.features makes vectors of them: "
            "leave data.features out, or train a head on them, model.name = 'linear'"
        )
    feature_map(config.data.features, config.data.feature_options).load()


def data_of(config: RunConfig) -> DataConfig:
    """Return the settings of the data; texts for a pretrained model or encoder are read by its tokenizer, unless another is named."""
    data = config.data
    if data.tokenizer:
        return data
    if is_pretrained(data.features) and feature_map(data.features, data.feature_options).reads_texts:
        return data.model_copy(update={"tokenizer": f"{PRETRAINED}{local_folder(data.features)}"})
    return data.model_copy(update={"tokenizer": config.model.name}) if is_pretrained(config.model.name) else data


def check_persons_named(data: DataConfig) -> None:
    """Return if ``data`` may have a column that names persons, or none is asked for.

    For simulations alone: nodes with an app of their own read other data than these, and say themselves whose their records are.

    Raises:
        ConfigError: they are built-in, so that a mechanism would state what it does for persons, and protect single records.
    """
    if data.person and not (data.brought or data.at_nodes):
        raise ConfigError(
            f"data.person names the column {data.person!r}, and {data.name!r} is no table: leave data.person out, or give a table by --data"
        )


def _check_persons_apart(data: Dataset) -> None:
    """Return if nobody has both training and test rows: scores would be of rows that the model half knows.

    Raises:
        DataError: somebody has.
    """
    if data.persons is not None and data.test_persons is not None and not set(data.persons).isdisjoint(data.test_persons):
        raise DataError("data.test_path has rows of persons who have training rows too: leave these out of one of the two files")


def targets_of(config: RunConfig) -> tasks.Targets:
    """Return what a sample's target is, by the task of ``config``."""
    return tasks.create(config.task.name, 1).targets


def described(config: RunConfig, given: Given = NOTHING) -> Description:
    """Return what is public about the data of ``config``; built-in ones are not read for it.

    Raises:
        LdpflError: as :func:`load_dataset`.
    """
    data = config.data
    if data.brought or data.at_nodes:
        return Description.of(load_dataset(config, None, given=given))
    shape, outputs = image_shape(data.name)
    return Description(shape if data.features == NONE else feature_map(data.features, data.feature_options).shape(shape), outputs)
