"""What a federation would guarantee and cost, before anything is run. None of it needs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ldpfl.report.privacy  # noqa: F401  # by which a plan and a statement show themselves
from ldpfl.api.arguments import checked
from ldpfl.deploy.cost import RoundCost, round_cost
from ldpfl.deploy.sum_cost import SumCost, sum_cost
from ldpfl.errors import ConfigError
from ldpfl.experiments.planning.planner import (
    MOST_CLIENTS,
    Plan,
    Setting,
    central_epsilon_bounds,
    check_central_is_solvable,
    client_counts_to_plot,
    plan as plan_setting,
    solve_missing_argument,
)
from ldpfl.mechanisms.lattice import LatticeMechanism
from ldpfl.util.suggestions import did_you_mean

if TYPE_CHECKING:
    from ldpfl.experiments.planning.regimes import RegimePlan  # it loads slow parts of SciPy


@checked
def plan(*, target_central: float | None = None, **setting: Any) -> Plan:
    """Return the privacy guarantee and the cost of a planned federation.

        ldpfl.plan(epsilon=1.0, clients=10_000, weights=21_840, rounds=10).statement

    Args:
        target_central: solve for ``clients`` or ``epsilon``, whichever is left out, so that the run has this central epsilon.
        setting: fields of :class:`ldpfl.experiments.planning.planner.Setting`; ``epsilon``, ``clients``, ``weights`` and ``rounds`` are
            needed.

    Raises:
        ConfigError: an argument is missing, unknown or out of range; or nothing reaches the target.
    """
    known = Setting.__dataclass_fields__
    for name in setting:
        if name not in known:
            raise ConfigError(f"plan has no argument {name!r}: {did_you_mean(name, known)}")
    solvable = () if target_central is None else ("epsilon", "clients")
    # One of the solvable arguments may be missing. If both are, solve_missing_argument raises.
    missing = [name for name in ("epsilon", "clients", "weights", "rounds") if setting.get(name) is None and name not in solvable]
    if missing:
        raise ConfigError(f"plan needs a value for {', '.join(missing)}: add {'this argument' if len(missing) == 1 else 'these arguments'}")
    if target_central is None:
        return plan_setting(Setting(**setting))
    solved_setting, solution = solve_missing_argument(target_central, **{"epsilon": None, "clients": None, **setting})
    return replace(plan_setting(solved_setting), solution=solution)


def cost(planned: Plan | RegimePlan, linked: int = 1) -> RoundCost | SumCost:
    """Return the cost of a round of a plan, over relays that mix or as a sum: bytes, processor time and memory.

    Args:
        planned: a plan, or a plan of a training regime, which is always a sum.
        linked: number of coordinates of one client that stay together over a relay that mixes.

    Raises:
        ConfigError: the channel is a sum, and the mechanism's reports are no numbers that can be added up.
    """
    if not isinstance(planned, Plan):
        return sum_cost(planned.clients, planned.weights, bits=8 * planned.bytes_per_client // planned.weights)  # bits of a weight
    setting = planned.setting
    mechanism = setting.build()
    if setting.channel != "secure-sum":
        return round_cost(mechanism, setting.ranges(), setting.cohort, linked)
    if not isinstance(mechanism, LatticeMechanism):
        raise ConfigError(
            f"the cost of a sum was asked for (--cost), but reports of the mechanism {mechanism.name!r} cannot be added up: give "
            "--mechanism dp-sgd or dp-fedavg, or another --channel"
        )
    return sum_cost(setting.cohort, setting.weights, mechanism.bits)


def check_plot(file: Path, **setting: Any) -> None:
    """Raise unless :func:`draw_plan` can draw the plan of these arguments of :func:`plan` into ``file``.

    Raises:
        ConfigError: the suffix of ``file`` names no kind of picture, or the setting has no central epsilon.
    """
    from ldpfl.report.plots import require_plot  # plots take seconds to import

    require_plot(file)
    # One of epsilon and clients may be missing, because the plan solves for it. Any valid value does for this check.
    check_central_is_solvable(Setting(**{**setting, "epsilon": setting["epsilon"] or 1.0, "clients": setting["clients"] or MOST_CLIENTS}))


def draw_plan(planned: Plan, file: Path, target_central: float | None = None, each: Callable[[list[int]], Iterable[int]] = iter) -> None:
    """Draw epsilon against the number of clients into ``file``.

    Args:
        target_central: central epsilon that is marked in the picture.
        each: function that returns its argument as an iterable. It may show the progress, because each number of clients takes a while.

    Raises:
        WriteError: the file cannot be written.
    """
    from ldpfl.report.plots import draw_epsilon_by_clients  # plots take seconds to import

    client_counts = each(client_counts_to_plot(planned.setting))
    points = [(count, *central_epsilon_bounds(planned.setting, count)) for count in client_counts]  # with lower and upper bound
    draw_epsilon_by_clients(file, planned.setting, points, target_central)
