"""Flower: a wrapper of a ClientApp that lets only private reports leave, a strategy that learns from them, and a grid without processes."""

from ldpfl.errors import AllDeclined, ConfigError, TooFewTakePart

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ConfigError('ldpfl.flower needs Flower: pip install "ldpfl[flower]"') from error

from ldpfl.flower.ask import Ask, Node
from ldpfl.flower.asking import Waiting
from ldpfl.flower.client_app import LdpClientApp
from ldpfl.flower.collecting import Collector, DirectCollector
from ldpfl.flower.grid import InProcessGrid
from ldpfl.flower.operator_node import OperatorNode, operator_node
from ldpfl.flower.records import RecordTask
from ldpfl.flower.relayed import RelayCollector, SumCollector, operator_relay, operator_sum
from ldpfl.flower.strategy import LdpStrategy
from ldpfl.flower.terms import RoundTerms

__all__ = [
    "AllDeclined",
    "Ask",
    "Collector",
    "DirectCollector",
    "InProcessGrid",
    "LdpClientApp",
    "LdpStrategy",
    "Node",
    "OperatorNode",
    "RecordTask",
    "RelayCollector",
    "RoundTerms",
    "SumCollector",
    "TooFewTakePart",
    "Waiting",
    "operator_node",
    "operator_relay",
    "operator_sum",
]
