"""What public, frozen transforms make of samples before anything is trained. No private data are behind any of them."""

from ldpfl.data.features.base import FeatureMap
from ldpfl.data.features.extraction import extracted
from ldpfl.data.features.registry import feature_map, names
from ldpfl.util.user_code import is_code

__all__ = ["FeatureMap", "extracted", "feature_map", "is_code", "names"]
