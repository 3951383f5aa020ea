"""A page about a plan: what a federation would guarantee and cost, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.planning.planner import Setting, plan
from ldpfl.experiments.planning.regimes import RegimeRequest, plan_regime
from ldpfl.privacy.guarantee import Statement, worth_of
from ldpfl.report.plots import plot_protection
from ldpfl.report.privacy import plan_lines, plan_title, regime_lines, regime_title
from ldpfl.report.rendering import guarantee_values, inline, rendered
from ldpfl.util.files import from_json, read_text


def plan_page(path: Path) -> str:
    """Return the page of the plan in a file that ``ldpfl plan --json`` wrote. The plan is computed again from its arguments.

    Raises:
        DataError: the file is no plan, or a figure in it is out of range.
    """
    try:
        stored: Any = from_json(read_text(path))
        return _regime_page(stored) if "regime" in stored else _setting_page(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole plan"
        raise DataError(f"{path} is not a valid plan ({place}: {first['msg']}): write it again with ldpfl plan --json") from error
    except ConfigError as error:
        raise DataError(f"{path} is not a valid plan ({error}): write it again with ldpfl plan --json") from error
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{path} is not a plan that ldpfl plan --json wrote ({getattr(error, 'strerror', None) or type(error).__name__}): write it "
            "again with ldpfl plan --json"
        ) from error


def _setting_page(stored: dict[str, Any]) -> str:
    """Return the page of a plan for one :class:`Setting`, whose arguments are in ``stored``, the plan's file."""
    # A plan in which nothing is protected has no epsilon. Then any number will do, because the plan does not use it.
    arguments = {field.name: stored[field.name] for field in fields(Setting)}
    result = plan(Setting(**{**arguments, "epsilon": 1.0 if arguments["epsilon"] is None else arguments["epsilon"]}))
    figures = result.to_dict()
    return _page(plan_title(figures), plan_lines(figures), result.statement)


def _regime_page(stored: dict[str, Any]) -> str:
    """Return the page of a plan for a regime (who is protected from whom). ``stored``, the plan's file, has its arguments."""
    arguments = {field.name: stored[field.name] for field in fields(RegimeRequest) if field.name in stored}
    result = plan_regime(**asdict(TypeAdapter(RegimeRequest).validate_python(arguments)))
    figures = result.to_dict()
    return _page(regime_title(figures), regime_lines(figures), result.statement)


def _page(title: str, lines: Iterable[tuple[str, str]], statement: Statement) -> str:
    """Return the page of a plan with this title, these lines of figures, and the plan's guarantee."""
    best = statement.best
    return rendered(
        "plan.html",
        title=title,
        figures=list(lines),
        verdict=statement.verdict if best else "Nothing would be protected: values leave as they are.",
        worth=worth_of(best.epsilon) if best else "bad",
        protection=inline(lambda axes: plot_protection(axes, statement), (6.2, 1.9)) if best and isfinite(best.epsilon) else "",
        held=guarantee_values(statement),
    )
