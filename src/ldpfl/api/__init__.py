"""The public API: run, sweep, plan, account and audit, with typed results. Files are written only where a folder is given.

The command line parses arguments, calls these functions and prints; notebooks call them, too. Each function is imported when it is first
used: planning, accounting and verifying need no PyTorch.
"""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.api.accounting import account as account
    from ldpfl.api.accounting import released as released
    from ldpfl.api.accounting import warned as warned
    from ldpfl.api.arguments import Settings as Settings
    from ldpfl.api.attacking import attack_linkage as attack_linkage
    from ldpfl.api.attacking import attack_runs as attack_runs
    from ldpfl.api.auditing import audit as audit
    from ldpfl.api.auditing import audit_run as audit_run
    from ldpfl.api.auditing import is_mechanism as is_mechanism
    from ldpfl.api.auditing import require_run as require_run
    from ldpfl.api.beginning import begin_app as begin_app
    from ldpfl.api.beginning import begin_config as begin_config
    from ldpfl.api.beginning import begin_mechanism as begin_mechanism
    from ldpfl.api.callbacks import Callback as Callback
    from ldpfl.api.callbacks import OnRound as OnRound
    from ldpfl.api.certifying import certify as certify
    from ldpfl.api.configuring import configure as configure
    from ldpfl.api.configuring import named_data as named_data
    from ldpfl.api.configuring import overrides_of as overrides_of
    from ldpfl.api.exporting import export as export
    from ldpfl.api.exporting import given_seed as given_seed
    from ldpfl.api.listing import list_settings as list_settings
    from ldpfl.api.listing import mechanism_names as mechanism_names
    from ldpfl.api.listing import recipes as recipes
    from ldpfl.api.listing import reproductions as reproductions
    from ldpfl.api.listing import sweeps as sweeps
    from ldpfl.api.paging import page as page
    from ldpfl.api.planning import check_plot as check_plot
    from ldpfl.api.planning import cost as cost
    from ldpfl.api.planning import draw_plan as draw_plan
    from ldpfl.api.planning import plan as plan
    from ldpfl.api.predicting import load_model as load_model
    from ldpfl.api.predicting import predict as predict
    from ldpfl.api.predicting import predict_csv as predict_csv
    from ldpfl.api.regimes import plan_regime as plan_regime
    from ldpfl.api.reproducing import reproduce as reproduce
    from ldpfl.api.running import check as check
    from ldpfl.api.running import load_run as load_run
    from ldpfl.api.running import prepare as prepare
    from ldpfl.api.running import run as run
    from ldpfl.api.showing import show as show
    from ldpfl.api.sweeping import NOISE_PLOT as NOISE_PLOT
    from ldpfl.api.sweeping import SCORE_PLOT as SCORE_PLOT
    from ldpfl.api.sweeping import sweep as sweep
    from ldpfl.api.sweeping import sweep_config as sweep_config
    from ldpfl.api.tuning import tune as tune
    from ldpfl.api.tuning import tuned_settings as tuned_settings
    from ldpfl.api.verifying import verify as verify
    from ldpfl.auditing import ERROR_RATE as ERROR_RATE
    from ldpfl.data.loading import DATA_DIR_VARIABLE as DATA_DIR_VARIABLE
    from ldpfl.experiments.shipped import DEFAULT as DEFAULT
    from ldpfl.experiments.shipped import OWN as OWN
    from ldpfl.experiments.sweep_config import MOST_SEEDS as MOST_SEEDS
    from ldpfl.privacy.statement import DELTA as DELTA
    from ldpfl.server import RoundMetrics as RoundMetrics

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "Callback": "ldpfl.api.callbacks",
        "DATA_DIR_VARIABLE": "ldpfl.data.loading",
        "DEFAULT": "ldpfl.experiments.shipped",
        "DELTA": "ldpfl.privacy.statement",
        "ERROR_RATE": "ldpfl.auditing",
        "MOST_SEEDS": "ldpfl.experiments.sweep_config",
        "NOISE_PLOT": "ldpfl.api.sweeping",
        "OWN": "ldpfl.experiments.shipped",
        "OnRound": "ldpfl.api.callbacks",
        "RoundMetrics": "ldpfl.server",
        "SCORE_PLOT": "ldpfl.api.sweeping",
        "Settings": "ldpfl.api.arguments",
        "account": "ldpfl.api.accounting",
        "attack_linkage": "ldpfl.api.attacking",
        "attack_runs": "ldpfl.api.attacking",
        "audit": "ldpfl.api.auditing",
        "audit_run": "ldpfl.api.auditing",
        "begin_app": "ldpfl.api.beginning",
        "begin_config": "ldpfl.api.beginning",
        "begin_mechanism": "ldpfl.api.beginning",
        "certify": "ldpfl.api.certifying",
        "check": "ldpfl.api.running",
        "check_plot": "ldpfl.api.planning",
        "configure": "ldpfl.api.configuring",
        "cost": "ldpfl.api.planning",
        "draw_plan": "ldpfl.api.planning",
        "export": "ldpfl.api.exporting",
        "given_seed": "ldpfl.api.exporting",
        "is_mechanism": "ldpfl.api.auditing",
        "list_settings": "ldpfl.api.listing",
        "load_model": "ldpfl.api.predicting",
        "load_run": "ldpfl.api.running",
        "mechanism_names": "ldpfl.api.listing",
        "named_data": "ldpfl.api.configuring",
        "overrides_of": "ldpfl.api.configuring",
        "page": "ldpfl.api.paging",
        "plan": "ldpfl.api.planning",
        "plan_regime": "ldpfl.api.regimes",
        "predict": "ldpfl.api.predicting",
        "predict_csv": "ldpfl.api.predicting",
        "recipes": "ldpfl.api.listing",
        "prepare": "ldpfl.api.running",
        "released": "ldpfl.api.accounting",
        "reproduce": "ldpfl.api.reproducing",
        "reproductions": "ldpfl.api.listing",
        "require_run": "ldpfl.api.auditing",
        "run": "ldpfl.api.running",
        "show": "ldpfl.api.showing",
        "sweep_config": "ldpfl.api.sweeping",
        "sweep": "ldpfl.api.sweeping",
        "sweeps": "ldpfl.api.listing",
        "tune": "ldpfl.api.tuning",
        "tuned_settings": "ldpfl.api.tuning",
        "verify": "ldpfl.api.verifying",
        "warned": "ldpfl.api.accounting",
    },
)
__all__ = __dir__()
