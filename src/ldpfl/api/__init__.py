"""The front door: run, sweep, plan, account and audit, with typed results; files only where a folder is given.

The command line parses, calls these functions and prints; notebooks call them too. Each is imported when it is first used: planning,
accounting and verifying need no PyTorch.
"""

from typing import TYPE_CHECKING

from ldpfl import lazy

if TYPE_CHECKING:
    from ldpfl.api.accounting import account as account
    from ldpfl.api.accounting import released as released
    from ldpfl.api.accounting import warned as warned
    from ldpfl.api.arguments import Settings as Settings
    from ldpfl.api.auditing import audit as audit
    from ldpfl.api.auditing import audit_run as audit_run
    from ldpfl.api.certifying import certify as certify
    from ldpfl.api.configuring import configure as configure
    from ldpfl.api.configuring import named_data as named_data
    from ldpfl.api.exporting import export as export
    from ldpfl.api.planning import plan as plan
    from ldpfl.api.predicting import load_model as load_model
    from ldpfl.api.predicting import predict as predict
    from ldpfl.api.regimes import plan_regime as plan_regime
    from ldpfl.api.reproducing import reproduce as reproduce
    from ldpfl.api.running import OnRound as OnRound
    from ldpfl.api.running import check as check
    from ldpfl.api.running import load_run as load_run
    from ldpfl.api.running import run as run
    from ldpfl.api.sweeping import NOISE_PLOT as NOISE_PLOT
    from ldpfl.api.sweeping import SCORE_PLOT as SCORE_PLOT
    from ldpfl.api.sweeping import sweep as sweep
    from ldpfl.api.verifying import verify as verify

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "NOISE_PLOT": "ldpfl.api.sweeping",
        "OnRound": "ldpfl.api.running",
        "SCORE_PLOT": "ldpfl.api.sweeping",
        "Settings": "ldpfl.api.arguments",
        "account": "ldpfl.api.accounting",
        "audit": "ldpfl.api.auditing",
        "audit_run": "ldpfl.api.auditing",
        "certify": "ldpfl.api.certifying",
        "check": "ldpfl.api.running",
        "configure": "ldpfl.api.configuring",
        "export": "ldpfl.api.exporting",
        "load_model": "ldpfl.api.predicting",
        "load_run": "ldpfl.api.running",
        "named_data": "ldpfl.api.configuring",
        "plan": "ldpfl.api.planning",
        "plan_regime": "ldpfl.api.regimes",
        "predict": "ldpfl.api.predicting",
        "released": "ldpfl.api.accounting",
        "reproduce": "ldpfl.api.reproducing",
        "run": "ldpfl.api.running",
        "sweep": "ldpfl.api.sweeping",
        "verify": "ldpfl.api.verifying",
        "warned": "ldpfl.api.accounting",
    },
)
__all__ = __dir__()
