"""Federated learning under local differential privacy: what leaves a client is already randomised."""

from importlib.metadata import version

from ldpfl import mechanisms
from ldpfl.errors import BudgetExhausted, ConfigError, DataError, LdpflError, PrivacyError, ProtocolError
from ldpfl.layout import ParameterLayout, validate_module
from ldpfl.privacy import Guarantee
from ldpfl.randomness import SecureSource, SeededStreams
from ldpfl.ranges import LayerRanges

__version__ = version("ldpfl")

__all__ = [
    "BudgetExhausted",
    "ConfigError",
    "DataError",
    "Guarantee",
    "LayerRanges",
    "LdpflError",
    "ParameterLayout",
    "PrivacyError",
    "ProtocolError",
    "SecureSource",
    "SeededStreams",
    "__version__",
    "mechanisms",
    "validate_module",
]
