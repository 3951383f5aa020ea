"""Public features: fixed transforms that are applied to samples before training. None was made from private data."""

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.extraction import extracted
from ldpfl.data.features.registry import feature_map, names
from ldpfl.util.user_code import is_code

__all__ = ["FeatureMap", "extracted", "feature_map", "is_code", "names"]
