"""Federated learning under local differential privacy: what leaves a client is already randomised."""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl import data as data
    from ldpfl import mechanisms as mechanisms
    from ldpfl.api import account as account
    from ldpfl.api import audit as audit
    from ldpfl.api import audit_run as audit_run
    from ldpfl.api import certify as certify
    from ldpfl.api import check as check
    from ldpfl.api import configure as configure
    from ldpfl.api import export as export
    from ldpfl.api import load_model as load_model
    from ldpfl.api import load_run as load_run
    from ldpfl.api import plan as plan
    from ldpfl.api import plan_regime as plan_regime
    from ldpfl.api import predict as predict
    from ldpfl.api import reproduce as reproduce
    from ldpfl.api import run as run
    from ldpfl.api import sweep as sweep
    from ldpfl.api import tune as tune
    from ldpfl.api import verify as verify
    from ldpfl.api.callbacks import Callback as Callback
    from ldpfl.api.results import ReproductionResult as ReproductionResult
    from ldpfl.api.results import RunResult as RunResult
    from ldpfl.api.results import SweepResult as SweepResult
    from ldpfl.api.tuning import TuneResult as TuneResult
    from ldpfl.errors import BudgetExhausted as BudgetExhausted
    from ldpfl.errors import ConfigError as ConfigError
    from ldpfl.errors import DataError as DataError
    from ldpfl.errors import LdpflError as LdpflError
    from ldpfl.errors import PrivacyError as PrivacyError
    from ldpfl.errors import ProtocolError as ProtocolError
    from ldpfl.mechanisms.ranges import LayerRanges as LayerRanges
    from ldpfl.models.layout import ParameterLayout as ParameterLayout
    from ldpfl.models.layout import validate_module as validate_module
    from ldpfl.privacy import Guarantee as Guarantee
    from ldpfl.util.randomness import SecureSource as SecureSource
    from ldpfl.util.randomness import SeededStreams as SeededStreams
    from ldpfl.version import __version__ as __version__

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "BudgetExhausted": "ldpfl.errors",
        "Callback": "ldpfl.api.callbacks",
        "ConfigError": "ldpfl.errors",
        "DataError": "ldpfl.errors",
        "Guarantee": "ldpfl.privacy",
        "LayerRanges": "ldpfl.mechanisms.ranges",
        "LdpflError": "ldpfl.errors",
        "ParameterLayout": "ldpfl.models.layout",
        "PrivacyError": "ldpfl.errors",
        "ProtocolError": "ldpfl.errors",
        "ReproductionResult": "ldpfl.api.results",
        "RunResult": "ldpfl.api.results",
        "SecureSource": "ldpfl.util.randomness",
        "SeededStreams": "ldpfl.util.randomness",
        "SweepResult": "ldpfl.api.results",
        "TuneResult": "ldpfl.api.tuning",
        "__version__": "ldpfl.version",
        "account": "ldpfl.api",
        "audit": "ldpfl.api",
        "audit_run": "ldpfl.api",
        "certify": "ldpfl.api",
        "check": "ldpfl.api",
        "configure": "ldpfl.api",
        "data": "ldpfl.data",
        "export": "ldpfl.api",
        "load_model": "ldpfl.api",
        "load_run": "ldpfl.api",
        "mechanisms": "ldpfl.mechanisms",
        "plan": "ldpfl.api",
        "plan_regime": "ldpfl.api",
        "predict": "ldpfl.api",
        "reproduce": "ldpfl.api",
        "run": "ldpfl.api",
        "sweep": "ldpfl.api",
        "tune": "ldpfl.api",
        "validate_module": "ldpfl.models.layout",
        "verify": "ldpfl.api",
    },
)
__all__ = [name for name in __dir__() if not name.startswith("_")] + ["__version__"]
