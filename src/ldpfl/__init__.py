"""Federated learning under local differential privacy: what leaves a client is already randomised."""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl import data as data, mechanisms as mechanisms
    from ldpfl.api import (
        account as account,
        audit as audit,
        audit_run as audit_run,
        certify as certify,
        check as check,
        configure as configure,
        export as export,
        load_model as load_model,
        load_run as load_run,
        plan as plan,
        plan_regime as plan_regime,
        predict as predict,
        reproduce as reproduce,
        run as run,
        sweep as sweep,
        tune as tune,
        verify as verify,
    )
    from ldpfl.api.callbacks import Callback as Callback
    from ldpfl.api.results import ReproductionResult as ReproductionResult, RunResult as RunResult, SweepResult as SweepResult
    from ldpfl.api.tuning import TuneResult as TuneResult
    from ldpfl.errors import (
        BudgetExhausted as BudgetExhausted,
        ConfigError as ConfigError,
        DataError as DataError,
        LdpflError as LdpflError,
        PrivacyError as PrivacyError,
        ProtocolError as ProtocolError,
    )
    from ldpfl.mechanisms.ranges import LayerRanges as LayerRanges
    from ldpfl.models.layout import ParameterLayout as ParameterLayout, validate_module as validate_module
    from ldpfl.privacy import Guarantee as Guarantee
    from ldpfl.util.randomness import SecureSource as SecureSource, SeededStreams as SeededStreams
    from ldpfl.version import __version__ as __version__

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "ldpfl.api": (
            "account",
            "audit",
            "audit_run",
            "certify",
            "check",
            "configure",
            "export",
            "load_model",
            "load_run",
            "plan",
            "plan_regime",
            "predict",
            "reproduce",
            "run",
            "sweep",
            "tune",
            "verify",
        ),
        "ldpfl.api.callbacks": ("Callback",),
        "ldpfl.api.results": ("ReproductionResult", "RunResult", "SweepResult"),
        "ldpfl.api.tuning": ("TuneResult",),
        "ldpfl.data": ("data",),
        "ldpfl.errors": ("BudgetExhausted", "ConfigError", "DataError", "LdpflError", "PrivacyError", "ProtocolError"),
        "ldpfl.mechanisms": ("mechanisms",),
        "ldpfl.mechanisms.ranges": ("LayerRanges",),
        "ldpfl.models.layout": ("ParameterLayout", "validate_module"),
        "ldpfl.privacy": ("Guarantee",),
        "ldpfl.util.randomness": ("SecureSource", "SeededStreams"),
        "ldpfl.version": ("__version__",),
    },
)
__all__ = [name for name in __dir__() if not name.startswith("_")] + ["__version__"]
