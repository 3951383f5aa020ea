"""Flower: a ClientApp wrapper that lets only private reports leave, a strategy that aggregates them, and a grid in one process."""

from typing import TYPE_CHECKING

from ldpfl.errors import AllDeclined, ConfigError, TooFewTakePart
from ldpfl.util.lazy_imports import exports, without_garbage_collection

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ConfigError('ldpfl.flower needs Flower: pip install "ldpfl[flower]"') from error

# Imported at once, not lazily: the function `operator_node` has the same name as its module.
with without_garbage_collection():
    from ldpfl.flower.operator_node import OperatorNode, operator_node

if TYPE_CHECKING:
    from ldpfl.flower.client_app import LdpClientApp as LdpClientApp
    from ldpfl.flower.grid import InProcessGrid as InProcessGrid
    from ldpfl.flower.records import RecordTask as RecordTask
    from ldpfl.flower.relay_collection import (
        RelayCollector as RelayCollector,
        SumCollector as SumCollector,
        operator_relay as operator_relay,
        operator_sum as operator_sum,
    )
    from ldpfl.flower.report_collection import Collector as Collector, DirectCollector as DirectCollector
    from ldpfl.flower.round_request import Ask as Ask, Node as Node
    from ldpfl.flower.server_invitations import Waiting as Waiting
    from ldpfl.flower.strategy import LdpStrategy as LdpStrategy
    from ldpfl.flower.terms import RoundTerms as RoundTerms

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

# Lazy imports: each message to a node starts a process, and that process needs none of the server's modules.
__getattr__, __dir__ = exports(
    __name__,
    {
        "ldpfl.flower.client_app": ("LdpClientApp",),
        "ldpfl.flower.grid": ("InProcessGrid",),
        "ldpfl.flower.records": ("RecordTask",),
        "ldpfl.flower.relay_collection": ("RelayCollector", "SumCollector", "operator_relay", "operator_sum"),
        "ldpfl.flower.report_collection": ("Collector", "DirectCollector"),
        "ldpfl.flower.round_request": ("Ask", "Node"),
        "ldpfl.flower.server_invitations": ("Waiting",),
        "ldpfl.flower.strategy": ("LdpStrategy",),
        "ldpfl.flower.terms": ("RoundTerms",),
    },
)
