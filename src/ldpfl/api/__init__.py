"""The public API: run, sweep, plan, account and audit, with typed results. Files are written only where a folder is given.

The command line parses arguments, calls these functions and prints; notebooks call them, too. Each function is imported when it is first
used: planning, accounting and verifying need no PyTorch.
"""

from typing import TYPE_CHECKING

from ldpfl.util import lazy_imports

if TYPE_CHECKING:
    from ldpfl.api.accounting import account as account, released as released, warned as warned
    from ldpfl.api.auditing import audit as audit, audit_run as audit_run, is_mechanism as is_mechanism, require_run as require_run
    from ldpfl.api.beginning import (
        begin_app as begin_app,
        begin_config as begin_config,
        begin_mechanism as begin_mechanism,
        config_of_existing_data as config_of_existing_data,
    )
    from ldpfl.api.certifying import certify as certify
    from ldpfl.api.configuring import configure as configure, overrides_of as overrides_of
    from ldpfl.api.exporting import export as export, given_seed as given_seed
    from ldpfl.api.listing import (
        list_settings as list_settings,
        mechanism_names as mechanism_names,
        recipes as recipes,
        reproductions as reproductions,
        sweeps as sweeps,
    )
    from ldpfl.api.paging import page as page
    from ldpfl.api.planning import check_plot as check_plot, cost as cost, draw_plan as draw_plan, plan as plan
    from ldpfl.api.predicting import load_model as load_model, predict as predict, predict_csv as predict_csv
    from ldpfl.api.regimes import plan_regime as plan_regime
    from ldpfl.api.reproducing import reproduce as reproduce
    from ldpfl.api.running import (
        check as check,
        load_run as load_run,
        prepare as prepare,
        run as run,
        training_cost as training_cost,
    )
    from ldpfl.api.showing import show as show
    from ldpfl.api.sweeping import NOISE_PLOT as NOISE_PLOT, sweep as sweep, sweep_config as sweep_config
    from ldpfl.api.tuning import tune as tune, tuned_settings as tuned_settings
    from ldpfl.api.verifying import verify as verify
    from ldpfl.auditing import ERROR_RATE as ERROR_RATE
    from ldpfl.data.loading import DATA_DIR_VARIABLE as DATA_DIR_VARIABLE
    from ldpfl.experiments.shipped import DEFAULT as DEFAULT, OWN as OWN
    from ldpfl.experiments.sweep_config import MOST_SEEDS as MOST_SEEDS
    from ldpfl.privacy.accounting import DELTA as DELTA
    from ldpfl.server import RoundMetrics as RoundMetrics

__getattr__, __dir__ = lazy_imports.exports(
    __name__,
    {
        "ldpfl.api.accounting": ("account", "released", "warned"),
        "ldpfl.api.auditing": ("audit", "audit_run", "is_mechanism", "require_run"),
        "ldpfl.api.beginning": ("begin_app", "begin_config", "begin_mechanism", "config_of_existing_data"),
        "ldpfl.api.certifying": ("certify",),
        "ldpfl.api.configuring": ("configure", "overrides_of"),
        "ldpfl.api.exporting": ("export", "given_seed"),
        "ldpfl.api.listing": ("list_settings", "mechanism_names", "recipes", "reproductions", "sweeps"),
        "ldpfl.api.paging": ("page",),
        "ldpfl.api.planning": ("check_plot", "cost", "draw_plan", "plan"),
        "ldpfl.api.predicting": ("load_model", "predict", "predict_csv"),
        "ldpfl.api.regimes": ("plan_regime",),
        "ldpfl.api.reproducing": ("reproduce",),
        "ldpfl.api.running": ("check", "load_run", "prepare", "run", "training_cost"),
        "ldpfl.api.showing": ("show",),
        "ldpfl.api.sweeping": ("NOISE_PLOT", "sweep", "sweep_config"),
        "ldpfl.api.tuning": ("tune", "tuned_settings"),
        "ldpfl.api.verifying": ("verify",),
        "ldpfl.auditing": ("ERROR_RATE",),
        "ldpfl.data.loading": ("DATA_DIR_VARIABLE",),
        "ldpfl.experiments.shipped": ("DEFAULT", "OWN"),
        "ldpfl.experiments.sweep_config": ("MOST_SEEDS",),
        "ldpfl.privacy.accounting": ("DELTA",),
        "ldpfl.server": ("RoundMetrics",),
    },
)
__all__ = __dir__()
