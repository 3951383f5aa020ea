"""Compute the guarantee of a run, a ledger or a recipe. For a ledger's file this needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import ldpfl.report.privacy  # noqa: F401  # by which a plan and a statement show themselves
from ldpfl.api.arguments import Settings, checked
from ldpfl.errors import ConfigError
from ldpfl.privacy import Ledger
from ldpfl.privacy.accounting import DELTA, account_together
from ldpfl.privacy.guarantee import Statement
from ldpfl.privacy.ledger import LEDGER_FILE

if TYPE_CHECKING:
    from ldpfl.api.results import RunResult
    from ldpfl.experiments.config import RunConfig

_Named = TypeVar("_Named", bound="Ledger | RunResult | RunConfig | str | Path")


@checked
def account(
    what: Ledger | RunResult | RunConfig | str | Path,
    *others: Ledger | RunResult | RunConfig | str | Path,
    settings: Settings = (),
    delta: float | None = None,
    colluding: int = 0,
) -> Statement:
    """Return the privacy guarantee of runs, ledgers or recipes, for the client that took part most often.

    Args:
        what: a ledger, its file, a run's folder, or a result; or a recipe or config, for the releases that it would make.
        others: further ones on the same clients' data. A client's releases in all of them are composed.
        settings: changes of a recipe or config.
        delta: failure probability; by default the run's delta, or 1e-5.
        colluding: number of clients that tell the adversary what they sent.

    Raises:
        ConfigError: delta or colluding is out of range; there is no such run, or it has released nothing yet; a recipe's releases depend on
            the course of its run; or a config file names code, such as its model, that ``settings`` do not name as well.
        DataError: a file is damaged.
    """
    released_by_each = [released(run_or_recipe, settings) for run_or_recipe in (what, *others)]
    ledgers = [ledger for ledger, _ in released_by_each]
    default_delta = max(configured_delta for _, configured_delta in released_by_each)  # a joint guarantee has one delta for all runs
    return warned(account_together(ledgers, default_delta if delta is None else delta, colluding), (what, *others))


def warned(statement: Statement, accounted: Iterable[Ledger | RunResult | RunConfig | str | Path]) -> Statement:
    """Return the joint ``statement`` of the ``accounted`` runs and ledgers, with a warning for each assumption about how they were run."""
    # A ledger outside of a run's folder does not say how its run was made.
    runs = [run for run in map(folder_of_ledger, accounted) if not isinstance(run, Ledger) and not _is_ledger_file(run)]
    if not runs:
        return statement
    from ldpfl.api.accounted_runs import assumption_warnings  # imported late: it loads PyTorch

    return replace(statement, warnings=(*statement.warnings, *assumption_warnings(runs)))


def released(what: Ledger | RunResult | RunConfig | str | Path, settings: Settings = ()) -> tuple[Ledger, float]:
    """Return the ledger that :func:`account` accounts, and the configured delta.

    Raises:
        ConfigError, DataError: as :func:`account`.
    """
    ledger, configured_delta = _ledger_and_delta(folder_of_ledger(what), settings)
    if not ledger.events:
        prefix = f"{what}: " if isinstance(what, str | Path) else ""
        raise ConfigError(f"{prefix}the ledger is empty, because nothing was released yet: finish a round first")
    return ledger, configured_delta


def folder_of_ledger(what: _Named) -> _Named | Path:
    """Return the run's folder if ``what`` is the ledger file in it, so that the checks and caveats of the run apply; else ``what``."""
    # ``RunFolder`` defines these names, but importing it would load PyTorch.
    if isinstance(what, str | Path) and (path := Path(what)).name == LEDGER_FILE and path.with_name("config.toml").exists():
        return path.parent
    return what


def _ledger_and_delta(what: Ledger | RunResult | RunConfig | str | Path, settings: Settings) -> tuple[Ledger, float]:
    """Return the ledger of ``what``, which may be empty, and the configured delta."""
    if isinstance(what, Ledger):
        return what, DELTA
    if _is_ledger_file(what):
        if settings:
            raise ConfigError(f"settings (--set) are given, but {what} is a ledger, which has none: leave them out, or give a recipe")
        return Ledger.load(Path(what)), DELTA
    from ldpfl.api.accounted_runs import ledger_and_delta_of  # imported late: it loads PyTorch

    return ledger_and_delta_of(what, settings)


def _is_ledger_file(what: RunResult | RunConfig | str | Path) -> TypeGuard[str | Path]:
    """Whether ``what`` is the path of a ledger: any path ``*.json`` that is no folder, or an existing file that is no ``.toml`` config."""
    if not isinstance(what, str | Path):
        return False
    path = Path(what)
    return not path.is_dir() and (path.suffix == ".json" or (path.is_file() and path.suffix != ".toml"))
