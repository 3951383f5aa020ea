"""The front door: run, sweep, plan, account and audit, with typed results; files only where a folder is given.

The command line parses, calls these functions and prints; notebooks call them too.
"""

from ldpfl.api.accounting import account, plan, released, warned
from ldpfl.api.auditing import audit, audit_run
from ldpfl.api.certifying import certify, verify
from ldpfl.api.configuring import Settings, configure, named_data
from ldpfl.api.exporting import export
from ldpfl.api.predicting import load_model, predict
from ldpfl.api.reproducing import reproduce
from ldpfl.api.running import OnRound, check, load_run, run
from ldpfl.api.sweeping import NOISE_PLOT, SCORE_PLOT, sweep
from ldpfl.planning.regimes import plan_regime

__all__ = [
    "NOISE_PLOT",
    "SCORE_PLOT",
    "OnRound",
    "Settings",
    "account",
    "audit",
    "audit_run",
    "certify",
    "check",
    "configure",
    "export",
    "load_model",
    "load_run",
    "named_data",
    "plan",
    "plan_regime",
    "predict",
    "released",
    "reproduce",
    "run",
    "sweep",
    "verify",
    "warned",
]
