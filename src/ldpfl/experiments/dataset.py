"""The data that a config names, with the features that it names in their place."""

from __future__ import annotations

import logging
from pathlib import Path

from ldpfl.data import Dataset, load
from ldpfl.data.loading import Warn, image_shape
from ldpfl.experiments.config import DataConfig
from ldpfl.features import extracted, feature_map
from ldpfl.features.extraction import Progress, quietly
from ldpfl.features.registry import NONE

_LOG = logging.getLogger(__name__)


def load_dataset(config: DataConfig, data_dir: Path | None, warn: Warn = _LOG.warning, progress: Progress = quietly) -> Dataset:
    """Return the data of ``config``; features are computed once and cached.

    Raises:
        LdpflError: the data or the features are unknown, cannot be read, or do not fit each other.
    """
    return extracted(load(config.name, data_dir, warn), config.features, config.feature_options, warn, progress)


def input_shape(config: DataConfig) -> tuple[tuple[int, ...], int]:
    """Return the shape of one sample as the model sees it, and the number of classes, without reading the data.

    Raises:
        ConfigError: as :func:`load_dataset`.
    """
    shape, classes = image_shape(config.name)
    if config.features == NONE:
        return shape, classes
    return feature_map(config.features, config.feature_options).shape(shape), classes
