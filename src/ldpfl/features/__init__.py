"""What public, frozen transforms make of samples before anything is trained. No private data are behind any of them."""

from ldpfl.features.base import FeatureMap
from ldpfl.features.extraction import extracted
from ldpfl.features.registry import feature_map, names
from ldpfl.importing import is_code

__all__ = ["FeatureMap", "extracted", "feature_map", "is_code", "names"]
