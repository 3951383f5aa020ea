"""Regimes of training, planned: :func:`ldpfl.experiments.planning.regimes.plan_regime`, whose plans show themselves."""

from __future__ import annotations

from rich.console import Group

from ldpfl.experiments.planning.regimes import RegimePlan, plan_regime
from ldpfl.report.privacy import regime_table
from ldpfl.util.displays import look

__all__ = ["plan_regime"]

look.register(RegimePlan, lambda plan: Group(regime_table(plan.to_dict()), plan.statement))
