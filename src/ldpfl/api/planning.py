"""What a federation would guarantee and cost, before anything is run. None of it needs PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ldpfl.report.privacy  # noqa: F401  # by which a plan and a statement show themselves
from ldpfl.api.arguments import checked
from ldpfl.errors import ConfigError
from ldpfl.planning.planner import Plan, Setting, reach
from ldpfl.planning.planner import plan as plan_setting
from ldpfl.suggestions import did_you_mean


@checked
def plan(*, target_central: float | None = None, **setting: Any) -> Plan:
    """Return what a federation would guarantee and cost, before anything is run.

        ldpfl.plan(epsilon=1.0, clients=10_000, weights=21_840, rounds=10).statement

    Args:
        target_central: solve for ``clients`` or ``epsilon``, whichever is left out, so that the run has this central epsilon.
        setting: those of :class:`ldpfl.planning.planner.Setting`; ``epsilon``, ``clients``, ``weights`` and ``rounds`` are needed.

    Raises:
        ConfigError: one is missing, unknown or out of range; or nothing reaches the target.
    """
    known = Setting.__dataclass_fields__
    for name in setting:
        if name not in known:
            raise ConfigError(f"plan has no argument {name!r}: {did_you_mean(name, known)}")
    solved = () if target_central is None else ("epsilon", "clients")
    missing = [name for name in ("epsilon", "clients", "weights", "rounds") if setting.get(name) is None and name not in solved]
    if missing:
        raise ConfigError(f"plan needs {', '.join(missing)}")
    if target_central is None:
        return plan_setting(Setting(**setting))
    found, solution = reach(target_central, **{"epsilon": None, "clients": None, **setting})
    return replace(plan_setting(found), solution=solution)
