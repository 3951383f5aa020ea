"""What a federation would guarantee, and what was released does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ldpfl.api.arguments import checked
from ldpfl.api.configuring import Settings, configured, listed
from ldpfl.api.results import RunResult
from ldpfl.errors import ConfigError
from ldpfl.experiments.calibration import settled
from ldpfl.experiments.config import RunConfig
from ldpfl.experiments.dataset import check_persons_named
from ldpfl.experiments.figures import of_extending
from ldpfl.experiments.planned_ledger import planned_ledger
from ldpfl.experiments.run_folder import RunFolder
from ldpfl.experiments.secret_seed import of_shared_seeds
from ldpfl.planning.planner import Plan, Setting, reach
from ldpfl.planning.planner import plan as plan_setting
from ldpfl.privacy import Ledger
from ldpfl.privacy.guarantee import Statement
from ldpfl.privacy.statement import DELTA, account_together
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


@checked
def account(
    what: Ledger | RunResult | RunConfig | str | Path,
    *others: Ledger | RunResult | RunConfig | str | Path,
    settings: Settings = (),
    delta: float | None = None,
    colluding: int = 0,
) -> Statement:
    """Return what a ledger guarantees to the client that took part most often.

    Args:
        what: a ledger, its file, a run's folder, or a result; or a recipe or config, for what it would release.
        others: more of them, on the same clients' data: what a client sent in all of them adds up.
        settings: changes of a recipe or config.
        delta: failure probability; by default that of the run, or 1e-5.
        colluding: clients that tell the adversary what they sent.

    Raises:
        ConfigError: delta or colluding is out of range, there is no such run, it released nothing yet, or what a recipe releases
            depends on how it goes.
        DataError: a file is damaged.
    """
    found = [released(one, settings) for one in (what, *others)]
    ledgers, chosen = [ledger for ledger, _ in found], max(own for _, own in found)
    return warned(account_together(ledgers, chosen if delta is None else delta, colluding), (what, *others))


def warned(statement: Statement, of: Iterable[Ledger | RunResult | RunConfig | str | Path]) -> Statement:
    """Return ``statement`` of all these together, with a warning of each thing in how they were run that it rests on."""
    runs = [run for one in of if (run := _run_of(one)) is not None]
    said = [line for config, _ in runs for line in of_extending(config)]
    said += of_shared_seeds(config for config, simulated in runs if simulated)
    return replace(statement, warnings=(*statement.warnings, *said))


def _run_of(what: Ledger | RunResult | RunConfig | str | Path) -> tuple[RunConfig, bool] | None:
    """Return the config of a run that was made, and whether it was simulated; None of anything else."""
    if isinstance(what, RunResult):
        return what.config, True
    if isinstance(what, str | Path) and Path(what).is_dir():
        folder = RunFolder(Path(what))
        return folder.config(), not folder.kind().on_flower
    return None


def released(what: Ledger | RunResult | RunConfig | str | Path, settings: Settings = ()) -> tuple[Ledger, float]:
    """Return the events that :func:`account` accounts, and the delta that was chosen for them.

    Raises:
        ConfigError, DataError: as :func:`account`.
    """
    ledger, chosen = _released(what, settings)
    if not ledger.events:
        named = f"{what}: " if isinstance(what, str | Path) else ""
        raise ConfigError(f"{named}the ledger is empty, nothing was released yet")
    return ledger, chosen


def _released(what: Ledger | RunResult | RunConfig | str | Path, settings: Settings) -> tuple[Ledger, float]:
    if isinstance(what, Ledger):
        return what, DELTA
    if isinstance(what, RunResult):
        return what.ledger, what.config.privacy.delta
    path = None if isinstance(what, RunConfig) else Path(what)
    is_file = path is not None and (path.suffix == ".json" or (path.is_file() and path.suffix != ".toml"))
    if path is None or not (path.is_dir() or is_file):
        config = configured(what, listed(settings))
        check_persons_named(config.data)
        return planned_ledger(settled(config)), config.privacy.delta
    if settings:
        raise ConfigError("settings change a recipe, not a run that was made")
    if is_file:
        return Ledger.load(path), DELTA
    folder = RunFolder(path)
    chosen = folder.config().privacy.delta  # which names what is missing or damaged there
    return folder.ledger(), chosen
