"""A page about a plan: what a federation would guarantee and cost, before anything is run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ldpfl.errors import ConfigError, DataError
from ldpfl.experiments.planning.planner import Setting, plan
from ldpfl.experiments.planning.regimes import plan_regime
from ldpfl.mechanisms.settings import Part
from ldpfl.privacy.guarantee import Statement, worth_of
from ldpfl.report.plots import plot_protection
from ldpfl.report.privacy import plan_lines, plan_title, regime_lines, regime_title
from ldpfl.report.rendering import held, inline, rendered
from ldpfl.util.files import from_json, read_text


@dataclass(frozen=True)
class _AskedRegime:
    """Arguments of :func:`ldpfl.experiments.planning.regimes.plan_regime`."""

    regime: str
    target: float
    clients: int
    weights: int
    rounds: int
    records: int
    group: int
    linked: int
    colluding: int
    delta: float
    part: Part
    evaluation_epsilon: float = 0.0


def plan_page(path: Path) -> str:
    """Return the page of a plan in the file that ``ldpfl plan --json`` wrote; what is planned is computed anew from what was asked.

    Raises:
        DataError: the file is no plan, or a figure in it is out of range.
    """
    try:
        found: Any = from_json(read_text(path))
        return _of_regime(found) if "regime" in found else _of_setting(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path} is no plan: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ConfigError as error:
        raise DataError(f"{path} is no plan that can be made: {error}") from error
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise DataError(
            f"{path} is no plan, as ldpfl plan --json writes it: {getattr(error, 'strerror', None) or type(error).__name__}"
        ) from error


def _of_setting(found: dict[str, Any]) -> str:
    # Of a plan in which nothing is protected there is no epsilon.
    asked = {field.name: found[field.name] for field in fields(Setting)}
    made = plan(Setting(**{**asked, "epsilon": 1.0 if asked["epsilon"] is None else asked["epsilon"]}))
    figures = made.to_dict()
    return _rendered(plan_title(figures), plan_lines(figures), made.statement)


def _of_regime(found: dict[str, Any]) -> str:
    asked = TypeAdapter(_AskedRegime).validate_python(
        {field.name: found[field.name] for field in fields(_AskedRegime) if field.name in found}
    )
    made = plan_regime(**asdict(asked))
    figures = made.to_dict()
    return _rendered(regime_title(figures), regime_lines(figures), made.statement)


def _rendered(title: str, lines: Iterable[tuple[str, str]], statement: Statement) -> str:
    best = statement.best
    return rendered(
        "plan.html",
        title=title,
        figures=list(lines),
        verdict=statement.verdict if best else "Nothing would be protected: values leave as they are.",
        worth=worth_of(best.epsilon) if best else "bad",
        protection=inline(lambda axes: plot_protection(axes, statement), (6.2, 1.9)) if best and isfinite(best.epsilon) else "",
        held=held(statement),
    )
