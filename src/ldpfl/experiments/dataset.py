"""Load the data that a config names or that a caller passes, and replace inputs by the features that the config names."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from ldpfl import tasks
from ldpfl.data import Dataset, load
from ldpfl.data.encoder import Encoder
from ldpfl.data.features import extracted, feature_map
from ldpfl.data.features.extraction import Progress, no_progress
from ldpfl.data.features.registry import NONE
from ldpfl.data.holding_out import scored_part
from ldpfl.data.loading import image_shape
from ldpfl.data.nodes import read_node_table, server_view_of_node_tables
from ldpfl.data.settings import DataConfig
from ldpfl.data.unscaled import Unscaled
from ldpfl.data.user_data import load_user_data
from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.config import RunConfig
from ldpfl.models.pretrained import licence_of, local_folder
from ldpfl.util.user_cache import Warn
from ldpfl.util.user_code import PRETRAINED, is_pretrained

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CallerObjects:
    """Data and a model that a caller passes from Python, since a config cannot name them. None where the caller passes none."""

    data: object = None
    module: nn.Module | None = None
    _loaded: dict[str, Dataset] = field(default_factory=dict, repr=False)

    def read(self, config: DataConfig, targets: tasks.Targets) -> Dataset:
        """Return a user's own data: those that the caller passed, or those that ``config`` names.

        They are read once for each config, since a caller's code might return other rows the next time.
        """
        key = f"{targets} {config.model_dump_json()}"
        if key not in self._loaded:
            self._loaded[key] = load_user_data(config, targets, self.data)
        return self._loaded[key]


NO_CALLER_OBJECTS = CallerObjects()

SIMULATION = "this is a simulation: the guarantee is that of a deployment like it, where clients draw their own noise"
SECRET_SEED_NOTE = (
    f"{SIMULATION}; here all noise follows from a secret, which the run's folder keeps in the file SECRET-seed: whoever has that file "
    "can take the noise off, so hand the model on by ldpfl export"
)
_GIVEN_SEED_NOTE = (
    f"{SIMULATION}; here all noise follows from the seed that was given, which config.toml and result.json hold: whoever knows it "
    "can take the noise off, so give no seed where the model is handed on"
)
_SCORES_NOTE = "rows are not protected: scores on them are exact figures"
NOTES_ON_ALL_OWN_DATA = (SIMULATION, f"test {_SCORES_NOTE}", f"holdout {_SCORES_NOTE}")
"""Starts of notes that every run on a user's own data has."""


@dataclass(frozen=True)
class Description:
    """Public facts about data, known before anything is trained.

    Attributes:
        shape: shape of one sample as the model sees it; None if a sample is several tensors.
        outputs: number of outputs of the model.
        vocabulary: number of tokens, if samples are texts.
        clients: number of clients that the data name; None if they name none, and a partition makes the clients.
        unscaled: columns of a table that are not scaled yet.
        encoder: encoder from rows of a table to inputs; None if the data are not a table.
        records: number of training records, or of persons if the data name persons.
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
        """Return the public facts about ``data``."""
        clients = None if data.clients is None else int(data.clients.max()) + 1
        shape = data.shape if isinstance(data.train.inputs, Tensor) else None
        return cls(shape, data.outputs, data.tokens(), clients, data.unscaled, data.encoder, _count_records(data))


def _count_records(data: Dataset) -> int:
    """Return the number of training samples, or of persons if the data name them. The same name at two clients counts as two persons."""
    if data.persons is None:
        return len(data.train)
    clients = [0] * len(data.persons) if data.clients is None else data.clients.tolist()
    return len(set(zip(clients, data.persons.tolist(), strict=True)))


def load_dataset(
    config: RunConfig,
    data_dir: Path | None,
    warn: Warn = _LOG.warning,
    progress: Progress = no_progress,
    caller_objects: CallerObjects = NO_CALLER_OBJECTS,
    table: Path | None = None,
    *,
    write_cache: bool = True,
) -> Dataset:
    """Return the data of ``config``, with inputs replaced by the features that ``config`` names.

    Features of built-in data are computed once and then cached. Features of a user's or a node's own data are never stored.

    Args:
        data_dir: folder of built-in data; None for the default.
        warn, progress: functions that are called with warnings, and with the progress of computing features.
        caller_objects: data that a caller passes from Python.
        table: file of a node's own table, if ``config`` says that the data are at nodes. None returns the server's stand-in for it.
        write_cache: whether new features may be written to the cache. Features that are in it are read in any case.

    Raises:
        LdpflError: the data or the features are unknown, cannot be read, or do not fit each other.
    """
    if is_pretrained(config.model.name):
        licence_of(config.model.name, config.model.licence)  # raises if no licence is stated
    if config.data.features != NONE:  # fail before the data are read, which may take long
        _check_features(config)
    settings = data_settings_of(config)
    check_persons_named(settings)
    targets = target_kind_of(config)
    if settings.at_nodes:
        data = server_view_of_node_tables(settings, targets) if table is None else read_node_table(settings, targets, table)
    elif not settings.brought:
        data = load(settings.name, data_dir, warn, write_cache=write_cache)
    else:  # NO_CALLER_OBJECTS would keep the data for all later runs, but files may change, so it is not asked
        data = load_user_data(settings, targets) if caller_objects is NO_CALLER_OBJECTS else caller_objects.read(settings, targets)
        _check_no_person_in_both(data)
        scores_note = f"{scored_part(settings.evaluate_on)} {_SCORES_NOTE}"
        data = data.with_notes(SECRET_SEED_NOTE if config.secret_noise else _GIVEN_SEED_NOTE, scores_note)
    is_built_in, name, options = not (settings.brought or settings.at_nodes), settings.features, settings.feature_options
    return extracted(data, name, options, warn, progress, digest=settings.features_digest, keep=is_built_in, write_cache=write_cache)


def _check_features(config: RunConfig) -> None:
    """Raise if the features cannot be computed.

    Raises:
        ConfigError: the features are unknown, their weights are not on this machine, or a pretrained model would be trained on them.
    """
    if is_pretrained(config.model.name):
        raise ConfigError(
            f"model.name is the pretrained {config.model.name!r}, which reads texts or images, but data.features turns these into "
            "vectors: leave data.features out, or train a head on the vectors, with model.name = 'linear'"
        )
    feature_map(config.data.features, config.data.feature_options).load()


def data_settings_of(config: RunConfig) -> DataConfig:
    """Return the settings of the data. A missing tokenizer is filled in: that of the pretrained model or encoder that reads the texts."""
    data = config.data
    if data.tokenizer:
        return data
    if is_pretrained(data.features) and feature_map(data.features, data.feature_options).reads_texts:
        return data.model_copy(update={"tokenizer": f"{PRETRAINED}{local_folder(data.features)}"})
    return data.model_copy(update={"tokenizer": config.model.name}) if is_pretrained(config.model.name) else data


def check_persons_named(data: DataConfig) -> None:
    """Raise if ``data`` are built-in data, which have no column of persons, and name such a column.

    The guarantee would then be stated for persons, but hold for single records only. Only simulations are checked: a user's own app on
    Flower reads other data, and itself states which records belong to a person.

    Raises:
        ConfigError: ``data.person`` is set for built-in data.
    """
    if data.person and not (data.brought or data.at_nodes):
        raise ConfigError(
            f"data.person names the column {data.person!r}, but {data.name!r} is not a table: leave data.person out, or give --data a table"
        )


def _check_no_person_in_both(data: Dataset) -> None:
    """Raise if a person has both training and test rows. Scores would then be too good, since the model has seen that person.

    Raises:
        DataError: there is such a person.
    """
    if data.persons is not None and data.test_persons is not None and not set(data.persons).isdisjoint(data.test_persons):
        raise DataError("some persons have rows in both data.path and data.test_path: remove their rows from one of the two files")


def target_kind_of(config: RunConfig) -> tasks.Targets:
    """Return the kind of target, such as a class or a number, that the task of ``config`` predicts."""
    return tasks.create(config.task.name, 1).targets  # a task needs a number of outputs, here 1, which does not affect its kind


def describe_data(config: RunConfig, caller_objects: CallerObjects = NO_CALLER_OBJECTS) -> Description:
    """Return the public facts about the data of ``config``. Built-in data are not read for this.

    Raises:
        LdpflError: as :func:`load_dataset`.
    """
    data = config.data
    if data.brought or data.at_nodes:
        return Description.of(load_dataset(config, None, caller_objects=caller_objects))
    shape, outputs = image_shape(data.name)
    return Description(shape if data.features == NONE else feature_map(data.features, data.feature_options).shape(shape), outputs)
